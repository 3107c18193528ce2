"""Arguments that hold nothing sensible are refused before any work: what, where and what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.in_process import status_of

TOKENIZE = ("data", "tokenize", "text", "--tokenizer", "t.json", "--to")
FETCH = ("data", "fetch", "text", "--to", "here")

MISTAKES = [
    (("generate", "run", "hi", "--temprature", "1"), "Did you mean --temperature?"),
    (("ckpt", "prune", "run", "--dryrun"), "Did you mean --dry-run?"),
    ((*TOKENIZE, "x", "--tokeniser", "y"), "Did you mean --tokenizer?"),
    (("plan", "demo", "--steps", "5"), "Settings are written section.key=value"),
    (("help", "tran"), "Did you mean `bloomery train`?"),
    ((*TOKENIZE, ""), "'' names no file"),
    ((*TOKENIZE, "x", "--workers", "0"), "of at least 1"),
    ((*TOKENIZE, "x", "--workers", "99999"), "at most 1,024"),
    ((*TOKENIZE, "x", "--held-out-every", "-1"), "of at least 0"),
    ((*TOKENIZE, "x", "--longest-line-mib", "0"), "of at least 1"),
    (("data", "verify", ""), "'' names no file"),
    (("data", "verify", "x", "--vocabulary", "0"), "of at least 1"),
    (("data", "inspect", "x", "--peek", "-1"), "of at least 0"),
    (("data", "dedup", "x", "--to", "."), "'.' names no file"),
    (("data", "merge", "x", "--to", ".."), "'..' names no file"),
    (("data", "tokenizer", "text", "--to", "text/a.txt"), "is there already and is no .json"),
    (("data", "tokenizer", "text", "--to", "text"), "is a directory"),
    (("data", "tokenizer", "text", "--to", "prepared/tokenizer.json"), "is the data of a run"),
    ((*FETCH, "--threads", "0"), "of at least 1"),
    ((*FETCH, "--limit", "-1"), "of at least 1"),
    ((*FETCH, "--shares", "0"), "of at least 1"),
    (("data", "audit", "demo", "--to", "text/a.txt"), "text/a.txt is a file"),
    (("data", "audit", "demo", "--to", "new", "--include", "text"), "--include wants --tasks"),
    (("data", "report", "demo", "--png", "x.doc"), "ends in none of .png, .svg, .pdf"),
    (("data", "report", "demo", "--png", "no/x.png"), "there is no directory no"),
    (("simulate", "llama3-405b", "--png", "x.doc"), "ends in none of .png, .svg, .pdf"),
    (("report", "run", "--png", "text"), "ends in none of .png, .svg, .pdf"),
    (("report", "run", "--html", "mine.toml"), "ends in none of .html, .htm"),
    (("guard", "replay", "log", "--png", "no/x.png"), "there is no directory no"),
    (("peer", "probe", "demo", "--picture", "x.doc"), "ends in none of .png, .svg, .pdf"),
    (("plot", "run", "--output", "dir.png"), "is a directory"),
    (("plot", "run", "--from", "nan"), "'nan' is not a number"),
    (("plot", "run", "--from", "10", "--to", "5"), "--from 10 is not below --to 5"),
    (("plan", "demo", "--html", "mine.toml"), "ends in none of .html, .htm"),
    (("plan", "--at", "run", "--html", "p.html"), "--html does not go with --at"),
    (("plan", "demo", "--search", "--html", "p.html"), "--html does not go with --search"),
    (("mesh", "demo", "--stages", "--json"), "--stages does not go with --json"),
    (("peer", "probe", "demo", "--streams", "1,2", "--picture", "l.svg"), "--picture does not go with"),
    (("plan", "demo", "--price", "nan"), "Give a number"),
    (("plan", "demo", "--data-tokens", "inf"), "Give a number"),
    (("plan", "demo", "--failures-per-week", "nan"), "Give a number"),
    (("preflight", "demo", "--storage", "--gigabytes", "nan"), "is not a number of gigabytes above 0"),
    (("preflight", "demo", "--storage", "--gigabytes", "-1"), "is not a number of gigabytes above 0"),
    (("chaos", "--gap", "0"), "is not a number of seconds above 0"),
    (("chaos", "--faults", "0"), "of at least 1"),
    (("chaos", "--minutes", "0"), "is not a number of minutes above 0"),
    (("drill", "demo", "--patience", "nan"), "is not a number of seconds above 0"),
    (("demo", "--minutes", "nan"), "is not a number of minutes above 0"),
    (("watch", "run", "--disk-h", "nan"), "is not a number of at least 0"),
    (("coordinate", "--init-certs", "c", "--days", "99999999"), "at most 36,500"),
    (("skip", "run", "--samples", "0:99999999999999999999999"), "at most 1,000,000,000,000,000"),
    (("rewind", "run", "--to-step", "-1"), "of at least 0"),
    (("fork", "run", "new", "--to-step", "-1"), "of at least 0"),
    (("generate", "run", "--seed", "99999999999999999999"), "at most 1,000,000,000,000,000"),
    (("evaluate", "run", "--tasks", "a", "--shots", "-1"), "of at least 0"),
    (("mesh", "demo", "--nodes", "a[9-2]"), "[9-2] is not the range"),
    (("mesh", "demo", "--nodes", "a[1-99999999999]"), "at most 100,000 hosts"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a text, a recipe and the data of a run."""
    place = tmp_path_factory.mktemp("arguments")
    for name in ("text", "prepared", "dir.png"):
        (place / name).mkdir()
    (place / "text" / "a.txt").write_text("Once upon a time. ")
    (place / "prepared" / "prepared.json").write_text("{}")
    (place / "mine.toml").write_text('[run]\nname = "mine"\n')
    return place


@pytest.mark.parametrize(
    ("words", "told"), MISTAKES, ids=lambda given: " ".join(given) if isinstance(given, tuple) else ""
)
def test_a_wrong_argument_is_refused_before_any_work(
    words: tuple[str, ...],
    told: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    before = {path: path.is_file() and path.read_bytes() for path in place.rglob("*")}
    status = status_of(*words)
    said = capsys.readouterr()
    assert status in (1, 2)
    assert told in " ".join(said.err.split()), said.err
    assert {path: path.is_file() and path.read_bytes() for path in place.rglob("*")} == before
