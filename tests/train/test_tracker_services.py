"""What Weights & Biases and MLflow are called with, by stand-ins for their packages."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bloomery.train import trackers as trackers_module
from bloomery.train.trackers import MlflowConnection, TrackedRun, TrackedStep, WandbConnection, trackers

RUN = TrackedRun(name="mine", identity="0123", settings={"model.layers": "2", "run.name": "x" * 600})
STEPS = [
    TrackedStep(step=3, time=10.25, scalars={"loss/train": 2.5, "held_out/a:b": 2.0}),
    TrackedStep(step=4, time=11.0, scalars={"loss/train": 2.25}),
]


@pytest.mark.parametrize(("offline", "mode"), [(True, "offline"), (False, None)])
def test_a_run_goes_on_at_wandb_under_its_identity_with_steps_as_an_axis_of_their_own(
    offline: bool, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def noted(name: str) -> Any:
        return lambda *told, **more: calls.append((name, *told, *([more] if more else [])))

    run = SimpleNamespace(define_metric=noted("metric"), log=noted("log"), finish=noted("finish"))
    package = SimpleNamespace(init=lambda **told: calls.append(("init", told)) or run)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setattr(trackers_module, "is_offline", lambda: offline)
    connection = WandbConnection(RUN)
    connection.send(STEPS)
    connection.close()
    assert calls == [
        (
            "init",
            {
                "project": None,
                "name": "mine",
                "id": "0123",
                "resume": "allow",
                "config": dict(RUN.settings),
                "mode": mode,
            },
        ),
        ("metric", "step"),
        ("metric", "*", {"step_metric": "step"}),
        ("log", {"loss/train": 2.5, "held_out/a:b": 2.0, "step": 3}),
        ("log", {"loss/train": 2.25, "step": 4}),
        ("finish",),
    ]


class Client:
    """An MLflow server with some experiments and runs."""

    def __init__(self, calls: list[Any], *, known: bool, found: bool) -> None:
        self._calls, self._known, self._found = calls, known, found

    def get_experiment_by_name(self, name: str) -> Any:
        self._calls.append(("experiment", name))
        return SimpleNamespace(experiment_id="e1") if self._known else None

    def create_experiment(self, name: str) -> str:
        self._calls.append(("made experiment", name))
        return "e2"

    def search_runs(self, experiments: list[str], wanted: str, max_results: int) -> list[Any]:
        self._calls.append(("search", experiments, wanted, max_results))
        return [SimpleNamespace(info=SimpleNamespace(run_id="r1"))] if self._found else []

    def update_run(self, run: str, *, status: str) -> None:
        self._calls.append(("update", run, status))

    def create_run(self, experiment: str, *, run_name: str) -> Any:
        self._calls.append(("made run", experiment, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="r2"))

    def log_batch(self, run: str, **what: Any) -> None:
        self._calls.append(("batch", run, what))

    def set_terminated(self, run: str) -> None:
        self._calls.append(("terminated", run))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a connection to a server that knows the experiment or the run; returns it with the calls."""
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)

    def connect(
        run: TrackedRun = RUN, *, known: bool = True, found: bool = False
    ) -> tuple[MlflowConnection, list[Any]]:
        calls: list[Any] = []
        client = lambda: Client(calls, known=known, found=found)  # noqa: E731
        entities = SimpleNamespace(
            Param=lambda *told: told, RunTag=lambda *told: told, Metric=lambda *told: told
        )
        monkeypatch.setitem(sys.modules, "mlflow", ModuleType("mlflow"))
        monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
        monkeypatch.setitem(sys.modules, "mlflow.tracking", SimpleNamespace(MlflowClient=client))
        return MlflowConnection(run), calls

    return connect


def test_a_run_that_mlflow_does_not_know_is_made_with_its_identity_and_its_settings(mlflow: Any) -> None:
    _, calls = mlflow(known=False)
    assert calls == [
        ("experiment", "bloomery"),
        ("made experiment", "bloomery"),
        ("search", ["e2"], "tags.bloomery_run = '0123'", 1),
        ("made run", "e2", "mine"),
        ("batch", "r2", {"tags": [("bloomery_run", "0123")]}),
        ("batch", "r2", {"params": [("model.layers", "2"), ("run.name", "x" * 500)]}),
    ]


def test_a_run_that_mlflow_knows_goes_on_where_its_environment_says(
    mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    connection, calls = mlflow(found=True)
    assert calls == [
        ("experiment", "ours"),
        ("search", ["e1"], "tags.bloomery_run = '0123'", 1),
        ("update", "r1", "RUNNING"),
    ]
    calls.clear()
    connection.send(STEPS)
    connection.close()
    assert calls == [
        (
            "batch",
            "r1",
            {
                "metrics": [
                    ("loss/train", 2.5, 10250, 3),
                    ("held_out/a_b", 2.0, 10250, 3),
                    ("loss/train", 2.25, 11000, 4),
                ]
            },
        ),
        ("terminated", "r1"),
    ]


def test_mlflow_gets_as_much_at_once_as_it_takes(mlflow: Any) -> None:
    settings = {f"a.{number}": str(number) for number in range(201)}
    connection, calls = mlflow(TrackedRun(name="mine", identity="0123", settings=settings))
    batches = [what["params"] for _, _, what in calls[-3:]]
    assert [len(params) for params in batches] == [100, 100, 1]
    assert [param for params in batches for param in params] == list(settings.items())
    calls.clear()
    connection.send([TrackedStep(step=n, time=0.0, scalars={"a": 1.0, "b": 2.0}) for n in range(501)])
    sent = [what["metrics"] for _, _, what in calls]
    assert [len(metrics) for metrics in sent] == [1000, 2] and sent[1] == [
        ("a", 1.0, 0, 500),
        ("b", 2.0, 0, 500),
    ]


def test_each_service_that_is_named_is_followed_over_its_own_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers_module, "refuse_missing_packages", lambda services: None)
    monkeypatch.setattr(trackers_module, "WandbConnection", lambda run: ("wandb", run))
    monkeypatch.setattr(trackers_module, "MlflowConnection", lambda run: ("mlflow", run))
    monkeypatch.setattr(trackers_module, "Tracker", lambda service, connect: (service, connect()))
    assert trackers(["mlflow", "wandb"], RUN) == [("mlflow", ("mlflow", RUN)), ("wandb", ("wandb", RUN))]
    assert trackers([], RUN) == []
