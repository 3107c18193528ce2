"""Directories that were damaged on the way: refused with one message, or equal to what was exported."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.model import ModelSection
from bloomery.data.tokenizer import train_tokenizer
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.interchange import huggingface
from bloomery.interchange.logits_check import load_with_transformers
from bloomery.interchange.weight_files import CHECKSUMS, INDEX, SINGLE, open_weights, write_checksums
from bloomery.model.decoder import Decoder, build
from bloomery.model.initial_filling import initialise
from bloomery.model.logical_parameters import logical_parameters

EOD = "<|endoftext|>"
FIRST_SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-2 in two shards, with its tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = train_tokenizer(["def main():\n    return 1\n"] * 20, vocabulary=270, end_of_document=EOD)
    tokenizer.save(directory / "tokenizer.json")
    section = ModelSection(
        layers=1, hidden=8, heads=2, norm="layernorm", position="learned", activation="gelu", bias=True,
        tied=True, init_std=0.3,
    )  # fmt: skip
    decoder = build(section, vocabulary=tokenizer.vocabulary_size, sequence_length=8)
    initialise(decoder, seed=2)
    tensors = sorted((logical.name, logical.tensor) for logical in logical_parameters(decoder))
    entries = [whole(f"model.{name}", tensor) for name, tensor in tensors]
    checkpoint = save_checkpoint(directory / "checkpoints", entries, step=0, incarnation=1)
    huggingface.export(
        decoder.model,
        checkpoint,
        directory / "hf",
        tokenizer=directory / "tokenizer.json",
        end_of_document=EOD,
        max_shard_bytes=9000,
    )
    assert (directory / "hf" / FIRST_SHARD).is_file()
    return directory / "hf"


def copied(exported: Path, to: Path, *, checksums: bool) -> Path:
    shutil.copytree(exported, to)
    if not checksums:
        (to / CHECKSUMS).unlink()
    return to


def damage(directory: Path, draw: random.Random) -> Callable[[], None]:
    """Damage one file; returns what mends it."""
    path = draw.choice(sorted(path for path in directory.iterdir()))
    content = path.read_bytes()
    at = draw.randrange(len(content))
    kind = draw.choice(("bit", "byte", "shape", "cut", "missing", "empty", "longer"))
    if kind == "missing":
        path.unlink()
    elif kind == "shape":  # or another number of the text: a digit becomes another
        digits = [place for place, byte in enumerate(content[:4000]) if chr(byte).isdigit()] or [at]
        at = draw.choice(digits)
        path.write_bytes(content[:at] + str(draw.randrange(10)).encode() + content[at + 1 :])
    else:
        changed = {
            "bit": content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
            "byte": content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
            "cut": content[:at],
            "empty": b"",
            "longer": content + content[at:],
        }
        path.write_bytes(changed[kind])
    return lambda: path.write_bytes(content) and None


def taken(directory: Path) -> tuple[huggingface.Imported, dict[str, torch.Tensor]]:
    found = huggingface.import_(directory)
    return found, dict(found.tensors)


@pytest.mark.parametrize("seed", range(10))
def test_an_export_damaged_anywhere_is_refused_or_imported_as_it_was(
    seed: int, exported: Path, tmp_path: Path
) -> None:
    directory = copied(exported, tmp_path / "damaged", checksums=True)
    draw = random.Random(seed)
    section, tensors = taken(directory)[0].model, taken(directory)[1]
    refusals = 0
    for _ in range(100):
        mend = damage(directory, draw)
        try:
            found, values = taken(directory)
        except CheckpointError as refused:
            assert "\n" in str(refused), "a message and a remedy"
            refusals += 1
        else:
            assert found.model == section
            assert values.keys() == tensors.keys()
            assert all(torch.equal(values[name], tensors[name]) for name in tensors)
        mend()
    assert refusals > 80  # the rest changed nothing, or was the list of checksums itself


@pytest.mark.parametrize("seed", range(5))
def test_without_checksums_damage_is_refused_or_computes_what_transformers_makes_of_it(
    seed: int, exported: Path, tmp_path: Path
) -> None:
    directory = copied(exported, tmp_path / "damaged", checksums=False)
    draw = random.Random(1000 + seed)
    for _ in range(200):
        mend = damage(directory, draw)
        try:
            found, values = taken(directory)
        except BloomeryError as refused:
            assert "\n" in str(refused)
        else:
            ours = Decoder(found.resolved, device=torch.device("cpu"), dtype=torch.float32)
            huggingface.fill(ours, values.items())
            tokens = torch.arange(8)[None] * 31 % int(found.model.vocabulary)
            with torch.no_grad():
                their = load_with_transformers(directory)(tokens).logits
                torch.testing.assert_close(ours.logits(ours(tokens)), their, rtol=1e-4, atol=1e-4)
        mend()


def test_another_tensor_under_a_known_name_is_seen_by_its_checksum(exported: Path, tmp_path: Path) -> None:
    directory = copied(exported, tmp_path / "damaged", checksums=True)
    shard = directory / FIRST_SHARD
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"{FIRST_SHARD} is not what was exported(?s:.*)remove its line from there"
    ):
        huggingface.import_(directory)


INDEX_WITHOUT_MAP = json.dumps({"metadata": {}})


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.json", b"", r"config\.json is not JSON"),
        ("config.json", b"[]", r"config\.json holds a list, not an object"),
        ("config.json", b"\xef\xbb\xbf{}", r"config\.json is not JSON in UTF-8: .*BOM"),
        ("config.json", b"\xff\xfe", r"config\.json is not JSON in UTF-8"),
        ("config.json", b"[" * 100_000, r"config\.json is not JSON"),
        ("config.json", b"{}", "model_type None"),
        ("config.json", b'{"model_type": ["gpt2"]}', "model_type"),
        ("config.json", b'{"model_type": "gpt2", "n_layer": "1"}', "n_layer = '1'"),
        ("config.json", b'{"model_type": "gpt2", "n_layer": true}', "n_layer = True"),
        ("config.json", b'{"model_type": "gpt2", "n_layer": 2000000000}', "2,000,000,000 layers"),
        ("config.json", b'{"model_type": "gpt2", "n_head": 0}', "n_head = 0"),
        (INDEX, b"{", "index.json is not JSON"),
        (INDEX, INDEX_WITHOUT_MAP.encode(), "has no weight_map"),
        (INDEX, b'{"weight_map": []}', "has no weight_map"),
        (INDEX, b'{"weight_map": {"a": 3}}', "puts a into 3"),
        (INDEX, b'{"weight_map": {"a": "../other/model.safetensors"}}', "no file of this directory"),
        (INDEX, b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors is missing"),
        (INDEX, f'{{"weight_map": {{"a": "{FIRST_SHARD}"}}}}'.encode(), "index.json does not say that"),
        (FIRST_SHARD, b"", f"{FIRST_SHARD} cannot be read"),
        (FIRST_SHARD, b"garbage" * 100, f"{FIRST_SHARD} cannot be read"),
        (FIRST_SHARD, b"\xff" * 8, f"{FIRST_SHARD} cannot be read"),
        (SINGLE, b"", f"has both {SINGLE} and {INDEX}"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused_with_one_message(
    file: str, content: bytes, told: str, exported: Path, tmp_path: Path
) -> None:
    directory = copied(exported, tmp_path / "damaged", checksums=False)
    (directory / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=told):
        huggingface.import_(directory)


def test_a_shard_that_holds_a_tensor_of_another_shard_too_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(2)}, tmp_path / "two.safetensors")
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CheckpointError, match=r"does not say that one\.safetensors holds b"):
        open_weights(tmp_path)


def test_the_checksums_of_an_export_are_in_the_form_of_xxh128sum(exported: Path) -> None:
    import xxhash

    listed = dict(reversed(line.split("  ")) for line in (exported / CHECKSUMS).read_text().splitlines())
    assert listed.keys() == {path.name for path in exported.iterdir()} - {CHECKSUMS}
    for name, checksum in listed.items():
        assert xxhash.xxh3_128((exported / name).read_bytes()).hexdigest() == checksum


@pytest.mark.parametrize("row", [0, 1, 9])
def test_tensors_that_differ_in_one_row_alone_are_not_equal(tmp_path: Path, row: int) -> None:
    values = torch.arange(40.0).reshape(10, 4)
    other = values.clone()
    other[row, 3] += 1.0
    save_file({"a": values, "b": values.clone(), "c": other}, tmp_path / SINGLE)
    files = open_weights(tmp_path)
    assert files.are_equal("a", "b", slice_bytes=32)
    assert not files.are_equal("a", "c", slice_bytes=32)


def test_the_list_of_checksums_names_files_and_no_directories(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "known.bin").write_bytes(b"1")
    write_checksums(tmp_path, known={"known.bin": "ab" * 16})
    empty, known = (tmp_path / CHECKSUMS).read_text().splitlines()
    assert empty.endswith("  empty.txt") and known == f"{'ab' * 16}  known.bin"
