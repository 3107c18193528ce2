"""A fetch of an average whose sources all fail: what came of it is kept for the next sources."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.state_transfer.test_averages import COMMIT, CONTENT, TRUST

from bloomery.state_transfer import averages
from bloomery.state_transfer.averages import AverageFetcher
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import PeerSource

WHOLE = len(CONTENT)


class ToldAsWhole(ServedStates):
    """Tells of any file that it has the size of the whole average, and breaks off where it ends."""

    @contextmanager
    def reading(self, digest, file):
        with super().reading(digest, file) as found:
            yield replace(found, bytes=WHOLE)


@pytest.fixture
def serve(tmp_path: Path):
    """Serves the first bytes of an average from a peer."""
    with ExitStack() as stack:

        def make(name: str, kept: int) -> PeerSource:
            (tmp_path / name).mkdir()
            (tmp_path / name / "cd34.0").write_bytes(CONTENT[:kept])
            server = stack.enter_context(StateServer("127.0.0.1:0", TRUST, ToldAsWhole()))
            server.states.serve_averages({"cd34": tmp_path / name})
            return PeerSource(peer=name, url=server.urls[0])

        yield make


def fetched_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the bytes that each peer is asked for from now on."""
    asked: dict[str, int] = {}
    usual = averages.ServedState.fetch_range

    def fetch_range(state, file, buffer, **more):
        asked[state.origin.peer] = asked.get(state.origin.peer, 0) + len(buffer)
        return usual(state, file, buffer, **more)

    monkeypatch.setattr(averages.ServedState, "fetch_range", fetch_range)
    return asked


@pytest.mark.parametrize(("at_once", "is_resumed"), [(2, True), (1, False)])
def test_parts_that_came_are_kept_unless_an_average_has_to_come_from_one_peer(
    serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, is_resumed: bool
) -> None:
    sources = [serve("a", 3 * WHOLE // 4), serve("b", 3 * WHOLE // 4), serve("c", WHOLE)]
    asked = fetched_of(monkeypatch)
    fetch = AverageFetcher(tmp_path / "missed", TRUST)
    average = fetch(COMMIT, lambda: sources, ranks=1, at_once=at_once, cancelled=lambda: False)
    assert (average.directory / "average-0").read_bytes() == CONTENT and average.bytes == WHOLE
    assert (asked["c"] < WHOLE) == is_resumed
    assert "c" in average.peers and (len(average.peers) > 1) == is_resumed


def test_parts_of_another_size_are_not_kept(serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [serve("a", 3 * WHOLE // 4), serve("b", 3 * WHOLE // 4)]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "cd34.0").write_bytes(CONTENT[::-1][: WHOLE - 1])
    with StateServer("127.0.0.1:0", TRUST, ServedStates()) as server:
        server.states.serve_averages({"cd34": tmp_path / "other"})
        sources.append(PeerSource(peer="other", url=server.urls[0]))
        fetch = AverageFetcher(tmp_path / "missed", TRUST)
        average = fetch(COMMIT, lambda: sources, ranks=1, at_once=2, cancelled=lambda: False)
    assert average.peers == ("other",)
    assert (average.directory / "average-0").read_bytes() == CONTENT[::-1][: WHOLE - 1]
