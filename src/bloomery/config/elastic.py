"""The settings of `[elastic]`: DiLoCo rounds, and how peers find, reach, trust and wait for each other."""

from __future__ import annotations

from bloomery.config.setting import setting
from bloomery.frozen import dataclass

SPARSE = "sparse"
"""The codec of elastic.codec that sends only the largest values (SparseLoCo)."""


@dataclass(frozen=True, kw_only=True)
class ElasticSection:
    """The outer optimizer, the exchange between peers, and how peers find, trust and wait for each other."""

    inner_steps: int = setting(
        0, kind="journalled", minimum=0, help="Steps of a peer between two rounds; 0 trains without peers."
    )
    average: str = setting(
        "weights",
        kind="fixed",
        choices=("weights", "gradients"),
        help="What a round averages over the peers: 'weights', the change of the weights in inner_steps "
        "steps (DiLoCo's pseudo-gradient), or 'gradients', those of each step (needs inner_steps = 1).",
    )
    outer_learning_rate: float = setting(
        0.7, kind="journalled", above=0.0, help="Learning rate of the outer Nesterov step."
    )
    outer_momentum: float = setting(
        0.9, kind="journalled", minimum=0.0, maximum=0.999999, help="Momentum of the outer Nesterov step."
    )
    codec: str = setting(
        "int8",
        kind="journalled",
        choices=("int8", "int4", "bf16", "fp32", SPARSE),
        help="Type in which pseudo-gradients are sent between peers. 'sparse', for thin links, sends the "
        "largest values alone, with 2 bits each, and adds the others to later rounds (SparseLoCo).",
    )
    density: float = setting(
        0.015625,
        kind="journalled",
        minimum=0.001,
        maximum=0.25,
        help="With codec = 'sparse': share of each 4096 values that is sent.",
    )
    feedback_decay: float = setting(
        0.95,
        kind="journalled",
        minimum=0.0,
        maximum=0.999,
        help="With codec = 'sparse': what remains, a round later, of the values that were not sent. They "
        "take the place of outer_momentum, which is 0.",
    )
    fragments: int = setting(
        1,
        kind="fixed",
        minimum=1,
        help="Number of parts of the model that are averaged in turn, one every inner_steps / fragments "
        "steps (streaming DiLoCo).",
    )
    overlap_steps: int = setting(
        0,
        kind="journalled",
        minimum=0,
        help="Steps that a peer makes while a round is under way; the round's result is mixed in afterwards.",
    )
    mixing: float = setting(
        1.0,
        kind="journalled",
        above=0.0,
        maximum=1.0,
        help="With overlap_steps: weight of a round's result when it is mixed with the peer's own weights "
        "of that moment; 1 takes the result alone.",
    )
    quorum: int = setting(
        0,
        kind="journalled",
        minimum=0,
        help="Peers with which a round is decided without waiting for the others, which keep their steps for "
        "a later round (asynchronous rounds); 0 waits for all, up to grace_s.",
    )
    peers: int = setting(
        1, kind="free", at_start=True, minimum=1, help="Number of peers that the run is planned for."
    )
    minimum_peers: int = setting(
        1,
        kind="free",
        at_start=True,
        minimum=1,
        help="Fewest peers of a round: with fewer, no round begins and none is committed.",
    )
    grace_s: float = setting(
        60.0,
        kind="free",
        at_start=True,
        above=0.0,
        help="Seconds that a round waits for a slow peer once the fastest peer is ready.",
    )
    patience_s: float = setting(
        10.0,
        kind="free",
        at_start=True,
        minimum=0.0,
        help="Seconds that a round waits before it asks slow peers to contribute the steps that they have "
        "made; contributions are weighted by their tokens.",
    )
    outlier_factor: float = setting(
        10.0,
        kind="free",
        at_start=True,
        above=1.0,
        help="A peer is left out of a round when the norm of its pseudo-gradient is more than this many "
        "times what the others' norms, or with two peers its own past, let expect of as many steps.",
    )
    join: str = setting(
        "blocking",
        kind="free",
        at_start=True,
        choices=("blocking", "overlapped"),
        help="When a peer that joins begins to train: 'blocking', at the start of a round; 'overlapped', as "
        "soon as it has the state.",
    )
    coordinator: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Endpoints of etcd, separated by commas, such as http://127.0.0.1:2379. Empty: the variable "
        "BLOOMERY_COORDINATOR.",
    )
    certificates: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Directory of this peer's certificates, which `bloomery coordinate --init-certs` makes. Empty: "
        "the variable BLOOMERY_CERTIFICATES; without either, peers connect only over loopback.",
    )
    peer: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Name of this peer. Empty: the variable BLOOMERY_PEER, or the host's name.",
    )
    listen: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Address and port to listen on, such as 127.0.0.1:0 or [::]:29600; 'none': this peer only "
        "dials, as behind a NAT. Empty: the variable BLOOMERY_LISTEN, or loopback.",
    )
    advertise: str = setting(
        "",
        kind="free",
        at_start=True,
        help="Addresses at which other peers connect to this one, separated by commas. Empty: the variable "
        "BLOOMERY_ADVERTISE, or the addresses that it listens on.",
    )
    relay: bool = setting(
        False,
        kind="free",
        at_start=True,
        help="Whether this peer forwards connections between peers that can reach it but not each other, for "
        "rings and for the state that newcomers fetch.",
    )
    encrypt: str = setting(
        "none",
        kind="free",
        at_start=True,
        choices=("none", "tls"),
        help="Encryption of tensors between peers: 'tls', or 'none', which authenticates peers but hides "
        "nothing (use a VPN for secrecy).",
    )
    streams: int = setting(
        4,
        kind="free",
        at_start=True,
        minimum=1,
        maximum=64,
        help="Number of TCP connections that each ring uses between two neighbours.",
    )
    bandwidth_limit_mbit_s: float = setting(
        0.0,
        kind="free",
        at_start=True,
        minimum=0.0,
        help="Most that this peer may send in its ring, and most that it may serve of states and forward "
        "as a relay, in 10⁶ bit/s; 0 does not limit them.",
    )
    heartbeat_s: float = setting(
        2.0, kind="free", at_start=True, above=0.0, help="Seconds between two renewals of a peer's lease."
    )
    lease_s: float = setting(
        10.0,
        kind="free",
        at_start=True,
        above=0.0,
        help="Seconds without a renewal after which a peer's lease ends and the run goes on without it.",
    )
    stall_s: float = setting(
        5.0,
        kind="free",
        at_start=True,
        above=0.0,
        help="Seconds without a byte after which a connection of the ring has failed.",
    )
    still_s: float = setting(
        60.0,
        kind="free",
        at_start=True,
        above=0.0,
        help="Seconds without a step after which a rank is taken to hang, if they are also ten times its "
        "usual step. Its peer leaves the membership until the rank makes a step again.",
    )

    @property
    def feedback_rounds(self) -> float:
        """How many rounds' parts the error feedback may be the sum of; 1 where it is one round's error."""
        return 1.0 / (1.0 - self.feedback_decay) if self.codec == SPARSE else 1.0

    @property
    def round_steps(self) -> int:
        """Steps of a peer in one round, which averages one fragment."""
        return max(1, self.inner_steps // self.fragments)

    @property
    def leased_steps(self) -> int:
        """Steps for which a peer gets samples at the beginning of a round: the round's and the overlap's."""
        return self.round_steps + self.overlap_steps
