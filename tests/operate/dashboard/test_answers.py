"""What the dashboard answers without a server: what is cached, and each figure of a run."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from tests.operate.dashboard.written_run import WrittenRun, healed_run

from bloomery.checkpoint.format.catalogue import record_copy
from bloomery.config.load import dump_recipe, load_recipe, override
from bloomery.errors import BloomeryError
from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.operate import submission
from bloomery.operate.dashboard import panels, run_summary, viewed_run
from bloomery.operate.dashboard.access import AccessRules
from bloomery.operate.dashboard.panels import CachedValue, saves
from bloomery.operate.dashboard.prometheus import metrics_text
from bloomery.operate.dashboard.run_events import shown_event
from bloomery.operate.dashboard.run_reader import RunReader, _is_newer
from bloomery.operate.dashboard.run_summary import RunSummarizer, night_words, silent_ranks
from bloomery.operate.dashboard.server import DashboardServer
from bloomery.operate.dashboard.viewed_run import ViewedRun
from bloomery.operate.schedulers.interface import SchedulerError
from bloomery.operate.submission import keep_submission, submission_of


def test_a_rank_that_died_makes_the_answers_anew(run: WrittenRun, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(3):
        beat = {"rank": rank, "world": 3, "pid": rank, "time": time.time()}
        run.rundir.heartbeat(rank=rank).write_text(json.dumps(beat))
    dead: set[int] = set()
    monkeypatch.setattr(viewed_run, "has_died_here", lambda beat, *, now: beat.rank in dead)
    viewed = ViewedRun(run.rundir.path, interval_s=3600.0)
    viewed.reader.read_all()
    first, version = viewed.summary(), viewed.reader.version
    viewed.check_ranks()
    assert (viewed.died, viewed.reader.version, viewed.summary() is first) == ((), version, True)
    dead |= {0, 2}
    for _ in range(2):
        viewed.check_ranks()
    assert (viewed.died, viewed.reader.version) == ((0, 2), version + 1)
    assert viewed.summary() is not first
    run.rundir.heartbeat(rank=1).unlink()
    viewed.check_ranks()
    assert viewed.died == (0, 2), "a rank without a heartbeat moves no other"


def test_an_answer_of_a_changed_run_is_made_anew_and_the_oldest_is_forgotten(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewed = ViewedRun(run.rundir.path)
    viewed.reader.read_all()
    ask = lambda points: viewed.curves(["loss"], axis="step", begin=None, end=None, points=points)  # noqa: E731
    first = ask(20)
    assert ask(20) is first and len(json.loads(ask(20))[0]["x"]) < len(json.loads(ask(60))[0]["x"])
    viewed.reader.version += 1
    assert ask(20) is not first
    monkeypatch.setattr(viewed_run, "_MOST_ANSWER_BYTES", 1)
    last = ask(30)
    assert [answer for _, answer in viewed._answers.values()] == [last]


def test_the_head_of_a_page_has_the_figures_of_the_newest_step_that_counts(run: WrittenRun) -> None:
    run.event("checkpoint", path="step-000091.i002")
    summary = RunSummarizer(RunReader(run.rundir.path).read_all()).summary(now=1000.0)
    assert (summary.step, summary.steps, summary.done) == (91, 200, 91 * 8 / 1600)
    assert (summary.step_s, summary.left_s) == (pytest.approx(0.1), pytest.approx(109 * 0.1))
    assert (summary.held_out, summary.saved_step, summary.tokens) == (2.75, 91, 91 * 256)
    assert (summary.ranks, summary.device, summary.rows) == (1, "cpu", 101)
    assert summary.name == "healed (demo)" and summary.ends is None, "it does not run"
    assert (summary.state, summary.health) == ("gone", "bad")


def test_the_night_is_what_happened_in_twelve_hours(run: WrittenRun) -> None:
    now = time.time()
    reader = RunReader(run.rundir.path).read_all()
    told = night_words(reader, now=now)
    assert told == ("In the last 12 hours: 91 steps, 1 start, 1 × guard, 1 × rewind, 10 steps discarded.")
    assert night_words(reader, now=now + 13 * 3600.0) == "In the last 12 hours nothing happened."


def test_ranks_are_silent_after_three_heartbeats_or_with_their_process(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RunReader(run.rundir.path)
    assert silent_ranks(reader, now=1000.0) == []
    for rank, (age_s, activity) in enumerate(
        ((2.9, "computing"), (3.1, "computing"), (9.0, RankActivity.ENDED))
    ):
        beat = RankBeat(rank=rank, world=4, activity=activity, time=1000.0 - age_s)
        run.rundir.heartbeat(rank=rank).write_text(json.dumps(beat.__dict__))
    assert silent_ranks(reader, now=1000.0) == [1]
    monkeypatch.setattr(run_summary, "has_died_here", lambda beat, *, now: beat.rank == 0)
    assert silent_ranks(reader, now=1000.0) == [0, 1]


def test_a_saves_row_tells_what_it_cost_and_why_it_is_kept(run: WrittenRun) -> None:
    run.steps(1)
    record = json.loads(run.journal.path.read_text().splitlines()[-1])
    run.event("checkpoint", path="step-000092.i002")
    own = {name: record[name] for name in ("loss", "seconds", "consumed_samples", "consumed_tokens")}
    run.event("step", step=93, **own, spent={"saving a checkpoint": 1.5, "forward and backward": 0.1})
    run.event("checkpoint", step=94, path="step-000094.i002")
    run.event("step", step=95, **own, spent={"saving a checkpoint": 2.5, "forward and backward": 0.1})
    run.event("checkpoint", step=95, path="step-000095.i002")
    newest, *rows = saves(RunReader(run.rundir.path).read_all(), None)
    assert (newest.step, newest.blocked_s) == (95, None), "the step after it tells"
    assert [(row.name, row.step, row.blocked_s, row.durable, row.kept) for row in rows] == [
        ("step-000094.i002", 94, None, True, ""),
        ("step-000092.i002", 92, 1.5, True, ""),
        ("step-000050.i001", 50, 0.0, True, ""),
    ]


def test_a_table_that_is_asked_for_anew_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, made = [100.0], list[float]()
    monkeypatch.setattr(panels, "time", SimpleNamespace(monotonic=lambda: clock[0], thread_time=lambda: 0.0))
    table = CachedValue(lambda: made.append(clock[0]) or len(made), least_s=10.0)
    for clock[0] in (100.0, 109.0, 110.0, 119.0):
        table.get()
    assert made == [100.0, 110.0]
    table.expire()
    assert table.get() == 3 and made[-1] == 119.0


def test_each_figure_of_the_metrics_is_that_of_its_name(run: WrittenRun) -> None:
    viewed = ViewedRun(run.rundir.path)
    viewed.reader.read_all()
    lines = [line for line in metrics_text([viewed]).splitlines() if not line.startswith("#")]
    told = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines}
    expected = {"up": 0.0, "step": 91.0, "steps": 200.0, "tokens": 91.0 * 256, "held_out": 2.75}
    assert {name: float(told[f"bloomery_{name}"]) for name in expected} == expected
    assert float(told["bloomery_gradient_norm"]) == 0.5 and float(told["bloomery_global_batch"]) == 8.0
    states = [line for line in lines if line.startswith("bloomery_state{")]
    assert [line.partition('state="')[2] for line in states if line.endswith(" 1")] == ['gone"} 1']
    quoted = ViewedRun(healed_run(run.rundir.path.parent / 'a"b\\c').rundir.path)
    assert 'run="a\\"b\\\\c"' in metrics_text([quoted])


@pytest.mark.parametrize(
    ("event", "level", "text"),
    [
        ({"event": "end", "failed": True, "reason": "it broke"}, "bad", "failed: it broke"),
        ({"event": "end", "finished": True, "reason": "done"}, "info", "finished: done"),
        ({"event": "end", "reason": "SIGTERM"}, "info", "saved and stopped: SIGTERM"),
        ({"event": "attempt_end", "status": 137}, "warning", "status 137"),
        ({"event": "attempt_end", "status": 0}, "info", "status 0"),
        ({"event": "slow_ranks", "usual_s": 0.5, "slow": [[3, "n1", 0.9]]}, "warning",
            "others take 0.5 s, and wait for rank 3 on n1 (0.9 s)"),
        ({"event": "slow_ranks", "ranks": 4, "slow": []}, "warning",
            "steps are slower; no rank of 4 stands out"),
        ({"event": "diagnosis", "cause": "hang", "summary": "it stands", "culprit": {"host": "n1"}}, "bad",
            "hang (likely) at host n1: it stands; started again"),
        ({"event": "diagnosis", "cause": "killed", "summary": "x", "sure": True, "gives_up": "3 restarts"},
            "bad", "killed: x; not started again: 3 restarts"),
        ({"event": "start", "incarnation": 3, "host": "n1", "ranks": 8, "device": "cuda",
            "reason": "rewind", "changes": {"seed": "1 to 2"}}, "info",
            "incarnation 3 on n1: 8 × cuda, after rewind; changed: seed 1 to 2"),
    ],
)  # fmt: skip
def test_each_event_is_told_in_words(event: dict, level: str, text: str) -> None:
    shown = shown_event({"time": 5.0, "step": 7, "incarnation": 1, **event}, number=4)
    assert shown is not None and (shown.level, shown.text, shown.number, shown.time) == (level, text, 4, 5.0)


@pytest.mark.parametrize(
    ("fields", "step"),
    [
        ({"step": 7, "incarnation": 0}, 7),
        ({"step": 0, "incarnation": 1}, 0),
        ({"step": 0, "incarnation": 0}, None),
    ],
)
def test_an_event_before_any_step_has_none(fields: dict, step: int | None) -> None:
    shown = shown_event({"event": "note", "time": float("nan"), **fields}, number=0)
    assert shown is not None and (shown.step, shown.time) == (step, 0.0)


def test_only_a_later_version_is_newer() -> None:
    from bloomery import __version__

    ours = [int(part) for part in __version__.split("+")[0].split(".")[:3]]
    later, earlier = [*ours[:-1], ours[-1] + 1], [max(0, ours[0] - 1), 0, 0]
    assert _is_newer(".".join(map(str, later))) and not _is_newer(__version__)
    assert not _is_newer(".".join(map(str, earlier))) and not _is_newer("x.y")


def test_an_answer_is_shared_for_a_moment_and_forgotten_after_it(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.operate.dashboard import server as server_module

    server, made, clock = (
        DashboardServer([run.rundir.path], AccessRules(), interval_s=8.0),
        list[int](),
        [100.0],
    )
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))

    async def ask(query: bytes) -> bytes:
        scope = {"type": "http", "path": "/api/panels", "query_string": query, "headers": []}
        make = lambda: made.append(1) or str(len(made)).encode()  # noqa: E731
        return bytes((await server._shared(Request(scope), make)).body)

    async def asked_at() -> list[bytes]:
        found = []
        for clock[0], query in ((100.0, b"a"), (102.0, b"a"), (102.1, b"a"), (103.0, b"b"), (104.2, b"b")):
            found.append(await ask(query))
        return found

    assert asyncio.run(asked_at()) == [b"1", b"1", b"2", b"3", b"3"]
    clock[0] = 106.0
    asyncio.run(ask(b"c"))
    assert list(server._answers) == ["/api/panels?c"], "older ones take no memory"


def test_tables_are_as_new_as_what_was_read_and_seconds_old_at_most(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, dead, made = [100.0], set[int](), list[int]()
    run.rundir.heartbeat().write_text(json.dumps({"rank": 0, "world": 1, "pid": 1, "time": time.time()}))
    monkeypatch.setattr(viewed_run, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    monkeypatch.setattr(viewed_run, "has_died_here", lambda beat, *, now: beat.rank in dead)
    monkeypatch.setattr(viewed_run, "mesh_panel", lambda reader, recipe: made.append(1) or "ranks")
    viewed = ViewedRun(run.rundir.path, interval_s=8.0)
    viewed.reader.read_all()
    first = viewed.tables()
    clock[0] = 107.9
    assert viewed.tables() is first and json.loads(first)["ranks"] == "ranks"
    clock[0] = 108.0
    second = viewed.tables()
    assert second is not first and viewed.tables() is second and made == [1], "ranks are older"
    viewed.reader.version += 1
    assert viewed.tables() is not second
    dead.add(0)
    viewed.check_ranks()
    viewed.tables()
    assert made == [1, 1], "one has died"


def summarizer_of(run: WrittenRun, *settings: str) -> RunSummarizer:
    recipe = override(load_recipe("demo").recipe, ["train.global_batch=8", "train.ramp_up=[]", *settings])
    run.rundir.recipe.write_text(dump_recipe(recipe))
    return RunSummarizer(RunReader(run.rundir.path).read_all())


def test_the_time_that_is_left_is_by_the_newest_fifty_steps_of_all_peers(run: WrittenRun) -> None:
    run.steps(100, seconds=7.0, peers=2)
    run.steps(50, seconds=2.0, peers=2)
    shown = summarizer_of(run, "train.samples=3528").summary(now=1000.0)
    assert (shown.step, shown.step_s) == (241, 2.0)
    assert (shown.steps, shown.left_s) == (341, 200.0), "1600 samples are left, of which a step takes 16"
    over = summarizer_of(run, "train.samples=800").summary(now=1000.0)
    assert (over.done, over.left_s) == (1.0, 0.0)


def test_a_run_that_goes_on_with_a_loss_that_is_none_is_bad(run: WrittenRun) -> None:
    beat = RankBeat(world=1, activity="forward and backward", time=time.time(), since=time.time())
    run.rundir.heartbeat().write_text(json.dumps(beat.__dict__))
    shown = summarizer_of(run, "train.samples=1600").summary()
    assert (shown.state, shown.health, shown.advice) == ("running", "good", ["Nothing: no person is needed."])
    assert shown.ends == pytest.approx(time.time() + 109 * 0.1, abs=60.0)
    run.steps(1, loss=float("nan"))
    shown = summarizer_of(run, "train.samples=1600").summary()
    assert (shown.state, shown.health, shown.loss) == ("running", "bad", None)
    run.steps(1)
    run.event("checkpoint_failed", why="No space left")
    shown = summarizer_of(run, "train.samples=1600").summary()
    assert shown.health == "attention" and "No space left" in shown.advice[0]
    viewed = ViewedRun(run.rundir.path)
    viewed.reader.read_all()
    (up,) = (line for line in metrics_text([viewed]).splitlines() if line.startswith("bloomery_up{"))
    assert up.endswith(" 1"), "a person should look, and it trains"
    last = [event.text for event in viewed.reader.news.events if event.kind == "loss not finite"]
    assert len(last) == 1 and last[0].endswith("the update was made")


def test_the_scheduler_is_asked_once_a_minute_and_the_recipe_read_when_it_changes(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked_at = [1000.0], list[float]()
    queue = SimpleNamespace(jobs=lambda *, name, run: asked_at.append(clock[0]) or [])
    monkeypatch.setattr(submission, "scheduler_of", lambda section, path: queue)
    monkeypatch.setattr(run_summary, "time", SimpleNamespace(monotonic=lambda: clock[0], time=time.time))
    keep_submission(run.rundir, submission_of("demo", [], nproc=None))
    summarizer = summarizer_of(run, "train.samples=1600")
    for clock[0] in (1000.0, 1059.0, 1060.0, 1061.0):
        summarizer.summary()
    assert asked_at == [1000.0, 1060.0]

    def silent(*, name: str, run: Path) -> None:
        asked_at.append(clock[0])
        clock[0] += 60.0
        raise SchedulerError("SLURM has not answered squeue for 60 s.", remedy="Wait.")

    queue.jobs = silent
    for clock[0] in (1120.0, 1239.0, 1240.0):
        assert "has not answered" in summarizer.summary().problems[-1]
    assert asked_at[2:] == [1120.0, 1240.0]
    summarizer_of(run, "train.samples=16000")
    assert summarizer.summary().steps == 2000
    run.rundir.recipe.write_text("[run")
    assert "the recipe cannot be read" in summarizer.summary().problems[0] and summarizer.recipe is not None
    summarizer_of(run, "train.samples=800")
    assert not any("the recipe cannot be read" in problem for problem in summarizer.summary().problems)
    summarizer_of(run, "train.samples=880")
    assert summarizer.summary().steps == 110, "a file of the same length is another one"


def test_a_run_is_not_gone_while_its_scheduler_does_not_say_which_jobs_wait(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_submission(run.rundir, submission_of("demo", [], nproc=None))
    queue = SimpleNamespace(jobs=lambda *, name, run: [])
    monkeypatch.setattr(submission, "scheduler_of", lambda section, path: queue)
    assert summarizer_of(run, "train.samples=1600").summary().state == "gone"

    def silent(section: Any, path: Path) -> Any:
        raise BloomeryError("squeue does not answer")

    monkeypatch.setattr(submission, "scheduler_of", silent)
    shown = summarizer_of(run, "train.samples=1600").summary()
    assert (shown.state, shown.health, shown.problems) == (
        "unknown", "attention", ["squeue does not answer"],
    )  # fmt: skip


def test_a_journal_that_is_too_long_for_a_page_is_counted_by_the_command(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RunReader(run.rundir.path).read_all()
    assert "problem" not in panels.goodput(reader)
    monkeypatch.setattr(panels, "MOST_LEDGER_BYTES", 1000)
    assert "`bloomery report" in panels.goodput(reader)["problem"]


def test_a_save_says_why_it_is_kept_and_whether_it_has_a_copy(
    run: WrittenRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"step-000050.i001": ["newest", "each 50"], "step-000090.i002": []}
    decisions = [
        SimpleNamespace(checkpoint=SimpleNamespace(name=name, step=int(name[5:11])), why=why)
        for name, why in names.items()
    ]
    monkeypatch.setattr(panels, "prune_plan", lambda rundir, **more: decisions)
    for name in ("step-000090.i002", "step-000007.i001"):
        record_copy(run.rundir, name, url=f"s3://b/checkpoints/{name}", what="all", bytes=1)
    record = (run.rundir.backups / f"{name}.json").read_text()
    (run.rundir.path / "elsewhere.json").write_text(record)  # no name in a journal leads out of backups/
    run.event("checkpoint", path="../elsewhere")
    reader = RunReader(run.rundir.path).read_all()
    rows = saves(reader, RunSummarizer(reader).recipe)
    assert [(row.name, row.step, row.backed_up, row.kept, row.durable) for row in rows] == [
        ("step-000090.i002", 90, True, "to be removed", True),
        ("step-000050.i001", 50, False, "newest, each 50", True),
        ("../elsewhere", 91, False, "", True),
    ]


def test_a_journal_that_was_replaced_is_read_anew_and_nothing_of_the_old_one_is_shown(
    run: WrittenRun,
) -> None:
    reader = RunReader(run.rundir.path).read_all()
    run.event("checkpoint_failed", why="No space left")
    assert reader.read_all().news.failed_save.endswith("No space left")
    run.event("checkpoint", path="step-000091.i002")
    assert reader.read_all().news.failed_save == ""
    lines = run.journal.path.read_bytes().splitlines(keepends=True)
    run.journal.path.write_bytes(b"".join(lines[:21]))
    version = reader.version
    assert reader.poll() and reader.version > version
    reader.read_all()
    assert (len(reader.columns), reader.columns.last("step")) == (20, 20.0)
    assert [event.kind for event in reader.news.events] == ["start"] and not reader.news.saves
