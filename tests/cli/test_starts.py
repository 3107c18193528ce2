"""What `train`, `launch` and `peer` start, with which ranks and environment, and what they refuse before."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import launch, nodes, peer, supervised, train
from bloomery.cli.ranks import LAUNCHER, RankRange
from bloomery.cli.supervised import SupervisedStart
from bloomery.cli.train import PARENT, PREPARED
from bloomery.config.environment import SWITCH, is_offline
from bloomery.config.parallel import ParallelSection
from bloomery.errors import (
    BloomeryError,
    ConfigError,
    DataError,
    StoppedBySwitch,
    StorageError,
    TrainingFailed,
)
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import host_name
from bloomery.events.switches import arm

RECIPE = (
    *("demo", "train.global_batch=16", "train.micro_batch=2", "optim.name=adamw", "parallel.tensor=2"),
    *("parallel.ranks_per_node=auto", "environment.variables=['NCCL_NET=Mine']"),
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (
        PREPARED,
        PARENT,
        LAUNCHER,
        "WORLD_SIZE",
        "RANK",
        "NCCL_NET",
        SWITCH,
        "HF_HUB_OFFLINE",
        "BLOOMERY_HOST",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("bloomery.operate.launcher.node_group", lambda environment: None)
    return tmp_path / "run"


class Started:
    """What was started in place of ranks; each start ends with `status`."""

    def __init__(self, status: int = 7) -> None:
        self.status = status
        self.command: list[str] = []
        self.share: RankRange | None = None
        self.environment: dict[str, str] = {}
        self.others: object = None
        self.more: dict[str, Any] = {}
        self.supervised: tuple[RunDirectory, SupervisedStart] | None = None

    def ranks(self, command: Sequence[str], share: RankRange, **more: Any) -> int:
        self.command, self.share = [*command], share
        self.environment, self.others = more["environment"], more.get("others")
        self.more = more
        return self.status

    def under_supervision(self, loaded: Any, rundir: RunDirectory, start: SupervisedStart) -> int:
        self.supervised = rundir, start
        return self.status


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    for module in (launch, train):
        monkeypatch.setattr(module, "run_ranks", started.ranks)
    monkeypatch.setattr(launch, "run_supervised", started.under_supervision)
    return started


def test_a_launcher_starts_its_ranks_and_ends_with_their_status(run: Path, started: Started) -> None:
    assert launch.run([*RECIPE, "--nproc", "4", "--run", str(run)]) == 7
    assert started.share == RankRange(count=4, world=4) and started.others is None
    assert started.environment["NCCL_NET"] == "Mine" and started.environment[PREPARED] == "own"
    assert started.command[-3:] == ["--run", str(run), "--plain"]
    log = RunDirectory(run).log(host=host_name(), rank=3)
    assert started.more["output"]._file_of(3) == log
    assert launch.run([*RECIPE, "--run", str(run)]) == 7 and started.share == RankRange(count=2, world=2)
    assert not is_offline()
    started.status = 0
    assert launch.run([*RECIPE, "run.offline=true", "--run", str(run)]) == 0 and is_offline()


def test_a_launcher_tells_which_settings_gave_way_to_its_command_line(
    run: Path, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.run([*RECIPE, "run.seed=1", "run.seed=2", "--run", str(run)])
    assert (
        "note: run.seed is given 2 times on the command line; the last counts: 2" in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", [launch, train])
def test_a_run_past_its_ramp_up_starts_with_more_ranks_than_its_first_batches_had(
    run: Path, started: Started, command: Any
) -> None:
    words = [*RECIPE, "train.ramp_up=[2, 2, 60]", "parallel.tensor=1", "--nproc", "8", "--run", str(run)]
    checkpoints = RunDirectory(run).create().checkpoints
    save_checkpoint(checkpoints, [], step=8, incarnation=1, about={"consumed_samples": 59})
    with pytest.raises(ConfigError, match=r"train\.ramp_up"):
        command.run(words)
    save_checkpoint(checkpoints, [], step=9, incarnation=1, about={"consumed_samples": 60})
    assert command.run(words) == 7 and started.share == RankRange(count=8, world=8)


def test_a_supervised_peer_gets_an_agent_for_each_attempt_that_outlasts_a_coordinator_under_repair(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    got: list[Any] = []

    def supervise(loaded: Any, rundir: RunDirectory, start: SupervisedStart) -> int:
        got.extend([rundir, start])
        return sum(start.attempt(lambda more: 1)[0] for _ in range(2))

    def with_agent(loaded: Any, access: Any, rundir: RunDirectory, start_ranks: Any) -> tuple[int, str]:
        waits.append(access.timeouts.coordinator_start_s)
        return start_ranks({}) + 3, ""

    monkeypatch.setattr(supervised, "run_supervised", supervise)
    monkeypatch.setattr(peer, "_with_agent", with_agent)
    monkeypatch.setattr(peer, "_log_lines", lambda: None)
    between = ("elastic.inner_steps=5", "elastic.coordinator=http://127.0.0.1:1", "elastic.peer=alice")
    words = [*RECIPE, *between, "--nproc", "2", "--fallback", "--run", str(run)]
    assert peer.run([*words, "--supervise"]) == 8
    rundir, start = got
    assert rundir == RunDirectory(run) and (start.ranks, start.nodes, start.spares) == (2, 1, 0)
    assert start.says == "bloomery peer" and start.environment.variables == ("NCCL_NET=Mine",)
    command = start.command(rundir)
    assert command[1:4] == ("-m", "bloomery", "train") and command[-4:] == (
        *("--run", str(run), "--plain", "--fallback"),
    )
    assert waits[0] < 60.0 and waits[1] == 3600.0
    monkeypatch.setattr(peer, "run_ranks", lambda command, share, *, environment: len(command))
    assert peer.run(words) == len(command) - 1 + 3, "--plain is for logs"
    with pytest.raises(StorageError, match="cannot be made"):
        peer.run([*words, "--supervise", "--run", "/dev/null/here"])


def test_a_supervised_launcher_leaves_its_spares_without_ranks(run: Path, started: Started) -> None:
    words = [
        "--supervise",
        "--nnodes",
        "4",
        "--spares",
        "1",
        "--job",
        "j7",
        "--rdzv",
        "localhost:29400",
        "--join-timeout",
        "9",
    ]
    assert launch.run([*RECIPE, "parallel.data=3", "train.global_batch=18", *words, "--run", str(run)]) == 7
    assert started.supervised is not None
    rundir, start = started.supervised
    assert rundir == RunDirectory(run)
    assert (start.ranks, start.nodes, start.spares, start.job) == (2, 3, 1, "j7")
    assert start.is_loopback and start.join_timeout_s == 9.0
    assert start.environment.variables == ("NCCL_NET=Mine",)


@pytest.mark.parametrize(
    ("words", "error", "told"),
    [
        (("--nproc", "3"), TrainingFailed, "3 ranks"),
        (("--nproc", "6"), ConfigError, "train.global_batch"),
        (("model.heads=7",), ConfigError, "model.heads"),
        (("elastic.inner_steps=5", "elastic.coordinator=http://127.0.0.1:1"), ConfigError, "bloomery peer"),
        (("--nnodes", "2", "--rdzv", "node"), BloomeryError, "is not HOST:PORT"),
        (("--supervise", "--rdzv", "node"), BloomeryError, "is not HOST:PORT"),
        (("data.tokenizer=none.json",), DataError, "none.json"),
        (("data.tokenizer=none.json", "--supervise"), DataError, "none.json"),
        (("--nnodes", "1", "--supervise", "--spares", "1"), TrainingFailed, "1 of 1 machines are spares"),
    ],
)
def test_a_launcher_refuses_what_its_ranks_would_refuse(
    words: tuple[str, ...], error: type[BloomeryError], told: str, run: Path, started: Started
) -> None:
    with pytest.raises(error) as refused:
        launch.run([*RECIPE, *words, "--run", str(run)])
    assert told in str(refused.value) and started.share is None and started.supervised is None


def test_a_launcher_of_a_stopped_run_starts_nothing(run: Path, started: Started, tmp_path: Path) -> None:
    arm(tmp_path / "switches" / "stop")
    with pytest.raises(StoppedBySwitch, match="switches/stop"):
        launch.run([*RECIPE, f"control.directory={tmp_path / 'switches'}", "--run", str(run)])
    arm(RunDirectory(run).control("stop"))
    with pytest.raises(StoppedBySwitch, match="--disarm"):
        launch.run([*RECIPE, "--run", str(run)])
    assert started.share is None


class Meeting:
    """The launchers of two machines, as the second of them sees the rendezvous."""

    share = RankRange(count=2, world=4, first=2)

    def __init__(self) -> None:
        self.own: Any = None
        self.told = list[str]()

    def rendezvous(self, endpoint: str, own: Any, *, timeout_s: float, say: object) -> Meeting:
        self.own = own
        self.told.append(f"{endpoint} {timeout_s}")
        return self

    def report_failure(self, failure: str) -> None:
        self.told.append(failure)

    def leave(self) -> None:
        self.told.append("left")


def test_launchers_of_several_machines_meet_first_and_leave_however_it_ends(
    run: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    meeting = Meeting()
    monkeypatch.setattr(nodes, "rendezvous", meeting.rendezvous)
    monkeypatch.setenv("BLOOMERY_HOST", "node-2")
    words = [*RECIPE, "--nproc", "2", "--nnodes", "2", "--run", str(run), "--join-timeout", "8"]
    assert launch.run([*words, "--rdzv", "localhost:29400"]) == 7
    assert (meeting.own.host, meeting.own.ranks, meeting.own.nodes) == ("node-2", 2, 2)
    assert meeting.own.recipe["parallel.tensor"] == "2"
    assert meeting.told == ["localhost:29400 8", "left"]
    assert started.share == meeting.share and started.others is meeting
    assert started.environment["BLOOMERY_RENDEZVOUS_STORE"] == "localhost:29400"
    assert started.environment["BLOOMERY_HOST"] == "node-2"
    assert started.environment["GLOO_SOCKET_IFNAME"] == "lo" and started.environment["NCCL_NET"] == "Mine"
    assert launch.run([*words, "--rdzv", "node-1:29400"]) == 7
    assert "GLOO_SOCKET_IFNAME" not in started.environment
    meeting.told.clear()
    with pytest.raises(DataError):
        launch.run([*words, "data.tokenizer=none.json", "--rdzv", "node-1:29400"])
    _, failure, left = meeting.told
    assert failure.startswith("node-2 started no rank: ") and "none.json" in failure and left == "left"


def test_a_training_starts_again_in_an_environment_of_its_own_or_as_several_ranks(
    run: Path, started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executed: list[Any] = []

    class Replaced(Exception):
        """The process would be another one now."""

    def execve(program: str, command: list[str], environment: dict[str, str]) -> None:
        executed.append((command, environment))
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    alone = ["demo", "train.steps=500", "environment.variables=['NCCL_NET=Mine']", "--run", str(run)]
    with pytest.raises(Replaced):
        train.run(alone)
    ((command, environment),) = executed
    assert command[1:] == ["-m", "bloomery", "train", *alone]
    assert environment["NCCL_NET"] == "Mine" and environment[PREPARED] == "own"
    assert "note: " in capsys.readouterr().err, "a typed length takes the place of the recipe's"
    with monkeypatch.context() as second, pytest.raises(Replaced):
        second.setenv("RANK", "1")
        second.setenv("WORLD_SIZE", "2")
        train.run(["demo", "train.steps=500", "train.micro_batch=2", "--run", str(run)])
    assert executed.pop()[1]["RANK"] == "1" and "note: " not in capsys.readouterr().err
    assert train.run([*RECIPE, "--nproc", "4", "--run", str(run)]) == 7
    assert started.share == RankRange(count=4, world=4) and started.command[3] == "train"
    assert not is_offline()
    for words, error, told in (
        ((*RECIPE, "--nproc", "3"), TrainingFailed, "3 ranks"),
        ((*RECIPE, "--nproc", "6"), ConfigError, "train.global_batch"),
        (("demo", "elastic.inner_steps=5"), ConfigError, "each peer needs an agent"),
        (("demo", "data.tokenizer=none.json"), DataError, "none.json"),
    ):
        with pytest.raises(error) as refused:
            train.run([*words, "--run", str(run)])
        assert told in str(refused.value)
    monkeypatch.setenv(PARENT, "a socket")
    with pytest.raises(Replaced):
        train.run(["demo", "elastic.inner_steps=5", "run.offline=true", "--run", str(run)])
    assert is_offline() and executed.pop()[0][4] == "demo"
    assert len(executed) == 1


def test_a_rank_that_a_launcher_started_trains_at_once(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[Path] = []
    monkeypatch.setattr(train, "_train", lambda loaded, path, options, begun: got.append(path) or 5)
    monkeypatch.setenv(PREPARED, "own")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    assert train.run([*RECIPE, "--run", str(run)]) == 5 and got == [run]
    with pytest.raises(TrainingFailed, match="this process is rank 1 of 4"):
        train.run([*RECIPE, "--nproc", "4", "--run", str(run)])
    monkeypatch.setenv(LAUNCHER, "1")
    assert train.run([*RECIPE, "--nproc", "2", "--run", str(run)]) == 5, "it is among our launcher's words"
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ConfigError):
        train.run([*RECIPE, "--run", str(run)])


def ended(monkeypatch: pytest.MonkeyPatch, run: Path, **outcome: Any) -> tuple[int | str, str]:
    """The status with which a training ends or the error, and what is said."""
    said: list[str] = []
    given = {"finished": False, "failed": False, "step": 9, "reason": "it is so", **outcome}
    loop = SimpleNamespace(train=lambda *words: SimpleNamespace(**given))  # the real one loads torch
    monkeypatch.setitem(sys.modules, "bloomery.train.loop", loop)  # type: ignore[arg-type]
    options = SimpleNamespace(StartOptions=lambda **given: given)
    monkeypatch.setitem(sys.modules, "bloomery.train.settings", options)  # type: ignore[arg-type]
    monkeypatch.setattr(train.Screen, "say", lambda self, line: said.append(line))
    monkeypatch.setattr(
        train.Screen, "conclude", lambda self, rundir, *, hints: said.append(f"hints {hints}")
    )
    parsed: Any = train._parse(["demo", "--no-hints"])
    from bloomery.config.load import load_recipe

    try:
        return train._train(load_recipe("demo"), run, parsed, 0.0), "\n".join(said)
    except TrainingFailed as failed:
        return str(failed), "\n".join(said)


def test_the_status_of_a_training_says_whether_it_ended_was_stopped_or_failed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, said = ended(monkeypatch, run, finished=True)
    assert status == 0 and "finished at step 9: it is so" in said and said.endswith("hints False")
    status, said = ended(monkeypatch, run, failed=True)
    assert "stopped at step 9: it is so" in str(status) and said == ""
    for reason, number in (("signal SIGTERM", 143), ("signal SIGINT", 130), ("guard.stop_at_step = 9", 0)):
        status, said = ended(monkeypatch, run, reason=reason)
        assert status == number and f"stopped at step 9 unsaved: {reason}" in said
        assert "The same command goes on from there" in said
    status, said = ended(monkeypatch, run, reason=f"{run}/control/stop")
    assert status == 0 and f"`bloomery stop {run} --disarm`" in said
    monkeypatch.setenv("RANK", "1")
    assert ended(monkeypatch, run, finished=True) == (0, ""), "only the first rank speaks"


def test_only_a_job_ends_where_its_machine_is_unfit_and_ranks_of_one_machine_get_its_environment(
    run: Path, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "run_ranks", started.ranks)
    watch = SimpleNamespace(name="a-3", why_to_stop=lambda: "", unlogged=print, failure="from before")
    supervisions: list[dict[str, Any]] = []

    def supervise(rundir: RunDirectory, run_once: Any, *, world: int, **more: Any) -> int:
        assert world == 3
        supervisions.append(more)
        return int(run_once(watch)) + 1

    monkeypatch.setattr("bloomery.operate.supervise.supervise", supervise)
    undisturbed: list[bool] = []
    monkeypatch.setattr(supervised, "_finish_undisturbed", lambda: undisturbed.append(True))
    options: Any = launch._parse([*RECIPE, "--supervise"])
    options.nnodes, options.rdzv = 1, None
    from bloomery.config.load import load_recipe

    start = launch._supervised(options, load_recipe(RECIPE[0], RECIPE[1:]), count=3, nodes=1)
    nothing: Any = None
    monkeypatch.setattr(supervised, "host_name", lambda: "n5")
    parts: Any = ("reactions", "departure")
    assert supervised._on_one_machine(RunDirectory(run), start, *parts) == 8
    assert supervisions[0].pop("say") == start.say and watch.failure == ""
    assert supervisions[0] == {"host": "n5", "reactions": "reactions", "departure": "departure"}
    output = started.more["output"]
    assert output._file_of(2) == RunDirectory(run).log(host="n5", rank=2) and output._on_unlogged is print
    assert started.more["supervisor"] is watch and started.others is None
    assert "TORCH_FR_DUMP_TEMP_FILE" not in started.environment
    assert started.share == RankRange(count=3, world=3)
    assert started.environment["BLOOMERY_ATTEMPT"] == "a-3" and started.environment["NCCL_NET"] == "Mine"
    assert undisturbed == []
    started.status = 0
    assert supervised._on_one_machine(RunDirectory(run), start, nothing, nothing) == 1
    watch.why_to_stop, started.status = (lambda: "the job ends"), 143
    assert supervised._on_one_machine(RunDirectory(run), start, nothing, nothing) == 144
    assert undisturbed == [True, True], "after all was well, and where the job leaves"
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    start = replace(start, attempt=lambda ranks: (ranks({"A_B": "1"}), "the agent failed"))
    supervised._on_one_machine(RunDirectory(run), start, nothing, nothing)
    assert watch.failure == "the agent failed" and started.environment["A_B"] == "1"
    assert started.environment["TORCH_FR_DUMP_TEMP_FILE"] == str(run / "stacks" / "flight-")


def test_a_machine_with_gpus_starts_a_rank_for_each_of_them_where_the_degrees_leave_it_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    assert launch._usual_count(ParallelSection(tensor=2, pipeline=2), nodes=2) == 8
    assert launch._usual_count(ParallelSection(tensor=2, data=3), nodes=2) == 3


def test_supervised_launchers_of_a_job_of_slurm_need_no_name_of_their_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["demo", "--supervise", "--nnodes", "2"]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(SystemExit):
        launch._parse(words)
    assert launch._parse([*words, "--job", "j7"]).job == "j7"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert launch._parse(words).nnodes == 2
