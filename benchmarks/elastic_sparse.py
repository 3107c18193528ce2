"""What the sparse codec costs in loss: four peers beside four that send int8, at equal tokens.

Each arm is a training of a byte model of 0.12M parameters on Python's own library. Offers, error feedback,
codes and outer steps are those of real rounds; the ring is arithmetic in one process.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from contract import Measurement, measurement, report
from tests.diloco.test_pseudo_gradient import OneTensor

from bloomery.config.elastic import SPARSE, ElasticSection
from bloomery.diloco.outer_update import Reduced
from bloomery.diloco.pseudo_gradient import PseudoGradient
from bloomery.diloco.stored_average import StoredAverage
from bloomery.plan.peer_round import peer_ring_bytes
from bloomery.transport.gradient_codec import Float32, decode, encode
from bloomery.transport.sparse_codec import Words, average_sparse, encode_sparse

PEERS, BATCH, LENGTH = 4, 4, 64
WIDTH, LAYERS, HEADS, VOCABULARY = 64, 2, 4, 256
HELD_OUT = 64 * LENGTH
RATE, FLOOR, WARMUP = 2e-3, 0.1, 0.05

SHAPES = {"embedding": (VOCABULARY, WIDTH), "position": (LENGTH, WIDTH), "norm": (WIDTH,)} | {
    f"{layer}.{name}": shape
    for layer in range(LAYERS)
    for name, shape in {
        "qkv": (3 * WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (4 * WIDTH, WIDTH),
        "down": (WIDTH, 4 * WIDTH),
        "norm_1": (WIDTH,),
        "norm_2": (WIDTH,),
    }.items()
}
NUMEL = sum(math.prod(shape) for shape in SHAPES.values())


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=80)
    options.add_argument("--steps", type=int, default=5, help="inner steps of a round")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rate", type=float, default=3.0, help="outer learning rate of the sparse arm")
    options.add_argument("--decay", type=float, default=0.98, help="elastic.feedback_decay")
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args(arguments)
    torch.set_num_threads(1)
    common = {"inner_steps": chosen.steps, "peers": PEERS}
    int8 = ElasticSection(codec="int8", outer_learning_rate=0.7, outer_momentum=0.5, **common)
    sparse = ElasticSection(
        codec=SPARSE,
        outer_learning_rate=chosen.rate,
        outer_momentum=0.0,
        feedback_decay=chosen.decay,
        **common,
    )
    tokens = corpus()
    losses = {
        section.codec: [trained(section, tokens, rounds=chosen.rounds, seed=seed) for seed in seeds]
        for section in (int8, sparse)
        for seeds in [range(1, chosen.seeds + 1)]
    }
    bytes_of = {codec: peer_ring_bytes(NUMEL, codec, PEERS, density=sparse.density) for codec in losses}
    told = ", ".join(f"{codec} {fmean(each):.4f}" for codec, each in losses.items())
    size = f"{chosen.seeds} seeds, {chosen.rounds} rounds of {chosen.steps}"
    return report(
        [
            measurement(
                "elastic_sparse: held-out loss of sparse beside int8 at equal tokens",
                fmean(losses[SPARSE]) / fmean(losses["int8"]),
                unit="times",
                reference=f"{told} nats a byte; {size}",
                bar="<= 1.02",
            ),
            _bytes(bytes_of),
        ],
        as_json=chosen.json,
    )


def _bytes(bytes_of: dict[str, float]) -> Measurement:
    return measurement(
        "elastic_sparse: bytes that a peer sends a round, beside int8",
        bytes_of[SPARSE] / bytes_of["int8"],
        unit="times",
        reference=f"{PEERS} peers; tests/diloco/test_sparse_average.py counts them on the wire",
        bar="<= 0.05",
    )


def corpus() -> Tensor:
    """The bytes of modules of Python's own library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))


def trained(section: ElasticSection, tokens: Tensor, *, rounds: int, seed: int) -> float:
    """The held-out loss of the shared weights after so many rounds."""
    peers = [OneTensor(NUMEL) for _ in range(PEERS)]
    updates = [PseudoGradient(peer, section) for peer in peers]  # type: ignore[arg-type]  — a vector is all
    first = initial(seed)
    for peer, update in zip(peers, updates, strict=True):
        peer.weights = first.clone()
        update.begin()
    inner = Inner(steps=rounds * section.inner_steps, tokens=tokens, seed=seed)
    for round in range(1, rounds + 1):
        for _ in range(section.inner_steps):
            weights = inner.step(torch.stack([peer.weights for peer in peers]))
            for peer, own in zip(peers, weights, strict=True):
                peer.weights = own
        make_round(section, updates, round)
    with torch.no_grad():
        text = tokens[-HELD_OUT - 1 :]
        return float(loss_of(updates[0].base, text[:-1].view(-1, LENGTH), text[1:].view(-1, LENGTH)))


def make_round(section: ElasticSection, updates: Sequence[PseudoGradient], round: int) -> None:
    """Average the peers' parts as their codec has them, and make the outer step of each."""
    weight = 1.0 / len(updates)
    for update in updates:
        update.offer(round)
    (piece,) = updates[0].pieces()
    parts = [update.values(weight, piece) for update in updates]
    if section.codec == SPARSE:
        codes = np.stack([encode_sparse(values.numpy(), section.density) for values, _ in parts])

        def gather(gathered: Words) -> None:
            gathered[:] = codes

        for index, (values, residual) in enumerate(parts):
            average_sparse(
                values.numpy(),
                gather=gather,
                weights=[weight] * len(updates),
                index=index,
                density=section.density,
                residual=None if residual is None else residual.numpy(),
            )
    else:
        total = sum((sent(values.numpy()) * np.float32(weight) for values, _ in parts), np.float32(0))
        parts = [(torch.from_numpy(sent(total)), None)] * len(updates)
    for update, (values, residual) in zip(updates, parts, strict=True):
        update.prepare(Reduced(average=StoredAverage.of(values.numpy()), residual=residual))
        update.adopt()


def sent(values: Float32) -> Float32:
    """The values after int8 has rounded them."""
    out = np.empty_like(values)
    decode(encode(values, "int8", threads=1), "int8", out, threads=1)
    return out


class Inner:
    """AdamW of all peers, one row each, with a warm-up and a cosine over the run."""

    def __init__(self, *, steps: int, tokens: Tensor, seed: int) -> None:
        self._steps, self._tokens, self._step = steps, tokens[: -HELD_OUT - 1], 0
        self._chance = torch.Generator().manual_seed(seed)
        self._mean, self._square = torch.zeros(PEERS, NUMEL), torch.zeros(PEERS, NUMEL)
        self._gradients = vmap(grad(loss_of))

    def step(self, weights: Tensor) -> Tensor:
        """One step of every peer on samples of its own. weights: [peers, elements]."""
        self._step += 1
        part = self._step / self._steps
        rate = RATE * min(1.0, part / WARMUP) * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * part)) / 2)
        starts = torch.randint(0, len(self._tokens) - LENGTH, (PEERS, BATCH, 1), generator=self._chance)
        samples = self._tokens[starts + torch.arange(LENGTH + 1)]
        gradients = self._gradients(weights, samples[..., :-1], samples[..., 1:])
        gradients *= (1.0 / gradients.norm(dim=1, keepdim=True)).clamp(max=1.0)
        self._mean.lerp_(gradients, 0.1)
        self._square.lerp_(gradients.square(), 0.05)
        root = (self._square / (1 - 0.95**self._step)).sqrt() + 1e-8
        return weights * (1 - 0.1 * rate) - rate * self._mean / (1 - 0.9**self._step) / root


def initial(seed: int) -> Tensor:
    """Matrices of deviation 0.02, and norms of 0, which scale by 1."""
    chance = torch.Generator().manual_seed(seed)
    return torch.cat(
        [
            (0.02 * torch.randn(shape, generator=chance) if len(shape) > 1 else torch.zeros(shape)).flatten()
            for shape in SHAPES.values()
        ]
    )


def loss_of(flat: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of a small decoder. flat: all weights; inputs, targets: [samples, length]."""
    sizes = [math.prod(shape) for shape in SHAPES.values()]
    of = {name: part.view(SHAPES[name]) for name, part in zip(SHAPES, torch.split(flat, sizes), strict=True)}
    hidden = of["embedding"][inputs] + of["position"]
    masked = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
    for layer in range(LAYERS):
        normed = functional.rms_norm(hidden, (WIDTH,)) * (1 + of[f"{layer}.norm_1"])
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (normed @ of[f"{layer}.qkv"].T).chunk(3, -1)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + masked
        hidden = hidden + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2) @ of[f"{layer}.out"].T
        normed = functional.rms_norm(hidden, (WIDTH,)) * (1 + of[f"{layer}.norm_2"])
        hidden = hidden + functional.gelu(normed @ of[f"{layer}.up"].T) @ of[f"{layer}.down"].T
    logits = functional.rms_norm(hidden, (WIDTH,)) * (1 + of["norm"]) @ of["embedding"].T
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    sys.exit(main())
