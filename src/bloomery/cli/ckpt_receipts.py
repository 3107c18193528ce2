"""Receipts for `bloomery ckpt show`: what was checked at each resume from a checkpoint, and the result."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bloomery.checkpoint.format.source import Source
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory


def receipts_of(source: Source) -> list[dict[str, Any]]:
    """Return the receipts of the resumes from a checkpoint; [] for one outside a run directory."""
    directory = Path(source.place())
    if directory.parent.name != "checkpoints":
        return []
    journal = RunDirectory(directory.parent.parent).journal()
    return [
        event
        for event in read_journal(journal)
        if event["event"] == "receipt" and event["checkpoint"] == directory.name
    ]


def receipt_words(receipt: Mapping[str, Any]) -> str:
    """Return a receipt as one line."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(receipt["time"]))
    begin = f"resumed {when} on {receipt['ranks']} rank{'s' if receipt['ranks'] != 1 else ''}: "
    if not receipt["kept"]:
        return f"{begin}REFUSED, {'; '.join(receipt['broken'])}"
    changed = [
        words
        for name, words in (("settings_changed", "other settings"), ("mixture_changed", "another mixture"))
        if receipt[name]
    ]
    samples = "another mixture" if receipt["mixture_changed"] else "same next samples"
    parts = [samples, "same optimizer state", f"learning rate {receipt['learning_rate']:.4g}"]
    if "other settings" in changed:
        parts.append("settings of the learning rate changed")
    loss = f"loss {receipt['loss']}"
    if receipt["same_bits"] is not None:
        loss += (
            " as when the step was made before"
            if receipt["same_bits"]
            else (f", {receipt['loss_made_before']} when the step was made before")
        )
    elif receipt["loss_saved"] is not None:
        loss += f" after {receipt['loss_saved']}"
    return f"{begin}{', '.join([*parts, loss])} ({receipt['promised_by']})"


def about_words(value: object) -> object:
    """Return a value of a manifest's `about` as text; of a promise, all its fields."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return value
