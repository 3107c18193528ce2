"""What is told of a message that is none, and reasons in words that others can read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.protocol import example

from bloomery.data.position import Position
from bloomery.protocol.encoding import (
    ProtocolError,
    Reasoned,
    decode,
    decode_epoch,
    decode_rates,
    decode_settings,
    encode,
)
from bloomery.protocol.rank_messages import (
    Abort,
    RankLeaves,
    RankRingFailed,
    ReplaceState,
    StateRefused,
    StopTraining,
    decode_agent_message,
    decode_rank_message,
)
from bloomery.protocol.records import Done


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda text: decode(text, Done), "Done"),
        (decode_epoch, "epoch"),
        (decode_rates, "table of rates in megabits a second"),
        (decode_settings, "table of settings"),
        (lambda text: decode_rank_message(text.encode()), "message of a rank"),
        (lambda text: decode_agent_message(text.encode()), "message of an agent"),
    ],
    ids=["record", "epoch", "rates", "settings", "rank", "agent"],
)
def test_what_was_expected_is_named_where_something_else_came(
    read: Callable[[str], object], kind: str
) -> None:
    with pytest.raises(ProtocolError, match=f"^What was received is no {kind}: .") as refused:
        read("[[]]")
    assert "the same version of bloomery" in refused.value.remedy


WHY = "Traceback:\n\tdisk\x1b[31m full"
REASONED = [
    example.ready(why=WHY),
    example.failed(why=WHY),
    example.commit(why=WHY),
    StateRefused(why=WHY),
    RankRingFailed(epoch=9, kind="stall", culprit="next", why=WHY),
    RankLeaves(why=WHY),
    ReplaceState(round=2, digest="ab12", position=Position(), directory=Path("x"), why=WHY),
    Abort(epoch=9, why=WHY),
    StopTraining(why=WHY, failed=False),
]


@pytest.mark.parametrize("message", REASONED, ids=lambda message: type(message).__name__)
def test_a_reason_from_a_library_is_written_so_that_others_take_it(message: Reasoned) -> None:
    assert message.why == "Traceback:  disk [31m full"
    assert decode(encode(message), type(message)) == message
