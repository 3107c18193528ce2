from __future__ import annotations

from pathlib import Path

import pytest

from bloomery.errors import CheckpointError
from bloomery.interchange.directories import partial_directory


def test_a_second_writer_is_refused_and_leaves_what_the_first_wrote(tmp_path: Path) -> None:
    with partial_directory(tmp_path / "x") as first:
        (first / "weights").write_text("half")
        with (
            pytest.raises(
                CheckpointError, match=r"(?s)Another process writes to .*x\.partial now.*Wait for it"
            ),
            partial_directory(tmp_path / "x"),
        ):
            pass
        assert (first / "weights").read_text() == "half"
        first.rename(tmp_path / "x")
    assert (tmp_path / "x" / "weights").read_text() == "half"


def test_what_a_killed_writer_left_is_removed_and_a_failure_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.partial" / "deep").mkdir(parents=True)
    (tmp_path / "x.partial" / "old").touch()
    with pytest.raises(RuntimeError), partial_directory(tmp_path / "x") as partial:
        assert list(partial.iterdir()) == []
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_what_a_killed_writer_left_goes_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").touch()
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.partial" / "link").symlink_to(tmp_path / "elsewhere")
    with partial_directory(tmp_path / "x") as partial:
        assert list(partial.iterdir()) == []
    assert (tmp_path / "elsewhere" / "kept").exists()


def test_a_writer_that_is_done_keeps_no_lock_and_no_file_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(2):
        with partial_directory(tmp_path / "x"):
            pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before
