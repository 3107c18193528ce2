"""When a fetch gives up a source or itself, what it says then, and what lies on the disk meanwhile."""

from __future__ import annotations

import http.client
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.diloco.served_states import MIB, files_of, make_checkpoint
from tests.protocol import example

from bloomery.checkpoint.format.manifest import INDEX, MANIFEST, read_index, read_manifest
from bloomery.errors import PeerError, StorageError
from bloomery.state_transfer import client
from bloomery.state_transfer.client import StateFetcher, _Fetch, fetch_state
from bloomery.state_transfer.partial_checkpoint import BlockRun, FetchPlan, FetchSource, PartialCheckpoint
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer, _Client
from bloomery.state_transfer.source import NotYetServed, PeerSource, SourceFailed, SourceLost
from bloomery.transport.listener import MemberQuota
from bloomery.transport.trust import Trust

TRUST = Trust(token=b"a secret")
A, B = (PeerSource(peer=name, url=f"http://127.0.0.1:{port}") for name, port in (("a", 8), ("b", 9)))


def fetch_of(place: Path, *origins: PeerSource) -> _Fetch:
    fetch = _Fetch(lambda: origins, "ab12" * 8, place, TRUST, stall_s=1.0, streams=1)
    fetch.origins = list(origins)
    return fetch


def test_a_fetch_fails_when_nobody_is_left_and_tells_each_reason(tmp_path: Path) -> None:
    fetch = fetch_of(tmp_path, A, B)
    fetch._out(A, "it is too slow")
    fetch._check(1e9, lambda: False)
    fetch._out(B, "it answers 503")
    with pytest.raises(PeerError) as failed:
        fetch._check(1e9, lambda: False)
    assert failed.value.message == "nobody gives the state ab12ab12ab12: a: it is too slow; b: it answers 503"
    assert "What is here is kept: another try goes on from it" in failed.value.remedy
    with pytest.raises(PeerError, match=r"^nobody gives the state ab12ab12ab12: there is no source"):
        fetch_of(tmp_path)._check(1e9, lambda: False)


def test_a_fetch_fails_when_no_block_came_for_long_and_names_whom_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now))
    fetch = fetch_of(tmp_path, A, B)
    now = 160.0
    fetch._check(60.0, lambda: False)
    now = 160.5
    with pytest.raises(PeerError) as failed:
        fetch._check(60.0, lambda: False)
    assert failed.value.message == "no block of the state ab12ab12ab12 in 60 s from a, b"
    for advice in ("Are these peers reachable?", "another try goes on from it"):
        assert advice in failed.value.remedy
    fetch._out(A, "it is too slow")
    with pytest.raises(PeerError) as failed:
        fetch._check(60.0, lambda: False)
    assert failed.value.message.endswith("in 60 s from b (a: it is too slow)")
    fetch.error = OSError("the disk is full")
    with pytest.raises(OSError, match="the disk is full"):
        fetch._check(60.0, lambda: True)


def test_a_digest_that_is_none_is_not_asked_for_and_a_disk_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PeerError, match=r"'../x' is no digest of a state") as refused:
        fetch_state(list, "../x", tmp_path, TRUST)
    assert "this version of bloomery" in refused.value.remedy

    def fail(self: _Fetch, **more: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(_Fetch, "run", fail)
    with pytest.raises(
        StorageError, match=f"Fetching the run's state failed at {tmp_path}/{'ab' * 16}: Input"
    ):
        fetch_state(list, "ab" * 20, tmp_path, TRUST)


def test_a_fetcher_of_states_keeps_what_is_of_the_commit_and_passes_on_how_it_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = example.commit(digest="ab" * 20)
    for name in ("ab" * 16, "ab" * 16 + ".partial", "cd" * 16):
        (tmp_path / name).mkdir()
    given: list[Any] = []
    monkeypatch.setattr(client, "fetch_state", lambda *a, **more: given.append((a, more)) or "fetched")
    sources, cancelled, progress = list, lambda: False, lambda done, size: None
    fetcher = StateFetcher(tmp_path, TRUST, progress=progress)
    assert fetcher(commit, sources, cancelled=cancelled) == "fetched"  # type: ignore[comparison-overlap]
    assert given == [((sources, "ab" * 20, tmp_path, TRUST), {"cancelled": cancelled, "progress": progress})]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ab" * 16, "ab" * 16 + ".partial"]


class Fetching:
    """One run that a source sends, and the place in which it is written."""

    run = BlockRun(file="f", begin=MIB, end=2 * MIB)

    def __init__(self, place: Path, sent: Callable[[], bool]) -> None:
        self.asked: list[Any] = []
        self.told = list[str]()
        self.is_right, self.is_missing, self.error = True, True, None

        def fetch_range(*given: Any, **named: Any) -> bool:
            self.asked.append((given, named))
            return sent()

        def write(run: BlockRun, view: memoryview) -> None:
            self.told.append("written")
            if self.error is not None:
                raise self.error

        missing = SimpleNamespace(
            give_back=lambda run: self.told.append("given back"),
            is_missing=lambda run: self.is_missing,
            wake=lambda: None,
        )
        partial = SimpleNamespace(missing=missing, is_right=lambda run, view: self.is_right, write=write)
        state = SimpleNamespace(origin=A, fetch_range=fetch_range)
        self.source = FetchSource(state=state, manifest=None, text=b"", records=frozenset(), failures=1)  # type: ignore[arg-type]
        self.plan = FetchPlan(leader=self.source, partial=partial, index=b"")  # type: ignore[arg-type]
        self.fetch = fetch_of(place, A, B)

    def go(self) -> None:
        self.fetch._fetch_run(self.plan, self.source, self.run, memoryview(bytearray(MIB)))


def test_a_run_that_came_is_written_and_the_failures_before_it_are_forgiven(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Fetching(tmp_path, lambda: True)
    now = 500.0
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now))
    one.go()
    ((given, named),) = one.asked
    assert (given[0], len(given[1]), named["begin"], named["until"]) == ("f", MIB, MIB, 620.0)
    assert (one.told, one.source.failures, one.fetch.moved_s) == (["written"], 0, 500.0)
    is_wanted = named["is_wanted"]
    assert is_wanted()
    one.is_missing = False
    assert not is_wanted()
    one.is_missing, one.fetch.is_over = True, True
    assert not is_wanted()


def test_a_run_that_another_stream_fetched_first_is_neither_written_nor_a_failure(tmp_path: Path) -> None:
    one = Fetching(tmp_path, lambda: False)
    before = one.fetch.moved_s
    one.go()
    assert (one.told, one.source.failures, one.fetch.moved_s) == ([], 1, before)


def test_a_source_is_given_up_after_three_failures_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise SourceFailed("it is too slow")

    one = Fetching(tmp_path, fail)
    slept = list[float]()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: 1.0, sleep=slept.append))
    one.go()
    assert (one.source.failures, one.source.is_out, slept, one.told) == (2, False, [0.2], ["given back"])
    one.go()
    assert one.source.is_out and one.fetch.why_out == {A: "it is too slow"} and slept == [0.2]


def test_the_only_source_that_is_left_is_not_given_up_while_the_network_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise SourceLost("timed out")

    one = Fetching(tmp_path, fail)
    other = FetchSource(state=SimpleNamespace(origin=B), manifest=None, text=b"", records=frozenset())  # type: ignore[arg-type]
    one.fetch.sources = [one.source, other]
    other.is_out = True
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: 1.0, sleep=lambda seconds: None))
    for _ in range(9):
        one.go()
    assert (one.source.failures, one.source.is_out) == (10, False)
    other.is_out = False
    one.go()
    assert one.source.is_out and one.fetch.why_out == {A: "timed out"}


def test_a_source_without_room_is_asked_again_later_and_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> bool:
        raise NotYetServed("it has no room now")

    one = Fetching(tmp_path, fail)
    slept = list[float]()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: 1.0, sleep=slept.append))
    for _ in range(4):
        one.go()
    assert (one.source.failures, one.source.is_out, slept, one.told) == (
        1,
        False,
        [1.0] * 4,
        ["given back"] * 4,
    )


def test_a_state_comes_from_a_source_that_had_no_room_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "NO_ROOM_S", 0.02)
    checkpoint = make_checkpoint(tmp_path / "theirs", own=1, size=1000)
    with (
        StateServer("127.0.0.1:0", TRUST, ServedStates(), connections=1) as server,
        closing(http.client.HTTPConnection(server.address)) as other,
    ):
        server.offer(checkpoint, round=3, digest="ab12")
        other.request("GET", "/state/ab12", headers={"Authorization": f"Bearer {TRUST.token.hex()}"})
        assert other.getresponse().read()
        source = PeerSource(peer="a", url=server.urls[0])

        def has_gone() -> bool:
            if server._refusals.count > 2:
                other.close()
            return False

        fetched = fetch_state(lambda: [source], "ab12", tmp_path / "here", TRUST, cancelled=has_gone)
    assert files_of(fetched.directory) == files_of(checkpoint)


def test_a_block_with_another_hash_is_not_written_and_its_source_is_given_up_at_once(tmp_path: Path) -> None:
    one = Fetching(tmp_path, lambda: True)
    one.is_right = False
    one.go()
    assert (one.told, one.source.is_out) == (["given back"], True)
    assert one.fetch.why_out == {A: "its block at byte 1,048,576 of f has another hash"}


def test_a_disk_that_does_not_take_a_block_is_no_fault_of_its_source(tmp_path: Path) -> None:
    one = Fetching(tmp_path, lambda: True)
    one.error = OSError("the disk is full")
    one.go()
    assert one.told == ["written", "given back"] and one.fetch.error is one.error
    assert not one.source.is_out and one.source.failures == 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "theirs", own=1, size=2 * MIB + 100)


def partial_of(checkpoint: Path, here: Path) -> PartialCheckpoint:
    manifest = read_manifest(checkpoint)
    return PartialCheckpoint(here, manifest, read_index(checkpoint, manifest))


def test_of_what_lies_here_blocks_with_the_right_hashes_are_kept(checkpoint: Path, tmp_path: Path) -> None:
    here, files = tmp_path / "here", files_of(checkpoint)
    model, optim = sorted(name for name in files if name.endswith(".safetensors"))
    here.mkdir()
    wrong = bytearray(files[model])
    wrong[MIB] ^= 1
    (here / model).write_bytes(wrong + b"too long")
    (here / optim).write_bytes(files[optim][: MIB + 1])
    partial = partial_of(checkpoint, here)
    size = len(files[model])
    runs = [partial.missing.take([name], timeout_s=0.0) for name in (model, optim, optim)]
    assert runs[0] == BlockRun(file=model, begin=MIB, end=2 * MIB)
    assert [run.begin for run in runs[1:] if run] == [MIB, 2 * MIB] and runs[2] is not None
    assert runs[2].end == size == len(files[optim])
    whole = 2 * size + len(files[INDEX])
    assert partial.bytes == whole - MIB - (size - MIB)
    for run in (*runs, runs[0]):
        assert run is not None
        data = memoryview(files[run.file][run.begin : run.end])
        assert partial.is_right(run, data)
        assert not partial.is_right(run, memoryview(random.Random(1).randbytes(len(data))))
        partial.write(run, data)
    assert partial.missing.is_over and partial.bytes == whole, "what came twice counts once"
    (here / "left over").write_text("x")
    final = tmp_path / "at" / checkpoint.name
    partial.finish(final, index=files[INDEX], manifest=files[MANIFEST])
    assert files_of(final) == files and not here.exists()
    partial.write(runs[0], memoryview(bytes(MIB)))  # by a thread that comes too late
    assert files_of(final) == files
    partial.close()


def test_a_link_where_a_file_is_to_be_fetched_is_not_followed(checkpoint: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    name = next(path.name for path in checkpoint.iterdir() if path.name.startswith("optim"))
    (tmp_path / "secret").write_text("secret")
    (here / name).symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"):
        partial_of(checkpoint, here)
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_server_is_fetched_from_where_it_is_advertised_or_else_where_it_listens(checkpoint: Path) -> None:
    with StateServer("127.0.0.1:0", TRUST, ServedStates()) as server:
        assert (server.scheme, server.urls) == ("http", (f"http://{server.address}",))
        assert not server.is_serving
        assert server.offer(checkpoint, round=1, digest="ab12") == server.urls and server.is_serving
        server.keep(["cd34"])
        assert not server.is_serving
        server.states.serve_averages({"cd34": checkpoint})
        assert server.is_serving
    advertised = ("one.example.org:1", "two.example.org:2")
    with StateServer("127.0.0.1:0", TRUST, ServedStates(), advertise=advertised) as server:
        assert server.urls == ("http://one.example.org:1", "http://two.example.org:2")
    with StateServer("", TRUST, ServedStates()) as server:
        assert (server.address, server.urls) == ("", ())


def test_a_client_is_a_stranger_until_it_is_admitted_and_counts_as_one_member_until_it_leaves() -> None:
    left, refused = list[int](), list[Any]()
    stranger, log = (
        SimpleNamespace(leave=lambda: left.append(1)),
        SimpleNamespace(write=lambda *a: refused.append(a)),
    )
    room = MemberQuota(2, total=2)
    clients = [_Client(f"h:{n}", stranger, room, log) for n in range(3)]  # type: ignore[arg-type]
    assert [client.admit("a") for client in (clients[0], clients[0], clients[1], clients[2])] == [
        True, True, True, False,
    ]  # fmt: skip
    assert len(left) == 3 and [client.is_served for client in clients] == [True, True, False]
    clients[2].leave()
    assert not room.enter("a"), "who was not served has no place to give back"
    clients[0].leave()
    assert room.enter("a") and not room.enter("a")
    clients[1].refuse("it is late")
    assert refused == [("h:1", "it is late")]


def test_a_source_is_given_the_time_and_the_streams_of_its_fetch(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, started = list[Any](), list[Any]()
    text = (checkpoint / MANIFEST).read_bytes()
    state = SimpleNamespace(
        name=checkpoint.name, read_description=lambda: None, content=lambda file, *, at_most: text
    )
    monkeypatch.setattr(client, "ServedState", lambda *told, **more: given.append((told, more)) or state)
    fetch = _Fetch(list, "ab12", tmp_path, TRUST, stall_s=7.0, streams=3)
    fetch._thread = lambda function, source: started.append((function, source))  # type: ignore[method-assign]
    fetch._read_description(A)
    assert given == [((A, "ab12", TRUST), {"stall_s": 7.0})]
    (source,) = fetch.sources
    assert (source.text, source.manifest) == (text, read_manifest(checkpoint))
    assert started == [(fetch._stream, source)] * 3


def test_a_source_without_room_is_not_asked_again_once_the_fetch_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise NotYetServed("it has no room now")

    fetch, slept = fetch_of(tmp_path, A), list[float]()

    def sleep(seconds: float) -> None:
        assert not slept, "it asks for ever"
        slept.append(seconds)
        fetch.is_over = True

    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: 1.0, sleep=sleep))
    with pytest.raises(NotYetServed):
        fetch._manifest_at(SimpleNamespace(read_description=full))  # type: ignore[arg-type]
    assert slept == [client.NO_ROOM_S]


def test_nothing_more_is_asked_of_a_source_that_was_given_up(tmp_path: Path) -> None:
    one, taken = Fetching(tmp_path, lambda: True), list[Any]()
    one.fetch.plan, one.source.is_out = one.plan, True

    def take(*files: Any, timeout_s: float) -> None:
        taken.append(files)
        one.fetch.is_over = True

    one.plan.partial.missing.take = take  # type: ignore[method-assign,assignment]
    one.fetch._stream(one.source)
    assert taken == []


def test_a_fetch_has_the_times_and_streams_that_its_caller_chose_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Noted:
        def __init__(self, *told: Any, **more: Any) -> None:
            calls.append((told, more))

        def run(self, **more: Any) -> str:
            calls.append(more)
            return "fetched"

        def close(self) -> None:
            calls.append("closed")

    monkeypatch.setattr(client, "_Fetch", Noted)
    cancelled, progress = (lambda: False), (lambda done, size: None)
    times = dict(progress_s=1.0, stall_s=2.0, leader_s=3.0, streams=4)
    found = fetch_state(list, "ab" * 20, tmp_path, TRUST, **times, cancelled=cancelled, progress=progress)  # type: ignore[arg-type]
    assert found == "fetched"  # type: ignore[comparison-overlap]
    assert calls == [
        ((list, "ab" * 20, tmp_path / ("ab" * 16), TRUST), {"stall_s": 2.0, "streams": 4}),
        {"progress_s": 1.0, "leader_s": 3.0, "cancelled": cancelled, "progress": progress},
        "closed",
    ]
