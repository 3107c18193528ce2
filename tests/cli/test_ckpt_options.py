"""Options and settings that `bloomery ckpt` passes on: each has its effect, and each wrong one is refused."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.test_ckpt_command import RECIPE

from bloomery.checkpoint.format.catalogue import (
    Problem,
    RemoteCopy,
    checkpoints,
    record_copy,
    remote_copies,
    verify,
)
from bloomery.checkpoint.format.commit import remove_checkpoint
from bloomery.checkpoint.format.source import source_of
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.remote.remote_run import place_at
from bloomery.checkpoint.remote.transfer import upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import ckpt, ckpt_copy, ckpt_list
from bloomery.cli.ckpt import run
from bloomery.errors import CheckpointError, StorageError, UsageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory

NAMES = ["step-000010.i001", "step-000020.i001", "step-000030.i001"]


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    rundir = RunDirectory(tmp_path / "run").create()
    begin(rundir, base=None, reason="start")
    for step in (10, 20, 30):
        entries = [whole("model.a", torch.full((9, 7), float(step))), whole("optim.a", torch.ones(11))]
        save_checkpoint(rundir.checkpoints, entries, step=step, incarnation=1)
    rundir.recipe.write_text(RECIPE)
    return rundir


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def kept(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [row["kept"] for row in rows(capsys)]


def damage(rundir: RunDirectory, name: str) -> None:
    path = next((rundir.checkpoints / name).glob("optim-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def test_prune_waits_for_the_copies_that_the_recipe_asks_for(
    rundir: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f'\n[backup]\nurl = "file://{tmp_path}/elsewhere"\n'
    for name, settings, expected in (
        (NAMES[0], place, [[], ["not backed up"]]),
        (NAMES[1], place, [[], []]),
        (NAMES[1], place + "prune_waits = false\n", [[], []]),
    ):
        url = f"file://{tmp_path}/elsewhere/small/checkpoints/{name}"
        record_copy(rundir, name, url=url, what="all", bytes=1)
        rundir.recipe.write_text(RECIPE + settings)
        assert run(["prune", str(rundir.path), "--dry-run", "--json"]) == 0
        assert kept(capsys)[:2] == expected
    (rundir.backups / f"{NAMES[0]}.json").unlink()
    (rundir.backups / f"{NAMES[1]}.json").unlink()
    assert run(["prune", str(rundir.path), "--dry-run", "--json"]) == 0
    assert kept(capsys)[:2] == [[], []], "what need not wait does not"
    rundir.recipe.write_text(RECIPE + place)
    assert run(["prune", str(rundir.path), "--dry-run", "--json"]) == 0
    assert kept(capsys)[:2] == [["not backed up"], ["not backed up"]]


def test_prune_leaves_what_a_rewind_may_need_and_the_last_whose_bytes_are_right(
    rundir: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir.recipe.write_text(RECIPE.replace("spike = false", "spike = true\nspike_rewind_steps = 5"))
    assert run(["prune", str(rundir.path), "--dry-run", "--json"]) == 0
    assert "for a rewind" in kept(capsys)[0]
    rundir.recipe.write_text(RECIPE)
    damage(rundir, NAMES[2])
    assert run(["prune", str(rundir.path)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told == [f"{NAMES[0]}  removed", f"{NAMES[1]}  kept: newest intact", f"{NAMES[2]}  kept: last 1"]
    assert sorted(path.name for path in rundir.checkpoints.iterdir()) == NAMES[1:]


def test_a_run_without_checkpoints_has_nothing_to_prune(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = RunDirectory(tmp_path / "empty").create()
    empty.recipe.write_text(RECIPE)
    assert run(["prune", str(empty.path)]) == 0 and "no checkpoints yet" in capsys.readouterr().out
    assert run(["prune", str(empty.path), "--json"]) == 0 and capsys.readouterr().out == ""
    with pytest.raises(CheckpointError, match="no checkpoints yet"):
        empty.recipe.write_text(RECIPE + f'\n[backup]\nurl = "file://{tmp_path}/elsewhere"\n')
        run(["backup", str(empty.path)])


def test_the_list_of_a_single_pass_is_of_a_local_run_alone(
    rundir: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more in (["--all"], []):
        with pytest.raises(SystemExit) as ended:
            run(["list", str(rundir.path) if more else f"file://{tmp_path}", "--single-pass", *more])
        assert ended.value.code == 2
    with pytest.raises(CheckpointError, match="no dataset had been read twice"):
        run(["list", str(rundir.path), "--single-pass"])
    about = {"cursor": 4, "first_epoch_end": 9}
    entries = [whole("model.a", torch.ones(2))]
    save_checkpoint(rundir.checkpoints, entries, step=35, incarnation=1, about=about)
    capsys.readouterr()
    assert run(["list", str(rundir.path), "--single-pass", "--json"]) == 0
    assert [row["step"] for row in rows(capsys)] == [35]


@pytest.mark.parametrize("words", [("verify",), ("list", "--verify")])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_damaged(
    rundir: RunDirectory,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def removing(where: Any, **more: Any) -> list[Problem]:
        if source_of(where).name == NAMES[1]:
            remove_checkpoint(rundir.checkpoints / NAMES[1])
        return verify(where, **more)

    for module in (ckpt, ckpt_list):
        monkeypatch.setattr(module, "verify", removing)
    command, *options = words
    assert run([command, str(rundir.path), "--json", *options]) == 0
    told = capsys.readouterr().out
    assert NAMES[0] in told and NAMES[1] not in told and NAMES[2] in told
    (rundir.checkpoints / NAMES[2] / "manifest.json").unlink()
    assert run(["verify", str(rundir.checkpoints / NAMES[2])]) == 1


def test_a_backup_is_listed_with_what_was_left_behind_and_what_is_damaged(
    rundir: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/elsewhere"
    remote = place_at(url)
    for name in NAMES[:2]:
        upload_checkpoint(rundir.checkpoints / name, remote, notes=tmp_path / "notes", what="model")
    begin(rundir, base=(10, 1), reason="rewind")
    assert run(["copy", str(rundir.checkpoints / NAMES[0]), url]) == 0
    capsys.readouterr()
    assert run(["list", url, "--json"]) == 0
    assert [row["step"] for row in rows(capsys)] == [10]
    assert run(["list", url, "--all", "--json", "--verify"]) == 0
    listed = rows(capsys)
    assert [(row["step"], row["incarnation"], row["abandoned"]) for row in listed] == [
        (10, 1, False),
        (20, 1, True),
    ]
    assert [row["backup_what"] for row in listed] == ["all", "model"]
    assert [row["state"] for row in listed] == ["verified"] * 2
    assert listed[0]["backup"] == listed[0]["directory"] == f"{url}/checkpoints/{NAMES[0]}"
    key = next(entry.key for entry in remote.entries(f"checkpoints/{NAMES[0]}/") if "model-" in entry.key)
    remote.put(key, remote.content(key)[:-1] + b"?")
    assert run(["list", url, "--json"]) == 0 and run(["list", url, "--verify"]) == 1
    assert run(["verify", url]) == 1
    with pytest.raises(StorageError, match="does not exist"):
        run(["list", f"{url}-2"])


def test_of_several_copies_the_whole_one_is_shown() -> None:
    copies = [RemoteCopy(url=what, what=what, bytes=1, time=0.0) for what in ("model", "all", "model")]
    assert ckpt_list._backup(copies) == {"backup": "all", "backup_what": "all"}
    assert ckpt_list._backup(copies[:1]) == {"backup": "model", "backup_what": "model"}
    assert ckpt_list._backup(()) == {"backup": None, "backup_what": None}


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (9_999_999_999, "9,999,999,999"),
        (10_000_000_000, "10.0 B"),
        (9_999_900_000_000, "9,999.9 B"),
        (12_340_000_000_000, "12.3 T"),
    ],
)
def test_large_counts_of_tokens_are_short(count: int, words: str) -> None:
    assert ckpt_list._count_words(count) == words


def test_cells_say_dash_for_what_is_not_known_and_cut_what_is_too_long() -> None:
    row = {"step": 1234, "incarnation": 3, "time": None, "bytes": None, "tokens": None, "loss": None}
    row |= {"held_out_loss": 1.23456, "abandoned": False, "state": "damaged: a long one", "backup_what": None}
    row |= {"kept": []}
    assert ckpt_list._cells(row) == (
        *("1,234", "3", "-", "-", "-", "-", "1.235", "-", "damaged: a lon…", "-"),
    )
    assert ckpt_list._cells({**row, "abandoned": True, "kept": ["best"]})[-1] == "abandoned"
    assert [ckpt_list._cells({**row, "backup_what": what})[7] for what in ("all", "model")] == [
        "yes",
        "weights",
    ]
    assert ckpt_list._shortened("x" * 15, 15) == "x" * 15


def test_a_copy_of_a_checkpoint_beside_no_run_leaves_no_record(
    rundir: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = (rundir.checkpoints / NAMES[1]).rename(tmp_path / NAMES[1])
    assert run(["copy", str(alone), f"file://{tmp_path}/there", "--json"]) == 0
    (done,) = rows(capsys)
    assert done["from"] == str(alone) and done["bytes"] == done["bytes_sent"] > 0
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["checkpoints"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", NAMES[1], "there"]
    assert run(["copy", str(rundir.path), f"file://{tmp_path}/there", "--what", "model"]) == 0
    assert [copy.what for copy in remote_copies(rundir)[NAMES[2]]] == ["model"]
    with pytest.raises(CheckpointError, match="is a checkpoint"):
        run(["copy", f"file://{tmp_path}/there", str(alone)])
    with pytest.raises(UsageError, match="only works for copies to a URL"):
        run(["copy", f"file://{tmp_path}/there", str(tmp_path / "back"), "--what", "model"])
    assert not (tmp_path / "back").exists()
    with pytest.raises(UsageError, match="must be a URL"):
        run(["copy", f"file://{tmp_path}/there", f"file://{tmp_path}/back"])


def test_a_backup_by_hand_sends_as_many_files_at_a_time_as_is_asked(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[dict[str, object]] = []

    def watched(*given: object, **named: object) -> object:
        asked.append(named)
        return upload_checkpoint(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ckpt_copy, "upload_checkpoint", watched)
    places = f'\n[backup]\nurl = "file://{tmp_path}/near"\n[second_backup]\nurl = "file://{tmp_path}/far"\n'
    rundir.recipe.write_text(RECIPE + places + 'what = "model"\nlogs = false\n')
    (rundir.path / "journal").mkdir(exist_ok=True)
    (rundir.path / "journal" / "0.jsonl").write_text('{"event": "start"}\n')
    assert run(["backup", str(rundir.path), "--workers", "3", "--json"]) == 0
    assert [(one["workers"], one["what"]) for one in asked] == [(3, "all"), (3, "model")]
    assert asked[0]["notes"] == rundir.backups / f"{NAMES[2]}.notes"
    assert asked[1]["notes"] == rundir.backups / f"{NAMES[2]}.second.notes"
    near, far = rows(capsys)
    assert (near["what"], far["what"]) == ("all", "model") and far["bytes"] < near["bytes"]
    assert (near["bytes_of_logs_and_data"], far["bytes_of_logs_and_data"]) == (19, 0)
    assert (rundir.backups / f"{NAMES[2]}.second.json").exists()
    assert run(["backup", str(rundir.path)]) == 0
    assert asked[2]["workers"] == 8
    for workers in ("0", "-1"):
        with pytest.raises(SystemExit) as ended:
            run(["backup", str(rundir.path), "--workers", workers])
        assert ended.value.code == 2


def test_a_place_that_refuses_a_backup_by_hand_keeps_it_from_no_other(
    rundir: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("near", "further"):
        (tmp_path / name).write_text("a file where a directory should be")
    places = '\n[backup]\nurl = "file://{0}/near"\n[second_backup]\nurl = "file://{0}/far"\n'
    rundir.recipe.write_text(RECIPE + places.format(tmp_path))
    with pytest.raises(StorageError, match="near"):
        run(["backup", str(rundir.path), "--json"])
    (sent,) = rows(capsys)
    assert sent["to"].startswith(f"file://{tmp_path}/far/")
    rundir.recipe.write_text(RECIPE + places.format(tmp_path).replace("/far", "/further"))
    with pytest.raises(StorageError, match="further"):
        run(["backup", str(rundir.path), "--json"])
    assert "near" in capsys.readouterr().err, "each refusal is told"


def test_uploads_that_were_cut_short_are_looked_for_at_each_place_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def away(url: str) -> None:
        asked.append(url)
        raise OSError(5, f"no answer from {url}")

    monkeypatch.setattr(ckpt_list, "UnfinishedUploads", away)
    place = {
        "backup": Namespace(url="s3://b/backups/"),
        "second_backup": Namespace(url="file:///mnt"),
        "checkpoint": Namespace(url="gs://c"),
        "run": Namespace(name="small"),
    }
    ckpt_list._end_cut_uploads(Namespace(**place), Namespace(json=False, dry_run=False))  # type: ignore[arg-type]
    assert asked == ["gs://c/small", "s3://b/backups/small"]
    assert capsys.readouterr().err.count("were not looked for: no answer from") == 2


def test_a_recipe_of_another_version_hides_no_checkpoint_from_the_list(
    rundir: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir.recipe.write_text(f"{RECIPE}[future]\nsetting = 1\n")
    assert run(["list", str(rundir.path), "--json"]) == 0
    assert [row["step"] for row in rows(capsys)] == [10, 20, 30]


def test_a_store_that_is_away_is_told_with_what_was_done_and_no_checkpoint_comes_without_its_recipe(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise OSError(5, "no answer")

    url, back = f"file://{tmp_path}/there", RunDirectory(tmp_path / "back")
    rundir.recipe.write_text(RECIPE + f'\n[backup]\nurl = "{url}"\n')
    assert run(["copy", str(rundir.path), url]) == 0
    for name, words, doing in (
        ("upload_run_files", ["copy", str(rundir.path), f"{url}-2"], "Copying the run's recipe"),
        ("upload_run_files", ["backup", str(rundir.path)], "The backup"),
        ("download_run_files", ["copy", url, str(back.path)], "Fetching the run's recipe"),
    ):
        with monkeypatch.context() as cut:
            cut.setattr(ckpt_copy, name, away)
            with pytest.raises(StorageError, match=doing):
                run(words)
    assert not (back.checkpoints / NAMES[2]).exists()
    assert run(["copy", url, str(back.path)]) == 0
    assert [found.name for found in checkpoints(back)] == NAMES[2:]
