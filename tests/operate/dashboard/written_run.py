"""A run directory that a test writes step by step, as a training would, without training."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from bloomery.events.incarnation import begin
from bloomery.events.journal import Journal
from bloomery.events.records import StepReport
from bloomery.events.run_directory import RunDirectory

BATCH, LENGTH = 8, 32


class WrittenRun:
    """Writes the journal of a first rank."""

    def __init__(self, path: Path, *, began: float | None = None) -> None:
        self.rundir = RunDirectory(path).create()
        self.journal = Journal(self.rundir.journal())
        self.incarnation = self.step = 0

    def start(self, *, base: tuple[int, int] | None = None, reason: str = "start", **fields: Any) -> None:
        """Begin an incarnation, from a checkpoint or from nothing."""
        self.incarnation = begin(self.rundir, base=base, reason=reason)
        self.step = base[0] if base else 0
        told = {"ranks": 1, "device": "cpu", "host": "here", "versions": {"bloomery": "0.1.0"}} | fields
        self.event("start", reason=reason, **told)

    def steps(self, count: int, *, loss: Any = None, **fields: Any) -> None:
        """Write steps; their loss falls with the step unless it is given."""
        for _ in range(count):
            self.step += 1
            own = 2.0 + 4.0 / math.sqrt(self.step) if loss is None else loss
            record = self.report(own, **fields).to_json()
            record.pop("step")
            self.event("step", **record, spent={"forward and backward": 0.08, "waiting for samples": 0.01})

    def report(self, loss: float, **fields: Any) -> StepReport:
        """Return the report of the present step."""
        consumed = self.step * BATCH
        facts: dict[str, Any] = {
            "consumed_samples": consumed,
            "consumed_tokens": consumed * LENGTH,
            "cursor": consumed,
            "seconds": 0.1,
            "learning_rate": 1e-3,
            "global_batch": BATCH,
            "loss": loss,
            "z_loss": 0.0,
            "loss_scale": None,
            "gradient_norm": 0.5,
            "zero_gradients": 0,
            "update_applied": True,
            "refused_updates": 0,
            "refused_in_a_row": 0,
            "nan_losses": 0,
            "samples_per_s": 80.0,
            "tokens_per_s": 2560.0,
            "hardware_tflops": 0.1,
            "model_tflops": 0.1,
            "mfu": None,
        }
        return StepReport(step=self.step, **facts | fields)

    def event(self, event: str, **fields: Any) -> None:
        """Write one event at the present step."""
        step = fields.pop("step", self.step)
        self.journal.write(event, incarnation=self.incarnation, step=step, **fields)

    def operation(self, event: str, **fields: Any) -> None:
        """Write one event of a supervisor."""
        with Journal(self.rundir.operations) as journal:
            journal.write(event, incarnation=0, step=self.step, **fields)


def healed_run(path: Path) -> WrittenRun:
    """A run with a spike at step 60, a rewind to step 50, and 90 steps that are part of it."""
    run = WrittenRun(path)
    run.start()
    run.steps(50)
    run.event("checkpoint", path="step-000050.i001")
    run.steps(9)
    run.steps(1, loss=9.5)
    run.event("guard", guard="spike", action="rewind", reason="loss 9.5 is far above its usual 2.5")
    run.event("rewind", to_step=50, skip=[400, 480], reason="spike")
    run.start(base=(50, 1), reason="rewind")
    run.steps(40, held_out_loss=None)
    run.steps(1, held_out_loss=2.75, held_out_by_dataset={"code": 2.5, "prose": 3.0})
    return run


def wait_until(condition: Any, *, within_s: float = 20.0) -> None:
    """Return once a condition holds; fails after `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.05)
