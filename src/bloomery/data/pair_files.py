"""Names the files of a pair: tokens, index, and the seal with its sums."""

from __future__ import annotations

from pathlib import Path


def bin_path(prefix: Path) -> Path:
    """Return the path of a pair's token file."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the path of a pair's index."""
    return prefix.with_name(prefix.name + ".idx")


def sums_path(prefix: Path) -> Path:
    """Return the path of the checksums of a pair's blocks and pages."""
    return prefix.with_name(prefix.name + ".seal.sums")


def seal_path(prefix: Path) -> Path:
    """Return the path of a pair's seal, which describes the pair and the file of its checksums."""
    return prefix.with_name(prefix.name + ".seal.json")


PARTS = {".bin": bin_path, ".idx": idx_path, ".seal.sums": sums_path, ".seal.json": seal_path}
"""Where each file of a sealed pair lies, in the order in which the files get their names."""
