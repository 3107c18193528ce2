"""Mistakes of who operates runs: each is told with its remedy, leaves nothing, and is no success."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
from tests.cli.in_process import status_of
from tests.operate.dashboard.written_run import healed_run

from bloomery.config.find import shipped_recipes
from bloomery.events.run_directory import RunDirectory

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
    (("calibrate", "--to", "."), "Name a file that ends in .toml: --to FILE."),
    (("ckpt", "slim", "nowhere", "small"), "nowhere does not exist. Check the path."),
    (("ckpt", "backup", "run"), "Use `bloomery ckpt copy RUN URL`."),
    (("ckpt", "backup", "unsaved"), "Set backup.url, or use `bloomery ckpt copy RUN URL`."),
    (("ckpt", "import", "nowhere", "--to", "new"), "Give the checkpoint's directory."),
    (("ckpt", "backup", "run", "--workers", "0"), "--workers 0 is below 1"),
    (("coordinate", "--init-certs", "certificates"), "Add --run RUN --peers NAME,NAME,…"),
    (("coordinate", "--grant"), "Make them with --init-certs."),
    (("coordinate", "--listen", "0.0.0.0:0"), "add --certificates DIR, or listen on 127.0.0.1."),
    (("dashboard", "run", "--host", "0.0.0.0"), "or leave --host out and use `ssh -L`."),
    (("dashboard", "run", "--tls-cert", "a.txt"), "--tls-cert and --tls-key go together"),
    (("dashboard", "run", "--tls-cert", "a.txt", "--tls-key", "a.txt"), "the key without a password."),
    (("data", "audit", "demo", "--to", "a.txt"), "Name a directory for the report: --to DIR."),
    (("data", "merge", "--to", "all"), "Name pairs, or give --parts to join parts."),
    (("data", "fetch", "texts", "--to", "new", "--ratio", "en"), "For instance --ratio en=0.9."),
    (("evaluate", "run", "--follow"), "--follow wants --tasks"),
    (("generate", "run", "--prompts", "nowhere.txt"), "one prompt per line, or '-' for standard input."),
    (("generate", "run", "--prompts", "empty.txt"), "Write one prompt per line."),
    (("guard", "replay", "a.txt", "optim.clip=1"), "Write guard.key=value: an old log has no other."),
    (("ckpt", "import", "texts", "--to", "new"), "Give a directory written by save_pretrained, DCP"),
    (("peer", "probe", "demo", "--streams", "1,x"), "numbers with commas, like 1,2,4,8, not '1,x'"),
    (("peer", "probe", "demo", "--streams", "0,2"), ", not '0,2'"),
    (("peer", "probe", "demo", "--streams", "1,9999"), ", not '1,9999'"),
    (("chaos", "--kinds", "nonsense"), "There are "),
    (("config", "check", "latin.toml"), "is not UTF-8 text (byte 14)"),
    (("train", "wrong.toml"), "Put it under [train]."),
    (("train", "stray.toml"), "Put settings under one of [run]"),
    (("train", "table.toml"), "Write [model] on its own line."),
    (("plan", "--at", "nowhere"), "for instance runs/demo; it holds recipe.toml and journal/."),
    (("note", "run", " "), 'Write it: bloomery note RUN "what happened"'),
    (("status", "--under", "nowhere"), "Give --under, or a run."),
    (("sync", "run"), "Give a place: bloomery sync RUN s3://bucket/path"),
    (
        ("note", "nowhere", "It began."),
        "Give the directory that `bloomery train` names, runs/NAME without --run.",
    ),
    (("watch", "run", "--once", "--to-file", "nowhere.txt"), "Write one address a line."),
    (("watch", "run", "--once", "--to-file", "latin.toml"), "latin.toml cannot be read: it is not UTF-8."),
    (("dashboard", "run", "--token-file", "bytes"), "must be one word of at least 16 ASCII characters"),
    (("train", "latin.toml"), "Save the file as UTF-8."),
    (("simulate", "llama3-405b", "--sweep", "a.b"), "is not section.key=value,value,…"),
    (
        ("launch", "demo", "--supervise", "--nnodes", "2", "--rdzv", "a:1", "--spares", "2", "--job", "7"),
        "Lower --spares, or start on more",
    ),
]


def test_a_key_that_may_not_be_read_is_named_and_no_password_is_asked_for(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(ssl.SSLContext):
        def load_cert_chain(self, *files: object, password: str | None = None) -> None:  # type: ignore[override]
            assert password == ""
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ssl, "SSLContext", Refusing)
    paper = str(place / "a.txt")
    assert status_of("dashboard", str(place / "run"), "--tls-cert", paper, "--tls-key", paper) == 1
    assert f"Reading the key failed at {paper}: Permission denied" in capsys.readouterr().err


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with runs and what an operator might name by mistake."""
    place = tmp_path_factory.mktemp("operators")
    healed_run(place / "run")
    (place / "a.txt").write_text("Once upon a time. ")
    (place / "empty.txt").touch()
    RunDirectory(place / "unsaved").create()
    (place / "unsaved" / "recipe.toml").write_bytes(shipped_recipes()["demo"].read_bytes())
    (place / "texts").mkdir()
    (place / "texts" / "a.txt").write_text("Once upon a time. ")
    (place / "wrong.toml").write_text("global_batch = 8\n")
    (place / "stray.toml").write_text("nonsense = 8\n")
    (place / "table.toml").write_text("model = 8\n")
    (place / "latin.toml").write_bytes(b'[run]\nname = "\xff"\n')
    (place / "bytes").write_bytes(b"\xff0123456789abcdef")
    (place / "bytes").chmod(0o600)
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
