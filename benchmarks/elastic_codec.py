"""Codecs of the ring beside memcpy and plain torch operations; what they lose; the frames' checksum.

Each round times a copy of the array, then each kernel; values are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
from contract import Measurement, measurement, report

from bloomery.transport.gradient_codec import Codec, decode, encode, encoded_size, functions

FRAME_BYTES = 64 << 10


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="of the quantisation beside torch")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found = [*speeds(options), *errors(), checksum(options.rounds)]
    return report(found, as_json=options.json)


def speeds(options: argparse.Namespace) -> list[Measurement]:
    values = np.random.default_rng(1).standard_normal(options.elements, np.float32)
    other, encoded = np.zeros_like(values), np.zeros(encoded_size(values.size, "int8"), np.uint8)
    native, wide = functions(), " avx512f " in Path("/proc/cpuinfo").read_text()
    int8, data, codes, total = Codec.INT8.number, values.ctypes.data, encoded.ctypes.data, other.ctypes.data
    kernels: dict[str, Callable[[], object]] = {
        "quantise": lambda: native["encode"](int8, data, values.size, 1, codes),
        "dequantise and accumulate": lambda: native["accumulate"](int8, codes, values.size, 1, total),
        "dequantise": lambda: native["decode"](int8, codes, values.size, 1, total),
        f"quantise, {options.threads} threads": lambda: native["encode"](
            int8, data, values.size, options.threads, codes
        ),
    }
    if not options.without_torch:
        kernels |= torch_kernels(values, options.threads)
    ratios: dict[str, list[float]] = {name: [] for name in kernels}
    copies = []
    for number in range(options.rounds + 1):
        copy_s = timed(lambda: np.copyto(other, values))
        for name, kernel in kernels.items():
            seconds = timed(kernel)
            if number:  # the first touches memory for the first time
                ratios[name].append(seconds / copy_s)
        copies.append(copy_s)
    units = "AVX-512" if wide else "no AVX-512"
    beside = f"{values.size / 1e6:.1f}M values, memcpy {median(copies) * 1e3:.1f} ms, {units}"
    bars = {
        "quantise": "<= 1.3" if wide else "<= 1.8",
        "dequantise and accumulate": "<= 1.2" if wide else "<= 1.8",
    }
    return [
        measurement(
            f"elastic_codec: int8, {name}",
            median(found),
            unit="x memcpy",
            reference=beside,
            bar=bars.get(name),
        )
        for name, found in ratios.items()
    ]


def torch_kernels(values: np.ndarray, threads: int) -> dict[str, Callable[[], object]]:
    """The same arithmetic in torch's own operations."""
    import torch

    torch.set_num_threads(threads)
    blocks = torch.from_numpy(values[: values.size // 512 * 512]).view(-1, 512)

    def quantise() -> tuple[torch.Tensor, torch.Tensor]:
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127
        return scales, (blocks / scales).round_().to(torch.int8)

    return {f"quantise in torch operations, {threads} threads": quantise}


def errors() -> list[Measurement]:
    """Relative error of a sum over two members, as a ring makes it: one part quantised, and then the sum."""
    random = np.random.default_rng(2)
    plain = random.standard_normal((2, 1 << 22), np.float32)
    outlying = np.where(random.random(plain.shape) < 0.001, 30 * plain, plain).astype(np.float32)
    found = []
    for kind, bars in (("int8", ("<= 1.5", "<= 5")), ("int4", (None, None)), ("bf16", (None, None))):
        for name, parts, bar in zip(
            ("Gaussian", "0.1% outliers at 30 sigma"), (plain, outlying), bars, strict=True
        ):
            total = through(through(parts[0], kind) + parts[1], kind)
            exact = parts.sum(axis=0, dtype=np.float64)
            error = 100 * float(np.linalg.norm(total - exact) / np.linalg.norm(exact))
            title = f"elastic_codec: {kind}, relative error, {name}"
            found.append(measurement(title, error, unit="%", reference="2 members, one round", bar=bar))
    return found


def through(values: np.ndarray, kind: str) -> np.ndarray:
    out = np.empty_like(values)
    decode(encode(values, kind), kind, out)
    return out


def checksum(rounds: int) -> Measurement:
    """Of frames of the usual length, warm. 10 Gbit/s both ways are 2.5 GB/s."""
    frame = np.zeros(64 + FRAME_BYTES, np.uint8)
    frame[40:44] = np.array([FRAME_BYTES], np.uint32).view(np.uint8)
    seal, key = functions()["seal_frame"], bytes(32)
    frames = 2000

    def seal_many() -> None:
        for _ in range(frames):
            seal(key, 1, frame.ctypes.data)

    speed = median([frames * FRAME_BYTES / timed(seal_many) / 1e9 for _ in range(rounds)])
    return measurement(
        "elastic_codec: keyed checksum of frames",
        speed,
        unit="GB/s",
        reference="64 KiB, one thread",
        bar=">= 2.5",
    )


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
