"""How many tokens a model sees at once when it is evaluated, and what is too many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.errors import BloomeryError
from bloomery.evaluate.open_checkpoint import trained_window, window_of


def opened(position: str, *, trained: int = 64, positions: int = 128) -> Any:
    return SimpleNamespace(
        recipe=SimpleNamespace(data=SimpleNamespace(sequence_length=trained)),
        model=SimpleNamespace(max_positions=positions, section=SimpleNamespace(position=position)),
    )


@pytest.mark.parametrize(("trained", "window"), [(64, 64), (128, 128), (500, 128)])
def test_a_model_sees_what_it_was_trained_on_and_no_more_than_it_has_positions(
    trained: int, window: int
) -> None:
    saved = opened("learned", trained=trained)
    assert trained_window(saved) == window_of(saved, None) == window


def test_learned_positions_have_an_end_and_others_have_none() -> None:
    assert window_of(opened("learned"), 128) == 128
    with pytest.raises(
        BloomeryError, match="A window of 1,129 tokens does not fit the model's 128"
    ) as refused:
        window_of(opened("learned"), 1129)
    assert refused.value.remedy == "Give at most 128 (--window)."
    assert [window_of(opened(position), 129) for position in ("rotary", "alibi")] == [129, 129]
