"""Trackers: each step reaches the service in its order, and none of them can stop or slow a step."""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.operate.dashboard.written_run import WrittenRun

from bloomery.errors import BloomeryError
from bloomery.guard.verdict import CarryOn
from bloomery.train import trackers as trackers_module
from bloomery.train.trackers import TrackedRun, TrackedStep, Tracker, trackers

RUN = TrackedRun(name="mine", identity="0123456789abcdef", settings={"model.layers": "2", "run.name": "mine"})
WITHIN_S = 20.0


class Kept:
    """A service that keeps what it gets. opens: set when it may answer. refuses: what it raises at a step."""

    def __init__(self, *, refuses: Exception | None = None) -> None:
        self.steps: list[TrackedStep] = []
        self.at_once: list[int] = []
        self.opens, self.is_asked, self.is_closed, self._refuses = (
            threading.Event(),
            threading.Event(),
            False,
            refuses,
        )

    def send(self, steps: Sequence[TrackedStep]) -> None:
        self.is_asked.set()
        assert self.opens.wait(WITHIN_S)
        if self._refuses:
            raise self._refuses
        self.steps += steps
        self.at_once.append(len(steps))

    def close(self) -> None:
        self.is_closed = True


def tell(observer: Tracker, run: WrittenRun, steps: Sequence[int], **fields: object) -> None:
    for step in steps:
        run.step = step
        observer.tell(run.report(6.0 - step / 10, **fields), CarryOn(judged_step=step))


def test_every_step_arrives_in_its_order_with_those_after_a_rewind(tmp_path: Path) -> None:
    service, run, began = Kept(), WrittenRun(tmp_path / "run"), time.time()
    service.opens.set()
    observer = Tracker("service", lambda: service)
    tell(observer, run, range(1, 7))
    observer.rewound(3)
    tell(observer, run, range(4, 6), held_out_loss=2.5, held_out_by_dataset={"code": 2.25})
    observer.close()
    assert [step.step for step in service.steps] == [1, 2, 3, 4, 5, 6, 4, 5] and service.is_closed
    assert all(began <= step.time <= time.time() for step in service.steps)
    assert service.steps[-1].scalars["held_out/code"] == 2.25
    assert service.steps[0].scalars["loss/train"] == 5.9
    assert "optimizer/loss_scale" not in service.steps[0].scalars  # this run has none


def test_a_silent_service_costs_steps_of_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers_module, "_MOST_WAITING", 5)
    monkeypatch.setattr(trackers_module, "_AT_ONCE", 4)
    service, run = Kept(), WrittenRun(tmp_path / "run")
    observer = Tracker("service", lambda: service)
    tell(observer, run, [1])
    assert service.is_asked.wait(WITHIN_S)  # the first is on its way
    tell(observer, run, range(2, 100))  # nobody answers, and this comes back
    assert observer.left_out == 93  # five wait
    service.opens.set()
    observer.close()
    assert len(service.steps) + observer.left_out == 99
    assert service.at_once[:3] == [1, 4, 1]  # what waited goes together, so many steps at most
    assert "were not sent to service" in caplog.text


def test_what_still_waits_when_the_run_ends_without_an_answer_counts_as_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers_module, "_MOST_WAITING", 5)
    monkeypatch.setattr(trackers_module, "_CLOSE_S", 0.01)
    service, run = Kept(), WrittenRun(tmp_path / "run")
    observer = Tracker("service", lambda: service)
    tell(observer, run, [1])
    assert service.is_asked.wait(WITHIN_S)
    tell(observer, run, range(2, 10))
    assert observer.left_out == 3
    observer.close()
    assert observer.left_out == 8  # all but the first, which the service has
    assert "8 steps were not sent" in caplog.text and "did not take the last steps" in caplog.text
    service.opens.set()
    monkeypatch.setattr(trackers_module, "_CLOSE_S", WITHIN_S)
    observer.close()
    assert service.is_closed


@pytest.mark.parametrize("when", ["connecting", "sending"])
def test_a_service_that_refuses_ends_the_tracking_and_nothing_else(
    when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, run = Kept(refuses=RuntimeError("no such project")), WrittenRun(tmp_path / "run")
    service.opens.set()

    def connect() -> Kept:
        if when == "connecting":
            raise RuntimeError("no such project")
        return service

    observer = Tracker("service", connect)
    tell(observer, run, range(1, 50))
    observer.close()
    told = [entry for entry in caplog.records if "no longer follows this run" in entry.message]
    assert [entry.message for entry in told] == ["service no longer follows this run: no such project"]
    assert not observer._thread.is_alive() and observer._thread.daemon
    assert len(told) == 1 and "no such project" in told[0].message and told[0].levelno == logging.WARNING
    assert service.steps == []
    assert observer.left_out in ([49] if when == "connecting" else range(49))  # those of the refused message


def test_a_service_that_refuses_the_last_steps_keeps_nobody_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers_module, "_CLOSE_S", WITHIN_S / 4)

    class RefusesTheLast(Kept):
        def send(self, steps: Sequence[TrackedStep]) -> None:
            if self.at_once:
                raise RuntimeError("no such project")
            super().send(steps)

    service, run = RefusesTheLast(), WrittenRun(tmp_path / "run")
    observer = Tracker("service", lambda: service)
    tell(observer, run, [1])
    assert service.is_asked.wait(WITHIN_S)
    tell(observer, run, [2, 3])
    put = observer._waiting.put

    def put_and_answer(item: TrackedStep | None, *, timeout: float) -> None:
        put(item, timeout=timeout)
        service.opens.set()

    monkeypatch.setattr(observer._waiting, "put", put_and_answer)
    observer.close()
    assert not observer._thread.is_alive() and [step.step for step in service.steps] == [1]
    assert "no longer follows this run: no such project" in caplog.text


def test_a_package_that_is_missing_is_told_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers_module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BloomeryError) as refused:
        trackers(["wandb"], RUN)
    assert refused.value.remedy == "pip install 'bloomery[wandb]', or leave it out of log.trackers."
    there = {"wandb": "a package"}
    monkeypatch.setattr(trackers_module.importlib.util, "find_spec", there.get)
    with pytest.raises(BloomeryError, match=r"log\.trackers names mlflow, which is not installed"):
        trackers(["wandb", "mlflow"], RUN)


def test_mlflow_gives_back_what_two_starts_of_a_run_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason="pip install 'bloomery[mlflow]'")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run, began = WrittenRun(tmp_path / "run"), time.time()
    for steps in (range(1, 4), range(4, 6)):
        (observer,) = trackers(["mlflow"], RUN)
        tell(observer, run, steps, held_out_loss=2.5, held_out_by_dataset={"a:b": 2.25})
        observer.close()
    client = MlflowClient()
    experiment = client.get_experiment_by_name("bloomery")
    assert experiment is not None
    (entry,) = client.search_runs([experiment.experiment_id])
    points = client.get_metric_history(entry.info.run_id, "loss/train")
    assert sorted((point.step, point.value) for point in points) == [
        (step, pytest.approx(6.0 - step / 10)) for step in range(1, 6)
    ]
    assert all(1000 * began - 1 <= point.timestamp <= 1000 * time.time() for point in points)
    assert entry.data.metrics["held_out/a_b"] == 2.25
    assert (entry.data.params["model.layers"], entry.info.status) == ("2", "FINISHED")


def logged_records(log: bytes, *, begin: int = 7, block: int = 32_768) -> Iterator[bytes]:
    """The records of a log in the format of LevelDB, behind a head of `begin` bytes."""
    content = b""
    while begin + 7 <= len(log):
        left = block - begin % block
        if left < 7:
            begin += left
            continue
        _, length, kind = struct.unpack_from("<IHB", log, begin)
        content += log[begin + 7 : begin + 7 + length]
        begin += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield content
            content = b""


def test_wandb_keeps_what_was_sent_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="pip install 'bloomery[wandb]'")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    (observer,) = trackers(["wandb"], RUN)
    tell(observer, WrittenRun(tmp_path / "run"), range(1, 4))
    observer.close()
    (file,) = tmp_path.rglob("*.wandb")
    losses = {}
    for content in logged_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if "loss/train" in row:
            losses[int(row["step"])] = float(row["loss/train"])
    assert losses == {step: pytest.approx(6.0 - step / 10) for step in (1, 2, 3)}
    assert os.fspath(file).count(RUN.identity) >= 1
