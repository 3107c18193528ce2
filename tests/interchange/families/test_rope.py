"""Rotary positions that were scaled to reach further compute what transformers computes, near and far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.errors import CheckpointError
from bloomery.interchange.huggingface import export, fill, import_
from bloomery.model.decoder import build

VOCABULARY, POSITIONS = 96, 24
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
    "yarn of its own": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 600,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
    },
    "yarn with an attention factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3},
}


def written(directory: Path, rope: dict[str, Any], *, old: bool = False) -> Path:
    """A small Llama with these rotary positions. old: in the words of older versions."""
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        rope_parameters={"rope_theta": 2000.0, **rope},
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    content = json.loads((directory / "config.json").read_text())
    if old:
        kind = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
        content |= {"rope_scaling": kind, "rope_theta": 2000.0}
        del content["rope_parameters"]
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def their_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(directory).eval()(tokens).logits


@pytest.mark.parametrize("old", [False, True], ids=["new words", "old words"])
@pytest.mark.parametrize("length", [5, POSITIONS, 3 * POSITIONS])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rotary_positions_give_the_logits_of_transformers(
    name: str, length: int, old: bool, tmp_path: Path
) -> None:
    found = import_(written(tmp_path, SCALINGS[name], old=old))
    ours = build(found.model, vocabulary=VOCABULARY, sequence_length=length)
    fill(ours, found.tensors)
    tokens = torch.randint(0, VOCABULARY, (2, length))
    with torch.no_grad():
        own = ours.logits(ours(tokens))
    their = their_logits(tmp_path, tokens)
    torch.testing.assert_close(own, their, rtol=2e-5, atol=2e-5)
    if length > POSITIONS or name != "dynamic":  # it counts: plain positions give something else
        plain = written(tmp_path / "plain", {"rope_type": "default"})
        assert (their - their_logits(plain, tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("name", SCALINGS)
def test_an_export_has_the_scaling_that_was_imported(name: str, tmp_path: Path) -> None:
    theirs = written(tmp_path / "theirs", SCALINGS[name])
    found = import_(theirs)
    entries = [whole(f"model.{name}", tensor.contiguous()) for name, tensor in found.tensors]
    checkpoint = save_checkpoint(tmp_path / "checkpoints", entries, step=0, incarnation=1)
    export(found.resolved, checkpoint, tmp_path / "again")
    assert import_(tmp_path / "again").model == found.model
    tokens = torch.randint(0, VOCABULARY, (2, 2 * POSITIONS))
    torch.testing.assert_close(
        their_logits(tmp_path / "again", tokens), their_logits(theirs, tokens), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rope_type": "longrope"}, "rope_parameters = "),
        ({"rope_type": ["linear"]}, "rope_parameters = "),
        ({"rope_type": "linear", "factor": "2"}, r"rope_parameters\.factor = '2'"),
        ({"rope_type": "linear", "factor": 0.5}, r"rope_parameters\.factor = 0\.5"),
        ({"rope_type": "linear"}, r"rope_parameters\.factor = None"),
        (
            {"rope_type": "linear", "factor": 2.0, "beta": 1},
            r"(?s)rope_parameters\.beta = 1.*no meaning for the type linear: remove it",
        ),
        ({**SCALINGS["llama3"], "high_freq_factor": 1.0}, r"rope_parameters\.high_freq_factor = 1\.0"),
        ({**SCALINGS["yarn"], "truncate": False}, r"rope_parameters\.truncate = False"),
        ({**SCALINGS["yarn"], "rope_theta": 1.0}, r"rope_theta = 1\.0"),
        ({**SCALINGS["linear"], "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ],
)
def test_scaling_that_is_not_computed_here_is_refused_by_name(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    written(tmp_path, {"rope_type": "default"})
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "rope_parameters": changes}))
    with pytest.raises(CheckpointError, match=told):
        import_(tmp_path)
