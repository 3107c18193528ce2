"""Weights of others, step by step: which files, shapes, codes, parts and names are taken, by value."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.disk_calls import recorded

from bloomery import errors
from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError, StorageError
from bloomery.interchange import foreign_files, tensor_matching, weight_files
from bloomery.interchange.families import FAMILIES
from bloomery.interchange.families.family import HfTensor
from bloomery.interchange.foreign_files import PickledObject, load_plain
from bloomery.interchange.quantised_weights import _ALLOWED, _NO_EFFECT, _SKIPPED, Scheme, scheme_of
from bloomery.interchange.tensor_matching import Match, as_stored, matches, read_rows
from bloomery.interchange.weight_files import (
    CHECKSUMS,
    PlannedTensor,
    StoredTensor,
    WeightFiles,
    check_checksums,
    write_shards,
)
from bloomery.model.shape import resolve


def stored(**tensors: tuple[str, tuple[int, ...]]) -> WeightFiles:
    listed = {
        name.replace("__", "."): StoredTensor(file=f"{name}.safetensors", dtype=dtype, shape=shape)
        for name, (dtype, shape) in tensors.items()
    }
    return WeightFiles(directory=Path("/there"), tensors=listed)


def test_files_of_too_few_tensors_for_the_layers_are_refused() -> None:
    section = ModelSection(layers=2, hidden=8, heads=2)
    files = stored(a=("F32", (1,)), b=("F32", (1,)))
    assert as_stored(section, FAMILIES["llama"], files) is section
    with pytest.raises(CheckpointError, match=r"and the files hold 2 tensors(?s:.*)all of the files"):
        as_stored(ModelSection(layers=3, hidden=8, heads=2), FAMILIES["llama"], files)
    tied = ModelSection(layers=1, hidden=8, heads=2, tied=True)
    assert as_stored(tied, FAMILIES["llama"], files) is tied


def test_what_no_model_of_the_file_has_is_named_and_counted() -> None:
    model = resolve(ModelSection(layers=1, hidden=8, heads=2), vocabulary=20, sequence_length=6)
    family = FAMILIES["llama"]
    entry = HfTensor(name="model.norm.weight", parts=("final_norm.weight",))
    files = stored(norm__weight=("BF16", (8,)))
    assert matches([entry], model=model, family=family, files=files) == (
        Match(entry=entry, stored="norm.weight"),
    )
    derived = "layers.0.self_attn.rotary_emb.inv_freq"
    more = {"norm__weight": ("F32", (8,)), derived.replace(".", "__"): ("F32", (4,))}
    assert len(matches([entry], model=model, family=family, files=stored(**more))) == 1
    for unknown, said in (
        (["score__weight"], "score.weight, which no llama of this config.json has."),
        (["x__qweight", "y"], "x.qweight, which no llama of this config.json has, and 1 more."),
        (["x__absmax", "y", "z"], "x.absmax, which no llama of this config.json has, and 2 more."),
    ):
        files = stored(**more, **dict.fromkeys(unknown, ("F32", (1,))))
        with pytest.raises(CheckpointError) as refused:
            matches([entry], model=model, family=family, files=files)
        assert refused.value.message == f"/there/{unknown[0]}.safetensors holds {said}"
        is_quantised = unknown[0] != "score__weight"
        assert ("quantised weights" in refused.value.remedy) is is_quantised
    with pytest.raises(CheckpointError, match=r"(?s)shape \(7,\), .* asks for \(8,\).*of the same model"):
        matches([entry], model=model, family=family, files=stored(norm__weight=("F32", (7,))))


def test_rows_are_read_from_their_first_to_before_their_last_and_must_be_numbers(tmp_path: Path) -> None:
    values = torch.arange(12.0).reshape(6, 2).to(torch.bfloat16)
    values[5, 1] = torch.inf
    save_file({"w": values, "v": values[:, :1].clone()}, tmp_path / "model.safetensors")
    files = weight_files.open_weights(tmp_path)
    match = Match(entry=HfTensor(name="w", parts=("w",)), stored="w")
    rows = read_rows(match, files=files, start=1, stop=3)
    assert rows.dtype == torch.float32 and rows.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    said = rf"w of {tmp_path}/model.safetensors holds 0 NaN and 1 infinities among 4 values"
    with pytest.raises(CheckpointError, match=said):
        read_rows(match, files=files, start=4, stop=6)
    assert not files.are_equal("w", "v")


def test_codes_are_those_of_the_schemes_type_with_scales_of_their_shape_beside() -> None:
    scheme = Scheme(kind="fp8", dtype="F8_E4M3", block=(2, 2))

    def is_coded(dtype: str, scale: tuple[str, tuple[int, ...]] | None) -> bool:
        tensors = {"w": StoredTensor(file="f", dtype=dtype, shape=(4, 3))}
        if scale is not None:
            tensors["w_scale_inv"] = StoredTensor(file="f", dtype=scale[0], shape=scale[1])
        return WeightFiles(directory=Path("d"), tensors=tensors, scheme=scheme).is_coded("w")

    assert is_coded("F8_E4M3", ("F32", (2, 2))) and is_coded("F8_E4M3", ("BF16", (2, 2)))
    assert not is_coded("F8_E5M2", ("F32", (2, 2))) and not is_coded("F8_E4M3", None)
    assert not is_coded("F8_E4M3", ("I8", (2, 2))) and not is_coded("F8_E4M3", ("F32", (2, 1)))
    plain = {"w": StoredTensor(file="f", dtype="F8_E4M3", shape=(4, 3))}
    assert not WeightFiles(directory=Path("d"), tensors=plain).is_coded("w")


def test_each_setting_of_codes_has_the_values_that_are_computed_and_no_others() -> None:
    for method, base in (("fp8", {}), ("bitsandbytes", {"load_in_8bit": True})):
        section = {"quant_method": method, **base}
        kind = scheme_of({"quantization_config": section}, transposes=False)
        assert kind is not None and kind.skipped == ()
        for key in sorted(_NO_EFFECT - {"fmt"}):
            assert scheme_of({"quantization_config": section | {key: "x"}}, transposes=False) == kind
        for key, values in _ALLOWED[method].items():
            for value in values:
                assert scheme_of({"quantization_config": section | {key: value}}, transposes=False) == kind
            with pytest.raises(CheckpointError, match=f"(?s)config.{key} = 'another'.*dequantize"):
                scheme_of({"quantization_config": section | {key: "another"}}, transposes=False)
        names = {key: [f"{key}.{number}"] for number, key in enumerate(_SKIPPED)}
        skipping = scheme_of({"quantization_config": section | names}, transposes=False)
        assert skipping is not None and skipping.skipped == tuple(name for (name,) in names.values())
    unnamed = scheme_of({"quantization_config": {"load_in_8bit": True}}, transposes=False)
    assert unnamed == Scheme(kind="int8", dtype="I8")
    assert unnamed.claims("a.weight") == ("a.SCB", "a.weight_format")
    assert Scheme(kind="fp8", dtype="F8_E4M3").claims("a.weight") == ("a.weight_scale_inv",)
    assert scheme_of({}, transposes=True) is None
    assert scheme_of({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, transposes=False)


def test_shards_need_their_bytes_and_a_margin_and_are_written_in_the_planned_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = [PlannedTensor(name=name, shape=(10,), dtype=torch.float16) for name in "ab"]
    tensors = [(name, torch.ones(10, dtype=torch.float16)) for name in "ab"]
    free = [2 * 20 + (1 << 20) - 1]
    monkeypatch.setattr(errors, "free_bytes", lambda path: free[0])
    with pytest.raises(StorageError, match="Exporting a model"):
        write_shards(tmp_path, plan, tensors, max_shard_bytes=1000)
    assert list(tmp_path.iterdir()) == []
    free[0] += 1
    (name,) = write_shards(tmp_path, plan, tensors, max_shard_bytes=1000)
    assert name == "model.safetensors" and [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(StorageError, match="File exists"):
        write_shards(tmp_path, plan, tensors, max_shard_bytes=1000)
    (tmp_path / name).unlink()
    with pytest.raises(AssertionError, match="out of order"):
        write_shards(tmp_path, plan, tensors[::-1], max_shard_bytes=1000)


def test_shards_and_their_index_are_synced_before_anybody_is_told_of_them(tmp_path: Path) -> None:
    planned = [PlannedTensor(name=name, shape=(3,), dtype=torch.float32) for name in "ab"]
    with recorded() as calls:
        write_shards(tmp_path, planned, [(name, torch.ones(3)) for name in "ab"], max_shard_bytes=12)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert calls.names == [("sync", name) for name in (*shards, "model.safetensors.index.json")]


def test_an_empty_file_and_a_range_at_the_beginning_are_told_as_damage(tmp_path: Path) -> None:
    (tmp_path / "a.pt").touch()
    with pytest.raises(CheckpointError, match=r"a\.pt cannot be read without(?s:.*)torch.save"):
        load_plain(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt cannot be read at byte 0 without .*: EOFError"):
        load_plain(tmp_path / "a.pt", begin=0, length=5)


def test_layers_of_megatron_count_by_their_numbers_and_not_by_their_names(tmp_path: Path) -> None:
    for layer in (99, 100):
        torch.save(
            {"input_layernorm.weight": torch.tensor([float(layer)])},
            tmp_path / f"layer_{layer}-model_00-model_states.pt",
        )
    found = foreign_files.read_megatron(tmp_path)
    assert {name: tensor().item() for name, tensor in found.items()} == {
        "transformer.h.0.input_layernorm.weight": 99.0,
        "transformer.h.1.input_layernorm.weight": 100.0,
    }


def test_what_all_ranks_hold_may_differ_by_rounding_of_small_values_and_keeps_its_type() -> None:
    file = Path("a")
    small = [torch.tensor([value], dtype=torch.bfloat16) for value in (0.0, 0.01)]
    mean = foreign_files._mean([file], "norm.bias", small)
    assert mean.dtype == torch.bfloat16 and mean.item() == pytest.approx(0.005, rel=1e-2)
    with pytest.raises(CheckpointError, match=r"norm\.bias of a should be equal on all ranks"):
        foreign_files._mean([file], "norm.bias", [torch.tensor([0.0]), torch.tensor([0.03])])
    far = [torch.tensor([value]) for value in (100.0, 101.0)]
    assert foreign_files._mean([file], "norm.bias", far).item() == 100.5


def test_a_disk_that_fills_while_shards_are_written_is_told_with_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bloomery.durable.os.fsync", full)
    planned = [PlannedTensor(name="a", shape=(500_000,), dtype=torch.float32)]
    with pytest.raises(StorageError, match=rf"Exporting a model failed at {tmp_path}.*2\.0 MB needed"):
        write_shards(tmp_path, planned, [("a", torch.ones(500_000))], max_shard_bytes=1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_a_list_of_checksums_is_believed_only_where_each_line_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_BLOCK_BYTES", 2)
    check_checksums(tmp_path)
    (tmp_path / "a").write_bytes(b"abc")
    digest = "06b05ab6733a618578af5f94892f3950"  # of b"abc", by xxh128sum
    (tmp_path / CHECKSUMS).write_text(f"{digest}  a\n")
    check_checksums(tmp_path)
    damaged = f"{tmp_path / CHECKSUMS} is damaged"
    for content, said in (
        (f"{digest}  a\n{digest}  b\n", f"{tmp_path / 'b'} is missing: {tmp_path / CHECKSUMS} lists it"),
        (f"{digest[:-1]}1  a\n", f"{tmp_path / 'a'} is not what was exported"),
        (f"{digest} a\n", damaged),
        (f"{digest}  ../a\n", damaged),
        (f"{digest.upper()}  a\n", damaged),
        (f"{digest}  a\n\n", damaged),
        (b"\xff", damaged),
    ):
        (tmp_path / CHECKSUMS).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(CheckpointError, match=re.escape(said)) as refused:
            check_checksums(tmp_path)
        assert refused.value.remedy.startswith("Fetch or copy ")


def test_a_part_of_a_file_is_read_from_its_first_byte_and_damage_is_told_with_its_place(
    tmp_path: Path,
) -> None:
    for number in range(2):
        torch.save(torch.tensor([number]), tmp_path / f"{number}")
    first, second = ((tmp_path / f"{number}").read_bytes() for number in range(2))
    (tmp_path / "both").write_bytes(first + second)
    loaded = load_plain(tmp_path / "both", begin=len(first), length=len(second))
    assert isinstance(loaded, torch.Tensor) and loaded.tolist() == [1]
    with pytest.raises(CheckpointError, match=r"both cannot be read at byte 1,000 without running"):
        load_plain(tmp_path / "both", begin=1000, length=20)
    with pytest.raises(CheckpointError, match=r"gone cannot be read without running"):
        load_plain(tmp_path / "gone")
    torch.save({"a": 1}, tmp_path / "mapping")
    size = (tmp_path / "mapping").stat().st_size
    with pytest.raises(CheckpointError, match=r"mapping holds no tensor at byte 0(?s:.*)Take another"):
        foreign_files._read(tmp_path, "mapping", 0, size)
    with pytest.raises(CheckpointError, match=r"name the file 'a/mapping', outside of it"):
        foreign_files._read(tmp_path, "a/mapping", 0, size)
    torch.save([torch.ones(1)], tmp_path / "list")
    with pytest.raises(CheckpointError, match=r"list holds no tensors by name(?s:.*)Take another"):
        foreign_files._load(tmp_path / "list")


@pytest.mark.parametrize(
    ("name", "is_block", "expected"),
    [
        ("mlp.dense_h_to_4h.bias", True, "transformer.h.4.mlp.dense_h_to_4h.bias"),
        ("word_embeddings.weight", False, "transformer.word_embeddings.weight"),
        ("word_embeddings.norm.weight", False, "transformer.word_embeddings_layernorm.weight"),
        ("word_embeddings.norm.bias", False, "transformer.word_embeddings_layernorm.bias"),
        ("position_embeddings.weight", False, "transformer.wpe.weight"),
        ("weight", False, "transformer.ln_f.weight"),
        ("bias", False, "transformer.ln_f.bias"),
        ("lm_head.weight", False, "lm_head.weight"),
    ],
)
def test_megatrons_names_become_those_of_transformers(name: str, is_block: bool, expected: str) -> None:
    names = (name, "input_layernorm.weight") if is_block else (name,)
    assert foreign_files._hugging_face_name(name, names, 4) == expected


@pytest.mark.parametrize(
    ("name", "joined"),
    [
        ("self_attention.query_key_value.bias", [1.0, 2.0, 3.0, 2.0]),
        ("mlp.dense_h_to_4h.bias", [1.0, 2.0, 3.0, 2.0]),
        ("self_attention.dense.bias", [2.0, 2.0]),
        ("mlp.dense_4h_to_h.bias", [2.0, 2.0]),
        ("post_attention_layernorm.bias", [2.0, 2.0]),
        ("word_embeddings.norm.weight", [2.0, 2.0]),
        ("position_embeddings.weight", [2.0, 2.0]),
        ("bias", [2.0, 2.0]),
    ],
)
def test_what_the_ranks_hold_in_part_is_joined_and_what_all_hold_is_averaged(
    name: str, joined: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {Path("0"): torch.tensor([1.0, 2.0]), Path("1"): torch.tensor([3.0, 2.0])}
    monkeypatch.setattr(foreign_files, "_load", lambda path: {name: parts[path]})
    monkeypatch.setattr(foreign_files, "_mean", lambda files, name, parts: sum(parts) / len(parts))
    assert foreign_files._joined([Path("0"), Path("1")], name).tolist() == joined
    assert foreign_files._joined([Path("1")], name).tolist() == [3.0, 2.0]


def test_tensors_that_the_recipe_lacks_are_refused_unless_they_follow_from_it() -> None:
    one, other = torch.ones(2), torch.zeros(2)
    lazy: dict[str, Callable[[], torch.Tensor]] = {"m.wte": lambda: one, "m.head": lambda: one}
    how: dict[str, Any] = {"begins": {"wte", "head", "h"}, "tied": ("wte", "head")}
    refuse = tensor_matching._refuse_unclaimed
    refuse(Path("d"), lazy, "m.", ["wte"], **how)
    refuse(Path("d"), {**lazy, "m.optim.x": lambda: one, "h.x": lambda: one}, "m.", ["wte"], **how)
    derived = re.compile(r"h\.\d+\.bias")
    refuse(Path("d"), {**lazy, "m.h.3.bias": lambda: one}, "m.", ["wte"], **how, derived=derived)
    for more, said in (
        ({"m.head": lambda: other}, "holds 1 tensors that the recipe's model has not: head"),
        ({"m.h.3.bias": lambda: one, "m.h.4": lambda: one}, "holds 2 tensors .* not: h.3.bias, h.4"),
    ):
        with pytest.raises(CheckpointError, match=said):
            refuse(Path("d"), {**lazy, **more}, "m.", ["wte"], **how)


def test_the_scheme_of_codes_counts_for_one_file_and_for_several(tmp_path: Path) -> None:
    scheme = Scheme(kind="int8", dtype="I8")
    plan = [PlannedTensor(name=name, shape=(3,), dtype=torch.float32) for name in "ab"]
    for most, files in ((100, 1), (12, 2)):
        directory = tmp_path / str(files)
        directory.mkdir()
        tensors = [(name, torch.ones(3)) for name in "ab"]
        assert len(write_shards(directory, plan, tensors, max_shard_bytes=most)) == files
        found = weight_files.open_weights(directory, scheme=scheme)
        assert found.scheme is scheme and list(found.tensors) == ["a", "b"]
        assert weight_files.open_weights(directory).scheme is None


def test_a_matrix_of_codes_equals_the_weights_that_they_stand_for_whichever_is_asked_first(
    tmp_path: Path,
) -> None:
    codes = torch.tensor([[127, 0], [-127, 127]], dtype=torch.int8)
    tensors = {"head.weight": codes, "head.SCB": torch.tensor([2.0, 4.0])}
    save_file(
        {**tensors, "embed.weight": torch.tensor([[2.0, 0.0], [-4.0, 4.0]])}, tmp_path / "model.safetensors"
    )
    found = weight_files.open_weights(tmp_path, scheme=Scheme(kind="int8", dtype="I8"))
    assert found.is_coded("head.weight") and not found.is_coded("embed.weight")
    assert found.are_equal("embed.weight", "head.weight") and found.are_equal("head.weight", "embed.weight")


def test_tensors_are_compared_to_their_last_row_whatever_a_slice_holds(tmp_path: Path) -> None:
    same, other = torch.arange(12.0).reshape(4, 3), torch.arange(12.0).reshape(4, 3)
    other[3, 2] = 0
    tensors = {
        "a": same,
        "same": same.to(torch.bfloat16),
        "last": other,
        "fewer": same[:3],
        "flat": same[:, 0],
    }
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    found = weight_files.open_weights(tmp_path)
    for slice_bytes in (1, 24, 36, 1 << 20):
        assert [name for name in tensors if found.are_equal("a", name, slice_bytes=slice_bytes)] == [
            "a",
            "same",
        ]
        assert not found.are_equal("fewer", "a", slice_bytes=slice_bytes)


def record(**state: Any) -> PickledObject:
    made = PickledObject()
    made.state = state
    return made


def test_each_chunk_of_a_tensor_is_read_from_the_file_and_the_place_that_hold_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.arange(8.0).reshape(2, 4)
    chunks = [record(offsets=(0, start), sizes=(2, 2)) for start in (0, 2)]
    described = {"w": record(size=(2, 4), chunks=chunks), "step": record()}
    held = {
        record(fqn="w", offset=(0, 2)): record(relative_path="a", offset=7, length=5),
        record(fqn="w", offset=(0, 0)): record(relative_path="b", offset=3, length=6),
        record(fqn="step"): record(relative_path="a", offset=0, length=7),
    }
    parts = {("b", 3, 6): tensor[:, :2], ("a", 7, 5): tensor[:, 2:]}
    metadata = record(state_dict_metadata=described, storage_data=held)
    monkeypatch.setattr(foreign_files, "_metadata", lambda path: metadata)
    monkeypatch.setattr(foreign_files, "_read", lambda directory, *place: parts[place])
    found = foreign_files.read_dcp(Path("there"))
    assert list(found) == ["w"] and torch.equal(found["w"](), tensor)
    del held[next(iter(held))]
    with pytest.raises(CheckpointError, match="does not describe a checkpoint"):
        foreign_files.read_dcp(Path("there"))


def test_metadata_that_are_no_record_are_damaged(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(["w"]))
    with pytest.raises(CheckpointError, match=r"\.metadata holds no metadata(?s:.*)Take another copy"):
        foreign_files.read_dcp(tmp_path)
