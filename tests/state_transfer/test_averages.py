"""Fetching the average of a round from those who were in it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.protocol import example

from bloomery.errors import PeerError
from bloomery.state_transfer.averages import AverageFetcher
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import PeerSource
from bloomery.transport.trust import Trust

TRUST = Trust(token=b"a secret of the run")
COMMIT = example.commit(round=7, digest="cd34", members=("a", "b"))
CONTENT = bytes(range(256)) * 40_000  # of several pieces


@pytest.fixture
def sources(tmp_path: Path):
    """Peer 'a' keeps the average of no rank but the first, 'b' that of both."""
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(StateServer("127.0.0.1:0", TRUST, ServedStates())) for name in "ab"
        }
        for name, server in servers.items():
            (tmp_path / name).mkdir()
            (tmp_path / name / "cd34.0").write_bytes(CONTENT)
            server.states.serve_averages({"cd34": tmp_path / name})
        (tmp_path / "b" / "cd34.1").write_bytes(CONTENT[::-1])
        yield [PeerSource(peer=name, url=server.urls[0]) for name, server in servers.items()]


def test_all_parts_of_an_average_come_from_one_peer_and_those_of_other_rounds_go(sources, tmp_path):
    fetch = AverageFetcher(tmp_path / "missed", TRUST)
    (tmp_path / "missed" / "of another round").mkdir(parents=True)
    fetched = fetch(COMMIT, lambda: sources, ranks=2, cancelled=lambda: False)
    assert fetched.leader.peer == "b" and fetched.bytes == 2 * len(CONTENT)
    assert (fetched.directory / "average-0").read_bytes() == CONTENT
    assert (fetched.directory / "average-1").read_bytes() == CONTENT[::-1]
    assert [path.name for path in (tmp_path / "missed").iterdir()] == ["cd34"]


def test_an_average_that_nobody_keeps_is_not_waited_for_and_one_that_is_to_come_for_a_while(
    sources, tmp_path
):
    fetch = AverageFetcher(tmp_path / "missed", TRUST, patience_s=0.3)
    with pytest.raises(PeerError, match=r"round 7: a: it has not written.*; b: it has not written"):
        fetch(COMMIT, lambda: sources, ranks=3, cancelled=lambda: False)
    never = AverageFetcher(tmp_path / "missed", TRUST, patience_s=1e9)
    with pytest.raises(PeerError, match=r"average of round 8: a: it has not this file"):
        never(example.commit(round=8, digest="ef56"), lambda: sources, ranks=1, cancelled=lambda: False)
    with pytest.raises(PeerError, match="there is no source"):
        fetch(COMMIT, list, ranks=1, cancelled=lambda: False)
    with pytest.raises(PeerError):
        fetch(COMMIT, lambda: sources, ranks=3, cancelled=lambda: True)
