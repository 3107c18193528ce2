from dataclasses import fields
from pathlib import Path

from bloomery.cli.config import explain, reference
from bloomery.config.environment import PROFILES
from bloomery.config.load import load_recipe, sections
from bloomery.config.setting import declaration_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "settings.md"


def test_the_reference_page_is_what_the_code_generates():
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `bloomery config reference --write`"


def test_every_setting_is_explained_with_value_source_and_kind():
    rows = {row.key: row for row in explain(load_recipe("demo", ["train.global_batch=16"]))}
    assert len(rows) == sum(len(fields(section)) for section in sections().values())
    assert rows["train.global_batch"].value == "16"
    assert rows["train.global_batch"].source == "command line"
    assert rows["train.global_batch"].kind == "journalled"
    assert rows["run.name"].source.startswith("demo.toml:")


def test_a_batch_between_peers_is_explained_as_that_of_each_peer():
    def helps(*overrides: str) -> dict[str, str]:
        return {
            row.key: row.help for row in explain(load_recipe("demo", ["train.global_batch=16", *overrides]))
        }

    alone, between = helps(), helps("elastic.inner_steps=10", "elastic.peers=3")
    assert between["train.global_batch"].endswith(
        "the planned 3 peers use 48 samples per step, and schedules count the samples of all peers."
    )
    assert [key for key in alone if alone[key] != between[key]] == ["train.global_batch"]


def test_every_setting_says_what_it_means_in_a_sentence():
    for name, section in sections().items():
        for field in fields(section):
            assert declaration_of(field).help.endswith((".", "'.")), f"{name}.{field.name}"
            assert section.__doc__


def test_only_free_settings_are_read_at_the_start():
    for section in sections().values():
        for field in fields(section):
            assert declaration_of(field).kind == "free" or not declaration_of(field).at_start


def test_the_variables_of_the_chosen_profiles_are_told_with_their_setting():
    rows = {row.key: row.help for row in explain(load_recipe("demo"))}
    both = {
        row.key: row.help for row in explain(load_recipe("demo", [f"environment.profiles={[*PROFILES]}"]))
    }
    assert [key for key in rows if rows[key] != both[key]] == ["environment.profiles"]
    told = both["environment.profiles"].removeprefix(rows["environment.profiles"])
    assert told.startswith(" Chosen: nccl-infiniband: NCCL_NET=IB NCCL_IB_DISABLE=0 ")
    assert "; nccl-tcp: NCCL_NET=Socket NCCL_IB_DISABLE=1 " in told and told.endswith(".")
