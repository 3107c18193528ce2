"""Reports for guards, and what guards say to them."""

from collections.abc import Iterable
from dataclasses import fields

import numpy as np

from bloomery.config.checkpoint import CheckpointSection, GuardSection
from bloomery.events.records import Facts, StepReport
from bloomery.guard.judge import Guards, build_guards, judge
from bloomery.guard.verdict import CarryOn, Save, Verdict

BATCH = 10
FACTS = {field.name for field in fields(Facts)}


def report(step: int, loss: float = 2.0, **changed) -> StepReport:
    facts = {name: changed.pop(name) for name in tuple(changed) if name in FACTS}
    usual = {
        "consumed_samples": step * BATCH,
        "consumed_tokens": step * BATCH * 8,
        "cursor": step * BATCH,
        "seconds": 0.1,
        "learning_rate": 1e-3,
        "global_batch": BATCH,
        "z_loss": 0.0,
        "loss_scale": None,
        "gradient_norm": 1.0,
        "zero_gradients": 0,
        "update_applied": True,
        "refused_updates": 0,
        "refused_in_a_row": 0,
        "nan_losses": 0,
        "samples_per_s": 1.0,
        "tokens_per_s": 1.0,
        "hardware_tflops": 1.0,
        "model_tflops": 1.0,
        "mfu": None,
    }
    return StepReport(step=step, loss=loss, facts=Facts(**facts), **{**usual, **changed})


def guards_of(**guard) -> Guards:
    checkpoint = {
        key: guard.pop(key) for key in ("every_steps", "every_minutes", "every_samples") if key in guard
    }
    return build_guards(
        checkpoint=CheckpointSection(**{"every_steps": 0, "every_minutes": 0.0, **checkpoint}),
        guard=GuardSection(**guard),
    )


def judged(guards: Guards, reports: Iterable[StepReport]) -> list[Verdict]:
    return [judge(guards, one) for one in reports]


def said(guards: Guards, reports: Iterable[StepReport]) -> list[tuple[int, str]]:
    """(step, kind) of each thing that a guard had to say; a rewind and a stop are their own kind."""
    found = []
    for one in reports:
        verdict = judge(guards, one)
        if not isinstance(verdict, CarryOn | Save):
            found.append((one.step, getattr(verdict, "kind", type(verdict).__name__.lower())))
    return found


def noisy(steps: int, *, seed: int = 0, level: float = 2.5, spread: float = 0.02) -> list[float]:
    """Losses of a calm run late in its life."""
    return list(level + spread * np.random.default_rng(seed).standard_normal(steps))
