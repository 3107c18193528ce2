"""What comes from elsewhere, many times: Megatron's own builder as a peer, and damaged exports.

The other long checks are slow tests beside the quick ones, which run the same functions with more draws:
`pytest -m slow tests/data/test_megatron_equal.py` and `BLOOMERY_SOAK_EXAMPLES=3000 pytest
tests/data/test_proven_tokenizers.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tests.data.test_megatron_equal import drawn_weights, normalize
from tests.data.test_proven_tokenizers import BYTE_LEVEL, EOD, tokenizer_json
from transformers.utils import logging as transformers_logging

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import main
from bloomery.config.model import ModelSection
from bloomery.data.megatron_order import Blend, DocumentRow
from bloomery.interchange.huggingface import export, import_
from bloomery.interchange.weight_files import CHECKSUMS
from bloomery.model.shape import ResolvedModel, logical_shapes, resolve

SEED = int(os.environ.get("BLOOMERY_SOAK_SEED", "1"))
BLENDS, ROWS, DAMAGES = 10_000, 300, 1_000


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The library of megatron-core's wheel, alone: the package itself needs much that is not wanted here."""
    directory = tmp_path_factory.mktemp("megatron")
    fetched = subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", directory, "megatron-core"],
        check=False,
        timeout=600,
    )
    wheels = list(directory.glob("*.whl"))
    if fetched.returncode or not wheels:
        pytest.skip("pip finds no megatron-core")
    shutil.unpack_archive(wheels[0], directory, "zip")
    found = list(directory.glob("megatron/core/datasets/helpers_cpp*.so"))
    if not found:
        pytest.skip("this wheel of megatron-core has no built helpers")
    spec = importlib.util.spec_from_file_location("helpers_cpp", found[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_blends_of_random_weights_are_those_of_megatrons_own_builder(builder: ModuleType) -> None:
    draw = np.random.default_rng(SEED)
    differ = 0
    for _ in range(BLENDS):
        weights = drawn_weights(draw, int(draw.integers(1, 33)))
        size = int(draw.integers(1, 3000))
        datasets, samples = np.zeros(size, np.int16), np.zeros(size, np.int64)
        twice = np.array(normalize(normalize(weights)))
        builder.build_blending_indices(datasets, samples, twice, len(weights), size, False)
        ours = Blend(weights, size)
        turns = ours.locate(np.arange(size))[1]
        differ += not (np.array_equal(ours.datasets, datasets) and np.array_equal(turns, samples))
    assert differ == 0
    print(f"{BLENDS} blends of up to 32 datasets and 3,000 samples: {differ} differ")


@pytest.mark.slow
def test_samples_begin_where_megatrons_own_builder_begins_them(builder: ModuleType) -> None:
    draw = np.random.default_rng(SEED)
    compared = 0
    for _ in range(ROWS):
        length = int(draw.integers(2, 200))
        sizes = draw.integers(0 if draw.random() < 0.5 else 1, int(draw.integers(2, 400)), 500).astype(
            np.int32
        )
        tokens, epochs = int(sizes.sum()), int(draw.integers(1, 4))
        if tokens < 2 * length:
            continue
        samples = (epochs * tokens - 1) // length
        row = DocumentRow(sizes, samples=samples, sequence_length=length, seed=int(draw.integers(2**31)))
        index = builder.build_sample_idx_int32(sizes, row.order, length, row.epochs, tokens, True, 1)
        begins = np.concatenate([[0], row.ends[:-1]])
        theirs = begins[index[:, 0]] + index[:, 1]
        assert theirs.tolist() == [length * at for at in range(len(index))]
        assert len(index) - 1 == row.sample_count
        compared += len(index)
    assert compared > 10_000
    print(f"{compared:,} beginnings of samples are equal")


def exported(directory: Path) -> Path:
    """A small model with a tokenizer, in several shards, tied or not, as `ckpt export` writes it."""
    section = ModelSection(layers=2, hidden=16, heads=2, kv_heads=1, ffn=24, vocabulary=300, bias=True)
    model: ResolvedModel = resolve(section, vocabulary=300, sequence_length=16)
    torch.manual_seed(SEED)
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in logical_shapes(model).items()}
    entries = [whole(f"model.{name}", tensor) for name, tensor in tensors.items()]
    checkpoint = save_checkpoint(directory / "checkpoints", entries, step=1, incarnation=1)
    tokenizer = directory / "tokenizer.json"
    tokenizer.write_text(json.dumps(tokenizer_json(BYTE_LEVEL, [])))
    export(
        model,
        checkpoint,
        directory / "exported",
        tokenizer=tokenizer,
        end_of_document=EOD,
        max_shard_bytes=24_000,
    )
    return directory / "exported"


def flip(directory: Path, draw: random.Random) -> str:
    path = chosen(directory, draw)
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 1, 20))):
        content[draw.randrange(len(content))] ^= draw.randrange(1, 256)
    path.write_bytes(content)
    return f"bytes of {path.name}"


def cut(directory: Path, draw: random.Random) -> str:
    path = chosen(directory, draw)
    content = path.read_bytes()
    at = draw.randrange(len(content))
    path.write_bytes(draw.choice((content[:at], content[at:], content + content[:at], b"", content[:8])))
    return f"the length of {path.name}"


def remove(directory: Path, draw: random.Random) -> str:
    path = chosen(directory, draw)
    path.unlink()
    if draw.random() < 0.2:
        path.mkdir()
    return f"{path.name} is gone"


def change_json(directory: Path, draw: random.Random) -> str:
    """Change one value, anywhere in a JSON file, or in the header of a shard."""
    path = chosen(directory, draw)
    content = path.read_bytes()
    is_shard = path.suffix == ".safetensors"
    size = int.from_bytes(content[:8], "little") if is_shard else 0
    try:
        value = json.loads(content[8 : 8 + size] if is_shard else content)
    except ValueError:
        return flip(directory, draw)  # a list of checksums
    key = change_one(value, draw)
    header = json.dumps(value).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :] if is_shard else header)
    return f"{key} of {path.name}"


def change_one(value: object, draw: random.Random) -> str:
    """Replace, remove or add one entry of nested lists and objects, and say which."""
    other = draw.choice((None, 0, -1, 7, 1.5, "", "x", [], {}, [1], True, 2**70, "F32", [3, 5], "\ud800"))
    if not isinstance(value, dict | list) or not value:
        return "nothing"
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = draw.choice(list(keys))
    if isinstance(value[key], dict | list) and value[key] and draw.random() < 0.8:  # type: ignore[index]
        return f"{key}.{change_one(value[key], draw)}"  # type: ignore[index]
    if draw.random() < 0.3:
        del value[key]  # type: ignore[union-attr, arg-type]
    elif draw.random() < 0.2 and isinstance(value, dict):
        value[f"{key}_"] = other
    else:
        value[key] = other  # type: ignore[index, call-overload]
    return str(key)


def chosen(directory: Path, draw: random.Random) -> Path:
    return draw.choice([path for path in sorted(directory.iterdir()) if path.is_file()])


@pytest.mark.slow
@pytest.mark.parametrize("checksums", [True, False], ids=["with checksums", "without checksums"])
def test_a_damaged_export_is_refused_or_equal_and_never_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], checksums: bool
) -> None:
    """Without checksums a changed value of a weight is another weight: only that nothing is raised counts."""
    transformers_logging.disable_default_handler()  # it writes to what pytest closes after the first case
    original = exported(tmp_path)
    right = dict(import_(original).tensors)
    draw = random.Random(SEED)
    kinds: list[Callable[[Path, random.Random], str]] = [flip, cut, remove, change_json, change_json]
    outcomes = {"refused": 0, "equal": 0, "other": 0}
    for number in range(DAMAGES):
        damaged, run = tmp_path / "damaged", tmp_path / "run"
        shutil.copytree(original, damaged)
        if not checksums:
            (damaged / CHECKSUMS).unlink()
        what = kinds[number % len(kinds)](damaged, draw)
        status = main(["ckpt", "import", str(damaged), "--to", str(run)])
        said = capsys.readouterr()
        assert "Traceback" not in said.err, what
        if status:
            assert said.err.startswith("bloomery ") and not run.exists(), (what, said.err)
            outcomes["refused"] += 1
        else:
            found = dict(import_(damaged).tensors)
            alike = found.keys() == right.keys() and all(torch.equal(found[key], right[key]) for key in right)
            outcomes["equal" if alike else "other"] += 1
            assert alike or not checksums, what
        shutil.rmtree(damaged)
        shutil.rmtree(run, ignore_errors=True)
    with capsys.disabled():
        print(f"{DAMAGES} damages {'with' if checksums else 'without'} checksums: {outcomes}")
