"""Decides at a start which kernel computes attention, equally on all ranks and as earlier starts did."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bloomery import durable
from bloomery.checkpoint.format.state import Json
from bloomery.config.recipe import Recipe
from bloomery.errors import TrainingFailed, storage_error
from bloomery.events.run_directory import RunDirectory
from bloomery.model.attention_choice import (
    MEASURED,
    REPEATABLE,
    AttentionSizes,
    Timer,
    device_time_s,
    measure,
    quickest,
    refusal_of,
)
from bloomery.model.shape import resolve
from bloomery.parallel.mesh import Mesh
from bloomery.parallel.precision import DTYPES, resolve_precision
from bloomery.parallel.rank_zero_task import ReportProgress
from bloomery.plan.schedule import phase_at

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class AttentionDecision:
    """The kernel of plain causal attention, and why.

    kernel: '' for what each device does by itself, else a name of `train.attention`.
    sizes: what was measured, for people; '' where nothing was.
    seconds: of a forward and backward by each kernel. refusals: why others cannot run.
    """

    kernel: str
    why: str
    sizes: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        """Return the decision for the journal."""
        return asdict(self)

    def line(self) -> str:
        """Return the decision as a line for people."""
        times = [f"{kernel} {1e3 * took:.3g} ms" for kernel, took in sorted(self.seconds.items(), key=_time)]
        others = [f"{kernel} cannot ({why})" for kernel, why in self.refusals.items()]
        measured = f"; forward and backward of {self.sizes}: {', '.join([*times, *others])}" if times else ""
        return f"attention by {self.kernel} ({self.why}){measured}"


def decide_attention(
    recipe: Recipe, mesh: Mesh, rundir: RunDirectory, *, vocabulary: int, time_s: Timer = device_time_s
) -> AttentionDecision:
    """Return which kernel computes attention in this incarnation. Collective over the peer.

    The first rank tries or measures, and the others take what it found. What 'auto' found is kept in the run
    directory with what it was found for, so that a resume on the same kind of GPU takes the same kernel.
    Raises TrainingFailed where the kernel that the recipe names cannot compute attention of the run's sizes.
    """
    model, named = recipe.model, recipe.train.attention
    if model.position == "alibi" or model.attention_dropout > 0.0 or recipe.data.mask_documents:
        return AttentionDecision(kernel="", why="ALiBi, document masks or dropout")
    if named == "auto" and not _chooses_by_time(mesh.device):
        return AttentionDecision(kernel="", why="train.attention = auto on a CPU")
    sizes = _sizes(recipe, mesh, vocabulary=vocabulary)

    def decide(tick: ReportProgress) -> AttentionDecision:
        if named != "auto":
            return _named(named, sizes, mesh.device)
        if recipe.train.deterministic:
            return _repeatable(sizes, mesh.device)
        return _kept_or_measured(sizes, mesh.device, rundir, time_s=time_s, tick=tick)

    decided = mesh.run_on_rank_zero(decide, doing="choosing the kernel of attention")
    told = mesh.all_gather_object(None if decided is None else decided.to_json())[0]
    return AttentionDecision(**told)


def _chooses_by_time(device: torch.device) -> bool:
    """Return whether the device has several kernels of which none is the best for all sizes."""
    return device.type == "cuda"


def _sizes(recipe: Recipe, mesh: Mesh, *, vocabulary: int) -> AttentionSizes:
    """Return the sizes of the run's first phase, so that a resume in a later one asks for the same."""
    length, phase = recipe.data.sequence_length, phase_at(recipe.train, 0)
    resolved = resolve(recipe.model, vocabulary=vocabulary, sequence_length=length)
    return AttentionSizes(
        samples=phase.micro_batch,
        heads=recipe.model.heads // mesh.tensor.degree,
        kv_heads=resolved.kv_heads // mesh.tensor.degree,
        length=length,
        width=resolved.head_dim,
        dtype=DTYPES[resolve_precision(phase.precision, mesh.device)],
    )


def _named(kernel: str, sizes: AttentionSizes, device: torch.device) -> AttentionDecision:
    if refusal := refusal_of(kernel, sizes, device):
        raise TrainingFailed(
            f"train.attention = {kernel} cannot compute the run's attention ({sizes}) on {device}: {refusal}",
            remedy="Set train.attention = auto, which takes a kernel that can.",
        )
    return AttentionDecision(kernel=kernel, why=f"train.attention = {kernel}")


def _repeatable(sizes: AttentionSizes, device: torch.device) -> AttentionDecision:
    kernel = next((kernel for kernel in REPEATABLE if not refusal_of(kernel, sizes, device)), "math")
    return AttentionDecision(kernel=kernel, why="train.deterministic: the first kernel with repeatable sums")


def _kept_or_measured(
    sizes: AttentionSizes, device: torch.device, rundir: RunDirectory, *, time_s: Timer, tick: ReportProgress
) -> AttentionDecision:
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found_for = {"sizes": str(sizes), "device": device_name, "torch": torch.__version__}
    kept = _read(rundir)
    if kept.get("found_for") == found_for:
        return AttentionDecision(**kept["decision"] | {"why": "the quickest when the run began"})
    seconds, refusals = measure(MEASURED, sizes, device, time_s=time_s, on_progress=tick)
    decision = AttentionDecision(
        kernel=quickest(seconds),
        why="the quickest here" if seconds else "no other kernel can run",
        sizes=str(sizes),
        seconds=seconds,
        refusals=refusals,
    )
    try:
        durable.write_whole(
            rundir.attention, json.dumps({"found_for": found_for, "decision": decision.to_json()}, indent=1)
        )
    except OSError as error:
        raise storage_error(error, path=rundir.attention, doing="Keeping the kernel of attention") from error
    return decision


def _read(rundir: RunDirectory) -> dict[str, Any]:  # Any: JSON
    """Return what an earlier start kept; {} for nothing, or where the file was damaged, which is logged."""
    try:
        kept = json.loads(rundir.attention.read_bytes())
        AttentionDecision(**kept["decision"])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise storage_error(error, path=rundir.attention, doing="Reading the kernel of attention") from error
    except (ValueError, TypeError, KeyError) as damage:
        log.warning("%s is damaged (%s): the kernel of attention is measured anew", rundir.attention, damage)
        return {}
    return dict(kept)


def _time(entry: tuple[str, float]) -> float:
    return entry[1]
