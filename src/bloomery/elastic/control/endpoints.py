"""Where the coordinator is: from the recipe, or the environment, or on this machine."""

from __future__ import annotations

import os

ENVIRONMENT = "BLOOMERY_COORDINATOR"
USUAL = "http://127.0.0.1:2379"


def endpoints_of(setting: str) -> tuple[str, ...]:
    """Return the endpoints that `elastic.coordinator`, or BLOOMERY_COORDINATOR, names; or the usual one."""
    named = setting or os.environ.get(ENVIRONMENT, "") or USUAL
    return tuple(word.strip() for word in named.split(",") if word.strip())
