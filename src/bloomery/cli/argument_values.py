"""Functions that parse or check values of the command line, most of them for argparse's `type=`."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from bloomery.config.setting import LARGEST_COUNT
from bloomery.errors import UsageError

PICTURES = (".png", ".svg", ".pdf")
MOST = LARGEST_COUNT
"""What a recipe takes at most for a whole number."""


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    return whole(1)(text)


def not_negative(text: str) -> int:
    """Parse a whole number of at least 0."""
    return whole(0)(text)


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """Return a function that parses a whole number from `least` to `most`, both included."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ArgumentTypeError(f"{text!r} is not a whole number of at least {least:,}")
        if int(text) > most:
            raise ArgumentTypeError(f"{text} is too much: at most {most:,}")
        return int(text)

    return parse


def amount(what: str, *, above: float = -math.inf, least: float = -math.inf) -> Callable[[str], float]:
    """Return a function that parses a finite number.

    what: the number in words, for the message, such as "a number of seconds above 0".
    above, least: the number is above the one and at least the other.
    """

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number <= above or number < least:
            raise ArgumentTypeError(f"{text!r} is not {what}")
        return number

    return parse


def read_endpoint(endpoint: str) -> tuple[str, int]:
    """Return host and port of --rdzv. Raises UsageError."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            f"--rdzv {endpoint} is not HOST:PORT.",
            remedy="Name the first node and a free port there, the same on all nodes: --rdzv node-1:29400",
        )
    return host, int(port)


def pair_prefix(text: str) -> Path:
    """Parse the path of a .bin/.idx pair without its ending, which has a name of its own."""
    path = Path(text)
    if path.name in ("", ".."):
        raise ArgumentTypeError(f"{text!r} names no file: give a path without an ending, such as data/train")
    return path


def picture_file(text: str) -> Path:
    """Parse the path of a picture to write. Its ending says the format, and its directory exists."""
    return _file_to_write(text, PICTURES)


def page_file(text: str) -> Path:
    """Parse the path of a page to write, which has an ending of its own, so that it replaces no recipe."""
    return _file_to_write(text, (".html", ".htm"))


def json_file(text: str) -> Path:
    """Parse the path of a .json to write, which replaces no file of another kind, and none of a run."""
    path = Path(text)
    if path.is_dir() or not path.name:
        raise ArgumentTypeError(f"{text!r} is a directory: name a file that ends in .json")
    if path.exists() and path.suffix != ".json":
        raise ArgumentTypeError(f"{path} is there already and is no .json: name another file")
    if (path.parent / "prepared.json").exists():
        raise ArgumentTypeError(
            f"{path.parent} is the data of a run, which keeps its own: name another place"
        )
    return path


def _file_to_write(text: str, endings: tuple[str, ...]) -> Path:
    path = Path(text)
    if path.suffix.lower() not in endings:
        raise ArgumentTypeError(f"{text!r} ends in none of {', '.join(endings)}")
    if not path.parent.is_dir():
        raise ArgumentTypeError(f"{path} cannot be written: there is no directory {path.parent}")
    if path.is_dir():
        raise ArgumentTypeError(f"{path} is a directory: name a file")
    return path
