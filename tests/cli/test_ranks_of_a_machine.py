"""Whom launchers blame, how long they wait, with which status they end, and how many ranks they start."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.in_process import status_of

from bloomery.cli import launch, peer, supervised
from bloomery.cli import ranks as ranks_module
from bloomery.cli.nodes import LauncherNode, _check_equal, _natural
from bloomery.cli.ranks import RankRange, _blame, _grace_s, _how, _to_blame, _wait
from bloomery.cli.train import ALLOCATOR, MALLOC, PREPARED, _broken, _form, _shown, prepared_environment
from bloomery.config.environment import EnvironmentSection
from bloomery.config.load import load_recipe
from bloomery.config.parallel import ParallelSection
from bloomery.errors import RankLost, StoppedBySwitch, TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import arm

LOST = RankLost.exit_status


class Rank:
    """A process that ended with `status`, or that runs until it is signalled, and then ends with `answer`."""

    def __init__(self, status: int | None = None, *, answer: int | None = None, pid: int = 70) -> None:
        self.returncode, self.pid, self._answer = status, pid, answer
        self.signals: list[int] = []

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        self.returncode = -number if number == signal.SIGKILL else self._answer


class Supervisor:
    """A supervisor with fixed answers."""

    def __init__(self, *, end: str = "", stop: str = "") -> None:
        self.end, self.stop, self.told = end, stop, list[str]()

    def started(self, pids: Mapping[int, int]) -> None: ...

    def why_to_end(self) -> str:
        return self.end

    def why_to_stop(self) -> str:
        return self.stop

    def ending(self) -> None:
        self.told.append("ending")

    def ended(self, statuses: Mapping[int, int], *, killed: Collection[int]) -> None: ...

    def signalled(self, number: int) -> None: ...


class Others:
    """The launchers of other machines, one of which may have failed."""

    def __init__(self, failure: str = "") -> None:
        self._failure, self.reported = failure, list[str]()

    def failure(self) -> str:
        return self._failure

    def report_failure(self, failure: str) -> None:
        self.reported.append(failure)


def waited(
    *ranks: Rank, supervisor: Supervisor | None = None, others: Others | None = None, first: int = 4
) -> tuple[int, set[int]]:
    """The status of a wait for some ranks, and which of them were killed."""
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) < 9, "it waits for what does not come"

    killed: set[int] = set()
    share, ends = RankRange(first=first, count=len(ranks), world=9), SimpleNamespace(wait=look)
    run: Any = [*ranks]
    status = _wait(run, share, others, supervisor, killed, ends)  # type: ignore[arg-type]
    return status, killed


@pytest.mark.parametrize(
    ("statuses", "blamed"),
    [
        ({0: 0, 1: 0}, None),
        ({0: 0, 1: 130, 2: 143, 3: LOST}, None),  # as was agreed, or for another's sake
        ({0: LOST, 1: 7, 2: 5}, 1),
        ({1: 7, 2: -9, 3: -11}, 2),
        ({3: 7, 5: 1}, 3),
    ],
)
def test_a_rank_that_a_signal_ended_is_blamed_before_the_first_that_failed(
    statuses: dict[int, int], blamed: int | None
) -> None:
    assert _to_blame(statuses) == blamed


def test_after_a_signal_nobody_waits_long_but_for_those_of_watchdogs_and_people() -> None:
    assert _grace_s(-signal.SIGKILL) == 3.0 == _grace_s(-signal.SIGSEGV)
    for status in (1, -signal.SIGABRT, -signal.SIGINT, -signal.SIGTERM):
        assert _grace_s(status) == 20.0
    assert _how(-37) == "was ended by signal 37"
    assert _how(-9) == "was ended by SIGKILL" and _how(7) == "failed with status 7"


def test_the_status_of_a_machine_is_that_of_its_first_failure() -> None:
    assert waited(Rank(0), Rank(0)) == (0, set())
    assert waited(Rank(0), Rank(7), Rank(answer=143)) == (7, set())
    assert waited(Rank(-11), Rank(answer=143)) == (128 + 11, set())
    assert waited(Rank(LOST), Rank(0))[0] == LOST and waited(Rank(0), Rank(143))[0] == 143
    standing = Supervisor(end="they stand still")
    assert waited(Rank(7), Rank(answer=143), supervisor=standing) == (7, set()), "for they are being ended"


def test_a_failure_is_told_here_and_elsewhere_and_ends_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    living, others, supervisor = Rank(answer=143), Others(), Supervisor()
    assert waited(Rank(0), Rank(7, pid=71), living, others=others, supervisor=supervisor)[0] == 7
    assert living.signals == [signal.SIGTERM] and supervisor.told == ["ending"]
    (told,) = others.reported
    assert told.startswith("rank 5 (process 71) on ") and told.endswith(
        "with status 7; ending the ranks here"
    )
    assert "rank 5 (process 71)" in (said := capsys.readouterr().err) and "ending the other ranks" in said


def test_what_follows_a_failure_is_said_where_somebody_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert waited(Rank(0), Rank(7), Rank(answer=143))[0] == 7
    assert "; ending the other ranks" in capsys.readouterr().err
    assert waited(Rank(7), others=Others())[0] == 7
    assert "; ending the other ranks" in capsys.readouterr().err
    assert waited(Rank(LOST), Rank(0))[0] == LOST
    assert "the ranks here lost another" in capsys.readouterr().err
    assert waited(Rank(0), Rank(143))[0] == 143 and capsys.readouterr().err == ""
    assert waited(Rank(-9))[0] == 137 and "goes on from the newest checkpoint" in capsys.readouterr().err
    waited(Rank(), supervisor=Supervisor(end="rank 4 stands still"))
    assert "rank 4 stands still; ending the ranks" in capsys.readouterr().err
    waited(Rank(answer=0), supervisor=Supervisor(stop="the job ends soon"))
    assert capsys.readouterr().err == "bloomery: the job ends soon; the ranks save and stop\n"


def test_a_launcher_that_is_asked_nothing_by_others_looks_rarely() -> None:
    def longest(**beside: Any) -> float:
        looks: list[float] = []

        def look(seconds: float) -> None:
            looks.append(seconds)
            rank.returncode = 0

        rank: Any = Rank()
        others, supervisor = beside.get("others"), beside.get("supervisor")
        _wait([rank], RankRange(count=1, world=1), others, supervisor, set(), SimpleNamespace(wait=look))  # type: ignore[arg-type]
        return max(looks)

    assert longest() == 60.0 and longest(others=Others()) == 0.2 == longest(supervisor=Supervisor())


def test_a_failure_that_follows_another_machines_is_not_told_as_one_here(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks: Any = [Rank(1), Rank(0)]
    share = RankRange(first=0, count=2, world=2)
    _blame(ranks, share, 0, others=None, supervisor=None, reported="")
    assert "failed with status 1\n" in capsys.readouterr().err, "nobody is left to be ended"
    _blame(ranks, share, 0, others=None, supervisor=None, reported="rank 9 on node-2 failed")
    assert capsys.readouterr().err == ""


def test_a_failure_elsewhere_ends_the_ranks_here_as_one_that_was_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ranks = [Rank(answer=0), Rank(answer=143)]
    assert waited(*ranks, others=Others("rank 0 on node-1 failed")) == (LOST, set())
    assert [rank.signals for rank in ranks] == [[signal.SIGTERM]] * 2
    assert "rank 0 on node-1 failed" in capsys.readouterr().err


def test_ranks_at_a_standstill_are_killed_and_count_as_lost_and_those_that_leave_are_asked() -> None:
    ranks = [Rank(0), Rank(), Rank()]
    status, killed = waited(*ranks, supervisor=Supervisor(end="rank 5 stands still"))
    assert (status, killed) == (LOST, {1, 2}) and ranks[1].signals == [signal.SIGKILL]
    leaving = Rank(answer=0)
    assert waited(leaving, supervisor=Supervisor(stop="the job ends soon")) == (0, set())
    assert leaving.signals == [signal.SIGTERM]


@pytest.mark.parametrize("closed", [False, True])
def test_ranks_are_asked_to_save_also_where_nothing_can_be_said(
    monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    leaving, failed, other = Rank(answer=0), Rank(7), Rank(answer=143)
    with Path("/dev/full").open("w") as full:  # as a log on a full disk, or a terminal that is gone
        monkeypatch.setattr("sys.stderr", full)
        if closed:
            with suppress(OSError):
                full.close()
        assert waited(leaving, supervisor=Supervisor(stop="the job ends soon")) == (0, set())
        assert waited(failed, other)[0] == 7
        supervised.SupervisedStart.say(SimpleNamespace(says="bloomery launch"), "it starts again")  # type: ignore[arg-type]
        launch._say("it waits")
        with suppress(OSError):
            full.close()
    assert leaving.signals == other.signals == [signal.SIGTERM]


def test_ranks_that_do_not_end_in_their_grace_time_are_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bloomery.cli.ranks.GRACE_S", -1.0)
    stuck = Rank()
    assert waited(Rank(0), stuck) == (1, {1}) and stuck.signals == [signal.SIGKILL]
    assert "ranks [5] did not end in time" in capsys.readouterr().err
    monkeypatch.setattr("bloomery.cli.ranks.GRACE_AFTER_FAILURE_S", -1.0)
    deaf = Rank()
    assert waited(Rank(7), deaf) == (7, {1}) and deaf.signals == [signal.SIGTERM, signal.SIGKILL]


def parallel(**settings: Any) -> ParallelSection:
    return ParallelSection(**settings)


def test_a_machine_starts_its_share_of_the_degrees_or_what_the_recipe_says() -> None:
    assert launch._usual_count(parallel(tensor=2, pipeline=3, data=4), nodes=6) == 4
    assert launch._usual_count(parallel(tensor=2, data=4, ranks_per_node=5), nodes=2) == 5
    assert launch._usual_count(parallel(tensor=4, pipeline=3), nodes=2) == 6, "without a GPU"
    assert launch._usual_count(parallel(), nodes=2) == 1
    with pytest.raises(TrainingFailed, match="10 ranks do not divide among 4 nodes"):
        launch._usual_count(parallel(tensor=2, data=5), nodes=4)


def test_spares_start_no_ranks_and_some_machine_has_to() -> None:
    assert launch._nodes_with_ranks(SimpleNamespace(nnodes=5, spares=2)) == 3  # type: ignore[arg-type]
    assert launch._nodes_with_ranks(SimpleNamespace(nnodes=5, spares=4)) == 1  # type: ignore[arg-type]
    with pytest.raises(TrainingFailed, match="5 of 5 machines are spares"):
        launch._nodes_with_ranks(SimpleNamespace(nnodes=5, spares=5))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--nnodes", "2"), "go together"),
        (("--rdzv", "a:1"), "go together"),
        (("--supervise", "--nnodes", "2", "--rdzv", "a:1"), "needs --job TEXT"),
        (("--spares", "1"), "--spares needs --supervise"),
    ],
)
def test_options_of_several_machines_that_lack_another_are_refused(
    words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert status_of("launch", "demo", *words) == 2 and told in capsys.readouterr().err


def test_ranks_get_the_recipe_its_settings_the_directory_and_what_was_asked_for() -> None:
    options = launch._parse(["my.toml", "a.b=1", "--fallback", "--supervise", "--spares", "1", "--job", "j7"])
    options.nnodes, options.rdzv = 3, "127.0.0.1:29400"
    command = launch._command(options, Path("runs/x"))
    words = "-m bloomery train my.toml a.b=1 --run runs/x --plain --fallback"
    assert command[1:] == words.split()
    options.run = "elsewhere"
    start = launch._supervised(options, load_recipe("demo"), count=4, nodes=2)
    assert (start.ranks, start.nodes, start.spares, start.job) == (4, 2, 1, "j7")
    assert start.is_loopback and start.join_timeout_s == 600.0
    assert "elsewhere" in start.command(RunDirectory(Path("other")))
    options.rdzv, options.run, options.fallback = "node-1:29400", None, False
    start = launch._supervised(options, load_recipe("demo"), count=4, nodes=2)
    last = start.command(RunDirectory(Path("other")))[-3:]
    assert not start.is_loopback and last == ("--run", "other", "--plain")


def test_machines_are_those_of_srun_unless_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(nodes=3, rendezvous="n1:29400")
    monkeypatch.setattr("bloomery.operate.launcher.node_group", lambda environment: group)
    monkeypatch.setattr("bloomery.operate.launcher.node_name", lambda environment: "n2")
    monkeypatch.delenv("BLOOMERY_HOST", raising=False)

    def taken(**given: Any) -> tuple[int, str]:
        options: Any = SimpleNamespace(**{"nnodes": None, "rdzv": None, **given})
        launch._take_nodes_of_srun(options)
        return options.nnodes, options.rdzv

    assert taken() == (3, "n1:29400") == taken(nnodes=3)
    assert taken(nnodes=2, rdzv="a:1") == (2, "a:1")
    with pytest.raises(TrainingFailed, match="--nnodes 2 was given, and srun has started this on 3"):
        taken(nnodes=2)
    assert os.environ["BLOOMERY_HOST"] == "n2"


def test_a_stopped_run_starts_no_rank_and_no_peer(tmp_path: Path) -> None:
    rundir, group = RunDirectory(tmp_path / "run").create(), tmp_path / "group"
    launch._refuse_stopped(rundir, str(group))
    arm(group / "stop", why="the room is hot")
    with pytest.raises(StoppedBySwitch, match="the room is hot"):
        launch._refuse_stopped(rundir, str(group))
    loaded = load_recipe("demo", [f"control.directory={group}"])
    with pytest.raises(StoppedBySwitch, match=str(group / "stop")):
        peer._refuse_when_stopped(rundir, loaded)
    peer._refuse_when_stopped(rundir, load_recipe("demo"))


def test_the_environment_of_ranks_keeps_what_is_set_already(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, added = "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_"
    monkeypatch.setenv(kept, "5")
    monkeypatch.delenv(added, raising=False)
    monkeypatch.setenv("NCCL_NET", "mine")
    section = EnvironmentSection(variables=("NCCL_NET=theirs", "NEW=1"))
    environment = prepared_environment(section)
    assert environment[kept] == "5" and environment[added] == MALLOC[added]
    assert environment["NCCL_NET"] == "mine" and environment["NEW"] == "1"
    assert environment[PREPARED] == "own" and ALLOCATOR.keys() <= environment.keys()
    assert "NEW" not in prepared_environment()


def test_a_bar_is_drawn_on_a_terminal_where_nothing_else_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def form(
        *, terminal: bool = True, log: str | None = None, plain: bool = False, recipe: str = "short"
    ) -> str:
        monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
        loaded = load_recipe("demo", [f"log.form={recipe}"])
        return _form(loaded, SimpleNamespace(log=log, plain=plain))  # type: ignore[arg-type]

    assert form() == "bar"
    assert form(terminal=False) == form(plain=True) == form(log="short") == "short"
    assert form(recipe="full") == form(log="full") == "full" and form(log="json", recipe="full") == "json"


def test_lines_are_broken_between_words_below_the_time_of_day() -> None:
    line = "12:00:00 " + "word " * 6 + "a/long-path/that-is-one-word"
    broken = _broken(line, columns=30)
    assert [len(part) <= 37 for part in broken.split("\n")] == [True] * 3 and broken.count("\n") == 2
    assert all(part.startswith(" " * 9 + "w") or "path" in part for part in broken.split("\n")[1:])
    assert "a/long-path/that-is-one-word" in broken and _broken(line, columns=len(line)) == line
    assert _shown(2.34567) == "2.3457" and _shown("NaN") == "NaN"


def node(host: str, *, ranks: int = 2, nodes: int = 3, **recipe: str) -> LauncherNode:
    return LauncherNode(host=host, ranks=ranks, nodes=nodes, recipe=recipe)


def test_machines_with_another_recipe_or_number_are_told_with_the_setting() -> None:
    _check_equal([node("a"), node("b")])
    with pytest.raises(TrainingFailed, match="b was started with --nnodes 2, a with 3"):
        _check_equal([node("a"), node("b", nodes=2)])
    with pytest.raises(TrainingFailed, match="c has another recipe than a") as differs:
        _check_equal([node("a", x="1"), node("b", x="1"), node("c", x="2")])
    assert "on c" in differs.value.message and "on a" in differs.value.message


def test_hosts_are_ordered_by_their_numbers() -> None:
    hosts = ["node-10", "node-2", "node-2b", "a", "node-1"]
    assert sorted(hosts, key=_natural) == ["a", "node-1", "node-2", "node-2b", "node-10"]


def test_a_signal_reaches_each_rank_once_also_those_that_are_started_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Rank] = []

    def start(command: object, **options: object) -> Rank:
        started.append(Rank(answer=143, pid=70 + len(started)))
        if len(started) == 2:  # this one is not among those that the handler knows
            signal.raise_signal(signal.SIGTERM)
        return started[-1]

    @contextmanager
    def ends(ranks: object) -> Iterator[object]:
        yield SimpleNamespace(wait=lambda seconds: None)

    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr(ranks_module, "ChildEnds", ends)
    before = signal.getsignal(signal.SIGTERM)
    assert ranks_module.run_ranks(["x"], RankRange(count=3, world=3), environment={}) == 143
    assert [rank.signals for rank in started] == 3 * [[signal.SIGTERM]]
    assert signal.getsignal(signal.SIGTERM) == before
