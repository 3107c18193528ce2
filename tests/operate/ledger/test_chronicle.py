"""The chronicle of a run: it names each incident, keeps people's notes, and shows hostile names as text."""

from __future__ import annotations

import io
import json
import re
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token
from tests.operate.ledger.test_ledger import T0, killed_once, operation, write_run

from bloomery.cli import main
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger.chronicle import BY_HAND, as_block, as_text, write_chronicle

HOSTILE = "</pre><script>alert(1)</script> [x](http://evil) ```\n# Owned\n<!-- --> www.evil.org me@evil.org"


def tokens(text: str) -> list[Token]:
    """The tokens of Markdown, HTML and tables included."""
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    flat = []
    for token in reader.parse(text):
        flat += [token, *(token.children or ())]
    return flat


def headings(text: str) -> list[str]:
    parsed = tokens(text)
    return [parsed[place + 1].content for place, token in enumerate(parsed) if token.type == "heading_open"]


def test_an_incident_has_its_cause_evidence_deed_and_cost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", *killed_once())
    path = write_chronicle(run, now=T0 + 1000)
    assert path == run.chronicle
    text = run.chronicle.read_text()
    assert "killed: node7, rank 0" in text and "rank 0 was killed" in text
    assert "- done: started again by the supervisor" in text
    assert "- cost: 18.0 s, 2 steps; effective time so far 7.5%" in text  # 1.5 s of 20 s
    assert "- killed: 1 ×, 18.0 s, 2 steps lost" in text
    assert "stopped: signal SIGTERM" in text


def test_changes_of_settings_and_samples_left_out_are_told_with_their_step(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    changed = {"incarnation": 2, "step": 4, "key": "guard.spike", "value": "false"}
    skipped = {"incarnation": 2, "step": 5, "samples": "0:8"}
    events[-1:-1] = [operation(27.5, "setting") | changed, operation(28, "skip") | skipped]
    run = write_run(tmp_path / "mine", events, operations, bases)
    write_chronicle(run, now=T0 + 1000)
    told = [content for content in headings(run.chronicle.read_text()) if "step" in content]
    assert any("step 4: setting: key guard.spike, value false" in content for content in told)
    assert any("step 5: skip: samples 0:8" in content for content in told)


def test_notes_and_what_was_written_by_hand_outlive_each_rewriting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "mine", *killed_once())
    assert main(["note", str(run.path), "node7 went back\nto the *vendor*", "--by", "Ada"]) == 0
    assert capsys.readouterr().out.strip() == str(run.chronicle)
    by_hand = "\n## Notes by hand\n\nA table, <b>as I like it</b>.\n"
    before, _, _ = run.chronicle.read_text().partition(BY_HAND)
    run.chronicle.write_text(f"{before}{BY_HAND}\n{by_hand}")
    assert main(["note", str(run.path), "and came back"]) == 0
    text = run.chronicle.read_text()
    assert text.endswith(by_hand)
    assert "note by Ada" in text and "node7 went back" in text and r"\*vendor\*" in text
    assert text.count("note by") == 2 and text.count(BY_HAND) == 1
    unchanged = run.chronicle.stat().st_mtime_ns
    assert main(["note", str(run.path)]) == 0
    assert run.chronicle.stat().st_mtime_ns == unchanged, "what would be the same is not written again"
    assert next(event["by"] for event in read_journal(run.operations) if event["event"] == "note") == "Ada"


def test_a_file_of_that_name_which_a_person_wrote_is_kept_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", *killed_once())
    run.chronicle.write_text("# My own diary\n")
    write_chronicle(run, now=T0 + 1000)
    write_chronicle(run, now=T0 + 1000)
    text = run.chronicle.read_text()
    assert text.count("# My own diary") == 1 and text.index(BY_HAND) < text.index("# My own diary")


@pytest.mark.parametrize("kept", [b"", "Erwärmt: 80°\n".encode(), "Erwärmt\n".encode("latin-1")])
def test_notes_are_kept_byte_by_byte_whatever_the_encoding_of_the_locale_and_of_the_person(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bytes
) -> None:
    monkeypatch.setattr(io, "text_encoding", lambda encoding, stack_level=2: encoding or "latin-1")
    run = write_run(tmp_path / "mine", *killed_once())
    run.chronicle.write_bytes(f"# Chronicle\n\n{BY_HAND}\n".encode() + kept)
    for later in (1000, 2000):
        write_chronicle(run, now=T0 + later)
        assert run.chronicle.read_bytes().partition(f"\n{BY_HAND}\n".encode())[2] == kept


@pytest.mark.parametrize("found", [f"# Chronicle\n\n{BY_HAND}", f"{BY_HAND}\n", f"# C\r\n{BY_HAND}\r\n"])
def test_the_line_above_the_notes_is_found_at_the_begin_and_at_the_end_of_a_file(
    tmp_path: Path, found: str
) -> None:
    run = write_run(tmp_path / "mine", *killed_once())
    run.chronicle.write_bytes(found.encode())
    for later in (1000, 2000):
        write_chronicle(run, now=T0 + later)
        text = run.chronicle.read_text()
        assert text.endswith(f"\n{BY_HAND}\n") and text.count("# Chronicle of mine") == 1 == text.count(
            BY_HAND
        )


def test_names_from_the_records_stay_text(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    operations[2] |= {
        "cause": HOSTILE,
        "summary": HOSTILE,
        "evidence": [HOSTILE, "````"],
        "gives_up": HOSTILE,
    }
    operations[2] |= {"culprit": {"host": HOSTILE, "rank": 0, "gpu": HOSTILE}, "remedy": HOSTILE}
    operations.append(operation(40, "note", text=HOSTILE, by=HOSTILE))
    events[-1]["reason"] = HOSTILE
    run = write_run(tmp_path / "mine", events, operations, bases)
    write_chronicle(run, now=T0 + 50)
    ours, _, _ = run.chronicle.read_text().partition(BY_HAND)
    kinds = {token.type for token in tokens(ours)}
    assert not kinds & {"html_block", "html_inline", "link_open", "image"}, kinds
    assert len(headings(ours)) == 4 and "Owned" not in headings(ours)
    assert "alert(1)" in ours
    # what GitHub makes links of by itself, outside of fenced blocks
    texts = [token.content for token in tokens(ours) if token.type == "inline"]
    assert len(texts) > 8 and not any(word in text for text in texts for word in ("http://", "www.", "me@"))


@given(st.text(st.sampled_from(string.printable + "é\u2028\u202e\x85"), max_size=60))
def test_any_text_stays_one_line_of_plain_text(words: str) -> None:
    quoted = {token.type for token in tokens(f"> before\n> {as_text(words)}\n> after")}
    assert quoted <= {"blockquote_open", "paragraph_open", "inline", "text", "text_special"} | {
        "softbreak",
        "paragraph_close",
        "blockquote_close",
    }
    parsed = tokens(f"- done: {as_text(words)}")
    assert {token.type for token in parsed} <= {
        "bullet_list_open",
        "list_item_open",
        "paragraph_open",
        "inline",
        "text",
        "text_special",
        "paragraph_close",
        "list_item_close",
        "bullet_list_close",
    }
    shown = "".join(token.content for token in parsed if token.type in ("text", "text_special"))
    assert (
        shown.removeprefix("done:").split()
        == "".join(character if character.isprintable() else " " for character in words).split()
    )


@given(st.lists(st.text(st.sampled_from("`~ab\n# <"), max_size=20), max_size=20))
def test_a_block_ends_where_it_should(lines: list[str]) -> None:
    parsed = tokens(f"{as_block(lines)}\n\nafter")
    assert parsed[0].type == "fence"
    assert [token.content for token in parsed if token.type == "text"] == ["after"]


@pytest.mark.parametrize("count", [1, 11, 12, 13, 14, 400])
def test_a_block_shows_its_first_lines_and_counts_the_others(count: int) -> None:
    _, *shown, _ = as_block(f"line {number}" for number in range(count)).splitlines()
    assert len(shown) <= 12
    further = re.fullmatch(r"… (\d+) further lines", shown[-1])
    first = shown[:-1] if further else shown
    assert first == [f"line {number}" for number in range(len(first))]
    assert len(first) + int(further[1] if further else 0) == count


def test_an_empty_note_and_a_missing_run_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "run").create()
    assert main(["note", str(run.path), " "]) == 2
    assert "empty" in capsys.readouterr().err
    assert main(["note", str(tmp_path / "no"), "x"]) == 1
    assert main(["note", str(run.path), "before the first start"]) == 0
    assert not run.chronicle.exists()
    assert json.loads(run.operations.read_text())["text"] == "before the first start"


def test_a_chronicle_has_the_name_of_its_run_from_within_the_run_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "mine", *killed_once())
    monkeypatch.chdir(run.path)
    write_chronicle(RunDirectory(Path()), now=T0 + 1000)
    assert run.chronicle.read_text().startswith("# Chronicle of mine\n")
