"""What exercises, preflights and syncs hand on: to drills, to probes, to storage and to exports."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.operate.dashboard.written_run import healed_run

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_streamed
from bloomery.cli import chaos, fork, preflight, sync
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.durable import remove_abandoned
from bloomery.errors import CheckpointError, ConfigError
from bloomery.events.run_directory import RunDirectory


def test_a_plain_exercise_is_a_drill_of_twenty_faults_or_of_those_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got: list[list[str]] = []
    monkeypatch.setattr("bloomery.cli.drill.run", lambda words: got.append(words) or 5)
    assert chaos.chaos(["demo", "--plain", "a.b=1"]) == 5
    assert chaos.chaos(["--plain", "demo", "--random", "3"]) == 5
    assert chaos.chaos(["--plain", "demo", "--random=3"]) == 5
    assert got == [["demo", "a.b=1", "--random", "20"], ["demo", "--random", "3"], ["demo", "--random=3"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [(("demo",), "the recipe has no rounds"), (("diloco-internet", "model.heads=7"), "model.heads")],
)
def test_an_exercise_refuses_a_recipe_that_peers_cannot_train(
    words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        chaos.simulate_internet([*words, "--directory", str(tmp_path / "new")])
    assert told in str(refused.value) and not (tmp_path / "new").exists()


def test_what_a_fork_that_was_killed_left_is_removed_and_one_that_is_made_is_not(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run").rundir
    run.recipe.write_text(dump_recipe(load_recipe("demo").recipe))
    save_streamed(run.checkpoints, [whole("model.weight", torch.ones(4))], step=50, incarnation=1)
    left, own = tmp_path / ".bloomery-fork-killed", tmp_path / ".run.mine"
    for path in (left, own):
        path.mkdir()
        os.utime(path, (0.0, 0.0))
    share = fork._share

    def interrupted(source: Path, target: Path) -> None:
        assert not left.exists()
        (draft,) = tmp_path.glob(".bloomery-fork-*")
        os.utime(draft, (0.0, 0.0))
        remove_abandoned(tmp_path, ".bloomery-fork-")
        share(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork, "_share", interrupted)
        assert fork.run([str(run.path), str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.mine", "new", "run"]
    assert (tmp_path / "new" / "checkpoints" / "step-000050.i001").is_dir()


def forkable(path: Path, *overrides: str) -> RunDirectory:
    """Return a run whose third start begins at a checkpoint of the first one's step 50."""
    run = healed_run(path)
    run.start(base=(50, 1), reason="start")
    run.rundir.recipe.write_text(dump_recipe(load_recipe("demo", overrides).recipe))
    save_streamed(run.rundir.checkpoints, [whole("model.weight", torch.ones(4))], step=50, incarnation=1)
    return run.rundir


def test_a_fork_at_step_0_takes_no_later_checkpoint(tmp_path: Path) -> None:
    run = forkable(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"no checkpoint at or before step 0 \(there are: 50\)"):
        fork.run([str(run.path), str(tmp_path / "new"), "--to-step", "0"])


def test_a_fork_takes_its_data_and_the_starts_that_led_to_its_checkpoint_into_an_empty_directory(
    tmp_path: Path,
) -> None:
    run, new = forkable(tmp_path / "run"), RunDirectory(tmp_path / "new")
    run.data.mkdir(exist_ok=True)
    for name in ("train.bin", "data.lock", "x.draft", "y.partial"):
        (run.data / name).write_text(name)
    run.sources.write_text("the sources")
    new.path.mkdir()
    assert fork.run([str(run.path), str(new.path), "--to-step", "50"]) == 0
    assert [path.name for path in new.data.iterdir()] == ["train.bin"]
    assert new.sources.read_text() == "the sources"
    assert len(list(run.incarnations.iterdir())) == 3
    (record,) = new.incarnations.iterdir()
    assert record == new.incarnation(1)
    before = json.loads(run.incarnation(1).read_text())
    assert json.loads(record.read_text()) == before | {"fork_of": str(run.path.resolve())}


def test_a_fork_into_an_empty_directory_finds_its_place_through_that_directory(tmp_path: Path) -> None:
    run, new = forkable(tmp_path / "run"), tmp_path / "new"
    new.mkdir()
    assert fork.run([str(run.path), str(new / ".." / "new")]) == 0
    assert RunDirectory(new).exists()


def test_a_fork_does_not_replace_the_directory_that_one_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, here = forkable(tmp_path / "run"), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with pytest.raises(CheckpointError, match=r"\. is the directory that you are in") as refused:
        fork.run([str(run.path), "."])
    assert "cd .." in refused.value.remedy and not any(here.iterdir())


def test_a_fork_shares_the_files_of_its_run_and_copies_them_where_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, new, copied = forkable(tmp_path / "run"), tmp_path / "new", tmp_path / "copied"
    (run.data / "a" / "b").mkdir(parents=True)
    (run.data / "a" / "b" / "train.bin").write_text("tokens")

    def refused(*places: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    assert fork.run([str(run.path), str(new)]) == 0
    with monkeypatch.context() as patch:
        patch.setattr("os.link", refused)
        assert fork.run([str(run.path), str(copied)]) == 0
    for place in ("data/a/b/train.bin", "checkpoints/step-000050.i001/manifest.json"):
        for made, is_shared in ((new, True), (copied, False)):
            assert (made / place).read_bytes() == (run.path / place).read_bytes()
            assert (made / place).samefile(run.path / place) is is_shared


def test_each_file_of_a_checkpoint_is_whole_before_it_is_forked(tmp_path: Path) -> None:
    entries = [whole(f"{part}.a", torch.ones(4)) for part in ("model", "optim")]
    directory = save_streamed(tmp_path, entries, step=5, incarnation=1)
    checkpoint: Any = SimpleNamespace(directory=directory)
    fork._refuse_damaged(checkpoint)
    files = sorted(directory.glob("*.safetensors"))
    assert len(files) == 2
    for path in files:
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(
            CheckpointError, match=f"{path.name} is damaged: it has {len(content) - 1:,} bytes"
        ):
            fork._refuse_damaged(checkpoint)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name} is damaged: it has 0 bytes"):
            fork._refuse_damaged(checkpoint)
        path.write_bytes(content)


def test_a_fork_has_all_starts_up_to_its_checkpoints_own(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    for number, record in enumerate(('{"base": null}', "", '{"base": [5, 1]}', '{"base": [9, 3]}'), 1):
        rundir.incarnation(number).write_text(record)
    checkpoint: Any = SimpleNamespace(incarnation=3)
    found = fork._incarnations_up_to(rundir, checkpoint)
    of = {"fork_of": str(rundir.path.resolve())}
    records = {number: json.loads(record) for number, record in found.items()}
    assert records == {1: {"base": None} | of, 3: {"base": [5, 1]} | of}


def test_a_fork_into_its_own_run_is_refused_by_whichever_path(tmp_path: Path) -> None:
    run, link = forkable(tmp_path / "run").path, tmp_path / "link"
    link.symlink_to("run")
    for source, target in (
        (run, link / "new"),
        (run, tmp_path / "x" / ".." / "run" / "new"),
        (link, run / "new"),
    ):
        with pytest.raises(CheckpointError, match="lies in the run itself"):
            fork.run([str(source), str(target)])
    assert not (run / "new").exists()


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("elastic.inner_steps=5",), "is one peer of a run between peers"),
        ((), "keeps its checkpoints in object storage"),
    ],
)
def test_a_fork_of_what_is_not_whole_here_is_refused_and_leaves_nothing(
    overrides: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, new = forkable(tmp_path / "run", *overrides), tmp_path / "new"
    (checkpoint,) = checkpoints(run)
    monkeypatch.setattr("bloomery.checkpoint.format.source.is_stored_elsewhere", lambda directory: True)
    monkeypatch.setattr(fork, "_refuse_damaged", lambda checkpoint: None)
    with pytest.raises(CheckpointError, match=told):
        fork._fork(run, checkpoint, new)
    run.recipe.unlink()
    with pytest.raises(CheckpointError, match=r"has no recipe\.toml"):
        fork._fork(run, checkpoint, new)
    new.touch()
    with pytest.raises(CheckpointError, match="is there already"):
        fork._fork(run, checkpoint, new)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run"]


def test_a_preflight_asks_for_room_before_it_measures_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    asks = lambda path, *, doing, bytes_needed: asked.append(bytes_needed)  # noqa: E731
    monkeypatch.setattr(preflight, "require_space", asks)
    held = SimpleNamespace(release=lambda host: None, nodes=list)
    monkeypatch.setattr("bloomery.operate.exclusions.Exclusions.of", lambda rundir, section: held)
    monkeypatch.setattr(
        preflight, "_measured", lambda *given: asked.append("measured") or SimpleNamespace(host="n1")
    )
    monkeypatch.setattr(preflight, "_of_all_nodes", lambda rundir, own: {"n1": own, "n2": own})
    monkeypatch.setattr(preflight, "_findings", lambda nodes, loaded: [])
    monkeypatch.setattr(preflight, "_show", lambda *given, **more: None)
    monkeypatch.setattr(preflight, "_storage", lambda *given, nodes: asked.append(("storage", nodes)))
    run = ["demo", "--run", str(tmp_path)]
    assert preflight.run([*run, "--storage", "--gigabytes", "1.5"]) == 0
    assert asked == [1_500_000_000, "measured", ("storage", 2)]
    asked.clear()
    assert preflight.run([*run, "--storage"]) == 0 and asked == ["measured", ("storage", 2)]
    asked.clear()
    assert preflight.run([*run, "--gigabytes", "1.5"]) == 0 and asked == ["measured"]


def test_ranks_of_a_preflight_measure_for_as_long_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Any] = []
    probe = SimpleNamespace(probe_as_rank=lambda path, *, seconds: got.append((path, seconds)))
    monkeypatch.setitem(sys.modules, "bloomery.calibrate.node_probe", probe)  # type: ignore[arg-type]
    assert preflight.run(["--probe", "here.json", "2.5"]) == 0 and got == [(Path("here.json"), 2.5)]


@pytest.mark.parametrize(
    ("words", "seconds", "gpus", "count"),
    [((), 2.0, "abc", 3), (("--long", "--nproc", "5"), 600.0, "abc", 5), ((), 2.0, "", 2)],
)
def test_a_node_is_measured_by_a_rank_for_each_gpu_or_as_many_as_were_given(
    words: tuple[str, ...],
    seconds: float,
    gpus: str,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import dataclass

    from bloomery.config.load import load_recipe
    from bloomery.errors import TrainingFailed

    @dataclass(frozen=True)
    class Facts:
        gpus: tuple[str, ...]
        host: str = "n1"
        teraflops: float = 0.0
        all_reduce_gb_per_s: float = 0.0
        is_exact: bool = True

    status = [0]
    started: list[Any] = []

    def run_ranks(command: list[str], share: Any, *, environment: dict[str, str]) -> int:
        started.append((command, share, environment))
        text = '{"teraflops": 7.5, "all_reduce_gb_per_s": 1.5, "is_exact": false}'
        Path(command[command.index("--probe") + 1]).write_text(text)
        return status[0]

    monkeypatch.setattr(
        "bloomery.operate.node_facts.gather_facts", lambda path, host: Facts(gpus=tuple(gpus))
    )
    monkeypatch.setattr(preflight, "run_ranks", run_ranks)
    loaded = load_recipe("demo", ["environment.variables=['NCCL_NET=Mine']"])
    options = preflight._parse(["demo", *words])
    monkeypatch.delenv("NCCL_NET", raising=False)
    facts: Any = preflight._measured(RunDirectory(tmp_path), loaded, options)
    assert (facts.teraflops, facts.all_reduce_gb_per_s, facts.is_exact) == (7.5, 1.5, False)
    ((command, share, environment),) = started
    assert float(command[-1]) == seconds and environment["NCCL_NET"] == "Mine"
    assert (share.count, share.world) == (count, count)
    status[0] = 9
    with pytest.raises(TrainingFailed, match="n1 ended with status 9"):
        preflight._measured(RunDirectory(tmp_path), loaded, options)


def test_an_export_that_fails_is_told_with_the_end_of_what_it_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[list[str]] = []
    done = SimpleNamespace(returncode=0, stderr="")
    monkeypatch.setattr(sync.subprocess, "run", lambda command, **more: ran.append(command) or done)
    sync._export(Path("checkpoints/step-5"), Path("new"))
    assert ran[0][1:] == ["-m", "bloomery", "ckpt", "export", "checkpoints/step-5", "new", "--json"]
    done.returncode, done.stderr = 3, "x" * 700 + "\nthe end\n"
    with pytest.raises(CheckpointError, match=r"step-5 could not be exported: x+ the end\n") as refused:
        sync._export(Path("checkpoints/step-5"), Path("new"))
    assert refused.value.message.count("x") < 610
    done.stderr = ""
    with pytest.raises(CheckpointError, match="status 3"):
        sync._export(Path("checkpoints/step-5"), Path("new"))
