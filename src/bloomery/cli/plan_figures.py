"""Writes all figures of a plan as JSON, with the formulas that they follow from."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bloomery.plan.overview import Plan, parameters_of_stage
from bloomery.plan.parameters import proportions
from bloomery.plan.step_time import StepTime
from bloomery.plan.timeline import last_step_words, ramp_up_cost

FORMULAS = {
    "parameters": "GPT: l(12h² + 13h) + vh + 4h; Llama: l(2h² + 2h·kv·d + 3hf + 2h) + h + 2vh",
    "memory": "weights 2P, gradients 4P, master 4P, AdamW 8P, each by its sharding; activations after "
    "Korthikanti et al., 2022",
    "step": "m × slowest stage + (p − 1)/v × other stages + exposed exchange + update, × (1 + jitter·√(2 "
    "ln nodes))",
    "hardware_teraflops": "96·B·s·l·h²(1 + s/6h + v/16lh)/(t·n·10¹²) with full recomputation",
    "model_teraflops": "72·B·s·l·h²(1 + s/6h + v/12lh)/(t·n·10¹²)",
    "bubble_share": "(p − 1)/(m + p − 1), with p − 1 divided by v chunks",
    "traffic": "ring: 2(n − 1)/n of what is all-reduced, (n − 1)/n of what is gathered, scattered or reduced",
    "checkpoints": "full 14P, weights 2P; best interval √(2·blocking·M); lost share "
    "1 − T/(M·e^(R/M)·(e^((T + blocking)/M) − 1)), M between failures, R to be back (Daly, 2006)",
    "days": "training + saves + evaluations + exchanges + failures (training/(1 − lost share) less training "
    "and saves), × 24/hours a day",
}


def as_figures(plan: Plan) -> dict[str, Any]:
    """Return all figures of a plan as JSON. Bytes are bytes, `_s` means seconds, `_gib` means 2³⁰ bytes."""
    draft = plan.draft
    request, work = draft.request, draft.work
    layout = work.layout
    return {
        "recipe": request.recipe.run.name,
        "hardware": request.hardware.name,
        "accelerators": layout.world,
        "nodes": layout.nodes,
        "assumptions": list(plan.assumptions),
        "layout": asdict(layout)
        | {"micro_batch": work.micro_batch, "recompute": request.recipe.train.recompute},
        "parameters": _parameters(plan),
        "proportions": [
            asdict(ratio) | {"is_usual": ratio.is_usual} for ratio in proportions(request.recipe.model)
        ],
        "memory": _memory(plan),
        "step": _step(draft.course[-1].step),
        "speed": asdict(plan.speed),
        "traffic": asdict(plan.traffic) | {"total_bytes": plan.traffic.total_bytes},
        "ramp": [
            {
                "first_step": entry.first_step,
                "first_sample": entry.first_sample,
                "steps": entry.steps,
                "global_batch": entry.global_batch,
                "micro_batch": entry.micro_batch,
                "micro_batches": entry.micro_batches,
                "precision": entry.precision,
                "step_s": entry.step.seconds,
                "seconds": entry.seconds,
            }
            for entry in draft.course
        ],
        "ramp_up": asdict(ramp_up_cost(draft.course)),
        "run": asdict(plan.whole) | {"last_step": last_step_words(request.recipe, draft.course)},
        "checkpoints": asdict(draft.checkpoints),
        "between_peers": asdict(plan.between_peers) if plan.between_peers else None,
        "calendar": [asdict(entry) for entry in plan.calendar],
        "warnings": list(plan.warnings),
        "formulas": FORMULAS,
    }


def _parameters(plan: Plan) -> dict[str, Any]:
    count = plan.draft.parameters
    return {
        "total": count.total,
        "embedding": count.embedding,
        "positions": count.positions,
        "embedding_norm": count.embedding_norm,
        "blocks": count.layers * count.block.total,
        "layers": count.layers,
        "block": asdict(count.block) | {"total": count.block.total},
        "final_norm": count.final_norm,
        "head": count.head,
        "without_embeddings": count.without_embeddings,
    }


def _memory(plan: Plan) -> dict[str, Any]:
    draft = plan.draft
    return {
        "fits": plan.fits,
        "capacity_bytes": draft.room_bytes,
        "peak_bytes": draft.peak_bytes,
        "peak_stage": draft.worst_stage,
        "stages": [
            asdict(memory)
            | {
                "total": memory.total,
                "blocks": stage.blocks,
                "has_embedding": stage.has_embedding,
                "has_head": stage.has_head,
                "rank_parameters": parameters_of_stage(draft, index),
            }
            for index, (memory, stage) in enumerate(zip(draft.memory, draft.stages, strict=True))
        ],
    }


def _step(step: StepTime) -> dict[str, Any]:
    return asdict(step) | {
        "seconds": step.seconds,
        "low_s": step.low_s,
        "high_s": step.high_s,
        "bottleneck": step.bottleneck,
    }
