"""Every line and every figure that the parts of `bloomery ckpt` print, and what export and slim are given."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.cli.test_ckpt_command import RECIPE

from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import ckpt, ckpt_copy, ckpt_list
from bloomery.cli.ckpt import run
from bloomery.errors import CheckpointError
from bloomery.events.incarnation import begin
from bloomery.events.records import as_json
from bloomery.events.run_directory import RunDirectory

ABOUT = {"consumed_tokens": 12_000, "loss": 2.5, "held_out_loss": 2.75}


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    """Return a run with steps 10 and 20, of which 20 was abandoned, and 15 after it."""
    rundir = RunDirectory(tmp_path / "run").create()
    entries = [whole("model.a", torch.zeros(8, 4)), whole("optim.a", torch.zeros(3)),
               whole("optim.b", torch.tensor(1.0))]  # fmt: skip
    first = begin(rundir, base=None, reason="start")
    for step in (10, 20):
        save_checkpoint(rundir.checkpoints, entries, step=step, incarnation=first, about=ABOUT)
    second = begin(rundir, base=(10, first), reason="rewind")
    save_checkpoint(rundir.checkpoints, entries[:2], step=15, incarnation=second)
    return rundir


def size_of(directory: Path) -> int:
    """Return the bytes of a checkpoint's data files and index."""
    return sum(path.stat().st_size for path in directory.iterdir() if path.name != "manifest.json")


def objects(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_checkpoint_is_described_part_by_part(
    rundir: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = rundir.checkpoints / "step-000010.i001"
    manifest = read_manifest(directory)
    saved = datetime.fromtimestamp(int(manifest.time)).strftime("%Y-%m-%d %H:%M:%S")
    monkeypatch.setattr(ckpt, "receipts_of", lambda source: [{"resumed": source.name}])
    monkeypatch.setattr(ckpt, "receipt_words", lambda receipt: f"resumed from {receipt['resumed']}")
    monkeypatch.setattr(ckpt, "why_suspect", lambda source: "a rank was corrupt")
    assert run(["show", str(directory), "--tensors"]) == 0
    size = size_of(directory)
    assert capsys.readouterr().out.splitlines() == [
        str(directory),
        f"  step 10, incarnation 1, saved {saved}",
        f"  {size / 1000:.1f} kB in 2 data files",
        "  consumed_tokens: 12000",
        "  loss: 2.5",
        "  held_out_loss: 2.75",
        "  model.*: 1 boxes, 128 B",
        "  optim.*: 2 boxes, 16 B",
        "  suspect: a rank was corrupt",
        "  resumed from step-000010.i001",
        "  model.a  float32 [8, 4]",
        "  optim.a  float32 [3]",
        "  optim.b  float32 []",
    ]
    assert run(["show", str(directory)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 10
    assert run(["show", str(directory), "--json"]) == 0
    (shown,) = objects(capsys)
    assert {key: shown.pop(key) for key in ("directory", "suspect", "receipts", "parts", "tensors")} == {
        "directory": str(directory), "suspect": "a rank was corrupt",
        "receipts": [{"resumed": "step-000010.i001"}],
        "parts": {"model": {"boxes": 1, "bytes": 128}, "optim": {"boxes": 2, "bytes": 16}},
        "tensors": {"model.a": {"shape": [8, 4], "dtype": "float32"},
                    "optim.a": {"shape": [3], "dtype": "float32"},
                    "optim.b": {"shape": [], "dtype": "float32"}},
    }  # fmt: skip
    assert shown == as_json(asdict(read_manifest(directory)))


def test_a_list_tells_every_figure_of_each_checkpoint(
    rundir: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir.recipe.write_text(RECIPE)
    names = ["step-000010.i001", "step-000015.i002", "step-000020.i001"]
    directories = [rundir.checkpoints / name for name in names]
    times = [read_manifest(directory).time for directory in directories]
    sizes = [size_of(directory) for directory in directories]
    assert run(["list", str(rundir.path), "--all", "--verify", "--json"]) == 0
    rows = objects(capsys)
    assert all(row.pop("excess") > 0 for row in rows)
    common = {"what": "all", "state": "verified", "backup": None, "backup_what": None}
    known = {"tokens": 12_000, "loss": 2.5, "held_out_loss": 2.75}
    unknown = dict.fromkeys(known)
    assert rows == [
        common | known | {
            "step": 10, "incarnation": 1, "time": times[0], "bytes": sizes[0], "abandoned": False,
            "kept": ["best"], "directory": str(directories[0]),
        },
        common | unknown | {
            "step": 15, "incarnation": 2, "time": times[1], "bytes": sizes[1], "abandoned": False,
            "kept": ["last 1", "newest intact"], "directory": str(directories[1]),
        },
        common | known | {
            "step": 20, "incarnation": 1, "time": times[2], "bytes": sizes[2], "abandoned": True, "kept": [],
            "directory": str(directories[2]),
        },
    ]  # fmt: skip
    (directories[1] / "manifest.json").write_text("{")
    assert run(["list", str(rundir.path), "--json"]) == 0
    damaged = next(row for row in objects(capsys) if row["step"] == 15)
    assert damaged["state"].startswith("damaged: manifest.json") and damaged["excess"] is None
    assert (damaged["bytes"], damaged["time"], damaged["tokens"], damaged["what"]) == (
        None,
        None,
        None,
        "all",
    )
    assert run(["list", str(rundir.path)]) == 0, "damage ends it with 1 only where it was looked for"
    assert run(["list", str(rundir.path), "--verify"]) == 1


def test_what_goes_on_a_prune_is_told_for_programs(
    rundir: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir.recipe.write_text(f"{RECIPE}keep_best = 0\n")

    def told(*words: str) -> list[dict[str, Any]]:
        assert run(["prune", str(rundir.path), "--json", *words]) == 0
        return objects(capsys)

    kept = {"checkpoint": "step-000015.i002", "kept": ["last 1", "newest intact"], "removed": False}
    dry = told("--dry-run")
    assert dry[:2] == [{"checkpoint": "step-000010.i001", "kept": [], "removed": False}, kept]
    assert told()[:2] == [{"checkpoint": "step-000010.i001", "kept": [], "removed": True}, kept]


class Uploads:
    """The uploads that were cut short at one place."""

    ended: ClassVar[list[str]] = []

    def __init__(self, url: str) -> None:
        self.url = url

    def list(self) -> list[Any]:
        begun = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
        return [SimpleNamespace(key=f"{self.url}/part", begun=begun)]

    def end(self, upload: Any) -> None:
        self.ended.append(upload.key)


@pytest.fixture
def in_tokyo() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as zone:
        zone.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


def test_uploads_that_were_cut_short_are_ended_unless_it_is_a_dry_run(
    in_tokyo: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ckpt_list, "UnfinishedUploads", Uploads)
    monkeypatch.setattr(Uploads, "ended", [])
    recipe: Any = Namespace(
        backup=Namespace(url="s3://b/backups/"), second_backup=Namespace(url=""),
        checkpoint=Namespace(url=""), run=Namespace(name="small"),
    )  # fmt: skip
    key = "s3://b/backups/small/part"
    ckpt_list._end_cut_uploads(recipe, Namespace(json=False, dry_run=True))
    ckpt_list._end_cut_uploads(recipe, Namespace(json=True, dry_run=True))
    assert Uploads.ended == []
    ckpt_list._end_cut_uploads(recipe, Namespace(json=False, dry_run=False))
    ckpt_list._end_cut_uploads(recipe, Namespace(json=True, dry_run=False))
    assert Uploads.ended == [key, key]
    facts = {"upload": key, "begun": "2026-03-04T05:06:07+00:00"}
    line = f"{key}  an upload cut short, begun 2026-03-04 14:06: "
    shown = capsys.readouterr().out.splitlines()
    assert shown[::2] == [f"{line}would be removed", f"{line}removed"]
    assert [json.loads(one) for one in shown[1::2]] == [facts | {"removed": False}, facts | {"removed": True}]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("here", "there", "told"),
    [
        ([1.0, 1.0], [1.0, NAN], None),
        ([NAN, 1.0], [1.0, NAN], None),
        ([INF, 1.0], [-INF, 1.0], None),
        ([1.0, 2.0, NAN, INF], [1.0, 2.5, NAN, INF], 0.5),
        ([NAN, INF, -INF], [NAN, INF, -INF], "nothing"),
    ],
)
def test_elements_that_are_no_finite_numbers_are_told_where_they_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], here: list[float], there: list[float], told: Any
) -> None:
    one, other = (
        str(save_checkpoint(tmp_path / name, [whole("model.a", torch.tensor(values))], step=1, incarnation=1))
        for name, values in (("a", here), ("b", there))
    )
    is_equal = told == "nothing"
    assert run(["diff", one, other, "--contents", "--json"]) == (0 if is_equal else 1)
    assert json.loads(capsys.readouterr().out)["elements"] == ({} if is_equal else {"model.a": told})
    run(["diff", one, other, "--contents"])
    words = {None: "  model.a  not finite in one of both", "nothing": "nothing differs"}.get(
        told, f"  model.a  {told}"
    )
    assert words in capsys.readouterr().out.splitlines()


def test_differences_are_told_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def saved(name: str, step: int, about: dict[str, Any], **tensors: torch.Tensor) -> str:
        entries = [whole(f"model.{key}", tensor) for key, tensor in tensors.items()]
        return str(save_checkpoint(tmp_path / name, entries, step=step, incarnation=1, about=about))

    ones = torch.ones(2, 3)
    one = saved("a", 1, {"loss": 2.0, "same": 5}, a=ones, b=ones, c=ones, e=ones, s=torch.tensor(1.0))
    other = saved("b", 1, {"rank": 7, "same": 5}, a=ones, b=ones * -3, d=ones, e=torch.ones(3, 2),
                  s=torch.tensor(1.5))  # fmt: skip
    assert run(["diff", one, other, "--contents"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"one:   {one}", f"other: {other}",
        "about: 2", "  loss  2.0 → None", "  rank  None → 7",
        "only in one: 1", "  model.c", "only in other: 1", "  model.d",
        "shape or type: 1", "  model.e  float32 2×3 → float32 3×2",
        "elements: 2", "  model.b  4.0", "  model.s  0.5",
    ]  # fmt: skip
    assert run(["diff", one, other, "--json"]) == 1
    (facts,) = objects(capsys)
    assert facts == {
        "one": one, "other": other, "different": True, "about": {"loss": [2.0, None], "rank": [None, 7]},
        "only in one": ["model.c"], "only in other": ["model.d"],
        "shape or type": {"model.e": ["float32 2×3", "float32 3×2"]},
    }  # fmt: skip
    assert run(["diff", one, one]) == 0
    assert "same tensors; --contents compares their elements" in capsys.readouterr().out


def test_a_verdict_for_programs_names_the_checkpoint_and_each_problem(
    rundir: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = rundir.checkpoints / "step-000015.i002"
    path = next(directory.glob("optim-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert run(["verify", str(rundir.path), "--json"]) == 1
    whole_one, damaged = objects(capsys)
    assert whole_one == {"checkpoint": str(rundir.checkpoints / "step-000010.i001"), "problems": []}
    (problem,) = damaged["problems"]
    assert damaged["checkpoint"] == str(directory)
    assert (problem["file"], problem["offset"], problem["tensors"]) == (path.name, 0, ["optim.a"])


def test_a_copy_and_a_backup_tell_where_they_are_and_how_much_of_what(
    rundir: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = read_manifest(rundir.checkpoints / "step-000015.i002").bytes
    url = f"file://{tmp_path}/there"
    rundir.recipe.write_text(RECIPE + f'\n[backup]\nurl = "{url}"\nlogs = true\n')
    assert run(["backup", str(rundir.path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{url}/small/checkpoints/step-000015.i002: ") and shown.count("\n") == 1
    assert run(["copy", str(rundir.path), f"{url}-2", "--json"]) == 0
    (facts,) = objects(capsys)
    assert facts["from"] == str(rundir.checkpoints / "step-000015.i002")
    assert facts["to"] == f"{url}-2/checkpoints/step-000015.i002"
    assert facts["bytes"] == facts["bytes_sent"] >= size
    back = tmp_path / "back"
    assert run(["copy", f"{url}-2", str(back), "--json"]) == 0
    (facts,) = objects(capsys)
    copied = back / "checkpoints" / "step-000015.i002"
    assert facts == {
        "from": f"{url}-2/checkpoints/step-000015.i002", "to": str(copied),
        "bytes": sum(path.stat().st_size for path in copied.iterdir()),
    }  # fmt: skip


def test_a_backup_by_hand_tells_logs_and_data_where_there_are_some(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more, calls = [2_500], list[Any]()
    done = SimpleNamespace(url="s3://b/x", what="model", bytes=3_500_000, bytes_sent=1_200)

    def note(name: str, result: Any) -> Any:
        return lambda *given, **named: calls.append((name, named)) or result

    monkeypatch.setattr(ckpt_copy, "place_at", lambda url: f"at {url}")
    monkeypatch.setattr(ckpt_copy, "upload_run_files", note("run files", None))
    monkeypatch.setattr(ckpt_copy, "upload_checkpoint", note("checkpoint", done))
    monkeypatch.setattr(ckpt_copy, "record_copy", note("record", None))
    monkeypatch.setattr(
        ckpt_copy, "upload_logs_and_data", lambda *given, **named: calls.append("more") or more[0]
    )
    newest: Any = SimpleNamespace(name="step-5", directory=Path("run/checkpoints/step-5"))
    section: Any = SimpleNamespace(what="model")

    def sent(*, as_json: bool) -> str:
        args = Namespace(json=as_json, workers=3)
        ckpt_copy._send(args, rundir, newest, section, "s3://b/x", "second")
        return capsys.readouterr().out

    assert sent(as_json=False) == "s3://b/x: 3.5 MB, verified; 2.5 kB of logs and data\n"
    assert [call if call == "more" else call[0] for call in calls] == [
        "run files", "checkpoint", "record", "more",
    ]  # fmt: skip
    recorded = {"url": "s3://b/x", "what": "model", "bytes": 3_500_000, "place": "second"}
    assert calls[2] == ("record", recorded) and calls[1][1]["workers"] == 3
    assert json.loads(sent(as_json=True)) == {
        "from": "run/checkpoints/step-5", "to": "s3://b/x", "bytes": 3_500_000, "bytes_sent": 1_200,
        "what": "model", "bytes_of_logs_and_data": 2_500,
    }  # fmt: skip
    more[0] = 0
    assert sent(as_json=False) == "s3://b/x: 3.5 MB, verified\n"


def test_a_slim_copy_is_of_a_checkpoint_or_of_a_file_and_tells_what_it_spared(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = SimpleNamespace(path=tmp_path / "new", before=3_456_000_000, after=1_234_000, repaired=0)
    calls: list[Any] = []
    for name in ("slim_checkpoint", "slim_file"):
        monkeypatch.setattr(
            f"bloomery.interchange.slim.{name}",
            lambda one, to, name=name, **progress: calls.append((name, one, to)) or done,
        )
    new, file = tmp_path / "new", tmp_path / "weights.pt"
    file.touch()
    assert run(["slim", str(rundir.path), str(new)]) == 0
    assert capsys.readouterr().out == f"{new}: 3,456.0 MB before, 1.2 MB now\n"
    done.repaired = 7
    assert run(["slim", str(file), "--to", str(new)]) == 0
    shown = f"{new}: 3,456.0 MB before, 1.2 MB now; 7 tensors had been saved with unused storage\n"
    assert capsys.readouterr().out == shown
    newest = rundir.checkpoints / "step-000015.i002"
    assert calls == [("slim_checkpoint", newest, new), ("slim_file", file, new)]
    assert run(["slim", str(file), str(new), "--json"]) == 0
    assert objects(capsys) == [
        {"path": str(new), "bytes_before": 3_456_000_000, "bytes_after": 1_234_000, "tensors_repaired": 7}
    ]
    with pytest.raises(CheckpointError, match=r"none\.pt does not exist"):
        run(["slim", str(tmp_path / "none.pt"), str(new)])
    for target, source in ((new, file), (new / newest.name, rundir.path)):
        target.mkdir()
        with pytest.raises(CheckpointError, match="exists already"):
            run(["slim", str(source), str(new)])


def test_an_export_is_given_the_models_files_and_tells_how_close_its_logits_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir, calls = RunDirectory(tmp_path / "run"), list[Any]()
    recipe = SimpleNamespace(run=SimpleNamespace(offline=False))
    files = SimpleNamespace(rundir=rundir, recipe=recipe)
    saved = SimpleNamespace(
        model="model", checkpoint=Path("c/step-5"), tokenizer_path=Path("t.json"),
        tokenizer=SimpleNamespace(end_of_document="</s>"),
    )  # fmt: skip
    done = SimpleNamespace(family="llama", parameters=12_345_678, largest_difference=1.234e-5, tolerance=2e-4)

    def export(*given: Any, progress: Any, **options: Any) -> Any:
        calls.append((*given, options))
        return done

    monkeypatch.setattr(
        "bloomery.evaluate.saved_files.find_saved",
        lambda path, fallback: calls.append((path, fallback)) or files,
    )
    monkeypatch.setattr("bloomery.evaluate.open_checkpoint.open_model", lambda found: saved)
    monkeypatch.setattr("bloomery.interchange.huggingface.export", export)
    monkeypatch.setattr(
        "bloomery.interchange.generation_files.generation_files_of", lambda run: f"of {run.path}"
    )
    assert run(["export", str(rundir.path), "--dtype", "bf16"]) == 0
    target = rundir.export
    assert capsys.readouterr().out == (
        f"{target}: llama, 12,345,678 parameters in bf16, from c/step-5\n"
        "  transformers gives the same logits: largest difference 1.2e-05 (tolerated: 0.0002)\n"
    )
    options = {"tokenizer": Path("t.json"), "end_of_document": "</s>", "dtype": "bf16",
               "companions": f"of {rundir.path}"}  # fmt: skip
    assert calls == [(rundir.path, False), ("model", Path("c/step-5"), target, options)]
    calls.clear()
    new = tmp_path / "new"
    assert run(["export", str(rundir.path), str(new), "--fallback", "--json"]) == 0
    assert objects(capsys) == [
        {"checkpoint": "c/step-5", "directory": str(new), "family": "llama", "parameters": 12_345_678,
         "largest_difference": 1.234e-5, "tolerance": 2e-4}
    ]  # fmt: skip
    assert calls[0] == (rundir.path, True) and calls[1][2:] == (new, options | {"dtype": "fp32"})
    new.mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        run(["export", str(rundir.path), str(new)])
