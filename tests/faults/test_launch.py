"""`bloomery launch`: ranks of one machine, launchers of two, and what keeps them from meeting."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.faults.commands import bloomery, running

from bloomery.events.heartbeat import read_beat
from bloomery.events.journal import loss_curve
from bloomery.events.run_directory import RunDirectory

Train = Callable[..., list[str]]


@contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile, and that a server may listen on."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def launch_command(train_command: Train) -> Train:
    return lambda *more, **run: ["launch", *train_command(*more, **run)[1:], "optim.name=adamw"]


def test_two_tensor_parallel_ranks_train_with_prefixed_lines_and_a_log_for_each(
    launch_command: Train, tmp_path: Path
) -> None:
    command = launch_command("parallel.tensor=2", "parallel.sequence=true", "train.samples=16")
    said = bloomery(*command)
    assert (said.status, said.err) == (0, "")
    assert "[rank 0] " in said.out and "finished at step" in said.out
    run = RunDirectory(tmp_path / "run")
    first, second = (run.log(host=os.uname().nodename, rank=rank).read_text() for rank in (0, 1))
    assert "finished at step" in first and second == ""
    assert loss_curve(run, rank=0) == loss_curve(run, rank=1) != []
    beats = [read_beat(run.heartbeat(rank=rank)) for rank in (0, 1)]
    assert [(beat.rank, beat.world, beat.activity, beat.error) for beat in beats if beat] == [
        (0, 2, "ended", ""),
        (1, 2, "ended", ""),
    ]
    assert len({beat.step for beat in beats if beat}) == 1 and beats[0] and beats[0].step > 0
    assert "updating the weights" in beats[0].longest_s


def test_a_port_that_something_else_holds_is_told(launch_command: Train) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        said = bloomery(*launch_command("--nnodes", "2", "--nproc", "1", "--rdzv", address))
    said.refuses("is in use by a program that is no launcher", "--rdzv 127.0.0.1:", status=1)


def test_two_nodes_with_different_recipes_both_end_and_name_the_setting(
    launch_command: Train, tmp_path: Path
) -> None:
    with held_port() as port:
        share = ("--nnodes", "2", "--nproc", "1", "--rdzv", f"127.0.0.1:{port}")
        with (
            running(*launch_command(*share), log=tmp_path / "one") as one,
            running(*launch_command(*share, "run.seed=9"), log=tmp_path / "two") as two,
        ):
            for launcher in (one, two):
                launcher.ended().refuses("has another recipe than", "run.seed", status=1)


def test_nodes_without_a_rendezvous_are_refused_before_anything_starts(launch_command: Train) -> None:
    said = bloomery(*launch_command("--nnodes", "2"))
    said.refuses("--nnodes above 1 and --rdzv HOST:PORT go together", status=2)
