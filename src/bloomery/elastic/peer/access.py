"""Who a peer is and what it may: its name, its coordinator, its certificates, where it listens."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bloomery.config.recipe import Recipe
from bloomery.elastic.control.bundle import Bundle, read_bundle
from bloomery.elastic.control.etcd import Etcd
from bloomery.elastic.control.keys import Keys, is_name, name_mistake
from bloomery.elastic.control.rounds import run_token
from bloomery.elastic.links.sockets import split_address
from bloomery.elastic.links.trust import Trust, is_loopback, trust_certificates
from bloomery.elastic.peer.timeouts import Timeouts, timeouts_of
from bloomery.errors import ConfigError, CoordinatorAway, Mistake, PeerError

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1:0"


@dataclass(frozen=True, kw_only=True)
class PeerAccess:
    """From the recipe's [elastic], the environment and the bundle. bundle: None without certificates."""

    run: str
    peer: str
    endpoints: tuple[str, ...]
    bundle: Bundle | None
    listen: tuple[str, ...]
    advertise: tuple[str, ...]
    timeouts: Timeouts

    def etcd(self) -> Etcd:
        """A client of the coordinator. Nothing is asked yet."""
        access = self.bundle.access() if self.bundle else None
        return Etcd(self.endpoints, access, deadline_s=self.timeouts.coordinator_s)

    def answered(self, etcd: Etcd) -> None:
        """Return once the coordinator answers; it may just be started again. Raises CoordinatorAway."""
        end_s = time.monotonic() + self.timeouts.arrival_s
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
        """What this peer shows to others, and wants to see. Without certificates, asks the coordinator."""
        if self.bundle is None:
            return Trust(token=run_token(etcd, Keys(self.run)).encode())
        bundle = self.bundle
        return trust_certificates(authority=bundle.authority, certificate=bundle.certificate, key=bundle.key)


def access_of(recipe: Recipe, sources: Mapping[str, str], environment: Mapping[str, str]) -> PeerAccess:
    """What a peer of this recipe is here. Raises ConfigError, CoordinatorError or PeerError."""
    section = recipe.elastic
    chosen = {
        "coordinator": section.coordinator or environment.get("BLOOMERY_COORDINATOR", ""),
        "certificates": section.certificates or environment.get("BLOOMERY_CERTIFICATES", ""),
        "listen": section.listen or environment.get("BLOOMERY_LISTEN", "") or LOOPBACK,
        "advertise": section.advertise or environment.get("BLOOMERY_ADVERTISE", ""),
    }
    bundle = read_bundle(Path(chosen["certificates"]).expanduser()) if chosen["certificates"] else None
    name = section.peer or environment.get("BLOOMERY_PEER", "")
    peer = name or (bundle.account.peer if bundle else os.uname().nodename)
    listen, advertise = _listed(chosen["listen"]), _listed(chosen["advertise"])
    _refuse_mistakes(recipe, sources, peer=peer, coordinator=chosen["coordinator"])
    if bundle is not None and (bundle.account.run, bundle.account.peer) != (recipe.run.name, peer):
        raise PeerError(
            f"The certificates in {bundle.directory} are of peer '{bundle.account.peer}' of the run "
            f"'{bundle.account.run}', and this is '{peer}' of '{recipe.run.name}'.",
            remedy="Point elastic.certificates to this peer's own bundle, or leave elastic.peer empty.",
        )
    _refuse_strangers(listen, advertise, bundle)
    if section.encrypt == "tls" and bundle is None:
        raise PeerError(
            "elastic.encrypt = 'tls' needs certificates.",
            remedy="`bloomery coordinate --init-certs` makes them; name the bundle in elastic.certificates.",
        )
    return PeerAccess(
        run=recipe.run.name,
        peer=peer,
        endpoints=_listed(chosen["coordinator"]),
        bundle=bundle,
        listen=listen,
        advertise=advertise,
        timeouts=timeouts_of(section),
    )


def _refuse_mistakes(recipe: Recipe, sources: Mapping[str, str], *, peer: str, coordinator: str) -> None:
    mistakes = []
    for key, value in (("run.name", recipe.run.name), ("elastic.peer", peer)):
        if not is_name(value):
            mistakes.append(name_mistake(key, value, sources.get(key, "default")))
    if not recipe.elastic.inner_steps:
        mistakes.append(
            Mistake(
                key="elastic.inner_steps",
                value=0,
                source=sources.get("elastic.inner_steps", "default"),
                problem="the recipe has no rounds between peers",
                remedy="Set elastic.inner_steps, for instance to 50; or train alone: `bloomery train`.",
            )
        )
    if not coordinator:
        mistakes.append(
            Mistake(
                key="elastic.coordinator",
                value=None,
                source="nowhere",
                problem="no coordinator is named",
                remedy="`bloomery coordinate` starts one and says its address; set this, or "
                "BLOOMERY_COORDINATOR.",
            )
        )
    if mistakes:
        raise ConfigError(mistakes)


def _refuse_strangers(listen: tuple[str, ...], advertise: tuple[str, ...], bundle: Bundle | None) -> None:
    """Without certificates nothing leaves the machine."""
    for address in (*listen, *advertise):
        host, _ = split_address(address)
        if bundle is None and not is_loopback(host):
            raise PeerError(
                f"Without certificates a peer does not listen on {address}: anybody could join.",
                remedy="`bloomery coordinate --init-certs` makes a bundle for each peer; name it in "
                "elastic.certificates.",
            )
        if bundle is not None and not advertise and host in ("0.0.0.0", "::"):
            raise PeerError(
                f"A peer that listens on {address} has to say where it can be dialled.",
                remedy="Set elastic.advertise (or BLOOMERY_ADVERTISE): host:port, several with commas.",
            )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(piece.strip() for piece in text.split(",") if piece.strip())
