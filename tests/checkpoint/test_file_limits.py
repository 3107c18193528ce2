"""Data files at their limits: as large as allowed, already there, and named in a message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bloomery.checkpoint.format.data_file import HashingWriter, lay_out, shortened
from bloomery.checkpoint.format.state import whole


@pytest.mark.parametrize(("file_bytes", "files"), [(24, [3]), (23, [2, 1]), (16, [2, 1]), (15, [1, 1, 1])])
def test_a_file_takes_tensors_up_to_the_bytes_that_are_allowed(file_bytes: int, files: list[int]) -> None:
    entries = [whole(f"model.{name}", torch.ones(2)) for name in "abc"]
    laid_out = lay_out(entries, rank=0, world=1, file_bytes=file_bytes)
    assert [len(file.entries) for file in laid_out] == files


def test_a_file_that_is_there_already_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"precious")
    with pytest.raises(FileExistsError):
        HashingWriter(tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"precious"


@pytest.mark.parametrize(("count", "more"), [(0, ""), (9, ""), (10, ""), (11, " and 1 more")])
def test_ten_names_are_given_and_the_rest_counted(count: int, more: str) -> None:
    names = [f"n{number}" for number in range(count)]
    assert shortened(names) == (", ".join(names[:10]) or "no tensor") + more
