"""Where recipes are found, what their weights complete, and what the network's switch and profiles set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.config.test_load_recipe import MINIMAL

from bloomery.config.begin_from import DescribedWeights, take_described, weights_directory
from bloomery.config.environment import (
    PROFILES,
    EnvironmentSection,
    OfflineRefused,
    go_offline,
    is_offline,
    refuse_network,
    variables_of,
)
from bloomery.config.find import find_recipe, is_run, name_of, run_path, shipped_recipes
from bloomery.config.findings import divisors, nearest_numbers, shown_value
from bloomery.config.load import load_recipe, override, parse_recipe
from bloomery.config.peer_settings import no_rounds_mistake
from bloomery.config.resume import SettingChanges, apply_free, compare, refuse_fixed
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError


def refusal(call: Callable[[], object]) -> tuple[str, object, str, str, str]:
    with pytest.raises(ConfigError) as refused:
        call()
    (one,) = refused.value.mistakes
    return one.key, one.value, one.source, one.problem, one.remedy


def make_run(path: Path) -> Path:
    (path / "incarnations").mkdir(parents=True)
    (path / "recipe.toml").write_text(MINIMAL)
    return path


def test_a_recipe_is_found_by_name_by_path_or_by_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "mine")
    assert find_recipe("demo") == shipped_recipes()["demo"]
    assert find_recipe("mine") == Path("mine/recipe.toml")
    assert find_recipe(str(run)) == run / "recipe.toml"
    (tmp_path / "a.toml").write_text(MINIMAL)
    (tmp_path / "plain").write_text(MINIMAL)
    assert find_recipe("a.toml") == Path("a.toml") and find_recipe("plain") == Path("plain")
    (tmp_path / "demo.toml").mkdir()
    shipped = ", ".join(shipped_recipes())
    for given, problem, remedy in (
        ("demos", "there is no recipe of this name", f"Did you mean 'demo'? Shipped: {shipped}. "),
        ("zzzzzz", "there is no recipe of this name", f"Shipped: {shipped}. "),
    ):
        told = refusal(lambda given=given: find_recipe(given))  # type: ignore[misc]
        assert told[:4] == ("recipe", given, "command line", problem)
        assert told[4] == f"{remedy}Give your own recipe as a path that ends in .toml."
    (tmp_path / "empty").mkdir()
    assert refusal(lambda: find_recipe("empty"))[3:] == (
        "is a directory without recipe.toml, so it is no run",
        "Give a .toml file, a shipped recipe's name, or a run's directory: runs/NAME.",
    )
    assert refusal(lambda: find_recipe("demo.toml"))[3:] == (
        "is a directory",
        "Give the .toml file inside it.",
    )
    for missing in ("x/none.toml", "x/none"):
        assert refusal(lambda missing=missing: find_recipe(missing))[3:] == (  # type: ignore[misc]
            "there is no such file",
            "Check the path; `bloomery config show demo` shows a recipe.",
        )
    checkpoint = run / "checkpoints" / "step-9"
    checkpoint.mkdir(parents=True)
    assert refusal(lambda: find_recipe(str(checkpoint)))[3:] == (
        "is a checkpoint",
        f"Go on with its run: {run}. Or begin another from it: a recipe and init.from={checkpoint}.",
    )
    of_no_run, of_run = tmp_path / "other" / "checkpoints" / "step-9", run / "logs" / "step-9"
    for place in (of_no_run, of_run):
        place.mkdir(parents=True)
        assert refusal(lambda place=place: find_recipe(str(place)))[3] == "is a directory"


def test_the_directory_of_a_run_is_the_one_given_or_the_recipes_or_that_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "mine")
    make_run(tmp_path / "demo")
    assert run_path("mine", run=None, name="small") == Path("mine") and is_run(run)
    assert run_path("mine", run="other", name="small") == Path("other")
    assert run_path("demo", run=None, name="demo") == Path("runs/demo"), "the name of a shipped recipe"
    assert find_recipe("demo") == shipped_recipes()["demo"]
    assert run_path("a.toml", run=None, name="small") == Path("runs/small")
    (run / "incarnations").rmdir()
    assert not is_run(run) and run_path("mine", run=None, name="small") == Path("runs/small")


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("runs/mine", "mine"),
        ("runs/my import", "my-import"),
        ("Versuch ü", "Versuch-ü"),
        ("..a", "a"),
        ("/", "run"),
    ],
)
def test_a_run_is_named_after_its_directory_with_what_a_name_may_have(directory: str, name: str) -> None:
    assert name_of(Path(directory)) == name
    loaded = parse_recipe(MINIMAL, [f"run.name='{name}'"], label="r.toml")
    check_recipe(loaded.recipe, loaded.sources)


def test_a_run_is_named_after_the_directory_that_a_path_leads_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my run" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "my run")
    assert name_of(Path()) == name_of(Path("deep/..")) == "my-run" and name_of(Path("deep")) == "deep"


def test_weights_lie_in_a_directory_that_holds_some(tmp_path: Path) -> None:
    assert refusal(lambda: weights_directory(str(tmp_path / "none"))) == (
        "init.from", str(tmp_path / "none"), "init.from", "there is no such directory",
        "Check the path. A run that began with these weights goes on without them: bloomery train RUN.",
    )  # fmt: skip
    assert refusal(lambda: weights_directory(str(tmp_path)))[3:] == (
        "holds no config.json, and is neither a run nor a checkpoint of ours",
        "Give a directory written by save_pretrained, runs/NAME, or runs/NAME/checkpoints/step-….",
    )
    for name in ("config.json", "manifest.json", "recipe.toml", ".metadata", "w.pt"):
        (tmp_path / name).touch()
        assert weights_directory(str(tmp_path)) == tmp_path
        (tmp_path / name).unlink()


WEIGHTS = DescribedWeights(
    place="there",
    model={"hidden": 32, "position": "rotary", "rope_theta": 1e4, "init_std": 0.02, "tied": True},
    tokenizer="there/tokenizer.json",
    end_of_document="<end>",
)
TOKENIZER = "a new tokenizer would give other ids than those that there was trained on"


def taken(
    model: dict[str, Any], data: dict[str, Any], *more: DescribedWeights
) -> tuple[dict[str, Any], dict[str, str], list[tuple[str, object, str, str]], tuple[str, ...]]:
    raw: dict[str, Any] = {"model": model, "data": data}
    places = {"model.hidden": "a.toml:3"}
    wrongs, notes = take_described(raw, places, iter(more or (WEIGHTS,)))
    return raw, places, [(one.key, one.value, one.problem, one.remedy) for one in wrongs], notes


def test_what_a_recipe_leaves_open_is_taken_from_its_weights() -> None:
    raw, places, wrongs, notes = taken({"hidden": 32, "rope_theta": "auto"}, {})
    assert raw["model"] == WEIGHTS.model | {"rope_theta": 1e4}
    assert raw["data"] == {"tokenizer": "there/tokenizer.json", "end_of_document_token": "<end>"}
    assert places == {
        "model.hidden": "a.toml:3",
        **dict.fromkeys(
            (
                *("model.position", "model.rope_theta", "model.init_std", "model.tied"),
                *("data.tokenizer", "data.end_of_document_token"),
            ),
            "there",
        ),
    }
    assert (wrongs, notes) == ([], ())
    own = {"tokenizer": "mine.json", "end_of_document_token": ""}
    assert taken({}, dict(own))[0]["data"] == own
    assert "end_of_document_token" not in taken({}, {}, replace(WEIGHTS, end_of_document=""))[0]["data"]


def test_what_contradicts_the_weights_is_refused_and_the_first_description_decides() -> None:
    def never() -> Iterator[DescribedWeights]:
        yield WEIGHTS
        raise AssertionError("nothing more is asked for")

    raw: dict[str, Any] = {"model": {"hidden": 64}}
    wrongs, notes = take_described(raw, {}, never())
    assert notes == () and [(one.key, one.value, one.problem, one.remedy) for one in wrongs] == [
        (
            "model.hidden", 64, "the weights in there have 32",
            "Leave it out, or begin from weights of this shape.",
        )
    ]  # fmt: skip
    assert raw == {"model": {"hidden": 64}, "data": {}}
    later = taken({"hidden": 64}, {}, replace(WEIGHTS, model={"position": "rotary"}), WEIGHTS)
    assert [wrong[0] for wrong in later[2]] == ["model.hidden"]
    assert taken({"tied": False}, {})[2] == [], "the weights may hold a head of their own"
    untied = replace(WEIGHTS, model={"position": "rotary", "tied": False})
    assert [wrong[0] for wrong in taken({"tied": True}, {}, untied)[2]] == ["model.tied"]
    assert taken({"hidden": "wide"}, {})[2] == [], "refused when it is converted"
    for section in ("model", "data"):
        assert take_described({section: 3}, {}, iter((WEIGHTS,))) == ([], ())


def test_what_may_differ_from_the_weights_is_noted_where_it_stretches_positions() -> None:
    raw, _, wrongs, notes = taken({"rope_theta": 5e5, "init_std": 0.5}, {})
    assert wrongs == [] and raw["model"]["rope_theta"] == 5e5 and raw["model"]["init_std"] == 0.5
    assert notes == ("model.rope_theta is 500000.0; the weights in there had 10000.0",)
    longer = replace(WEIGHTS, model={"position": "rotary", "max_positions": 64})
    assert taken({"max_positions": 128}, {}, longer)[2:] == ([], ()), "more positions alone are no note"
    distances = replace(WEIGHTS, model={"position": "alibi", "rope_theta": 1e4})
    assert taken({"rope_theta": 5e5}, {}, distances)[2:] == ([], ()), "nothing of the weights is stretched"
    learned = replace(WEIGHTS, model={"position": "learned", "max_positions": 64})
    assert [wrong[0] for wrong in taken({"max_positions": 128}, {}, learned)[2]] == ["model.max_positions"]


def test_all_that_belongs_to_the_training_or_to_positions_may_differ_from_the_weights() -> None:
    training = ("hidden_dropout", "attention_dropout", "init_std", "residual_init", "embedding_init")
    scaling = ("factor", "original_positions", "low_rotations", "high_rotations", "attention_factor")
    positions = ("max_positions", "rope_theta", *(f"rope_{name}" for name in scaling))
    of_weights = {"position": "rotary", **dict.fromkeys((*training, *positions), 1)}
    own: dict[str, Any] = dict.fromkeys((*training, *positions), 2)
    _, _, wrongs, notes = taken(own, {}, replace(WEIGHTS, model=of_weights))
    assert wrongs == [] and [note.split()[0] for note in notes] == [f"model.{name}" for name in positions[1:]]
    other: dict[str, Any] = {"rope_scaling": "yarn"}
    stretched = replace(WEIGHTS, model={"position": "rotary", "rope_scaling": "none"})
    assert taken(other, {}, stretched)[2:] == (
        [], ('model.rope_scaling is "yarn"; the weights in there had "none"',)
    )  # fmt: skip


def test_a_new_tokenizer_does_not_fit_old_weights() -> None:
    assert taken({}, {"tokenizer": "mine.json"}, replace(WEIGHTS, tokenizer=""))[2] == []
    (wrong,) = taken({}, {"tokenizer": "train"})[2]
    assert wrong == (
        "data.tokenizer", "train", TOKENIZER, "Leave it out to take the tokenizer from there."
    )  # fmt: skip
    (wrong,) = taken({}, {}, replace(WEIGHTS, tokenizer=""))[2]
    assert wrong[2:] == (
        TOKENIZER,
        "No tokenizer is there: set data.tokenizer to the path of the model's tokenizer.json.",
    )


def test_a_recipe_is_completed_by_the_weights_that_it_names() -> None:
    text = MINIMAL.replace("hidden = 32\n", "") + '[init]\nfrom = "there"\n'
    asked: list[str] = []

    def describe(place: str) -> Iterator[DescribedWeights]:
        asked.append(place)
        yield WEIGHTS

    loaded = parse_recipe(text, label="small.toml", describe=describe)
    assert asked == ["there"] and loaded.recipe.model.hidden == 32
    assert loaded.sources["model.hidden"] == "there" and loaded.sources["model.layers"] == "small.toml:5"
    assert refusal(lambda: parse_recipe(text, ["model.hidden=8"], label="a", describe=describe))[0] == (
        "model.hidden"
    )
    with pytest.raises(ConfigError):
        parse_recipe(text, ["train.steps=-1"], label="a", describe=lambda place: pytest.fail("not asked"))


def test_profiles_set_these_variables() -> None:
    offline = ("BLOOMERY_OFFLINE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    assert PROFILES["nccl-infiniband"] == {
        "NCCL_NET": "IB", "NCCL_IB_DISABLE": "0", "NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7",
    }  # fmt: skip
    assert PROFILES["nccl-tcp"] == {
        "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    }  # fmt: skip
    assert PROFILES["nccl-flight-recorder"] == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }  # fmt: skip
    assert PROFILES["offline"] == dict.fromkeys(offline, "1")
    tcpx = PROFILES["gpudirect-tcpx"]
    assert {name.removeprefix("NCCL_"): value for name, value in tcpx.items()} == {
        "SOCKET_IFNAME": "eth0", "GPUDIRECTTCPX_CTRL_DEV": "eth0",
        "GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
        "GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx", "GPUDIRECTTCPX_FORCE_ACK": "0",
        "CROSS_NIC": "0", "ALGO": "Ring", "PROTO": "Simple", "NSOCKS_PERTHREAD": "4", "SOCKET_NTHREADS": "1",
        "NET_GDR_LEVEL": "PIX", "P2P_PXN_LEVEL": "0",
    }  # fmt: skip
    section = EnvironmentSection(profiles=("nccl-tcp", "nccl-infiniband"), variables=("A=b=c", "NCCL_NET="))
    assert variables_of(section) == {
        **PROFILES["nccl-tcp"], **PROFILES["nccl-infiniband"], "A": "b=c", "NCCL_NET": "",
    }  # fmt: skip
    given: dict[str, str] = {"A": "b"}
    go_offline(given)
    assert given == {"A": "b", **dict.fromkeys(offline, "1")}


@pytest.mark.parametrize(
    ("variables", "offline"),
    [
        ({}, False),
        ({"BLOOMERY_OFFLINE": "1"}, True),
        ({"BLOOMERY_OFFLINE": "yes"}, True),
        ({"BLOOMERY_OFFLINE": "0"}, False),
        ({"BLOOMERY_OFFLINE": ""}, False),
        ({"HF_HUB_OFFLINE": "1"}, True),
        ({"HF_HUB_OFFLINE": "0"}, False),
        ({"BLOOMERY_OFFLINE": "0", "HF_HUB_OFFLINE": "1"}, True),
    ],
)
def test_the_network_is_forbidden_by_either_switch(
    variables: dict[str, str], offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BLOOMERY_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_offline() is offline
    if not offline:
        refuse_network("fetch it", remedy="Copy it.")
        return
    with pytest.raises(OfflineRefused) as refused:
        refuse_network("fetch it", remedy="Copy it.")
    assert (refused.value.message, refused.value.remedy) == (
        "The network is needed to fetch it, and it is forbidden (run.offline or BLOOMERY_OFFLINE=1).",
        "Copy it.",
    )


DEMO = load_recipe("demo").recipe


def test_a_fixed_setting_is_refused_with_what_it_was() -> None:
    changes = compare(DEMO, override(DEMO, ["model.layers=9"]))
    layers = DEMO.model.layers
    assert refusal(lambda: refuse_fixed(changes)) == (
        "model.layers", 9, "recipe", f"the run was started with {layers}, and this setting is fixed",
        f"Set it back to {layers}, or start a run with another name.",
    )  # fmt: skip
    refuse_fixed(SettingChanges())


@pytest.mark.parametrize(
    ("key", "value", "problem", "remedy"),
    [
        ("optim.clip", "2", "is journalled, and cannot change while the run goes on",
         "Stop the run (it saves), and resume it with optim.clip=2: the journal will say so."),
        ("run.seed", "2", "is fixed, and cannot change while the run goes on",
         "It is fixed: start a run with another name."),
        ("log.form", "json", "is read when training starts",
         "Stop the run (it saves), and resume it with log.form=json on the command line."),
        ("log.every_stps", "3", "there is no such setting", "Did you mean log.every_steps?"),
    ],
)  # fmt: skip
def test_what_cannot_change_while_a_run_goes_on_says_what_to_do(
    key: str, value: str, problem: str, remedy: str
) -> None:
    assert refusal(lambda: apply_free(DEMO, key, value)) == (key, None, "control/set", problem, remedy)


def test_what_peers_share_is_changed_on_all_of_them() -> None:
    peers = override(DEMO, ["elastic.inner_steps=2"])
    assert refusal(lambda: apply_free(peers, " train.tokens ", " 512000 "))[3:] == (
        "must be equal on all peers, and cannot change on one while the run goes on",
        "Stop all peers, and start each with train.tokens=512000 on the command line.",
    )
    mistake = no_rounds_mistake({"elastic.inner_steps": "a.toml:7"})
    assert (mistake.key, mistake.value, mistake.source) == ("elastic.inner_steps", 0, "a.toml:7")
    assert no_rounds_mistake({}).source == "default"


def test_the_launch_decides_whether_a_batch_still_divides() -> None:
    assert apply_free(DEMO, "train.micro_batch", "1", data_degree=4).train.micro_batch == 1
    with pytest.raises(ConfigError, match="data degree 3"):
        apply_free(DEMO, "train.micro_batch", "1", data_degree=3)
    grown = override(DEMO, ["train.global_batch=12", "train.ramp_up=[4, 4, 90]"])
    with pytest.raises(ConfigError):
        apply_free(grown, "train.micro_batch", "1", data_degree=12, consumed=89)
    assert apply_free(grown, "train.micro_batch", "1", data_degree=12, consumed=90).train.micro_batch == 1


def test_values_are_shown_without_logins_and_without_tables() -> None:
    tables = override(
        DEMO, ["data.sources=[]", "data.tokenizer=t", 'data.datasets=[{name="a", path="a"}]']
    ).data.datasets
    assert shown_value(tables) is None and shown_value(()) == ()
    assert shown_value(("s3://a:b@c/d", 3)) == ("s3://***@c/d", 3) and shown_value(["x"]) == ["x"]
    assert divisors(12) == [1, 2, 3, 4, 6, 12] and nearest_numbers([1, 3, 9], near=2) == "1, 3, 9"


def test_the_command_lines_settings_are_noted_where_they_differ() -> None:
    loaded = parse_recipe(
        MINIMAL, ["train.steps=5", "optim.clip=1", "train.steps = 6", "optim.clip=1"], label="a"
    )
    assert loaded.notes == ("train.steps is given 2 times on the command line; the last counts: 6",)
    places = [f"backup.url=s3://{bucket}/x?key=1" for bucket in ("a:b@c", "a:b@d")]
    assert parse_recipe(MINIMAL, places, label="a").notes[0].endswith("the last counts: s3://***@d/x?key=1")
    typed = parse_recipe(MINIMAL, ["train.samples=8"], label="a.toml")
    assert typed.notes == (
        "train.samples = 8 of the command line takes the place of train.steps = 10 (a.toml:14)",
    )
    assert (typed.recipe.train.steps, typed.recipe.train.samples) == (0, 8)
    assert typed.sources["train.steps"] == "command line: train.samples takes its place"
    with pytest.raises(ConfigError) as refused:
        parse_recipe(MINIMAL, ["train.steps", "=", "5"], label="a")
    assert {one.remedy for one in refused.value.mistakes} == {
        "Write section.key=value, without blanks, for instance train.global_batch=16."
    }
