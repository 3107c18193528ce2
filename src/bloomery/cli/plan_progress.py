"""Writes what is left of a run, beside its plan, as text for a terminal of 100 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bloomery.cli.plan_tables import days_text, rows_text, section

if TYPE_CHECKING:
    from bloomery.plan.progress import RunProgress


def progress_text(progress: RunProgress) -> str:
    """Return what a run has done, what is left, and the plan beside what was measured."""
    from bloomery.plan.progress import figures

    of_peer = f" of this peer, one of {progress.peers}" if progress.peers > 1 else ""
    rows = [
        ["samples", f"{progress.consumed_samples:,} of {progress.total_samples:,}"],
        ["tokens", f"{progress.consumed_tokens:,} of {progress.total_tokens:,}"],
        ["steps", f"{progress.step:,} of {progress.total_steps:,}{of_peer}"],
        [
            "speed",
            f"{progress.samples_per_s:,.2f} samples/s, {progress.step_s:.3g} s/step (median of the last "
            f"{progress.steps_measured})",
        ],
        ["left", f"{days_text(progress.days_left)} with {progress.hours_per_day:g} hours a day"],
    ]
    parts = [
        f"{progress.run}: {progress.consumed_samples / progress.total_samples:.1%} done",
        rows_text(rows, left=(0, 1), head=False),
    ]
    if progress.elsewhere:
        table = [["accelerators", "left", ""]]
        table += [
            [
                f"{estimate.accelerators:,}",
                "-" if estimate.days_left is None else days_text(estimate.days_left),
                estimate.note,
            ]
            for estimate in progress.elsewhere
        ]
        parts.append(section("on other numbers of accelerators", rows_text(table, left=(2,))))
    table = [["figure", "planned", "measured", "measured/planned"]]
    table += [[name, planned, measured, ratio] for name, planned, measured, ratio in figures(progress)]
    parts.append(section(f"planned (on {progress.hardware}) against measured", rows_text(table, left=(0,))))
    return "\n\n".join(parts)
