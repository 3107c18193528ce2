"""What a value of config.json must be, at its bounds, and what rotary settings become, in numbers."""

from typing import Any

import pytest

from bloomery.errors import CheckpointError
from bloomery.interchange.families import family as family_module
from bloomery.interchange.families import section_from
from bloomery.interchange.families.family import HfTensor, Only, Supported, settings_from, stored_shape
from bloomery.interchange.families.gpt2 import GPT2
from bloomery.interchange.families.llama import LLAMA, rope_settings

MOST = 2**31 - 1


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        ("count", [1, MOST], [0, -1, MOST + 1, 1.0, True, "1", None]),
        ("rate", [0, 0.0, 0.999], [-0.001, 0.9991, 1, True, "0", None]),
        ("number", [1e-30, 1, MOST, 1e30], [0, 0.0, -1, MOST + 1, float("inf"), float("nan"), False, None]),
        ("switch", [True, False], [0, 1, None, "true"]),
        ("object", [{}, {"a": 1}], [[], None, "{}"]),
        ("token id", [0, -1, MOST, -MOST], [MOST + 1, -MOST - 1, True, 1.0, None, [1]]),
        ("token ids", [0, [], [1, 2]], [[1, True], [1.0], None, "1"]),
        ("layer types", [[], ["full_attention"]], [["sliding_attention"], "full_attention", None]),
    ],
)
def test_each_kind_of_value_has_its_bounds(kind: Any, taken: list[object], refused: list[object]) -> None:
    for optional in (False, True):
        use = Supported(kind=kind, optional=optional)
        assert [value for value in taken if not use.allows(value)] == []
        assert [value for value in refused if use.allows(value)] == ([None] if optional else [])
        assert use.wanted().endswith(", or null") is optional
    named = Supported(kind="name", names=("gelu", "relu"))
    assert named.allows("relu") and not named.allows("silu") and named.wanted() == "gelu or relu"


def test_a_number_is_no_switch_where_only_a_switch_has_a_value() -> None:
    use = Only(values=(True, None, 4))
    taken = [value for value in (True, None, 4, 4.0, 1, 1.0, False, 0, "true") if use.allows(value)]
    assert taken == [True, None, 4, 4.0] and isinstance(taken[0], bool)
    assert not Only(values=(1, 0)).allows(True)


TABLE: dict[str, Any] = {
    "size": Supported(kind="count"),
    "rate": Supported(kind="rate", optional=True),
    "kind": Only(values=("a", None), remedy="Take kind a."),
}


def read(content: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    found = settings_from(content, keys=TABLE, aliases={"width": "size"}, defaults=defaults)
    return {key: value for key, value in found.items() if key in TABLE}


def test_a_setting_is_the_files_own_by_either_name_or_else_its_default() -> None:
    assert read({"width": 5}, size=9, rate=0.5) == {"size": 5, "rate": 0.5}
    assert read({"size": 5, "width": 5, "rate": None}, rate=0.5) == {"size": 5, "rate": None}
    assert read({"kind": "a"}) == {"size": None, "rate": None}
    for content, said, remedy in (
        ({"size": 5, "width": 6}, r"width = 6 beside 5 .* setting, size", "Remove the wrong one"),
        ({"other": "x" * 99}, r"has other = 'x{79} …, whose meaning", "remove that"),
        ({"size": 0}, "size = 0, which our decoder", "a whole number"),
        ({"kind": "b"}, "kind = 'b'", "Take kind a."),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True", "False"),
        ({"auto_map": {"a": 1}}, "auto_map", "never run here"),
    ):
        with pytest.raises(CheckpointError, match=said) as told:
            read(content)
        assert remedy in told.value.remedy
    assert family_module._short("x" * 78) == f"'{'x' * 78}'", "80 characters are shown"


def rope(
    kind: str | None,
    *,
    theta: float | None = None,
    positions: int = 4096,
    old: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    new = {"rope_type": kind, **more} if kind is not None else None
    settings = {"rope_parameters": new, "rope_scaling": old, "rope_theta": theta}
    return rope_settings(settings | {"max_position_embeddings": positions})


def test_rotary_settings_become_numbers_with_the_defaults_of_their_kind() -> None:
    assert rope(None) == {"rope_theta": 10_000.0} == rope("default")
    assert rope(None, theta=5e5) == {"rope_theta": 5e5} == rope("default", rope_theta=5e5)
    linear = {"rope_theta": 10_000.0, "rope_scaling": "linear", "rope_factor": 2.5}
    assert rope("linear", factor=2.5) == linear
    assert rope(None, old={"type": "linear", "factor": 2.5}) == linear
    assert rope("llama3", factor=8, low_freq_factor=1, high_freq_factor=4) == {
        **{"rope_theta": 10_000.0, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_low_rotations": 1.0},
        **{"rope_high_rotations": 4.0, "rope_original_positions": 4096},
    }
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=512)
    assert (yarn["rope_low_rotations"], yarn["rope_high_rotations"]) == (1.0, 32.0)
    assert yarn["rope_original_positions"] == 512
    assert yarn["rope_attention_factor"] == pytest.approx(1.1386294)  # 0.1 · ln 4 + 1
    both = rope("yarn", factor=4.0, mscale=2.0, mscale_all_dim=0.5, beta_fast=20, beta_slow=2)
    assert both["rope_attention_factor"] == pytest.approx(1.2772589 / 1.0693147)
    assert (both["rope_low_rotations"], both["rope_high_rotations"]) == (2.0, 20.0)
    assert rope("yarn", factor=4.0, attention_factor=1.3)["rope_attention_factor"] == 1.3
    assert rope("yarn", factor=4.0, mscale=2.0)["rope_attention_factor"] == pytest.approx(1.1386294)
    assert rope("yarn", factor=4.0, mscale_all_dim=2.0)["rope_attention_factor"] == pytest.approx(1.1386294)
    assert rope("yarn", factor=1.5)["rope_attention_factor"] == pytest.approx(1.0405465)
    assert rope("yarn", factor=1.0)["rope_attention_factor"] == 1.0


def test_rotary_settings_that_say_one_thing_twice_or_change_nothing_are_taken() -> None:
    again = {"rope_type": "linear", "factor": 2.5}
    assert rope("linear", factor=2.5, old=again) == rope("linear", factor=2.5)
    assert rope("default", rope_theta=5.0, theta=5.0) == {"rope_theta": 5.0}
    assert rope("default", partial_rotary_factor=1.0) == rope("default")
    assert rope("linear", factor=2.5, rope_theta=1.0)["rope_theta"] == 1.0
    assert rope("yarn", factor=2.5, rope_theta=1.5)["rope_theta"] == 1.5


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("other", {}, r"rope_parameters = (?s:.*){'rope_type': 'linear', …} or {'rope_type': 'dynamic'"),
        ("linear", {}, "rope_parameters.factor = None"),
        ("linear", {"factor": 0.5}, "rope_parameters.factor = 0.5"),
        ("linear", {"factor": 2.0, "type": "dynamic"}, "rope_parameters = "),
        ("linear", {"factor": 2.0, "beta_fast": 3}, "rope_parameters.beta_fast = 3"),
        ("default", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ("default", {"rope_theta": -1.0}, "rope_parameters.rope_theta = -1.0"),
        (
            "default",
            {"rope_theta": 5.0, "theta": 6.0},
            r"rope_theta = 6.0(?s:.*)parameters beside it says 5.0: remove",
        ),
        ("yarn", {"factor": 2.0, "rope_theta": 1.0}, r"rope_theta = 1.0(?s:.*)more than 1 beside the type"),
        ("yarn", {"factor": 2.0, "truncate": False}, "rope_parameters.truncate = False"),
        (
            "yarn",
            {"factor": 2.0, "beta_fast": 2, "beta_slow": 2},
            r"rope_parameters.beta_fast = 2(?s:.*)= more than 2",
        ),
        ("llama3", {"factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4}, "high_freq_factor = 4"),
        (
            "linear",
            {"factor": 2.0, "old": {"type": "linear", "factor": 3.0}},
            r"rope_scaling = (?s:.*)it says .*: remove",
        ),
    ],
)
def test_each_rotary_setting_that_is_not_computed_is_named(
    kind: str, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        rope(kind, **more)


def test_a_tensor_is_found_by_its_parts_and_has_their_shape() -> None:
    assert LLAMA.tensor("blocks.3.mlp.gate.weight") == HfTensor(
        name="model.layers.3.mlp.gate_proj.weight", parts=("blocks.3.mlp.gate.weight",)
    )
    for part, theirs in (("query", "q"), ("key", "k"), ("value", "v")):
        ours = f"blocks.3.attention.{part}.weight"
        name = f"model.layers.3.self_attn.{theirs}_proj.weight"
        assert LLAMA.tensor(ours) == HfTensor(name=name, parts=(ours,))
    assert LLAMA.stored_names("model.norm.weight") == ("model.norm.weight", "norm.weight")
    assert LLAMA.stored_names("lm_head.weight") == ("lm_head.weight",)
    names = tuple(f"blocks.11.attention.{part}.weight" for part in ("query", "key", "value"))
    fused = GPT2.tensor(names[0])
    assert fused is not None and fused.parts == names and fused.layout == "stacked_transposed"
    assert GPT2.tensor(names[1]) is None and GPT2.tensor(names[2]) is None
    assert stored_shape(fused, {names[0]: (8, 6), names[1]: (2, 6), names[2]: (2, 6)}) == (6, 12)
    bias = GPT2.tensor("blocks.11.attention.query.bias")
    assert bias is not None and bias.layout == "stacked"
    down, norm = GPT2.tensor("blocks.2.mlp.down.weight"), GPT2.tensor("blocks.2.mlp_norm.weight")
    assert down is not None and down.layout == "transposed"
    assert norm is not None and norm.layout == "plain"
    down_bias, head = GPT2.tensor("blocks.2.mlp.down.bias"), GPT2.tensor("head.weight")
    assert down_bias is not None and down_bias.layout == "plain"
    assert head is not None and head.layout == "plain"
    assert stored_shape(down, {down.parts[0]: (4, 16)}) == (16, 4)


def test_a_bloom_that_computes_something_else_is_refused_with_what_helps() -> None:
    for changes in ({"slow_but_exact": True}, {"pretraining_tp": 2}):
        assert section_from({"model_type": "bloom"} | changes).layers == 2
    for changed, said in (
        ({"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact = True"),
        ({"apply_residual_connection_post_layernorm": True}, "_post_layernorm = True"),
        ({"n_inner": 64}, "n_inner = 64"),
    ):
        with pytest.raises(CheckpointError, match=said) as told:
            section_from({"model_type": "bloom"} | changed)
        assert ("Set slow_but_exact to false" in told.value.remedy) is ("pretraining_tp" in changed)
