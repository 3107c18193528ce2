"""How long the files of states are open that a peer serves, or cannot serve."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.diloco.served_states import make_checkpoint, open_files_of

from bloomery.checkpoint.format.manifest import INDEX
from bloomery.errors import CheckpointError, PeerError
from bloomery.state_transfer import served_states
from bloomery.state_transfer.served_states import READ_S, OpenFile, ServedStates


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path, own=1, size=1000)


def test_a_state_that_is_no_longer_served_is_open_until_its_last_reader_has_ended(checkpoint: Path) -> None:
    states = ServedStates()
    states.put("ab12", checkpoint, round=1)
    files = sorted(path.name for path in checkpoint.iterdir())
    with states.reading("ab12", INDEX) as first:
        with states.reading("ab12", INDEX) as second:
            states.keep([])
            assert states.is_empty and states.about("ab12") is None
            with states.reading("ab12", INDEX) as third:
                assert third is None
            content = (checkpoint / INDEX).read_bytes()
            assert os.pread(second.descriptor, second.bytes, 0) == content
        assert open_files_of(checkpoint) == files
        assert os.pread(first.descriptor, first.bytes, 0) == content
    assert open_files_of(checkpoint) == []


def test_states_that_are_kept_are_served_and_others_are_closed(checkpoint: Path) -> None:
    states = ServedStates()
    for digest in ("ab12", "cd34"):
        states.put(digest, checkpoint, round=1)
    states.keep(["cd34", "ef56"])
    assert states.about("ab12") is None and states.about("cd34") == {"name": checkpoint.name, "round": 1}
    assert len(open_files_of(checkpoint)) == len(list(checkpoint.iterdir()))
    states.clear()
    assert open_files_of(checkpoint) == [] and states.is_empty


def test_a_state_that_a_newcomer_has_just_asked_for_stays_until_its_first_block(checkpoint: Path) -> None:
    now = 100.0
    states = ServedStates(clock=lambda: now)
    states.put("ab12", checkpoint, round=1)
    assert states.about("ab12") is not None
    now += READ_S - 1.0
    for number in (2, 3):
        states.put(f"cd{number}", checkpoint, round=number)
    with states.reading("ab12", INDEX) as file:
        assert file is not None
    states.clear()


@pytest.mark.parametrize("wrong", ["a link", "missing", "too short", "too long"])
def test_of_a_checkpoint_that_cannot_be_served_no_file_stays_open(checkpoint: Path, wrong: str) -> None:
    path = next(path for path in checkpoint.iterdir() if path.name.startswith("optim"))
    content = path.read_bytes()
    path.unlink()
    if wrong == "a link":
        path.symlink_to("/dev/null")
    elif wrong == "too short":
        path.write_bytes(content[:-1])
    elif wrong == "too long":
        path.write_bytes(content + b"x")
    states = ServedStates()
    with pytest.raises(CheckpointError):
        states.put("ab12", checkpoint, round=1)
    assert open_files_of(checkpoint) == [] and states.is_empty


def test_a_digest_that_is_none_names_no_state(checkpoint: Path) -> None:
    with pytest.raises(PeerError, match="no digest of a state") as refused:
        ServedStates().put("../x", checkpoint, round=1)
    assert "mistake in bloomery" in refused.value.remedy


def served_of(states: ServedStates, *digests: str) -> list[str]:
    """Which of these states are served, which is no sign that they are fetched."""
    return [digest for digest in digests if digest in states._states]


def test_a_state_that_is_put_again_is_the_newest_once_more(checkpoint: Path) -> None:
    states = ServedStates(clock=lambda: 0.0)
    for digest in ("a", "b", "a", "c"):
        states.put(digest, checkpoint, round=1)
    assert served_of(states, "a", "b", "c") == ["a", "c"]
    assert len(open_files_of(checkpoint)) == 2 * len(list(checkpoint.iterdir()))
    states.clear()


def test_of_two_that_put_a_state_at_once_one_leaves_no_file_open(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, opened = ServedStates(), served_states._opened

    def meanwhile(directory: Path) -> dict[str, OpenFile]:
        monkeypatch.setattr(served_states, "_opened", opened)
        states.put("ab12", checkpoint, round=1)
        return opened(directory)

    monkeypatch.setattr(served_states, "_opened", meanwhile)
    states.put("ab12", checkpoint, round=1)
    assert len(open_files_of(checkpoint)) == len(list(checkpoint.iterdir()))
    states.clear()
    assert open_files_of(checkpoint) == []


@pytest.mark.parametrize(("since_s", "is_served"), [(READ_S - 1.0, True), (READ_S, False)])
def test_a_state_counts_as_fetched_for_a_minute_from_the_end_of_its_last_read(
    checkpoint: Path, since_s: float, is_served: bool
) -> None:
    now = 100.0
    states = ServedStates(clock=lambda: now)
    states.put("a", checkpoint, round=1)
    with states.reading("a", INDEX):
        now += 1000.0
    now += since_s
    for digest in ("b", "c"):
        states.put(digest, checkpoint, round=2)
    assert served_of(states, "a", "b", "c") == (["a"] if is_served else []) + ["b", "c"]
    states.clear()


def test_averages_are_those_of_the_moment_in_which_they_were_told(tmp_path: Path) -> None:
    states, told = ServedStates(), {"ab12": tmp_path}
    states.serve_averages(told)
    told.clear()
    assert states.is_to_come("ab12", "average-0") and not states.is_to_come("ab12", INDEX)
    assert not states.is_empty
    (tmp_path / "ab12.٣").write_bytes(b"x")
    with states.reading("ab12", "average-٣") as found:
        assert found is None, "a rank is written in ASCII digits"
    (tmp_path / "ab12.0").write_bytes(b"of rank 0")
    with states.reading("ab12", "average-0") as found:
        assert found is not None and os.pread(found.descriptor, 99, 0) == b"of rank 0"
        assert open_files_of(tmp_path) == ["ab12.0"]
    assert open_files_of(tmp_path) == []


def test_a_state_of_which_a_block_takes_longer_than_a_minute_is_served_meanwhile(checkpoint: Path) -> None:
    now = 100.0
    states = ServedStates(clock=lambda: now)
    states.put("a", checkpoint, round=1)
    with states.reading("a", INDEX):
        now += 2 * READ_S
        for digest in ("b", "c"):
            states.put(digest, checkpoint, round=2)
        assert served_of(states, "a", "b", "c") == ["a", "b", "c"]
    states.clear()


def test_of_older_states_that_are_fetched_the_oldest_stays(checkpoint: Path) -> None:
    states = ServedStates(clock=lambda: 0.0)
    for digest in ("a", "b", "c", "d"):
        states.put(digest, checkpoint, round=1)
        assert states.about(digest) is not None
    assert served_of(states, "a", "b", "c", "d") == ["a", "c", "d"]
    states.clear()
