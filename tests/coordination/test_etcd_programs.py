"""How an etcd is found, launched, waited for and ended, with programs that stand for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.coordination import etcd_log, etcd_process
from bloomery.coordination.etcd_process import (
    EtcdMember,
    EtcdServer,
    PortTaken,
    ServerCertificates,
    find_etcd,
    free_ports,
    launch,
    start_member,
    start_single,
    version_of,
    wait_until_ready,
)
from bloomery.errors import CoordinatorError
from bloomery.events.run_lock import process_identity


def program(directory: Path, *lines: str) -> Path:
    path = directory / "program"
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def member_in(directory: Path, **changed: Any) -> EtcdMember:
    usual = dict(name="m1", host="127.0.0.1", port=2379, peer_port=2380, data=directory / "data")
    return EtcdMember(**usual | changed)


def test_an_etcd_is_launched_with_its_options_its_log_and_no_settings_of_another(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("ETCD_NAME", "another")
    monkeypatch.setenv("KEPT", "yes")
    member = member_in(tmp_path, host="10.0.0.1")
    member.data.mkdir()
    (member.data / "etcd.log").write_text("of before")
    server = launch(
        member, program=program(tmp_path, 'echo "$ETCD_NAME$KEPT"', 'echo "$@" >&2', "ps -o sid= $$")
    )
    assert server.wait() == 0 and server.member is member
    before, _, now = (member.data / "etcd.log").read_text().partition("\n")
    said, options, session = now.splitlines()
    assert (before, said) == ("of before", "yes")
    assert options.split() == etcd_process._options(member) and int(session) == server.process.pid
    told = json.loads((member.data / "process.json").read_text())
    assert told["process"] == server.process.pid and set(told) == {
        "process",
        "born",
        "host",
        "port",
        "peer_port",
        "certificates",
    }
    assert (told["host"], told["port"], told["peer_port"], told["certificates"]) == (
        "10.0.0.1",
        2379,
        2380,
        None,
    )


def test_a_new_directory_of_data_is_its_owners_alone_and_a_large_log_begins_anew(
    tmp_path, monkeypatch
) -> None:
    files = [tmp_path / name for name in "cka"]
    for file in files:
        file.write_text("x")
    certificates = ServerCertificates(certificate=files[0], key=files[1], authority=files[2])
    member = member_in(tmp_path, certificates=certificates)
    shell = program(tmp_path, "echo more")
    monkeypatch.setattr(etcd_log, "BYTES_AT_MOST", 6)
    first = launch(member, program=shell)
    first.wait()
    assert member.data.stat().st_mode & 0o777 == 0o700
    assert (member.data / "etcd.log").read_text() == "\nmore\n"
    launch(member, program=shell).wait()
    assert (member.data / "etcd.log").read_text() == "\nmore\n" * 2, "it is as large as it may be"
    launch(member, program=shell).wait()
    assert (member.data / "etcd.log").read_text() == "\nmore\n"
    assert (member.data / "etcd.log.1").read_text() == "\nmore\n" * 2
    told = json.loads((member.data / "process.json").read_text())
    assert told["certificates"] == etcd_process._paths(certificates)


def test_a_log_that_grows_long_while_etcd_writes_it_begins_anew(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(etcd_log, "BYTES_AT_MOST", 6)
    path = tmp_path / "etcd.log"
    with path.open("ab", buffering=0) as written:
        for line in (b"1234", b"56", b"789", b"x"):
            written.write(line)
            etcd_log.shorten(path)
        assert (path.read_bytes(), (tmp_path / "etcd.log.1").read_bytes()) == (b"x", b"123456789")
        (tmp_path / "etcd.log.1").unlink()
        (tmp_path / "etcd.log.1").mkdir()  # it cannot be kept
        written.write(b"1234567")
        etcd_log.shorten(path)
    assert path.read_bytes() == b""


class Process:
    """A process that ends when it is told to; status: None while it runs."""

    def __init__(self, *, status: int | None = None, heeds: bool = True) -> None:
        self.pid, self.status, self.heeds = os.getpid(), status, heeds
        self.notes: list[Any] = []

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        self.notes.append(("wait", timeout))
        if self.status is None:
            raise subprocess.TimeoutExpired("etcd", timeout or 0.0)
        return self.status

    def send_signal(self, number: int) -> None:
        self.notes.append(number)
        if self.heeds:
            self.status = 0

    def kill(self) -> None:
        self.notes.append("killed")
        self.status = -9


def server_of(directory: Path, process: Process) -> EtcdServer:
    member = member_in(directory)
    member.data.mkdir(exist_ok=True)
    return EtcdServer(member, process)  # type: ignore[arg-type]


def test_an_etcd_is_asked_to_end_and_killed_where_it_does_not(tmp_path) -> None:
    heeding, stubborn, ended = Process(), Process(heeds=False), Process(status=1)
    server_of(tmp_path, heeding).stop()
    assert heeding.notes == [signal.SIGTERM, ("wait", 15.0)]
    server_of(tmp_path, stubborn).stop(within_s=2.0)
    assert stubborn.notes == [signal.SIGTERM, ("wait", 2.0), "killed", ("wait", None)]
    server_of(tmp_path, ended).stop()
    assert ended.notes == []


class Clock:
    """Passes with each sleep; then: what happens at some of them."""

    def __init__(self) -> None:
        self.now, self.then = 0.0, list[Any]()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.then:
            self.then.pop(0)()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(etcd_process, "time", made)
    return made


READY = "ready to serve client requests"


def test_an_etcd_is_ready_once_its_present_process_says_so(tmp_path, clock: Clock) -> None:
    process = Process()
    server = server_of(tmp_path, process)
    log = server.member.data / "etcd.log"
    log.write_text(f"old\n{READY}\n\nstarting\n")
    clock.then = [lambda: None, lambda: log.write_text(f"{READY}\n\nstarting\n{READY}\n")]
    wait_until_ready(server)
    assert clock.now == pytest.approx(0.04) and process.notes == []


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("bind: address already in use", "127.0.0.1:2379 is in use"),
        ("x\nno such option\n\n", "etcd ended at once: its log is empty"),
        ("x\nno such option\n", "etcd ended at once: no such option"),
        (f"{READY}\nand ended", "etcd ended at once: and ended"),
        ("y" * 500, f"etcd ended at once: {'y' * 400}"),
        (
            '{"msg":"failed","error":"x509: bad","stacktrace":"main.go"}',
            "etcd ended at once: failed: x509: bad",
        ),
        (
            '{"level":"panic","msg":"failed","error":"no db"}\npanic: failed\n\ngoroutine 1 [running]:\nx.go',
            "etcd ended at once: failed: no db",
        ),
        ("panic: oh\n\ngoroutine 1 [running]:\n\tmain.go:75 +0x12b", "etcd ended at once: panic: oh"),
        ('{"msg":"failed"}', 'etcd ended at once: {"msg":"failed"}'),
    ],
)
def test_an_etcd_that_ends_at_once_is_told_with_its_last_line(
    tmp_path, clock, said: str, message: str
) -> None:
    server = server_of(tmp_path, Process(status=1))
    (server.member.data / "etcd.log").write_text(f"before\n\n{said}")
    with pytest.raises(CoordinatorError) as told:
        wait_until_ready(server)
    assert told.value.message == message and isinstance(told.value, PortTaken) is ("in use" in said)


def test_an_etcd_that_never_is_ready_is_ended(tmp_path, clock: Clock) -> None:
    process = Process()
    server = server_of(tmp_path, process)
    (server.member.data / "etcd.log").write_text("\nelecting")
    with pytest.raises(CoordinatorError, match=r"not ready after 3 s: electing"):
        wait_until_ready(server, within_s=3.0)
    assert process.notes[0] == signal.SIGTERM and clock.now == pytest.approx(3.0, abs=0.03)


@pytest.mark.parametrize("place", ["write_record", "wait_until_ready"])
def test_an_etcd_does_not_outlive_a_start_that_was_interrupted(tmp_path, monkeypatch, place: str) -> None:
    started, popen = list[subprocess.Popen[bytes]](), subprocess.Popen

    def interrupted(*asked: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        etcd_process.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0]
    )
    monkeypatch.setattr(etcd_process, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_member(member_in(tmp_path), program=program(tmp_path, "exec sleep 60"))
    assert started[0].poll() in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_single_etcd_is_started_on_another_port_where_one_was_taken_meanwhile(
    tmp_path, monkeypatch
) -> None:
    ports = iter([(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), *[(11, 12)] * 20])
    asked: list[Any] = []
    taken: list[EtcdMember] = []
    left = [1]

    def start(member: EtcdMember, *, program: Path | None) -> str:
        taken.append(member)
        if left[0]:
            left[0] -= 1
            raise PortTaken(member)
        return f"started {program}"

    monkeypatch.setattr(
        etcd_process, "free_ports", lambda count, host: asked.append((count, host)) or next(ports)
    )
    monkeypatch.setattr(etcd_process, "start_member", start)
    assert start_single(tmp_path, program=Path("e")) == "started e"
    common = dict(name="bloomery", data=tmp_path, heartbeat_ms=50, election_ms=500)
    assert taken == [
        EtcdMember(host="127.0.0.1", port=2, peer_port=1, **common),  # type: ignore[arg-type]
        EtcdMember(host="127.0.0.1", port=4, peer_port=3, **common),  # type: ignore[arg-type]
    ]
    assert asked == [(2, "127.0.0.1")] * 2
    with socket.create_server(("127.0.0.1", 0)) as other:
        port, left[0] = other.getsockname()[1], 5
        with pytest.raises(PortTaken, match=f":{port} is in use"):
            start_single(tmp_path, port=port)
        assert left == [4], "it is another's"
    left[0] = 1
    start_single(tmp_path, host="127.0.0.1", port=port)  # the port of its members was taken, not this one
    assert [member.port for member in taken[-2:]] == [port, port]
    left[0] = 99
    with pytest.raises(PortTaken):
        start_single(tmp_path)
    assert left == [79]


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("etcd Version: 3.5.17", (3, 5, 17)),
        ("etcd Version: 3.6.0-rc.1", (3, 6, 0)),
        ("what", None),
        ("", None),
    ],
)
def test_a_program_says_which_etcd_it_is(tmp_path, said: str, version: tuple[int, ...] | None) -> None:
    shell = program(tmp_path, f'[ "$1" = --version ] && printf "{said}\\nGit SHA: 1"' if said else "")
    if version is not None:
        assert version_of(shell) == version
    else:
        with pytest.raises(CoordinatorError, match="does not say which etcd it is"):
            version_of(shell)


def test_a_program_that_never_says_which_etcd_it_is_is_refused(monkeypatch) -> None:
    def run(words: Any, *, timeout: float, **how: Any) -> None:
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(etcd_process.subprocess, "run", run)
    with pytest.raises(CoordinatorError, match=r"does not say which etcd it is: .*timed out after 60"):
        version_of(Path("etcd"))


@pytest.mark.parametrize(
    ("host", "family"), [("::1", socket.AF_INET6), ("127.0.0.1", socket.AF_INET), ("a.b", socket.AF_INET)]
)
def test_a_port_is_tried_with_the_protocol_of_its_address(monkeypatch, host: str, family: int) -> None:
    opened: list[int] = []

    class Probe:
        def __enter__(self) -> Any:
            return SimpleNamespace(bind=lambda address: None, setsockopt=lambda *option: None)

        def __exit__(self, *error: object) -> None:
            pass

    monkeypatch.setattr(etcd_process.socket, "socket", lambda family: opened.append(family) or Probe())
    free_ports(1, host)
    assert not etcd_process._is_taken(host, 1)
    assert opened == [family] * 2


def test_without_any_etcd_the_remedy_says_how_to_get_one(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(etcd_process.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CoordinatorError, match="no etcd on this machine") as told:
        find_etcd()
    assert "bloomery[coordinator]" in told.value.remedy
    nothing = SimpleNamespace(submodule_search_locations=["/nowhere"])
    monkeypatch.setattr(etcd_process.importlib.util, "find_spec", lambda name: nothing)
    with pytest.raises(CoordinatorError):
        find_etcd()


def test_free_ports_are_different_and_lie_below_those_of_outgoing_connections(monkeypatch) -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = free_ports(50)
    assert len(set(ports)) == 50
    assert all(10_000 <= port < (lowest if lowest > 11_000 else 60_000) for port in ports)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(
            etcd_process.random, "SystemRandom", lambda: SimpleNamespace(choice=lambda below: port)
        )
        with pytest.raises(CoordinatorError, match=r"no free port at 127\.0\.0\.1"):
            free_ports(1)


def test_the_record_of_a_process_is_of_its_birth(tmp_path) -> None:
    server = launch(member_in(tmp_path), program=program(tmp_path, "exec sleep 60"))
    try:
        told = json.loads((tmp_path / "data" / "process.json").read_text())
        assert told["born"] == process_identity(server.process.pid)
    finally:
        server.kill()
    assert server.process.poll() == -signal.SIGKILL
