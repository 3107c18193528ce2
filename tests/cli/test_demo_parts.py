"""The demo's order of parts, its kill, its directory and its words, with fakes for what takes long."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.cli import demo, demo_steps
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.data.prepare import Prepared, PreparedDataset
from bloomery.errors import TrainingFailed
from bloomery.events.run_directory import RunDirectory

LOADED = load_recipe("demo-small", ["train.tokens=409_600"])
FITTED = demo_steps.Fitted(
    loaded=LOADED, name="demo-small", overrides=["train.tokens=409600"], summary="   it fits"
)


def dataset(documents: int, tokens: int, text_bytes: int) -> PreparedDataset:
    return PreparedDataset(
        name="x", prefix=Path("x"), weight=1.0, documents=documents, tokens=tokens, text_bytes=text_bytes
    )


PREPARED = Prepared(
    tokenizer_path=Path("t"), vocabulary_size=4_096, end_of_document_id=0,
    train=(dataset(1_234, 2_000_000, 7_500_000),), held_out=(dataset(56, 80_000, 300_000),),
    notes=("Two files were skipped.",), fingerprint="f", reused=False,
)  # fmt: skip


class FakeProcess:
    """A training whose process ends when it is told to.

    polls: what `poll` returns, one after the other. ends_with: its exit status once it is waited for.
    """

    pid = 77

    def __init__(self, *, polls: list[int | None] | None = None, ends_with: int = 0) -> None:
        self.polls, self.ends_with = polls or [], ends_with
        self.returncode: int | None = None
        self.calls: list[Any] = []

    def poll(self) -> int | None:
        return self.polls.pop(0) if self.polls else None

    def wait(self, timeout: float | None = None) -> int:
        self.calls.append("wait" if timeout is None else ("wait", timeout))
        self.returncode = self.ends_with
        return self.returncode

    def kill(self) -> None:
        self.calls.append("kill")

    def send_signal(self, number: int) -> None:
        self.calls.append(number)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Replace every part of the demo; returns what was called, with what."""
    called: list[Any] = []

    def fake(where: str, name: str, result: Any) -> None:
        def call(*given: Any, **options: Any) -> Any:
            called.append((name, *given, options))
            return result

        monkeypatch.setattr(f"bloomery.cli.{where}.{name}", call)

    monkeypatch.chdir(tmp_path)
    fake("demo_steps", "fitted_recipe", FITTED)
    fake("demo_steps", "prepare_text", PREPARED)
    fake("demo", "_train_and_kill", FITTED)
    compression = demo_steps.Compression(bits_per_byte=1.5, xz_bits_per_byte=2.0)
    fake("demo_steps", "compare_with_xz", compression)
    exported = demo_steps.ExportedDemo(directory=Path("e"), parameters=123_456, summary="   it is exported")
    fake("demo_steps", "export_verified", exported)
    fake("demo_steps", "draw_png", None)
    fake("demo_steps", "sample", "def read\n  two")
    fake("demo_steps", "draw_terminal", "a curve")
    return called


def test_the_parts_of_a_demo_come_in_order_and_are_given_what_they_need(
    parts: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.perf_counter", iter(range(0, 1_000, 3)).__next__)
    monkeypatch.setattr("sys.argv", ["/x/bin/bloomery", "demo"])
    assert demo.run(["--minutes", "2", "--run", "runs/mine"]) == 0
    rundir = RunDirectory(Path("runs/mine"))
    printer = parts[2][3]
    recipe = LOADED.recipe
    assert parts == [
        ("fitted_recipe", rundir, {"minutes": 2.0}),
        ("prepare_text", recipe, rundir, {"shown": False}),
        ("_train_and_kill", rundir, FITTED, printer, {"kill": True, "duration_s": 120.0}),
        ("compare_with_xz", recipe, PREPARED, rundir, {}),
        ("export_verified", rundir, {}),
        ("draw_png", rundir, Path("runs/mine/loss.png"), {}),
        ("sample", rundir, {"prompt": "def read_lines(path):\n"}),
        ("draw_terminal", rundir, {}),
    ]
    assert capsys.readouterr().out == (
        "bloomery demo: a language model from nothing, on the source code of the Python that runs this\n"
        "\n== Fitting the recipe to this machine\n   (3 s)\n   it fits\n"
        "\n== Training a tokenizer, writing the dataset\n   (3 s)\n"
        "   1,234 training files: 7.5 MB, 2,000,000 tokens (3.75 bytes per token, vocabulary 4,096)\n"
        "   56 held-out files: 0.3 MB, 80,000 tokens\n   Two files were skipped.\n"
        "\n== Training, with one kill -9 on the way\n   (3 s)\n"
        "\n== Compressing the held-out files, ours and xz\n   (3 s)\n"
        "   held-out files: 1.500 bits a byte. xz -9e, which did not see the\n"
        "   training files, makes 2.000: the model needs 0.750 of xz's size\n"
        "\n== Exporting to Hugging Face format, logits verified with transformers\n   (3 s)\n"
        "   it is exported\n"
        "\n== Drawing the loss curve, and letting the model write\n   (3 s)\n"
        "a curve\n"
        "The curve is also in runs/mine/loss.png. The model continues 'def read_lines(path):\\n':\n\n"
        "  | def read\n  |   two\n"
        "\nThree commands to try next:\n"
        "  /x/bin/bloomery train demo-small data.sources=YOUR.txt run.name=mine\n"
        "      your own text: .txt, .jsonl, directories and globs of them\n"
        "  /x/bin/bloomery train demo-small --run runs/mine train.tokens=819200\n"
        "      go on with this run, twice as long\n"
        "  /x/bin/bloomery generate runs/mine --prompt 'class Queue:'\n"
        "      let it write\n\n"
    )


def test_a_demo_as_json_prints_one_object_and_nothing_else(
    parts: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.perf_counter", iter(range(0, 1_000, 3)).__next__)
    assert demo.run(["--json", "--no-kill"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "bits_per_byte": 1.5, "xz_bits_per_byte": 2.0, "tokens": 409_600, "parameters": 123_456,
        "run": "runs/demo",
        "seconds": dict.fromkeys(["recipe", "data", "training", "evaluation", "export", "sample"], 3),
    }  # fmt: skip
    assert parts[0][-1] == {"minutes": 5.0}
    assert parts[2][-1] == {"kill": False, "duration_s": 300.0} and parts[2][3].quiet


def test_a_demo_takes_the_first_directory_without_a_finished_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert demo._next_directory() == Path("runs/demo")
    for name in ("demo", "demo-2"):
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "loss.png").touch()
    Path("runs/demo-3").mkdir()
    assert demo._next_directory() == Path("runs/demo-3")


def test_bars_are_shown_to_a_person_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, quiet, shown in ((True, False, True), (True, True, False), (False, False, False)):
        monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda terminal=terminal: terminal))
        assert demo._StepPrinter(quiet=quiet).shows_bars == shown


def test_commands_to_try_next_name_the_command_where_it_was_called_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/x/__main__.py", "demo"])
    text = demo._next_commands(RunDirectory(Path("runs/mine")), FITTED)
    assert "\n  bloomery generate runs/mine " in text
    spaced = demo._next_commands(RunDirectory(Path("my runs/mine")), FITTED)
    assert " --run 'my runs/mine' train" in spaced and "generate 'my runs/mine' --prompt" in spaced


class Clock:
    """A clock that goes on when somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr("time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that the demo will start, first to last; filled by a test, emptied by the demo."""
    waiting: list[Any] = []

    def start(words: list[str], **options: Any) -> Any:
        process = waiting.pop(0)
        process.started_with = (words, options)
        return process

    monkeypatch.setattr("subprocess.Popen", start)
    return waiting


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    rundir = RunDirectory(tmp_path / "run").create()
    # 409,600 tokens, 4 samples of 512 a step: 200 steps, of which 15% are 30.
    rundir.recipe.write_text(dump_recipe(LOADED.recipe))
    return rundir


def beats(monkeypatch: pytest.MonkeyPatch, found: list[tuple[int | None, int, list[int]]]) -> None:
    """Let the heartbeat tell (process, step) and the catalogue the saved steps, one after the other."""
    left = list(found)

    def beat(path: Path) -> dict[str, int] | None:
        pid, step, _ = left[0]
        return None if pid is None else {"pid": pid, "step": step}

    def saved(rundir: RunDirectory) -> list[Any]:
        _, _, steps = left.pop(0)
        return [SimpleNamespace(step=step) for step in steps]

    monkeypatch.setattr("bloomery.events.heartbeat.read_heartbeat", beat)
    monkeypatch.setattr("bloomery.checkpoint.format.catalogue.checkpoints", saved)


def test_the_training_is_killed_past_its_share_and_past_its_newest_checkpoint(
    rundir: RunDirectory, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    process = FakeProcess(ends_with=-9)
    started.append(process)
    beats(monkeypatch, [(None, 0, [10]), (77, 40, []), (76, 40, [10]), (77, 30, [10]), (77, 35, [10, 40]),
                        (77, 40, [10, 40]), (77, 41, [10, 40])])  # fmt: skip
    printer = demo._StepPrinter(quiet=True)
    assert demo._train_until_killed(rundir, ["train", "x"], printer, ends=2_000.0) == 41
    assert process.calls == ["kill", "wait"]
    assert clock.now == pytest.approx(1_001.4), "it looks five times a second"
    words = [sys.executable, "-m", "bloomery", "train", "x", "--no-hints"]
    assert process.started_with == (words, {"stdout": subprocess.DEVNULL})


def test_a_training_that_ends_or_takes_too_long_before_it_is_killed_is_waited_for(
    rundir: RunDirectory, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    printer = demo._StepPrinter(quiet=True)
    beats(monkeypatch, [(77, 1, [])] * 20)
    early, late = FakeProcess(polls=[None, 0]), FakeProcess()
    started += [early, late]
    assert demo._train_until_killed(rundir, ["train"], printer, ends=1_050.0) is None
    assert early.calls == [("wait", pytest.approx(49.8))]
    assert demo._train_until_killed(rundir, ["train"], printer, ends=1_001.0) is None
    assert late.calls == [("wait", 0.0)]
    started.append(FakeProcess(polls=[3], ends_with=3))
    with pytest.raises(TrainingFailed, match="training of the demo failed"):
        demo._train_until_killed(rundir, ["train"], printer, ends=1_001.0)


def test_what_stops_the_demo_stops_its_training_which_saves(started: list[Any]) -> None:
    process = FakeProcess()
    started.append(process)
    with pytest.raises(KeyboardInterrupt), demo._training(["train"], demo._StepPrinter(quiet=False)):
        raise KeyboardInterrupt
    assert process.calls == [signal.SIGINT, "wait"]
    assert process.started_with[1] == {"stdout": None}


@pytest.mark.parametrize(("status", "raises"), [(0, False), (-2, False), (130, False), (1, True)])
def test_a_training_stopped_for_time_may_end_by_the_signal(status: int, raises: bool) -> None:
    process = FakeProcess(ends_with=status)

    def wait(timeout: float | None = None) -> int:
        if timeout is not None:
            raise subprocess.TimeoutExpired("train", timeout)
        process.returncode = status
        return status

    process.wait = wait  # type: ignore[method-assign]
    try:
        demo._wait(process, demo._StepPrinter(quiet=True), ends=0.0)  # type: ignore[arg-type]
    except TrainingFailed:
        assert raises
    else:
        assert not raises
    assert process.calls == [signal.SIGINT]


@pytest.mark.parametrize(
    ("shorter", "took_s", "left_s", "waits_s", "words"),
    [
        (False, 10.0, 50.0, 65.0, "The same command"),
        (True, 10.0, 50.0, 65.0, "This machine became slower: a shorter run"),
        (False, 58.0, 15.0, 17.0, "The same command"),
        (False, 70.0, 15.0, 15.0, "The same command"),  # a quarter of the minute, though it is over
    ],
)
def test_a_killed_training_goes_on_with_what_fits_into_the_time_that_is_left(
    shorter: bool, took_s: float, left_s: float, waits_s: float, words: str,
    rundir: RunDirectory, started: list[Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    clock = Clock(monkeypatch)
    again = FakeProcess()
    started.append(again)
    less = demo_steps.Fitted(loaded=LOADED, name="demo-small", overrides=["train.tokens=9"], summary="")
    given: list[Any] = []

    def refitted(*words: Any, left_s: float) -> Any:
        given.append((*words, left_s))
        return less if shorter else FITTED

    def killed(*words: Any, ends: float) -> int:
        given.append((*words, ends))
        clock.now += took_s
        return 41

    monkeypatch.setattr("bloomery.cli.demo_steps.refitted", refitted)
    monkeypatch.setattr(demo, "_train_until_killed", killed)
    printer = demo._StepPrinter(quiet=False)
    trained = demo._train_and_kill(rundir, FITTED, printer, kill=True, duration_s=60.0)
    assert trained is (less if shorter else FITTED)
    first = ["train", "demo-small", "train.tokens=409600", "--run", str(rundir.path)]
    second = ["train", "demo-small", *trained.overrides, "--run", str(rundir.path)]
    assert given == [(rundir, first, printer, 1_075.0), (FITTED, rundir, left_s)]
    assert again.started_with[0][3:] == [*second, "--no-hints"]
    assert again.calls == [("wait", waits_s)]
    assert capsys.readouterr().out == (
        f"   $ bloomery {' '.join(first)}\n"
        f"\n   kill -9 at step 41: the trainer is gone. {words} goes on:\n   $ bloomery {' '.join(second)}\n"
    )


def test_a_training_is_killed_once_if_at_all(
    rundir: RunDirectory, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[bool] = []
    monkeypatch.setattr(demo, "_train_until_killed", lambda *words, ends: killed.append(True))
    printer = demo._StepPrinter(quiet=True)

    def train(*, kill: bool) -> None:
        assert demo._train_and_kill(rundir, FITTED, printer, kill=kill, duration_s=60.0) is FITTED

    train(kill=True)  # it ended before it could be killed
    assert killed == [True]
    started.append(FakeProcess())
    train(kill=False)
    rundir.incarnation(1).write_text('{"base": null}')
    train(kill=True)
    assert killed == [True, True]
    rundir.incarnation(2).write_text('{"base": null}')
    started.append(FakeProcess())
    train(kill=True)
    assert killed == [True, True] and not started
