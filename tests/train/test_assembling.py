"""How a run is put together: in which order it takes its directory, and what each part is given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery import __version__
from bloomery.config.convert import dump_recipe, settings_of
from bloomery.config.load import load_recipe
from bloomery.config.resume import SettingChange, SettingChanges
from bloomery.data.position import Position
from bloomery.events.run_directory import RunDirectory
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.plan.recomputation import Recomputation
from bloomery.train import assemble, run_start
from bloomery.train.attention_kernel import AttentionDecision
from bloomery.train.settings import StartOptions
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import Compilation

CPU = torch.device("cpu")
STATE = TrainState(goal=Goal(steps=9), step=4, position=Position(consumed=16))
Calls = list[tuple[Any, ...]]


class Part:
    """A part of a run that notes what is asked of it, and is equal to its name."""

    def __init__(self, calls: Calls, name: str, **answers: Any) -> None:
        self._calls, self._name, self._answers = calls, name, answers

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self._calls.append((f"{self._name}.{name}", *arguments, *([named] if named else [])))
            return self._answers.get(name, self)

        return call


@pytest.fixture
def calls() -> Calls:
    return []


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def start_up(calls: Calls, rundir: RunDirectory, *settings: str, **changed: Any) -> Any:
    loaded = load_recipe("demo", ["train.precision=bf16", *settings])
    summary = Part(calls, "summary", to_json={"tokens": 7}, lines=["a line", "another line"])
    summary.vocabulary = 701
    given: dict[str, Any] = dict(
        loaded=loaded,
        changes=SettingChanges(),
        mesh=Mesh(device=CPU),
        compilation=Compilation(on=True, why="it pays"),
        attention=SimpleNamespace(decision=AttentionDecision(kernel="", why="a CPU")),
        recomputation=Recomputation(mode="mlp", why="none needs 9.0 GiB of 8.0"),
        rundir=rundir,
        options=StartOptions(say=lambda line: calls.append(("said", line))),
        journal=Part(calls, "journal"),
        observers=Part(calls, "observers"),
        heartbeat=Part(calls, "heartbeat", take_spent={"preparing": 1.0}),
        summarise=lambda: summary,
        recipe_now=lambda: loaded.recipe,
    )
    made = run_start.RunStart(**given | changed)
    made.heartbeat.incarnation = 6
    made.journal.path = rundir.journal()
    return made


def journalled(calls: Calls) -> list[tuple[str, dict[str, Any]]]:
    return [(call[1], call[2]) for call in calls if call[0] == "journal.write"]


def said(calls: Calls) -> list[str]:
    return [call[1] for call in calls if call[0] == "said"]


def test_a_start_is_journalled_with_what_it_changes_and_how_it_computes(
    calls: Calls, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_start, "keep_recipe", lambda *told: calls.append(("kept", *told)))
    monkeypatch.setattr(run_start, "build_observers", lambda *told, **more: ["watcher"])
    change = SettingChange(key="optim.clip", old="1.0", new="2.0")
    free = SettingChange(key="log.every_steps", old="1", new="2")
    start = start_up(calls, rundir, changes=SettingChanges(journalled=(change,), free=(free,)))
    start.journal.path.write_text('{"event": "step", "step": 4}\n')
    start.begun(STATE, "start", 6)
    (event, fields), (data, figures) = journalled(calls)
    assert (event, fields) == (
        "start",
        {
            "incarnation": 6,
            "step": 4,
            "reason": "start",
            "position": STATE.position.to_json(),
            "changes": {"optim.clip": ["1.0", "2.0"]},
            "compiled": True,
            "compiled_why": "it pays",
            "attention": {
                "kernel": "",
                "why": "a CPU",
                "sizes": "",
                "seconds": {},
                "refusals": {},
                "found_for": {},
            },
            "precision": "bf16",
            "recompute": "mlp",
            "recompute_why": "none needs 9.0 GiB of 8.0",
            "ranks": 1,
            "device": "cpu",
            "threads": torch.get_num_threads(),
            "versions": {"bloomery": __version__, "torch": torch.__version__},
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "spent": {"preparing": 1.0},
            "recipe": dump_recipe(start.loaded.recipe),
        },
    )
    assert (data, figures) == ("data", {"incarnation": 6, "step": 4, "tokens": 7})
    assert [call for call in calls if call[0] == "kept"] == [("kept", start.loaded, rundir)]
    assert ("heartbeat.at", {"step": 4, "incarnation": 6}) in calls
    assert ("observers.join", ["watcher"]) in calls
    names = [call[0] for call in calls]
    assert names.index("journal.write") < names.index("kept"), "a killed start finds the changes again"


def test_a_recipe_is_kept_where_it_changed_or_is_not_there_and_changes_are_told_once(
    calls: Calls, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_start, "keep_recipe", lambda *told: calls.append(("kept",)))
    change = SettingChange(key="optim.clip", old="1.0", new="2.0")
    start = start_up(calls, rundir, changes=SettingChanges(journalled=(change,)))
    rundir.recipe.write_text("")
    for reason in ("rewind: spike", "rewind: again"):
        start.begun(STATE, reason, 7)
    told = [fields["changes"] for _, fields in journalled(calls)]
    assert told == [{"optim.clip": ["1.0", "2.0"]}, {}] and calls.count(("kept",)) == 1
    assert [call for call in calls if call[0].startswith("observers.")] == [("observers.rewound", 4)] * 2
    rundir.recipe.unlink()
    start.begun(STATE, "rewind: third", 8)
    assert calls.count(("kept",)) == 2 and said(calls) == []


def test_a_later_rank_journals_its_start_and_neither_keeps_the_recipe_nor_shows_anything(
    calls: Calls, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_start, "keep_recipe", lambda *told: pytest.fail("it is the first rank's"))
    start = start_up(calls, rundir, mesh=Mesh(device=CPU, rank=1, world=2))
    start.begun(STATE, "start", 6)
    ((event, fields),) = journalled(calls)
    assert event == "start" and "recipe" not in fields and fields["ranks"] == 2
    assert not said(calls) and not any(call[0].startswith("observers.") for call in calls)


@pytest.mark.parametrize("has", [4, 2, 0])
def test_steps_that_a_checkpoint_has_and_the_journal_lacks_are_told(
    has: int, calls: Calls, rundir: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    start = start_up(calls, rundir)
    if has:
        start.journal.path.write_text(f'{{"event": "step", "step": {has}}}\n')
    start._tell_of_missing_steps(STATE, 6)
    gap = {"incarnation": 6, "step": 4, "first": has + 1, "last": 4}
    assert journalled(calls) == ([] if has == 4 else [("journal_gap", gap)])
    told = f"{start.journal.path} does not tell of steps {has + 1} to 4, which the checkpoint has"
    assert (told in caplog.text) is (has < 4)


@pytest.mark.parametrize(
    ("changed", "report", "last"),
    [
        ((), {}, 9),
        ((), {"peers": 2}, 4 + 3),  # 40 samples are left, 16 a step
        (("train.global_batch=4",), {}, 4 + 10),
        ((), {"step": 5, "consumed_samples": 40}, 7),
        ((), {"step": 7, "consumed_samples": 56}, 7),
    ],
)
def test_the_last_step_follows_the_peers_that_are_there_and_changes_of_the_batch(
    changed: tuple[str, ...], report: dict[str, int], last: int, calls: Calls, rundir: RunDirectory
) -> None:
    length = ["train.global_batch=8", "train.ramp_up=[]", "train.samples=56"]
    now = load_recipe("demo", [*length, *changed]).recipe
    start = start_up(calls, rundir, *length, recipe_now=lambda: now)
    told = {"step": 4, "consumed_samples": 16, "peers": 1} | report
    assert start._last_step(SimpleNamespace(**told)) == last


def test_people_are_told_with_what_a_run_begins_and_programs_get_its_data(
    calls: Calls, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(run_start, "build_observers", lambda *told, **more: given.append((told, more)) or [])
    monkeypatch.setattr(run_start, "bubble_warning", lambda *told, **more: f"ranks wait {more}")
    monkeypatch.setattr(
        run_start,
        "warnings_of",
        lambda loaded, *, accelerators, consumed: [
            f"of {accelerators} at {consumed}, {loaded.recipe.model.vocabulary} tokens"
        ],
    )
    monkeypatch.setattr(run_start, "identity", lambda path: f"identity of {path.path.name}")
    mesh = Mesh(device=CPU, world=4, data=Axis(ranks=(0, 1)))
    length = ("train.global_batch=8", "train.ramp_up=[]", "train.samples=56")
    decision = AttentionDecision(
        kernel="flash", why="the quickest here", sizes="8 heads", seconds={"flash": 2e-3}
    )
    attention = SimpleNamespace(decision=decision)
    compilation = Compilation(on=False, why="too short")
    start = start_up(calls, rundir, *length, mesh=mesh, compilation=compilation, attention=attention)
    start._watchers(STATE)
    assert said(calls) == [
        f"step 4 of 9, incarnation 6 of {rundir.path}; 4 × cpu, bf16, eager (too short)",
        "attention by flash (the quickest here); forward and backward of 8 heads: flash 2 ms",
        "train.recompute = mlp: none needs 9.0 GiB of 8.0",
        "ranks wait {'data_degree': 2, 'consumed': 16}",
        "warning: of 4 at 16, 701 tokens",
        "a line",
        "another line",
    ]
    (((section, options), more),) = given
    recipe = start.loaded.recipe
    assert section is recipe.log and options is start.options
    tracked = more.pop("tracked")
    assert (tracked.name, tracked.identity) == (recipe.run.name, "identity of run")
    assert tracked.settings == settings_of(recipe)
    assert more.pop("last_step") == start._last_step
    assert more == {"first_step": 4, "total_steps": 9, "rundir": rundir, "device": CPU}
    calls.clear()
    events: list[Any] = []
    start.options = replace(start.options, form="json", emit=events.append)
    start.compilation = Compilation(on=True, why="it pays")
    start._watchers(STATE)
    assert events == [{"event": "data", "tokens": 7}] and "compiled (it pays)" in said(calls)[0]
    assert len(said(calls)) == 5


@pytest.mark.parametrize(("inner_steps", "last"), [(4, 4 + 3), (0, 4 + 5)])
def test_the_last_step_at_a_start_is_that_of_all_peers_that_the_recipe_names(
    inner_steps: int, last: int, calls: Calls, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(run_start, "build_observers", lambda *told, **more: given.append(more) or [])
    monkeypatch.setattr(run_start, "warnings_of", lambda loaded, **_: [])
    monkeypatch.setattr(run_start, "identity", lambda path: "identity")
    length = ("train.global_batch=8", "train.ramp_up=[]", "train.samples=56")
    peers = (f"elastic.inner_steps={inner_steps}", "elastic.peers=2", "elastic.minimum_peers=1")
    start_up(calls, rundir, *length, *peers)._watchers(STATE)
    assert said(calls)[0].startswith(f"step 4 of {last}, incarnation 6 of ")
    assert [more["total_steps"] for more in given] == [last]


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        (("train.precision=fp32",), {}),
        (("train.precision=auto",), {"train.precision": "bf16"}),
        (("train.precision=fp32", "train.precision_changes=[[48, 'auto']]"), {"train.precision": "bf16"}),
    ],
)
def test_ranks_compare_what_auto_becomes_where_a_phase_has_it(
    settings: tuple[str, ...], chosen: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "resolve_precision", lambda asked, device: {"auto": "bf16"}[asked])
    assert assemble._choices(load_recipe("demo", settings).recipe, CPU) == chosen


@pytest.mark.parametrize(
    ("pipeline", "schedule", "split"),
    [(1, "zero-bubble", False), (2, "zero-bubble", True), (2, "zbv", True), (2, "1f1b", False)],
)
def test_a_split_backward_is_not_compiled_and_else_the_operations_of_the_run_on_each_rank_decide(
    pipeline: int, schedule: str, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        assemble, "decide_compilation", lambda choice, **told: asked.append((choice, told)) or "decided"
    )
    plain = ["train.global_batch=8", "train.ramp_up=[]", "train.compile=on", "data.sequence_length=32"]
    plain += ["train.samples=400"]
    recipe = load_recipe("demo", [*plain, f"parallel.schedule={schedule}"]).recipe
    mesh = Mesh(device=CPU, world=4, pipeline=Axis(ranks=tuple(range(pipeline))))
    cost: Any = SimpleNamespace(hardware=1000.0, model=7.0)
    decided = assemble._compilation(recipe, cost, mesh)
    if split:
        why = f"parallel.schedule = {schedule} splits the backward"
        assert decided == Compilation(on=False, why=why) and not asked
    else:
        flops = 1000.0 * 50 * 8 * 32 / 4
        assert decided == "decided" and asked == [("on", {"device": CPU, "run_flops": flops})]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_copies_to_each_place_and_the_others_send_their_share(
    rank: int, calls: Calls, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []

    @contextmanager
    def at_the_end(backup: Any, mesh: Any, **told: Any) -> Iterator[None]:
        waits.append((backup, mesh, told["interruptions"](), told["say"], told["on_progress"]))
        yield
        calls.append(("backed up",))

    class Helper:
        def __init__(self, rundir: Any, **told: Any) -> None:
            calls.append(("helper", rundir, told))
            self.place = told["place"]

        def close(self) -> None:
            calls.append(("closed", self.place))

    monkeypatch.setattr(assemble, "backed_up_at_the_end", at_the_end)
    monkeypatch.setattr(assemble, "BackupHelper", Helper)
    monkeypatch.setattr(assemble, "Backup", lambda rundir, section, **told: (rundir, section.url, told))
    monkeypatch.setattr(assemble, "CombinedBackups", list)
    mesh, control = Mesh(device=CPU, rank=rank, world=2), SimpleNamespace(interruptions=3)
    options = StartOptions(say=print)

    def built(*settings: str) -> Any:
        recipe = load_recipe("demo", settings).recipe
        with ExitStack() as stack:
            return recipe, assemble._build_backup(recipe, rundir, mesh, control, options, stack, "tick")  # type: ignore[arg-type]

    assert built()[1] is None and waits == calls == []
    recipe, backup = built("backup.url=file:///a", "second_backup.url=file:///b")
    name = recipe.run.name
    places = list(assemble.sections(recipe))
    expected = [
        (rundir, url, {"run_name": name, "world": 2, "place": place})
        for place, url in zip(places, ("file:///a", "file:///b"), strict=True)
    ]
    assert backup == (None if rank else expected)
    assert waits == [(backup, mesh, 3, print, "tick")]
    helpers = [("helper", rundir, {"rank": 1, "world": 2, "place": place}) for place in places]
    closed = [("closed", place) for place in reversed(places)]
    assert calls == ([*helpers, ("backed up",), *closed] if rank else [("backed up",)])
