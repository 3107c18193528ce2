"""How a run's directory is taken and its data prepared, and what its model and its store are made with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.train.test_assembling import CPU, Calls, Part, calls, rundir

from bloomery.config.load import load_recipe
from bloomery.config.resume import SettingChanges
from bloomery.errors import RunBusy
from bloomery.events.heartbeat import RankActivity
from bloomery.events.run_directory import RunDirectory
from bloomery.parallel.mesh import Mesh
from bloomery.train import assemble
from bloomery.train.settings import StartOptions

__all__ = ["calls", "rundir"]


class Others(Mesh):
    """A later rank, for which the first one does things."""

    def run_on_rank_zero(self, task: Any, *, doing: str) -> Any:
        assert doing == "preparing the data"


def taking(
    calls: Calls, rundir: RunDirectory, mesh: Mesh, *settings: str, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Take a run; return what came back."""

    @contextmanager
    def lock_run(rundir: Any, *, on_lost: Any) -> Iterator[None]:
        calls.append(("locked",))
        yield
        calls.append(("unlocked",))

    monkeypatch.setattr(assemble, "lock_run", lock_run)
    monkeypatch.setattr(assemble, "changes_of", lambda *told: calls.append(("changes",)) or "the changes")
    monkeypatch.setattr(assemble, "refuse_changed_url", lambda *told: calls.append(("url", *told)))
    for name in ("prepare_run", "prepare_after_first"):

        def prepared(*told: Any, name: str = name, **more: Any) -> str:
            calls.append((name, *told, more))
            return "prepared"

        monkeypatch.setattr(assemble, name, prepared)
    monkeypatch.setattr(
        assemble, "progress_with_ticks", lambda progress, *ticks: ("ticks", progress, len(ticks))
    )
    loaded = load_recipe("demo", settings)
    options = StartOptions(say=print, data_progress=lambda: nullcontext("progress"))  # type: ignore[arg-type,return-value]
    with ExitStack() as stack:
        taken = assemble._take_and_prepare(
            loaded,
            rundir,
            options,
            mesh=mesh,
            heartbeat=Part(calls, "heartbeat"),  # type: ignore[arg-type]
            stack=stack,
        )
        calls.append(("taken", loaded.recipe))
    return taken


@pytest.mark.parametrize("is_trained_on", [True, False])
def test_a_run_is_locked_until_its_end_before_its_recipe_is_compared_and_its_data_are_prepared(
    is_trained_on: bool, calls: Calls, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "checkpoints", lambda run: ("one",) if is_trained_on else ())
    taken = taking(calls, rundir, Mesh(device=CPU), monkeypatch=monkeypatch)
    recipe = calls[-2][1]
    assert taken == ("the changes", "prepared")
    assert calls == [
        ("locked",),
        ("heartbeat.start",),
        ("heartbeat.enter", RankActivity.PREPARING),
        ("changes",),
        ("url", rundir, recipe.checkpoint),
        (
            "prepare_run",
            recipe.data,
            rundir.data,
            {"progress": ("ticks", "progress", 2), "is_trained_on": is_trained_on},
        ),
        ("taken", recipe),
        ("unlocked",),
    ]


def test_a_run_whose_checkpoints_are_elsewhere_may_have_trained_on_its_data(
    calls: Calls, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "checkpoints", lambda run: ())
    taking(calls, rundir, Mesh(device=CPU), "checkpoint.url=s3://bucket/run", monkeypatch=monkeypatch)
    (prepared,) = [call for call in calls if call[0] == "prepare_run"]
    assert prepared[-1]["is_trained_on"] is True


@pytest.mark.parametrize("url", ["", "s3://bucket/run"])
def test_the_other_ranks_find_the_data_prepared_and_make_a_directory_of_their_own_beside_a_store(
    url: str, calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDirectory(tmp_path / "new")
    taken = taking(
        calls, rundir, Others(device=CPU, rank=1, world=2), f"checkpoint.url={url}", monkeypatch=monkeypatch
    )
    assert taken == (SettingChanges(), "prepared")
    assert calls[0] == ("prepare_after_first", calls[-1][1].data, rundir.data, {}) and len(calls) == 2
    assert rundir.control_dir.exists() is bool(url)


def test_a_process_whose_run_was_taken_ends_at_once_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    monkeypatch.setattr(
        assemble,
        "os",
        SimpleNamespace(
            write=lambda *told: calls.append(("write", *told)), _exit=lambda status: calls.append((status,))
        ),
    )
    busy = RunBusy("another trains it", remedy="")
    assemble._end_superseded(busy)
    assert calls == [("write", 2, b"bloomery train: another trains it\n"), (busy.exit_status,)]


def test_the_model_and_the_store_of_a_run_are_made_as_its_recipe_says(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(assemble, "build_training_model", lambda *told, **more: made.append((told, more)))
    monkeypatch.setattr(assemble, "Store", lambda *told, **more: made.append((told, more)))
    monkeypatch.setattr(assemble, "run_storage", lambda *told, **more: (told, more))
    settings = ["train.precision=bf16", "train.precision_changes=[[48, 'fp8']]", "data.reset_positions=true"]
    recipe = load_recipe("demo", [*settings, "train.loss_chunk=77", "run.seed=5"]).recipe
    mesh = Mesh(device=CPU, rank=1, world=2)
    prepared: Any = SimpleNamespace(vocabulary_size=300)
    assemble._build_model(recipe, prepared, mesh, compiled=True)
    assemble._open_store(recipe, rundir, mesh, "backup")  # type: ignore[arg-type]
    (model, told), (store, more) = made
    assert model == (recipe.model,) and store == (rundir, recipe.checkpoint)
    assert told == {
        "vocabulary": 300,
        "sequence_length": recipe.data.sequence_length,
        "optim": recipe.optim,
        "loss": recipe.loss,
        "loss_chunk": 77,
        "seed": 5,
        "mesh": mesh,
        "parallel": recipe.parallel,
        "compiled": True,
        "resets_positions": True,
        "precision": "bf16",
        "fp8_scaling": "tensor",
    }
    assert more == {
        "rank": 1,
        "world": 2,
        "gather": mesh.all_gather_object,
        "exchange": mesh.exchange,
        "backup": "backup",
        "reach_steps": recipe.guard.reach_steps,
        "place": ((rundir, recipe.checkpoint), {"run_name": recipe.run.name}),
    }
