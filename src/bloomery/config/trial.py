"""Lists the settings by which a trial of a recipe stays within its own directory."""

from __future__ import annotations

WITHIN_ITS_DIRECTORY = (
    "checkpoint.url=''",
    "backup.url=''",
    "second_backup.url=''",
    "sync.place=''",
    "sync.checkpoints=false",
    "log.trackers=[]",
)
"""Overrides, after all others, of a drill or a scenario. With the recipe's own places it would go on from the
backup of the real run, whose name it has, and the real run later from the trial's checkpoints."""
