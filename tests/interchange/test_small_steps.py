"""The small steps of reading foreign weights: chunks, ranks, paddings, codes, shards and ids, by value."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.errors import CheckpointError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange import foreign_files, tensor_matching, weight_files
from bloomery.interchange.described_weights import (
    end_of_document_of,
    is_run_or_checkpoint,
    newest_checkpoint_in,
)
from bloomery.interchange.directories import read_object
from bloomery.interchange.foreign_files import is_megatron, read_megatron
from bloomery.interchange.generation_files import _before, keep_generation_files, text_bounds
from bloomery.interchange.logits_check import _where
from bloomery.interchange.quantised_weights import Scheme, is_row_format, scheme_of
from bloomery.interchange.slim import slim_file
from bloomery.interchange.weight_files import PlannedTensor, open_weights, write_checksums, write_shards


def chunked(
    monkeypatch: pytest.MonkeyPatch,
    size: tuple[int, ...],
    *chunks: tuple[tuple[int, ...], tuple[int, ...], Tensor],
) -> Tensor:
    parts = {f"f{number}": part for number, (_, _, part) in enumerate(chunks)}
    monkeypatch.setattr(foreign_files, "_read", lambda directory, file, begin, length: parts[file])
    places = [(name, 0, 1) for name in parts]
    boxes = [(offsets, sizes) for offsets, sizes, _ in chunks]
    return foreign_files._assembled(Path("there"), "w", size, boxes, places)


def test_chunks_are_put_where_they_belong_and_must_fill_their_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    left, right = ((0, 0), (3, 1), tensor[:, :1]), ((0, 1), (3, 3), tensor[:, 1:])
    assert torch.equal(chunked(monkeypatch, (3, 4), right, left), tensor)
    assert torch.equal(chunked(monkeypatch, (3, 4), ((0, 0), (3, 4), tensor)), tensor)
    for chunks, said in (
        ([left], "do not fill it"),
        ([left, right, left], "do not fill it"),
        ([], "do not fill it"),
        ([((0, 0), (3, 2), tensor[:, :1])], r"holds \(3, 1\) for w, and its metadata say \(3, 2\)"),
        ([left, ((0, 2), (3, 3), tensor[:, 1:])], "lies outside of it"),
        ([left, ((-1, 1), (3, 3), tensor[:, 1:])], "lies outside of it"),
        ([((0,), (3, 1), tensor[:, :1])], "lies outside of it"),
        ([((0, 0, 0), (3, 1, 1), tensor[:, :1, None])], "lies outside of it"),
    ):
        with pytest.raises(CheckpointError, match=said):
            chunked(monkeypatch, (3, 4), *chunks)


def megatron(directory: Path, layer: int, rank: int, **tensors: Tensor) -> None:
    content = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    torch.save(content, directory / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")


def test_the_parts_of_megatrons_ranks_are_joined_by_rows_by_columns_or_as_their_mean(tmp_path: Path) -> None:
    assert not is_megatron(tmp_path)
    columns, rows = torch.arange(12.0).reshape(3, 4), torch.arange(20.0).reshape(4, 5)
    for rank in range(2):
        block = {
            "input_layernorm__weight": torch.tensor([1.0 + rank * 1e-3, 2.0]),
            "self_attention__dense__weight": columns[:, 2 * rank : 2 * rank + 2],
            "mlp__dense_h_to_4h__weight": rows[2 * rank : 2 * rank + 2],
            "mlp__dense_4h_to_h__bias": torch.tensor([5.0], dtype=torch.bfloat16),
        }
        megatron(tmp_path, 3, rank, **block)
        megatron(tmp_path, 4, rank, **block)
        megatron(tmp_path, 1, rank, word_embeddings__weight=torch.full((2, 3), float(rank)))
        megatron(tmp_path, 2, rank, position_embeddings__weight=torch.ones(2, 3))
        megatron(tmp_path, 6, rank, weight=torch.tensor([3.0]), bias=torch.tensor([4.0]))
    assert is_megatron(tmp_path)
    found = read_megatron(tmp_path)
    first = "transformer.h.0."
    assert torch.equal(found[f"{first}self_attention.dense.weight"](), columns)
    assert torch.equal(found["transformer.h.1.mlp.dense_h_to_4h.weight"](), rows)
    assert torch.equal(found[f"{first}input_layernorm.weight"](), torch.tensor([1.0005, 2.0]))
    assert found[f"{first}mlp.dense_4h_to_h.bias"]().dtype == torch.bfloat16
    assert found["transformer.word_embeddings.weight"]().tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert torch.equal(found["transformer.wpe.weight"](), torch.ones(2, 3)), "which no rank holds a part of"
    assert (found["transformer.ln_f.weight"]().item(), found["transformer.ln_f.bias"]().item()) == (3.0, 4.0)
    files = [tmp_path / f"layer_06-model_{rank:02d}-model_states.pt" for rank in range(2)]
    near, far = (torch.tensor([value, 0.0]) for value in (1.0, 1.03))
    assert foreign_files._mean(files, "w", [near, torch.tensor([1.019, 0.0])]).tolist() == [
        pytest.approx(1.0095),
        0.0,
    ]
    large = [torch.tensor([100.0]), torch.tensor([101.0])]
    assert foreign_files._mean(files, "w", large).tolist() == [100.5]
    with pytest.raises(CheckpointError, match=r"w of layer_06-.* differs by 0.015"):
        foreign_files._mean(files, "w", [near, far])


def test_megatron_files_of_different_checkpoints_are_refused_by_the_tensor(tmp_path: Path) -> None:
    for rank in range(2):
        norm = torch.ones(3 + rank)
        block = {"input_layernorm__weight": norm, "mlp__dense_h_to_4h__weight": torch.ones(2, 3 + rank)}
        more = {} if rank else {"self_attention__dense__weight": torch.ones(2, 3)}
        megatron(tmp_path, 3, rank, **block, **more)
    found = read_megatron(tmp_path)
    for name, said in (
        ("self_attention.dense.weight", r"layer_03-model_01-.*pt lacks the tensor self_attention.dense"),
        ("input_layernorm.weight", r"do not fit together: \(3,\), \(4,\)"),
        ("mlp.dense_h_to_4h.weight", r"do not fit together: \(2, 3\), \(2, 4\)"),
    ):
        with pytest.raises(CheckpointError, match=rf"(?s){said}.*Check that all files are of one checkpoint"):
            found[f"transformer.h.0.{name}"]()


def test_the_first_rank_that_a_megatron_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    megatron(tmp_path, 3, 10**6, weight=torch.ones(1))
    with pytest.raises(CheckpointError, match=r"lacks layer_03-model_00-model_states\.pt"):
        read_megatron(tmp_path)


@pytest.mark.parametrize(
    ("name", "rows", "is_taken"),
    [
        ("model.lm_head.weight", 9, True),
        ("embedding.weight", 9, True),
        ("head.weight", 9, True),
        ("transformer.word_embeddings.weight", 9, True),
        ("model.embed_tokens.weight", 9, True),
        ("wte.weight", 8, True),
        ("head.weight", 7, True),
        ("wte.weight", 6, False),
        ("blocks.0.up.weight", 9, False),
    ],
)
def test_only_rows_that_pad_a_vocabulary_are_left_out(name: str, rows: int, is_taken: bool) -> None:
    tensor = torch.arange(rows * 3).reshape(rows, 3).to(torch.bfloat16)
    if is_taken:
        fitted = tensor_matching._fitting(Path("there"), name, tensor, (7, 3))
        assert fitted.dtype == torch.float32 and torch.equal(fitted, tensor[:7].float())
    else:
        with pytest.raises(CheckpointError, match=r"and the recipe's is(?s:.*)Give the recipe of this model"):
            tensor_matching._fitting(Path("there"), name, tensor, (7, 3))


def test_codes_and_values_that_are_no_numbers_never_become_weights() -> None:
    with pytest.raises(CheckpointError, match=r"codes of quantised weights(?s:.*)in one of these types"):
        tensor_matching._fitting(Path("there"), "w", torch.ones(7, 3, dtype=torch.int8), (7, 3))
    wrong = torch.tensor([[1.0, float("nan")], [float("inf"), float("-inf")]])
    with pytest.raises(
        CheckpointError,
        match=r"1 NaN and 2 infinities among 4 values, the first at \(0, 1\)(?s:.*)Take",
    ):
        tensor_matching._fitting(Path("there"), "w", wrong, (2, 2))


def test_of_several_prefixes_the_shortest_counts_and_it_ends_at_a_dot() -> None:
    lazy = dict.fromkeys(["a.b.w", "a.w", "xw"], lambda: torch.ones(1))
    assert tensor_matching._prefix(lazy, "w") == "a."
    assert tensor_matching._prefix({"w": lazy["xw"], **lazy}, "w") == ""
    assert tensor_matching._prefix({"xw": lazy["xw"]}, "w") is None
    assert tensor_matching._first_names(list("abc")) == "a, b, c"
    assert tensor_matching._first_names(list("abcde")) == "a, b, c and 2 more"


FP8: dict[str, Any] = {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("section", "transposes", "expected"),
    [
        (FP8, False, (128, 128)),
        (FP8 | {"weight_block_size": [16, 32], "activation_scheme": "dynamic"}, False, (16, 32)),
        (FP8 | {"weight_block_size": None}, False, None),
        (FP8, True, "quant_method"),
        (FP8 | {"weight_block_size": (16, 32)}, False, "weight_block_size"),
        (FP8 | {"weight_block_size": [16]}, False, "weight_block_size"),
        (FP8 | {"weight_block_size": []}, False, "weight_block_size"),
        (FP8 | {"weight_block_size": [16, 0]}, False, "weight_block_size"),
        (FP8 | {"weight_block_size": [16, 1.5]}, False, "weight_block_size"),
        (FP8 | {"unknown": None}, False, "unknown"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, False, "modules_to_not_convert"),
        (FP8 | {"modules_to_not_convert": [5]}, False, "modules_to_not_convert"),
        ({"quant_method": "bitsandbytes"}, False, "load_in_8bit"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "weight_block_size": [1, 1]}, False, "block"),
    ],
)
def test_each_setting_of_codes_is_understood_or_refused(
    section: dict[str, Any], transposes: bool, expected: tuple[int, int] | str | None
) -> None:
    content = {"quantization_config": section}
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            scheme_of(content, transposes=transposes)
    else:
        scheme = scheme_of(content, transposes=transposes)
        assert scheme is not None and (scheme.kind, scheme.block) == ("fp8", expected)


def test_codes_become_weights_by_the_scale_of_their_block_or_row() -> None:
    codes = torch.tensor([[1.0, 2, 3], [4, 5, 6], [7, 8, 9]])
    for scheme, scale, expected in (
        (Scheme(kind="fp8", dtype="F8_E4M3", block=(2, 1)), [[1.0, 10, 100], [2, 20, 200]],
         [[1, 20, 300], [4, 50, 600], [14, 160, 1800]]),
        (Scheme(kind="fp8", dtype="F8_E4M3"), [3.0], [[3, 6, 9], [12, 15, 18], [21, 24, 27]]),
        (Scheme(kind="int8", dtype="I8"), [127.0, 254, 0], [[1, 2, 3], [8, 10, 12], [0, 0, 0]]),
    ):  # fmt: skip
        read = {"up.weight": codes, scheme.scale_of("up.weight"): torch.tensor(scale)}
        assert scheme.read("up.weight", read.__getitem__).tolist() == expected
    blocks = Scheme(kind="fp8", dtype="F8_E4M3", block=(16, 32))
    assert blocks.scale_shapes((33, 33)) == ((3, 2),) and blocks.scale_shapes((33,)) == ()
    assert Scheme(kind="int8", dtype="I8").scale_shapes((33, 5)) == ((33,),)
    assert Scheme(kind="fp8", dtype="F8_E4M3").scale_shapes((33, 5)) == ((), (1,))
    for stored, is_one in (([0], True), ([2], False), ([0, 0], False)):
        assert is_row_format(torch.tensor(stored, dtype=torch.uint8)) is is_one


def planned(*sizes: int) -> list[PlannedTensor]:
    return [PlannedTensor(name=f"w{n}", shape=(size,), dtype=torch.int8) for n, size in enumerate(sizes)]


def test_a_shard_is_filled_to_the_byte_and_a_larger_tensor_has_one_alone(tmp_path: Path) -> None:
    cut = weight_files._cut(planned(3, 4, 5, 1, 20, 2), 7)
    assert [[tensor.bytes for tensor in shard] for shard in cut] == [[3, 4], [5, 1], [20], [2]]
    assert [len(shard) for shard in weight_files._cut(planned(20, 2), 7)] == [1, 1]
    assert weight_files._file_names(1) == ["model.safetensors"]
    assert weight_files._file_names(12)[10] == "model-00011-of-00012.safetensors"
    plan = [*planned(3, 4), PlannedTensor(name="b", shape=(2, 3), dtype=torch.bfloat16)]
    tensors = [(tensor.name, torch.ones(tensor.shape, dtype=tensor.dtype)) for tensor in plan]
    sums = write_shards(tmp_path, plan, tensors, max_shard_bytes=7)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 3 + 4 + 12}
    assert index["weight_map"]["w1"] == "model-00001-of-00002.safetensors"
    files = open_weights(tmp_path)
    assert files.tensors["b"].shape == (2, 3) and torch.equal(files.read("b"), tensors[2][1])
    write_checksums(tmp_path, known={"model-00001-of-00002.safetensors": "0" * 32})
    lines = (tmp_path / "checksums.xxh128").read_text().splitlines()
    assert lines[0] == f"{'0' * 32}  model-00001-of-00002.safetensors"
    assert lines[1] == f"{sums['model-00002-of-00002.safetensors']}  model-00002-of-00002.safetensors"
    assert len(lines) == 3


def test_an_index_that_names_no_file_of_its_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)has no model\.safetensors.*model\.save_pretrained"):
        open_weights(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    save_file({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / "a.safetensors")
    for weight_map, said in (
        ({"w": "../a.safetensors"}, "no file of this directory"),
        ({"w": 5}, "no file of this directory"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
        ({"w": "a.safetensors"}, "does not say that a.safetensors holds v"),
        ({"w": "a.safetensors", "v": "a.safetensors", "u": "a.safetensors"}, "holds u, which it does not"),
        ({"w": "b.safetensors"}, "is missing"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=said):
            open_weights(tmp_path)
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"(?s)has both.*Remove the one that is not the model"):
        open_weights(tmp_path)


def test_where_logits_differ_says_what_it_usually_means() -> None:
    difference = torch.zeros(2, 5, 3)
    difference[1, 3, 2], difference[0, 2, 0] = 0.5, 0.1
    told = _where(difference, 0.1)
    assert told.startswith("most at position 3 of the probe, first at position 3.")
    assert "how positions enter attention" in told
    assert "first at position 2" in _where(difference, 0.09)
    difference[1, 0, 1] = float("nan")
    assert "first at position 0" in _where(difference, 0.1) and "activation" in _where(difference, 0.1)


def test_the_ids_of_generation_are_the_files_own_and_only_those_that_the_model_has(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer.json"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "additional_chat_templates" / "tools.jinja").write_text("tools")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tokenizer))
    config = {"bos_token_id": 9, "eos_token_id": [3, "4", 5], "pad_token_id": 1}
    (model / "config.json").write_text(json.dumps(config))
    for number, (vocabulary, generation, expected) in enumerate(
        (
            (10, None, (9, [3, 5, 7])),
            (9, None, (7, [3, 5, 7])),
            (10, {"bos_token_id": 0}, (0, [3, 5, 7])),
            (10, {"bos_token_id": -1, "eos_token_id": 2}, (7, [2, 7])),
        )
    ):
        if generation is not None:
            (model / "generation_config.json").write_text(json.dumps(generation))
        rundir = RunDirectory(tmp_path / f"run{number}").create()
        keep_generation_files(model, rundir, tokenizer=tokenizer, end_of_document=7, vocabulary=vocabulary)
        kept = rundir.data / "transformers"
        bounds = text_bounds(kept, end_of_document=7)
        assert (bounds.empty, sorted(bounds.ends)) == expected
        assert (kept / "additional_chat_templates" / "tools.jinja").read_text() == "tools"
    own = text_bounds(None, end_of_document=7)
    assert own.opening([4, 5]) == [7, 4, 5] and own.opening([]) == [7]
    assert bounds.opening([]) == [7] and bounds.opening([4]) == [4], "this tokenizer puts nothing before"
    assert _before([1, 2, 8, 9], [8, 9]) == [1, 2] and _before([8, 9], [8, 9]) == []


def test_weights_to_begin_from_are_a_runs_newest_trusted_ones(tmp_path: Path) -> None:
    rundir = RunDirectory(tmp_path / "run").create()
    begin(rundir, base=None, reason="start")
    rundir.recipe.write_text("")
    assert is_run_or_checkpoint(rundir.path) and not is_run_or_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)has no checkpoints yet.*bloomery save RUN"):
        newest_checkpoint_in(rundir.path)
    first, second = (
        save_checkpoint(rundir.checkpoints, [whole("model.a", torch.ones(2))], step=step, incarnation=1)
        for step in (5, 10)
    )
    assert newest_checkpoint_in(rundir.path) == second and newest_checkpoint_in(first) == first
    assert is_run_or_checkpoint(first)
    (second / "suspect.json").write_text('{"why": "rank 3 erred"}')
    assert newest_checkpoint_in(rundir.path) == first


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"eos_token": "</s>"}, "</s>"),
        ({"eos_token": {"content": "<e>"}}, "<e>"),
        ({"eos_token": None}, None),
        ({"eos_token": 5}, None),
        ({"eos_token": {"content": 5}}, None),
        ({}, None),
    ],
)
def test_the_end_of_document_is_what_the_tokenizer_says(
    tmp_path: Path, content: dict[str, Any], expected: str | None
) -> None:
    assert end_of_document_of(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert end_of_document_of(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1]", "holds a list"),
        (b"{", "is not JSON"),
        (b"\xff{}", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_what_is_no_object_is_refused_by_its_file(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config.json {said}"):
        read_object(path)
    with pytest.raises(CheckpointError, match=r"(?s)cannot be read.*Fetch or copy the directory again"):
        read_object(tmp_path / "none.json")


def test_a_slim_file_counts_what_it_repaired_and_keeps_the_kinds_of_its_containers(tmp_path: Path) -> None:
    storage = torch.arange(100.0)
    content = {"view": storage[3:5], "all": storage, "pair": (storage[:1], [torch.ones(2)]), "step": 7}
    torch.save(content, tmp_path / "old.pt")
    done = slim_file(tmp_path / "old.pt", tmp_path / "new.pt")
    assert done.repaired == 2 and done.path == tmp_path / "new.pt"
    assert done.after == (tmp_path / "new.pt").stat().st_size
    assert done.before == (tmp_path / "old.pt").stat().st_size
    found = torch.load(tmp_path / "new.pt", weights_only=True)
    assert found["step"] == 7 and isinstance(found["pair"], tuple) and isinstance(found["pair"][1], list)
    assert found["view"].tolist() == [3.0, 4.0] and found["view"].untyped_storage().nbytes() == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.pt", "old.pt"]
    with pytest.raises(CheckpointError, match=r"(?s)exists already.*Choose another file, or remove it"):
        slim_file(tmp_path / "old.pt", tmp_path / "new.pt")
