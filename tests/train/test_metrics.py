"""What a step's report says: sums over ranks, means over ranks, and what one rank does not know."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bloomery.data.position import Position
from bloomery.data_loader.batches import QueueStatus
from bloomery.diloco.outer import UnderWay
from bloomery.events.heartbeat import RankActivity
from bloomery.events.records import StepReport
from bloomery.events.run_directory import RunDirectory
from bloomery.optim.clip import CountedGradient, examine
from bloomery.parallel.mesh import Mesh
from bloomery.plan.parameters import TokenCost
from bloomery.plan.schedule import Phase
from bloomery.train.control import Control, LocalFacts
from bloomery.train.metrics import Metrics, SlowRanks, memory_in_use
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import StepResult

CPU = torch.device("cpu")
ALONE = Mesh(device=CPU)
PHASE = Phase(global_batch=4, micro_batch=2, precision="fp16", recompute="none")
STATE = TrainState(goal=Goal(steps=9), step=3, position=Position(consumed=12))


class Pair(Mesh):
    """The mesh of one of two ranks that measured the same."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.mul_(2.0)


@dataclass
class Due:
    """An interlude that is due after some steps."""

    steps: Sequence[int]
    found: dict[str, Any]
    enter: Callable[[RankActivity], None] = lambda activity: None

    def due(self, state: TrainState) -> bool:
        return state.step in self.steps

    def run(self, state: TrainState) -> dict[str, Any]:
        return self.found


def result_of(gradient: Sequence[float] = (3.0, 0.0, -4.0), **fields: Any) -> StepResult:
    given = StepResult(
        phase=PHASE,
        cross_entropy=torch.tensor(24.0),
        z_loss=torch.tensor(1.5),
        tokens=32,
        counted=12,
        gradients=examine([CountedGradient(gradient=torch.tensor(gradient))], limit=0.0, unscale=1.0),
        loss_scale=None,
        learning_rate=1e-3,
        started=time.perf_counter() - 2.0,
    )
    return replace(given, **fields)


@pytest.fixture
def metrics_of(tmp_path: Path):
    controls: list[Control] = []

    def make(mesh: Mesh = ALONE, **settings: Any) -> Metrics:
        controls.append(Control(RunDirectory(tmp_path).create(), mesh))
        given = {
            "interludes": (),
            "cost": TokenCost(model=2 * 10**12, hardware=3 * 10**12),
            "peak_flops": None,
            "sequence_length": 8,
        }
        return Metrics(mesh=mesh, control=controls[-1], **{**given, **settings})

    yield make
    for control in controls:
        control.close()


def reported(metrics: Metrics, result: StepResult, state: TrainState = STATE, **facts: float) -> StepReport:
    local = LocalFacts(
        **{
            **dict.fromkeys(("save", "stop", "interrupted", "terminated", "request"), 0.0),
            **{"minutes": 3.0, "minutes_since_save": 1.0},
            **facts,
        }
    )
    return metrics.report(state, result, local)[1]


def test_losses_are_means_over_the_tokens_that_count_on_all_ranks(metrics_of) -> None:
    alone = reported(metrics_of(), result_of())
    assert (alone.loss, alone.z_loss) == (2.0, 0.125)
    assert (alone.gradient_norm, alone.zero_gradients, alone.update_applied) == (5.0, 1, True)
    pair = reported(metrics_of(Pair(device=CPU, world=2)), result_of())
    assert (pair.loss, pair.z_loss) == (4.0, 0.25) and pair.gradient_norm == 5.0


def test_what_ranks_measure_is_told_as_their_mean(metrics_of) -> None:
    queue = QueueStatus(ready=3.0, waited_s=0.25)
    report = reported(metrics_of(Pair(device=CPU, world=2), queue=lambda: queue), result_of())
    assert (report.data_queue, report.data_wait_s) == (3.0, 0.25)
    assert report.memory_bytes == pytest.approx(memory_in_use(CPU), rel=0.5) and report.memory_bytes > 2**20


def test_the_seconds_that_all_ranks_know_are_those_of_the_step_before(metrics_of) -> None:
    metrics = metrics_of(Pair(device=CPU, world=2))
    first, second = reported(metrics, result_of()), reported(metrics, result_of())
    assert first.shared_seconds is None and second.shared_seconds == first.seconds


def test_speed_is_of_all_tokens_and_of_each_accelerator(metrics_of) -> None:
    metrics = metrics_of(Pair(device=CPU, world=2), peak_flops=64e12)
    report = reported(metrics, result_of())
    assert report.seconds == pytest.approx(2.0, rel=0.2)
    assert report.samples_per_s * report.seconds == pytest.approx(4.0)
    assert report.tokens_per_s * report.seconds == pytest.approx(32.0)
    assert report.model_tflops * report.seconds == pytest.approx(32.0)
    assert report.hardware_tflops * report.seconds == pytest.approx(48.0)
    assert report.mfu == pytest.approx(report.model_tflops / 64.0)
    assert reported(metrics_of(), result_of()).mfu is None, "the peak is not known"


def test_progress_is_that_of_the_state_and_of_all_peers_in_a_round(metrics_of) -> None:
    report = reported(metrics_of(mixture=lambda: 2), result_of())
    assert (report.step, report.consumed_samples, report.consumed_tokens) == (3, 12, 96)
    assert (report.peers, report.mixture, report.precision, report.global_batch) == (1, 2, "fp16", 4)
    assert (report.cursor, report.learning_rate) == (12, 1e-3)
    skipping = replace(STATE, position=Position(consumed=12, skips=(range(2, 5),)))
    assert reported(metrics_of(), result_of(), skipping).cursor == 15
    among_three = replace(STATE, under_way=UnderWay(committed=6, live=3))
    report = reported(metrics_of(), result_of(), among_three)
    assert (report.peers, report.consumed_samples) == (3, 6 + 3 * 6)


def test_refused_updates_and_losses_that_are_no_number_are_counted(metrics_of) -> None:
    metrics, state = metrics_of(), STATE
    seen = []
    for gradient, loss in ((torch.nan, 24.0), (torch.inf, torch.nan), (1.0, 24.0), (torch.nan, 24.0)):
        local = LocalFacts(**dict.fromkeys(LocalFacts.__dataclass_fields__, 0.0))
        result = result_of([gradient], cross_entropy=torch.tensor(loss))
        state, report = metrics.report(state, result, local)
        seen.append((report.update_applied, report.refused_updates, report.refused_in_a_row))
        assert report.nan_losses == state.nan_losses
    assert seen == [(False, 1, 1), (False, 2, 2), (True, 2, 0), (False, 3, 1)] and state.nan_losses == 1


def test_a_loss_scale_and_inner_sizes_are_told_where_there_are_any(metrics_of) -> None:
    plain = reported(metrics_of(), result_of())
    assert plain.loss_scale is None and plain.inner_sizes is None
    sizes = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    scaled = reported(metrics_of(), result_of(loss_scale=torch.tensor(1024.0), inner_sizes=sizes))
    assert scaled.loss_scale == 1024.0
    assert scaled.inner_sizes == {"logit": [1.0, 2.0], "hidden": [3.0, 4.0], "weight": [5.0, 6.0]}


def test_interludes_that_are_due_add_to_the_report_and_are_told_as_an_evaluation(metrics_of) -> None:
    entered: list[RankActivity] = []
    interludes = (Due((3,), {"held_out_loss": 1.5}), Due((4,), {"held_out_loss": 9.0}))
    report = reported(metrics_of(interludes=interludes, enter=entered.append), result_of())
    assert report.held_out_loss == 1.5
    assert entered == [RankActivity.REPORTING, RankActivity.EVALUATING]
    entered.clear()
    metrics = metrics_of(interludes=interludes, enter=entered.append)
    report = reported(metrics, result_of(), replace(STATE, step=5))
    assert report.held_out_loss is None and entered == [RankActivity.REPORTING]


def test_the_time_of_an_interlude_is_not_time_of_the_step(
    metrics_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("bloomery.train.metrics.time.perf_counter", lambda: now_s[0])

    class Evaluation(Due):
        def run(self, state: TrainState) -> dict[str, Any]:
            now_s[0] += 50.0
            return self.found

    report = reported(metrics_of(interludes=[Evaluation((3,), {})]), result_of(started=98.0))
    assert now_s == [150.0] and report.seconds == 2.0


def test_what_one_rank_knows_from_outside_is_agreed_on(metrics_of) -> None:
    facts = reported(metrics_of(), result_of(), save=1.0, terminated=1.0).facts
    assert facts.save_requested and facts.stop_reason == "signal SIGTERM"
    assert (facts.minutes_running, facts.minutes_since_save) == (3.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Gathered(Mesh):
    """A mesh whose ranks worked so many seconds a step; this rank's are the first."""

    others: tuple[float, ...] = ()

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, *([f"node{number}", own] for number, own in enumerate(self.others, 1))]


def slow_among(own: Sequence[float], *others: float) -> dict[str, Any]:
    ranks = SlowRanks(Gathered(device=CPU, world=1 + len(others), others=others))
    for seconds in own:
        spent = {RankActivity.COMPUTING: seconds / 2, RankActivity.UPDATING: seconds / 4}
        ranks.count({**spent, RankActivity.WAITING_FOR_SAMPLES: seconds / 4, RankActivity.REDUCING: 99.0})
    return ranks.compare()


def test_ranks_that_work_longer_than_the_faster_half_are_named_slowest_first() -> None:
    told = slow_among([1.0], 1.0, 1.04, 1.2, 3.0)
    assert [(rank, host) for rank, host, _ in told["slow"]] == [(4, "node4"), (3, "node3")]
    assert (told["usual_s"], told["ranks"]) == (1.0, 5)
    assert slow_among([1.0], 1.01)["slow"] == []
    rounded = slow_among([1.00006, 1.00007], 1.23456)
    assert (rounded["slow"], rounded["usual_s"]) == ([[1, "node1", 1.2346]], 1.0001)
    assert [named[0] for named in slow_among([2.0], 1.0)["slow"]] == [0], "of two the slower one"


def test_the_newest_three_steps_of_a_rank_are_compared_and_eight_ranks_named() -> None:
    told = slow_among([90.0, 1.0, 2.0, 3.0], *[1.0] * 9)
    assert [(named[0], named[2]) for named in told["slow"]] == [(0, 2.0)]
    told = slow_among([1.0], *[1.0] * 12, *(float(number) for number in range(10, 21)))
    assert [named[0] for named in told["slow"]] == list(range(23, 15, -1))
    assert slow_among([])["slow"] == [] and slow_among([], 1.0)["usual_s"] == 0.0


def test_a_rank_is_slow_from_a_twentieth_on() -> None:
    assert [named[0] for named in slow_among([1.0], 1.0, 1.06)["slow"]] == [2]
    assert slow_among([1.0], 1.0, 1.05)["slow"] == []


def test_the_memory_of_a_gpu_is_what_is_allocated_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", {gpu: 4096}.__getitem__)
    assert memory_in_use(gpu) == 4096.0


def test_memory_that_no_rank_knows_is_unknown_in_the_report(
    metrics_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bloomery.train.metrics.memory_in_use", lambda device: 0.0)
    assert reported(metrics_of(), result_of()).memory_bytes is None
