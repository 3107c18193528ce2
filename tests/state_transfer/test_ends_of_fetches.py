"""What a fetch frees when it ends, what comes too late for it, and what a server does as it ends."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.elastic_peers import DEADLINE_S, Authority, until
from tests.diloco.recorder import Recorder
from tests.diloco.served_states import files_of, make_checkpoint, open_files_of
from tests.disk_calls import recorded
from tests.protocol import example

from bloomery.checkpoint.format.manifest import INDEX, MANIFEST, read_index, read_manifest
from bloomery.errors import CheckpointError, PeerError
from bloomery.state_transfer import averages, client, source
from bloomery.state_transfer import server as serving
from bloomery.state_transfer.averages import AverageFetcher, _Download
from bloomery.state_transfer.client import _Fetch, fetch_state
from bloomery.state_transfer.partial_checkpoint import (
    BlockRun,
    FetchPlan,
    FetchSource,
    MissingBlocks,
    PartialCheckpoint,
)
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import PeerSource, SourceFailed, SourceLost
from bloomery.transport.sockets import RateLimiter
from bloomery.transport.trust import Trust

TRUST = Trust(token=b"a secret")
A = PeerSource(peer="a", url="http://127.0.0.1:8")
RUN = BlockRun(file="f", begin=0, end=10)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "theirs", own=1, size=1000)


@pytest.fixture
def partial(checkpoint: Path, tmp_path: Path) -> PartialCheckpoint:
    manifest = read_manifest(checkpoint)
    return PartialCheckpoint(tmp_path / "here", manifest, read_index(checkpoint, manifest))


class Fetching:
    """A fetch of which one source is known, and its plan."""

    def __init__(self, checkpoint: Path, partial: PartialCheckpoint, place: Path) -> None:
        self.calls: list[Any] = []
        state = Recorder("state", self.calls)
        state.__dict__.update(origin=A, name=checkpoint.name)
        self.source = FetchSource(
            state=state,  # type: ignore[arg-type]
            manifest=read_manifest(checkpoint),
            text=(checkpoint / MANIFEST).read_bytes(),
            records=frozenset(read_manifest(checkpoint).files),
        )
        self.plan = FetchPlan(leader=self.source, partial=partial, index=b"")
        self.fetch = _Fetch(lambda: [A], "ab12", place, TRUST, stall_s=1.0, streams=1)
        self.fetch.origins, self.fetch.sources, self.fetch.plan = [A], [self.source], self.plan


@pytest.fixture
def fetching(checkpoint: Path, partial: PartialCheckpoint, tmp_path: Path) -> Fetching:
    return Fetching(checkpoint, partial, tmp_path / "here")


def test_a_fetch_that_ends_leaves_no_file_open_and_no_connection_and_wakes_who_waits_for_a_run(
    fetching: Fetching, tmp_path: Path
) -> None:
    woken: list[bool] = []
    fetching.plan.partial.missing.wake = lambda: woken.append(fetching.fetch.is_over)  # type: ignore[method-assign]
    assert len(open_files_of(tmp_path / "here")) == 2
    fetching.fetch.close()
    assert open_files_of(tmp_path / "here") == [] and woken == [True]
    assert fetching.calls == [("state", "close")]


def test_another_leaders_plan_takes_the_place_of_one_whose_files_are_closed_and_has_its_time(
    fetching: Fetching, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: 1e6))
    planned, other = [], SimpleNamespace()
    fetching.fetch._planned = lambda leader: planned.append(leader) or other  # type: ignore[method-assign]
    fetching.fetch._replan()
    assert planned == [fetching.source] and fetching.fetch.plan is other
    assert open_files_of(tmp_path / "here") == [] and fetching.fetch.moved_s == 1e6


@pytest.mark.parametrize("is_out", [True, False])
def test_a_slow_leader_leads_on_where_every_other_source_was_given_up(
    fetching: Fetching, is_out: bool
) -> None:
    fetching.fetch.sources.append(replace(fetching.source, is_out=is_out))
    fetching.plan.partial.missing.wait = lambda seconds: None  # type: ignore[method-assign]
    looks = iter([False, True])
    with pytest.raises(PeerError, match="was given up"):
        fetching.fetch.run(progress_s=1e9, leader_s=-1.0, cancelled=lambda: next(looks), progress=None)
    assert fetching.source.is_out is not is_out


@pytest.mark.parametrize("is_out", [True, False])
def test_files_that_no_other_source_has_any_more_come_first_and_each_run_whole(
    fetching: Fetching, is_out: bool
) -> None:
    fetch, asked, came = fetching.fetch, list[Any](), list[int]()
    fetch.sources.append(replace(fetching.source, is_out=is_out))
    runs = iter([BlockRun(file="f", begin=0, end=10), BlockRun(file="f", begin=10, end=40), RUN])

    def take(files: Any, own: Any, *, timeout_s: float) -> BlockRun | None:
        asked.append((set(files), set(own)))
        run = next(runs, None)
        fetch.is_over = run is None
        return run

    fetching.plan.partial.missing.take = take  # type: ignore[method-assign,assignment]
    fetch._fetch_run = lambda plan, source, run, view: came.append(len(view))  # type: ignore[method-assign]
    fetch._stream(fetching.source)
    names = {record.name for record in fetching.source.records}
    assert asked == [(names, names if is_out else set())] * 4 and came == [10, 30, 10]


def test_of_an_index_no_more_is_taken_than_the_manifest_says(fetching: Fetching) -> None:
    def fail(file: str, *, at_most: int, is_wanted: object) -> bytes:
        raise SourceFailed(f"{file} would have more than {at_most} bytes")

    fetching.source.state._answers["content"] = fail  # type: ignore[attr-defined]
    size = fetching.source.manifest.index_bytes
    with pytest.raises(SourceFailed, match=f"^{INDEX} would have more than {size} bytes"):
        fetching.fetch._planned(fetching.source)


def test_another_leaders_plan_knows_what_the_last_one_fetched(
    fetching: Fetching, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, made = list[Any](), iter(["first", OSError("the disk is full"), "third", "fourth"])

    def begun(*arguments: Any, before: Any) -> Any:
        given.append(before)
        if isinstance(partial := next(made), OSError):
            raise partial
        return partial

    monkeypatch.setattr(client, "PartialCheckpoint", begun)
    fetching.source.state._answers["content"] = lambda *of, **more: (checkpoint / INDEX).read_bytes()  # type: ignore[attr-defined]
    for _ in range(4):
        with suppress(OSError):
            fetching.fetch._planned(fetching.source)
    assert given == [None, "first", None, "third"]


def test_why_a_leader_cannot_lead_is_told_in_one_line(fetching: Fetching) -> None:
    def fail(leader: FetchSource) -> FetchPlan:
        raise PeerError("its state is too large", remedy="Free some space.")

    fetching.fetch._planned = fail  # type: ignore[method-assign]
    fetching.fetch._replan()
    assert fetching.fetch.plan is None and fetching.source.is_out
    assert fetching.fetch.why_out == {A: "its state is too large"}


@pytest.mark.parametrize("wrong", ["large", "gaps"])
def test_a_source_whose_index_is_too_large_or_has_gaps_is_not_fetched_from(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    def find_gaps(boxes: object) -> None:
        raise CheckpointError("element 7 is in no file")

    size = (checkpoint / INDEX).stat().st_size
    if wrong == "large":
        monkeypatch.setattr(client, "INDEX_BYTES_AT_MOST", size - 1)
    else:
        monkeypatch.setattr(client, "INDEX_BYTES_AT_MOST", size)
        monkeypatch.setattr(client, "check_coverage", find_gaps)
    why = f"its index would have {size:,} bytes" if wrong == "large" else "element 7 is in no file"
    with StateServer("127.0.0.1:0", TRUST, ServedStates()) as server:
        server.offer(checkpoint, round=1, digest="ab12")
        origin = PeerSource(peer="a", url=server.urls[0])
        with pytest.raises(PeerError, match=f": a: {why}\n"):
            fetch_state(lambda: [origin], "ab12", tmp_path / "fetched", TRUST)


def test_who_watches_a_fetch_is_told_the_bytes_that_are_here_and_then_those_of_all(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, told, fetch_run = list[tuple[int, int]](), threading.Event(), _Fetch._fetch_run

    def progress(done: int, size: int) -> None:
        seen.append((done, size))
        told.set()

    def after_it(self: _Fetch, *given: Any) -> None:
        assert told.wait(DEADLINE_S)
        fetch_run(self, *given)

    monkeypatch.setattr(_Fetch, "_fetch_run", after_it)
    with StateServer("127.0.0.1:0", TRUST, ServedStates()) as server:
        server.offer(checkpoint, round=1, digest="ab12")
        origin = PeerSource(peer="a", url=server.urls[0])
        fetched = fetch_state(lambda: [origin], "ab12", tmp_path / "fetched", TRUST, progress=progress)
    files = files_of(checkpoint)
    whole, index = sum(map(len, files.values())) - len(files[MANIFEST]), len(files[INDEX])
    assert seen[0] == (index, whole) and seen[-1] == (whole, whole) and fetched.bytes == whole


def test_files_that_cannot_all_be_opened_are_none_of_them_left_open(checkpoint: Path, tmp_path: Path) -> None:
    manifest, here = read_manifest(checkpoint), tmp_path / "here"
    here.mkdir()
    (here / manifest.files[-1].name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        PartialCheckpoint(here, manifest, read_index(checkpoint, manifest))
    assert (here / manifest.files[0].name).exists() and open_files_of(here) == []


def test_a_checkpoint_gets_its_name_once_its_names_within_are_on_the_disk(
    partial: PartialCheckpoint, checkpoint: Path, tmp_path: Path
) -> None:
    files, final = files_of(checkpoint), tmp_path / "a" / "b" / checkpoint.name
    with recorded() as calls:
        partial.finish(final, index=files[INDEX], manifest=files[MANIFEST])
    named = calls.index("rename", final.name)
    assert calls.index("sync", MANIFEST) < calls.index("sync", "here") < named
    assert calls.synced_before(tmp_path.name, at=named), "the new directory has its name durably"
    assert ("sync", "b") in calls.names[named:]


def download(place: Path) -> tuple[_Download, MissingBlocks]:
    made, missing = _Download(place, ["f"], {}), MissingBlocks([RUN])
    made._files, made._missing = {"f": (place / "f").open("wb")}, missing
    return made, missing


def test_what_comes_after_the_end_of_an_average_is_neither_wanted_nor_written_nor_told(
    tmp_path: Path,
) -> None:
    one, missing = download(tmp_path)
    run = missing.take(["f"], timeout_s=0.0)
    state: Any = SimpleNamespace(origin=A)
    assert run == RUN and one._is_wanted(missing, run)

    def fail(state: Any) -> None:
        raise SourceFailed("it is too slow")

    for is_closed in (False, True):
        one._is_closed = is_closed
        one._failed.clear()
        one._start(fail, state)
        until(lambda: one._active == 0)
        assert one._failed.keys() == (set() if is_closed else {A})
    assert not one._is_wanted(missing, run)
    one._write(state, missing, run, memoryview(b"0123456789"))
    assert not missing.is_over and one.peers == set() and (tmp_path / "f").read_bytes() == b""
    one._is_closed = False
    one._write(state, missing, run, memoryview(b"0123456789"))
    assert missing.is_over and one.peers == {"a"} and (tmp_path / "f").read_bytes() == b"0123456789"
    one._files["f"].close()


def test_a_stream_of_an_average_gives_back_what_it_could_not_fetch_and_ends_with_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averages, "time", SimpleNamespace(monotonic=lambda: 500.0))
    one, missing = download(tmp_path)
    one._sizes = {"f": 10}
    asked: list[Any] = []

    def fetch_range(file: str, buffer: memoryview, **more: Any) -> bool:
        asked.append((file, len(buffer), more["begin"], more["until"]))
        raise SourceFailed("it is too slow")

    state: Any = SimpleNamespace(origin=A, fetch_range=fetch_range)
    with pytest.raises(SourceFailed):
        one._stream(state)
    assert asked == [("f", 10, 0, 620.0)]
    assert not missing.is_missing(RUN) and not missing.is_over, "it waits, and nobody fetches it"
    one._failed[A] = SourceFailed("it is too slow")
    one._stream(state)
    assert len(asked) == 1
    one._files["f"].close()


@pytest.mark.parametrize("losses", [2, 3])
def test_a_stream_of_an_average_outlasts_two_lost_connections_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    monkeypatch.setattr(averages, "_PAUSE_S", 0.0)
    one, missing = download(tmp_path)
    one._sizes, left = {"f": 10}, iter([True] * losses + [False])

    def fetch_range(file: str, buffer: memoryview, **more: Any) -> bool:
        if next(left):
            raise SourceLost("timed out")
        return True

    state: Any = SimpleNamespace(origin=A, fetch_range=fetch_range)
    with suppress(SourceLost):
        one._stream(state)
    assert missing.is_over is (losses == 2)
    one._files["f"].close()


def test_peers_that_send_no_size_of_an_average_are_waited_for_as_long_as_a_connection_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments, begun = itertools.count(100.0, 4.0), threading.Event()
    monkeypatch.setattr(averages, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    monkeypatch.setattr(averages, "_PAUSE_S", 0.001)
    monkeypatch.setattr(_Download, "_begin", lambda self, state: begun.wait(DEADLINE_S))
    one = _Download(tmp_path, ["f"], {})
    assert not one.fetch([A], "ab12", TRUST, until=200.0, cancelled=lambda: False)
    assert next(moments) < 120.0
    begun.set()
    until(lambda: one._active == 0)


def test_an_average_has_its_files_closed_and_its_threads_told_also_where_a_disk_fails(tmp_path: Path) -> None:
    one, _ = download(tmp_path)
    one._error = OSError("the disk is full")
    with pytest.raises(OSError, match="the disk is full"):
        one.fetch([], "ab12", TRUST, until=0.0, cancelled=lambda: False)
    assert one._is_closed and one._files["f"].closed


def test_a_file_among_the_averages_hinders_no_fetch(tmp_path: Path) -> None:
    (tmp_path / "of nobody").write_text("x")
    with pytest.raises(PeerError, match="there is no source"):
        AverageFetcher(tmp_path, TRUST)(example.commit(digest="cd34"), list, ranks=1, cancelled=lambda: False)


def test_a_silent_source_has_failed_before_another_leads_and_that_before_the_whole_fetch_ends() -> None:
    assert source.CONNECT_S < source.STALL_S < client.LEADER_S < client.PROGRESS_S < client.RUN_S
    assert source.STALL_S < averages.PATIENCE_S < client.PROGRESS_S
    assert client.MANIFEST_BYTES_AT_MOST * 4 < client.INDEX_BYTES_AT_MOST == 1 << 30
    assert serving.REQUEST_S < serving.SEND_S < serving.IDLE_S and serving.OF_MEMBER < serving.CONNECTIONS
    assert serving.OF_MEMBER >= client.STREAMS + 1 + averages.STREAMS * 2


def test_each_stream_of_an_average_leaves_as_much_to_all_others_of_all_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def note(self: _Download, state: Any) -> None:
        begun.append(state.origin.peer)

    monkeypatch.setattr(averages._Download, "_begin", note)
    sources = [PeerSource(peer=peer, url="http://127.0.0.1:8") for peer in "abc"]
    one = _Download(tmp_path, ["f"], {})
    until_s = time.monotonic() + DEADLINE_S
    assert not one.fetch(sources, "ab12", TRUST, until=until_s, cancelled=lambda: False)
    assert one._streams == 3 * averages.STREAMS
    until(lambda: sorted(begun) == ["a", "b", "c"])


def served_reader(monkeypatch: pytest.MonkeyPatch, server: StateServer) -> dict[str, Any]:
    """The limits of what reads the requests of a connection."""
    given: dict[str, Any] = {}

    def reader(connection: socket.socket, **limits: Any) -> Any:
        given.update(limits)
        raise OSError("enough")

    monkeypatch.setattr(serving, "BoundedReader", reader)
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(DEADLINE_S)
        server.serve(theirs, "127.0.0.1")
        assert ours.recv(1) == b""
    return given


def test_a_connection_may_be_idle_for_a_minute_and_take_ten_seconds_for_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with StateServer("", TRUST, ServedStates()) as server:
        monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: 100.0))
        limits = served_reader(monkeypatch, server)
    assert limits == {"first_until": 110.0, "idle_s": 60.0, "request_s": 10.0}


def test_a_server_that_is_closed_ends_who_is_served_its_threads_and_its_states(checkpoint: Path) -> None:
    before = set(threading.enumerate())
    server = StateServer("127.0.0.1:0", TRUST, ServedStates())
    server.offer(checkpoint, round=1, digest="ab12")
    host, _, port = server.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as member:
        token = f"Authorization: Bearer {TRUST.token.hex()}"
        member.sendall(f"HEAD /state/ab12 HTTP/1.1\r\n{token}\r\n\r\n".encode())
        assert member.recv(1000).startswith(b"HTTP/1.1 200")
        server.close()
        assert member.recv(1) == b"" and server.states.is_empty and open_files_of(checkpoint) == []
    assert [listener.fileno() for listener in server._listeners] == [-1]
    of_server = {"serving", "served"}
    until(lambda: not of_server & {thread.name for thread in set(threading.enumerate()) - before})


def test_a_silent_end_has_as_long_for_tls_as_another_for_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PROOF_S", 0.05)
    trust = Authority(tmp_path / "ca", "run r").trust("a")
    with closing(StateServer("127.0.0.1:0", trust, ServedStates())) as server:
        host, _, port = server.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
            assert stranger.recv(1) == b""


def test_servers_of_one_peer_may_share_a_limit_of_what_they_send() -> None:
    limiter = RateLimiter(1e6)
    with StateServer("", TRUST, ServedStates(), rate_limiter=limiter, limit_bytes_s=5.0) as server:
        assert server._rate_limiter is limiter
    with StateServer("", TRUST, ServedStates(), limit_bytes_s=1e6) as server:
        assert server._rate_limiter.piece_bytes == limiter.piece_bytes
