"""A peer without torch: the real parent, and fake ranks. Started as `python fake_peer.py {json}`."""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import time
from dataclasses import replace
from pathlib import Path

from bloomery.agent.agent import Agent
from bloomery.agent.agent_context import PeerSettings
from bloomery.agent.assemble import RoundJournal
from bloomery.agent.known_commits import KnownCommits
from bloomery.agent.rank_server import PARENT
from bloomery.agent.state_sync import KeptAverages
from bloomery.agent.timeouts import timeouts_of
from bloomery.cli.peer import lead
from bloomery.cli.ranks import RankRange, run_ranks
from bloomery.config.elastic import ElasticSection
from bloomery.coordination.credentials import read_bundle
from bloomery.coordination.eligibility import RoundSettings
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.transactions import run_token
from bloomery.errors import PeerError
from bloomery.events.journal import Journal
from bloomery.protocol.keys import Keys
from bloomery.state_transfer.averages import AverageFetcher
from bloomery.state_transfer.client import StateFetcher
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.transport.connection import Contact
from bloomery.transport.connection_manager import ConnectionManager
from bloomery.transport.handshake import OwnIdentity
from bloomery.transport.trust import Trust, trust_certificates


def trust_of(options: dict, etcd: Etcd, keys: Keys) -> Trust:
    if "certificates" not in options:
        return Trust(token=run_token(etcd, keys).encode())
    bundle = read_bundle(Path(options["certificates"]))
    return trust_certificates(authority=bundle.authority, certificate=bundle.certificate, key=bundle.key)


class NoStates(ServedStates):
    """Those of a peer that cannot serve its state, for instance for lack of memory."""

    def put(self, digest: str, directory: Path, *, round: int) -> None:
        raise PeerError("no state is served here")

    def serve_averages(self, directories: object) -> None:
        pass


def main() -> int:
    options = json.loads(sys.argv[1])
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s.%(msecs)03d %(name)s %(message)s", datefmt="%H:%M:%S"
    )
    directory = Path(options["directory"])
    section = ElasticSection(**options["elastic"])
    limits = replace(timeouts_of(section), **options.get("limits", {}))
    etcd, keys = Etcd([options["endpoint"]]), Keys(options["run"])
    trust = trust_of(options, etcd, keys)
    incarnation = secrets.token_hex(4)
    is_dialled = section.listen != "none"
    relays: list[Contact] = []
    connection_manager = ConnectionManager(
        OwnIdentity(
            run=options["run"],
            peer=options["peer"],
            incarnation=incarnation,
            encrypt=section.encrypt == "tls",
        ),
        trust,
        listen=("127.0.0.1:0",) if is_dialled else (),
        is_relay=section.relay,
        relays=lambda: tuple(relays),
        turns=limits.dialing,
        patience=limits.tcp,
    )
    settings = PeerSettings(
        run=options["run"],
        peer=options["peer"],
        incarnation=incarnation,
        settings=options.get("settings", {"recipe": "r"}),
        rounds=RoundSettings(
            inner_steps=section.inner_steps,
            total_samples=options["samples"],
            peers=section.peers,
            minimum_peers=section.minimum_peers,
            grace_s=section.grace_s,
            patience_s=section.patience_s,
            outlier_factor=section.outlier_factor,
            joins_within=section.join == "overlapped",
            answer_s=limits.answer_s,
        ),
        timeouts=limits,
        streams=section.streams,
        relays=section.relay,
        token=trust.token.decode(),
    )
    events = RoundJournal(Journal(directory / "journal.jsonl"), options["peer"])
    limit = section.bandwidth_limit_mbit_s * 1e6 / 8
    states = NoStates() if options.get("serves_nothing") else ServedStates()
    server = StateServer("127.0.0.1:0" if is_dialled else "", trust, states, limit_bytes_s=limit)
    fetch = StateFetcher(Path(options["memory"]) / f"{options['peer']}-fetched", trust)
    knowledge = KnownCommits(directory / "known.json", run=options["run"], peer=options["peer"])
    parent = Agent(
        settings,
        etcd=etcd,
        connection_manager=connection_manager,
        server=server,
        fetch=fetch,
        events=events,
        knowledge=knowledge,
        relays=relays,
        averages=KeptAverages(
            directory / "averages",
            states,
            AverageFetcher(Path(options["memory"]) / f"{options['peer']}-missed", trust),
            at_most=64,  # a busy machine may let rounds pass while a test looks away
        ),
    )
    world = options.get("world", 1)
    command = [sys.executable, str(Path(__file__).with_name("fake_rank.py")), json.dumps(options)]

    def start(path: str) -> int:
        status = run_ranks(
            command, RankRange(count=world, world=world), environment=os.environ | {PARENT: path}
        )
        time.sleep(options.get("pause_at_end_s", 0.0))
        return status

    status, ending = lead(parent, start)
    connection_manager.close()
    server.close()
    knowledge.close()
    print("ending", ending, status, flush=True)
    return status or int(ending is None or ending.failed)


if __name__ == "__main__":
    sys.exit(main())
