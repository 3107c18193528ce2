"""Decides at a start which kernel computes attention, equally on all ranks and as earlier starts did.

A checkpoint says which kernel was measured to be the quickest, so that the run goes on with it wherever the
device, the sizes and torch are the same.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
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
    attention_kernel,
    device_time_s,
    measure,
    quickest,
    refusal_of,
    use_attention,
)
from bloomery.model.decoder import Decoder
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
    found_for: the sizes, the device and the version of torch for which it was measured; {} where nothing was.
    """

    kernel: str
    why: str
    sizes: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    found_for: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Json]:
        """Return the decision for the journal and for checkpoints."""
        return asdict(self)

    def line(self) -> str:
        """Return the decision as a line for people."""
        times = [f"{kernel} {1e3 * took:.3g} ms" for kernel, took in sorted(self.seconds.items(), key=_time)]
        others = [f"{kernel} cannot ({why})" for kernel, why in self.refusals.items()]
        measured = f"; forward and backward of {self.sizes}: {', '.join([*times, *others])}" if times else ""
        return f"attention by {self.kernel} ({self.why}){measured}"


class AttentionChoice:
    """Has a decoder compute plain causal attention by one kernel, from the restored checkpoint to the end.

    decision: the kernel and why, once `begin` was called.
    """

    def __init__(
        self, decoder: Decoder, *, decide: Callable[[Mapping[str, Json]], AttentionDecision]
    ) -> None:
        """decide: returns the decision, from what a checkpoint says of an earlier one. Collective."""
        self.decision = AttentionDecision(kernel="", why="nothing is computed yet")
        self._decoder, self._decide = decoder, decide
        self._has_begun, self._kernels = False, ExitStack()

    def begin(self, saved: Mapping[str, Json]) -> None:
        """Decide, and compute by that kernel from now on. Later calls, as of a rewind, change nothing.

        Collective over the peer; the first call comes before anything is computed or compiled.
        saved: what `to_json` returned when the checkpoint was saved; {} where it says nothing, or none is.
        """
        if self._has_begun:
            return
        self._has_begun, self.decision = True, self._decide(saved)
        self._kernels.enter_context(attention_kernel(self.decision.kernel))
        use_attention(self._decoder, self.decision.kernel)

    def to_json(self) -> dict[str, Json]:
        """Return what a resume needs to take the same kernel; {} where it does so by the recipe alone."""
        return self.decision.to_json() if self.decision.found_for else {}

    def close(self) -> None:
        """Let torch choose by itself again. Not collective."""
        self._kernels.close()


NOTHING_SAVED: Mapping[str, Json] = {}


def decide_attention(
    recipe: Recipe,
    mesh: Mesh,
    rundir: RunDirectory,
    *,
    vocabulary: int,
    saved: Mapping[str, Json] = NOTHING_SAVED,
    time_s: Timer = device_time_s,
) -> AttentionDecision:
    """Return which kernel computes attention in this incarnation. Collective over the peer.

    The first rank tries or measures, and the others take what it found. What 'auto' found is kept in the run
    directory with what it was found for, so that a resume on the same kind of GPU takes the same kernel.
    saved: the decision of the run so far, of the restored checkpoint; it goes before the run directory's.
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
        return _kept_or_measured(sizes, mesh.device, rundir, saved, time_s=time_s, tick=tick)

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
    sizes: AttentionSizes,
    device: torch.device,
    rundir: RunDirectory,
    saved: Mapping[str, Json],
    *,
    time_s: Timer,
    tick: ReportProgress,
) -> AttentionDecision:
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found_for = {"sizes": str(sizes), "device": device_name, "torch": torch.__version__}
    for kept in (_of_checkpoint(saved), _read(rundir)):
        if kept is not None and kept.found_for == found_for:
            return replace(kept, why="the quickest when the run began")
    seconds, refusals = measure(MEASURED, sizes, device, time_s=time_s, on_progress=tick)
    decision = AttentionDecision(
        kernel=quickest(seconds),
        why="the quickest here" if seconds else "no other kernel can run",
        sizes=str(sizes),
        seconds=seconds,
        refusals=refusals,
        found_for=found_for,
    )
    try:
        durable.write_whole(rundir.attention, json.dumps({"decision": decision.to_json()}, indent=1))
    except OSError as error:
        raise storage_error(error, path=rundir.attention, doing="Keeping the kernel of attention") from error
    return decision


def _read(rundir: RunDirectory) -> AttentionDecision | None:
    """Return what an earlier start kept; None for nothing, or where the file was damaged, which is logged."""
    try:
        kept: Any = json.loads(rundir.attention.read_bytes())  # Any: JSON
        decision = kept["decision"]
        # Files of earlier versions have what it was found for beside it.
        beside = {"found_for": kept["found_for"]} if "found_for" in kept else {}
        return AttentionDecision(**{**beside, **decision})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise storage_error(error, path=rundir.attention, doing="Reading the kernel of attention") from error
    except (ValueError, TypeError, KeyError) as damage:
        log.warning("%s is damaged (%s): the kernel of attention is measured anew", rundir.attention, damage)
        return None


def _of_checkpoint(saved: Mapping[str, Any]) -> AttentionDecision | None:  # Any: JSON
    """Return what a checkpoint says; None for nothing, or what another version wrote, which is logged."""
    try:
        return AttentionDecision(**saved) if saved else None
    except TypeError as other:
        log.warning("the checkpoint's kernel of attention is not understood (%s): it is measured anew", other)
        return None


def _time(entry: tuple[str, float]) -> float:
    return entry[1]
