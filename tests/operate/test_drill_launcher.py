"""The launcher of a drill, and whether its ranks live."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.test_drill_waits import ACROSS, HERE, Clock, beat, clock, plan_of

from bloomery.config.submit import SubmitSection
from bloomery.operate.drill import exercise as module
from bloomery.operate.drill.allocation import DrillNodes
from bloomery.operate.drill.exercise import _Launcher, _lives, small_disk
from bloomery.operate.exclusions import Exclusions, QuarantinedNode

__all__ = ["clock"]


@pytest.mark.parametrize(
    ("failure", "stat", "lives"),
    [
        (None, f"{HERE} (python (x) ) S 1", True),
        (None, f"{HERE} (python) Z 1", False),
        (None, None, False),
        (ProcessLookupError, f"{HERE} (python) S 1", False),
        (PermissionError, None, True),
    ],
    ids=["runs", "zombie", "no record", "no process", "another user's"],
)
def test_a_rank_here_lives_by_its_process(
    monkeypatch: pytest.MonkeyPatch, failure: type[OSError] | None, stat: str | None, lives: bool
) -> None:
    asked: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        asked.append((pid, number))
        if failure:
            raise failure

    def read_text(path: Path) -> str:
        assert str(path) == f"/proc/{HERE}/stat"
        if stat is None:
            raise FileNotFoundError
        return stat

    monkeypatch.setattr(module.os, "kill", kill)
    monkeypatch.setattr(Path, "read_text", read_text)
    assert _lives(beat(time=0.0), ACROSS) is lives
    assert asked == [(HERE, 0)]


def test_a_rank_on_another_node_lives_by_its_heartbeat(clock: Clock) -> None:
    def lives(age_s: float) -> bool:
        return _lives(beat(host="there", pid=2**30, time=clock.now - age_s), ACROSS)

    assert lives(9.75) and not lives(10.0) and not lives(50.0)


@pytest.mark.parametrize(
    ("fields", "before"),
    [
        ({}, []),
        ({"private_shm_mib": 0}, []),
        ({"private_shm_mib": 64}, ["unshare", "--mount", "sh", "-c",
                                   'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]),
    ],
)  # fmt: skip
def test_the_launcher_starts_on_all_nodes_and_is_listened_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, int], before: list[str]
) -> None:
    started: list[tuple[Any, ...]] = []

    def start(command: list[str], **options: Any) -> Any:
        started.append((command, options))
        return SimpleNamespace(stderr=["one \n", "two\n"], poll=lambda: None)

    monkeypatch.setattr(module.subprocess, "Popen", start)
    plan = plan_of(tmp_path, command=("recipe", "--supervise"), nodes=ACROSS, **fields)
    launcher = _Launcher(plan)
    assert not launcher.is_running and launcher.last_words() == ""
    launcher.start()
    assert launcher.is_running and launcher.last_words() == "one\ntwo"
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "errors": "replace"}
    assert started == [([*before, *ACROSS.launch(), "recipe", "--supervise"], pipes)]


@pytest.mark.parametrize(
    "words",
    [
        "rank 0 was ended by signal 9", "rank 0 failed with status 1", "no rank has moved for 9 s",
        "the node could not be reached", "it lost another launcher",
    ],
)  # fmt: skip
def test_the_launcher_speaks_of_a_failure_when_it_first_does_so_after_it(tmp_path: Path, words: str) -> None:
    said = [(5.0, words), (7.0, "step 9"), (9.0, f"note: {words}"), (8.0, words), (11.0, words)]
    launcher = _Launcher(plan_of(tmp_path), said=said)
    assert [launcher.spoke_after(moment) for moment in (4.0, 5.0, 8.0, 11.0)] == [5.0, 8.0, 9.0, None]
    assert _Launcher(plan_of(tmp_path), said=[(5.0, "step 9")]).spoke_after(0.0) is None


def test_the_last_words_are_the_last_five_lines(tmp_path: Path) -> None:
    launcher = _Launcher(plan_of(tmp_path), said=[(float(number), f"line {number}") for number in range(9)])
    assert launcher.last_words() == "line 4\nline 5\nline 6\nline 7\nline 8"


def test_what_a_launcher_says_as_it_ends_is_waited_for(tmp_path: Path) -> None:
    launcher = _Launcher(plan_of(tmp_path), said=[(1.0, "going on")])

    def join(seconds: float) -> None:
        assert seconds == 5.0
        launcher.said.append((2.0, "no rank is left"))

    launcher.listener = SimpleNamespace(join=join)  # type: ignore[assignment]
    assert launcher.last_words() == "going on\nno rank is left"


@pytest.mark.parametrize(
    ("is_gone", "is_slow", "done"),
    [
        (False, False, ["SIGTERM", 120.0]),
        (True, False, ["SIGTERM", 120.0]),
        (False, True, ["SIGTERM", 120.0, "kill", None]),
    ],
)
def test_a_launcher_is_asked_to_end_and_killed_where_it_does_not(
    tmp_path: Path, is_gone: bool, is_slow: bool, done: list[Any]
) -> None:
    calls: list[Any] = []

    def send_signal(number: signal.Signals) -> None:
        calls.append(number.name)
        if is_gone:
            raise ProcessLookupError

    def wait(seconds: float | None = None) -> None:
        calls.append(seconds)
        if is_slow and seconds is not None:
            raise subprocess.TimeoutExpired("launch", seconds)

    process: Any = SimpleNamespace(send_signal=send_signal, wait=wait, kill=lambda: calls.append("kill"))
    _Launcher(plan_of(tmp_path), process).end()
    assert calls == done
    _Launcher(plan_of(tmp_path)).end()


@pytest.mark.parametrize("refused", [False, True])
def test_a_small_disk_is_mounted_for_as_long_as_it_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: bool
) -> None:
    calls: list[tuple[list[str], bool]] = []

    def run(command: list[str], *, check: bool, capture_output: bool = False) -> Any:
        assert Path(command[-1]).is_dir() and not check
        calls.append((command, capture_output))
        return SimpleNamespace(returncode=32 * refused, stderr=b"mount: \xff must be superuser\n")

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    used: list[Path] = []
    words = "no tmpfs can be mounted here: mount: \ufffd must be superuser$" if refused else "the user's"
    with pytest.raises(OSError, match=words), small_disk(48) as directory:
        used.append(directory)
        assert len(calls) == 1
        raise OSError("the user's")
    mounted = calls[0][0][-1]
    assert Path(mounted).parent == tmp_path and Path(mounted).name.startswith("bloomery-drill-")
    mount = (["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", mounted], True)
    assert calls == ([mount] if refused else [mount, (["umount", "--lazy", mounted], False)])
    assert used == ([] if refused else [Path(mounted)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("nodes", "left"), [(ACROSS, []), (DrillNodes(), ["n1", "n2"])])
def test_the_nodes_of_an_allocation_come_back_after_its_launcher_was_killed(
    tmp_path: Path, nodes: DrillNodes, left: list[str]
) -> None:
    plan = plan_of(tmp_path, nodes=nodes)
    exclusions = Exclusions.of(plan.rundir, SubmitSection())
    for host in ("n1", "n2"):
        exclusions.add(QuarantinedNode(host=host, cause="lost", since=1.0))
    module._let_nodes_back(plan)
    assert list(exclusions.nodes()) == left
