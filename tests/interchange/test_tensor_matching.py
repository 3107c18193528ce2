"""Each stored tensor is used, known as derived, or refused by name, in whatever way others left it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.errors import CheckpointError
from bloomery.interchange.huggingface import export, fill, import_
from bloomery.interchange.tensor_matching import refuse_non_finite
from bloomery.model.decoder import build
from bloomery.model.logical_parameters import logical_parameters

VOCABULARY, LENGTH = 96, 24
EMBEDDINGS = {
    "llama": "model.embed_tokens.weight",
    "bloom": "transformer.word_embeddings.weight",
    "gpt2": "transformer.wte.weight",
}
Change = Callable[[dict[str, torch.Tensor]], None]


def their_model(family: str, *, tied: bool = True) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    sizes: dict[str, dict[str, Any]] = {
        "llama": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
        "bloom": {"hidden_size": 48, "n_layer": 2, "n_head": 6},
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LENGTH},
    }
    config = transformers.AutoConfig.for_model(
        family, vocab_size=VOCABULARY, tie_word_embeddings=tied, initializer_range=0.2, **sizes[family]
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def written(model: transformers.PreTrainedModel, directory: Path, change: Change) -> Path:
    """The model as `save_pretrained` writes it, its tensors then changed."""
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def logits_of(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Ours after an import, and those of transformers."""
    found = import_(directory)
    ours = build(found.model, vocabulary=VOCABULARY, sequence_length=LENGTH)
    fill(ours, found.tensors)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % VOCABULARY
    with torch.no_grad():
        return ours.logits(ours(tokens)), theirs(tokens).logits


@pytest.mark.parametrize("family", EMBEDDINGS)
@pytest.mark.parametrize("head", ["another", "equal", "alone"])
def test_a_stored_head_beside_tied_embeddings_counts_as_transformers_takes_it(
    family: str, head: str, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors[EMBEDDINGS[family]]
        tensors["lm_head.weight"] = embedding.clone() if head != "another" else embedding.flip(0).contiguous()
        if head == "alone":
            del tensors[EMBEDDINGS[family]]

    directory = written(their_model(family), tmp_path, change)
    own, their = logits_of(directory)
    torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-5)
    assert import_(directory).model.tied == (head != "another")


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.1.attn.bias"),
        ("gpt2", "h.0.attn.masked_bias"),
    ],
)
def test_tensors_that_follow_from_the_settings_are_left_out(family: str, name: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)

    own, their = logits_of(written(their_model(family), tmp_path, change))
    torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-5)


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.update({QUERY: t[QUERY].to(torch.int8)}), rf"{QUERY} of .* stored as I8: codes"),
        (lambda t: t.update({QUERY: t[QUERY].to(torch.float8_e4m3fn)}), rf"{QUERY} of .* stored as F8_E4M3"),
        (lambda t: t.update({QUERY: t[QUERY].double()}), rf"{QUERY} of .* stored as F64(?s:.*)dequantize"),
        (
            lambda t: t.update({QUERY + "_scale_inv": torch.ones(1, 1)}),
            rf"holds {QUERY}_scale_inv.*\n.*quanti",
        ),
        (lambda t: t.update({QUERY[:-6] + "SCB": torch.ones(32)}), r"holds .*q_proj\.SCB.*\n.*quantised"),
        (
            lambda t: t.update({"score.weight": torch.ones(2, 32)}),
            r"holds score\.weight, which no llama(?s:.*)other heads",
        ),
        (
            lambda t: t.update({QUERY: t[QUERY][:-1].clone()}),
            rf"{QUERY} of .* shape \(31, 32\), .* \(32, 32\)",
        ),
        (lambda t: t.pop(QUERY), rf"lacks the tensor {QUERY}(?s:.*)all of its files"),
        (lambda t: t.update({"lm_head.weight": torch.ones(95, 32)}), r"lm_head\.weight of .* \(95, 32\)"),
    ],
    ids=["int8", "fp8", "fp64", "scale", "SCB", "another head", "shape", "missing", "shape of the head"],
)
def test_a_tensor_that_is_not_the_models_plain_weight_is_refused_by_name(
    change: Change, told: str, tmp_path: Path
) -> None:
    directory = written(their_model("llama", tied=False), tmp_path, change)
    with pytest.raises(CheckpointError, match=told):
        import_(directory)


@pytest.mark.parametrize(("value", "told"), [("nan", "1 NaN and 0 inf"), ("-inf", "0 NaN and 1 inf")])
def test_weights_that_are_not_finite_are_refused_with_name_and_count(
    value: str, told: str, tmp_path: Path
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"][VOCABULARY - 1, 31] = float(value)  # no probe looks there

    found = import_(written(their_model("llama", tied=False), tmp_path, change))
    with pytest.raises(CheckpointError, match=rf"embed_tokens.* holds {told}.* first at \(95, 31\)"):
        list(found.tensors)


@pytest.mark.parametrize(
    ("value", "dtype", "told"),
    [
        (float("nan"), "fp32", r"embedding\.weight of .*: 1 NaN|embedding\.weight of .* holds 1 NaN"),
        (1e6, "fp16", r"embedding\.weight of .* rounded to torch\.float16, holds 0 NaN and 1 infinities"),
    ],
)
def test_an_export_scans_every_value_and_keeps_nothing_where_one_is_not_finite(
    value: float, dtype: str, told: str, tmp_path: Path
) -> None:
    found = import_(written(their_model("llama", tied=False), tmp_path / "theirs", lambda tensors: None))
    decoder = build(found.model, vocabulary=VOCABULARY, sequence_length=LENGTH)
    fill(decoder, found.tensors)
    tensors = {logical.name: logical.tensor for logical in logical_parameters(decoder)}
    tensors["embedding.weight"][VOCABULARY - 1, 31] = value
    entries = [whole(f"model.{name}", tensor) for name, tensor in sorted(tensors.items())]
    checkpoint = save_checkpoint(tmp_path / "checkpoints", entries, step=0, incarnation=1)
    with pytest.raises(CheckpointError, match=told):
        export(found.resolved, checkpoint, tmp_path / "out", dtype=dtype)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "theirs"]


def test_slow_but_exact_bloom_of_several_ranks_is_refused_by_name(tmp_path: Path) -> None:
    written(their_model("bloom"), tmp_path, lambda tensors: None)
    config = json.loads((tmp_path / "config.json").read_text()) | {"slow_but_exact": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own, their = logits_of(tmp_path)  # of one rank it computes the same
    torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(config | {"pretraining_tp": 2}))
    with pytest.raises(CheckpointError, match=r"slow_but_exact = True.*\n.*pretraining_tp = 2"):
        import_(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            r"rope_scaling = .*\n.*rope_parameters beside it",
        ),
        ({"rope_theta": 5.0}, r"rope_theta = 5\.0"),
    ],
)
def test_two_words_for_one_thing_that_differ_are_refused(
    changes: dict[str, object], told: str, tmp_path: Path
) -> None:
    written(their_model("llama"), tmp_path, lambda tensors: None)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_parameters"]["rope_type"] == "default"
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=told):
        import_(tmp_path)


def test_an_adapter_beside_the_model_is_not_passed_over(tmp_path: Path) -> None:
    written(their_model("gpt2"), tmp_path, lambda tensors: None)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"(?s)adapter.*model\.merge_and_unload\(\), then"):
        import_(tmp_path)


def test_asking_a_tensor_for_nan_takes_no_second_copy_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, isfinite = [], torch.Tensor.isfinite

    def watched(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor.numel())
        return isfinite(tensor)

    monkeypatch.setattr(torch.Tensor, "isfinite", watched)
    refuse_non_finite("w", torch.zeros(3, 1 << 20), where="a file")
    assert sum(asked) == 3 << 20 and max(asked) <= 1 << 20
    broken = torch.zeros(3, 1 << 20)
    broken[2, 7] = torch.inf
    with pytest.raises(CheckpointError, match=r"0 NaN and 1 infinities .* at \(2, 7\)"):
        refuse_non_finite("w", broken, where="a file")


def test_a_head_does_not_take_the_place_of_the_embedding_of_a_model_that_is_not_tied(tmp_path: Path) -> None:
    theirs = written(
        their_model("llama", tied=False),
        tmp_path / "theirs",
        lambda tensors: tensors.pop(EMBEDDINGS["llama"]),
    )
    with pytest.raises(CheckpointError, match=f"lacks the tensor {EMBEDDINGS['llama']}"):
        import_(theirs)
