"""Forbids all use of the network, for `run.offline` and BLOOMERY_OFFLINE=1."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from bloomery.errors import BloomeryError

SWITCH = "BLOOMERY_OFFLINE"
_LIBRARIES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


class OfflineRefused(BloomeryError):
    """Raised when an operation needs the network, which the user has forbidden."""


def go_offline(environment: MutableMapping[str, str] | None = None) -> None:
    """Forbid the network to this process, to its libraries, and to the processes that it starts.

    environment: where the variables are set; None: the environment of this process.
    """
    target = os.environ if environment is None else environment
    for name in (SWITCH, *_LIBRARIES):
        target[name] = "1"


def is_offline() -> bool:
    """Whether the network is forbidden."""
    return os.environ.get(SWITCH, "0") not in ("", "0") or os.environ.get("HF_HUB_OFFLINE", "0") == "1"


def refuse_network(purpose: str, *, remedy: str) -> None:
    """Raise OfflineRefused where the network is forbidden.

    purpose: what needs the network; it completes the sentence 'The network is needed to …'.
    """
    if is_offline():
        raise OfflineRefused(
            f"The network is needed to {purpose}, and it is forbidden (run.offline or {SWITCH}=1).",
            remedy=remedy,
        )
