"""What TensorBoard shows of a run, read back from the files by its own reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.guard.verdict import CarryOn
from bloomery.train.observers import TensorBoard


def test_tensorboard_reads_back_what_was_reported_without_what_a_rewind_discarded(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    place = tmp_path / "tensorboard"
    observer = TensorBoard(place, first_step=0)

    def tell(step: int, loss: float, **fields: object) -> None:
        run.step = step
        observer.tell(run.report(loss, **fields), CarryOn(judged_step=step))

    for step in range(1, 7):
        tell(step, 6.0 - step / 2)
    observer.rewound(3)
    for step in range(4, 6):
        tell(step, 1.0 + step, held_out_loss=2.5, held_out_by_dataset={"code": 2.25}, mfu=0.4)
    observer.close()

    read = EventAccumulator(str(place))
    read.Reload()

    def scalars(name: str) -> list[tuple[int, float]]:
        return [(point.step, pytest.approx(point.value)) for point in read.Scalars(name)]

    assert scalars("loss/train") == [(1, 5.5), (2, 5.0), (3, 4.5), (4, 5.0), (5, 6.0)]
    assert scalars("held_out/code") == [(4, 2.25), (5, 2.25)] and scalars("speed/mfu") == [
        (4, 0.4),
        (5, 0.4),
    ]
    assert scalars("progress/consumed_tokens")[-1] == (5, 5 * 256.0)
    assert scalars("optimizer/learning_rate")[0] == (1, 1e-3)
    assert "optimizer/loss_scale" not in read.Tags()["scalars"]  # this run has none
