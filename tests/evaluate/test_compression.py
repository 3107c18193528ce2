from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from bloomery.config.model import ModelSection
from bloomery.data.indexed import IndexedDataset, IndexedWriter
from bloomery.data_loader.batches import held_out_batches
from bloomery.evaluate.scoring import compress, xz_bits_per_byte
from bloomery.model.decoder import build
from bloomery.model.initial_filling import initialise

EOD, LENGTH = 0, 8


@pytest.fixture
def documents() -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [np.array([*random.integers(1, 30, size), EOD]) for size in (5, 8, 1, 21, 16)]


def test_each_token_is_coded_once_and_sees_only_its_document(
    documents: list[np.ndarray], tmp_path: Path
) -> None:
    with IndexedWriter(tmp_path / "text", dtype=np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    decoder = build(
        ModelSection(layers=2, hidden=16, heads=2, ffn=24, init_std=0.5),
        vocabulary=30,
        sequence_length=LENGTH,
    )
    initialise(decoder, seed=1)
    expected = 0.0
    for document in documents:  # each document's own windows, one at a time
        stream = torch.tensor([EOD, *document.tolist()])
        for start in range(0, len(stream) - 1, LENGTH):
            window = stream[start : start + LENGTH + 1]
            logits = decoder.logits(decoder(window[None, :-1]))[0]
            picked = logits.log_softmax(-1).gather(-1, window[1:, None])
            expected -= picked.sum().item() / math.log(2)
    batches = held_out_batches(IndexedDataset(tmp_path / "text"), sequence_length=LENGTH, rows=3, eod=EOD)
    result = compress(decoder, batches, text_bytes=100, chunk=5)
    assert result.tokens == sum(map(len, documents))
    assert result.bits == pytest.approx(expected, rel=1e-5)
    assert result.bits_per_byte == result.bits / 100


@pytest.mark.needs("xz", package="xz-utils")
def test_xz_is_the_xz_of_the_command_line(tmp_path: Path) -> None:
    texts = [Path(torch.__file__).read_bytes(), b"def main() -> None:\n" * 500]
    ours = xz_bits_per_byte(texts)
    packed = subprocess.run(
        ["xz", "-9e", "--stdout"], input=b"".join(texts), capture_output=True, check=True, timeout=60
    )
    assert ours == 8 * len(packed.stdout) / sum(map(len, texts))
