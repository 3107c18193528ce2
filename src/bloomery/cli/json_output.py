"""The facts that `--json` prints, in a form that every reader of JSON takes."""

from __future__ import annotations

import json
from collections.abc import Callable

from bloomery.events.records import as_json


def json_text(
    facts: object,
    *,
    indent: int | None = None,
    ensure_ascii: bool = True,
    default: Callable[[object], str] | None = None,
) -> str:
    """Return facts as JSON. NaN and infinities, which JSON does not have, are texts, as in a journal.

    indent, ensure_ascii: as in `json.dumps`. default: makes a text of what JSON does not have otherwise; None
    raises TypeError for that.
    """
    known = as_json(facts, default=default)
    return json.dumps(known, indent=indent, ensure_ascii=ensure_ascii, allow_nan=False)
