"""Writes the dashboard's page of runs as one HTML file that needs no server, to be kept or mailed."""

from __future__ import annotations

import hashlib
import re
import time
from base64 import b64encode
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from bloomery.operate.dashboard import panels
from bloomery.operate.dashboard.curves import DISCARDED, SMOOTH, Axis, DrawnCurve, curves
from bloomery.operate.dashboard.mesh_panel import mesh_panel
from bloomery.operate.dashboard.peer_panel import rounds
from bloomery.operate.dashboard.run_reader import RunReader
from bloomery.operate.dashboard.run_summary import RunSummarizer
from bloomery.operate.dashboard.step_columns import SPENT
from bloomery.operate.ledger.figures import PlannedRun

_AXES: tuple[Axis, ...] = ("step", "tokens", "time")
_STYLE = re.compile(r'<link rel="stylesheet" href="static/([^"]+)">')
_SCRIPT = re.compile(r'<script src="static/([^"]+)"></script>')


def saved_page(paths: Sequence[Path], *, points: int = 600, plan: PlannedRun | None = None) -> str:
    """Return the page of some runs as HTML that loads nothing: styles, scripts and figures are inside.

    points: about how many points a curve has at most, with its extremes. Journals are read whole, once.
    plan: what was forecast, which then stands beside what came.
    """
    readers = [RunReader(path).read_all() for path in paths]
    summarizers = [RunSummarizer(reader) for reader in readers]
    recorded = {
        "time": time.time(),
        "actions": False,
        "runs": [summarizer.summary() for summarizer in summarizers],
        "curves": [{axis: _all_curves(reader, axis, points) for axis in _AXES} for reader in readers],
        "panels": [
            _tables(reader, summarizer, plan) for reader, summarizer in zip(readers, summarizers, strict=True)
        ],
    }
    hashes: dict[str, list[str]] = {"style-src": [], "script-src": []}

    def style(match: re.Match[str]) -> str:
        return f"<style>{_hashed(hashes['style-src'], _static(match[1]))}</style>"

    def script(match: re.Match[str]) -> str:
        return f"<script>{_hashed(hashes['script-src'], _static(match[1]))}</script>"

    page = _SCRIPT.sub(script, _STYLE.sub(style, _static("index.html")))
    data = f'<script type="application/json" id="recorded">{_as_data(recorded)}</script>'
    page = page.replace("</main>", f"</main>\n{data}", 1)
    policy = "; ".join(
        ["default-src 'none'", "img-src data:", *(f"{kind} {' '.join(h)}" for kind, h in hashes.items())]
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{head}', 1)


def _all_curves(reader: RunReader, axis: Axis, points: int) -> list[DrawnCurve]:
    names: list[str] = []
    for name in reader.columns.names:
        if name.startswith(SPENT):
            names.append(name + SMOOTH)
        else:
            names += [name] if name in reader.columns.sparse else [name, name + SMOOTH, name + DISCARDED]
    return curves(reader, names, axis=axis, points=points)


def _tables(reader: RunReader, summarizer: RunSummarizer, plan: PlannedRun | None) -> dict[str, Any]:
    return {
        "events": panels.events_with_places(reader),
        "saves": panels.saves(reader, summarizer.recipe),
        "goodput": panels.goodput(reader, plan),
        "ranks": mesh_panel(reader, summarizer.recipe),
        "rounds": rounds(reader),
    }


def _as_data(recorded: object) -> str:
    """Return JSON in which nothing can end the element that holds it."""
    return msgspec.json.encode(recorded).decode().replace("<", "\\u003c").replace(">", "\\u003e")


def _hashed(hashes: list[str], text: str) -> str:
    hashes.append(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'")
    return text


def _static(name: str) -> str:
    return resources.files("bloomery.operate.dashboard").joinpath("static", name).read_text("utf-8")
