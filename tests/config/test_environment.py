"""Environment profiles: what they set, what is kept, what contradicts."""

from __future__ import annotations

import pytest

from bloomery.cli import main, peer
from bloomery.cli.train import prepared_environment
from bloomery.config.environment import PROFILES, variables_of
from bloomery.config.load import load_recipe
from bloomery.config.validate import check_recipe
from bloomery.errors import ConfigError


def loaded(*overrides: str):
    recipe = load_recipe("demo", overrides)
    check_recipe(recipe.recipe, recipe.sources)
    return recipe.recipe.environment


def test_profiles_and_variables_become_the_ranks_environment_and_what_is_set_is_kept(monkeypatch):
    section = loaded("environment.profiles=['nccl-tcp','offline']", "environment.variables=['NCCL_NET=Mine']")
    variables = variables_of(section)
    assert variables == PROFILES["nccl-tcp"] | PROFILES["offline"] | {"NCCL_NET": "Mine"}
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    environment = prepared_environment(section)
    assert (environment["NCCL_IB_DISABLE"], environment["NCCL_NET"]) == ("0", "Mine")
    assert "NCCL_NET" not in prepared_environment(loaded())


def test_the_ranks_of_a_peer_get_the_recipes_environment_too(monkeypatch, tmp_path):
    monkeypatch.setattr("bloomery.agent.assemble.assemble_agent", lambda *arguments: None)
    monkeypatch.setattr(peer, "lead", lambda agent, start_ranks: (start_ranks("socket"), None))
    given: dict[str, str] = {}
    monkeypatch.setattr(peer, "run_ranks", lambda *arguments, environment: given.update(environment) or 7)
    recipe = ["diloco-internet", "elastic.coordinator=http://127.0.0.1:1", "elastic.peer=a"]
    recipe += ["environment.variables=['NCCL_NET=Mine']", "--run", str(tmp_path / "run")]
    assert main(["peer", *recipe]) == 7
    assert given["NCCL_NET"] == "Mine" and given["BLOOMERY_PEER"] == "a"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("environment.profiles=['nccl-tcp','nccl-infiniband']", "'nccl-tcp' sets NCCL_NET=Socket"),
        ("environment.profiles=['nccl']", "nccl"),
        ("environment.variables=['NCCL_DEBUG']", "'NCCL_DEBUG' is not NAME=VALUE"),
    ],
)
def test_what_cannot_be_meant_is_refused(setting: str, words: str):
    with pytest.raises(ConfigError, match="mistake") as refused:
        loaded(setting)
    assert words in str(refused.value)


def test_config_show_why_prints_what_a_profile_holds(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "show", "demo", "environment.profiles=['gpudirect-tcpx']", "--why"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "NCCL_SOCKET_IFNAME=eth0 NCCL_GPUDIRECTTCPX_CTRL_DEV=eth0" in shown and "command line" in shown


def test_a_variable_of_ones_own_decides_between_profiles_that_contradict():
    first, second = PROFILES["nccl-tcp"], PROFILES["nccl-infiniband"]
    disputed = [name for name in first.keys() & second.keys() if first[name] != second[name]]
    section = loaded(
        "environment.profiles=['nccl-tcp','nccl-infiniband']",
        f"environment.variables={[f'{name}=mine' for name in disputed]}",
    )
    assert {variables_of(section)[name] for name in disputed} == {"mine"}
