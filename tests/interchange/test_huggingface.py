"""Our decoder against transformers: logits, gradients, export and import of the families."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import sentencepiece
import torch
import transformers
from tests.disk_calls import recorded
from torch.nn import functional as F

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError, ExportRefused
from bloomery.interchange.families import family_of, hf_config, hf_tensors
from bloomery.interchange.huggingface import export, fill, import_
from bloomery.interchange.logits_check import CompareMethod, check_logits, load_with_transformers
from bloomery.interchange.tensor_matching import join_parts
from bloomery.model.decoder import Decoder, build
from bloomery.model.initial_filling import initialise
from bloomery.model.logical_parameters import logical_parameters

VOCABULARY, LENGTH = 96, 24


def llama(**settings: object) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **settings,
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            initializer_range=0.2,
        )
    )


def qwen3(*, head_dim: int = 8, attention_bias: bool = False) -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=72,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=head_dim,
            attention_bias=attention_bias,
            max_position_embeddings=LENGTH,
            initializer_range=0.2,
        )
    )


def bloom() -> transformers.PreTrainedModel:
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY, hidden_size=48, n_layer=2, n_head=6, initializer_range=0.2
    )
    return transformers.BloomForCausalLM(config)


def gpt2(activation: str = "gelu_new") -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=LENGTH,
        activation_function=activation,
        initializer_range=0.2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


FAMILIES = {
    "llama": llama,
    "llama with wide heads and a biased attention": lambda: llama(head_dim=20, attention_bias=True),
    "llama with narrow heads and a biased mlp": lambda: llama(head_dim=4, mlp_bias=True),
    "qwen3": qwen3,
    "qwen3 with wide heads and biases": lambda: qwen3(head_dim=12, attention_bias=True),
    "bloom": bloom,
    "gpt2 with gelu_new": gpt2,
    "gpt2 with gelu": lambda: gpt2("gelu"),
}


@pytest.fixture(params=FAMILIES)
def theirs(request: pytest.FixtureRequest) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    model = FAMILIES[request.param]().eval()
    with torch.no_grad():  # biases and norms start as constants, which would hide a wrong mapping
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def imported(directory: Path) -> Decoder:
    found = import_(directory)
    decoder = build(found.model, vocabulary=VOCABULARY, sequence_length=LENGTH)
    fill(decoder, found.tensors)
    return decoder


def test_an_imported_model_has_their_logits_and_gradients(
    theirs: transformers.PreTrainedModel, tmp_path: Path
) -> None:
    theirs.save_pretrained(tmp_path)
    ours = imported(tmp_path)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    own, their = ours.logits(ours(tokens)), theirs(tokens).logits
    torch.testing.assert_close(own, their, rtol=1e-5, atol=1e-5)
    for logits in (own, their):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    our_gradient = {
        logical.name: logical.parameter.grad[logical.row_start : logical.row_start + logical.rows]
        for logical in logical_parameters(ours)
    }
    their_parameters = dict(theirs.named_parameters())
    family = import_(tmp_path).family
    for entry in hf_tensors(ours.model, family):
        gradient = join_parts(entry, [our_gradient[part] for part in entry.parts], ours.model)
        torch.testing.assert_close(
            gradient,
            their_parameters[entry.name].grad,
            rtol=1e-5,
            atol=1e-5,
            msg=lambda m, e=entry: f"{e.name}: {m}",
        )


@pytest.mark.parametrize("way", ["whole", "blocks"])
def test_import_and_export_give_their_model_back(
    theirs: transformers.PreTrainedModel, tmp_path: Path, way: CompareMethod
) -> None:
    theirs.save_pretrained(tmp_path / "theirs")
    found = import_(tmp_path / "theirs")
    checkpoint = saved(found.tensors, tmp_path / "checkpoints")
    report = export(
        found.resolved, checkpoint, tmp_path / "ours", max_shard_bytes=20_000, way=way, dtype="fp32"
    )
    assert report.family == found.family
    assert (tmp_path / "ours" / "model.safetensors.index.json").is_file()
    again = load_with_transformers(tmp_path / "ours")
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def gpt2_section(**changes: object) -> ModelSection:
    settings: dict[str, object] = {
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "norm": "layernorm",
        "position": "learned",
        "activation": "gelu_tanh",
        "bias": True,
        "tied": True,
        "init_std": 0.3,
    }
    return ModelSection(**{**settings, **changes})


def ours_with_values(section: ModelSection) -> Decoder:
    decoder = build(section, vocabulary=VOCABULARY, sequence_length=LENGTH)
    initialise(decoder, seed=5)
    return decoder


def saved(tensors: Iterable[tuple[str, torch.Tensor]], directory: Path) -> Path:
    entries = [whole(f"model.{name}", tensor.contiguous()) for name, tensor in tensors]
    return save_checkpoint(directory, entries, step=0, incarnation=1)


def logical_tensors(decoder: Decoder) -> list[tuple[str, torch.Tensor]]:
    return sorted((logical.name, logical.tensor.clone()) for logical in logical_parameters(decoder))


@pytest.mark.parametrize(
    ("way", "told"),
    [
        ("whole", r"differ from ours by up to .* position .* activation"),
        ("blocks", r"differ from ours by up to .* block 0 is the first whose output does"),
    ],
)
def test_a_wrong_activation_makes_the_export_refuse_and_leaves_nothing(
    tmp_path: Path, way: CompareMethod, told: str
) -> None:
    def wrong(*arguments: object, **keywords: object) -> dict[str, object]:
        return hf_config(*arguments, **keywords) | {"activation_function": "gelu"}

    decoder = ours_with_values(gpt2_section())
    checkpoint = saved(logical_tensors(decoder), tmp_path / "checkpoints")
    with pytest.raises(ExportRefused, match=told):
        export(decoder.model, checkpoint, tmp_path / "out", describe=wrong, way=way)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_large_model_is_compared_in_a_process_of_its_own(tmp_path: Path) -> None:
    decoder = ours_with_values(gpt2_section())
    checkpoint = saved(logical_tensors(decoder), tmp_path / "checkpoints")
    export(decoder.model, checkpoint, tmp_path / "out")
    here = check_logits(decoder.model, checkpoint, tmp_path / "out", dtype=torch.float32, way="blocks")
    there = check_logits(
        decoder.model, checkpoint, tmp_path / "out", dtype=torch.float32, way="blocks", small_bytes=0
    )
    assert there == here


def test_a_rounded_export_is_compared_with_the_rounded_model(tmp_path: Path) -> None:
    decoder = ours_with_values(gpt2_section())
    checkpoint = saved(logical_tensors(decoder), tmp_path / "checkpoints")
    report = export(decoder.model, checkpoint, tmp_path / "out", dtype="bf16")
    assert report.largest_difference <= report.tolerance
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_an_export_does_not_touch_a_directory_that_exists(tmp_path: Path) -> None:
    decoder = ours_with_values(gpt2_section())
    with pytest.raises(CheckpointError, match=r"(?s)exists already.*Choose another directory, or remove it"):
        export(decoder.model, tmp_path / "checkpoints", tmp_path)


def test_weights_that_are_not_the_models_are_refused_by_name(tmp_path: Path) -> None:
    decoder = ours_with_values(gpt2_section())
    tensors = [one for one in logical_tensors(decoder) if one[0] != "final_norm.bias"]
    with pytest.raises(CheckpointError, match=r"final_norm\.bias"):
        export(decoder.model, saved(tensors, tmp_path / "checkpoints"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_what_no_family_expresses_is_refused_with_every_setting() -> None:
    section = gpt2_section(position="alibi", norm="rmsnorm", bias=False)
    with pytest.raises(ExportRefused) as refused:
        family_of(section, kv_heads=2, ffn=128)
    for setting in ("model.norm", "model.bias", "model.embedding_norm", "model.kv_heads"):
        assert setting in str(refused.value)


def test_what_our_decoder_lacks_is_refused_at_import(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_act": "relu", "num_attention_heads": 2, "hidden_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="hidden_act = 'relu'"):
        import_(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(CheckpointError, match="'t5'"):
        import_(tmp_path)


def test_every_file_of_an_export_is_on_the_disk_before_the_export_has_its_name(tmp_path: Path) -> None:
    decoder = ours_with_values(gpt2_section())
    checkpoint = saved(logical_tensors(decoder), tmp_path / "checkpoints")
    with recorded() as calls:
        export(decoder.model, checkpoint, tmp_path / "out", max_shard_bytes=20_000)
    named = calls.index("rename", "out")
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert len(written) > 3 and all(calls.synced_before(name, at=named) for name in written)
    assert calls.names[named - 1 : named + 2] == [
        ("sync", "out.partial"),
        ("rename", "out"),
        ("sync", tmp_path.name),
    ]


def test_an_export_with_a_sentencepiece_model_gives_its_own_ids_and_is_imported_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([f"the cat sat on the mat {number}" for number in range(99)]),
        model_writer=written,
        vocab_size=VOCABULARY,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(written.getvalue())
    decoder = ours_with_values(gpt2_section())
    checkpoint = saved(logical_tensors(decoder), tmp_path / "checkpoints")
    export(decoder.model, checkpoint, tmp_path / "out", tokenizer=tokenizer, end_of_document="</s>")
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == written.getvalue()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 2
    has_class = (tmp_path / "out" / "tokenizer_config.json").exists()
    assert has_class != ("would give other ids" in caplog.text), "no class is named that gives other ids"
    assert import_(tmp_path / "out").tokenizer == tmp_path / "out" / "tokenizer.model"
