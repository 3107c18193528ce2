"""Pieces of growing files: they end with whole lines and records, and are the file, one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operate.sync.conftest import record

from bloomery.operate.sync import pieces
from bloomery.operate.sync.pieces import file_of, new_pieces, piece_key, pieces_by_file


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 64)
    monkeypatch.setattr(pieces, "_LONGEST_RECORD", 1024)


def sync(path: Path, held: dict[int, bytes]) -> int:
    """Send to a dict what is new, and return the bytes that were sent."""
    sent = 0
    for piece in new_pieces(path, [len(held[number]) for number in sorted(held)]):
        held[piece.number], sent = piece.content, sent + len(piece.content)
    return sent


@given(
    lines=st.lists(st.binary(max_size=90).filter(lambda line: b"\n" not in line), max_size=30),
    seed=st.randoms(),
)
def test_whatever_is_appended_the_pieces_are_the_whole_lines_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], seed: object
) -> None:
    path = tmp_path_factory.mktemp("lines") / "journal.jsonl"
    path.write_bytes(b"")
    held: dict[int, bytes] = {}
    for line in lines:
        text = line + b"\n"
        cut = seed.randrange(len(text) + 1)  # type: ignore[attr-defined]  # the writer is seen in mid-line
        for part in (text[:cut], text[cut:]):
            with path.open("ab") as file:
                file.write(part)
            sync(path, held)
    content = b"".join(held[number] for number in sorted(held))
    assert content == path.read_bytes()
    assert all(piece.endswith(b"\n") for piece in held.values())


def test_records_of_tensorboard_are_never_cut_and_damage_is_sent_as_it_is(tmp_path: Path) -> None:
    path, held = tmp_path / "events.out.tfevents.1", dict[int, bytes]()
    records = [record(bytes([65 + number]) * (number * 7)) for number in range(12)]
    for number in range(len(records)):
        path.write_bytes(b"".join(records[: number + 1])[:-3])  # the newest is not whole yet
        sync(path, held)
    assert b"".join(held.values()) == b"".join(records[:-1])
    for piece in held.values():
        begins = [b"".join(records[:number]) for number in range(len(records))]
        assert any(b"".join(records).startswith(begin + piece) for begin in begins)
    path.write_bytes(b"".join(records) + b"\xff" * 40)
    sync(path, held)
    sent = b"".join(held.values())
    assert path.read_bytes().startswith(sent) and len(sent) > path.stat().st_size - 12, "but for a header"


def test_each_look_sends_the_new_bytes_and_less_than_one_piece_more(tmp_path: Path) -> None:
    path, held = tmp_path / "log", dict[int, bytes]()
    for number in range(60):
        with path.open("ab") as file:
            file.write(b"%08d\n" % number)
        assert sync(path, held) <= 9 + 64
    assert sync(path, held) == 0


def test_a_file_that_became_shorter_is_sent_anew(tmp_path: Path) -> None:
    path, held = tmp_path / "log", dict[int, bytes]()
    path.write_bytes(b"old line\n" * 30)
    sync(path, held)
    path.write_bytes(b"new line\n" * 2)
    assert [piece.content for piece in new_pieces(path, [len(piece) for piece in held.values()])] == [
        b"new line\n" * 2
    ]


def test_nothing_is_sent_of_a_file_whose_newest_piece_lost_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"1234567\n" * 9)  # as long as the line of one piece that it replaces
    assert list(new_pieces(path, [72])) == []


def test_pieces_are_told_from_files_by_the_file_that_is_there() -> None:
    sizes = {"logs/a": 5, "logs/a.000001": 6, "logs/a.000003": 1, "logs/vm.000001": 3}
    assert pieces_by_file(sizes) == {"logs/a": [5, 6], "logs/vm.000001": [3]}
    assert file_of(piece_key("logs/a", 12)) == "logs/a" == piece_key("logs/a", 0)
