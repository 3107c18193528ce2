"""The settings of `[environment]`: variables for the ranks' libraries; and the offline mode.

`run.offline` and BLOOMERY_OFFLINE=1 forbid all use of the network: `refuse_network` asks before each use.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from bloomery.config.setting import setting
from bloomery.errors import BloomeryError
from bloomery.frozen import dataclass

SWITCH = "BLOOMERY_OFFLINE"
_OFFLINE_LIBRARIES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
PROFILES: dict[str, dict[str, str]] = {
    "nccl-infiniband": {
        "NCCL_NET": "IB",
        "NCCL_IB_DISABLE": "0",
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_IB_RETRY_CNT": "7",
    },
    "nccl-tcp": {
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
    },
    "gpudirect-tcpx": {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
        "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx",
        "NCCL_GPUDIRECTTCPX_FORCE_ACK": "0",
        "NCCL_CROSS_NIC": "0",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_NTHREADS": "1",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_P2P_PXN_LEVEL": "0",
    },
    "nccl-flight-recorder": {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    },
    "offline": dict.fromkeys((SWITCH, *_OFFLINE_LIBRARIES), "1"),
}
"""Variables by the name of their set; `gpudirect-tcpx` names the interfaces of Google's a3-highgpu."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection:
    """Variables that each rank gets. One that the launcher's own environment has already is kept."""

    profiles: tuple[str, ...] = setting(
        (),
        kind="free",
        at_start=True,
        choices=tuple(PROFILES),
        help="Named sets of variables; `config show --why` prints what they hold.",
    )
    variables: tuple[str, ...] = setting(
        (),
        kind="free",
        at_start=True,
        help="Further variables, each 'NAME=VALUE'; they go before those of the profiles.",
    )


def variables_of(section: EnvironmentSection) -> dict[str, str]:
    """Return the variables of the profiles and those beside them. The section must have been checked."""
    variables: dict[str, str] = {}
    for profile in section.profiles:
        variables |= PROFILES[profile]
    return variables | dict(text.partition("=")[::2] for text in section.variables)


class OfflineRefused(BloomeryError):
    """Raised when an operation needs the network, which the user has forbidden."""


def go_offline(environment: MutableMapping[str, str] | None = None) -> None:
    """Forbid the network to this process, to its libraries, and to the processes that it starts.

    environment: where the variables are set; None: the environment of this process.
    """
    target = os.environ if environment is None else environment
    for name in (SWITCH, *_OFFLINE_LIBRARIES):
        target[name] = "1"


def follow_recipe(*, offline: bool) -> None:
    """Forbid the network to this process where a recipe does."""
    if may_not_use_network(offline=offline):
        go_offline()


def may_not_use_network(*, offline: bool) -> bool:
    """Whether a recipe forbids the network; BLOOMERY_OFFLINE=0 overrules it. offline: its `run.offline`."""
    return offline and os.environ.get(SWITCH) != "0"


def is_offline() -> bool:
    """Whether the network is forbidden."""
    return os.environ.get(SWITCH, "0") not in ("", "0") or os.environ.get("HF_HUB_OFFLINE", "0") == "1"


def refuse_network(purpose: str, *, remedy: str, is_forbidden: bool = False) -> None:
    """Raise OfflineRefused where the network is forbidden to this process, or here (`is_forbidden`).

    purpose: what needs the network; it completes the sentence 'The network is needed to …'.
    """
    if is_forbidden or is_offline():
        raise OfflineRefused(
            f"The network is needed to {purpose}, and it is forbidden (run.offline or {SWITCH}=1).",
            remedy=remedy,
        )
