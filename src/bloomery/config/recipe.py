"""The recipe, which is the whole description of a run, and the settings of `[run]` and `[train]`."""

from __future__ import annotations

from dataclasses import field

from bloomery.config.checkpoint import (
    BackupSection,
    CheckpointSection,
    ControlSection,
    EvaluateSection,
    GuardSection,
    LogSection,
)
from bloomery.config.data import DataSection
from bloomery.config.elastic import ElasticSection
from bloomery.config.environment import EnvironmentSection
from bloomery.config.model import ModelSection
from bloomery.config.optim import LossSection, OptimSection, ScheduleSection
from bloomery.config.parallel import RECOMPUTATIONS, ParallelSection
from bloomery.config.setting import LARGEST_SEED, setting
from bloomery.config.submit import SubmitSection, SyncSection
from bloomery.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The name and the seed of the run."""

    name: str = setting(
        kind="free",
        at_start=True,
        help="Name of the run; its directory is runs/NAME unless --run gives another.",
    )
    seed: int = setting(
        1234,
        kind="fixed",
        minimum=0,
        maximum=LARGEST_SEED,
        help="Seed of initial values, dropout and the order of the data.",
    )
    hardware: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Machine for which `bloomery plan` plans: the name of a shipped hardware file, or a path.",
    )
    offline: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Forbid all use of the network to the commands that read this recipe, as the variable "
        "BLOOMERY_OFFLINE=1 does for any command; BLOOMERY_OFFLINE=0 overrules it.",
    )
    notes: str = setting(
        "", kind="free", at_start=True, help="Free text, for instance where the recipe's figures come from."
    )


@dataclass(frozen=True, kw_only=True)
class InitSection:
    """Where the initial values of the weights come from, if not from `model.init_std` and its like."""

    from_: str = setting(
        "",
        kind="fixed",
        help="Directory with the weights that the run begins with: one that transformers wrote (Llama, "
        "Qwen3, BLOOM, GPT-2), a run or a checkpoint of ours. [model], data.tokenizer and "
        "data.end_of_document_token are taken from there where the recipe leaves them out. Optimizer, "
        "schedule and data begin anew. '' draws the weights from run.seed.",
    )


ATTENTION_KERNELS = ("auto", "cudnn", "flash", "efficient", "triton", "math")
PRECISIONS = ("auto", "bf16", "fp32", "fp16", "fp8")
FP8_SCALINGS = ("tensor", "row", "block", "mx")


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """The length, batches and precision of the run. Exactly one of samples, tokens and steps is above 0."""

    samples: int = setting(0, kind="free", minimum=0, help="Length of the run in samples.")
    tokens: int = setting(0, kind="free", minimum=0, help="Length of the run in tokens.")
    steps: int = setting(0, kind="free", minimum=0, help="Length of the run in optimizer steps.")
    global_batch: int = setting(
        kind="journalled", minimum=1, help="Number of samples in one optimizer step, over all ranks."
    )
    micro_batch: int = setting(
        1, kind="free", minimum=1, help="Number of samples in one forward and backward pass of a rank."
    )
    ramp_up: tuple[int, ...] = setting(
        (),
        kind="journalled",
        help="[start, increment, samples]: the global batch grows from start to global_batch in steps of "
        "increment, over that number of samples. [] does not ramp up.",
    )
    micro_batch_changes: tuple[tuple[int, int], ...] = setting(
        (), kind="free", help="[[from_sample, micro_batch], …]: later values of micro_batch."
    )
    precision: str = setting(
        "auto",
        kind="journalled",
        choices=PRECISIONS,
        help="Precision of the matmuls; master weights, accumulation and reductions are fp32. "
        "'auto' is bf16 where the device multiplies it natively, else fp32. 'fp16' scales the loss "
        "dynamically. 'fp8' is E4M3 in the forward pass and E5M2 in the backward pass.",
    )
    precision_changes: tuple[tuple[int, str], ...] = setting(
        (),
        kind="journalled",
        choices=PRECISIONS,
        help="[[from_sample, precision], …]: later values of precision.",
    )
    fp8_scaling: str = setting(
        "tensor",
        kind="journalled",
        choices=FP8_SCALINGS,
        help="What shares a scale in 'fp8': 'tensor' a whole factor of a matmul; 'row' each of its rows "
        "along what is summed; 'block' 1 × 128 elements, 128 × 128 of weights (DeepSeek-V3; Hopper GPUs); "
        "'mx' 32 elements (MXFP8; Blackwell GPUs and later). All but 'tensor' use E4M3 for gradients too.",
    )
    recompute: str = setting(
        "none",
        kind="free",
        choices=("auto", *RECOMPUTATIONS),
        help="Which activations are not stored but computed again in the backward pass: 'elementwise' those "
        "between matmuls, 'selective' scores of attention, 'mlp' those between matmuls and the MLP's wide "
        "ones, 'full' whole blocks. 'auto' is the quickest of them whose planned memory fits, chosen when "
        "training starts.",
    )
    compile: str = setting(
        "auto",
        kind="free",
        at_start=True,
        choices=("auto", "on", "off"),
        help="Whether the model is compiled by torch.compile; 'auto' does not compile where that would take "
        "longer than it saves.",
    )
    attention: str = setting(
        "auto",
        kind="free",
        at_start=True,
        choices=ATTENTION_KERNELS,
        help="The kernel of causal attention without ALiBi, document masks and dropout. On a GPU 'auto' "
        "measures for the sizes of the run which is the quickest, and keeps to it; 'triton' is our own, "
        "'math' holds all scores in memory. A CPU has 'flash' and 'math'.",
    )
    deterministic: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Whether a GPU uses only kernels that give the same bits each time, which is slower; PyTorch "
        "refuses an operation that has none. On CPU results are the same bits in any case.",
    )
    loss_chunk: int = setting(
        1024,
        kind="free",
        at_start=True,
        minimum=1,
        help="Number of tokens whose logits are in memory at one time while the loss is computed. On GPUs a "
        "loss of 2048 at a time takes less time than one of 1024, where memory allows.",
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run, by section. A function takes the section that it uses, not the whole recipe."""

    run: RunSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    optim: OptimSection
    init: InitSection = field(default_factory=InitSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    loss: LossSection = field(default_factory=LossSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    backup: BackupSection = field(default_factory=BackupSection)
    second_backup: BackupSection = field(default_factory=BackupSection)
    evaluate: EvaluateSection = field(default_factory=EvaluateSection)
    log: LogSection = field(default_factory=LogSection)
    control: ControlSection = field(default_factory=ControlSection)
    guard: GuardSection = field(default_factory=GuardSection)
    elastic: ElasticSection = field(default_factory=ElasticSection)
    submit: SubmitSection = field(default_factory=SubmitSection)
    environment: EnvironmentSection = field(default_factory=EnvironmentSection)
    sync: SyncSection = field(default_factory=SyncSection)
