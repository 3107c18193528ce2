"""A parent put together from a recipe: what `bloomery peer` runs."""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

from bloomery.config.recipe import Recipe
from bloomery.config.setting import about
from bloomery.elastic.control.settings import RoundSettings
from bloomery.elastic.links.handshake import Identity
from bloomery.elastic.links.sockets import join_address, split_address
from bloomery.elastic.links.station import Contact, Station
from bloomery.elastic.links.trust import Trust
from bloomery.elastic.peer.access import PeerAccess
from bloomery.elastic.peer.means import PeerSettings
from bloomery.elastic.peer.parent import PeerParent
from bloomery.elastic.peer.roundjournal import RoundJournal
from bloomery.elastic.peer.timeouts import timeouts_of
from bloomery.elastic.serving.fetch import Fetcher
from bloomery.elastic.serving.server import StateServer
from bloomery.elastic.serving.shelf import Shelf
from bloomery.events.journal import Journal
from bloomery.events.rundir import RunDir
from bloomery.plan.schedule import total_samples

log = logging.getLogger(__name__)

_SHARED_SECTIONS = ("model", "optim", "elastic")


def assemble_parent(recipe: Recipe, access: PeerAccess, rundir: RunDir, stack: ExitStack) -> PeerParent:
    """A parent that listens and serves; `stack` closes its parts. Raises CoordinatorError, PeerError."""
    section, limits = recipe.elastic, access.timeouts
    etcd = stack.enter_context(access.etcd())
    access.answered(etcd)
    trust = access.trust(etcd)
    incarnation = secrets.token_hex(8)
    relays: list[Contact] = []
    station = Station(
        Identity(run=access.run, peer=access.peer, incarnation=incarnation, encrypt=section.encrypt == "tls"),
        trust,
        listen=access.listen,
        advertise=access.advertise,
        is_relay=section.relay,
        turns=limits.turns,
        patience=limits.patience,
        handshake_s=limits.handshake_s,
        relays=lambda: tuple(relays),
    )
    stack.callback(station.close)
    server = _ServedState(access, trust, limit_bytes_s=section.bandwidth_limit_mbit_s * 1e6 / 8)
    stack.callback(server.close)
    journal = stack.enter_context(Journal(rundir.rounds))
    return PeerParent(
        PeerSettings(
            run=access.run,
            peer=access.peer,
            incarnation=incarnation,
            recipe=fingerprint(recipe),
            rounds=round_settings(recipe),
            timeouts=limits,
            streams=section.streams,
            relays=section.relay,
            overlaps=section.overlap_steps > 0,
        ),
        etcd=etcd,
        station=station,
        server=server,
        fetch=Fetcher(rundir.path / "fetched", trust),
        events=RoundJournal(journal, access.peer),
        relays=relays,
    )


def round_settings(recipe: Recipe) -> RoundSettings:
    """By what the rounds of this recipe are judged."""
    section, limits = recipe.elastic, timeouts_of(recipe.elastic)
    return RoundSettings(
        inner_steps=section.leased_steps,
        total_samples=total_samples(recipe.train, sequence_length=recipe.data.sequence_length),
        peers=section.peers,
        minimum_peers=section.minimum_peers,
        grace_s=section.grace_s,
        patience_s=section.patience_s,
        outlier_factor=section.outlier_factor,
        joins_within=section.join == "overlapped",
        answer_s=limits.answer_s,
        stagger_s=limits.stagger_s,
    )


def fingerprint(recipe: Recipe) -> str:
    """A hash of the settings that peers of one run must have in common; others may differ between them."""
    shared = {}
    for name in _SHARED_SECTIONS:
        section = getattr(recipe, name)
        for field in fields(section):
            if about(field).kind != "free":
                shared[f"{name}.{field.name}"] = repr(getattr(section, field.name))
    shared["data.sequence_length"] = repr(recipe.data.sequence_length)
    return hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:32]


class _ServedState:
    """Implements `means.StateServer`: on the port beyond that of the links, or a free one."""

    def __init__(self, access: PeerAccess, trust: Trust, *, limit_bytes_s: float) -> None:
        host, port = split_address(access.listen[0])
        listen = join_address(host, port + 1 if port else 0)
        self._server = StateServer(listen, trust, Shelf(), limit_bytes_s=limit_bytes_s)
        self._urls = tuple(self._dialled(address) for address in access.advertise)

    def offer(self, directory: Path, *, round: int, digest: str) -> Sequence[str]:
        """Serve this checkpoint; its URLs."""
        urls = self._server.offer(directory, round=round, digest=digest)
        return self._urls or urls

    def close(self) -> None:
        """Serve nothing any more."""
        self._server.close()

    def _dialled(self, address: str) -> str:
        """Where others fetch, who dial this address for links."""
        host, port = split_address(address)
        _, own = split_address(self._server.address)
        return f"{self._server.scheme}://{join_address(host, port + 1 if port else own)}"
