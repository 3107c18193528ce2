"""Which steps are checked for wrong bits, whose micro-batches are computed again, and what is told of it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.data_loader.batches import MicroBatch
from bloomery.guard.digests import BitFault, RankDigests
from bloomery.guard.ladder import OTHER_BITS
from bloomery.guard.verdict import CarryOn, Watch
from bloomery.optim.clip import CountedGradient, examine
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.train import corruption
from bloomery.train.corruption import CorruptionCheck, _Trained, numerics_of
from bloomery.train.state import Goal, TrainState

CPU = torch.device("cpu")
STATE = TrainState(goal=Goal(steps=99))
CERTAIN = BitFault(what="computation", ranks=(2, 1), is_certain=True, reason="rank 2 computed otherwise")
UNSURE = BitFault(what="weights", ranks=(0, 3), is_certain=False, reason="they differ")


def batch_of(number: int) -> MicroBatch:
    tokens = torch.full((1, 2), number)
    return MicroBatch(tokens=tokens, targets=tokens + 1, documents=None, samples=tokens[0, :1])


class Ranks(Mesh):
    """A mesh of which this rank is one of four on the data axis; the others send their micro-batches.

    exchanged: to whom and from whom. The micro-batch of data index i is `batch_of(i)`.
    """

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def exchange(self, sends: Any, receives: Any) -> None:
        self.exchanged.append((*sends, *receives))
        for sender, tensor in receives.items():
            tensor.copy_(corruption._packed(batch_of(self.data.ranks.index(sender))))

    exchanged: list[tuple[int, ...]]


class Sums(Axis):
    """The data axis of `Ranks`: what is summed is what the asked rank sends, and nothing of others."""

    asked: int

    def all_reduce(self, tensor: torch.Tensor, *, maximum: bool = False) -> torch.Tensor:
        own = corruption._packed(batch_of(self.index)).view(torch.int64)
        sent = corruption._packed(batch_of(type(self).asked)).view(torch.int64)
        assert tensor.equal(own if self.index == type(self).asked else torch.zeros_like(own))
        return tensor.copy_(sent)


class Checked:
    """A check of data index 1 of four, whose model computes the number of a micro-batch as its digest."""

    def __init__(self, *, every: int = 4, degree: int = 4, is_first: bool = True, **elastic: Any) -> None:
        self.computed: list[tuple[int, int, float]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.findings: Sequence[Any] = ()
        self.wrong: dict[int, list[int]] = {}
        master = torch.arange(4.0)
        self.weights = SimpleNamespace(
            master=[master],
            working=[master],
            reduced_gradient=[torch.ones(4)],
            gathers_weights=False,
            spoil_gradients=lambda: self.events.append(("spoilt", {})),
        )
        model: Any = SimpleNamespace(weights=self.weights, digest_gradients=self._digest, accumulate=None)
        ranks = (10, 11, 12, 13)[:degree] if degree > 1 else (0,)
        self.mesh = Ranks(
            device=CPU,
            rank=0 if is_first else 11,
            world=4,
            data=Sums(index=1 if degree > 1 else 0, ranks=ranks),
            pipeline=Axis(index=2, ranks=(0, 1, 2)),
            tensor=Axis(index=1, ranks=(0, 1)),
            shard=Axis(index=3, ranks=(0, 1, 2, 3)),
        )
        object.__setattr__(self.mesh, "exchanged", [])
        section = SimpleNamespace(**{"inner_steps": 0, "average": "weights", **elastic})
        recipe = SimpleNamespace(guard=SimpleNamespace(corruption_steps=every), elastic=section)
        settings: Any = SimpleNamespace(recipe=recipe, guards=SimpleNamespace(findings=()))
        self.settings = settings
        journal: Any = SimpleNamespace(write=lambda event, **fields: self.events.append((event, fields)))
        self.check = CorruptionCheck(
            model, mesh=self.mesh, settings=settings, journal=journal, incarnation=lambda: 6
        )

    def _digest(self, micro_batch: MicroBatch, step: int, *, weight: float) -> int:
        number = int(micro_batch.tokens[0, 0])
        assert micro_batch.targets.tolist() == [[number + 1] * 2] and micro_batch.samples.tolist() == [number]
        self.computed.append((number, step, weight))
        return self.wrong[number].pop(0) if self.wrong.get(number) else number

    def trained(self, *, step: int = 4, digest: int = 1) -> None:
        self.check._trained = _Trained(
            first=batch_of(self.mesh.data.index), step=step, weight=0.5, digest=digest
        )

    def checks(self, step: int) -> bool:
        return self.check._checks(step)


def test_steps_are_checked_at_the_interval_and_where_a_repetition_gave_other_bits() -> None:
    made = Checked(every=4)
    assert [step for step in range(13) if made.checks(step)] == [4, 8, 12]
    made.check._known.open[7] = {}
    assert made.checks(7) and not made.checks(6)
    made.settings.guards.findings = (
        ("x", CarryOn(judged_step=6)),
        ("x", Watch(judged_step=6, kind="y", reason="")),
    )
    assert not made.checks(6)
    watch = Watch(judged_step=6, kind=OTHER_BITS, reason="")
    made.settings.guards.findings = (("spike", watch), *made.settings.guards.findings)
    assert made.checks(6) and made.checks(0)
    made.settings.recipe.guard.corruption_steps = 0
    assert not any(map(made.checks, range(13)))


def test_each_check_computes_the_own_micro_batch_again_and_that_of_another_replica_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, seen = Checked(), list[Any]()
    monkeypatch.setattr(
        corruption, "disputed_micro_batches", lambda ranks: seen.append(ranks[0].computed) or ()
    )
    for _ in range(4):
        made.trained()
        assert not made.check._finds_faults()
    others = [3, 0, 2, 3]  # of index 1: two, three and one further, and again
    assert seen == [{1: (1, 1), other: (other,)} for other in others]
    assert made.computed == [one for other in others for one in ((1, 4, 0.5), (other, 4, 0.5))]
    assert made.mesh.exchanged == [(13, 13), (12, 10), (10, 12), (13, 13)], "to whom, and from whom"
    assert not made.check._finds_faults(), "the step was compared already"


def test_one_replica_computes_its_own_micro_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Checked(degree=1)
    made.trained(digest=0)
    assert not made.check._finds_faults()
    assert made.computed == [(0, 4, 0.5)] and made.mesh.exchanged == [] and made.check.due(STATE)


def test_a_rank_tells_who_it_is_what_it_holds_and_what_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Checked(is_first=False)
    monkeypatch.setattr(corruption, "digest_of_all", lambda tensors: int(sum(t.sum() for t in tensors)))
    held = made.check._held()
    assert held == {"weights": 6, "gradients": 4}
    (told,) = made.check._gather(held, {1: [5, 6], 3: [7]})
    assert told == RankDigests(
        rank=11,
        host=os.uname().nodename,
        device="cpu",
        kind=numerics_of(CPU),
        data=1,
        place=(2, 1),
        shard=3,
        held={"weights": 6, "gradients": 4},
        computed={1: (5, 6), 3: (7,)},
    )
    made.weights.working = [torch.full((4,), 2.0)]
    assert made.check._held() == {"weights": 6, "gradients": 4, "working weights": 8}
    made.weights.gathers_weights = True
    assert "working weights" not in made.check._held(), "each rank has its own shards"


def test_at_most_four_disputed_micro_batches_are_computed_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made, gathered = Checked(), list[Any]()
    disputes = iter([(0,), (1, 3)])
    monkeypatch.setattr(corruption, "disputed_micro_batches", lambda ranks: next(disputes))
    monkeypatch.setattr(
        corruption, "computation_faults", lambda ranks: gathered.append(ranks[0].computed) or [CERTAIN]
    )
    monkeypatch.setattr(corruption, "is_not_deterministic", lambda ranks: False)
    Sums.asked = 0
    made.trained()
    assert made.check._finds_faults()
    assert gathered == [{1: (1, 1), 3: (3,), 0: (0,)}]
    assert made.check.run(STATE) == {
        "corruption_checked": True,
        "corruption": "rank 2 computed otherwise",
        "corrupt_ranks": (1, 2),
    }
    assert not made.check.due(STATE)
    monkeypatch.setattr(corruption, "disputed_micro_batches", lambda ranks: (0,) * 6)
    made.computed.clear()
    made.trained()
    made.check._finds_faults()
    assert [number for number, *_ in made.computed] == [1, 0, *[0] * 4]


def test_the_micro_batch_of_a_replica_reaches_all_others() -> None:
    made = Checked()
    trained = _Trained(first=batch_of(1), step=4, weight=0.5, digest=1)
    for data in (0, 1, 3):
        Sums.asked = data
        arrived = made.check._first_of(trained, data)
        assert arrived.tokens.tolist() == [[data] * 2] and arrived.targets.tolist() == [[data + 1] * 2]


@pytest.mark.parametrize("is_first", [True, False])
def test_kernels_that_give_other_bits_each_time_are_told_once_and_computed_again_no_more(
    is_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = Checked(is_first=is_first)
    monkeypatch.setattr(corruption, "disputed_micro_batches", lambda ranks: (1,) if ranks[0].computed else ())
    monkeypatch.setattr(corruption, "is_not_deterministic", lambda ranks: True)
    Sums.asked = 1
    for _ in range(2):
        made.trained()
        assert not made.check._finds_faults()
    assert [number for number, *_ in made.computed] == [1, 3, 1]
    ((event, fields),) = made.events
    assert event == "corruption_check" and (fields["step"], fields["incarnation"]) == (5, 6)
    assert "kernels are not deterministic here" in fields["why"]
    warned = [one.getMessage() for one in caplog.records]
    assert warned == ([f"step 5: {fields['why']}"] if is_first else [])


def test_of_other_weights_come_other_gradients_so_nothing_else_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Checked()
    monkeypatch.setattr(corruption, "held_faults", lambda ranks: [UNSURE])
    monkeypatch.setattr(corruption, "disputed_micro_batches", lambda ranks: (1,))
    monkeypatch.setattr(corruption, "computation_faults", lambda ranks: pytest.fail("it follows"))
    made.trained()
    assert made.check._finds_faults() and len(made.computed) == 2
    told = made.check.run(STATE)
    assert told == {"corruption_checked": True, "corruption": "they differ", "corrupt_ranks": ()}
    assert made.check._known.open == {4: {0: made.check._held()}}


@pytest.mark.parametrize("is_first", [True, False])
def test_what_differs_is_journalled_with_its_machines_and_logged_by_the_first_rank(
    is_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    made = Checked(is_first=is_first)
    ranks = [
        RankDigests(rank=rank, host=f"n{rank}", device=f"cuda:{rank}", kind="k", data=0, place=(0, 0))
        for rank in range(4)
    ]
    made.check._tell(5, CERTAIN, ranks)
    assert made.events == [
        (
            "corruption",
            {
                "incarnation": 6,
                "step": 5,
                "what": "computation",
                "is_certain": True,
                "machines": [
                    {"rank": 1, "host": "n1", "device": "cuda:1"},
                    {"rank": 2, "host": "n2", "device": "cuda:2"},
                ],
                "reason": "rank 2 computed otherwise",
            },
        )
    ]
    logged = [(one.levelno, one.getMessage()) for one in caplog.records]
    told = (logging.WARNING, "step 5: silent corruption: rank 2 computed otherwise")
    assert logged == ([told] if is_first else [])


def test_who_held_wrong_bits_is_named_once_the_step_was_made_again() -> None:
    made = Checked()

    def held(*bits: int) -> list[RankDigests]:
        return [
            RankDigests(rank=r, host="n", device="cpu", kind="k", data=r, place=(0, 0), held={"weights": bit})
            for r, bit in enumerate(bits)
        ]

    made.check._settle(4, held(7, 8), [UNSURE])
    assert made.check._known.open == {4: {0: {"weights": 7}, 1: {"weights": 8}}} and not made.events
    made.check._settle(8, held(7, 7), [])
    assert 4 in made.check._known.open and not made.events, "another step"
    made.check._settle(4, held(7, 7), [])
    ((event, fields),) = made.events
    assert (event, fields["step"], fields["what"], fields["is_certain"]) == ("corruption", 5, "weights", True)
    assert fields["reason"] == (
        "rank 1 (cpu of n) held other bits before step 5 was made again than all hold now"
    )
    assert fields["machines"] == [{"rank": 1, "host": "n", "device": "cpu"}]
    made.check._settle(4, held(7, 7), [])
    assert len(made.events) == 1 and made.check._known.open == {}
    made.check._settle(4, held(7, 8), [UNSURE])
    made.check._settle(4, held(7, 8), [UNSURE])
    made.check._settle(4, held(7, 7), [])
    assert len(made.events) == 1, "it differed again, so nothing follows"
    decided = [replace(UNSURE, is_certain=True), replace(UNSURE, what="gradients")]
    made.check._settle(4, held(7, 8), decided)
    assert made.check._known.open == {}, "only weights without a majority are compared with those made again"


@pytest.mark.parametrize(
    ("steps", "average", "averages"), [(1, "gradients", True), (1, "weights", False), (0, "gradients", False)]
)
def test_an_update_with_wrong_bits_is_refused_or_offered_to_no_peer(
    steps: int, average: str, averages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic = {"inner_steps": steps, "average": average}
    made = Checked(**elastic)
    monkeypatch.setattr(corruption, "held_faults", lambda ranks: [UNSURE])
    facts = examine([CountedGradient(gradient=torch.ones(2))], limit=0.0, unscale=1.0)
    made.trained()
    made.check.screen()
    assert (("spoilt", {}) in made.events) is averages
    admitted = made.check.admit(facts)
    assert bool(admitted.applies) is averages and admitted.norm is facts.norm
    assert made.check.admit(facts) is facts


def test_only_a_step_that_is_checked_is_digested() -> None:
    made, calls = Checked(), list[Any]()

    class Tapped:
        def __enter__(self) -> Any:
            calls.append("tapped")
            return SimpleNamespace(digest=77)

        def __exit__(self, *error: object) -> None:
            calls.append("done")

    made.check._model.accumulate = lambda *told, **more: calls.append((told, more)) or "sums"  # type: ignore[method-assign,assignment]
    made.weights.tapped = lambda *, discards: calls.append(discards) or Tapped()
    batches = [batch_of(5), batch_of(6)]
    told = ((batches, 4), {"weight": 0.5})
    assert made.check.accumulate(batches, 4, weight=0.5) == "sums"
    assert calls == [False, "tapped", told, "done"]
    assert made.check._trained == _Trained(first=batches[0], step=4, weight=0.5, digest=77)
    calls.clear()
    for micro_batches, step in ((batches, 5), ([], 4)):
        assert made.check.accumulate(micro_batches, step, weight=0.5) == "sums"
        assert calls.pop() == ((micro_batches, step), {"weight": 0.5}) and not calls
        assert made.check._trained is None


def test_what_decides_over_bits_is_told_of_each_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, capability = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    assert numerics_of(CPU) == f"cpu, {capability}, {threads} threads, torch {torch.__version__}"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"name of {device}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpu = torch.device("cuda", 1)
    assert numerics_of(gpu) == f"cuda, name of cuda:1, CUDA 13.0, torch {torch.__version__}"
