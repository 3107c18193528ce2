"""What `train.recompute = "auto"` becomes at a start, what is said of it, and that a resume decides alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.train.test_loop import Start, events, go

from bloomery.config.load import load_recipe
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory
from bloomery.parallel.mesh import Mesh
from bloomery.plan.hardware import GIB
from bloomery.plan.recomputation import LEFT_FREE, peak_bytes
from bloomery.train import assemble, recomputation
from bloomery.train.recomputation import AutoRecompute, least_room_bytes, workload_of_rank

MESH = Mesh(device=torch.device("cpu"))
AUTO = ("train.recompute=auto", "train.compile=off")


def needed(*settings: str) -> int:
    """Bytes that the demo's eager training takes by the plan."""
    loaded = load_recipe("demo", [*settings, "train.compile=off"])
    return peak_bytes(loaded.recipe, workload_of_rank(loaded, MESH, vocabulary=4096))


def test_a_recipe_with_another_micro_batch_gets_another_choice_and_one_that_says_it_gets_none() -> None:
    large = needed("train.micro_batch=4", "train.recompute=none")
    room = large / (1 - LEFT_FREE["cpu"])
    loaded = load_recipe("demo", [*AUTO, "train.micro_batch=4"])
    auto = AutoRecompute(loaded, MESH, vocabulary=4096, compiled=False, room_bytes=room)
    assert auto(loaded.recipe).mode == "none" and auto(loaded.recipe) is auto(loaded.recipe)
    larger = load_recipe("demo", [*AUTO, "train.micro_batch=8"]).recipe
    assert auto(larger).mode != "none" and "none needs" in auto(larger).why
    told = load_recipe("demo", ["train.recompute=full"]).recipe
    assert (auto(told).mode, auto(told).why) == ("full", "")


@pytest.mark.parametrize(
    ("device", "rooms", "least"),
    [
        ("cpu", [["a", 8.0], ["a", 8.0], ["b", 6.0]], 4.0),
        ("cuda", [["a", 8.0], ["a", 8.0], ["b", 6.0]], 6.0),
    ],
)
def test_ranks_share_their_machines_memory_but_not_their_gpus(
    device: str, rooms: list[Any], least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    mesh: Any = SimpleNamespace(
        device=torch.device(device), all_gather_object=lambda own: given.append(own) or rooms
    )
    properties = SimpleNamespace(total_memory=5 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda of: properties)
    monkeypatch.setattr(recomputation, "main_memory_gib", lambda: 7.0)
    monkeypatch.setattr(recomputation, "host_name", lambda: "a")
    assert least_room_bytes(mesh) == least
    assert given == [["a", (5.0 if device == "cuda" else 7.0) * GIB]]


def test_a_run_says_what_it_chose_and_why_and_a_resumed_one_chooses_alike(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert go(*start("train.recompute=none", "train.compile=off", name="plain")).finished
    monkeypatch.setattr(assemble, "least_room_bytes", lambda mesh: 0.51 * GIB)  # 0.5 are reserved
    said: list[str] = []
    for stop in (5, 0):
        loaded, path = start(*AUTO, f"guard.stop_at_step={stop}", name="auto")
        go(loaded, path, say=said.append)
    begun = events(path, "start")
    assert [event["recompute"] for event in begun] == ["full", "full"]
    assert all(event["recompute_why"].startswith("none needs ") for event in begun)
    assert {event["recompute"] for event in events(path, "phase")} == {"full"}
    assert sum(line.startswith("train.recompute = full: none needs ") for line in said) == 2
    assert loss_curve(RunDirectory(path)) == loss_curve(RunDirectory(path.with_name("plain")))
