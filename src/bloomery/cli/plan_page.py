"""Writes a plan as one self-contained HTML page, with inline SVG drawings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import TYPE_CHECKING

from bloomery.cli.plan_tables import date_after, days_text, plan_text, start_date

if TYPE_CHECKING:
    from bloomery.plan.overview import Plan

GIB = 2**30
WIDTH, HEIGHT = 900, 240
COLOURS = {
    "weights": "#4269d0",
    "gradients": "#efb118",
    "master": "#97bbf5",
    "optimizer": "#6cc5b0",
    "activations": "#ff725c",
    "logits": "#a463f2",
    "buffers": "#9c6b4e",
    "reserved": "#9498a0",
}
STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --paper: #ffffff; --soft: #6b7078; --line: #d9dbe0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ec; --paper: #17181b; --soft: #9aa0a8; --line: #3a3d44; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem; }
p.lead { color: var(--soft); margin-top: .2rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .6rem; }
dl div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .8rem; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; font-size: 1.15rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .soft { fill: var(--soft); } svg .line { stroke: var(--line); }
svg .curve { stroke: #4269d0; fill: none; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .6rem; text-align: right; }
td:last-child, th:last-child { text-align: left; } th { color: var(--soft); font-weight: normal; }
tr { border-bottom: 1px solid var(--line); } li { margin: .3rem 0; }
pre { font-size: 12px; overflow-x: auto; border: 1px solid var(--line); border-radius: .5rem;
  padding: .8rem; }
.key { display: inline-block; margin-right: 1rem; } .key i { display: inline-block; width: .8em; height: .8em;
  border-radius: .2em; margin-right: .3em; }
"""


def page(plan: Plan, *, start: str | None) -> str:
    """Return the HTML page of a plan. start: date of the first step; None: the calendar shows days only."""
    draft = plan.draft
    title = f"{draft.request.recipe.run.name} on {draft.work.layout.world} × {draft.request.hardware.name}"
    warnings = "".join(f"<li>{escape(warning)}</li>" for warning in plan.warnings) or "<li>none</li>"
    notes = " ".join(escape(note) for note in plan.assumptions)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<p class="lead">{escape(str(draft.work.layout))}, micro-batch {draft.work.micro_batch},
recompute {escape(draft.request.recipe.train.recompute)}. {notes}</p>
{_headline(plan)}
<h2>Memory of one rank, by pipeline stage</h2>
{_memory_bars(plan)}
<h2>Ramp-up: global batch over time</h2>
{_ramp_curve(plan)}
<h2>Calendar</h2>
{_calendar(plan, start)}
<h2>Warnings</h2>
<ul>{warnings}</ul>
<h2>Everything</h2>
<pre>{escape(plan_text(plan, start=start))}</pre>
</body></html>
"""


def _headline(plan: Plan) -> str:
    speed, whole, draft = plan.speed, plan.whole, plan.draft
    peak, room = draft.peak_bytes / GIB, draft.room_bytes / GIB
    cards = {
        "fits": f"{'yes' if plan.fits else 'NO'}, {peak:.1f} of {room:.0f} GiB",
        "step": f"{speed.step_low_s:.3g} to {speed.step_high_s:.3g} s",
        "bottleneck": speed.bottleneck,
        "MFU": f"{speed.mfu:.1%}",
        "hardware TFLOPs each": f"{speed.hardware_teraflops:.0f}",
        "tokens/s": f"{speed.tokens_per_s:,.0f}",
        "run": f"{days_text(whole.days_low)} to {days_text(whole.days_high)}",
        "accelerator-hours": f"{whole.accelerator_hours:,.0f}",
    }
    shown = [f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in cards.items()]
    return f"<dl>{''.join(shown)}</dl>"


def _memory_bars(plan: Plan) -> str:
    draft = plan.draft
    width, row, left = 900.0, 22, 78
    most = max(draft.peak_bytes, draft.room_bytes) * 1.08
    scale = (width - left) / most
    height = row * len(draft.memory) + 26
    parts = []
    for index, memory in enumerate(draft.memory):
        x, y = float(left), index * row
        stage = draft.stages[index]
        parts.append(f'<text x="0" y="{y + 15}">{index}: {stage.blocks} blocks</text>')
        for name, value in asdict(memory).items():
            wide = value * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{wide:.1f}" height="{row - 6}" fill="{COLOURS[name]}">'
                f"<title>{name}: {value / GIB:.2f} GiB</title></rect>"
            )
            x += wide
        parts.append(f'<text x="{x + 5:.1f}" y="{y + 15}">{memory.total / GIB:.1f}</text>')
    edge = left + draft.room_bytes * scale
    parts.append(
        f'<line class="line" x1="{edge:.1f}" x2="{edge:.1f}" y1="0" y2="{height - 22}" stroke-width="2"/>'
    )
    limit = f"{draft.room_bytes / GIB:.0f} GiB"
    parts.append(_soft(edge, height - 6, limit, anchor="end"))
    key = "".join(
        f'<span class="key"><i style="background:{colour}"></i>{name}</span>'
        for name, colour in COLOURS.items()
    )
    return f'<p>{key}</p><svg viewBox="0 0 {width:.0f} {height}" role="img">{"".join(parts)}</svg>'


def _ramp_curve(plan: Plan) -> str:
    """Draw the global batch over days, for 1.5 times the duration of the ramp-up."""
    course = plan.draft.course
    days = sum(stretch.seconds for stretch in course[:-1]) / 86_400
    stairs = _staircase([(stretch.seconds / 86_400, stretch.global_batch) for stretch in course[:-1]])
    end = max(days * 1.5, 1e-9) if len(course) > 1 else course[-1].seconds / 86_400
    stairs += [(days, course[-1].global_batch), (end, course[-1].global_batch)]
    top = max(batch for _, batch in stairs)
    drawn = " ".join(f"{_x(day / end):.1f},{_y(batch / top):.1f}" for day, batch in stairs)
    unit, of_day = ("days", 1.0) if end > 2 else ("hours", 24.0) if end * 24 > 2 else ("minutes", 1440.0)
    marks = [
        _soft(_x(share), HEIGHT - 10, f"{share * end * of_day:.3g}{f' {unit}' if share == 1 else ''}")
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    for share in (0, 0.5, 1):
        marks.append(_soft(_x(0) - 6, _y(share) + 4, f"{share * top:,.0f}", anchor="end"))
        marks.append(f'<path class="line" d="M{_x(0):.0f} {_y(share):.0f}H{_x(1):.0f}"/>')
    curve = f'<polyline class="curve" stroke-width="2" points="{drawn}"/>'
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(marks)}{curve}</svg>'


def _x(share: float) -> float:
    return 60 + share * (WIDTH - 100)


def _y(share: float) -> float:
    return HEIGHT - 30 - share * (HEIGHT - 50)


def _soft(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text class="soft" text-anchor="{anchor}" x="{x:.1f}" y="{y:.1f}">{text}</text>'


def _staircase(lengths: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return the corners (position, level) of a staircase whose steps are (length, level)."""
    at, corners = 0.0, []
    for length, level in lengths:
        corners += [(at, level), (at + length, level)]
        at += length
    return corners


def _calendar(plan: Plan, start: str | None) -> str:
    day = start_date(start)
    head = ["day", *(["date"] if day else []), "step", "sample", "tokens", "what"]
    rows = [
        [
            f"{event.days:.1f}",
            *([date_after(day, event.days)] if day else []),
            f"{event.step:,}",
            f"{event.sample:,}",
            f"{event.tokens:,}",
            event.what,
        ]
        for event in plan.calendar
    ]
    lines = ["<tr>" + "".join(f"<th>{cell}</th>" for cell in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"
