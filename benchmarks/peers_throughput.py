"""Who takes part in `train_throughput.py`: each makes one optimizer step a call, on the same batch.

A step is forward, backward, clipping to norm 1 and fused AdamW, for everybody. Precisions: fp32, or bf16,
where peers hold their weights in bf16 and nothing else, and ours keeps fp32 masters and fp32 gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from bloomery.config.model import ModelSection
from bloomery.config.optim import LossSection, OptimSection
from bloomery.config.parallel import ParallelSection
from bloomery.data_loader.batches import MicroBatch
from bloomery.model.initial_values import initial_rule
from bloomery.parallel.build import TrainingModel, build_training_model
from bloomery.parallel.mesh import Mesh, join_mesh
from bloomery.parallel.optimizers import Optimizers
from bloomery.parallel.precision import DTYPES, measure_peak_flops, resolve_precision
from bloomery.plan.parameters import token_cost
from bloomery.plan.schedule import Phase
from bloomery.train.state import Goal, TrainState
from bloomery.train.step import StepParts, train_step

LEARNING_RATE = 3e-4

Step = Callable[[], Tensor]
"""Makes one optimizer step and returns the mean loss before it, on the device."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model and the batch. ffn is the inner width of a gated MLP; one without a gate has 4 × hidden."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocabulary: int
    sequence_length: int
    samples: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.samples * self.sequence_length


def build_step(contender: str, shape: Shape, *, compiled: bool) -> Step:
    """The step of one contender, its weights initialised, nothing compiled yet."""
    torch.manual_seed(0)
    build = {
        "bloomery": _bloomery,
        "minimal": _minimal,
        "transformers-eager": _transformers,
        "transformers-compiled": _transformers,
        "litgpt-compiled": _litgpt,
    }[contender]
    return build(shape, compiled=compiled and contender != "transformers-eager")


def synchronise() -> None:
    """Wait until a GPU has made what it was told."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def timed(step: Step) -> tuple[float, float]:
    """Seconds of one step, the device's work included, and its loss."""
    losses = list[Tensor]()
    seconds = seconds_of(lambda: losses.append(step()))
    return seconds, float(losses[0])


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of a call, the device's work included."""
    synchronise()
    started = time.perf_counter()
    call()
    synchronise()
    return time.perf_counter() - started


def matmul_peak() -> float:
    """FLOP/s of a large square product in the comparison's precision."""
    return measure_peak_flops(device(), precision())


def flops_of_step(shape: Shape, section: ModelSection | None = None) -> int:
    """Of our model: 6 a weight that multiplies, and attention over the whole square, as papers count it.

    section: another model than the shape's, of its sizes.
    """
    section = section or section_of(shape)
    cost = token_cost(section, vocabulary=shape.vocabulary, sequence_length=shape.sequence_length)
    return cost.model * shape.tokens


def device() -> torch.device:
    """The accelerator, where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def precision() -> str:
    """bf16 where the device multiplies it natively; else fp32, for everybody."""
    return resolve_precision("auto", device())


def _bloomery(shape: Shape, *, compiled: bool) -> Step:
    return bloomery_step(shape, compiled=compiled, parallel=ParallelSection())


@dataclass(frozen=True, kw_only=True)
class OwnTraining:
    """Our model with what makes its steps.

    step: makes one optimizer step of the batches that it is given, and returns the whole batch's mean loss.
        Collective.
    before_update: what each step calls between its backward and its update.
    """

    model: TrainingModel
    mesh: Mesh
    step: Callable[[Sequence[MicroBatch]], Tensor]
    before_update: list[Callable[[], None]]


def bloomery_step(
    shape: Shape,
    *,
    compiled: bool,
    parallel: ParallelSection,
    section: ModelSection | None = None,
    computes_in: str = "",
    recompute: str = "none",
    micro_batch: int = 0,
    document_tokens: int = 0,
) -> Step:
    """A rank's step, of its share of one batch; the loss it returns is the whole batch's. Collective.

    See `bloomery_training` and `micro_batches`.
    """
    own = bloomery_training(
        shape,
        compiled=compiled,
        parallel=parallel,
        section=section,
        computes_in=computes_in,
        recompute=recompute,
        micro_batch=micro_batch,
    )
    batches = micro_batches(
        shape, *random_batch(shape), mesh=own.mesh, micro_batch=micro_batch, document_tokens=document_tokens
    )
    return lambda: own.step(batches)


def bloomery_training(
    shape: Shape,
    *,
    compiled: bool,
    parallel: ParallelSection,
    section: ModelSection | None = None,
    computes_in: str = "",
    recompute: str = "none",
    micro_batch: int = 0,
    seed: int = 0,
    fills_quickly: bool = False,
    loss_chunk: int = 1024,
    learning_rate: Callable[[], float] = lambda: LEARNING_RATE,
    **settings: str,
) -> OwnTraining:
    """Our model on this rank, its weights initialised, nothing compiled yet. Collective.

    section: another model than the shape's, of its sizes. computes_in: a precision; '' for the comparison's.
    micro_batch: samples at a time; 0 for the rank's whole share. seed: of the initial values.
    fills_quickly: whether the device draws initial values of the same distributions, in one pass.
    loss_chunk: tokens whose logits exist at one time.
    settings: further ones of `build_training_model`.
    """
    optim = OptimSection(learning_rate=LEARNING_RATE)
    computes_in = computes_in or precision()
    mesh = join_mesh(parallel)
    model = build_training_model(
        section or section_of(shape),
        parallel=parallel,
        vocabulary=shape.vocabulary,
        sequence_length=shape.sequence_length,
        optim=optim,
        loss=LossSection(),
        loss_chunk=loss_chunk,
        seed=0,
        mesh=mesh,
        compiled=compiled,
        **settings,  # type: ignore[arg-type]  — a job names what it measures by text
    )
    if fills_quickly:
        _fill_on_device(model, seed=seed)
    else:
        model.initialise(seed=seed, bigrams=lambda: torch.empty(0))  # unused: weights begin random
    model.set_phase(precision=computes_in, recompute=recompute)
    before_update: list[Callable[[], None]] = []

    def call_each(_state: TrainState) -> None:
        for call in before_update:
            call()

    parts = StepParts(
        phase=Phase(
            global_batch=shape.samples,
            micro_batch=micro_batch or shape.samples // mesh.data.degree,
            precision=computes_in,
            recompute=recompute,
        ),
        model=model,
        optimizers=Optimizers(model.weights, optim),
        loss_scale=None,
        clip=lambda state: optim.clip,
        sequence_length=shape.sequence_length,
        learning_rate=lambda _state: learning_rate(),
        wait_staged=lambda: None,
        average_gradients=call_each,
    )
    state = TrainState(goal=Goal(steps=1))
    return OwnTraining(
        model=model,
        mesh=mesh,
        step=lambda batches: mesh.all_reduce(train_step(parts, batches, state).cross_entropy) / shape.tokens,
        before_update=before_update,
    )


@torch.no_grad()
def _fill_on_device(model: TrainingModel, *, seed: int) -> None:
    generator = torch.Generator(model.decoder.device).manual_seed(seed)
    for entry in model.weights.state_entries():
        rule = initial_rule(entry.name.removeprefix("model."), model.decoder.model)
        if rule.kind == "constant":
            entry.tensor.fill_(rule.scale)
        else:
            entry.tensor.normal_(std=rule.scale, generator=generator)
    model.weights.copy_masters_to_working()


def micro_batches(
    shape: Shape,
    tokens: Tensor,
    targets: Tensor,
    *,
    mesh: Mesh,
    micro_batch: int = 0,
    document_tokens: int = 0,
) -> list[MicroBatch]:
    """A rank's share of a batch, `micro_batch` samples at a time; 0 for all at once.

    tokens, targets: [samples, sequence], of all ranks. document_tokens: the length of the documents within
    which tokens attend; 0 for no documents.
    """
    mine = slice(mesh.data.index, None, mesh.data.degree)
    samples = torch.arange(shape.samples, device=tokens.device)[mine]
    documents = None
    if document_tokens:
        numbers = torch.arange(shape.sequence_length, device=tokens.device, dtype=torch.int32)
        documents = (numbers // document_tokens).expand(len(samples), -1).contiguous()
    at_once = micro_batch or len(samples)
    return [
        MicroBatch(
            tokens=tokens[mine][at : at + at_once],
            targets=targets[mine][at : at + at_once],
            documents=None if documents is None else documents[at : at + at_once],
            samples=samples[at : at + at_once],
        )
        for at in range(0, len(samples), at_once)
    ]


def _minimal(shape: Shape, *, compiled: bool) -> Step:
    from peers_minimal import MinimalGPT

    sizes = asdict(shape)
    del sizes["samples"], sizes["ffn"]
    module = MinimalGPT(**sizes)
    tokens, targets = random_batch(shape)
    return _plain(module, lambda model: model(tokens, targets), compiled=compiled)


def _transformers(shape: Shape, *, compiled: bool) -> Step:
    from transformers import LlamaConfig, LlamaForCausalLM

    module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            max_position_embeddings=shape.sequence_length,
            tie_word_embeddings=False,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    tokens, _ = random_batch(shape)  # it shifts the labels itself
    return _plain(module, lambda model: model(input_ids=tokens, labels=tokens).loss, compiled=compiled)


def _litgpt(shape: Shape, *, compiled: bool) -> Step:
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    module = GPT(
        Config(
            block_size=shape.sequence_length,
            vocab_size=shape.vocabulary,
            padded_vocab_size=shape.vocabulary,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_embd=shape.hidden,
            intermediate_size=shape.ffn,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
        )
    )
    for weight in module.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
    tokens, targets = random_batch(shape)
    return _plain(module, lambda model: chunked_cross_entropy(model(tokens), targets), compiled=compiled)


def _plain(module: nn.Module, loss_of: Callable[[nn.Module], Tensor], *, compiled: bool) -> Step:
    """The training step that each of the peers' own trainers amounts to."""
    module = module.to(device(), DTYPES[precision()]).train()
    model = torch.compile(module) if compiled else module
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step() -> Tensor:
        loss = loss_of(model)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def section_of(shape: Shape) -> ModelSection:
    return ModelSection(layers=shape.layers, hidden=shape.hidden, heads=shape.heads, ffn=shape.ffn)


def random_batch(shape: Shape) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = (shape.samples, shape.sequence_length + 1)
    window = torch.randint(shape.vocabulary, size, generator=generator).to(device())
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
