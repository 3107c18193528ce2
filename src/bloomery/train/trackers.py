"""Sends the figures of a run to Weights & Biases and to MLflow, from a thread that no step waits for."""

from __future__ import annotations

import importlib.util
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from bloomery.config.environment import is_offline
from bloomery.errors import BloomeryError
from bloomery.events.records import StepReport
from bloomery.guard.verdict import Verdict

log = logging.getLogger(__name__)

_MOST_WAITING, _AT_ONCE = 10_000, 500
_CLOSE_S = 30.0
_MLFLOW_MOST_PARAMETERS = 100  # of one request
_MLFLOW_NAME = re.compile(r"[^\w\-. /]")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker gets about a run.

    identity: a text that names the run for ever, so that a resumed one goes on under the same entry.
    settings: every setting of the recipe, by its key.
    """

    name: str
    identity: str
    settings: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class TrackedStep:
    """The scalars of one step, by name, with the seconds since 1970 at which they were reported."""

    step: int
    time: float
    scalars: Mapping[str, float]


class TrackerConnection(Protocol):
    """An open connection to a tracking service. It is used by one thread."""

    def send(self, steps: Sequence[TrackedStep]) -> None:
        """Send some steps, in their order."""

    def close(self) -> None:
        """Send what waits, and end."""


class Tracker:
    """An observer that hands each report to a thread. A slow or silent service costs the training nothing.

    connect: opens the connection, in the thread. Whatever the service raises ends the tracking with a log
    line, never the run. Steps beyond those that may wait are left out, and counted.
    """

    def __init__(self, service: str, connect: Callable[[], TrackerConnection]) -> None:
        self._service, self._connect = service, connect
        self._waiting: queue.Queue[TrackedStep | None] = queue.Queue(_MOST_WAITING)
        self.left_out = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker {service}", daemon=True)
        self._thread.start()

    def tell(self, report: StepReport, verdict: Verdict) -> None:
        """Queue the step's scalars."""
        step = TrackedStep(step=report.step, time=time.time(), scalars=scalars_of(report))
        try:
            self._waiting.put_nowait(step)
        except queue.Full:
            self.left_out += 1

    def rewound(self, step: int) -> None:
        """Do nothing: the steps that follow are sent under their own numbers, beside those of before."""

    def close(self) -> None:
        """Wait for half a minute at most until what was reported is sent."""
        end = time.monotonic() + _CLOSE_S
        try:
            self._waiting.put(None, timeout=_CLOSE_S)
        except queue.Full:
            self.left_out += self._waiting.qsize()
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.warning("%s did not take the last steps within %.0f s", self._service, _CLOSE_S)
        if self.left_out:
            log.warning("%d steps were not sent to %s, which was too slow", self.left_out, self._service)

    def _run(self) -> None:
        is_open = True
        try:
            connection = self._connect()
            while is_open:
                steps = self._next()
                is_open = None not in steps
                connection.send([step for step in steps if step is not None])
            connection.close()
        except Exception as refused:
            # The edge of a thread that speaks to a foreign library, which may raise anything: the run goes on
            log.warning("%s no longer follows this run: %s", self._service, refused, exc_info=True)
            while is_open and self._waiting.get() is not None:
                self.left_out += 1

    def _next(self) -> list[TrackedStep | None]:
        """Wait for a step, and return it with those that wait behind it."""
        steps = [self._waiting.get()]
        while steps[-1] is not None and len(steps) < _AT_ONCE:
            try:
                steps.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        return steps


def scalars_of(report: StepReport) -> dict[str, float]:
    """Return the figures of a step under the names that trackers show; those that it lacks are left out."""
    scalars: dict[str, float | None] = {
        "loss/train": report.loss,
        "loss/z": report.z_loss,
        "optimizer/learning_rate": report.learning_rate,
        "optimizer/gradient_norm": report.gradient_norm,
        "optimizer/refused_updates": report.refused_updates,
        "progress/global_batch": report.global_batch,
        "progress/consumed_samples": report.consumed_samples,
        "progress/consumed_tokens": report.consumed_tokens,
        "speed/tokens_per_s": report.tokens_per_s,
        "speed/model_tflops": report.model_tflops,
        "loss/held_out": report.held_out_loss,
        "optimizer/loss_scale": report.loss_scale,
        "speed/mfu": report.mfu,
        "data/queue": report.data_queue,
        "data/wait_s": report.data_wait_s,
    }
    for dataset, loss in (report.held_out_by_dataset or {}).items():
        # Not below loss/held_out: MLflow keeps a figure as a file, and one below it as a file in a directory.
        scalars[f"held_out/{dataset}"] = loss
    return {name: value for name, value in scalars.items() if value is not None}


def refuse_missing_packages(services: Sequence[str]) -> None:
    """Raise BloomeryError where the package of a service is not installed."""
    for service in services:
        if importlib.util.find_spec(service) is None:
            raise BloomeryError(
                f"log.trackers names {service}, which is not installed.",
                remedy=f"pip install 'bloomery[{service}]', or leave it out of log.trackers.",
            )


def trackers(services: Sequence[str], run: TrackedRun) -> list[Tracker]:
    """Return an observer for each service. Raises BloomeryError where its package is not installed."""
    refuse_missing_packages(services)
    connections: dict[str, Callable[[TrackedRun], TrackerConnection]] = {
        "wandb": WandbConnection,
        "mlflow": MlflowConnection,
    }
    return [Tracker(service, partial(connections[service], run)) for service in services]


class WandbConnection:
    """Sends steps to Weights & Biases, or into its files where the run has no network.

    Its own step only grows, and a run's goes back at a rewind; so the step is an axis of our own.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run: Any = wandb.init(  # Any: the package is an extra
            project=None,  # WANDB_PROJECT, as everything else that its environment says
            name=run.name,
            id=run.identity,
            resume="allow",
            config=dict(run.settings),
            mode="offline" if is_offline() else None,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, steps: Sequence[TrackedStep]) -> None:
        """Send some steps."""
        for step in steps:
            self._run.log({**step.scalars, "step": step.step})

    def close(self) -> None:
        """Send what waits, and mark the end of this process's part of the run."""
        self._run.finish()


class MlflowConnection:
    """Sends steps to the MLflow server, or into the directory, that MLFLOW_TRACKING_URI names."""

    def __init__(self, run: TrackedRun) -> None:
        import os

        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()  # Any: the package is an extra
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "bloomery")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        found = self._client.search_runs([experiment], f"tags.bloomery_run = '{run.identity}'", max_results=1)
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        made = self._client.create_run(experiment, run_name=run.name)
        self._id = made.info.run_id
        self._client.log_batch(self._id, tags=[RunTag("bloomery_run", run.identity)])
        settings = [Param(key, value[:500]) for key, value in run.settings.items()]
        for begin in range(0, len(settings), _MLFLOW_MOST_PARAMETERS):
            self._client.log_batch(self._id, params=settings[begin : begin + _MLFLOW_MOST_PARAMETERS])

    def send(self, steps: Sequence[TrackedStep]) -> None:
        """Send some steps."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_MLFLOW_NAME.sub("_", name), value, int(1000 * step.time), step.step)
            for step in steps
            for name, value in step.scalars.items()
        ]
        for begin in range(0, len(metrics), 1000):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + 1000])

    def close(self) -> None:
        """Mark the end of this process's part of the run."""
        self._client.set_terminated(self._id)
