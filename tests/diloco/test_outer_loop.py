"""What the outer loop takes from a checkpoint."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bloomery.config.elastic import ElasticSection
from bloomery.diloco.outer_loop import OuterLoop


class Update:
    """Notes how often it was begun and how often it forgot its quantisation error."""

    has_feedback = True

    def __init__(self) -> None:
        self.begun = self.forgotten = 0

    def begin(self) -> None:
        self.begun += 1

    def forget_feedback(self) -> None:
        self.forgotten += 1

    def digest(self) -> str:
        return "0" * 32


@pytest.mark.parametrize("had_feedback", [True, False])
def test_a_checkpoint_without_quantisation_error_leaves_none_of_what_went_before(had_feedback: bool) -> None:
    update = Update()
    loop = OuterLoop(
        ElasticSection(inner_steps=3),
        update,
        agent=None,
        rings=None,
        gather=lambda value: [value],
        peer="a",
        salt="",
        tokens_per_sample=4,
        identity={},
        trainer=SimpleNamespace(asked_to_stop=str),
    )
    loop.load_state_values({})
    assert (update.begun, update.forgotten) == (1, 0)
    update.has_feedback = had_feedback
    stored = json.loads(json.dumps(loop.state_values()))
    loop.load_state_values(stored)
    assert (update.begun, update.forgotten) == (1, 0 if had_feedback else 1)
    assert json.loads(json.dumps(loop.state_values())) == stored
