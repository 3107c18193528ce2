"""The form of each message and record: fields, types, bounds, tags and what a missing field means.

Peers of one run may have been installed at different times. Whoever changes a record on purpose writes
`wire_format.json` anew, and asks whether PROTOCOL_VERSION has to grow, so that versions refuse each other.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec

from bloomery.protocol import encoding, hello, rank_messages, records

EXPECTED = Path(__file__).with_name("wire_format.json")
RECORDS = (
    records.Member,
    records.Ready,
    records.ProposedAttempt,
    records.Done,
    records.Failed,
    records.Commit,
    records.RoundShares,
    records.RecoveryRecord,
    records.KnownRun,
)
HANDSHAKE = (hello.ConnectionHello, hello.Answer, hello.Confirmation, hello.Welcome)


def form() -> dict[str, Any]:
    """The JSON schema of all that goes from one process to another, without what is said of it in words."""
    kinds = [
        *RECORDS,
        *HANDSHAKE,
        *get_args(rank_messages.RankMessage),
        *get_args(rank_messages.AgentMessage),
        encoding.Rates,
        encoding.TextByText,
        encoding.Number,
    ]
    schemas, parts = msgspec.json.schema_components(
        kinds, schema_hook=lambda kind: {"form": kind.__name__}, ref_template="{name}"
    )
    return {
        "kinds": [_bare(one) for one in schemas],
        "parts": {name: _bare(one) for name, one in parts.items()},
    }


def _bare(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: _bare(value)
            for key, value in schema.items()
            if key not in ("title", "description") or not isinstance(value, str)
        }
    return [_bare(one) for one in schema] if isinstance(schema, list) else schema


def test_messages_and_records_have_the_form_that_other_versions_write_and_read() -> None:
    expected = json.loads(EXPECTED.read_text())
    found = json.loads(json.dumps(form()))
    assert found["kinds"] == expected["kinds"]
    for name in expected["parts"]:
        assert found["parts"].get(name) == expected["parts"][name], name
    assert found["parts"].keys() == expected["parts"].keys()
    assert (records.PROTOCOL, records.PROTOCOL_VERSION) == ("the protocol between peers", "4")


def test_the_handshake_and_positions_are_bounded() -> None:
    assert (hello.MAX_BYTES, hello.RANDOM_BYTES) == (2048, 32)
    position = msgspec.json.schema(encoding._StoredPosition, schema_hook=lambda kind: {"form": kind.__name__})
    (fields,) = (one["properties"] for one in position["$defs"].values())
    assert fields["consumed"] == {"type": "integer", "minimum": 0, "maximum": 1 << 62}
    ranges = {"type": "array", "items": {"form": "range"}, "maxItems": 65_536}
    assert fields["skips"] == fields["holes"] == ranges
