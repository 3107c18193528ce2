"""Assembles the agent that `bloomery peer` runs from a recipe: credentials, listeners, state server, journal.

`PeerAccess` says who the peer is, where its coordinator is, which certificates it has and where it listens;
`RoundJournal` writes what happens in the rounds to RUN/rounds.jsonl.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from bloomery.agent.agent import Agent
from bloomery.agent.agent_context import PeerSettings
from bloomery.agent.agent_lock import only_agent
from bloomery.agent.backup_choice import BackupChoice
from bloomery.agent.known_commits import KnownCommits
from bloomery.agent.state_serving import PeerStateServer
from bloomery.agent.state_sync import KeptAverages
from bloomery.agent.timeouts import Timeouts, timeouts_of
from bloomery.config.elastic import SPARSE, ElasticSection
from bloomery.config.find import from_home
from bloomery.config.peer_settings import equal_settings, no_rounds_mistake
from bloomery.config.recipe import Recipe
from bloomery.coordination.credentials import Bundle, CertificateWatch, read_bundle
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.offer_limits import OfferLimits
from bloomery.coordination.transactions import run_token
from bloomery.errors import ConfigError, CoordinatorAway, Mistake, PeerError
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.plan.peer_round import average_error, codec_of_partial_sums, peer_ring_bytes
from bloomery.plan.schedule import total_samples
from bloomery.protocol.keys import Keys, is_name, name_mistake
from bloomery.protocol.records import PROTOCOL, PROTOCOL_VERSION
from bloomery.state_transfer.averages import AverageFetcher
from bloomery.state_transfer.client import StateFetcher
from bloomery.state_transfer.served_states import ServedStates
from bloomery.transport.connection import Contact
from bloomery.transport.connection_manager import ConnectionManager
from bloomery.transport.handshake import OwnIdentity
from bloomery.transport.sockets import RateLimiter, split_address
from bloomery.transport.trust import Trust, is_any_address, is_loopback, trust_certificates


class RoundJournal:
    """Writes a peer's events to its journal of the rounds. Each event names the peer in the field `peer`."""

    def __init__(self, journal: Journal, peer: str) -> None:
        self._journal, self._peer = journal, peer

    def write(self, event: str, *, round: int, **fields: object) -> None:
        """Append one event of this peer. fields: its further fields, by name."""
        self._journal.write(event, incarnation=0, step=0, peer=self._peer, round=round, **fields)


log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1:0"
DIALS_ONLY = "none"
"""The value of elastic.listen for a peer that accepts no connections, as behind a NAT."""
_KEPT_ROUNDS = 4
"""The most rounds of which a peer keeps averages, for listed peers that were not in them."""
_LOSSY = 0.1
"""The relative error of a round's average above which a peer warns at its start."""


@dataclass(frozen=True, kw_only=True)
class PeerAccess:
    """A peer's name, addresses and credentials, from [elastic] of the recipe, the environment and the bundle.

    run: the name of the run.
    peer: the name of this peer.
    endpoints: addresses of the coordinator, each host:port.
    bundle: this peer's certificates and its account at the coordinator; None where it has none.
    listen: addresses on which this peer accepts connections, each host:port; (): it only dials.
    advertise: addresses at which others dial this peer; () for those on which it listens.
    timeouts: all time-outs of this peer, in seconds.
    is_on_one_machine: whether all of the run may be on this machine, so that loopback reaches every peer.
    """

    run: str
    peer: str
    endpoints: tuple[str, ...]
    bundle: Bundle | None
    listen: tuple[str, ...]
    advertise: tuple[str, ...]
    timeouts: Timeouts
    is_on_one_machine: bool = False

    def etcd(self) -> Etcd:
        """Return a client of the coordinator. It sends nothing yet."""
        access = self.bundle.access() if self.bundle else None
        return Etcd(self.endpoints, access, deadline_s=self.timeouts.coordinator_s)

    def answered(self, etcd: Etcd) -> None:
        """Wait until the coordinator answers, since it may be restarting.

        Raises CoordinatorAway when `timeouts.coordinator_start_s` has passed without an answer.
        """
        end_s = time.monotonic() + self.timeouts.coordinator_start_s
        while True:
            try:
                etcd.get(Keys(self.run).epoch)
            except CoordinatorAway as away:
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise
                log.warning("%s; waiting %.0f s more", away.message, left_s)
            else:
                return

    def trust(self, etcd: Etcd) -> Trust:
        """Return how this peer and others prove that they belong to the run.

        Without certificates they show a token, which is read from the coordinator.
        """
        if self.bundle is None:
            return Trust(token=run_token(etcd, Keys(self.run)).encode())
        bundle = self.bundle
        trust = trust_certificates(authority=bundle.authority, certificate=bundle.certificate, key=bundle.key)
        return replace(trust, dials_loopback=self.is_on_one_machine)

    def without_unreachable_addresses(self, etcd: Etcd) -> PeerAccess:
        """Return the access without addresses of loopback where the coordinator serves other machines, too.

        It does where it is elsewhere, and where it is here and advertises an address that others can dial.
        Without certificates a run is on one machine. Raises PeerError where nobody can dial what is left.
        """
        if self.bundle is None or not self.is_on_one_machine or _are_here(etcd.client_urls()):
            return self
        listen, advertise = map(_beyond_this_machine, (self.listen, self.advertise))
        _refuse_strangers(listen, advertise, self.bundle)
        return replace(self, listen=listen, advertise=advertise, is_on_one_machine=False)


def access_of(recipe: Recipe, sources: Mapping[str, str], environment: Mapping[str, str]) -> PeerAccess:
    """Return the name, addresses and credentials of the peer that this recipe describes on this machine.

    Raises ConfigError, CoordinatorError or PeerError.

    sources: where each setting of the recipe came from, for messages about mistakes.
    environment: the environment variables, which count where the recipe leaves a setting empty.
    """
    section = recipe.elastic
    chosen = {
        "coordinator": section.coordinator or environment.get("BLOOMERY_COORDINATOR", ""),
        "certificates": section.certificates or environment.get("BLOOMERY_CERTIFICATES", ""),
        "listen": section.listen or environment.get("BLOOMERY_LISTEN", "") or LOOPBACK,
        "advertise": section.advertise or environment.get("BLOOMERY_ADVERTISE", ""),
    }
    bundle = read_bundle(from_home(chosen["certificates"])) if chosen["certificates"] else None
    name = section.peer or environment.get("BLOOMERY_PEER", "")
    peer = name or (bundle.account.peer if bundle else os.uname().nodename)
    listen, advertise = _listed(chosen["listen"]), _listed(chosen["advertise"])
    if listen == (DIALS_ONLY,):
        listen = ()
    _refuse_mistakes(recipe, sources, peer=peer, coordinator=chosen["coordinator"])
    if bundle is not None and (bundle.account.run, bundle.account.peer) != (recipe.run.name, peer):
        raise PeerError(
            f"The certificates in {bundle.directory} belong to peer '{bundle.account.peer}' of the run "
            f"'{bundle.account.run}', and this is '{peer}' of '{recipe.run.name}'.",
            remedy="Point elastic.certificates to this peer's own bundle, or leave elastic.peer empty.",
        )
    if section.encrypt == "tls" and bundle is None:
        raise PeerError(
            "elastic.encrypt = 'tls' needs certificates.",
            remedy="`bloomery coordinate --init-certs` makes them; name the bundle in elastic.certificates.",
        )
    endpoints = _listed(chosen["coordinator"])
    is_here = _are_here(endpoints)
    if not is_here:
        listen, advertise = map(_beyond_this_machine, (listen, advertise))
    _refuse_strangers(listen, advertise, bundle)
    _refuse_relay_without_address(section, listen)
    return PeerAccess(
        run=recipe.run.name,
        peer=peer,
        endpoints=endpoints,
        bundle=bundle,
        listen=listen,
        advertise=advertise,
        timeouts=timeouts_of(section),
        is_on_one_machine=is_here,
    )


def _refuse_relay_without_address(section: ElasticSection, listen: tuple[str, ...]) -> None:
    if section.relay and not listen:
        raise PeerError(
            "A peer that relays for others has to be dialled by them, and this one only dials.",
            remedy="Set elastic.listen and elastic.advertise, or elastic.relay = false.",
        )


def _refuse_mistakes(recipe: Recipe, sources: Mapping[str, str], *, peer: str, coordinator: str) -> None:
    mistakes = []
    for key, value in (("run.name", recipe.run.name), ("elastic.peer", peer)):
        if not is_name(value):
            mistakes.append(name_mistake(key, value, sources.get(key, "default")))
    if not recipe.elastic.inner_steps:
        mistakes.append(no_rounds_mistake(sources))
    if not coordinator:
        mistakes.append(
            Mistake(
                key="elastic.coordinator",
                value=None,
                source="nowhere",
                problem="no coordinator is named",
                remedy="`bloomery coordinate` starts one and prints its address; set this, or "
                "BLOOMERY_COORDINATOR.",
            )
        )
    if mistakes:
        raise ConfigError(mistakes)


def _refuse_strangers(listen: tuple[str, ...], advertise: tuple[str, ...], bundle: Bundle | None) -> None:
    """Raise PeerError for addresses that others cannot dial, or could dial without certificates.

    Without certificates a peer may use loopback addresses only, because anybody else could join.
    """
    for address in (*listen, *advertise):
        host, _ = split_address(address)
        if bundle is None and not is_loopback(host):
            raise PeerError(
                f"Without certificates a peer does not listen on {address}: anybody could join.",
                remedy="`bloomery coordinate --init-certs` makes a bundle for each peer; name it in "
                "elastic.certificates.",
            )
        if bundle is not None and address in (advertise or listen) and is_any_address(host):
            raise PeerError(
                f"A peer that listens on {address} has to say where it can be dialled.",
                remedy="Set elastic.advertise (or BLOOMERY_ADVERTISE): host:port, several with commas.",
            )


def _beyond_this_machine(addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the addresses without those of loopback, at which others would dial their own machine.

    A peer that is left without an address only dials.
    """
    reachable = tuple(address for address in addresses if not is_loopback(split_address(address)[0]))
    if reachable != addresses:
        advertised = (
            ", ".join(reachable) or "nothing: this peer only dials, unless elastic.listen names an address"
        )
        log.warning(
            "other machines cannot reach %s; this peer advertises %s", ", ".join(addresses), advertised
        )
    return reachable


def _are_here(endpoints: Sequence[str]) -> bool:
    """Whether all URLs are of this machine."""
    try:
        return all(is_loopback(urlsplit(endpoint).hostname or "") for endpoint in endpoints)
    except ValueError:  # one is no URL, which the coordinator's client refuses
        return False


def _listed(text: str) -> tuple[str, ...]:
    return tuple(piece.strip() for piece in text.split(",") if piece.strip())


def assemble_agent(recipe: Recipe, access: PeerAccess, rundir: RunDirectory, stack: ExitStack) -> Agent:
    """Build an agent that listens for other peers and serves its state to them.

    Raises CoordinatorError, PeerError, or RunBusy where another agent has this run directory.

    stack: closes the agent's parts when it is closed.
    """
    section, limits = recipe.elastic, access.timeouts
    etcd = stack.enter_context(access.etcd())
    access.answered(etcd)
    access = access.without_unreachable_addresses(etcd)
    _refuse_relay_without_address(section, access.listen)
    trust = access.trust(etcd)
    stack.enter_context(only_agent(rundir))
    incarnation = secrets.token_hex(8)
    relays: list[Contact] = []  # which the agent fills
    rate_limiter = RateLimiter(section.bandwidth_limit_mbit_s * 1e6 / 8)
    connection_manager = ConnectionManager(
        OwnIdentity(
            run=access.run, peer=access.peer, incarnation=incarnation, encrypt=section.encrypt == "tls"
        ),
        trust,
        listen=access.listen,
        advertise=access.advertise,
        is_relay=section.relay,
        turns=limits.dialing,
        patience=limits.tcp,
        handshake_s=limits.handshake_s,
        relays=lambda: tuple(relays),
        rate_limiter=rate_limiter,
    )
    stack.callback(connection_manager.close)
    if access.bundle is not None:
        bundle, users = access.bundle, (trust.load_certificate, etcd.load_certificate)
        stack.callback(CertificateWatch(bundle.certificate, bundle.key, users).close)
    states = ServedStates()
    server = PeerStateServer(access, trust, states, rate_limiter=rate_limiter)
    stack.callback(server.close)
    warning = codec_warning(section)
    if warning:
        log.warning("%s", warning)
    knowledge = KnownCommits(rundir.known, run=access.run, peer=access.peer)
    stack.callback(knowledge.close)
    journal = stack.enter_context(Journal(rundir.rounds))
    return Agent(
        PeerSettings(
            run=access.run,
            peer=access.peer,
            incarnation=incarnation,
            settings={**equal_settings(recipe), PROTOCOL: PROTOCOL_VERSION},
            rounds=round_settings(recipe),
            timeouts=limits,
            streams=section.streams,
            relays=section.relay,
            overlaps=section.overlap_steps > 0,
            token=trust.token.decode(),
        ),
        etcd=etcd,
        connection_manager=connection_manager,
        server=server,
        fetch=StateFetcher(rundir.path / "fetched", trust),
        events=RoundJournal(journal, access.peer),
        knowledge=knowledge,
        relays=relays,
        backups=BackupChoice(rundir, me=access.peer) if recipe.backup.url else None,
        averages=KeptAverages(
            rundir.path / "averages",
            states,
            AverageFetcher(rundir.path / "missed", trust),
            at_most=0 if section.average == "gradients" else _KEPT_ROUNDS,
        ),
    )


def round_settings(recipe: Recipe) -> RoundSettings:
    """Return the settings by which decisions about this recipe's rounds are made."""
    section, limits = recipe.elastic, timeouts_of(recipe.elastic)
    return RoundSettings(
        inner_steps=section.leased_steps,
        total_samples=total_samples(recipe.train, sequence_length=recipe.data.sequence_length),
        peers=section.peers,
        minimum_peers=section.minimum_peers,
        grace_s=section.grace_s,
        patience_s=section.patience_s,
        outlier_factor=section.outlier_factor,
        feedback_rounds=section.feedback_rounds,
        quorum=section.quorum,
        overlap_steps=section.overlap_steps,
        joins_within=section.join == "overlapped",
        answer_s=limits.answer_s,
        stagger_s=limits.stagger_s,
        limits=OfferLimits(
            tokens_per_sample=recipe.data.sequence_length,
            steps=section.leased_steps,
            batch=recipe.train.global_batch,  # a ramp-up ends with it
            fragments=section.fragments,
        ),
    )


def codec_warning(section: ElasticSection) -> str:
    """Return what quantising costs a round of the planned peers if that is much, or else ""."""
    if section.codec == SPARSE:
        return _sparse_warning(section)
    partial = codec_of_partial_sums(section.codec, section.peers)
    error = average_error(section.codec, section.peers, reduce_codec=partial)
    if partial == section.codec and error < _LOSSY:
        return ""
    wider = f"; partial sums are sent as {partial}, or it were more" if partial != section.codec else ""
    return f"{section.codec} among {section.peers} peers loses {error:.1%} of each average{wider}"


def _sparse_warning(section: ElasticSection) -> str:
    """Return "", or that the planned peers are so many that int8 sends less."""
    sent, int8 = (
        peer_ring_bytes(1, codec, section.peers, density=section.density) for codec in (SPARSE, "int8")
    )
    if sent <= int8:
        return ""
    return (
        f"sparse among {section.peers} peers sends {sent / int8:.1f} times the bytes of int8: each peer's "
        "code goes to every other peer"
    )
