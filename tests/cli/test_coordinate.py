"""`bloomery coordinate`, as a person uses it: real processes, a real etcd."""

import json
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from tests.protocol import example

from bloomery.agent.assemble import access_of, assemble_agent
from bloomery.cli import coordinate, main
from bloomery.cli.coordinate_status import _content, _print
from bloomery.config.load import load_recipe
from bloomery.coordination.accounts import root_access
from bloomery.coordination.etcd import Etcd
from bloomery.coordination.etcd_process import free_ports, start_single
from bloomery.coordination.snapshot import RunSnapshot
from bloomery.data.position import Position
from bloomery.errors import PeerError
from bloomery.events.run_directory import RunDirectory
from bloomery.protocol.encoding import encode_text
from bloomery.protocol.keys import Keys

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = start_single(tmp_path_factory.mktemp("etcd"))
    yield server
    server.stop()


def start(*arguments, cwd):
    """A coordinator's process, and the endpoint it says it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bloomery", "coordinate", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    for line in process.stdout:
        said.append(line)
        if found := re.search(r"elastic\.coordinator=(\S+)", line):
            return process, found[1]
    raise AssertionError("".join(said))


def end(process):
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait(WITHIN_S) == 0, rest
    assert rest.endswith("stopped\n")


def member(name, **changed):
    usual = dict(
        peer=name,
        incarnation="1",
        addresses=("127.0.0.1:1",),
        serves=(),
        round=-1,
        digest="",
        ranks=1,
        recipe="r",
        samples=4,
    )
    return encode_text(example.member(**usual | changed))


def test_a_coordinator_is_started_stopped_and_knows_what_it_knew(tmp_path):
    keys = Keys("run")
    process, endpoint = start("--listen", "127.0.0.1:0", cwd=tmp_path)
    with Etcd([endpoint], deadline_s=WITHIN_S) as etcd:
        etcd.put(keys.epoch, "7")
    end(process)
    port = endpoint.rpartition(":")[2]
    process, again = start("--listen", f"127.0.0.1:{port}", cwd=tmp_path)
    with Etcd([endpoint], deadline_s=WITHIN_S) as etcd:
        assert again == endpoint and etcd.get(keys.epoch).value == "7"
    second = subprocess.run(
        [sys.executable, "-m", "bloomery", "coordinate", "--listen", f"127.0.0.1:{port}", "--data", "other"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert second.returncode == 1 and "is in use" in second.stderr and "Traceback" not in second.stderr
    end(process)


def test_an_etcd_that_outlives_its_coordinator_is_taken_over_by_the_next_one(tmp_path):
    process, endpoint = start("--listen", "127.0.0.1:0", cwd=tmp_path)
    record = tmp_path / "coordinator" / "process.json"
    left = json.loads(record.read_text())
    port = endpoint.rpartition(":")[2]
    again = [sys.executable, "-m", "bloomery", "coordinate", "--listen", f"127.0.0.1:{port}"]
    second = subprocess.run(again, cwd=tmp_path, capture_output=True, text=True)
    assert second.returncode == 1 and f"process {process.pid}) serves" in second.stderr
    process.kill()
    process.wait(WITHIN_S)
    with Etcd([endpoint], deadline_s=WITHIN_S) as etcd:
        etcd.put("while nobody attends", "7")
        process, found = start("--listen", f"127.0.0.1:{port}", cwd=tmp_path)
        assert found == endpoint and json.loads(record.read_text()) == left
        assert etcd.get("while nobody attends").value == "7"
        process.kill()
        process.wait(WITHIN_S)
        process, elsewhere = start("--listen", f"127.0.0.1:{free_ports(1)[0]}", cwd=tmp_path)
    assert elsewhere != endpoint and json.loads(record.read_text())["process"] != left["process"]
    with Etcd([elsewhere], deadline_s=WITHIN_S) as etcd:
        assert etcd.get("while nobody attends").value == "7"
    end(process)


def test_certificates_are_made_and_only_their_peers_come_in(tmp_path, capsys):
    made = ["coordinate", "--init-certs", str(tmp_path / "certs"), "--run", "night", "--peers", "oslo,lyon"]
    assert main(made) == 0
    assert "certs/night/oslo" in capsys.readouterr().out
    process, endpoint = start("--listen", "0.0.0.0:0", "--certificates", "certs", cwd=tmp_path)
    common = ["coordinate", "--endpoints", endpoint, "--status", "night"]
    assert main([*common, "--certificates", str(tmp_path / "certs" / "night" / "lyon"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["members"] == []
    assert main([*common[:-1], "day", "--certificates", str(tmp_path / "certs" / "night" / "lyon")]) == 1
    assert "permission denied" in capsys.readouterr().err
    assert main(common) == 1
    assert "requires certificates" in capsys.readouterr().err
    assert main([*made[:-1], "bern"]) == 0
    certificates = ["--certificates", str(tmp_path / "certs")]
    assert main(["coordinate", "--grant", "--endpoints", endpoint, *certificates]) == 0
    assert "3 peers may connect" in capsys.readouterr().out
    assert main([*common, "--certificates", str(tmp_path / "certs" / "night" / "bern")]) == 0
    end(process)


def test_a_coordinator_that_lost_its_data_still_knows_who_was_revoked(tmp_path, capsys):
    certificates = ["--certificates", str(tmp_path / "certs")]
    made = ["coordinate", "--init-certs", str(tmp_path / "certs"), "--run", "night", "--peers", "oslo,lyon"]
    assert main(made) == 0
    process, endpoint = start("--listen", "127.0.0.1:0", "--certificates", "certs", cwd=tmp_path)
    revoke = ["coordinate", "--revoke", "oslo", "--run", "night", "--endpoints", endpoint]
    assert main([*revoke, *certificates]) == 0
    assert "revoked  oslo of night" in capsys.readouterr().out
    end(process)
    options = ("--listen", "127.0.0.1:0", "--certificates", "certs", "--data", "empty")
    process, endpoint = start(*options, cwd=tmp_path)
    with Etcd([endpoint], root_access(tmp_path / "certs"), deadline_s=WITHIN_S) as etcd:
        revoked = etcd.list(Keys("night").revoked("")).items
    end(process)
    assert len(revoked) == 1


@pytest.mark.parametrize(("listen", "told"), [("0.0.0.0:0", ()), ("127.0.0.1:0", ("127.0.0.1:0",))])
def test_a_peer_beside_the_coordinator_tells_loopback_to_nobody_where_other_machines_may_connect(
    listen, told, tmp_path
):
    made = ["coordinate", "--init-certs", str(tmp_path / "certs"), "--run", "night", "--peers", "oslo,lyon"]
    assert main(made) == 0
    process, endpoint = start("--listen", listen, "--certificates", "certs", cwd=tmp_path)
    bundle = f"elastic.certificates={tmp_path / 'certs' / 'night' / 'oslo'}"
    settings = ("run.name=night", "elastic.inner_steps=5", f"elastic.coordinator={endpoint}", bundle)
    for relays in (False, True):
        more = (*settings, f"elastic.relay={str(relays).lower()}")
        loaded = load_recipe("demo", more)
        access = access_of(loaded.recipe, loaded.sources, {})
        assert access.listen == ("127.0.0.1:0",)
        with access.etcd() as etcd:
            seen = access.without_unreachable_addresses(etcd)
            assert (seen.listen, seen.trust(etcd).dials_loopback) == (told, bool(told))
        with ExitStack() as stack:
            rundir = RunDirectory(tmp_path / f"run-{relays}")
            if relays and not told:
                with pytest.raises(PeerError, match="this one only dials"):
                    assemble_agent(loaded.recipe, access, rundir, stack)
            else:
                assemble_agent(loaded.recipe, access, rundir, stack)
    end(process)


def test_an_unknown_run_and_a_coordinator_that_is_not_there_are_told(server, capsys):
    assert main(["coordinate", "--status", "nobody", "--endpoints", server.endpoint]) == 0
    assert capsys.readouterr().out.startswith("run nobody: not known here")
    with socket.socket() as held:  # a port that nobody listens at
        held.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
        assert main(["coordinate", "--status", "nobody", "--endpoints", endpoint]) == 1
    assert "the connection was refused" in capsys.readouterr().err


def test_a_run_that_its_coordinator_forgot_is_shown_with_the_peers_that_know_more(capsys):
    _print(_content("night", RunSnapshot(forgotten=True, peers_ahead=("oslo",))))
    assert "told by oslo" in capsys.readouterr().out


def test_a_coordinator_keeps_the_log_of_its_etcd_short_while_it_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinate.etcd_log, "BYTES_AT_MOST", 3)
    (tmp_path / "etcd.log").write_text("long")
    signals = []

    def wait(*, timeout):
        signals.append(15)
        raise subprocess.TimeoutExpired("etcd", timeout)

    server = SimpleNamespace(process=SimpleNamespace(wait=wait))
    assert coordinate._wait(server, tmp_path, signals) == 0
    assert (tmp_path / "etcd.log").read_text() == "" and (tmp_path / "etcd.log.1").read_text() == "long"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_coordinator_is_asked_to_stop_by_a_person_or_by_a_service_manager(number):
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(number, lambda *given: None)
    try:
        received = coordinate._handle_stop_signals()
        assert received == []
        signal.raise_signal(number)
        assert received == [number]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_a_run_is_shown_as_it_is(server, capsys):
    keys = Keys("shown")
    with Etcd([server.endpoint], deadline_s=WITHIN_S) as etcd:
        etcd.put(keys.member("a"), member("a", round=4, digest="f" * 64))
        etcd.put(keys.member("b"), member("b"))
        commit = example.commit(
            round=4,
            epoch=9,
            members=("a",),
            digest="f" * 64,
            position=Position(consumed=12_345),
            sources=("a",),
            left_out={"b": "it was late"},
        )
        etcd.put(keys.commit(4), encode_text(commit))
        etcd.put(keys.epoch, "9")
    assert main(["coordinate", "--status", "shown", "--endpoints", server.endpoint]) == 0
    shown = capsys.readouterr().out
    assert "round 5 is under way, epoch 9" in shown and "12,345 samples, a" in shown
    assert re.search(r"^a +round 4 +ffffffffffff", shown, re.MULTILINE)
    assert re.search(r"^b +nothing +- ", shown, re.MULTILINE) and "it was late" in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--listen", "0.0.0.0:2379"], "anybody could control"),
        (["--init-certs", "x"], "needs the run and its peers"),
        (["--run", "n"], "--run goes with --init-certs or --revoke"),
        (["--init-certs", "x", "--run", "n", "--peers", " ,"], "needs the run and its peers"),
        (["--init-certs", "x", "--run", "a/b", "--peers", "c,d e"], "2 mistakes"),
        (["--status", "a b"], "is no name"),
        (["--grant"], "needs --certificates"),
        (["--certificates", "/nonexistent"], "has no server.pem"),
        (["--listen", "here"], "is not an address"),
        (["--adopt", "nobody"], "no peer of the run"),
    ],
)
def test_what_cannot_be_is_one_message_with_a_remedy(server, monkeypatch, capsys, arguments, said):
    monkeypatch.setenv("BLOOMERY_COORDINATOR", server.endpoint)
    assert main(["coordinate", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and len(error.splitlines()) >= 2
