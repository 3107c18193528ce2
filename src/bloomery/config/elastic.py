"""`[elastic]`: training between peers (DiLoCo). `inner_steps = 0` is a run of one peer."""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class ElasticSection:
    """The outer optimizer, its exchange, and how peers find, trust and wait for one another."""

    inner_steps: int = setting(0, kind="journalled", minimum=0, help="Steps between two rounds; 0: no peers.")
    average: str = setting(
        "weights",
        kind="fixed",
        choices=("weights", "gradients"),
        help="What a round averages: how far the weights went in inner_steps steps (DiLoCo), or, with "
        "inner_steps = 1, the gradients of each step.",
    )
    outer_learning_rate: float = setting(
        0.7, kind="journalled", above=0.0, help="Of the outer Nesterov step."
    )
    outer_momentum: float = setting(
        0.9, kind="journalled", minimum=0.0, maximum=0.999999, help="Of the outer Nesterov step."
    )
    codec: str = setting(
        "int8",
        kind="journalled",
        choices=("int8", "int4", "bf16", "fp32"),
        help="Of pseudo-gradients on the wire.",
    )
    fragments: int = setting(
        1,
        kind="fixed",
        minimum=1,
        help="Streaming: parts of the model averaged in turn, one each inner_steps / fragments steps.",
    )
    overlap_steps: int = setting(
        0,
        kind="journalled",
        minimum=0,
        help="Inner steps that go on while a round is under way; its result is mixed in when it arrives.",
    )
    mixing: float = setting(
        1.0,
        kind="journalled",
        above=0.0,
        maximum=1.0,
        help="Weight of a round's result against the weights of the moment it arrives, with overlap_steps.",
    )
    peers: int = setting(1, kind="free", at_start=True, minimum=1, help="Peers the run is planned for.")
    minimum_peers: int = setting(
        1, kind="free", at_start=True, minimum=1, help="With fewer, no round begins and none commits."
    )
    grace_s: float = setting(
        60.0,
        kind="free",
        at_start=True,
        above=0.0,
        help="How long a round waits for a healthy peer that is slow, once the quickest is ready.",
    )
    patience_s: float = setting(
        10.0,
        kind="free",
        at_start=True,
        minimum=0.0,
        help="After this the slow are asked for the steps they have made, weighted by their tokens.",
    )
    outlier_factor: float = setting(
        10.0,
        kind="free",
        at_start=True,
        above=1.0,
        help="A peer whose pseudo-gradient is this many times the median norm is left out of a round.",
    )
    join: str = setting(
        "blocking",
        kind="free",
        at_start=True,
        choices=("blocking", "overlapped"),
        help="A newcomer begins with a round (blocking), or within one as soon as it has the state.",
    )
    coordinator: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Endpoints of etcd, separated by commas: http://127.0.0.1:2379. Empty: BLOOMERY_COORDINATOR.",
    )
    certificates: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Directory of this peer's bundle, made by `bloomery coordinate --init-certs`. Empty: "
        "BLOOMERY_CERTIFICATES, or no authentication, on loopback alone.",
    )
    peer: str = setting(
        "", kind="free", at_start=True, help="This peer's name. Empty: BLOOMERY_PEER, or the host's name."
    )
    listen: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Address and port to listen on: 127.0.0.1:0, [::]:29600. Empty: BLOOMERY_LISTEN, or loopback.",
    )
    advertise: str = setting(
        "",
        kind="free",
        at_start=True,
        help="What others dial, separated by commas. Empty: BLOOMERY_ADVERTISE, or what it listens on.",
    )
    relay: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Forward connections of peers that cannot dial one another; they can dial this one.",
    )
    encrypt: str = setting(
        "none",
        kind="free",
        at_start=True,
        choices=("none", "tls"),
        help="Of tensors on the wire: none (authenticated only; use a VPN for secrecy) or tls.",
    )
    streams: int = setting(
        4, kind="free", at_start=True, minimum=1, maximum=64, help="TCP connections of each hop and lane."
    )
    bandwidth_limit_mbit_s: float = setting(
        0.0, kind="free", at_start=True, minimum=0.0, help="What this peer may send; 0: no limit."
    )
    heartbeat_s: float = setting(
        2.0, kind="free", at_start=True, above=0.0, help="Between two renewals of a peer's lease."
    )
    lease_s: float = setting(
        10.0, kind="free", at_start=True, above=0.0, help="A peer that is silent for this long is gone."
    )
    stall_s: float = setting(
        5.0,
        kind="free",
        at_start=True,
        above=0.0,
        help="A hop of the ring that moves no byte so long fails.",
    )
    still_s: float = setting(
        60.0,
        kind="free",
        at_start=True,
        above=0.0,
        help="A rank that makes no step for so long, and ten times its usual step, does not move: its peer "
        "is unlisted until it does.",
    )

    @property
    def round_steps(self) -> int:
        """Inner steps of one round: each averages one of the fragments."""
        return max(1, self.inner_steps // self.fragments)

    @property
    def leased_steps(self) -> int:
        """Steps that a peer is given samples for at the beginning of a round: those of the overlap, too."""
        return self.round_steps + self.overlap_steps
