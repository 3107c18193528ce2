"""What supervised starts and trainings hand on, and what a training says on its screen."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_streamed
from bloomery.cli import supervised, train
from bloomery.cli.ranks import PASSED_ON, RankRange
from bloomery.cli.supervised import SupervisedStart
from bloomery.config.environment import EnvironmentSection
from bloomery.config.load import load_recipe
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.diagnosis import EXIT_STATUSES, Cause


def start(**changed: Any) -> SupervisedStart:
    given: dict[str, Any] = {
        "command": lambda rundir: ("train", str(rundir.path)), "ranks": 2, "nodes": 1, "spares": 0,
        "job": "j7",
        "is_loopback": False, "join_timeout_s": 9.0, "environment": EnvironmentSection(variables=("A_B=1",)),
    }  # fmt: skip
    return SupervisedStart(**given | changed)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace what surrounds the attempts; returns what was begun and ended, in order."""
    from bloomery.operate import job_context, start_check
    from bloomery.operate.ledger import chronicle
    from bloomery.operate.sync import keeper

    calls: list[Any] = []

    @contextmanager
    def noted(name: str, value: Any = None, **facts: Any) -> Iterator[Any]:
        calls.append((name, facts) if facts else name)
        yield value
        calls.append(f"end of {name}")

    departure = SimpleNamespace(reason="")
    monkeypatch.setattr(job_context, "job_context", lambda environment: None)
    monkeypatch.setattr(job_context, "refuse_quarantined", lambda *given: calls.append("refuse"))
    monkeypatch.setattr(job_context, "reactions_of", lambda rundir, loaded, *, say: "reactions")
    monkeypatch.setattr(
        job_context, "departure_of",
        lambda context, host, rundir, loaded, *, asks_scheduler: noted(
            "departure", departure, context=context, asks=asks_scheduler
        ),
    )  # fmt: skip
    monkeypatch.setattr(chronicle, "ChronicleKeeper", lambda rundir: noted("chronicle"))

    def sync(rundir: Any, section: Any, *, wait_s: Any, say: Any) -> Any:
        before = wait_s()
        departure.reason = "the limit"
        return noted("sync", place=section.place, waits=(before, wait_s()))

    monkeypatch.setattr(keeper, "SyncKeeper", sync)
    monkeypatch.setattr(start_check, "start_check_of", lambda loaded: None)
    for name in ("_on_one_machine", "_on_several"):
        monkeypatch.setattr(supervised, name, lambda *given, name=name: calls.append((name, *given)) or 5)
    for variable in ("SLURM_NODEID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    return calls


def test_the_first_machine_keeps_the_chronicle_and_sends_logs(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_recipe("demo", ["sync.place=s3://b/x", "backup.finish_minutes=7"])
    rundir, one = RunDirectory(tmp_path), start()
    assert supervised.run_supervised(loaded, rundir, one) == 5
    departure = {"context": None, "asks": True}
    assert [call if isinstance(call, str) else call[:2] for call in calls] == [
        ("departure", departure), "chronicle", ("sync", {"place": "s3://b/x", "waits": (420.0, 3.0)}),
        ("_on_one_machine", rundir), "end of sync", "end of chronicle", "end of departure",
    ]  # fmt: skip
    assert calls[3][2:4] == (one, None), "without a job nobody reacts"
    calls.clear()
    for variable, more in (("SLURM_NODEID", {"nodes": 2}), ("JOB_COMPLETION_INDEX", {"spares": 1})):
        monkeypatch.delenv("SLURM_NODEID", raising=False)
        monkeypatch.setenv(variable, "3")
        supervised.run_supervised(loaded, rundir, start(**more))
    assert [call if isinstance(call, str) else call[0] for call in calls] == [
        "departure", "_on_several", "end of departure",
    ] * 2  # fmt: skip
    assert calls[0][1] == {"context": None, "asks": False}
    calls.clear()
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    supervised.run_supervised(loaded, rundir, start(nodes=2))
    assert calls[0][1]["asks"] and calls[1] == "chronicle", "the first of several machines"
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    calls.clear()
    supervised.run_supervised(loaded, rundir, one)
    assert "chronicle" in calls, "a run of one machine is kept by it wherever in the job it is"


def test_a_job_is_refused_in_quarantine_and_ends_where_its_machine_is_unfit(
    calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.operate import job_context, start_check

    loaded, rundir = load_recipe("demo"), RunDirectory(tmp_path)
    monkeypatch.setattr(job_context, "job_context", lambda environment: "a job")
    assert supervised.run_supervised(loaded, rundir, start()) == 5
    assert calls[0] == "refuse" and "sync" not in str(calls)
    refused: list[Any] = []
    monkeypatch.setattr(job_context, "refuse_quarantined", lambda *given: refused.append(given))
    monkeypatch.setattr(supervised, "host_name", lambda: "n5")
    assert supervised.run_supervised(loaded, rundir, start()) == 5 and refused == [("n5", rundir, loaded)]
    assert next(call for call in calls if call[0] == "_on_one_machine")[3] == "reactions"
    monkeypatch.setattr(start_check, "start_check_of", lambda loaded: "a check")
    monkeypatch.setattr(
        supervised, "_is_unfit", lambda check, rundir, reactions, say: reactions == "reactions"
    )
    assert supervised.run_supervised(loaded, rundir, start()) == EXIT_STATUSES[Cause.UNFIT_NODE] != 5
    assert supervised.run_supervised(loaded, rundir, start(nodes=2)) == 5
    several = next(call for call in calls if call[0] == "_on_several")
    assert several[-1] == "a check", "machines that start together are checked together"


def test_ranks_of_several_machines_get_their_share_and_the_meeting_of_the_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.operate import group_supervisor, job_board, launcher

    made: list[Any] = []
    watch = SimpleNamespace(name="a-3", why_to_stop=lambda: "", unlogged=lambda rank, line: None)
    decision = SimpleNamespace(share=lambda host: range(4, 6), meeting="10.0.0.7:29500", world=8)

    class Board:
        def __init__(self, path: Path, card: Any, *, nodes: int) -> None:
            made.append((path, card, nodes))

        def take_part(self) -> None:
            made.append("take part")

    def group(rundir: Any, board: Any, **given: Any) -> Any:
        made.append(given)
        return SimpleNamespace(run=lambda attempt: attempt(decision, watch) + 1)

    def ranks(command: Any, share: Any, **given: Any) -> int:
        made.append((command, share, given))
        return 6

    monkeypatch.setattr(job_board, "JobBoard", Board)
    monkeypatch.setattr(group_supervisor, "GroupSupervisor", group)
    monkeypatch.setattr(launcher, "address_of_node", lambda host, *, remedy: f"address of {host}")
    monkeypatch.setattr(supervised, "run_ranks", ranks)
    monkeypatch.setattr(supervised, "host_name", lambda: "n5")
    undisturbed: list[bool] = []
    monkeypatch.setattr(supervised, "_finish_undisturbed", lambda: undisturbed.append(True))
    monkeypatch.delenv("BLOOMERY_ADDRESS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    rundir = RunDirectory(tmp_path)

    def several(context: Any = None, **changed: Any) -> tuple[Any, Any, Any]:
        made.clear()
        parts: Any = ("reactions", "departure", "check")
        assert supervised._on_several(rundir, start(nodes=3, spares=1, **changed), context, *parts) == 7
        (path, card, count), used, given, started = made
        assert used == "take part" and count == 4
        return (path, card), given, started

    (path, card), given, (command, share, options) = several()
    assert path == tmp_path / "launchers" / "j7"
    assert (card.host, card.address, card.ranks, card.pid) == ("n5", "address of n5", 2, os.getpid())
    size, say = given.pop("size"), given.pop("say")
    assert say.__func__ is SupervisedStart.say
    assert (size.nodes, size.needed, size.ranks) == (4, 3, 2)
    assert given == {
        "job": "j7", "reactions": "reactions", "departure": "departure",
        "check": "check", "join_timeout_s": 9.0,
    }  # fmt: skip
    assert command == ("train", str(tmp_path)) and share == RankRange(first=4, count=2, world=8)
    assert options["others"] is watch and options["supervisor"] is watch
    assert options["output"]._on_unlogged is watch.unlogged
    assert options["output"]._file_of(5) == rundir.log(host="n5", rank=5)
    environment = options["environment"]
    assert environment.items() >= {
        "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "BLOOMERY_HOST": "n5", "BLOOMERY_ATTEMPT": "a-3",
        "A_B": "1",
    }.items()  # fmt: skip
    assert "GLOO_SOCKET_IFNAME" not in environment and not undisturbed
    (path, card), _, (_, _, options) = several(SimpleNamespace(name="s9"), job="", is_loopback=True)
    assert path.name == "s9" and card.address == "127.0.0.1"
    assert options["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setenv("BLOOMERY_ADDRESS", "10.9.9.9")
    watch.why_to_stop = lambda: "the limit"
    assert several()[0][1].address == "10.9.9.9" and undisturbed == [True]
    monkeypatch.setenv("BLOOMERY_ADDRESS", "127.0.0.5")
    (path, card), _, (_, _, options) = several(SimpleNamespace(name="s9"))
    assert (path.name, card.address) == ("j7", "127.0.0.5"), "a name that was given goes before the job's"
    assert options["environment"]["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_launcher_that_is_about_to_end_hears_no_signal() -> None:
    before = {number: signal.getsignal(number) for number in PASSED_ON}
    try:
        supervised._finish_undisturbed()
        for number in PASSED_ON:
            os.kill(os.getpid(), number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_training_is_given_its_screen_its_options_and_the_moment_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Any] = []
    outcome = SimpleNamespace(finished=True, failed=False, step=1, reason="done")
    loop = SimpleNamespace(train=lambda *given: trained.append(given) or outcome)
    monkeypatch.setitem(sys.modules, "bloomery.train.loop", loop)  # type: ignore[arg-type]
    options = SimpleNamespace(StartOptions=lambda **given: given)
    monkeypatch.setitem(sys.modules, "bloomery.train.settings", options)  # type: ignore[arg-type]
    bars: list[Any] = []
    monkeypatch.setattr("bloomery.cli.arguments.data_bar", lambda **given: bars.append(given))
    monkeypatch.setattr(train.Screen, "conclude", lambda self, rundir, *, hints: None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv(train.PREPARED, train.OWN_PROCESS)
    loaded, path = load_recipe("demo"), tmp_path / "run"

    def given(*words: str) -> dict[str, Any]:
        assert train._train(loaded, path, train._parse(["demo", *words]), 12.5) == 0
        recipe, rundir, asked = trained.pop()
        assert recipe is loaded and rundir == RunDirectory(path)
        asked.pop("data_progress")()
        result: dict[str, Any] = asked
        return result

    asked = given("--fallback")
    assert isinstance(asked["say"].__self__, train.Screen)
    assert asked["emit"].__self__ is asked["say"].__self__
    assert {key: asked[key] for key in asked.keys() - {"say", "emit"}} == {
        "form": "short", "columns": 91, "take_fallback": True, "started": 12.5, "ends_process": True,
    }  # fmt: skip
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv(train.PREPARED, "1")
    asked = given("--log", "full")
    assert asked["say"] is train._say_nothing
    assert (asked["form"], asked["take_fallback"], asked["ends_process"]) == ("short", False, False)
    monkeypatch.setenv("RANK", "0")
    assert given("--log", "full")["form"] == "full"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert given()["form"] == "bar"
    assert bars == [
        {"shown": True, "lines": True}, {"shown": False, "lines": True}, {"shown": True, "lines": True},
        {"shown": True, "lines": False},
    ]  # fmt: skip


def test_a_screen_ends_with_the_last_losses_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses: dict[str, Any] = {"loss": 2.34567, "held_out_loss": "NaN"}
    monkeypatch.setattr("bloomery.operate.overview.last_losses", lambda rundir: losses)
    monkeypatch.setattr("time.strftime", lambda form: "12:00:00")
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.12345)
    rundir = RunDirectory(tmp_path)

    def shown(form: str, *, hints: bool) -> str:
        train.Screen(form).conclude(rundir, hints=hints)
        return capsys.readouterr().out

    assert shown("short", hints=True) == (
        "12:00:00 at the end: loss 2.3457, held-out NaN\n"
        f"Next:\n  bloomery generate {tmp_path} --prompt 'Once'\n  bloomery evaluate {tmp_path} YOUR.txt\n"
        f"  bloomery ckpt export {tmp_path} exported\n"
    )
    assert shown("short", hints=False) == "12:00:00 at the end: loss 2.3457, held-out NaN\n"
    facts = {"event": "finished", "loss": 2.34567, "held_out_loss": "NaN", "time": 1_700_000_000.123}
    assert json.loads(shown("json", hints=True)) == facts
    losses["held_out_loss"] = None
    assert shown("bar", hints=False) == "12:00:00 at the end: loss 2.3457\n"
    losses["loss"] = None
    assert shown("full", hints=False) == ""
    train.Screen("json").say("é is said")
    assert capsys.readouterr().out == '{"event": "message", "text": "é is said", "time": 1700000000.123}\n'


def test_a_stop_without_a_checkpoint_of_its_step_does_not_say_that_it_saved(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path).create()
    assert train._stopped_at(7, rundir) == "stopped at step 7 unsaved"
    for step in (3, 5):
        save_streamed(rundir.checkpoints, [whole("model.weight", torch.ones(4))], step=step, incarnation=1)
    assert train._stopped_at(7, rundir) == "stopped at step 7, saved up to step 5"
    assert train._stopped_at(5, rundir) == "saved and stopped at step 5"


@pytest.mark.parametrize(
    ("form", "terminal", "columns", "length"),
    [("short", 60, 51, 58), ("short", 300, 91, 208), ("full", 60, 51, 208), ("short", None, 91, 208)],
)
def test_lines_of_a_screen_are_broken_to_its_terminal(
    form: str, terminal: int | None, columns: int, length: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    size = SimpleNamespace(columns=terminal)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: size)
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal is not None)
    monkeypatch.setattr("time.strftime", lambda form: "12:00:00")
    screen = train.Screen(form)
    assert screen.columns == columns
    screen.say(" ".join(["word"] * 40))
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) == length
