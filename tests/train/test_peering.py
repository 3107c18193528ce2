"""What the outer loop of a run between peers is made of, and which rounds its checkpoints hold."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.agent.rank_server import PARENT
from bloomery.config.load import load_recipe
from bloomery.diloco.outer import SinglePeer
from bloomery.errors import CheckpointError, TrainingFailed
from bloomery.train import peering
from bloomery.train.peering import (
    Peering,
    _CheckpointedRounds,
    _hooks,
    announce_interludes,
    build_outer,
    peering_of_environment,
    round_of_checkpoint,
)

BETWEEN_PEERS = ("elastic.inner_steps=4", "elastic.peers=2", "elastic.minimum_peers=1")
PEERING: Any = Peering(agent="agent", rings="rings", name="mine")  # type: ignore[arg-type]


def outer_of(*settings: str, is_first: bool = True, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> Any:
    """What the outer loop was made with, and the scope of the weights."""
    given: list[Any] = []
    monkeypatch.setattr(peering, "OuterLoop", lambda *told, **more: given.append((told, more)))
    monkeypatch.setattr(peering, "PeerVector", lambda *told: ("vector", *told))
    monkeypatch.setattr(peering, "GradientAverage", lambda vector: ("gradients", vector))
    monkeypatch.setattr(peering, "PseudoGradient", lambda vector, section: ("weights", vector, section))
    monkeypatch.setattr(peering, "_hooks", lambda trainer: ("hooks", trainer))
    recipe = load_recipe("demo", [*BETWEEN_PEERS, "data.sequence_length=32", *settings]).recipe
    weights = SimpleNamespace(scope="shared")
    stream = dict(fingerprint="f1", is_tokenised_here=True, identity=lambda: {"text": "t"})
    mesh = SimpleNamespace(is_first=is_first, all_gather_object="gather")
    build_outer(
        recipe,
        trainer="trainer",  # type: ignore[arg-type]
        model=SimpleNamespace(weights=weights),  # type: ignore[arg-type]
        mesh=mesh,  # type: ignore[arg-type]
        data_stream=SimpleNamespace(**{**stream, **parts}),  # type: ignore[arg-type]
        peering=PEERING,
    )
    ((told, more),) = given
    return recipe.elastic, ("vector", weights, mesh), told, more, weights.scope


def test_the_outer_loop_of_a_run_between_peers_gets_what_this_peer_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section, vector, told, more, scope = outer_of(monkeypatch=monkeypatch)
    assert told == (section, ("weights", vector, section)) and scope == "shared"
    assert more == {
        "agent": "agent",
        "rings": "rings",
        "gather": "gather",
        "peer": "mine",
        "salt": "f1",
        "tokens_per_sample": 32,
        "identity": {"text": "t"},
        "trainer": ("hooks", "trainer"),
    }
    _, _, _, more, _ = outer_of(monkeypatch=monkeypatch, is_first=False, is_tokenised_here=False)
    assert (more["salt"], more["identity"]) == ("", {})


@pytest.mark.parametrize(
    ("settings", "scope"),
    [
        (("elastic.fragments=2",), "peer"),
        (("elastic.overlap_steps=1",), "peer"),
        (("elastic.average=gradients", "elastic.inner_steps=1"), "shared"),
    ],
)
def test_weights_are_a_peers_own_where_those_of_peers_differ_at_a_commit(
    settings: tuple[str, ...], scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, vector, told, _, found = outer_of(*settings, monkeypatch=monkeypatch)
    assert found == scope
    averages_gradients = "elastic.average=gradients" in settings
    assert (told[1] == ("gradients", vector)) is averages_gradients


def test_a_run_of_one_peer_needs_no_agent_and_one_between_peers_does() -> None:
    parts: Any = dict.fromkeys(("trainer", "model", "mesh", "data_stream", "peering"))
    assert isinstance(build_outer(load_recipe("demo").recipe, **parts), SinglePeer)
    with pytest.raises(TrainingFailed, match="this process is not one of them") as refused:
        build_outer(load_recipe("demo", BETWEEN_PEERS).recipe, **parts)
    assert "bloomery peer RECIPE" in refused.value.remedy and "elastic.inner_steps=0" in refused.value.remedy


def test_a_rank_that_an_agent_started_connects_to_it_under_its_peers_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    agent = SimpleNamespace(close=lambda: calls.append("closed"))
    monkeypatch.setattr(peering, "connect_agent", lambda **told: calls.append(told) or agent)
    monkeypatch.setattr(peering, "WireRings", lambda section, *, ranks: ("rings", section, ranks))
    mesh: Any = SimpleNamespace(rank=1, world=2)
    named, plain = (load_recipe("demo", [f"elastic.peer={name}"]).recipe for name in ("ours", ""))
    monkeypatch.delenv(PARENT, raising=False)
    with ExitStack() as stack:
        assert peering_of_environment(named, mesh, stack) is None
    assert calls == []
    monkeypatch.setenv(PARENT, "1")
    names = []
    for recipe, variable in ((named, "theirs"), (plain, "theirs"), (plain, "")):
        monkeypatch.setenv("BLOOMERY_PEER", variable)
        with ExitStack() as stack:
            found = peering_of_environment(recipe, mesh, stack)
            assert found is not None and found.agent is agent and found.rings == ("rings", recipe.elastic, 2)
            names.append(found.name)
            assert calls == [{"rank": 1, "world": 2}]
        assert calls.pop() == "closed" and calls.pop()
    assert names == ["ours", "theirs", os.uname().nodename]


def test_an_evaluation_between_peers_is_reported_to_the_agent_before_it_runs() -> None:
    calls: list[Any] = []
    interlude: Any = SimpleNamespace(
        due=lambda state: state.step == 7, run=lambda state: calls.append("ran") or {"held_out_loss": 2.5}
    )
    assert announce_interludes((interlude,), None) == [interlude]
    agent: Any = SimpleNamespace(report_activity=lambda *told, **more: calls.append((told, more)))
    (announced,) = announce_interludes([interlude], Peering(agent=agent, rings=PEERING.rings, name="x"))
    state: Any = SimpleNamespace(step=7)
    assert announced.due(state) and not announced.due(SimpleNamespace(step=8))  # type: ignore[arg-type]
    assert calls == []
    assert announced.run(state) == {"held_out_loss": 2.5}
    assert calls == [(("evaluate",), {"step": 7}), "ran"]


def test_the_outer_loop_calls_the_trainer_for_what_it_needs() -> None:
    calls: list[Any] = []

    def noted(name: str) -> Any:
        return lambda *told: calls.append((name, *told)) or name

    trainer: Any = SimpleNamespace(
        mesh=SimpleNamespace(is_first=True),
        phase=lambda state: SimpleNamespace(global_batch=16),
        saver=None,
        store=SimpleNamespace(remove_copy=noted("remove"), wait_staged=noted("staged")),
        follow=noted("follow"),
        control=SimpleNamespace(asked_to_stop=noted("asked")),
        enter=noted("enter"),
    )
    hooks = _hooks(trainer)
    trainer.saver = SimpleNamespace(  # made later, because it saves the outer loop too
        adopt=noted("adopt"), reload=noted("reload"), copy_for_peers=noted("copy")
    )
    assert hooks.batch("state") == 16
    for asked, told in (
        (hooks.load, ("directory", "why", "check")),
        (hooks.reload, ("why",)),
        (hooks.copy, ("state",)),
        (hooks.remove_copy, ("directory",)),
        (hooks.wait_staged, ()),
        (hooks.follow, ("state",)),
        (hooks.asked_to_stop, ()),
        (hooks.enter, ("an activity",)),
    ):
        name = asked(*told)  # type: ignore[operator]
        assert calls.pop() == (name, *told)
    assert (hooks.round_before.__name__, hooks.step_of.__name__, hooks.saves.__name__) == (
        "round_before",
        "step_of",
        "saves",
    )


@pytest.fixture
def manifests(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What manifests say of the outer loop, by directory; one that is missing here is damaged."""
    said: dict[str, Any] = {}

    def read(directory: Path) -> Any:
        if str(directory) not in said:
            raise CheckpointError(f"{directory} is damaged", remedy="")
        outer = said[str(directory)]
        return SimpleNamespace(values={} if outer is None else {"outer": outer})

    monkeypatch.setattr(peering, "read_manifest", read)
    return said


def test_a_checkpoint_is_of_a_round_where_it_is_not_within_the_next(
    manifests: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    manifests.update(
        at={"round": 3, "inside": False},
        within={"round": 3, "inside": True},
        alone=None,
        odd={"round": "3", "inside": False},
        older={"round": 3},
    )
    found = [round_of_checkpoint(Path(name)) for name in ("at", "within", "alone", "odd", "older", "torn")]
    assert found == [3, None, None, None, None, None]
    assert [one.getMessage() for one in caplog.records] == ["torn was passed over: torn is damaged"]


class Checkpoints:
    """A store with checkpoints, whose directory is listed anew when it changed."""

    def __init__(self, manifests: dict[str, Any]) -> None:
        self._manifests = manifests
        self.steps: list[int] = []
        self.listed = 0

    def add(self, step: int, round: int, *, inside: bool = False) -> None:
        self.steps.append(step)
        self._manifests[f"step-{step}"] = {"round": round, "inside": inside}

    def listing_changed(self) -> tuple[int, ...]:
        return (len(self.steps),)

    def checkpoints(self) -> list[Any]:
        self.listed += 1
        return [SimpleNamespace(step=step, directory=Path(f"step-{step}")) for step in self.steps]


def rounds_of(store: Checkpoints, *, is_first: bool = True, others: Any = None) -> _CheckpointedRounds:
    gather = lambda own: [others if others is not None else own, own]  # noqa: E731
    mesh = SimpleNamespace(is_first=is_first, all_gather_object=gather)
    return _CheckpointedRounds(SimpleNamespace(mesh=mesh, store=store))  # type: ignore[arg-type]


def test_the_newest_round_at_or_before_a_step_and_the_newest_step_of_a_round_are_known(
    manifests: dict[str, Any],
) -> None:
    store = Checkpoints(manifests)
    for step, round, inside in ((4, 1, False), (6, 1, True), (8, 2, False), (9, 2, False)):
        store.add(step, round, inside=inside)
    rounds = rounds_of(store)
    assert [rounds.round_before(step) for step in (3, 4, 7, 8, 9, 99)] == [None, 1, 1, 1, 2, 2]
    assert [rounds.step_of(round) for round in (1, 2, 3)] == [4, 9, None]
    store.add(2, 0)
    assert (rounds.round_before(3), rounds.step_of(0)) == (0, 2), "the beginning is a round, too"
    assert rounds.saves() == (0, 1, 2)
    later = rounds_of(store, is_first=False, others=[[5, 20]])
    listed = store.listed
    assert later.round_before(20) == 5 and later.step_of(5) == 20 and later.round_before(19) is None
    assert store.listed == listed and later.saves() == (), "the first rank looks for all"


def test_the_rounds_that_saves_rest_on_are_read_anew_where_the_directory_changed(
    manifests: dict[str, Any],
) -> None:
    store = Checkpoints(manifests)
    rounds = rounds_of(store)
    assert rounds.saves() == ()
    store.add(8, 2, inside=True)
    store.add(4, 1)
    assert rounds.saves() == rounds.saves() == (1, 2) and store.listed == 2


def test_of_many_rounds_with_checkpoints_the_oldest_and_the_newest_are_named_in_order(
    manifests: dict[str, Any],
) -> None:
    store = Checkpoints(manifests)
    for round in (4096, *range(100, 0, -1), 7):
        store.add(round + 1000, round)
    assert rounds_of(store).saves() == (1, *range(39, 101), 4096)
