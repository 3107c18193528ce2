"""The settings of `[checkpoint]`, `[backup]`, `[evaluate]`, `[log]`, `[control]` and `[guard]`."""

from __future__ import annotations

from bloomery.config.setting import setting
from bloomery.frozen import dataclass

BACKGROUND_BYTES = 64 << 20
"""With background = "auto", ranks that write less than this save at once, which takes as little time."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """When checkpoints are saved and how long they are kept. An interval of 0 is switched off."""

    url: str = setting(
        "",
        kind="free",
        at_start=True,
        help="s3://bucket/path, gs://…, az://… or file:///path: every rank saves to URL/run.name itself, and "
        "each node may have a run directory of its own. Empty: checkpoints are saved in the run directory, "
        "which all nodes then share.",
    )
    every_steps: int = setting(
        500, kind="free", minimum=0, help="Steps between two checkpoints; 0 does not count steps."
    )
    every_samples: int = setting(
        0, kind="free", minimum=0, help="Samples between two checkpoints; 0 does not count samples."
    )
    every_minutes: float = setting(
        30.0, kind="free", minimum=0.0, help="Minutes between two checkpoints; 0 does not count minutes."
    )
    keep_last: int = setting(3, kind="free", minimum=1, help="Number of newest checkpoints that are kept.")
    keep_every_steps: int = setting(
        0,
        kind="free",
        minimum=0,
        help="Checkpoints whose step is a multiple of this are never removed; 0: none.",
    )
    keep_tenths: bool = setting(
        True, kind="free", help="Keep at least one checkpoint for each tenth of the run."
    )
    keep_best: int = setting(
        1,
        kind="free",
        minimum=0,
        help="Number of checkpoints with the lowest held-out loss that are kept, among those that were "
        "evaluated at the step of their save; 0: none for that reason.",
    )
    at_end: bool = setting(True, kind="free", help="Save when the run ends or is stopped.")
    background: str = setting(
        "auto",
        kind="free",
        at_start=True,
        choices=("auto", "on", "off"),
        help="Whether a checkpoint is written while training continues, which needs host memory for two "
        "copies of the state. 'auto': where a rank's state is over 64 MB.",
    )
    partner_copies: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Keep the newest state of each rank in the memory of its node and of another node, so that a "
        "restart need not read the disk.",
    )
    memory_directory: str = setting(
        "/dev/shm",
        kind="free",
        at_start=True,
        help="Directory on a memory file system of each node, for partner_copies.",
    )
    throttle: bool = setting(
        True,
        kind="free",
        help="Spread the copying and writing of a checkpoint over time, so that steps are hardly slower; "
        "false copies and writes as fast as possible.",
    )


@dataclass(frozen=True, kw_only=True)
class EvaluateSection:
    """How the held-out loss is measured during the run."""

    every_steps: int = setting(
        500, kind="free", minimum=0, help="Steps between two evaluations; 0 does not evaluate on the way."
    )
    samples: int = setting(
        64, kind="free", at_start=True, minimum=1, help="Number of held-out samples in one evaluation."
    )
    at_end: bool = setting(True, kind="free", help="Evaluate when the run has used all its samples.")


@dataclass(frozen=True, kw_only=True)
class LogSection:
    """What is logged, and how often."""

    every_steps: int = setting(10, kind="free", at_start=True, minimum=1, help="Steps between two log lines.")
    form: str = setting(
        "short",
        kind="free",
        at_start=True,
        choices=("short", "full", "json"),
        help="Lines of the console: 'short', of at most 100 columns with the time left; 'full', with every "
        "figure; 'json', one object per line for programs. A terminal shows a bar in place of short lines.",
    )
    tensorboard: bool = setting(
        True, kind="free", at_start=True, help="Write TensorBoard files to the run directory."
    )
    profile_steps: tuple[int, ...] = setting(
        (),
        kind="free",
        at_start=True,
        minimum=1,
        help="[first, last]: steps of which the first rank records a profile into RUN/profiles, as a trace "
        "for a browser and tables of parts and operators. They are slower. []: none.",
    )
    trackers: tuple[str, ...] = setting(
        (),
        kind="free",
        at_start=True,
        choices=("wandb", "mlflow"),
        help="Services that get the figures of each step, from a thread that no step waits for: 'wandb' "
        "(Weights & Biases) and 'mlflow', each an extra, told by its own environment where to send them.",
    )


@dataclass(frozen=True, kw_only=True)
class ControlSection:
    """Where a run looks for switches and for notices of maintenance, beside its own directory."""

    directory: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Directory whose files `stop` and `save` are switches of this run, as those in RUN/control are: "
        "for people who may not write in the run directory. A relative path begins where the training is "
        "started. Empty: none.",
    )
    maintenance_minutes: float = setting(
        30.0,
        kind="free",
        at_start=True,
        minimum=0.0,
        help="How long before announced maintenance of a node a supervised run saves and ends. Files "
        "`maintenance` beside the switches announce it too: with a time such as 2026-01-31T12:00, or empty.",
    )
    metadata: str = setting(
        "auto",
        kind="free",
        at_start=True,
        choices=("auto", "none", "gce", "aws", "azure"),
        help="Cloud whose metadata service each node asks for such notices; 'auto' asks the firmware.",
    )
    metadata_url: str = setting(
        "", kind="free", at_start=True, help="Address of the metadata service; empty: the cloud's own."
    )
    preflight: bool = setting(
        True,
        kind="free",
        at_start=True,
        help="Whether a supervised run looks at its nodes before its ranks start (GPUs, ECC errors, memory "
        "that others hold, /dev/shm, versions, clocks, disk), journals their versions, and leaves out nodes "
        "that are unfit.",
    )


@dataclass(frozen=True, kw_only=True)
class GuardSection:
    """Guards, which report a problem, rewind the run or stop it. `false` or 0 switches a guard off."""

    refused_updates: int = setting(
        20,
        kind="free",
        minimum=0,
        help="Rewind after this many updates in a row that were refused as not finite; 0 never.",
    )
    not_finite_losses: int = setting(
        3,
        kind="free",
        minimum=0,
        help="Rewind after this many losses in a row that were not finite; 0 never.",
    )
    stop_after_minutes: float = setting(
        0.0,
        kind="free",
        minimum=0.0,
        help="Save and stop after this many minutes in this process; 0 never.",
    )
    stop_at_step: int = setting(0, kind="free", minimum=0, help="Save and stop after this step; 0 never.")
    spike: bool = setting(
        True, kind="free", help="Rewind when the loss rises far beyond its usual spread and stays high."
    )
    spike_patience: int = setting(
        10, kind="free", minimum=1, help="Steps that a loss must stay high before the run is rewound."
    )
    spike_rewind_steps: int = setting(
        100, kind="free", minimum=1, help="Fewest steps between the problem and the step rewound to."
    )
    spike_skip_steps: int = setting(
        200,
        kind="free",
        minimum=0,
        help="Steps beyond the end of the problem whose samples are skipped, beside those from the step "
        "rewound to up to that end.",
    )
    repeat: bool = setting(
        True,
        kind="free",
        help="First make the same steps again after a rewind, which tells a fault of the machine from one of "
        "the data; false skips samples at once.",
    )
    last_rung: str = setting(
        "clamp",
        kind="free",
        choices=("repeat", "skip", "slow", "clamp"),
        help="The last remedy that is tried before the run stops: making steps again, skipping samples, "
        "skipping at a lower learning rate, or with tighter clipping besides.",
    )
    trial_steps: int = setting(
        0,
        kind="free",
        minimum=0,
        maximum=1000,
        help="Try each remedy on a fork of the run first, until this many steps beyond the problem: it is "
        "adopted where their median loss is what it was before the problem, else the next remedy begins from "
        "the same checkpoint. 0: a remedy counts until the problem comes again.",
    )
    slow_rate: float = setting(
        0.5,
        kind="free",
        at_start=True,
        above=0.0,
        maximum=1.0,
        help="Factor of the learning rate until restrain_steps beyond the problem, after a rewind on the "
        "rung 'slow' or 'clamp'.",
    )
    clamp: float = setting(
        0.25,
        kind="free",
        at_start=True,
        above=0.0,
        maximum=1.0,
        help="Factor of optim.clip until restrain_steps beyond the problem, after a rewind on the rung "
        "'clamp'; where optim.clip is 0, the largest gradient norm itself.",
    )
    clamp_z_score: float = setting(
        2.5,
        kind="free",
        at_start=True,
        minimum=0.0,
        help="On the rung 'clamp', gradients are also clipped where their norm's z-score is above this, as "
        "with optim.clip_method = 'z-score'; 0: they are not.",
    )
    clamp_qk: float = setting(
        100.0,
        kind="free",
        at_start=True,
        minimum=0.0,
        help="On the rung 'clamp', heads whose largest attention logit is above this are rescaled, as with "
        "optim.qk_clip; 0: they are not. Between peers they never are.",
    )
    restrain_steps: int = setting(
        1000,
        kind="free",
        at_start=True,
        minimum=1,
        help="Steps beyond the problem until which a lower learning rate and clamps hold after a rewind.",
    )
    forget_rewind_steps: int = setting(
        1000, kind="free", minimum=1, help="Calm steps after which a rewind no longer counts."
    )
    gradient_norm: bool = setting(
        True, kind="free", help="Report when gradient norms rise far beyond their usual spread."
    )
    loss_scale: bool = setting(True, kind="free", help="Report when the loss scale of fp16 collapses.")
    throughput: bool = setting(True, kind="free", help="Report when three steps in a row were 5% slower.")
    plateau: bool = setting(True, kind="free", help="Report when the loss has stopped falling.")
    held_out: bool = setting(
        True, kind="free", help="Report when the held-out loss rises while the training loss does not."
    )
    growth_steps: int = setting(
        50,
        kind="free",
        minimum=0,
        help="Steps between two measurements of inner tensors (attention logits, hidden states and weights "
        "of each block), of which those that grow ever faster are reported; 0 never.",
    )
    memory: bool = setting(True, kind="free", help="Report when the memory of the ranks grows on and on.")
    resume_parity: bool = setting(
        True, kind="free", help="Stop when losses after a resume are 1% above those before it."
    )

    corruption_steps: int = setting(
        250,
        kind="free",
        minimum=0,
        help="Steps between two checks for silent corruption: each rank computes a micro-batch again, and "
        "one of another rank, and the bits of results and replicas are compared before the update; 0 never. "
        "A check costs as much as two micro-batches.",
    )
    corruption_faults: int = setting(
        2,
        kind="free",
        minimum=1,
        help="Stop when checks for silent corruption have named one rank so often within forget_rewind_steps "
        "steps; before that the run goes back to a clean checkpoint.",
    )

    @property
    def reach_steps(self) -> tuple[int, ...]:
        """How many steps before the newest checkpoints are kept, so that rewinds find them.

        One is for guards of the loss. One is for corruption, which may be as old as the check before.
        """
        judged = self.spike or self.not_finite_losses or self.refused_updates
        by_loss = self.loss_reach_steps if judged else 0
        by_check = self.corruption_steps + 1 if self.corruption_steps else 0
        return tuple(reach for reach in (by_loss, by_check) if reach)

    @property
    def loss_reach_steps(self) -> int:
        """How many steps a rewind goes back at most for the sake of the loss, where checkpoints are near.

        A loss may be high for three times the patience before it is judged, and a little more to be noticed,
        or be no number for as long as is allowed, and a remedy may be on trial after it.
        """
        longest = max(3 * self.spike_patience + 10, self.not_finite_losses, self.refused_updates)
        return self.spike_rewind_steps + longest + self.trial_steps


RETIRED = {
    "guard.spike_threshold": "Write guard.spike = true or false: the unit is the loss's own spread.",
    "guard.spike_window": "Leave it out: guard.spike looks back on a window of its own.",
    "guard.spike_rewinds": "Write guard.last_rung: each rewind tries the next remedy.",
}
"""Settings of earlier versions, and what to write instead. The recipe.toml of a run may still hold them."""


SCHEMES = ("s3", "gs", "az", "file")
WHOLE_PATH = "Write file:///path, with a whole path."


def names_a_directory(url: str) -> bool:
    """Say whether a file:// URL holds a whole path: in `file://disk/x` the `disk` is a machine's name."""
    return url.startswith(("file:///", "file://localhost/"))


@dataclass(frozen=True, kw_only=True)
class BackupSection:
    """Where checkpoints are copied to while training goes on. Credentials come from the environment."""

    url: str = setting(
        "",
        kind="free",
        at_start=True,
        help="s3://bucket/path, gs://…, az://… or file:///path; checkpoints are copied to URL/run.name. "
        "Empty: no backup.",
    )
    what: str = setting(
        "all",
        kind="free",
        at_start=True,
        choices=("all", "model"),
        help="What is copied: 'all', the whole state, or 'model', only the weights.",
    )
    every_steps: int = setting(
        0,
        kind="free",
        at_start=True,
        minimum=0,
        help="Copy only checkpoints whose step is a multiple of this; 0 copies every one.",
    )
    finish_minutes: float = setting(
        60.0,
        kind="free",
        at_start=True,
        minimum=0.0,
        help="Minutes that the end of a run waits for its last backups.",
    )
    logs: bool = setting(
        True,
        kind="free",
        at_start=True,
        help="Copy journals, logs, TensorBoard files and the chronicle too, after each checkpoint.",
    )
    data: bool = setting(
        True,
        kind="free",
        at_start=True,
        help="Copy the token files that the run made of its text (RUN/data) too, after the checkpoints; "
        "datasets that lie elsewhere are not copied.",
    )
    prune_waits: bool = setting(
        True,
        kind="free",
        at_start=True,
        help="Keep checkpoints here until they are copied to this place; false removes them as if there were "
        "no backup.",
    )
