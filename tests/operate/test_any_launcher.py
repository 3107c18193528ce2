"""One recipe under every launcher: the losses of two ranks are equal to the bit, whoever starts them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.commands import _environment, bloomery, running
from tests.faults.test_launch import held_port
from tests.operate.slurm_cluster import PACKAGES, SlurmCluster, can_run

from bloomery.cli import train
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

Train = Callable[..., list[str]]
Losses = list[tuple[int, float]]

SHORT = ("train.samples=24", "optim.name=adamw", "evaluate.every_steps=0", "evaluate.at_end=false")
BLOOMERY = (sys.executable, "-m", "bloomery")

LAUNCHING = Path(__file__).parents[2] / "docs" / "guides" / "launching.md"

needs_slurm = pytest.mark.needs(can_run, package=PACKAGES)


@pytest.fixture
def losses(tmp_path: Path) -> Callable[[], Losses]:
    """Returns the loss curve of the run, after checking that it has ended and that both ranks have it."""

    def read() -> Losses:
        run = RunDirectory(tmp_path / "run")
        first, second = (loss_curve(run, rank=rank) for rank in (0, 1))
        assert first == second and len(first) > 3
        return first

    return read


@pytest.fixture(scope="module")
def curves() -> list[Losses]:
    """The curves of all launchers so far, which must all be equal."""
    return []


@pytest.fixture
def equal(losses: Callable[[], Losses], curves: list[Losses]) -> Callable[[], None]:
    def check() -> None:
        curves.append(losses())
        assert curves[0] == curves[-1]

    return check


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, env=environment or _environment()
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_two_processes_of_train(train_command: Train, equal: Callable[[], None]) -> None:
    said = bloomery(*train_command(*SHORT, "--nproc", "2"))
    assert (said.status, said.err) == (0, "")
    equal()


def test_torchrun_with_the_long_name_of_the_run_directory(
    train_command: Train, equal: Callable[[], None]
) -> None:
    command = [word.replace("--run", "--rundir") for word in train_command(*SHORT)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run(*torchrun, "-m", "bloomery", *command)
    equal()


@pytest.mark.needs("mpirun", package="openmpi-bin")
def test_mpirun(train_command: Train, equal: Callable[[], None]) -> None:
    root = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2")
    run("mpirun", *root, *BLOOMERY, *train_command(*SHORT))
    equal()


def test_launchers_of_two_nodes(train_command: Train, equal: Callable[[], None], tmp_path: Path) -> None:
    command = ["launch", *train_command(*SHORT)[1:], "--nproc", "1", "--nnodes", "2"]
    with held_port() as port:
        command += ["--rdzv", f"127.0.0.1:{port}"]
        with (
            running(*command, log=tmp_path / "one") as one,
            running(*command, log=tmp_path / "two") as two,
        ):
            assert [one.ended().status, two.ended().status] == [0, 0], (one.said(), two.said())
    equal()


@needs_slurm
def test_srun_with_a_task_for_each_rank(
    train_command: Train, equal: Callable[[], None], cluster: SlurmCluster
) -> None:
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1")
    said = cluster.run(*srun, *BLOOMERY, *train_command(*SHORT), OMP_NUM_THREADS="1")
    assert said.count("finished at step") == 1
    equal()


@needs_slurm
def test_srun_with_a_launcher_on_each_node(
    train_command: Train, equal: Callable[[], None], cluster: SlurmCluster, tmp_path: Path
) -> None:
    launch = ("launch", *train_command(*SHORT)[1:], "--nproc", "1")
    cluster.run("srun", "--nodes=2", "--ntasks-per-node=1", *BLOOMERY, *launch, OMP_NUM_THREADS="1")
    equal()
    logs = sorted(path.name for path in RunDirectory(tmp_path / "run").logs.iterdir())
    assert logs == ["node1-0.log", "node2-1.log"]


@needs_slurm
def test_what_would_train_alone_or_twice_is_refused(
    train_command: Train, cluster: SlurmCluster, tmp_path: Path
):
    command = train_command(*SHORT)
    launch = ["launch", *command[1:], "--nproc", "1"]
    twice = cluster.run("srun", "--ntasks=2", "--nodes=1", *BLOOMERY, *launch, check=False)
    assert "srun has started 2 launchers on 1 nodes" in twice and "Traceback" not in twice
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\nexec {' '.join((*BLOOMERY, *command))}\n")
    alone = cluster.run(
        "sbatch", "--parsable", "--wait", "--ntasks=2", f"--output={tmp_path}/said", script, check=False
    )
    assert cluster.state(alone.split()[0]) == "FAILED 1:0"
    assert "This job has 2 tasks, and the command was started without srun" in (tmp_path / "said").read_text()


def test_ranks_that_would_start_ranks_are_refused(
    train_command: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = bloomery(*train_command(*SHORT, "--nproc", "2"))
    said.refuses("--nproc 2 would start ranks", "rank 1 of 2", status=1)


def test_a_port_that_is_taken_is_told_by_rank_0(
    train_command: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_port() as port, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", port))
        other.listen()
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        said = bloomery(*train_command(*SHORT))
    said.refuses(f"Port {port}", "is in use by another program", f"MASTER_PORT={port + 1}", status=1)


def test_options_that_torchrun_refuses_before_we_are_asked_are_named_with_what_to_write(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fails when torchrun refuses another option, or has mended this and --rundir is no longer needed."""
    from torch.distributed.run import get_args_parser

    with pytest.raises(SystemExit):
        train.run(["--help"])
    options = sorted(set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", capsys.readouterr().out)) - {"--help"})
    script = ["-m", "bloomery", "train", "demo"]
    torchrun, refused = get_args_parser(), []
    for option in options:
        try:
            assert torchrun.parse_args([*script, option, "x"]).training_script == "bloomery"
        except SystemExit:
            assert f"ambiguous option: {option}" in capsys.readouterr().err
            refused.append(option)
        assert torchrun.parse_args(["--", *script, option, "x"]).training_script == "-m"
    assert refused == ["--log", "--nproc", "--run"] and "--rundir" in options
    (told,) = [line for line in LAUNCHING.read_text().splitlines() if line.startswith("- **torchrun and")]
    assert all(f"`{option}`" in told for option in refused)
