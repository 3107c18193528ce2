"""What `top` and `plot` show of runs, with which colours and figures."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.cli.test_demo_steps import Recorder

from bloomery.cli import plot, top
from bloomery.errors import ConfigError, StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.dashboard.run_events import ShownEvent
from bloomery.operate.dashboard.run_summary import RunSummary

MORNING = datetime(2026, 3, 4, 5, 6, 7).timestamp()


def event(number: int, *, step: int | None, level: Any, at: float) -> ShownEvent:
    return ShownEvent(
        number=number, time=MORNING + at, step=step, incarnation=1, kind=f"kind{number}", level=level,
        text=f"text {number}",
    )  # fmt: skip


SUMMARY = RunSummary(
    name="mine", path="runs/mine", health="bad", state="gone", why="nobody writes",
    problems=["its journal is damaged"], step=1_234, steps=5_000, done=0.25, left_s=None, step_s=0.5,
    loss=2.5,
    held_out=2.75, saved_step=1_200, written=MORNING, ranks=4, device="H200", night="Nothing happened.",
    advice=["Start it again.", "Or not."],
)  # fmt: skip


def reader(*events: ShownEvent) -> Any:
    return SimpleNamespace(
        news=SimpleNamespace(events=list(events)),
        columns=SimpleNamespace(last=lambda column: {"loss": 2.3456, "seconds": 0.5}.get(column)),
    )


def test_a_run_is_a_block_of_its_state_its_curves_and_its_newest_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def curves(reader: Any, names: list[str], *, points: int) -> Any:
        asked.append((names, points))
        return [] if names == ["seconds~"] else [SimpleNamespace(y=[1.0, 2.0, float("nan"), 3.0])]

    monkeypatch.setattr("bloomery.operate.dashboard.curves.curves", curves)
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding="UTF-8"))
    events = [event(n, step=n if n != 3 else None, level=level, at=5.0 - n)
              for n, level in enumerate(["info", "bad", "warning", "info", "info"])]  # fmt: skip
    block: Any = top.run_block(reader(*events), SUMMARY, width=60)
    assert block.plain.split("\n") == [
        "mine: gone (nobody writes)",
        "  its journal is damaged",
        "  [#####...............] 25.0%, step 1,234/5,000, 0.5 s/step",
        "  loss 2.5000, held out 2.7500, saved at step 1,200, 4 × H2…",
        "  loss               2.346 ▁▅ █",
        "  Nothing happened.",
        "  03-04 05:06:09 kind3: text 3",
        "  03-04 05:06:10 step 2 kind2: text 2",
        "  03-04 05:06:11 step 1 kind1: text 1",
        "  03-04 05:06:12 step 0 kind0: text 0",
        "  to do: Start it again. Or not.",
    ]
    styles = {block.plain[span.start : span.end].strip(): str(span.style) for span in block.spans}
    assert styles["mine: gone"] == "bold red" and styles["its journal is damaged"] == "red"
    assert styles["03-04 05:06:10 step 2 kind2: text 2"] == "yellow"
    assert styles["03-04 05:06:11 step 1 kind1: text 1"] == "red"
    assert asked == [([name], 30) for name in ("loss~", "gradient_norm~", "tokens_per_s~", "seconds~")]
    narrow: Any = top.run_block(reader(), SUMMARY, width=10)
    assert max(map(len, narrow.plain.split("\n"))) == 40
    new: Any = top.run_block(reader(), RunSummary(
        name="new", path="", health="good", state="new", why="", problems=[], night="Quiet."
    ), width=60)  # fmt: skip
    assert new.plain.split("\n") == ["new: new", "  Quiet.", "  to do:"]
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding="ascii"))
    block = top.run_block(reader(), SUMMARY, width=60)
    assert block.plain.split("\n")[4].endswith("2.346 _+ @")


def test_what_top_knows_of_progress_and_saves_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bloomery.operate.dashboard.run_summary.left_words", lambda summary: "2 h left")
    from msgspec.structs import replace

    assert top._saved(SUMMARY).endswith(", 4 × H200, last sign 03-04 05:06:07")
    assert top._progress(replace(SUMMARY, left_s=7.0), 60).endswith("0.5 s/step, 2 h left")
    assert "left" not in top._progress(replace(SUMMARY, left_s=0.0), 60)


def test_a_new_run_and_one_of_zeros_have_their_figures_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from msgspec.structs import replace

    begun = replace(SUMMARY, step=0, done=0.0, step_s=1.2345, loss=None, saved_step=0, steps=None)
    assert top._progress(begun, 60) == f"[{'.' * 20}] 0.0%, step 0, 1.23 s/step"
    assert top._saved(begun).startswith("loss not finite, held out 2.7500, saved at step 0, 4 × H200")
    bare = replace(begun, held_out=None, saved_step=None, ranks=None, written=None)
    assert top._saved(bare) == "loss not finite, never saved"
    monkeypatch.setattr(
        "bloomery.operate.dashboard.curves.curves",
        lambda reader, names, *, points: [SimpleNamespace(y=[float("nan"), 0.0])],
    )
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding=None))
    block: Any = top.run_block(
        SimpleNamespace(news=SimpleNamespace(events=[event(0, step=1_234, level="info", at=0.0)]),
                        columns=SimpleNamespace(last=lambda column: 0.0)),
        begun, width=80,
    )  # fmt: skip
    lines = block.plain.split("\n")
    assert lines[2].endswith("0.0%, step 0, 1.23 s/step") and "  loss                   0  _" in lines
    assert "  03-04 05:06:07 step 1,234 kind0: text 0" in lines
    assert top.sparkline([float("nan")] * 3) == "   "


def test_no_text_of_a_run_commands_the_terminal_and_a_long_one_is_told_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from msgspec.structs import replace

    monkeypatch.setattr("bloomery.operate.dashboard.curves.curves", lambda *given, **more: [])
    words = [f"word{number:02}" for number in range(30)]
    rude = "\x1b[2J\x9b\u202e"
    told = replace(
        SUMMARY, why=f"why{rude}", problems=[" ".join(words) + rude], device=f"d{rude}",
        advice=[" ".join(words).upper(), rude],
    )  # fmt: skip
    block: Any = top.run_block(reader(), told, width=62)  # nine words, and eight where they are indented
    lines = block.plain.split("\n")
    assert not {"\x1b", "\x9b", "\u202e"} & set(block.plain)
    assert max(map(len, lines)) <= 62
    assert " ".join(words) in " ".join(block.plain.split())
    assert " ".join(words).upper() in " ".join(block.plain.split())


def test_top_looks_every_two_seconds_and_is_as_wide_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for columns, width in ((None, 80), ("70", 70), ("many", 80)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns is not None:
            monkeypatch.setenv("COLUMNS", columns)
        assert top._parse(["a"]).columns == width
    options = top._parse(["a", "--once", "b"])
    assert (options.runs, options.once, options.interval) == (["a", "b"], True, 2.0)
    for text, seconds in (("0.1", 0.1), ("3600", 3600.0), ("0.09", None), ("3601", None), ("soon", None)):
        if seconds is None:
            with pytest.raises(SystemExit):
                top._parse(["a", "--interval", text])
        else:
            assert top._parse(["a", "--interval", text]).interval == seconds


def test_top_prints_once_where_there_is_no_terminal_and_fails_for_a_bad_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from msgspec.structs import replace

    health = ["good", "attention"]
    monkeypatch.setattr(
        "bloomery.operate.dashboard.run_reader.RunReader",
        lambda path: SimpleNamespace(read_all=lambda: reader(), path=path),
    )
    monkeypatch.setattr(
        "bloomery.operate.dashboard.run_summary.RunSummarizer",
        lambda reader: SimpleNamespace(summary=lambda: replace(SUMMARY, health=health.pop(0))),
    )
    widths: list[int] = []
    monkeypatch.setattr(
        top, "run_block", lambda reader, summary, *, width: widths.append(width) or summary.health
    )
    assert top.run(["a", "b", "--columns", "70"]) == 0
    assert capsys.readouterr().out.split() == ["good", "attention"] and widths == [70, 70]
    health[:] = ["bad", "good"]
    assert top.run(["a", "b", "--columns", "300"]) == 1 and widths[2:] == [120, 120]


@pytest.mark.parametrize(
    ("is_terminal", "words", "is_watched"),
    [(False, (), False), (True, ("--once",), False), (True, (), True), (True, ("--columns", "70"), True)],
)
def test_top_follows_runs_in_a_terminal_whose_width_counts(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, words: tuple[str, ...], is_watched: bool
) -> None:
    done: list[Any] = []

    def console(*, highlight: bool, width: int | None) -> Any:
        done.append(width)
        return SimpleNamespace(print=lambda block: done.append("printed"), width=90)

    monkeypatch.setattr("rich.console.Console", console)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    monkeypatch.setattr(
        "bloomery.operate.dashboard.run_reader.RunReader", lambda path: SimpleNamespace(read_all=reader)
    )
    monkeypatch.setattr(
        "bloomery.operate.dashboard.run_summary.RunSummarizer",
        lambda reader: SimpleNamespace(summary=lambda: SUMMARY),
    )
    monkeypatch.setattr(top, "run_block", lambda reader, summary, *, width: "")
    monkeypatch.setattr(top, "_watch", lambda console, runs, options: done.append("watched"))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert top.run(["a", *words]) == (0 if is_watched else 1)
    assert done == [None if is_terminal else 80, "watched" if is_watched else "printed"]


def test_top_reads_what_is_new_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class Live:
        def __init__(self, first: Any, **options: Any) -> None:
            done.append(options["screen"])

        def __enter__(self) -> Live:
            return self

        def __exit__(self, *error: object) -> None:
            done.append("end")

        def update(self, screen: Any, *, refresh: bool) -> None:
            done.append(("shown", len(screen.renderables), refresh))

    def wait(seconds: float) -> bool:
        done.append(seconds)
        return len(done) > 9

    monkeypatch.setattr("rich.live.Live", Live)
    monkeypatch.setattr(top, "EndSignal", lambda: SimpleNamespace(wait=wait))
    monkeypatch.setattr(top, "run_block", lambda reader, summary, *, width: "")
    runs: Any = [
        (SimpleNamespace(poll=lambda name=name: done.append(name)), SimpleNamespace(summary=lambda: SUMMARY))
        for name in "ab"
    ]
    top._watch(Console(width=200), runs, Namespace(interval=7.5))
    assert done == [True, *[7.5, "a", "b", ("shown", 2, True)] * 2, 7.5, "end"]


class Curves:
    """The curves of a run whose steps went from 10 to 20."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.calls: list[Any] = []
        monkeypatch.setattr("bloomery.operate.dashboard.curves.curves", self.curves)
        places = {"step": 15.0, "tokens": 150.0, "time": MORNING}
        self.events = [
            {"at": places, "level": "bad"}, {"at": places, "level": "warning"}, {"at": {}, "level": "bad"},
            {"at": {"step": 21.0}, "level": "bad"}, {"at": {"step": 20.0}, "level": "bad"},
        ]  # fmt: skip
        monkeypatch.setattr(
            "bloomery.operate.dashboard.panels.events_with_places", lambda reader: self.events
        )

    def curves(self, reader: Any, names: list[str], **given: Any) -> Any:
        self.asked.append((names, given))
        return [SimpleNamespace(name=name, x=[10.0, 20.0], y=[1.0, 2.0]) for name in [names[0], *names]]

    def drawn(self, column: str, *, is_one: bool = True, against: str = "step") -> list[Any]:
        self.calls.clear()
        columns = SimpleNamespace(sparse=["held_out/prose", "held_out/code", "other/x"])
        run: Any = SimpleNamespace(name="mine", columns=columns)
        options = Namespace(against=against, begin=11.0, end=19.0)
        plot._draw_run(Recorder(self.calls), run, column, "#123456", options, is_one=is_one)
        return [call[-1] | {"at": call[1]} for call in self.calls]


def test_curves_are_thin_for_steps_thick_where_smoothed_and_dotted_where_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curves = Curves(monkeypatch)
    grey = {"color": "#808080", "linewidth": 0.8, "linestyle": ":", "at": [10.0, 20.0]}
    own, at = {"color": "#123456"}, {"at": [10.0, 20.0]}
    points = own | at | {"markersize": 4, "linestyle": "--"}
    red = {"color": "#a3200d", "linewidth": 0.8, "alpha": 0.6}
    assert curves.drawn("loss", is_one=False) == [
        grey | {"label": "mine: discarded"}, grey | {"label": None},
        own | at | {"linewidth": 0.6, "alpha": 0.45, "label": None},
        own | at | {"linewidth": 1.6, "label": "mine: smoothed"},
        points | {"marker": "s", "label": "mine: held out code"},
        points | {"marker": "o", "label": "mine: held out prose"},
        red | {"at": 15.0}, red | {"at": 20.0},
    ]  # fmt: skip
    names = ["loss!", "loss", "loss~", "held_out/code", "held_out/prose"]
    assert curves.asked == [(names, {"axis": "step", "begin": 11.0, "end": 19.0, "points": 3000})]
    planned = curves.drawn("learning_rate")
    assert curves.asked[1][0] == ["learning_rate!", "learning_rate"]
    assert planned[2] == own | at | {"label": "each step"} and planned[0]["label"] == "discarded"
    curves.events = []
    assert curves.drawn("mfu", against="time")[2]["at"] == [
        datetime.fromtimestamp(10.0), datetime.fromtimestamp(20.0)
    ]  # fmt: skip


def test_a_picture_has_a_chart_for_each_column_in_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    drawing, runs = Recorder(calls), list[Any]()
    grids: list[Any] = []

    def subplots(high: int, wide: int, **options: Any) -> Any:
        grid = [Recorder([]) for _ in range(high * wide)]
        grids.append((high, wide, options["figsize"], grid))
        return drawing, SimpleNamespace(flat=grid)

    pyplot = SimpleNamespace(subplots=subplots, close=drawing.close)
    module = SimpleNamespace(use=drawing.use, pyplot=pyplot, dates=drawing)
    monkeypatch.setitem(sys.modules, "matplotlib", module)  # type: ignore[arg-type]
    monkeypatch.setattr(plot, "_draw_run", lambda *given, is_one: runs.append((*given[2:4], is_one)))
    options = Namespace(
        columns=["loss", "tokens_per_s", "mfu"], against="tokens", log=True, output=Path("x.svg")
    )
    plot.draw(["a", "b"], options)  # type: ignore[list-item]
    ((high, wide, size, grid),) = grids
    assert (high, wide, size) == (2, 2, (12.4, 7.2))
    assert runs == [
        (column, colour, False) for column in options.columns for colour in ("#0072b2", "#d55e00")
    ]
    assert grid[1].calls == [
        ("set", {"title": "tokens per s", "xlabel": "tokens"}), ("set_yscale", "log", {}),
        ("grid", {"visible": True, "alpha": 0.3}), ("legend", {"fontsize": "small"}),
    ]  # fmt: skip
    assert grid[3].calls == [("set_visible", False, {})]
    assert ("savefig", Path("x.svg"), {}) in calls
    options = Namespace(columns=["loss"], against="step", log=False, output=Path("x.svg"))
    plot.draw(["a"], options)  # type: ignore[list-item]
    high, wide, size, grid = grids[1]
    assert (high, wide, size, runs[-1][2]) == (1, 1, (6.2, 3.6), True)
    assert "set_yscale" not in {call[0] for call in grid[0].calls}


def test_a_picture_that_cannot_be_drawn_or_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = SimpleNamespace(names=["loss", "mfu"])
    run = SimpleNamespace(name="mine", columns=columns, problems=lambda: ["a line is torn"])
    monkeypatch.setattr(
        "bloomery.operate.dashboard.run_reader.RunReader", lambda path: SimpleNamespace(read_all=lambda: run)
    )
    path = str(RunDirectory(tmp_path / "run").create().path)
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "draw", lambda readers, options: drawn.append((readers, options.columns)))
    words = [path, "--columns", "mfu", "loss", "--output", str(tmp_path / "x.png")]
    assert plot.run(words) == 0 and drawn == [([run], ["mfu", "loss"])]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == (f"{tmp_path}/x.png\n", "mine: a line is torn\n")
    assert plot.run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"picture": f"{tmp_path}/x.png"}
    with pytest.raises(ConfigError, match="is no column of these runs") as refused:
        plot.run([path, "--columns", "mfu", "los"])
    (mistake,) = refused.value.mistakes
    assert (mistake.value, mistake.remedy) == ("los", "There are loss, mfu.")

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plot, "draw", full)
    with pytest.raises(StorageError, match=r"x\.png"):
        plot.run(words)
    for begin, end, refuses in (("5", "5", True), ("5", "4", True), ("4", "5", False)):
        given = [path, "--from", begin, "--to", end]
        if refuses:
            with pytest.raises(SystemExit):
                plot._parse(given)
        else:
            assert (plot._parse(given).begin, plot._parse(given).end) == (4.0, 5.0)
