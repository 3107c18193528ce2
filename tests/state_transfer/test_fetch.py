"""Fetching from several peers at once: some die, some lie, some never answer; what arrives is right."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.diloco.served_states import MIB, files_of, make_checkpoint
from tests.protocol import example

from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.manifest import INDEX, PARTIAL
from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.credentials import read_bundle
from bloomery.data.position import Position
from bloomery.errors import PeerError
from bloomery.state_transfer import client as fetching
from bloomery.state_transfer.client import StateFetcher
from bloomery.state_transfer.partial_checkpoint import BlockRun, MissingBlocks
from bloomery.state_transfer.served_states import OpenFile, ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import PeerSource, ServedState
from bloomery.transport.trust import Trust, trust_certificates

TRUST = Trust(token=b"a secret of the run")
DIGEST = "ab12"
NOISE = os.open("/dev/urandom", os.O_RDONLY)
PATIENT = dict(progress_s=120.0, stall_s=60.0)


def fetch_state(origins, *arguments, **more):
    return fetching.fetch_state(lambda: origins, *arguments, **more)


class Peers:
    """Peers that serve one state: a common file, and a file of their own."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self.directory, self.stack = directory, stack
        self.checkpoints, self.servers = {}, {}

    def add(self, name, *, trust=TRUST, shelf=None, **made):
        number = len(self.checkpoints)
        self.checkpoints[name] = make_checkpoint(self.directory / name, own=number, **made)
        self.servers[name] = StateServer("127.0.0.1:0", trust, shelf or ServedStates())
        self.stack.callback(self.servers[name].close)
        self.servers[name].offer(self.checkpoints[name], round=3, digest=DIGEST)
        return self.origin(name)

    def origin(self, name):
        return PeerSource(peer=name, url=self.servers[name].urls[0])


@pytest.fixture
def peers(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Peers(tmp_path / "peers", stack)


def fetched_whole(fetched, peers):
    assert verify(fetched.directory) == []
    assert files_of(fetched.directory) == files_of(peers.checkpoints[fetched.leader.peer])


def test_a_state_comes_from_several_peers_and_is_a_whole_checkpoint(peers, tmp_path):
    origins = [peers.add(name) for name in "abc"]
    seen = []
    fetched = fetch_state(
        origins, DIGEST, tmp_path / "here", TRUST, progress=lambda *count: seen.append(count), **PATIENT
    )
    fetched_whole(fetched, peers)
    assert fetched.directory.name == "step-000012.i003"
    assert not list((tmp_path / "here").glob(f"*{PARTIAL}"))
    assert seen == sorted(seen) and {total for _, total in seen} == {fetched.bytes}


class Breaking(ServedStates):
    """A shelf whose files break when so much has been read of them: what follows, `breaks` decides."""

    def __init__(self, *, after, breaks):
        super().__init__()
        self.left, self.breaks = after, breaks
        self.broke = threading.Event()

    @contextlib.contextmanager
    def reading(self, digest, file):
        with super().reading(digest, file) as found:
            if found is not None and file.endswith(".safetensors"):
                self.left -= 1
                if self.left < 0:
                    self.broke.set()
                    found = self.breaks(found)
            yield found


def garbage(found):
    return OpenFile(descriptor=NOISE, bytes=found.bytes)


def hang_up(found):
    raise ConnectionError("broken off")


@pytest.mark.parametrize(
    "breaks", [garbage, hang_up, lambda found: None], ids=["garbage", "hangs up", "gone"]
)
@pytest.mark.parametrize("after", [0, 1])
def test_a_source_that_breaks_is_dropped_and_the_rest_goes_on(peers, tmp_path, breaks, after, caplog):
    shelf = Breaking(after=after, breaks=breaks)
    bad = peers.add("bad", shelf=shelf)
    good = [peers.add(name) for name in "bc"]
    fetched = fetch_state([bad, *good], DIGEST, tmp_path / "here", TRUST, **PATIENT)
    fetched_whole(fetched, peers)
    # Where it led, its own file was missing: another one leads.
    assert fetched.leader.peer in "bc" if shelf.broke.is_set() else True


def test_a_source_that_does_not_answer_holds_nobody_up(peers, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        origins = [
            PeerSource(peer="silent", url=f"http://127.0.0.1:{silent.getsockname()[1]}"),
            PeerSource(peer="absent", url="http://127.0.0.1:9"),
            peers.add("a"),
        ]
        fetched_whole(fetch_state(origins, DIGEST, tmp_path / "here", TRUST, **PATIENT), peers)


class Late(Breaking):
    """A source that introduces itself when another one leads already; what of its files is slow, it holds."""

    def __init__(self, *, leads, slow):
        super().__init__(after=10**6, breaks=None)
        self.leads, self.slow, self.released = leads, slow, threading.Event()

    def about(self, digest):
        self.leads.wait(120.0)
        return super().about(digest)

    @contextlib.contextmanager
    def reading(self, digest, file):
        if file == INDEX:
            self.indexed.set()
        if self.slow in file and file.endswith(".safetensors"):
            self.released.wait(120.0)
        with super().reading(digest, file) as found:
            yield found


def late_pair(peers, *, slow):
    """A leader that is quick but with files that have `slow` in their names, and one that comes later."""
    nobody = threading.Event()
    nobody.set()
    first = Late(leads=nobody, slow=slow)
    first.indexed = threading.Event()
    second = Late(leads=first.indexed, slow="nothing")
    second.indexed = threading.Event()
    return first, [peers.add("a", shelf=first), peers.add("b", shelf=second)]


def test_a_leader_that_is_slow_is_overtaken_where_others_have_the_same(peers, tmp_path):
    shelf, origins = late_pair(peers, slow="model")
    try:
        fetched = fetch_state(
            origins,
            DIGEST,
            tmp_path / "here",
            TRUST,
            stall_s=3.0,
            progress_s=120.0,
            leader_s=120.0,
            streams=1,
        )
    finally:
        shelf.released.set()
    fetched_whole(fetched, peers)


def test_a_leader_that_gives_nothing_of_its_own_leads_no_longer(peers, tmp_path):
    shelf, origins = late_pair(peers, slow="optim")
    try:
        fetched = fetch_state(origins, DIGEST, tmp_path / "here", TRUST, leader_s=0.5, **PATIENT)
    finally:
        shelf.released.set()
    fetched_whole(fetched, peers)
    assert fetched.leader.peer == "b"


def test_nobody_left_is_told_with_each_reason_and_what_is_here_is_kept(peers, tmp_path):
    shelf = Breaking(after=2, breaks=garbage)
    bad = peers.add("bad", shelf=shelf)
    with pytest.raises(PeerError, match=r"bad: its block at byte .* has another hash"):
        fetch_state([bad], DIGEST, tmp_path / "here", TRUST, streams=1, **PATIENT)
    (partial,) = (tmp_path / "here").glob(f"*{PARTIAL}")
    shelf.left = 10**6
    seen = []
    fetched = fetch_state(
        [bad], DIGEST, tmp_path / "here", TRUST, progress=lambda *count: seen.append(count), **PATIENT
    )
    fetched_whole(fetched, peers)
    assert seen[0][0] >= 5 * MIB and not partial.exists()


def test_a_fetch_that_was_killed_goes_on_from_what_is_here(peers, tmp_path):
    release = threading.Event()

    def hold(found):
        release.wait(120.0)
        return found

    shelf = Breaking(after=3, breaks=hold)
    origin = peers.add("a", shelf=shelf, size=12 * MIB)
    code = (
        "import sys, pathlib; from bloomery.state_transfer.client import fetch_state;"
        "from bloomery.state_transfer.source import PeerSource; from bloomery.transport.trust import Trust;"
        "fetch_state(lambda: [PeerSource(peer='a', url=sys.argv[1])], 'ab12', pathlib.Path(sys.argv[2]),"
        " Trust(token=b'a secret of the run'), streams=1)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, origin.url, str(tmp_path / "here")])
    try:
        assert shelf.broke.wait(120.0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        shelf.left = 10**6
        release.set()
    seen = []
    fetched = fetch_state(
        [origin], DIGEST, tmp_path / "here", TRUST, progress=lambda *count: seen.append(count), **PATIENT
    )
    fetched_whole(fetched, peers)
    assert seen[0][0] >= 12 * MIB  # three runs of four blocks


def test_a_source_that_gives_nothing_for_too_long_ends_the_fetch(peers, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        origin = PeerSource(peer="silent", url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(PeerError, match=r"silent"):
            fetch_state([origin], DIGEST, tmp_path / "here", TRUST, progress_s=0.5, stall_s=60.0)


def test_a_fetch_can_be_given_up(peers, tmp_path):
    with pytest.raises(PeerError, match="given up"):
        fetch_state([peers.add("a")], DIGEST, tmp_path / "here", TRUST, cancelled=lambda: True, **PATIENT)


def test_a_source_that_comes_later_is_asked_too_and_older_states_go(peers, tmp_path):
    commit = example.commit(
        round=3, epoch=4, members=(), digest=DIGEST, position=Position(), sources=("a",), why="the beginning"
    )
    (tmp_path / "old").mkdir()
    asked = []

    def sources():
        asked.append(1)
        return [peers.origin("a")] if len(asked) > 3 else []

    peers.add("a")
    with pytest.raises(PeerError, match="there is no source"):
        StateFetcher(tmp_path, TRUST)(commit, sources, cancelled=lambda: False)
    asked += [1, 1, 1]
    fetched = StateFetcher(tmp_path, TRUST)(commit, sources, cancelled=lambda: False)
    assert verify(fetched.directory) == [] and not (tmp_path / "old").exists()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000000\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b'HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n{"name": "../../x" }',
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
        b"\x00" * 100,
        b"",
    ],
    ids=["huge", "negative", "nameless", "path", "elsewhere", "chunked", "zeros", "nothing"],
)
def test_a_source_that_answers_garbage_is_dropped(peers, tmp_path, answer):
    with answering(answer) as url:
        origins = [PeerSource(peer="bad", url=url)]
        with pytest.raises(PeerError, match="bad: "):
            fetch_state(origins, DIGEST, tmp_path / "here", TRUST, **PATIENT)
        origins.append(peers.add("a"))
        fetched_whole(fetch_state(origins, DIGEST, tmp_path / "here", TRUST, **PATIENT), peers)


def test_a_state_that_would_not_fit_is_not_begun(peers, tmp_path, monkeypatch):
    origin = peers.add("a")
    monkeypatch.setattr(fetching, "free_bytes", lambda path: 1000)
    with pytest.raises(PeerError, match="which are not free"):
        fetch_state([origin], DIGEST, tmp_path / "here", TRUST, **PATIENT)


def test_of_a_state_that_was_fetched_in_part_only_the_rest_must_fit(peers, tmp_path, monkeypatch):
    shelf = Breaking(after=2, breaks=garbage)
    breaking = peers.add("a", shelf=shelf, size=12 * MIB)
    with pytest.raises(PeerError, match="nobody gives"):
        fetch_state([breaking], DIGEST, tmp_path / "here", TRUST, streams=1, **PATIENT)
    shelf.left = 10**6
    monkeypatch.setattr(fetching, "free_bytes", lambda path: 20 * MIB)  # of 24
    fetched_whole(fetch_state([breaking], DIGEST, tmp_path / "here", TRUST, **PATIENT), peers)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "ftp://127.0.0.1:1", "http://a/b", "http://a:1/x", ""])
def test_an_address_that_is_none_is_dropped(tmp_path, url):
    with pytest.raises(PeerError, match="bad"):
        fetch_state([PeerSource(peer="bad", url=url)], DIGEST, tmp_path / "here", TRUST, **PATIENT)


def test_with_certificates_only_the_peer_that_was_asked_for_is_believed(peers, tmp_path):
    init_certificates(tmp_path, run="one", peers=["a", "b", "c"])
    init_certificates(tmp_path, run="two", peers=["a"])
    trusts = {
        name: trust_certificates(authority=bundle.authority, certificate=bundle.certificate, key=bundle.key)
        for name in ("one/a", "one/b", "one/c", "two/a")
        for bundle in [read_bundle(tmp_path / name)]
    }
    a = peers.add("a", trust=trusts["one/a"])
    b = peers.add("b", trust=trusts["one/b"])
    mine = trusts["one/c"]
    fetched_whole(fetch_state([a, b], DIGEST, tmp_path / "here", mine, **PATIENT), peers)
    with pytest.raises(PeerError, match=r"'a' shows a certificate of"):
        fetch_state([PeerSource(peer="a", url=b.url)], DIGEST, tmp_path / "other", mine, **PATIENT)
    with pytest.raises(PeerError, match="a: "):  # a stranger
        fetch_state([a], DIGEST, tmp_path / "other", trusts["two/a"], **PATIENT)


@contextlib.contextmanager
def answering(answer):
    """A server that answers this to everything."""
    ended = threading.Event()

    def serve():
        listener.settimeout(0.1)
        while not ended.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(10.0)
                    connection.recv(65536)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


def test_runs_become_shorter_towards_the_end_and_a_run_that_came_is_no_longer_fetched():
    whole = [BlockRun(file="f", begin=begin * MIB, end=(begin + 4) * MIB) for begin in range(0, 32, 4)]
    missing = MissingBlocks(whole)
    taken = [missing.take(["f"], timeout_s=0.0) for _ in range(22)]
    lengths = [(run.end - run.begin) // MIB for run in taken]
    assert lengths[:4] == [4, 4, 4, 2] and lengths[-4:] == [1] * 4
    assert lengths == sorted(lengths, reverse=True) and sum(lengths) == 32
    assert [run.begin for run in taken] == sorted(run.begin for run in taken)
    again = missing.take(["f"], timeout_s=0.0)  # nothing waits, so the first is fetched twice
    assert again == taken[0] and missing.is_missing(again)
    assert missing.done(taken[0]) and not missing.is_missing(again)
    for run in taken[1:]:
        missing.give_back(run)
    assert sum(run.end - run.begin for run in taken[1:]) == 28 * MIB
    back = []
    while not missing.is_over:
        back.append(missing.take(["f"], timeout_s=0.0))
        missing.done(back[-1])
    assert sum(run.end - run.begin for run in back) == 28 * MIB


def test_the_first_threads_to_come_leave_as_much_to_those_that_will_come():
    missing = MissingBlocks([BlockRun(file="f", begin=0, end=16 * MIB)], unit=MIB // 4, streams=6)
    taken = [missing.take(["f"], timeout_s=0.0) for _ in range(6)]
    lengths = [run.end - run.begin for run in taken]
    assert lengths[0] <= 16 * MIB // 12 and lengths == sorted(lengths, reverse=True)
    assert max(lengths) <= 2 * min(lengths)


def test_bytes_that_another_source_sent_meanwhile_are_not_fetched_to_their_end(peers, tmp_path):
    origin = peers.add("a")
    file = next(path for path in peers.checkpoints["a"].iterdir() if path.suffix == ".safetensors")
    state = ServedState(origin, DIGEST, TRUST)
    view = memoryview(bytearray(file.stat().st_size))
    answers = iter([True, False])
    until = time.monotonic() + 60.0
    assert not state.fetch_range(file.name, view, begin=0, until=until, is_wanted=lambda: next(answers))
    content = file.read_bytes()
    assert (
        0 < next(n for n in range(0, len(view), 4096) if view[n : n + 64] != content[n : n + 64]) < len(view)
    )
    assert state.fetch_range(file.name, view, begin=0, until=until) and view == content
    state.close()
