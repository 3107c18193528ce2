"""What is told of a message that is none: which kind was expected, and what to look for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bloomery.protocol.encoding import (
    ProtocolError,
    decode,
    decode_epoch,
    decode_rates,
    decode_settings,
)
from bloomery.protocol.rank_messages import decode_agent_message, decode_rank_message
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
