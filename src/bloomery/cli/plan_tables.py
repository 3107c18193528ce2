"""Writes plans, layout searches and run progress as text for a terminal of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import date, timedelta
from typing import TYPE_CHECKING

from bloomery.cli.tables import COLUMNS, table_text
from bloomery.errors import ConfigError, Mistake
from bloomery.plan.checkpoint_plan import lost_text
from bloomery.plan.parameters import proportions
from bloomery.plan.timeline import last_step_words, ramp_up_cost

if TYPE_CHECKING:
    from bloomery.plan.overview import Plan
    from bloomery.plan.peer_round import Round
    from bloomery.plan.search import SearchResult
    from bloomery.plan.timeline import Stretch

INDENT = "  "
RAMP_ROWS = 9
MOST_STAGES = 16
SHOWN_LAYOUTS = 20
GIB = 2**30


def plan_text(plan: Plan, *, start: str | None = None) -> str:
    """Return the whole plan as text. start: date of the first step, for the calendar; None: days only."""
    parts = [
        _heading(plan),
        section("parameters", _parameters(plan)),
        section("memory of one rank, GiB", _memory(plan)),
        section("one step of the full batch", _step(plan)),
        section("sent in one step", _traffic(plan)),
        section("the run, stretch by stretch", _ramp(plan.draft.course)),
        section("the whole run", _whole(plan)),
        section("checkpoints", _checkpoints(plan)),
        section("calendar", _calendar(plan, start)),
    ]
    if plan.between_peers:
        parts.insert(5, section("between peers", _between(plan.between_peers)))
    if plan.warnings:
        parts.append(section("warnings", "\n".join(_wrapped(warning) for warning in plan.warnings)))
    return "\n\n".join(parts)


def search_text(result: SearchResult) -> str:
    """Return the ranked layouts as a table, with how many layouts do not fit and why."""
    rows = [["", "layout", "micro", "recompute", "s/step", "MFU", "GiB", "loses by"]]
    for number, layout in enumerate(result.ranked[:SHOWN_LAYOUTS], 1):
        rows.append(
            [
                str(number),
                str(layout.layout) + ("·SP" if layout.layout.sequence else ""),
                str(layout.micro_batch),
                layout.recompute,
                f"{layout.step.seconds:.2f}",
                f"{layout.mfu:.1%}",
                f"{layout.memory_bytes / GIB:.1f}",
                layout.reason,
            ]
        )
    more = len(result.ranked) - SHOWN_LAYOUTS
    lines = [
        f"{result.recipe} on {result.accelerators} × {result.hardware}: {len(result.ranked)} layouts fit, "
        f"{result.too_large} do not fit, {result.indivisible} do not divide",
        "",
        rows_text(rows, left=(1, 3, 7)),
    ]
    if more > 0:
        lines.append(f"and {more} more: --json lists all")
    if result.nearest:
        lines += ["", _wrapped(result.nearest)]
    return "\n".join(lines)


def _heading(plan: Plan) -> str:
    draft = plan.draft
    layout, request = draft.work.layout, draft.request
    layout_text = [
        f"tensor {layout.tensor}" + (" with sequence" if layout.sequence else ""),
        f"pipeline {layout.pipeline}"
        + (f" ({layout.schedule}, {layout.chunks} chunks)" if layout.chunks > 1 else ""),
        f"data {layout.data}",
        f"ZeRO {layout.zero}",
        f"micro-batch {draft.work.micro_batch}",
        f"recompute {request.recipe.train.recompute}",
    ]
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines = [
        f"{request.recipe.run.name} on {layout.world} × {request.hardware.name} ({layout.nodes} nodes): "
        f"{verdict}, "
        f"{plan.speed.step_low_s:.3g} to {plan.speed.step_high_s:.3g} s a step, "
        f"{days_text(plan.whole.days_low)} to {days_text(plan.whole.days_high)}",
        f"  {', '.join(layout_text)}",
    ]
    lines = [textwrap.fill(line, COLUMNS, subsequent_indent="  ") for line in lines]
    return "\n".join([*lines, *(_wrapped(assumption) for assumption in plan.assumptions)])


def _parameters(plan: Plan) -> str:
    count = plan.draft.parameters
    block = count.block
    rows = [
        ["embedding", f"{count.embedding:,}", ""],
        ["positions", f"{count.positions:,}", ""],
        ["embedding norm", f"{count.embedding_norm:,}", ""],
        [
            f"{count.layers} blocks",
            f"{count.layers * block.total:,}",
            f"each {block.total:,}: attention {block.attention:,}, MLP {block.mlp:,}",
        ],
        ["final norm", f"{count.final_norm:,}", ""],
        ["head", f"{count.head:,}", "" if count.head else "shares the embedding's"],
        ["total", f"{count.total:,}", ""],
        *(
            [
                shape.name,
                f"{shape.ratio:.0f}",
                f"published: {shape.lowest_ratio:.0f} to {shape.highest_ratio:.0f}",
            ]
            for shape in proportions(plan.draft.request.recipe.model)
        ),
    ]
    rows = [row for row in rows if row[1] != "0" or row[0] in ("head",)]
    return rows_text(rows, left=(0, 2), head=False)


def _memory(plan: Plan) -> str:
    draft = plan.draft
    names = ["weights", "gradients", "master", "optimizer", "activations", "logits", "buffers", "reserved"]
    short = {"gradients": "grads", "optimizer": "optim", "activations": "activ", "reserved": "other"}
    rows = [["stage", "blocks", *(short.get(name, name) for name in names), "total"]]
    for index, memory in enumerate(draft.memory):
        if (
            len(draft.memory) > MOST_STAGES
            and 3 <= index < len(draft.memory) - 2
            and index != draft.worst_stage
        ):
            if index == 3:
                rows.append(["…", *[""] * (len(names) + 2)])
            continue
        values, stage = asdict(memory), draft.stages[index]
        ends = ("e+" if stage.has_embedding else "") + str(stage.blocks) + ("+h" if stage.has_head else "")
        mark = " ◂" if index == draft.worst_stage else ""
        shown = [f"{values[name] / GIB:.2f}" for name in names]
        rows.append([str(index), ends, *shown, f"{memory.total / GIB:.2f}{mark}"])
    part = max(asdict(draft.memory[draft.worst_stage]).items(), key=lambda item: item[1])[0]
    peak = f"peak {draft.peak_bytes / GIB:.1f} of {draft.room_bytes / GIB:.1f} GiB"
    return f"{rows_text(rows)}\n{peak} on stage {draft.worst_stage}, most of it {part}"


def _step(plan: Plan) -> str:
    speed, step = plan.speed, plan.draft.course[-1].step
    parts = {
        "compute": step.compute_s,
        "memory": step.memory_s,
        "TP": step.tensor_s,
        "PP bubble": step.pipeline_bubble_s,
        "PP transfer": step.pipeline_transfer_s,
        "DP": step.data_parallel_s,
        "update": step.update_s,
        "waiting": step.waiting_s,
        "data": step.data_s,
    }
    shares = ", ".join(
        f"{name} {value / step.seconds:.0%}" for name, value in parts.items() if value / step.seconds >= 0.005
    )
    low, high = speed.hardware_teraflops_range
    model_low, model_high = speed.model_teraflops_range
    rows = [
        ["time", f"{speed.step_s:.3g} s, between {speed.step_low_s:.3g} and {speed.step_high_s:.3g}"],
        ["goes to", shares],
        ["bottleneck", speed.bottleneck],
        [
            "hardware",
            f"{speed.hardware_teraflops:.1f} TFLOPs each ({low:.0f} to {high:.0f}), {speed.hfu:.1%} of the "
            f"peak",
        ],
        [
            "model",
            f"{speed.model_teraflops:.1f} TFLOPs each ({model_low:.0f} to {model_high:.0f}), MFU "
            f"{speed.mfu:.1%}",
        ],
        [
            "speed",
            f"{speed.tokens_per_s:,.0f} tokens/s, {speed.samples_per_s:,.2f} samples/s, "
            f"{speed.tokens_per_s_per_accelerator:,.0f} tokens/s each",
        ],
    ]
    return rows_text(rows, left=(0, 1), head=False)


def _traffic(plan: Plan) -> str:
    traffic = plan.traffic
    rows = [["axis", "calls of a rank", "busiest rank", "all ranks"]]
    for name in ("tensor", "pipeline", "data", "embedding", "world"):
        sent = (_bytes(getattr(traffic, f"{whose}{name}_bytes")) for whose in ("", "all_"))
        rows.append([name, f"{getattr(traffic, f'{name}_calls'):,}", *sent])
    return rows_text(rows, left=(0,))


def _between(peers: Round) -> str:
    took = f"{peers.inner_steps} inner steps, {peers.inner_s / 60:.1f} min, then {peers.exchange_s:.0f} s"
    memory = f"{_bytes(peers.host_bytes)} of each peer, {_bytes(peers.host_peak_bytes)} at most"
    sparse = f"{_bytes(peers.payload_bytes)} for each other, {peers.part_of_int8:.1%} of what int8 sends"
    lost = sparse if peers.codec == "sparse" else f"rounding loses {peers.quantisation_error:.1%}"
    rows = [
        ["round", f"{took} of exchange among {peers.peers} peers"],
        ["sent", f"{_bytes(peers.sent_bytes)} by each peer; {lost}"],
        ["host memory", f"{memory}; {_bytes(peers.copy_bytes)} more of four peers while one joins"],
        ["utilisation", f"{peers.utilisation:.1%} of the time goes to training"],
    ]
    return rows_text(rows, left=(0, 1), head=False)


def _ramp(course: Sequence[Stretch]) -> str:
    rows = [["from step", "from sample", "steps", "batch", "micro", "m", "precision", "s/step", "days"]]
    shown = list(course)
    if len(shown) > RAMP_ROWS:
        spacing = (len(shown) - 1) / (RAMP_ROWS - 1)
        picked = sorted({round(index * spacing) for index in range(RAMP_ROWS)})
        shown = [course[index] for index in picked]
    for stretch in shown:
        rows.append(
            [
                f"{stretch.first_step:,}",
                f"{stretch.first_sample:,}",
                f"{stretch.steps:,}",
                f"{stretch.global_batch:,}",
                str(stretch.micro_batch),
                str(stretch.micro_batches),
                stretch.precision,
                f"{stretch.step.seconds:.3g}",
                f"{stretch.seconds / 86400:.2f}",
            ]
        )
    cost = ramp_up_cost(course)
    text = rows_text(rows, left=(6,))
    if len(course) > RAMP_ROWS:
        text += f"\n{len(shown)} of {len(course)} stretches; --json has all"
    if cost.samples:
        days, penalty = cost.seconds / 86400, cost.penalty_s / 86400
        text += f"\nuntil the full batch: {days:.2f} days, {penalty:.2f} more than at full speed"
    return text


def _whole(plan: Plan) -> str:
    whole = plan.whole
    rows = [
        ["length", f"{whole.steps:,} steps, {whole.samples:,} samples, {whole.tokens:,} tokens"],
        ["rounding", last_step_words(plan.draft.request.recipe, plan.draft.course) or "whole steps"],
        ["compute", f"{whole.model_flops:.3g} FLOPs of the model"],
        [
            "days",
            f"{whole.days:.1f}, between {whole.days_low:.1f} and {whole.days_high:.1f} "
            f"({plan.draft.request.hours_per_day:g} hours a day)",
        ],
        [
            "of that",
            f"training {whole.training_days:.1f} days, saving {whole.saving_hours:.1f} h, evaluation "
            f"{whole.evaluation_hours:.1f} h, "
            f"failures {whole.failure_hours:.1f} h"
            + (f", exchange {whole.exchange_hours:.1f} h" if whole.exchange_hours else ""),
        ],
        ["resources", f"{whole.accelerator_hours:,.0f} accelerator-hours, {whole.energy_mwh:,.0f} MWh"],
    ]
    if whole.cost:
        rows.append(["cost", f"{whole.cost:,.0f} {whole.currency}"])
    return rows_text(rows, left=(0, 1), head=False)


def _checkpoints(plan: Plan) -> str:
    saves, recipe = plan.draft.checkpoints, plan.draft.request.recipe
    is_waited_for = any(place.url and place.prune_waits for place in (recipe.backup, recipe.second_backup))
    more = ", besides what waits for its backup" if is_waited_for else ""
    rows = [
        [
            "size",
            f"{_bytes(saves.stored_bytes)} stored; {_bytes(saves.full_bytes)} with 16-bit weights; those "
            f"alone {_bytes(saves.weights_bytes)}",
        ],
        [
            "time",
            f"{saves.save_s:.1f} s until a save is durable, of which {saves.blocking_s:.1f} s stop the "
            f"training; {saves.load_s:.1f} s to load",
        ],
        [
            "cadence",
            f"every {saves.interval_steps:,.0f} steps ({saves.interval_s / 60:,.0f} min): {saves.saves:,} "
            f"saves; a failure loses at most {saves.worst_loss_hours:.1f} h of work",
        ],
        ["kept", f"{saves.kept_at_end} at the end; {_bytes(saves.storage_bytes)} of storage at most{more}"],
    ]
    if saves.best_interval_s and saves.mean_time_between_failures_s and saves.best_interval_steps:
        lost, least = (
            lost_text(share or 0.0, form=".2%") for share in (saves.lost_share, saves.best_lost_share)
        )
        best = (
            f"every {saves.best_interval_s / 60:,.0f} min ({saves.best_interval_steps:,.0f} steps), "
            f"a failure every {days_text(saves.mean_time_between_failures_s / 86400)} "
            f"({format(saves.failures, ',.0f' if saves.failures < 1e9 else '.3g')} in the run)"
        )
        rows += [
            ["best", best],
            [
                "lost",
                f"{lost} of the time to saves and failures; {least} at best; a restart "
                f"takes {saves.restart_s / 60:.1f} min",
            ],
        ]
    return rows_text(rows, left=(0, 1), head=False)


def _calendar(plan: Plan, start: str | None) -> str:
    day = start_date(start)
    rows = [["day", *(["date"] if day else []), "step", "sample", "tokens", "what"]]
    for event in plan.calendar:
        dated = [date_after(day, event.days)] if day else []
        rows.append(
            [
                f"{event.days:.1f}",
                *dated,
                f"{event.step:,}",
                f"{event.sample:,}",
                f"{event.tokens / 1e9:,.2f}e9",
                event.what,
            ]
        )
    return rows_text(rows, left=(len(rows[0]) - 1,))


def start_date(text: str | None) -> date | None:
    """Return the date of --start, or None without one. Raises ConfigError where the text is no date."""
    if text is None:
        return None
    try:
        return date.fromisoformat(text)
    except ValueError:
        mistake = Mistake(
            key="--start",
            value=text,
            source="command line",
            problem="is not a date",
            remedy="Write 2026-03-11.",
        )
        raise ConfigError([mistake], of="the plan") from None


def date_after(day: date, days: float) -> str:
    """Return the date some days after another as text, also where the calendar has none."""
    try:
        return (day + timedelta(days=days)).isoformat()
    except OverflowError:
        return "after 9999"


def section(title: str, body: str) -> str:
    """Return a title, and what stands beneath it indented."""
    return f"{title}\n" + textwrap.indent(body, INDENT)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, COLUMNS - 4, initial_indent="- ", subsequent_indent="  ")


def rows_text(rows: Sequence[Sequence[str]], *, left: Collection[int] = (), head: bool = True) -> str:
    """Return a table that stays within the page when a section indents it."""
    return table_text(rows, left=left, head=head, width=COLUMNS - len(INDENT))


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def days_text(days: float) -> str:
    """Return a duration as text, in days, hours or minutes."""
    if days >= 2:
        return f"{days:.1f} days"
    return f"{days * 24:.1f} h" if days * 24 >= 2 else f"{days * 1440:.1f} min"
