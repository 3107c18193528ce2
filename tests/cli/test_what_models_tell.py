"""What `generate` and `evaluate` hand to a model, and every line that they print of texts and scores."""

from __future__ import annotations

import errno
import json
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_what_is_shown import Letters, committed

from bloomery.cli import evaluate, generate
from bloomery.errors import BloomeryError, CheckpointError, DataError, StorageError
from bloomery.evaluate.open_checkpoint import window_of
from bloomery.evaluate.scoring import DocumentScore, TokenizedDocument
from bloomery.events.journal import Journal, read_journal
from bloomery.events.run_directory import RunDirectory

SAVED: Any = SimpleNamespace(
    checkpoint=Path("c/step-5"), tokenizer=Letters(), bounds=SimpleNamespace(ends={0})
)


@dataclass(frozen=True)
class Drawn:
    """Stands for the settings of sampling."""

    seed: int


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let a model write "hé" and end; a second text goes on to its limit. Returns what it was asked for."""
    asked: list[Any] = []

    def alone(*given: Any, **options: Any) -> Any:
        asked.append((*given, options))
        return iter([*"hé".encode(), 0])

    def together(*given: Any, **options: Any) -> Any:
        asked.append((*given, options))
        first, second = [*"hé".encode(), 0], [*b"abc"]
        return iter([*zip(first[:3], second, strict=True), (first[3], None)])

    stand_in = SimpleNamespace(generate=alone, generate_together=together)
    monkeypatch.setitem(sys.modules, "bloomery.evaluate.generate", stand_in)  # type: ignore[arg-type]
    monkeypatch.setattr("time.monotonic", iter([100.0, 102.0] * 9).__next__)
    return asked


def options(**given: Any) -> Namespace:
    return Namespace(**{"json": False, "chat": False, "max_tokens": 9, **given})


def test_a_text_is_printed_as_it_comes_with_its_prompt(
    written: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(**given: Any) -> str:
        generate._write_as_it_comes(options(**given), "Oh ", [120], SAVED, "decoder", "sampling")  # type: ignore[arg-type]
        return capsys.readouterr().out

    assert shown() == "Oh hé\n"
    assert written == [("decoder", [120], {"max_new_tokens": 9, "sampling": "sampling", "ends": {0}})]
    assert shown(chat=True) == "hé\n", "a message is not part of its answer"
    assert json.loads(shown(json=True)) == {
        "checkpoint": "c/step-5", "prompt": "Oh ", "text": "hé", "tokens": 4, "ended": True, "seconds": 2.0,
    }  # fmt: skip
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    generate._write_as_it_comes(options(), "Oh ", [120], SAVED, "decoder", "sampling")  # type: ignore[arg-type]
    assert capsys.readouterr().err == "4 tokens, 2.0 a second\n"


def test_texts_of_several_prompts_are_told_one_by_one(
    written: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*, first: int = 0, **given: Any) -> str:
        prompts, openings = ["Oh ", "Ah "], [[120], [121]]
        sampling: Any = Drawn(seed=7)
        generate._write_together(
            options(**given), prompts, openings, SAVED, "decoder", sampling, first=first  # type: ignore[arg-type]
        )  # fmt: skip
        return capsys.readouterr().out

    assert shown() == "Oh hé\n\nAh abc\n"
    sampling = {"max_new_tokens": 9, "sampling": Drawn(seed=7), "ends": {0}}
    assert written[0] == ("decoder", [[120], [121]], sampling)
    assert shown(first=8) == "\nOh hé\n\nAh abc\n"
    assert written[1][2]["sampling"] == Drawn(seed=15)
    assert shown(chat=True) == "> Oh \nhé\n\n> Ah \nabc\n"
    facts = [json.loads(line) for line in shown(json=True).splitlines()]
    shared = {"checkpoint": "c/step-5", "seconds": 2.0}
    assert facts == [
        shared | {"prompt": "Oh ", "text": "hé", "tokens": 4, "ended": True},
        shared | {"prompt": "Ah ", "text": "abc", "tokens": 3, "ended": False},
    ]


def test_a_message_is_opened_by_the_models_template_with_the_system_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = SimpleNamespace(chat_opening=lambda saved, messages: messages)
    monkeypatch.setitem(sys.modules, "bloomery.evaluate.generate", stand_in)  # type: ignore[arg-type]
    saved: Any = SimpleNamespace(
        bounds=SimpleNamespace(opening=lambda ids: [7, *ids]), tokenizer=SimpleNamespace(encode=list)
    )
    assert generate._opening(options(), saved, "ab") == [7, "a", "b"]
    user = {"role": "user", "content": "ab"}
    assert generate._opening(options(chat=True, system=""), saved, "ab") == [user]
    kind = {"role": "system", "content": "be kind"}
    assert generate._opening(options(chat=True, system="be kind"), saved, "ab") == [kind, user]


def test_prompts_that_cannot_be_read_are_told_with_their_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    def prompts(file: str) -> list[str]:
        return generate._prompts(Namespace(option="", prompt=[], prompts=file))

    (tmp_path / "bad").write_bytes(b"one\ntwo\n\xff\n")
    with pytest.raises(DataError, match=r"bad is not UTF-8 in line 3\."):
        prompts(str(tmp_path / "bad"))
    with pytest.raises(DataError, match=r"Cannot read the prompts in .*none: No such file"):
        prompts(str(tmp_path / "none"))
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"a\n\nb\n")))
    assert prompts("-") == ["a", "b"]
    (tmp_path / "code").write_bytes("one\x0ctwo\u2028three\r\nfour".encode())
    assert prompts(str(tmp_path / "code")) == ["one\x0ctwo\u2028three", "four"]


@pytest.mark.parametrize(("text", "share"), [("1", 1.0), ("0.001", 0.001), ("0", None), ("1.01", None)])
def test_a_share_of_probability_is_above_0_and_at_most_1(text: str, share: float | None) -> None:
    from argparse import ArgumentTypeError

    if share is None:
        with pytest.raises(ArgumentTypeError, match="is not above 0 and at most 1"):
            generate._share(text)
    else:
        assert generate._share(text) == share


def score(name: str, *, nats: float, tokens: int, bytes: int) -> DocumentScore:
    return DocumentScore(name=name, nats=nats, tokens=tokens, bytes=bytes)


def model(**bounds: Any) -> Any:
    given = {"begins": (), "empty": 9, **bounds}
    saved = SimpleNamespace(
        checkpoint=Path("c/step-5"), bounds=SimpleNamespace(**given), tokenizer=SimpleNamespace(eod=3),
        recipe=SimpleNamespace(data=SimpleNamespace(sequence_length=64)),
        model=SimpleNamespace(max_positions=48),
    )  # fmt: skip
    return SimpleNamespace(saved=saved, decoder="decoder")


def test_losses_are_told_by_file_or_document_and_of_all_together(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def scored(decoder: str, documents: Any, **options: Any) -> Any:
        asked.append((decoder, options))
        return iter(documents)

    monkeypatch.setattr("bloomery.evaluate.scoring.score_documents", scored)
    one, two = score("a:1", nats=20.0, tokens=10, bytes=40), score("a:2", nats=10.0, tokens=5, bytes=20)
    other = score("b:1", nats=6.0, tokens=5, bytes=4)

    def told(*groups: Any, by_document: bool = False) -> list[dict[str, Any]]:
        args = Namespace(json=True, by_document=by_document, batch=6, window=None)
        given: Any = [(name, iter(scores)) for name, scores in groups]
        assert evaluate._report(args, model(), given) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    rows = told(("a", [one, two]), ("b", [other]))
    assert [(row["text"], row["loss"], row["tokens"], row["bytes"]) for row in rows] == [
        ("a", 2.0, 15, 60), ("b", 1.2, 5, 4), ("all together", 1.8, 20, 64),
    ]  # fmt: skip
    assert {row["checkpoint"] for row in rows} == {"c/step-5"}
    assert asked[0] == (
        "decoder", {"opening": (9,), "end": 3, "sequence_length": 48, "rows": 6},
    )  # fmt: skip
    assert [row["text"] for row in told(("a", [one, two]), by_document=True)] == [
        "a:1",
        "a:2",
        "all together",
    ]
    assert [row["text"] for row in told(("a", [one, two]))] == ["a"], "nothing to be joined"
    given: Any = [("a", iter([one]))]
    plain = Namespace(json=False, by_document=False, batch=6, window=None)
    evaluate._report(plain, model(begins=(1, 2)), given)
    assert asked[-1][1]["opening"] == (1, 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["loss", "perplexity", "bits/byte", "tokens", "bytes", "text"]
    assert lines[2].split()[0] == "2.0000" and lines[2].split()[-3:] == ["10", "40", "a"]
    with pytest.raises(DataError, match="b holds no document"):
        told(("a", [one]), ("b", []))


@pytest.mark.parametrize(("window", "position", "told"), [
    (48, "rotary", ""), (49, "alibi", "trained with 48 tokens at a time"), (20, "learned", ""),
])  # fmt: skip
def test_texts_are_scored_in_the_windows_that_are_asked_for_and_longer_ones_are_noted(
    window: int, position: str, told: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    lengths: list[int] = []

    def scored(decoder: str, documents: Any, **options: Any) -> Any:
        lengths.append(options["sequence_length"])
        return iter(documents)

    monkeypatch.setattr("bloomery.evaluate.scoring.score_documents", scored)
    loaded = model()
    loaded.saved.model.section = SimpleNamespace(position=position)
    given: Any = [("a", iter([score("a:1", nats=20.0, tokens=10, bytes=40)]))]
    args = Namespace(json=True, by_document=False, batch=6, window=window)
    assert evaluate._report(args, loaded, given) == 0
    noted = capsys.readouterr().err
    assert lengths == [window] and (told in noted if told else not noted)


def test_a_window_that_learned_positions_do_not_reach_is_refused() -> None:
    saved = model().saved
    saved.model.section = SimpleNamespace(position="learned")
    assert window_of(saved, 48) == window_of(saved, None) == 48
    with pytest.raises(BloomeryError, match="49 tokens does not fit the model's 48 learned"):
        window_of(saved, 49)


def test_documents_of_files_and_of_held_out_text_are_scored_as_they_were_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "é!"}\n{"body": ""}\n{"body": "b"}\n')
    loaded: Any = SimpleNamespace(
        saved=SimpleNamespace(
            tokenizer=SimpleNamespace(
                eod=3, encode=lambda text: [len(text)], decode=lambda ids: "é" * len(ids)
            )
        )
    )
    args = Namespace(files=[tmp_path / "a.jsonl"], text_field="body", separator="")
    ((name, documents),) = evaluate._files(args, loaded)
    assert name == str(tmp_path / "a.jsonl")
    found = list(documents)
    assert found[0] == TokenizedDocument(f"{tmp_path}/a.jsonl:1", [2], 3) and len(found) == 2
    told = f"note: 1 document skipped: 1 empty. The first: {tmp_path}/a.jsonl:2: the document is empty"
    assert told in capsys.readouterr().err
    texts = [[5, 6, 3], [7], [3], []]
    dataset = SimpleNamespace(
        document_count=4, document=lambda number: SimpleNamespace(tolist=lambda: list(texts[number]))
    )
    assert list(evaluate._of_dataset("own", dataset, loaded)) == [
        TokenizedDocument("own, document 0", [5, 6], 4), TokenizedDocument("own, document 1", [7], 2),
        TokenizedDocument("own, document 2", [], 0), TokenizedDocument("own, document 3", [], 0),
    ]  # fmt: skip


def test_held_out_text_is_that_of_the_models_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = SimpleNamespace(sources=("a",), datasets=())
    saved = SimpleNamespace(
        checkpoint=tmp_path / "run" / "checkpoints" / "step-5", recipe=SimpleNamespace(data=data)
    )
    parts, asked = [SimpleNamespace(name="own", documents="documents")], list[Any]()
    monkeypatch.setattr(
        "bloomery.data.prepare.prepared_of_run",
        lambda data, directory: asked.append(directory) or "prepared",
    )
    monkeypatch.setattr("bloomery.train.data_stream.held_out_documents", lambda data, prepared: parts)
    monkeypatch.setattr(evaluate, "_of_dataset", lambda name, documents, loaded: (name, documents))
    loaded: Any = SimpleNamespace(saved=saved)
    assert evaluate._held_out(loaded) == [("own", ("own", "documents"))]
    assert asked == [RunDirectory(tmp_path / "run").data]
    parts.clear()
    with pytest.raises(BloomeryError, match="run has no held-out text"):
        evaluate._held_out(loaded)
    data.sources = ()
    with pytest.raises(BloomeryError, match="run has no data of its own"):
        evaluate._held_out(loaded)


def task(name: str, accuracy: float) -> Any:
    values = {"task": name, "samples": 12, "accuracy": accuracy, "accuracy_stderr": 0.1, "shots": 2}
    return SimpleNamespace(to_json=lambda: values)


@pytest.fixture
def scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDirectory, list[Any]]:
    """A run with a checkpoint of step 30, and what scoring is asked for."""
    rundir, asked = RunDirectory(tmp_path / "run").create(), list[Any]()
    directory = rundir.checkpoints / "step-000030.i002"
    listed = [SimpleNamespace(name=directory.name, step=30, incarnation=2, directory=directory)]
    monkeypatch.setattr(evaluate, "checkpoints", lambda rundir: listed)
    monkeypatch.setattr("bloomery.evaluate.harness.refuse_without_lm_eval", lambda: asked.append("refuse"))
    loaded = SimpleNamespace(saved=SimpleNamespace(checkpoint=directory), decoder="decoder")

    def load(path: Path, **given: Any) -> Any:
        asked.append((path, given))
        return loaded

    def tasks(saved: Any, decoder: Any, names: Any, **given: Any) -> Any:
        asked.append((names, given))
        return [task("a", 0.5), task("b", 0.123456)]

    monkeypatch.setattr(evaluate, "load_saved", load)
    monkeypatch.setattr("bloomery.evaluate.harness.score_tasks", tasks)
    return rundir, asked


def args(path: Path, **given: Any) -> Namespace:
    usual = {"tasks": "a, b,", "dtype": "bf16", "by_layer": True, "batch": 6, "limit": 7, "shots": 2}
    usual |= {"include": Path("more"), "json": False, "patience": 2, "every_steps": 1, "window": None}
    return Namespace(path=path, **usual | given)


def test_scores_of_tasks_are_recorded_in_the_run_and_printed(
    scoring: tuple[RunDirectory, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    rundir, asked = scoring
    given = args(rundir.path)
    assert evaluate.score_once(given) == 0
    options = {"batch": 6, "window": None, "limit": 7, "shots": 2, "include": Path("more")}
    loading = (rundir.path, {"dtype": "bf16", "by_layer": True})
    assert asked == ["refuse", loading, (["a", "b"], options)]
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines() if "─" not in line]
    assert [[cell.strip() for cell in line if cell.strip()] for line in lines] == [
        ["step", "checkpoint", "task", "samples", "scores"],
        ["30", "step-000030.i002", "a", "12", "accuracy 0.5"],
        ["30", "step-000030.i002", "b", "12", "accuracy 0.1235"],
    ]
    (record,) = read_journal(rundir.evaluations)
    assert {key: record[key] for key in record.keys() - {"time", "scores"}} == {
        "event": "tasks", "incarnation": 2, "step": 30, "checkpoint": "step-000030.i002", "tasks": ["a", "b"],
        "limit": 7, "shots": 2, "window": None,
    }  # fmt: skip
    assert record["scores"] == [task("a", 0.5).to_json(), task("b", 0.123456).to_json()]
    directory = rundir.checkpoints / "step-000030.i002"
    directory.mkdir()
    (directory / evaluate.MANIFEST).touch()
    assert evaluate._next(rundir, given) is None, "of just these tasks it was scored"
    assert evaluate._next(rundir, args(rundir.path, tasks="a,c")) == directory
    assert evaluate._next(rundir, args(rundir.path, window=96)) == directory, "in other windows"
    for other in ({"limit": None}, {"shots": 5}):
        assert evaluate._next(rundir, args(rundir.path, **other)) == directory, "of other samples"
    with Journal(rundir.evaluations) as journal:
        journal.write("tasks", incarnation=1, step=20, checkpoint="step-000020.i001", scores=[])
        journal.write("other", incarnation=1, step=10)
    assert evaluate.show_table(args(rundir.path, json=True)) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["step"] for one in told] == [20, 30]


def test_scores_that_the_disk_does_not_take_are_shown_and_no_success(
    scoring: tuple[RunDirectory, list[Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rundir, _ = scoring
    with Journal(rundir.evaluations) as journal:
        journal.write("tasks", incarnation=1, step=20, checkpoint="step-000020.i001", scores=[])

    def full(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("bloomery.events.journal.os.write", full)
        with pytest.raises(StorageError, match=r"evaluations\.jsonl: No space left on device"):
            evaluate.score_once(args(rundir.path, json=True))
    (told,) = capsys.readouterr().out.splitlines()
    assert json.loads(told)["checkpoint"] == "step-000030.i002"
    assert len(list(read_journal(rundir.evaluations))) == 1


def test_a_run_without_scores_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    assert evaluate.show_table(args(rundir.path)) == 0
    path = rundir.path
    assert capsys.readouterr().out == f"{path} has no scores yet: bloomery evaluate {path} --tasks …\n"
    assert evaluate.show_table(args(rundir.path, json=True)) == 0 and capsys.readouterr().out == ""


def test_checkpoints_are_scored_as_they_come_until_the_run_ends_or_patience_does(
    scoring: tuple[RunDirectory, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rundir, _ = scoring
    now, scored = [1_000.0], list[Path]()
    found: list[Any] = [None, *[one.directory for one in committed(tmp_path, 1, 2)], None, None, None]
    ended: list[bool] = []
    failing: list[Exception] = []

    def score(args: Namespace, directory: Path) -> dict[str, Any]:
        now[0] += 500.0
        scored.append(directory)
        if failing:
            raise failing.pop()
        return {}

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(evaluate, "_has_ended", lambda rundir: bool(ended and ended.pop(0)))
    monkeypatch.setattr(evaluate, "_next", lambda rundir, args: found.pop(0) if found else None)
    monkeypatch.setattr(evaluate, "_score", score)
    monkeypatch.setattr(evaluate, "_print", lambda records, args: None)
    with pytest.raises(BloomeryError, match="has saved no checkpoint for 2 minutes"):
        evaluate.follow(args(rundir.path))
    assert len(scored) == 2
    assert now[0] == pytest.approx(1_002.0 + 2 * 500.0 + 120.0 + 2.0), "patience begins anew with each score"
    directory = scored[-1]
    found[:], ended[:] = [directory, None], [True, True]
    assert evaluate.follow(args(rundir.path)) == 0 and len(scored) == 3, "the last one is scored too"
    found[:], failing[:] = [directory], [CheckpointError("it is torn")]
    with pytest.raises(CheckpointError, match="it is torn"):
        evaluate.follow(args(rundir.path))
    (directory / "manifest.json").unlink()
    directory.rmdir()
    found[:], failing[:], ended[:] = [directory, None], [CheckpointError("it is gone")], [False, True]
    assert evaluate.follow(args(rundir.path)) == 0, "it was pruned while it was read"


@pytest.mark.parametrize(
    ("events", "ended"),
    [
        ([], False), (["start", "end"], True), (["end", "start"], False), (["end", "step"], False),
        (["end", "save"], True), (["stopped"], False),
    ],
)  # fmt: skip
def test_a_run_has_ended_where_its_end_is_the_last_of_its_steps_and_starts(
    events: list[str], ended: bool, tmp_path: Path
) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    with Journal(rundir.journal()) as journal:
        for event in events:
            if event == "stopped":
                journal.write("end", incarnation=1, step=1, finished=False)
            else:
                journal.write(event, incarnation=1, step=1)
    assert evaluate._has_ended(rundir) == ended
