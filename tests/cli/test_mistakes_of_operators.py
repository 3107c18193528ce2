"""Mistakes of who operates runs: each is told, leaves nothing behind, and does not pass for a success."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.cli.in_process import status_of
from tests.operate.dashboard.written_run import healed_run

MISTAKES = [
    (("ckpt", "list", "http://127.0.0.1:9/x"), "is not the URL of a store"),
    (("ckpt", "list", "file://{}/nowhere"), "nowhere does not exist"),
    (("ckpt", "verify", "file://{}/a.txt"), "a.txt is no directory"),
    (("ckpt", "copy", "file://{}/nowhere", "new"), "nowhere does not exist"),
    (("follow", "file://{}/nowhere", "--once"), "nowhere does not exist"),
    (("sync", "run", "file://{}/new", "--once", "--checkpoints"), "is no repository of the Hub"),
    (("data", "fetch", "nowhere", "--to", "new"), "nowhere does not exist"),
    (("data", "tokenizer", "empty.txt", "--to", "new.json"), "No document is left to train a tokenizer on"),
    (("data", "tokenizer", "pipe.txt", "--to", "new.json"), "is neither a file nor a directory"),
    (("data", "tokenizer", "loop", "--to", "new.json"), "is neither a file nor a directory"),
    (("note", "run", "\udcff"), "is not UTF-8: its character 1 is the byte 0xff"),
    (("ckpt", "list", "\udcff"), "is not UTF-8"),
    (("data", "tokenizer", "latin", "--to", "new.json"), "The name of the file '\\xff.txt' is not UTF-8"),
    (("calibrate", "--to", "a.txt"), "a.txt is there already and describes no machine"),
    (("calibrate", "--to", "."), "is a directory"),
    (("calibrate", "--disk", "a.txt"), "a.txt cannot be written"),
    (("chaos", "demo"), "the recipe has no rounds between peers"),
    (("watch", "run", "--once", "--ping", "example.org"), "is no URL: write https://host/path"),
    (("dashboard", "run", "--tls-cert", "a.txt", "--tls-key", "a.txt"), "are no certificate with its key"),
    (("dashboard", "run", "--tls-cert", "none", "--tls-key", "none"), "Is the path right"),
    (("preflight", "demo", "--run", "run", "--storage", "--gigabytes", "99999999"), "no space"),
    (("preflight", "demo", "--run", "run", "--release", "node7"), "node7 is not in quarantine"),
    (("launch", "demo", "--nnodes", "2", "--rdzv", "node"), "--rdzv node is not HOST:PORT"),
    (("launch", "demo", "--nnodes", "2", "--rdzv", "node:99999"), "is not HOST:PORT"),
    (("coordinate", "--renew"), "--renew goes with --init-certs"),
    (("coordinate", "--peers", "a,b"), "--peers goes with --init-certs"),
    (("coordinate", "--json"), "--json goes with --status"),
    (("coordinate", "--status", "x", "--endpoints", "host:2379"), "'host:2379' of the coordinator is no URL"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run and what an operator might name by mistake."""
    place = tmp_path_factory.mktemp("operators")
    healed_run(place / "run")
    (place / "a.txt").write_text("Once upon a time. ")
    (place / "empty.txt").touch()
    (place / "loop").symlink_to("loop")
    (place / "latin").mkdir()
    (place / "latin" / "\udcff.txt").write_text("Once upon a time. ")
    os.mkfifo(place / "pipe.txt")
    return place


@pytest.mark.parametrize(
    ("words", "told"), MISTAKES, ids=lambda given: " ".join(given) if isinstance(given, tuple) else ""
)
def test_a_mistake_is_told_and_leaves_nothing(
    words: tuple[str, ...],
    told: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    status = status_of(*(word.format(place) for word in words))
    captured = capsys.readouterr()
    said = captured.err + captured.out
    assert status in (1, 2)
    assert told in " ".join(said.split()), said
    assert sorted(place.rglob("*")) == before
