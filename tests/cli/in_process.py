"""Runs commands in the process of the test."""

from __future__ import annotations

from bloomery.cli import main


def status_of(*words: str) -> int:
    """Return the exit status of a command; argparse ends the process for words that it refuses."""
    try:
        return main(words)
    except SystemExit as ended:
        return int(ended.code or 0)
