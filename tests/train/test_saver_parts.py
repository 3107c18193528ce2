"""How a run goes on from a checkpoint, of its own or another's, and with which weights it begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.test_saver import STATE, Recorded, result

from bloomery.data.position import Position
from bloomery.errors import StorageError
from bloomery.events.heartbeat import RankActivity
from bloomery.guard.corruption import CLEAN_STEP
from bloomery.guard.verdict import Rewind, Stop
from bloomery.train import saver as saver_module
from bloomery.train.saved_state import Restored
from bloomery.train.saver import Learner, begins_with
from bloomery.train.state import Goal

SAVED = replace(STATE, step=4, position=Position(consumed=16), refused_updates=2)
RESTORED = Restored(
    step=4,
    incarnation=2,
    directory=Path("checkpoints/step-000004.i002"),
    values={"train": SAVED.to_json(), "data": {"text": "x"}},
    about={},
)


@pytest.fixture
def run() -> Recorded:
    """A run that finds a checkpoint; its data have the mixture `mixture` from there on."""
    made = Recorded()
    made.mixture = None  # type: ignore[attr-defined]
    made.saver._data_stream.follow = lambda *told, **more: (  # type: ignore[method-assign]
        made.note("follow", *told, more) or made.mixture  # type: ignore[attr-defined]
    )
    made.saver._settings.indices_left = lambda state: 1000 - state.position.consumed  # type: ignore[method-assign]
    made.saver._receipts.check = lambda *told, **more: made.note("check", *told, more)  # type: ignore[method-assign]
    made.saver._store.restore = lambda parts, **told: made.note("restore", told) or RESTORED  # type: ignore[method-assign]
    made.saver._enter = lambda activity: made.note(activity)
    return made


def went_on(reason: str, *, other_mixture: bool) -> list[tuple[Any, ...]]:
    return [
        ("follow", {"text": "x"}, "step-000004.i002", {"at": 16, "left": 984}),
        ("begin", SAVED, reason, 3),
        ("check", RESTORED, SAVED, {"other_mixture": other_mixture, "incarnation": 3}),
    ]


def test_a_start_goes_on_from_the_newest_checkpoint_and_proves_it(run: Recorded) -> None:
    assert run.saver.restore() == SAVED
    assert run.calls == [
        (RankActivity.LOADING,),
        ("restore", {"reason": "start", "up_to_step": None, "fallback": True}),
        ("attention", {}),
        *went_on("start", other_mixture=False),
        ("resumed",),
    ]
    assert run.events == []


def test_the_kernel_of_attention_is_saved_and_comes_back_before_anything_is_computed(run: Recorded) -> None:
    run.attention = {"kernel": "math"}
    saved = run.saver._to_save(STATE)
    assert saved.values["attention"] == {"kernel": "math"}
    run.saver._store.restore = lambda *_, **__: replace(RESTORED, values={**RESTORED.values, **saved.values})  # type: ignore[method-assign]
    run.saver.restore()
    assert run.named("attention", "begin")[0] == ("attention", {"kernel": "math"})


def test_another_mixture_is_journalled_at_the_step_from_which_it_holds(run: Recorded) -> None:
    run.mixture = {"at": 16, "shares": {"web": 1.0}}  # type: ignore[attr-defined]
    assert run.saver.reload("a peer is ahead") == SAVED
    assert run.named("restore") == [
        ("restore", {"reason": "a peer is ahead", "up_to_step": None, "fallback": True})
    ]
    assert run.named("follow", "begin", "check") == went_on("a peer is ahead", other_mixture=True)
    assert run.events == [("mixture", 4, {"at": 16, "shares": {"web": 1.0}})] and not run.named("resumed")


def test_what_another_peer_made_is_taken_over_and_checked(run: Recorded) -> None:
    taken: list[Any] = []
    run.saver._store.adopt = lambda *told, **more: taken.append((told, more)) or RESTORED  # type: ignore[method-assign]
    check = lambda: None  # noqa: E731
    assert run.saver.adopt(Path("theirs"), "it is ahead", check) == SAVED
    ((parts, directory), more) = taken.pop()
    assert parts == run.saver.stateful and directory == Path("theirs")
    assert more == {"reason": "replaced: it is ahead", "check": check}
    assert run.calls == went_on("replaced: it is ahead", other_mixture=False)


def test_a_rewind_restores_at_or_before_its_step(run: Recorded) -> None:
    run.reachable = {5}
    after = run.saver.rewind(STATE, Rewind(judged_step=9, to_step=5, skip=range(0), reason="spike"))
    assert run.named("restore") == [
        ("restore", {"reason": "rewind: spike", "up_to_step": 5, "fallback": True})
    ]
    assert (after.step, after.refused_updates) == (4, 2)


def test_a_run_tells_when_it_saves_and_when_it_goes_on(run: Recorded) -> None:
    activities = (RankActivity.SAVING, RankActivity.BETWEEN_STEPS)
    run.saver.save(STATE)
    assert [call[0] for call in run.calls if call[0] in (*activities, "begin save")] == [
        RankActivity.SAVING,
        "begin save",
        RankActivity.BETWEEN_STEPS,
    ]
    run.calls.clear()
    run.begins = StorageError("full", remedy="")
    run.saver.save(STATE)
    assert run.named(*activities) == [(RankActivity.SAVING,), (RankActivity.BETWEEN_STEPS,)]
    run.calls.clear()
    run.saver.finish(STATE, save=True)
    assert [call[0] for call in run.calls] == [RankActivity.SAVING, "save", "clock"]


def test_the_end_of_a_run_journals_what_was_saved_before_and_what_its_last_save_told(run: Recorded) -> None:
    run.results = [result("step-000008.i003", step=8)]
    run.saver.finish(STATE, save=False)
    assert run.events == [("checkpoint", 8, {"path": "step-000008.i003", "promise": None})]
    run.results = [result("step-000009.i003", step=9)]
    run.refuses_save = StorageError("full", remedy="")
    with pytest.raises(StorageError):
        run.saver._save_and_wait(STATE)
    assert run.events[1:] == [("checkpoint", 9, {"path": "step-000009.i003", "promise": {"count": 4}})]


@pytest.mark.parametrize("kind", [Rewind, Stop])
def test_checkpoints_after_the_last_clean_step_are_marked_and_journalled(run: Recorded, kind: type) -> None:
    marked: list[Any] = []
    run.saver._store.mark_suspects = lambda **told: marked.append(told) or ("a", "b")  # type: ignore[method-assign]
    given = {"to_step": 3, "skip": range(0)} if kind is Rewind else {"failed": True}
    finding = kind(judged_step=9, reason="other bits", numbers={CLEAN_STEP: 6.0}, **given)
    run.saver.suspect(finding, step=9)
    assert marked == [{"clean_step": 6, "why": "other bits"}]
    assert run.events == [("suspect_checkpoints", 9, {"clean_step": 6, "names": ["a", "b"]})]


def test_other_peers_get_a_copy_without_a_promise(run: Recorded) -> None:
    copied: list[Any] = []
    run.saver._store.copy_for_peers = lambda state: copied.append(state) or Path("copy")  # type: ignore[method-assign]
    assert run.saver.copy_for_peers(STATE) == Path("copy")
    (saved,) = copied
    assert saved.step == 9 and "promise" not in saved.about and run.saver._promises == {}
    assert saved.about["loss"] is None and saved.about["held_out_loss"] is None


def test_the_receipt_of_a_resume_is_completed_in_this_life_of_the_run(run: Recorded) -> None:
    run.saver._receipts.complete = lambda *told, **more: run.note(*told, more)  # type: ignore[method-assign]
    run.saver.complete_receipt("report")  # type: ignore[arg-type]
    assert run.calls == [("report", {"incarnation": 3})]


@pytest.mark.parametrize("begins", [True, False])
def test_a_run_begins_with_drawn_weights_or_those_of_a_directory_and_nothing_learnt(begins: bool) -> None:
    calls: list[Any] = []
    learner = Learner(
        model=SimpleNamespace(initialise=lambda **told: calls.append(told)),  # type: ignore[arg-type]
        optimizers=SimpleNamespace(reset=lambda: calls.append("optimizers")),  # type: ignore[arg-type]
        loss_scale=SimpleNamespace(reset=lambda: calls.append("scale")),  # type: ignore[arg-type]
        bigrams="bigrams",  # type: ignore[arg-type]
        attention="attention",  # type: ignore[arg-type]
        begin=(lambda: calls.append("begun")) if begins else None,
    )
    learner.initialise(seed=5)
    first = "begun" if begins else {"seed": 5, "bigrams": "bigrams"}
    assert calls == [first, "optimizers", "scale"]


def test_weights_of_a_directory_fill_masters_and_working_weights_and_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    mesh: Any = SimpleNamespace(rank=1, world=2, all_gather_object="gather", exchange="exchange")
    weights = SimpleNamespace(
        state_entries=lambda: "entries", copy_masters_to_working=lambda: calls.append("copied")
    )
    model: Any = SimpleNamespace(weights=weights, decoder=SimpleNamespace(model="shape"))

    def load(origin: str, entries: Any, *, model: Any, ranks: Any) -> str:
        calls.append((origin, entries, model))
        assert (ranks.rank, ranks.world, ranks.gather, ranks.exchange) == (1, 2, "gather", "exchange")
        return "org/model"

    monkeypatch.setattr(saver_module, "load_initial_weights", load)
    init: Any = SimpleNamespace(from_="there")
    begin = begins_with(init, model, mesh, say=calls.append)
    assert begin is not None and not calls
    begin()
    assert calls == [
        ("there", "entries", "shape"),
        "copied",
        "the weights are those of org/model; optimizer, schedule and data begin anew",
    ]
    init.from_ = ""
    assert begins_with(init, model, mesh, say=calls.append) is None
    assert SAVED.goal == Goal(samples=1000)
