"""What a checkpoint promises of the step after it, and what is told of a resume that keeps or breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bloomery.config.load import load_recipe
from bloomery.data.position import Position
from bloomery.diloco.outer import UnderWay
from bloomery.errors import CheckpointError, DataError
from bloomery.guard.receipt import Promise, RankEvidence
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.train import receipts as receipts_module
from bloomery.train.receipts import Receipts
from bloomery.train.saved_state import Restored
from bloomery.train.state import Goal, TrainState

STATE = TrainState(goal=Goal(samples=100), step=3, position=Position(consumed=24))
PHASE = SimpleNamespace(global_batch=8, micro_batch=2)
PROMISE = Promise(first=24, count=8, samples="5a", learning_rate=0.01, settings="5e", optimizer="09")


class Order:
    """An order of samples: window n // 2 of dataset n % 2; it ends at 100."""

    def next_span(self, position: Position, count: int, share: Any) -> tuple[range, ...]:
        if position.consumed + count > 100:
            raise DataError("the order ends here", remedy="")
        return tuple(position.next_samples(count))

    def locate_samples(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (samples % 2).astype(np.int32), (samples // 2).astype(np.int32)


class Gathering(Mesh):
    """A mesh whose ranks say what `others` makes of this rank's word."""

    others: Callable[[Any], list[Any]] = staticmethod(lambda own: [own])

    def all_gather_object(self, value: Any) -> list[Any]:
        return type(self).others(value)


def receipts_of(path: Path, *settings: str, degree: int = 1, rank: int = 0) -> tuple[Receipts, list[Any]]:
    events: list[Any] = []
    made: Any = object.__new__(Receipts)
    made._mesh = Gathering(
        device=torch.device("cpu"),
        rank=2 * rank,
        world=2 * degree,
        data=Axis(index=rank, ranks=tuple(range(0, 2 * degree, 2))),
    )
    made._settings = SimpleNamespace(
        phase=lambda state: PHASE,
        learning_rate=lambda state: 0.01 if state.under_way is None else 9.0,
        recipe=load_recipe("demo", settings).recipe,
    )

    def micro_batches(span: Any, size: int) -> list[SimpleNamespace]:
        assert (list(span), size) == ([range(24, 32)], 2)
        return [SimpleNamespace(samples=torch.tensor(part)) for part in ([24, 25], [28, 29])]

    made._data_stream = SimpleNamespace(order=Order(), batches=SimpleNamespace(batch=micro_batches))
    made._journal = SimpleNamespace(path=path, write=lambda event, **fields: events.append((event, fields)))
    made._own_digest = lambda: (1 << 64) - 1
    made._pending = None
    return made, events


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gathering, "others", staticmethod(lambda own: [own]))


def test_a_promise_is_of_the_next_batch_its_rate_and_the_moments_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = receipts_of(tmp_path / "journal")
    promised = made.promise(replace(STATE, under_way=UnderWay(committed=20, live=3)))
    assert (promised.first, promised.count, promised.learning_rate) == (24, 8, 0.01)
    assert promised.optimizer == "ffffffffffffffff"
    monkeypatch.setattr(Gathering, "others", staticmethod(lambda own: [own, 3]))
    assert made.promise(STATE).optimizer == "0000000000000002", "modulo 2^64"
    other = replace(STATE, position=Position(consumed=32))
    assert made.promise(other).samples != promised.samples
    skipping = replace(STATE, position=Position(consumed=24, skips=(range(26, 27),)))
    assert made.promise(skipping).samples != promised.samples
    behind = replace(STATE, position=Position(consumed=24, skips=(range(3, 8),)))
    assert made.promise(behind).first == 29, "of the stream, in which five were left out"
    last = replace(STATE, position=Position(consumed=96))
    assert made.promise(last).samples == "the order ends here"


def test_a_rate_is_promised_by_the_settings_that_it_depends_on(tmp_path: Path) -> None:
    def settings_hash(*settings: str) -> str:
        return receipts_of(tmp_path / "journal", *settings)[0]._settings_hash()

    usual = settings_hash()
    others = (
        "optim.clip=9.0",
        "schedule.warmup=7",
        "train.samples=99",
        "data.sequence_length=17",
        "elastic.peers=3",
    )
    assert len({usual, *map(settings_hash, others)}) == 6
    assert settings_hash("log.every_steps=3", "data.prefetch=7") == usual == settings_hash()


def test_each_part_of_the_data_axis_reads_its_micro_batches_of_each_round(tmp_path: Path) -> None:
    made, _ = receipts_of(tmp_path / "journal", degree=2)
    assert made._shares(STATE) == {0: [24, 25, 28, 29], 1: [26, 27, 30, 31]}
    assert made._given(STATE) == (24, 25, 28, 29)
    between_peers = ("elastic.inner_steps=4", "elastic.peers=2", "elastic.minimum_peers=1")
    for other, state in (
        (receipts_of(tmp_path / "journal", *between_peers)[0], STATE),
        (made, STATE.halting("asked", failed=False)),
    ):
        assert other._shares(state) == {} and other._given(state) == ()


def test_the_first_ranks_shares_are_those_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gathering, "others", staticmethod(lambda own: [{"0": [1], "1": [2]}, own]))
    later, _ = receipts_of(tmp_path / "journal", degree=2, rank=1)
    assert later._shares(STATE) == {0: [1], 1: [2]}


def restored(**about: Any) -> Restored:
    directory = Path("run/checkpoints/step-000003.i002")
    return Restored(step=3, incarnation=2, directory=directory, values={}, about=about)


def test_a_damaged_line_of_the_journal_is_no_step_to_compare_with(tmp_path: Path) -> None:
    made, _ = receipts_of(tmp_path / "journal")
    step = {"event": "step", "step": 4, "incarnation": 2, "loss": 2.5}
    damaged: list[Any] = [
        {"event": "step"},
        {"event": "step", "step": 4, "incarnation": 2},
        {"event": "checkpoint"},
    ]
    damaged.append({**step, "loss": "2,5"})
    (tmp_path / "journal").write_text("".join(json.dumps(event) + "\n" for event in [step, *damaged]))
    assert made._journalled(restored(), 3) == (None, 2.5)


def checked(
    made: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    broken: tuple[str, ...] = (),
    promise: Promise = PROMISE,
    **told: Any,
) -> list[Any]:
    asked: list[Any] = []
    made._outlook = lambda state, *, count: replace(PROMISE, count=count, settings="other")

    def broken_promises(promised: Any, ranks: Any, **more: Any) -> list[str]:
        asked.append((promised, ranks, more))
        return list(broken)

    monkeypatch.setattr(receipts_module, "broken_promises", broken_promises)
    about = {"promise": promise.to_json(), "loss": 2.5}
    made.check(restored(**about), STATE, **{"other_mixture": True, "incarnation": 7, **told})
    return asked


def test_a_resume_that_keeps_its_promise_is_journalled_once_with_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        {"event": "checkpoint", "path": "step-000002.i002", "promise": "another's"},
        {"event": "checkpoint", "path": "step-000003.i002", "promise": PROMISE.to_json()},
        {"event": "step", "step": 4, "incarnation": 1, "loss": 9.0},
        {"event": "step", "step": 4, "incarnation": 2, "loss": 2.25},
        {"event": "step", "step": 5, "incarnation": 2, "loss": 9.5},
    ]
    (tmp_path / "journal").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made, events = receipts_of(tmp_path / "journal")
    ((promised, ranks, more),) = checked(made, monkeypatch)
    given = (24, 25, 28, 29)
    assert promised == PROMISE
    assert ranks == [RankEvidence(promise=replace(PROMISE, settings="other"), part=0, given=given)]
    assert more == {"shares": made._shares(STATE), "other_mixture": True} and events == []
    report: Any = SimpleNamespace(step=4, loss=2.25, learning_rate=0.01)
    for _ in range(2):
        made.complete(report, incarnation=7)
    receipt = {
        "incarnation": 7,
        "step": 4,
        "kept": True,
        "loss": 2.25,
        "same_bits": True,
        "learning_rate": 0.01,
        "checkpoint": "step-000003.i002",
        "ranks": 2,
        "promised_by": "journal and checkpoint",
        "promise": PROMISE.to_json(),
        "settings_changed": True,
        "mixture_changed": True,
        "batch_checked": True,
        "loss_saved": 2.5,
        "loss_made_before": 2.25,
    }
    assert events == [("receipt", receipt)]
    events.clear()
    checked(made, monkeypatch)
    made.expect_another_loss()
    made.complete(report, incarnation=7)
    ((_, told),) = events
    assert (told["loss_made_before"], told["same_bits"]) == (None, None)
    events.clear()
    checked(made, monkeypatch)
    made.complete(SimpleNamespace(step=4, loss=2.5, learning_rate=0.01), incarnation=7)  # type: ignore[arg-type]
    assert events[0][1]["same_bits"] is False


def test_as_many_samples_as_were_promised_are_compared_whatever_the_batch_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = receipts_of(tmp_path / "journal")
    ((promised, (mine,), _),) = checked(made, monkeypatch, promise=replace(PROMISE, count=5))
    assert (promised.count, mine.promise.count) == (5, 5) and PHASE.global_batch == 8


def test_a_journal_on_another_machine_promises_nothing_and_one_that_says_else_breaks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "journal").touch()
    made, events = receipts_of(tmp_path / "journal")
    checked(made, monkeypatch, other_mixture=False)
    made.expect_another_loss()
    made.complete(SimpleNamespace(step=4, loss=2.5, learning_rate=0.01), incarnation=7)  # type: ignore[arg-type]
    assert (events[0][1]["promised_by"], events[0][1]["mixture_changed"]) == ("checkpoint", False)
    events.clear()
    other = replace(PROMISE, first=99).to_json()
    line = {"event": "checkpoint", "path": "step-000003.i002", "promise": other}
    (tmp_path / "journal").write_text(json.dumps(line) + "\n")
    with pytest.raises(
        CheckpointError, match=r"step-000003\.i002 was not resumed as it promises: a; the checkp"
    ):
        checked(made, monkeypatch, broken=("a",))
    with pytest.raises(CheckpointError) as broken:
        checked(made, monkeypatch, broken=("a",))
    assert "Nothing was trained. Look for what changed" in broken.value.remedy
    assert "`bloomery ckpt show` has the promise" in broken.value.remedy
    (event, told), _ = events
    assert (event, told["kept"], told["step"], told["incarnation"]) == ("receipt", False, 3, 7)
    assert told["broken"] == ["a", "the checkpoint promises something else than the journal of the run does"]
    made.complete(SimpleNamespace(step=4), incarnation=7)  # type: ignore[arg-type]
    assert len(events) == 2, "nothing was trained"


def test_a_later_rank_reads_no_journal(tmp_path: Path) -> None:
    made, _ = receipts_of(tmp_path / "missing", degree=2, rank=1)
    assert made._journalled(restored(), 3) == (None, None)


def test_what_the_first_ranks_journal_holds_counts_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others(own: Any) -> list[Any]:
        first = {"0": [1], "1": [2]} if own is None else own
        if own is not None and "journalled" in own:
            first = {**own, "part": 0, "journalled": PROMISE.to_json(), "loss": "2.25"}
        return [first, own]

    monkeypatch.setattr(Gathering, "others", staticmethod(others))
    later, events = receipts_of(tmp_path / "missing", degree=2, rank=1)
    ((_, ranks, _),) = checked(later, monkeypatch)
    assert [each.part for each in ranks] == [0, 1]
    later.complete(SimpleNamespace(step=4, loss=2.25, learning_rate=0.01), incarnation=7)  # type: ignore[arg-type]
    ((_, told),) = events
    assert (told["promised_by"], told["loss_made_before"]) == ("journal and checkpoint", 2.25)
    assert (told["same_bits"], told["ranks"]) == (True, 4)


def test_digests_of_optimizers_are_those_that_checkpoints_of_earlier_versions_promise() -> None:
    def entry(name: str, shape: tuple[int, ...], offset: tuple[int, ...], tensor: torch.Tensor) -> Any:
        box = SimpleNamespace(offset=offset, shape=tuple(tensor.shape))
        return SimpleNamespace(name=name, global_shape=shape, box=box, tensor=tensor)

    part = torch.arange(1, 13, dtype=torch.float32).mul(0.37).reshape(2, 2, 3)
    moment = entry("optim.a.first_moment", (2, 4, 6), (0, 2, 3), part)
    assert receipts_module._digest(moment) == 0xA643D2B545ED5CE2
    updates = entry("optim.plain.updates", (), (), torch.tensor(7.0))
    assert receipts_module._digest(updates) == 0x697ACBF888000000


def test_a_checkpoint_of_before_there_were_promises_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "journal").touch()
    made, events = receipts_of(tmp_path / "journal")
    checked(made, monkeypatch)
    made.check(restored(loss=2.5), STATE, other_mixture=False, incarnation=7)
    made.complete(SimpleNamespace(step=4, loss=2.5, learning_rate=0.01), incarnation=7)  # type: ignore[arg-type]
    assert events == [], "what an earlier resume had pending is forgotten"


def test_only_the_first_rank_says_who_reads_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    gathered = staticmethod(lambda own: said.append(own) or [{"0": [1]}])
    monkeypatch.setattr(Gathering, "others", gathered)
    for rank in (0, 1):
        receipts_of(tmp_path / "journal", degree=2, rank=rank)[0]._shares(STATE)
    assert said == [{"0": [24, 25, 28, 29], "1": [26, 27, 30, 31]}, None]


def test_settings_are_hashed_in_whatever_order_a_recipe_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = receipts_of(tmp_path / "journal")
    usual, settings_of = made._settings_hash(), receipts_module.settings_of
    reordered = lambda recipe: dict(reversed(settings_of(recipe).items()))  # noqa: E731
    monkeypatch.setattr(receipts_module, "settings_of", reordered)
    assert made._settings_hash() == usual


def test_ranks_agree_on_who_counts_which_part_of_the_moments(tmp_path: Path) -> None:
    made, _ = receipts_of(tmp_path / "journal")
    agreed: list[Any] = []
    made._optimizers = SimpleNamespace(state_entries=lambda: iter(("a", "b")))
    made._planner = SimpleNamespace(
        digest=lambda entries: "-".join(entries),
        agree=lambda entries, digests: agreed.append((entries, digests)),
        entries_to_write=lambda entries: [],
    )
    assert Receipts._own_digest(made) == 0 and agreed == [(["a", "b"], ["a-b"])]
