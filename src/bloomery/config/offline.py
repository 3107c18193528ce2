"""The one switch that forbids all use of the network: `run.offline`, or BLOOMERY_OFFLINE=1."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from bloomery.errors import BloomeryError

SWITCH = "BLOOMERY_OFFLINE"
_LIBRARIES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


class OfflineRefused(BloomeryError):
    """Something would have used the network, and the user has forbidden it."""


def go_offline(environment: MutableMapping[str, str] | None = None) -> None:
    """Forbid the network to this process and to those it starts, libraries included."""
    target = os.environ if environment is None else environment
    for name in (SWITCH, *_LIBRARIES):
        target[name] = "1"


def is_offline() -> bool:
    """Whether the network is forbidden."""
    return os.environ.get(SWITCH, "0") not in ("", "0") or os.environ.get("HF_HUB_OFFLINE", "0") == "1"


def refuse_network(purpose: str, *, remedy: str) -> None:
    """Raise OfflineRefused where the network is forbidden. `purpose` ends 'The network is needed to …'."""
    if is_offline():
        raise OfflineRefused(
            f"The network is needed to {purpose}, and it is forbidden (run.offline or {SWITCH}=1).",
            remedy=remedy,
        )
