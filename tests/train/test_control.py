"""What signals, switches, clocks and request files ask of a run, as its first rank and the others see it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bloomery.config.checkpoint import ControlSection
from bloomery.config.load import load_recipe
from bloomery.errors import RunBusy, StoppedBySwitch
from bloomery.events.records import Facts
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import arm
from bloomery.parallel.mesh import Mesh
from bloomery.train import assemble
from bloomery.train.control import (
    SIGNALS,
    Control,
    refuse_when_stopped,
)
from bloomery.train.settings import StartOptions

CPU = torch.device("cpu")
ALONE = Mesh(device=CPU)


class Others(Mesh):
    """The mesh of a rank whose gathers have rank 0's word first, as this test gives it."""

    def all_gather_object(self, value: object) -> list[object]:
        return [{name: "" for name in value} if isinstance(value, dict) else "", value]


LATER_RANK = Others(device=CPU, rank=1, world=2)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


@pytest.fixture
def control(rundir: RunDirectory) -> Iterator[Control]:
    made = Control(rundir, ALONE)
    yield made
    made.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds, which a test moves; before the control is made."""
    now = [1000.0]
    stand_in = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr("bloomery.train.control.time", stand_in)
    return now


def agreed(control: Control) -> Facts:
    return control.agree(control.local_facts().numbers())


def test_nothing_is_asked_of_a_run_that_is_left_alone(control: Control) -> None:
    facts = agreed(control)
    assert (facts.save_requested, facts.stop_requested, facts.stop_reason) == (False, False, "")
    assert (facts.settings_requested, facts.skip_requested, facts.rewind_requested) == ((), (), ())
    assert control.asked_to_stop() == "" and control.interruptions == 0


def test_sigusr1_asks_for_one_save(control: Control) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    facts = agreed(control)
    assert facts.save_requested and not facts.stop_requested and control.interruptions == 0
    assert not agreed(control).save_requested


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_stop_is_told_by_its_name_as_long_as_the_run_lasts(
    control: Control, number: signal.Signals
) -> None:
    os.kill(os.getpid(), number)
    assert control.asked_to_stop() == f"signal {number.name}" and control.interruptions == 1
    for _ in range(2):
        facts = agreed(control)
        assert facts.stop_requested and facts.stop_reason == f"signal {number.name}"
        assert not facts.save_requested


def test_the_third_ctrl_c_ends_the_process_at_once(control: Control) -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert control.interruptions == 4


def test_handlers_are_given_back_and_a_process_that_ends_hears_no_more(rundir: RunDirectory) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    try:
        Control(rundir, ALONE).close()
        assert [signal.getsignal(number) for number in SIGNALS] == before
        Control(rundir, ALONE, ends_process=True).close()
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * len(SIGNALS)
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("ends_process", [True, False])
def test_a_process_that_ends_with_its_training_ends_once_another_has_taken_its_run(
    ends_process: bool, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def refuse(rundir: RunDirectory, *, on_lost: object = None) -> None:
        given.append(on_lost)
        raise RunBusy("taken", remedy="")

    monkeypatch.setattr(assemble, "lock_run", refuse)
    options = StartOptions(say=print, ends_process=ends_process)
    loaded = load_recipe("demo")
    with pytest.raises(RunBusy), ExitStack() as stack:
        assemble._take_and_prepare(loaded, rundir, options, mesh=ALONE, heartbeat=None, stack=stack)  # type: ignore[arg-type]
    assert given == [assemble._end_superseded if ends_process else None]


def test_a_save_switch_counts_once_and_a_stop_switch_until_it_is_disarmed(
    control: Control, rundir: RunDirectory
) -> None:
    arm(rundir.control("save"))
    assert agreed(control).save_requested and not rundir.control("save").exists()
    assert not agreed(control).save_requested
    arm(rundir.control("stop"))
    for _ in range(2):
        assert agreed(control).stop_reason == "control/stop" == control.asked_to_stop()
    rundir.control("stop").unlink()
    assert not agreed(control).stop_requested


def test_a_stop_switch_elsewhere_is_told_by_its_path(rundir: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "switches").mkdir()
    section = ControlSection(directory=str(tmp_path / "switches"))
    control = Control(rundir, ALONE, section=section)
    try:
        arm(tmp_path / "switches" / "stop")
        assert agreed(control).stop_reason == str(tmp_path / "switches" / "stop")
        arm(rundir.control("stop"))
        assert agreed(control).stop_reason == "control/stop"
    finally:
        control.close()


def test_a_signal_is_told_before_a_switch(control: Control, rundir: RunDirectory) -> None:
    arm(rundir.control("stop"))
    os.kill(os.getpid(), signal.SIGTERM)
    assert agreed(control).stop_reason == "signal SIGTERM"
    os.kill(os.getpid(), signal.SIGINT)
    assert agreed(control).stop_reason == "signal SIGINT"


def test_minutes_are_counted_from_the_start_and_from_the_last_save(
    clock: list[float], rundir: RunDirectory
) -> None:
    control = Control(rundir, ALONE)
    try:
        clock[0] += 120.0
        facts = agreed(control)
        assert (facts.minutes_running, facts.minutes_since_save) == (2.0, 2.0)
        control.restart_save_clock()
        clock[0] += 60.0
        facts = agreed(control)
        assert (facts.minutes_running, facts.minutes_since_save) == (3.0, 1.0)
    finally:
        control.close()


def test_a_save_that_failed_is_asked_for_once_more_when_its_time_has_come(
    clock: list[float], rundir: RunDirectory
) -> None:
    control = Control(rundir, ALONE)
    try:
        clock[0] += 600.0
        control.save_in(60.0)
        clock[0] += 59.0
        facts = agreed(control)
        assert not facts.save_requested and facts.minutes_since_save == pytest.approx(59 / 60)
        clock[0] += 1.0
        assert agreed(control).save_requested
        assert not agreed(control).save_requested
    finally:
        control.close()


def test_requests_in_files_are_carried_out_once(control: Control, rundir: RunDirectory) -> None:
    rundir.control("set").write_text("log.every_steps = 5\nnonsense\n\n optim.clip=1=2 \n")
    rundir.control("skip").write_text("8:16\n")
    rundir.control("rewind").write_text("3 4:9\n")
    facts = agreed(control)
    assert facts.settings_requested == (("log.every_steps", "5"), ("optim.clip", "1=2"))
    assert facts.skip_requested == ((8, 16),) and facts.rewind_requested == (3, 4, 9)
    control.settle(facts, stops=False)
    assert not any(rundir.control(name).exists() for name in ("set", "skip", "rewind"))
    facts = agreed(control)
    assert (facts.settings_requested, facts.skip_requested, facts.rewind_requested) == ((), (), ())


def test_a_request_in_another_encoding_stops_no_training(control: Control, rundir: RunDirectory) -> None:
    rundir.control("set").write_bytes("run.name = größe\noptim.clip = 2\n".encode("latin-1"))
    (name, clip) = agreed(control).settings_requested
    assert clip == ("optim.clip", "2") and name[0] == "run.name"


def test_a_request_of_one_kind_is_carried_out_without_a_word_of_the_others(
    control: Control, rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    rundir.control("skip").write_text("8:16\n")
    assert agreed(control).skip_requested == ((8, 16),)
    assert caplog.records == []


def test_a_rewind_that_a_stop_came_before_is_left_for_the_next_start(
    control: Control, rundir: RunDirectory
) -> None:
    path = rundir.control("rewind")
    path.write_text("3 4:9\n")
    os.kill(os.getpid(), signal.SIGTERM)
    facts = agreed(control)
    assert facts.stop_requested
    control.settle(facts, stops=True)
    assert path.read_text() == "3 4:9\n"
    control.settle(facts, stops=False)
    assert not path.exists()
    path.write_text("nonsense\n")
    assert agreed(control).rewind_requested == () and not path.exists(), "it would be told at every step"


def test_a_start_tells_of_the_requests_that_it_will_carry_out_and_that_came_before_it(
    rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    rundir.control("rewind").write_text("400 3200:5600\n")
    os.utime(rundir.control("rewind"), (0, 0))
    Control(rundir, LATER_RANK).close()
    assert caplog.messages == []
    Control(rundir, ALONE).close()
    (told,) = caplog.messages
    rundir.control("skip").write_text("8:16\n")
    Control(rundir, ALONE).close()
    *_, skip = caplog.messages
    assert skip.startswith("control/skip (8:16) waits since ") and "this start leaves samples out" in skip
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(0))
    assert told.startswith(f"control/rewind (400 3200:5600) waits since {since}: this start goes back after")
    assert "remove the file" in told and rundir.control("rewind").exists()


def test_what_is_asked_while_a_request_is_taken_is_taken_next(
    control: Control, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_text, later = Path.read_text, [(30, 40), (20, 30)]

    def asking_meanwhile(path: Path, **how: str) -> str:
        text = read_text(path, **how)
        if later and "skip" in path.name:
            first, end = later.pop()
            with rundir.control("skip").open("a") as file:
                file.write(f"{first}:{end}\n")
        return text

    rundir.control("skip").write_text("10:20\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", asking_meanwhile)
        asked = [*agreed(control).skip_requested, *agreed(control).skip_requested]
    assert asked == [(10, 20), (20, 30), (30, 40)] and not later


def test_a_rewind_that_is_asked_for_while_another_is_answered_is_kept(
    control: Control, rundir: RunDirectory
) -> None:
    rundir.control("rewind").write_text("8\n")
    facts = agreed(control)
    rundir.control("rewind").write_text("3\n")
    control.settle(facts, stops=False)
    assert agreed(control).rewind_requested == (3, 0, 0)


@pytest.mark.needs(lambda: os.geteuid() == 0, rights="root, to be another user for a moment")
@pytest.mark.parametrize("unreadable", ["file", "directory"])
def test_a_request_that_the_training_may_not_read_or_remove_is_named_once_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unreadable: str
) -> None:
    monkeypatch.chdir(tmp_path)  # the directories above it are root's alone
    tmp_path.chmod(0o755)
    rundir = RunDirectory(Path("run")).create()
    rundir.path.chmod(0o755)
    control = Control(rundir, ALONE)
    path = rundir.control("rewind")
    path.write_text("3 4:9\n")
    rundir.control_dir.chmod(0o777 if unreadable == "file" else 0o755)
    path.chmod(0o600 if unreadable == "file" else 0o644)
    os.seteuid(65534)
    try:
        for _ in range(2):
            assert agreed(control).rewind_requested == ()
    finally:
        os.seteuid(0)
        control.close()
    assert path.exists() and caplog.text.count("control/rewind is not carried out") == 1
    assert agreed(control).rewind_requested == (3, 4, 9)


def test_a_directory_in_place_of_a_request_is_named_once_and_left_alone(
    control: Control, rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    rundir.control("set").mkdir()
    for _ in range(2):
        assert agreed(control).settings_requested == ()
    assert caplog.text.count("control/set is not carried out") == 1
    advice = f"let the user that trains read it and write in {rundir.control_dir}."
    assert f"Remove it, or {advice}" in caplog.text and "(Is a directory)" in caplog.text


def test_other_ranks_read_no_files_and_tell_of_their_signals_alone(rundir: RunDirectory) -> None:
    control = Control(rundir, LATER_RANK)
    try:
        for name in ("stop", "save", "skip"):
            rundir.control(name).write_text("1:2")
        control.save_in(0.0)
        assert not any(control.local_facts().numbers())
        facts = control.agree([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
        assert facts.save_requested and facts.skip_requested == ()
        assert rundir.control("save").exists() and rundir.control("skip").exists(), "rank 0 removes them"
        os.kill(os.getpid(), signal.SIGTERM)
        assert control.asked_to_stop() == "signal SIGTERM"
    finally:
        control.close()


def test_ranks_speak_of_requests_only_where_there_is_one(rundir: RunDirectory) -> None:
    class Silent(Mesh):
        def all_gather_object(self, value: object) -> list[object]:
            return pytest.fail("each step would wait for it")

    control = Control(rundir, Silent(device=CPU, world=2))
    try:
        facts = agreed(control)
        assert (facts.settings_requested, facts.skip_requested, facts.rewind_requested) == ((), (), ())
    finally:
        control.close()


def test_a_file_that_asks_for_nothing_is_told_once(
    control: Control, rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    directory, told = rundir.control_dir, "control/pause asks for nothing"
    for number, name in enumerate(("pause", ".hidden", "stop", "sav")):
        (directory / name).touch()
        os.utime(directory, (number + 1.0, number + 1.0))  # however coarse the file system's clock is
        agreed(control)
        agreed(control)
    assert caplog.text.count(told) == 1 and caplog.text.count("control/sav asks for nothing") == 1
    assert caplog.text.count("asks for nothing") == 2
    for number, change in enumerate(((directory / "pause").unlink, (directory / "pause").touch)):
        change()
        os.utime(directory, (number + 10.0, number + 10.0))
        agreed(control)
    assert caplog.text.count(told) == 2, "one that somebody made anew is told anew"


def test_no_rank_starts_where_the_stop_switch_is_armed_and_the_first_says_why(rundir: RunDirectory) -> None:
    refuse_when_stopped(rundir, ControlSection(), ALONE)
    refuse_when_stopped(rundir, ControlSection(), LATER_RANK)
    arm(rundir.control("stop"), why="the disk is changed")
    with pytest.raises(StoppedBySwitch, match=r"stop \(armed by .*: the disk is changed\)") as refused:
        refuse_when_stopped(rundir, ControlSection(), ALONE)
    assert f"bloomery stop {rundir.path} --disarm" in refused.value.remedy
    rundir.control("stop").write_text("")
    with pytest.raises(StoppedBySwitch, match="control/stop is armed"):
        refuse_when_stopped(rundir, ControlSection(), ALONE)
    refuse_when_stopped(rundir, ControlSection(), LATER_RANK)  # rank 0 saw none when it looked


def test_a_later_rank_ends_too_where_the_first_saw_a_switch_and_leaves_the_word_to_it(
    rundir: RunDirectory,
) -> None:
    mesh = Mesh(device=CPU, rank=1, world=2)
    object.__setattr__(mesh, "all_gather_object", lambda value: ["/elsewhere/stop (for the night)", value])
    with pytest.raises(StoppedBySwitch) as stopped:
        refuse_when_stopped(rundir, ControlSection(), mesh)
    assert stopped.value.message == ""
    arm(rundir.control("stop"))
    with pytest.raises(StoppedBySwitch) as stopped:
        refuse_when_stopped(rundir, ControlSection(), ALONE)
    assert stopped.value.remedy == f"`bloomery stop {rundir.path} --disarm` lets the run go on."


def test_a_training_in_another_thread_leaves_the_signals_alone(rundir: RunDirectory) -> None:
    before, made = [signal.getsignal(number) for number in SIGNALS], list[Control]()
    thread = threading.Thread(target=lambda: made.append(Control(rundir, ALONE)))
    thread.start()
    thread.join()
    (control,) = made
    assert [signal.getsignal(number) for number in SIGNALS] == before and control.asked_to_stop() == ""
    control.close()


def test_a_request_for_a_save_that_the_launcher_held_back_arrives(rundir: RunDirectory) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)  # other threads do not hold it back
    control = Control(rundir, ALONE)
    try:
        assert agreed(control).save_requested
    finally:
        signal.sigtimedwait({signal.SIGUSR1}, 0)  # what did not arrive would end this process
        control.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
