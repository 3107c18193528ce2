"""A whole run between real peers, as its user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_run import TINY

from bloomery.chaos import scenario
from bloomery.chaos.faults import Fault, schedule
from bloomery.chaos.scenario import ScenarioSettings, peer_names, run_scenario
from bloomery.chaos.shaped_network import Shape, ShapedNetwork
from bloomery.cli.chaos import recipe_and_overrides
from bloomery.coordination.etcd_process import free_ports


@pytest.mark.parametrize(
    ("words", "recipe", "overrides"),
    [
        ([], "diloco-internet", ()),
        (["train.steps=8"], "diloco-internet", ("train.steps=8",)),
        (["mine.toml", "train.steps=8"], "mine.toml", ("train.steps=8",)),
    ],
)
def test_a_rehearsal_has_a_recipe_of_its_own(words, recipe, overrides) -> None:
    assert recipe_and_overrides(words) == (recipe, overrides)


class NotedNetwork(ShapedNetwork):
    """Keeps what was opened: the host, its port, and the one that others dial."""

    opened: list[tuple[str, int, int]]

    def open(self, name: str, port: int, *, advertised: int = 0) -> int:
        self.opened.append((name, port, advertised))
        return super().open(name, port, advertised=advertised)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScenarioSettings:
    """Of a scenario of two peers that only say their ports and end, whose coordinator only sleeps."""
    peer = ["sh", "-c", "echo $BLOOMERY_LISTEN $BLOOMERY_ADVERTISE; sleep 0.3"]
    monkeypatch.setattr(scenario, "_bloomery", lambda word, *_: peer if word == "peer" else ["sleep", "60"])
    monkeypatch.setattr(scenario, "_wait_for_port", lambda port, process: None)
    monkeypatch.setattr(scenario, "read_commits", lambda endpoint, run: ())
    return ScenarioSettings(
        recipe="tiny", overrides=(), run="tiny", peers=2, shape=Shape(), directory=tmp_path, deadline_s=10.0
    )


def test_a_run_whose_peers_are_done_does_not_wait_for_a_coordinator_to_come_back(
    settings: ScenarioSettings,
) -> None:
    killed = Fault(after_s=0.0, kind="kill-coordinator", peer="", seconds=600.0)
    outcome = run_scenario(replace(settings, faults=(killed,)), watch=lambda *_: None)
    assert outcome.statuses == {"peer0": 0, "peer1": 0} and not outcome.failed
    assert [(one.fault, one.done) for one in outcome.injected] == [(killed, True)]


def test_no_two_ends_of_the_peers_links_share_a_port(
    settings: ScenarioSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = count(*free_ports(1))
    monkeypatch.setattr(scenario, "free_ports", lambda number: [next(ports)])  # each is beside the last
    monkeypatch.setattr(scenario, "ShapedNetwork", NotedNetwork)
    monkeypatch.setattr(NotedNetwork, "opened", [], raising=False)

    assert run_scenario(settings, watch=lambda *_: None).statuses == {"peer0": 0, "peer1": 0}

    opened = NotedNetwork.opened
    taken = [port for _, *both in opened for port in both]
    assert len(taken) == 8 == len(set(taken))
    for name, first, second in zip(peer_names(2), opened[::2], opened[1::2], strict=True):
        assert second == (name, first[1] + 1, first[2] + 1)
        said = (tmp_path / "logs" / f"{name}.log").read_text()
        assert said == f"127.0.0.1:{first[1]} 127.0.0.1:{first[2]}\n"


@pytest.mark.timeout(900)
def test_two_peers_behind_shaped_links_train_to_the_end_and_leave_nothing(
    corpus: Path, tmp_path: Path
) -> None:
    told, _ = played("simulate-internet", corpus=corpus, directory=tmp_path)
    assert told["rounds"] >= 2 and told["peers"] > 1.0 and told["faults"] == []


@pytest.mark.timeout(900)
def test_the_faults_of_a_schedule_are_injected_in_their_order_and_each_is_told(
    corpus: Path, tmp_path: Path
) -> None:
    words = ["chaos", "--faults", "4", "--kinds", "slow,cut,sever", "--seed", "3", "--gap", "0.3"]
    told, said = played(*words, "--longest", "0.5", corpus=corpus, directory=tmp_path)
    kinds = ("slow", "cut", "sever")
    due = schedule(seed=3, peers=peer_names(2), faults=4, mean_gap_s=0.3, longest_s=0.5, kinds=kinds)
    assert [(fault["kind"], fault["peer"]) for fault in told["faults"]] == [(it.kind, it.peer) for it in due]
    assert all(fault["done"] for fault in told["faults"])
    assert [line for line in said.splitlines() if str(due[-1]) in line]
    for (earlier, later), fault in zip(pairwise(told["faults"]), due[1:], strict=True):
        assert later["at_s"] - earlier["at_s"] > fault.after_s - 1e-6


def played(*words: str, corpus: Path, directory: Path) -> tuple[dict[str, Any], str]:
    """What a scenario of two peers came to, and what it said meanwhile; it has ended well."""
    recipe = directory / "tiny.toml"
    recipe.write_text(TINY)
    command = [sys.executable, "-m", "bloomery", *words, str(recipe), f"data.sources={corpus}"]
    command += ["--peers", "2", "--rate", "100mbit", "--rtt", "10ms", "--directory", str(directory / "play")]
    command += ["train.ramp_up=[]", "elastic.inner_steps=3", "train.compile=off", "--minutes", "12", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    told = json.loads(done.stdout)
    assert told["statuses"] == {"peer0": 0, "peer1": 0}
    assert told["consumed"] >= 96 and told["mistakes"] == [] and told["leftover"] == []
    assert all(to + back > 0 for to, back in told["bytes_between"].values())
    return told, done.stderr
