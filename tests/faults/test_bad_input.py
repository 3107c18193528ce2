"""What people get wrong: each mistake is told with what, where and what to do, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.faults.commands import Said, bloomery, events, steps_told

from bloomery.train.step import decide_compilation

Train = Callable[..., list[str]]
Here = Callable[..., Said]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "train.global_batsh=4",
            ["train.global_batsh = 4", "command line", "Did you mean train.global_batch?"],
        ),
        ("modle.heads=4", ["modle", "Did you mean [model]?"]),
        ("optim.name=adamm", ["optim.name = 'adamm'", "Did you mean 'adamw'?"]),
        ("optim.learning_rate=fast", ["optim.learning_rate = 'fast'", "must be a number"]),
        ("train.samples=1e3", ["train.samples = 1000.0", "must be an integer"]),
        ("train.samples", ["train.samples", "Write section.key=value"]),
        ("model.heads=5", ["model.heads = 5", "does not divide model.hidden = 32", "Heads that do"]),
        ("train.micro_batch=3", ["tiny.toml:", "not divisible by micro-batch 3", "nearest batch"]),
        ("train.tokens=3", ["schedule.warmup", "is longer than the run", "train longer"]),
        ("train.samples=0", ["the run has no length", "Set one of"]),
        ("data.sources=", ["data.sources", "is empty", "Name a file"]),
    ],
)
def test_a_wrong_setting_is_told_with_its_key_its_value_and_its_place(
    train_command: Train, here: Here, tmp_path: Path, override: str, told: list[str]
) -> None:
    here(*train_command(override)).refuses("1 mistake", *told, status=2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["data"]


def test_the_mistakes_of_a_recipe_are_told_together(train_command: Train) -> None:
    said = bloomery(*train_command("train.global_batsh=4", "log.every_steps=often"))
    said.refuses("2 mistakes", "global_batsh", "'often'", status=2)


def test_a_recipe_that_is_not_there_or_not_toml_is_named(here: Here, tmp_path: Path) -> None:
    here("train", tmp_path / "none.toml").refuses("none.toml", "there is no such file", status=2)
    here("train", "demmo").refuses("demmo", "Did you mean 'demo'?", status=2)
    here("train", tmp_path).refuses(str(tmp_path), "is a directory", "Give the .toml file", status=2)
    (tmp_path / "broken.toml").write_text("[run]\nname = tiny\n")
    here("train", tmp_path / "broken.toml").refuses("broken.toml:2", "text needs quotes", status=2)
    here("train").refuses("required: RECIPE\n", status=2)


def test_more_processes_than_the_batch_can_be_shared_among_are_refused(train_command: Train) -> None:
    said = bloomery(*train_command("--nproc", "3"))
    said.refuses("micro-batch 2 × data degree 3", "Data degrees that divide", status=2)


@pytest.mark.parametrize("count", ["0", "-1", "x", "1.5"])
def test_a_number_of_processes_that_is_none_is_refused(train_command: Train, here: Here, count: str) -> None:
    said = here(*train_command(f"--nproc={count}"))
    said.refuses(f"--nproc: '{count}' is not a whole number of at least 1", status=2)


def test_a_file_where_the_run_directory_should_be_is_told(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    here(*train_command(), "--run", tmp_path / "notes.txt").refuses("notes.txt", "A file is where")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_source_that_is_missing_empty_or_too_small_is_told(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    missing = tmp_path / "nowhere" / "text.txt"
    here(*train_command(f"data.sources={missing}")).refuses(str(missing), "does not exist", "data.sources")
    empty = tmp_path / "empty"
    empty.mkdir()
    here(*train_command(f"data.sources={empty}", run="two")).refuses(str(empty), "holds no text", ".jsonl")
    (empty / "a.txt").write_text("")
    here(*train_command(f"data.sources={empty}", run="three")).refuses(
        "No document is left to train on", "Give"
    )
    (empty / "a.txt").write_text("too short")
    words = ["data.held_out_every=0", f"data.sources={empty}"]
    here(*train_command(*words, run="four")).refuses("one sample takes 33", "Give it more text")


def test_another_text_under_a_run_is_refused_until_the_old_is_back(
    train_command: Train, here: Here, corpus: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(corpus, mine)
    command = train_command(f"data.sources={mine}", "guard.stop_at_step=2")
    assert here(*command).status == 0
    before = (mine / "cmd.txt").read_text()
    (mine / "cmd.txt").write_text(before + "and another line\n")
    slower = "optim.learning_rate=0.005"
    prepared = [tmp_path / "run" / "data" / name for name in ("tokenizer.json", "train.bin")]
    kept = [path.read_bytes() for path in prepared]
    here(*command, slower).refuses("was trained on other text", "Bring the old files back")
    here("evaluate", tmp_path / "run")  # of the text that it was trained on, whatever lies there now
    assert [path.read_bytes() for path in prepared] == kept
    (mine / "cmd.txt").write_text(before)
    assert here(*command, slower, "guard.stop_at_step=3").status == 0
    assert steps_told(tmp_path / "run") == 3
    starts = events(tmp_path / "run", "start")
    assert [record["step"] for record in starts] == [0, 2]
    assert starts[-1]["changes"] == {"optim.learning_rate": [0.01, 0.005]}  # not lost in the refused start


def test_a_checkpoint_of_another_model_is_refused_with_the_differences(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    assert here(*train_command("guard.stop_at_step=1")).status == 0
    assert here(*train_command("guard.stop_at_step=2", "model.hidden=48", run="other")).status == 0
    there = tmp_path / "other" / "checkpoints" / "step-000002.i001"
    shutil.move(there, tmp_path / "run" / "checkpoints")
    said = here(*train_command("guard.stop_at_step=1"))
    said.refuses("step-000002.i001 is a checkpoint of another model", "48", "32", "recipe.toml")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / there.name)
    assert here(*train_command("guard.stop_at_step=2")).status == 0


def test_another_shape_under_a_run_is_refused_with_both_values(train_command: Train, here: Here) -> None:
    assert here(*train_command("guard.stop_at_step=1")).status == 0
    said = here(*train_command("model.hidden=48", "optim.name=adamw"))
    said.refuses("model.hidden = 48", "32", "start a run with another name", status=2)


def test_a_truncated_checkpoint_is_named_with_the_newest_intact_one(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    assert here(*train_command("guard.stop_at_step=10")).status == 0
    checkpoints = tmp_path / "run" / "checkpoints"
    newest = checkpoints / "step-000010.i001"
    largest = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    command = train_command("guard.stop_at_step=11")
    here(*command).refuses("step-000010.i001", "step-000005.i001", "--fallback")
    here("ckpt", "verify", tmp_path / "run").refuses()
    assert newest.is_dir()
    assert here(*command, "--fallback").status == 0
    assert [record["step"] for record in events(tmp_path / "run", "start")] == [0, 5]
    assert here(*command, "guard.stop_at_step=12").status == 0  # the damaged one is not asked for again


def test_where_python_has_no_headers_it_trains_eagerly_and_says_so(
    train_command: Train, here: Here, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "nowhere"))
    decision = decide_compilation("on", device=torch.device("cpu"), run_flops=1e30)
    assert not decision.on and "install python3-dev" in decision.why
    said = here(*train_command("train.compile=on", "guard.stop_at_step=1", "--plain"))
    assert said.status == 0 and "eager (no Python headers at" in said.out


def test_what_verify_says_can_be_read_by_a_program(train_command: Train, here: Here, tmp_path: Path) -> None:
    assert here(*train_command("guard.stop_at_step=1")).status == 0
    (line,) = here("ckpt", "verify", tmp_path / "run", "--json").out.splitlines()
    assert json.loads(line)["problems"] == []


@pytest.mark.parametrize("damage", [b"", b"[run", b"\xff\xfe"])
def test_a_damaged_recipe_of_the_run_is_told_and_mended_from_the_journal(
    train_command: Train, here: Here, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
) -> None:
    command, kept = train_command("guard.stop_at_step=1"), tmp_path / "run" / "recipe.toml"
    assert here(*command).status == 0
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    here(*command, "model.layers=3").refuses("the run was started with 2", status=2)
    kept.write_bytes(damage)
    caplog.clear()
    assert here(*command).status == 0
    assert f"{kept} was damaged" in caplog.text and "mended from the journal" in caplog.text
    assert kept.read_bytes() == whole


def test_a_damaged_recipe_that_nothing_can_mend_is_kept_aside_and_the_starts_own_taken(
    train_command: Train, here: Here, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command, kept = train_command("guard.stop_at_step=1"), tmp_path / "run" / "recipe.toml"
    assert here(*command).status == 0
    whole = kept.read_bytes()
    kept.write_bytes(whole[:40])
    (tmp_path / "run" / "journal" / "0-0.jsonl").unlink()
    assert here(*command).status == 0 and "cannot be told" in caplog.text
    assert kept.read_bytes() == whole
    assert (tmp_path / "run" / "recipe.damaged.toml").read_bytes() == whole[:40]


def test_steps_that_the_journal_has_lost_are_told_once(
    train_command: Train, here: Here, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    command, journal = train_command(), tmp_path / "run" / "journal" / "0-0.jsonl"
    assert here(*command, "guard.stop_at_step=8").status == 0
    lines = journal.read_bytes().splitlines(keepends=True)
    third = next(number for number, line in enumerate(lines) if b'"step": 3,' in line)
    journal.write_bytes(b"".join(lines[:third]) + lines[third][:20])
    assert here(*command, "guard.stop_at_step=9").status == 0
    assert "does not tell of steps 3 to 8" in caplog.text
    assert [(one["first"], one["last"]) for one in events(tmp_path / "run", "journal_gap")] == [(3, 8)]
    caplog.clear()
    assert here(*command, "guard.stop_at_step=10").status == 0 and "does not tell" not in caplog.text


def test_damaged_tokens_are_refused_at_the_start_with_file_and_block(
    train_command: Train, here: Here, tmp_path: Path
) -> None:
    command, tokens = train_command("guard.stop_at_step=1"), tmp_path / "run" / "data" / "train.bin"
    whole = bytearray(tokens.read_bytes())
    damaged = whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2)  # valid ids, another text
    tokens.write_bytes(damaged)
    here(*command).refuses(str(tokens), "is not what was written, somewhere in bytes", "data verify")
    tokens.write_bytes(whole)
    assert here(*command).status == 0
