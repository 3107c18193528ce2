"""Each command and each of its parts ends with 2 where it is written wrongly, 1 where something fails."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tests.cli.in_process import status_of

from bloomery.cli import COMMANDS
from bloomery.cli.completion import whole_parser


def below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers of a parser's parts, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def all_commands() -> list[tuple[str, ...]]:
    """Each command, and each part of those that have some."""
    known: list[tuple[str, ...]] = []
    for name, parser in below(whole_parser()).items():
        parts = below(parser)
        known += [(name, part) for part in parts] if parts else [(name,)]
    return known


CALLS = all_commands()
MISSING = (
    *(("status",), ("stop",), ("save",), ("cancel",), ("note",), ("plot",), ("report",), ("top",)),
    *(("follow",), ("watch", "--once"), ("sync", "file:///tmp/x", "--once"), ("fork", "runs/new")),
    *(("skip", "--samples", "1:2"), ("rewind", "--to-step", "1")),
)


def test_no_command_is_left_out() -> None:
    assert {call[0] for call in CALLS} == COMMANDS.keys()
    assert len(CALLS) > 50


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_help_is_0_and_an_unknown_option_is_2(
    call: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(*call, "--help") == 0
    assert capsys.readouterr().out.split()[: 2 + len(call)] == ["usage:", "bloomery", *call]
    assert status_of(*call, "--no-such-option") == 2
    said = capsys.readouterr()
    assert said.err and not said.out and "Traceback" not in said.err


@pytest.mark.parametrize("name", sorted({call[0] for call in CALLS if len(call) == 2}))
def test_a_part_that_is_missing_or_unknown_is_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (status_of(name), status_of(name, "nothing")) == (2, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("words", MISSING, ids=" ".join)
def test_a_run_that_is_not_there_is_1(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status_of(words[0], "runs/none", *words[1:]) == 1
    said = capsys.readouterr()
    assert "runs/none" in said.err + said.out
    assert list(tmp_path.iterdir()) == []


WORDS = (
    ("ckpt", "copy", "a", "b"),
    ("ckpt", "copy", "file:///tmp/none", "b", "--what", "model"),
    ("coordinate", "--grant"),
    ("coordinate", "--init-certs", "c"),
    ("coordinate", "--revoke", "a"),
    ("coordinate", "--listen", "0.0.0.0:0"),
    ("dashboard", "a", "--host", "0.0.0.0"),
    ("data", "dedup", "a", "--to", "b", "--ngram", "0"),
    ("data", "fetch", "a=s3://b/x", "a=s3://c/x", "--to", "b"),
    ("data", "fetch", "a=s3://b/x", "--to", "b", "--ratio", "en"),
    ("data", "merge", "--to", "b"),
    ("data", "merge", "a", "--parts", "--to", "b"),
    ("launch", "demo", "--nnodes", "2", "--rdzv", "node"),
    ("note", "run", " "),
    ("sync", "run", "file:///tmp/none", "--once", "--checkpoints"),
    ("sync", "run", "file:///tmp/none", "--once", "--beside"),
)


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_words_that_do_not_go_together_are_2_and_nothing_is_made(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run/incarnations").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert status_of(*words) == 2
    said = capsys.readouterr()
    assert said.err and not said.out and "Traceback" not in said.err
    assert sorted(tmp_path.rglob("*")) == before
