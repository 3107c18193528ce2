"""What a reader of a run's files says of them and keeps of them, and the page that is saved."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from tests.operate.dashboard.written_run import WrittenRun, healed_run

from bloomery import __version__
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.operate.dashboard import run_reader, saved_page
from bloomery.operate.dashboard.growing_file import GrowingFile
from bloomery.operate.dashboard.run_reader import RunReader, first_journal
from bloomery.operate.ledger.figures import PlannedRun


def test_what_is_wrong_with_a_run_is_told_in_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WrittenRun(tmp_path / "run")
    reader = RunReader(run.rundir.path)
    journal = run.rundir.journal()
    assert reader.poll() and not reader.poll()
    empty = f"{journal} does not exist: nothing has trained here yet, or it was removed."
    assert reader.problems() == ([] if journal.exists() else [empty])
    journal.unlink(missing_ok=True)
    reader.poll()
    assert reader.problems() == [empty]
    other = run.rundir.journal(rank=3)
    other.write_text('{"event": "step", "step": 1, "incarnation": 1}\n{"event": "s')
    assert first_journal(run.rundir) == other
    assert reader.poll() and reader.poll() and len(reader.columns) == 1
    torn = "The last line of the journal is unfinished: its writer ended in the middle of it."
    for _ in range(2):
        reader.poll()
        assert reader.problems() == []
    assert reader.poll() and reader.problems() == [torn]
    with other.open("a") as file:
        file.write('tart"}\n\n[]\n{}\n5\n')
    for version in ("99.1.0", "99.0.0", __version__, "x"):
        with other.open("a") as file:
            file.write(json.dumps({"event": "start", "versions": {"bloomery": version}}) + "\n")
    run.rundir.operations.mkdir()
    run.rundir.incarnations.mkdir(exist_ok=True)
    (run.rundir.incarnations / "000001.json").write_text("{broken")
    reader.poll()
    damage, refused, damaged, newer = reader.problems()
    assert "damaged" in damage
    assert refused == f"{run.rundir.operations} cannot be read: Is a directory."
    assert damaged == "3 lines of the journals are damaged, and left out."
    assert newer == (
        f"bloomery 99.1.0 wrote this journal, and this is {__version__}: "
        "what only the newer one knows is shown by its fields, or not at all."
    )
    (run.rundir.incarnations / "000001.json").unlink()
    run.rundir.operations.rmdir()
    assert reader.poll() and reader.problems() == [damaged, newer]


def test_a_long_journal_is_read_in_parts_and_says_how_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WrittenRun(tmp_path / "run")
    line = b'{"event": "step", "step": 1, "incarnation": 1}'
    run.rundir.journal().write_bytes(b"".join(line + b" " * (99 - len(line)) + b"\n" for _ in range(10)))
    monkeypatch.setattr("bloomery.operate.dashboard.run_reader.SLICE_BYTES", 400)
    reader = RunReader(run.rundir.path)
    assert (reader.read_share, reader.is_behind) == (1.0, False)
    reader.poll()
    assert (len(reader.columns), reader.read_share, reader.is_behind) == (4, 0.4, True)
    assert reader.problems() == ["The journal is being read: 40% so far."]
    assert len(reader.read_all().columns) == 10 and reader.problems() == []


def test_whoever_reads_once_reads_the_other_journals_to_their_ends_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WrittenRun(tmp_path / "run")
    lines = [json.dumps({"event": "round", "time": 1e9, "round": number}) + "\n" for number in range(9)]
    run.rundir.rounds.write_text("".join(lines))
    monkeypatch.setattr("bloomery.operate.dashboard.growing_file.GrowingFile.lines", partial_lines)
    reader = RunReader(run.rundir.path).read_all()
    assert [event["round"] for event in reader.news.rounds] == list(range(9)) and reader.read_share == 1.0


def partial_lines(file: GrowingFile, *, most_bytes: int = 0, read: Any = GrowingFile.lines) -> list[bytes]:
    lines: list[bytes] = read(file, most_bytes=100)
    return lines


def test_a_refusal_is_one_event_until_an_update_is_made(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start()
    run.steps(1)
    run.steps(1, loss=float("nan"), gradient_norm=3.5)
    run.steps(1, update_applied=False)
    run.steps(1)
    run.steps(1, loss=4.5, update_applied=False, gradient_norm=9.5)
    reader = RunReader(run.rundir.path).read_all()
    assert reader.news.is_refusing
    told = [(event.kind, event.step, event.incarnation, event.text) for event in reader.news.events][1:]
    assert told == [
        ("loss not finite", 2, 1, "loss NaN, gradient norm 3.5; the update was made"),
        ("update refused", 5, 1, "loss 4.5, gradient norm 9.5; the update was refused"),
    ]
    assert [event.number for event in reader.news.events] == [0, 1, 2]
    assert all(event.time > 1e9 for event in reader.news.events)


def test_what_is_kept_of_events_is_the_newest_of_each_kind(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(recipe={"a": 1}, spent={"starting": 1.0}, ranks=2)
    run.event("end", reason="x", finished=True)
    for number in (1, 2, 1):
        run.event("checkpoint", path=f"c{number}", step=number)
    run.event("evaluation", held_out_loss=9.0)
    run.steps(1)
    run.event("evaluation", held_out_loss=2.5, held_out_by_dataset={"code": 3.0})
    run.event("evaluation", held_out_loss="NaN")
    run.event("checkpoint_failed", step=7, why="full")
    run.event("note", round=3)
    news = RunReader(run.rundir.path).read_all().news
    assert list(news.saves) == ["c1", "c2"] and news.failed_save == "no checkpoint at step 7: full"
    assert (news.start["event"], news.start["ranks"], news.last["event"]) == ("start", 2, "end")
    assert not {"recipe", "spent"} & set(news.start) and news.versions == {"0.1.0"}
    assert [event["round"] for event in news.rounds] == [3]
    columns = RunReader(run.rundir.path).read_all().columns
    assert [part.tolist() for part in columns.sparse_numbers("held_out", "step")] == [[1.0], [2.5]]


def test_the_oldest_saves_are_forgotten_and_a_local_version_is_no_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_reader, "_MOST_SAVES", 2)
    run = WrittenRun(tmp_path / "run")
    for number in (1, 2, 3):
        run.event("checkpoint", path=f"c{number}", step=number)
    assert list(RunReader(run.rundir.path).read_all().news.saves) == ["c2", "c3"]
    monkeypatch.setattr(run_reader, "__version__", "1.2.3+cu12")
    assert [run_reader._is_newer(version) for version in ("1.2.2", "1.2.3", "1.2.4")] == [False, False, True]


def test_a_journal_that_is_replaced_is_judged_by_the_incarnations_as_before(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    reader = RunReader(run.rundir.path).read_all()
    discarded = reader.columns.discarded
    assert [part.end - part.begin for part in discarded] == [10]
    journal = run.rundir.journal()
    copy = journal.with_name("copy")
    copy.write_bytes(journal.read_bytes())
    copy.replace(journal)
    assert reader.poll()
    assert reader.read_all().columns.discarded == discarded


def test_a_directory_in_which_only_a_supervisor_has_written_is_a_run(tmp_path: Path) -> None:
    (tmp_path / "operations.jsonl").write_text('{"event": "note", "time": 5.0, "step": 0, "text": "a"}\n')
    reader = RunReader(tmp_path).read_all()
    (told,) = reader.problems()
    assert "nothing has trained here yet" in told and len(reader.news.events) == 1


def test_events_before_the_first_step_stand_at_it_and_those_of_no_steps_at_their_time(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.event("note", time=5.0, text="a")
    reader = RunReader(run.rundir.path).read_all()
    assert list(reader.axes_of_events(list(reader.news.events))) == [{"time": 5.0}]
    run.step = 6
    for step in (7, 8):
        used = {"consumed_tokens": 256 * step, "consumed_samples": 8 * step}
        run.event("step", step=step, time=10.0, loss=1.0, **used)
    run.event("guard", guard="g", time=10.0, step=3)
    run.incarnation = 1
    run.event("note", time=6.0, text="b", step=0)
    reader.read_all()
    first = {"step": 7.0, "tokens": 7 * 256.0, "samples": 56.0, "time": 5.0}
    last = {"step": 3.0, "tokens": 8 * 256.0, "samples": 64.0, "time": 10.0}
    begin = first | {"step": 0.0, "time": 6.0}
    assert list(reader.axes_of_events(list(reader.news.events))) == [first, last, begin]


def test_a_file_that_is_a_directory_or_replaced_is_read_as_it_is_now(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"one\ntwo\nthr")
    tail = GrowingFile(path)
    assert tail.lines() == [b"one", b"two"]
    assert (tail.read_bytes, tail.torn, tail.size, tail.generation) == (8, 3, 11, 0)
    (tmp_path / "new").write_bytes(b"ONE\nTWO\nTHREE\nfour")
    (tmp_path / "new").rename(path)
    assert tail.lines() == [b"ONE", b"TWO", b"THREE"]
    assert (tail.read_bytes, tail.torn, tail.size, tail.generation) == (14, 4, 18, 1)
    path.write_bytes(b"x" * 14)
    assert tail.lines() == [] and tail.generation == 1, "it is as long as what was read"


def test_a_saved_page_has_each_curve_on_each_axis_and_names_its_own_parts(tmp_path: Path) -> None:
    run = healed_run(tmp_path / "run")
    page = saved_page.saved_page([run.rundir.path], points=30)
    data = re.search(r'<script type="application/json" id="recorded">(.*?)</script>', page, re.S)
    assert data is not None and page.index("</main>") < data.start() and "<" not in data[1]
    recorded = json.loads(data[1])
    (drawn,) = recorded["curves"]
    assert list(drawn) == ["step", "tokens", "time"] and recorded["actions"] is False
    names = [curve["name"] for curve in drawn["step"]]
    assert {"loss", "loss~", "loss!", "spent/forward and backward~", "held_out"} <= set(names)
    assert not {"held_out~", "held_out!", "spent/forward and backward"} & set(names)
    lengths = {curve["name"]: len(curve["x"]) for curve in drawn["tokens"]}
    assert lengths["loss"] <= 34 and lengths["loss~"] == 30
    assert {axis: drawn[axis][0]["x"][0] > 1e9 for axis in drawn} == {
        "step": False,
        "tokens": False,
        "time": True,
    }
    assert set(recorded["panels"][0]) == {"events", "saves", "goodput", "ranks", "rounds"}
    head = '<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="(.*?)">'
    policy = re.search(head, page)
    assert policy is not None

    def digests(pattern: str) -> str:
        parts = re.findall(pattern, page, re.S)
        return " ".join(f"'sha256-{b64encode(hashlib.sha256(p.encode()).digest()).decode()}'" for p in parts)

    styles, scripts = digests("<style>(.*?)</style>"), digests("<script>(.*?)</script>")
    assert policy[1] == (f"default-src 'none'; img-src data:; style-src {styles}; script-src {scripts}")


def test_the_tables_of_a_saved_page_are_made_with_the_recipe_and_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WrittenRun(tmp_path / "run")
    recipe = load_recipe("demo").recipe
    run.rundir.recipe.write_text(dump_recipe(recipe))
    plan = PlannedRun(tokens_per_s=1.0, tokens=1, days=1.0, goodput=0.5)
    tables = {"mesh_panel": [], "saves": [], "goodput": []}
    for name, asked in tables.items():
        place = saved_page if name == "mesh_panel" else saved_page.panels
        monkeypatch.setattr(
            place, name, lambda reader, given, asked=asked, name=name: asked.append(given) or name
        )
    page = saved_page.saved_page([run.rundir.path, tmp_path / "none"], plan=plan)
    assert tables == {"mesh_panel": [recipe, None], "saves": [recipe, None], "goodput": [plan, plan]}
    data = re.search(r'id="recorded">(.*?)</script>', page, re.S)
    assert data is not None and ">" not in data[1]
    recorded = json.loads(data[1])
    assert [recorded["panels"][0][name] for name in ("ranks", "saves", "goodput")] == list(tables)
    assert [len(recorded[name]) for name in ("runs", "curves", "panels")] == [2, 2, 2]


def test_a_page_names_a_run_from_within_its_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(healed_run(tmp_path / "mine").rundir.path)
    assert RunReader(Path()).name == "mine"
