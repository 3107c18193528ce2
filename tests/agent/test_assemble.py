"""What the agent of a recipe is made of, and where a peer that starts finds its run."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tests.agent.test_access import access

from bloomery.agent import assemble, state_serving
from bloomery.agent.agent_lock import only_agent
from bloomery.agent.assemble import PeerAccess, RoundJournal, assemble_agent, codec_warning, round_settings
from bloomery.agent.state_serving import PeerStateServer
from bloomery.config.elastic import ElasticSection
from bloomery.config.load import load_recipe
from bloomery.config.peer_settings import equal_settings
from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.credentials import Bundle, CoordinatorAccount
from bloomery.coordination.etcd import Etcd
from bloomery.errors import CoordinatorAway, PeerError, RunBusy
from bloomery.events.run_directory import RunDirectory
from bloomery.protocol.keys import Keys
from bloomery.transport.handshake import OwnIdentity

BUNDLE = Bundle(
    directory=Path("/bundle"), account=CoordinatorAccount(run="demo", peer="a", user="u", password="p")
)


class Made:
    """Notes with what each part of an agent is made, and in which order parts are closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.closed: list[str] = []
        self.etcd: Any = self._context("etcd")
        self.trust: Any = SimpleNamespace(token=b"secret", load_certificate="loads for peers")
        self.etcd.load_certificate = "loads for the coordinator"
        for name in (
            "ConnectionManager",
            "PeerStateServer",
            "CertificateWatch",
            "KnownCommits",
            "Journal",
            "StateFetcher",
            "AverageFetcher",
            "KeptAverages",
            "BackupChoice",
            "RateLimiter",
            "Agent",
        ):
            monkeypatch.setattr(assemble, name, self._maker(name))
        monkeypatch.setattr(PeerAccess, "etcd", lambda access: self.etcd)
        monkeypatch.setattr(PeerAccess, "trust", lambda access, etcd: self.trust)
        self.answered: list[Any] = []
        monkeypatch.setattr(PeerAccess, "answered", lambda access, etcd: self.answered.append(etcd))

    def agent(self, access: PeerAccess, rundir: RunDirectory, *overrides: str) -> dict[str, Any]:
        """With what the agent is made of this recipe."""
        recipe = load_recipe("demo", ("elastic.inner_steps=50", *overrides)).recipe
        self.closed.clear()
        with ExitStack() as stack:
            assemble_agent(recipe, access, rundir, stack)
            assert self.closed == []
        return self.parts["Agent"][1]

    def _maker(self, name: str) -> Any:
        def make(*arguments: Any, **named: Any) -> Any:
            self.parts[name] = (arguments, named)
            return self._context(name)

        return make

    def _context(self, name: str) -> Any:
        class Part:
            part = name

            def __enter__(part) -> Part:
                return part

            def __exit__(part, *error: object) -> None:
                self.closed.append(name)

            def close(part) -> None:
                self.closed.append(name)

        return Part()


@pytest.fixture
def made(monkeypatch) -> Made:
    return Made(monkeypatch)


def test_a_second_agent_touches_nothing_of_what_the_first_keeps_in_the_run_directory(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "only_agent", partial(only_agent, wait_s=0.0))
    rundir = RunDirectory(tmp_path / "run")
    with only_agent(rundir), pytest.raises(RunBusy):
        made.agent(access("elastic.peer=a"), rundir)
    assert not {"KeptAverages", "KnownCommits", "Journal", "Agent"} & set(made.parts)


def test_an_agent_is_made_of_its_recipe_and_its_parts_are_closed_from_the_last_to_the_first(
    made: Made, tmp_path: Path
) -> None:
    rundir, found = RunDirectory(tmp_path / "run"), access("elastic.peer=a")
    named = made.agent(
        found, rundir, "elastic.streams=5", "elastic.bandwidth_limit_mbit_s=80", "elastic.relay=true"
    )
    assert made.answered == [made.etcd]
    identity, trust = made.parts["ConnectionManager"][0]
    (settings,) = made.parts["Agent"][0]
    assert identity == OwnIdentity(run="demo", peer="a", incarnation=settings.incarnation, encrypt=False)
    assert trust is made.trust and len(bytes.fromhex(settings.incarnation)) == 8
    limits = found.timeouts
    dialled = dict(made.parts["ConnectionManager"][1])
    relays, limiter = dialled.pop("relays"), dialled.pop("rate_limiter")
    assert dialled == {
        "listen": found.listen,
        "advertise": found.advertise,
        "is_relay": True,
        "turns": limits.dialing,
        "patience": limits.tcp,
        "handshake_s": limits.handshake_s,
    }
    named["relays"].append("a relay")
    assert relays() == ("a relay",)
    assert made.parts["RateLimiter"] == ((10e6,), {})  # 80 megabits a second
    serving, named_serving = made.parts["PeerStateServer"]
    assert serving[:2] == (found, made.trust) and named_serving == {"rate_limiter": limiter}
    recipe = load_recipe("demo", ("elastic.inner_steps=50", "elastic.streams=5")).recipe
    assert (settings.run, settings.peer, settings.streams, settings.token) == ("demo", "a", 5, "secret")
    assert (settings.relays, settings.overlaps, settings.timeouts) == (True, False, limits)
    assert settings.rounds == round_settings(recipe)
    assert settings.settings == {**equal_settings(recipe), assemble.PROTOCOL: assemble.PROTOCOL_VERSION}
    assert made.parts["KnownCommits"] == ((rundir.known,), {"run": "demo", "peer": "a"})
    assert made.parts["Journal"] == ((rundir.rounds,), {})
    assert made.parts["StateFetcher"] == ((rundir.path / "fetched", made.trust), {})
    assert made.parts["AverageFetcher"] == ((rundir.path / "missed", made.trust), {})
    kept, named_kept = made.parts["KeptAverages"]
    assert (kept[0], kept[1]) == (rundir.path / "averages", serving[2])
    assert kept[2].part == "AverageFetcher" and named_kept == {"at_most": 4}
    assert named["etcd"] is made.etcd and named["backups"] is None
    assert {name: named[name].part for name in ("connection_manager", "server", "fetch", "knowledge")} == {
        "connection_manager": "ConnectionManager",
        "server": "PeerStateServer",
        "fetch": "StateFetcher",
        "knowledge": "KnownCommits",
    }
    assert named["averages"].part == "KeptAverages" and isinstance(named["events"], RoundJournal)
    assert made.closed == ["Journal", "KnownCommits", "PeerStateServer", "ConnectionManager", "etcd"]


def test_backups_gradients_overlap_and_encryption_are_the_recipes(made: Made, tmp_path: Path) -> None:
    rundir, found = RunDirectory(tmp_path / "run"), access("elastic.peer=a")
    made.agent(
        replace(found, bundle=BUNDLE, is_on_one_machine=False),
        rundir,
        "elastic.encrypt=tls",
        "elastic.overlap_steps=1",
        f"backup.url=file://{tmp_path}/backup",
    )
    assert made.parts["ConnectionManager"][0][0].encrypt
    assert made.parts["Agent"][0][0].overlaps
    assert made.parts["BackupChoice"] == ((rundir,), {"me": "a"})
    loads = (made.trust.load_certificate, made.etcd.load_certificate)
    assert made.parts["CertificateWatch"] == ((BUNDLE.certificate, BUNDLE.key, loads), {})
    assert made.closed[:4] == ["Journal", "KnownCommits", "PeerStateServer", "CertificateWatch"]
    made.agent(found, rundir, "elastic.average=gradients", "elastic.inner_steps=1")
    assert made.parts["KeptAverages"][1] == {"at_most": 0}


def test_a_relay_that_turns_out_to_be_out_of_reach_is_refused(made: Made, tmp_path: Path) -> None:
    made.etcd.client_urls = lambda: ("https://10.0.0.1:2379",)
    found = replace(access("elastic.peer=a"), bundle=BUNDLE)
    with pytest.raises(PeerError, match="this one only dials"):
        made.agent(found, RunDirectory(tmp_path / "run"), "elastic.relay=true")


def test_an_agent_listens_and_serves_states_only_where_others_can_dial_it(made: Made, tmp_path: Path) -> None:
    made.etcd.client_urls = lambda: ("https://10.0.0.1:2379",)
    both = ("127.0.0.1:1", "10.0.0.2:1")
    found = replace(access("elastic.peer=a"), bundle=BUNDLE, listen=both, advertise=both)
    made.agent(found, RunDirectory(tmp_path / "run"))
    dialled, (serving, *_) = made.parts["ConnectionManager"][1], made.parts["PeerStateServer"][0]
    assert dialled["listen"] == dialled["advertise"] == serving.listen == serving.advertise == both[1:]


def test_each_event_of_a_round_names_its_peer() -> None:
    written: list[Any] = []
    journal: Any = SimpleNamespace(write=lambda event, **fields: written.append((event, fields)))
    RoundJournal(journal, "a").write("go", round=4, newcomer=True)
    assert written == [("go", dict(incarnation=0, step=0, peer="a", round=4, newcomer=True))]


def test_the_client_of_a_peer_has_its_endpoints_its_credentials_and_its_deadline(monkeypatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        assemble,
        "Etcd",
        lambda endpoints, access, *, deadline_s: made.append((endpoints, access, deadline_s)),
    )
    found = access("elastic.peer=a")
    found.etcd()
    monkeypatch.setattr(Bundle, "access", lambda bundle: "credentials")
    replace(found, bundle=BUNDLE).etcd()
    assert made == [
        (found.endpoints, None, found.timeouts.coordinator_s),
        (found.endpoints, "credentials", found.timeouts.coordinator_s),
    ]


def test_a_coordinator_is_waited_for_until_the_time_for_that_is_over(monkeypatch, caplog) -> None:
    clock, asked, answers = iter([100.0, 101.0, 109.9, 110.0]), list[str](), list[bool]()
    monkeypatch.setattr(assemble.time, "monotonic", lambda: next(clock))

    def get(key: str) -> None:
        asked.append(key)
        if not answers or not answers.pop():
            raise CoordinatorAway("nobody answers")

    etcd: Any = SimpleNamespace(get=get)
    found = access("elastic.peer=a")
    patient = replace(found, timeouts=replace(found.timeouts, coordinator_start_s=10.0))
    with pytest.raises(CoordinatorAway):
        patient.answered(etcd)
    assert asked == [Keys("demo").epoch] * 3
    assert caplog.messages == [f"nobody answers; waiting {seconds} s more" for seconds in (9, 0)]
    clock, answers = iter([100.0, 101.0]), [True, False]
    patient.answered(etcd)
    assert len(asked) == 5


@pytest.mark.parametrize(
    ("urls", "listen"),
    [
        (("https://127.0.0.1:1", "https://10.0.0.9:1"), ("10.0.0.2:1",)),
        (("https://127.0.0.1:1", "https://[::1]:1"), ("127.0.0.1:1", "10.0.0.2:1")),
    ],
)
def test_loopback_is_told_to_others_only_where_the_coordinator_serves_this_machine_alone(
    urls: tuple[str, ...], listen: tuple[str, ...]
) -> None:
    etcd: Any = SimpleNamespace(client_urls=lambda: urls)
    both = ("127.0.0.1:1", "10.0.0.2:1")
    found = replace(access("elastic.peer=a"), bundle=BUNDLE, listen=both, advertise=both)
    seen = found.without_unreachable_addresses(etcd)
    is_here = len(listen) == 2
    assert (seen.listen, seen.advertise, seen.is_on_one_machine) == (listen, listen, is_here)
    for unasked in (replace(found, bundle=None), replace(found, is_on_one_machine=False)):
        assert unasked.without_unreachable_addresses(Etcd(["http://127.0.0.1:1"])) is unasked


def test_a_peer_is_not_left_with_an_address_that_nobody_can_dial() -> None:
    etcd: Any = SimpleNamespace(client_urls=lambda: ("https://10.0.0.9:1",))
    everywhere = replace(access("elastic.peer=a"), bundle=BUNDLE, listen=("0.0.0.0:1",))
    with pytest.raises(PeerError, match="where it can be dialled"):
        replace(everywhere, advertise=("127.0.0.1:1",)).without_unreachable_addresses(etcd)


def test_a_peer_is_found_by_each_variable_of_the_environment_where_the_recipe_is_silent(
    tmp_path, monkeypatch
) -> None:
    init_certificates(tmp_path, run="demo", peers=["alice"])
    bundle = tmp_path / "demo" / "alice"
    here = {
        "BLOOMERY_CERTIFICATES": str(bundle),
        "BLOOMERY_LISTEN": "10.0.0.2:1, 10.0.0.3:1",
        "BLOOMERY_ADVERTISE": "a.example:2",
    }
    found = access(environment=here)
    assert (found.peer, found.listen, found.advertise) == (
        "alice",
        ("10.0.0.2:1", "10.0.0.3:1"),
        ("a.example:2",),
    )
    assert found.bundle is not None and found.bundle.directory == bundle
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = access(environment={**here, "BLOOMERY_CERTIFICATES": "~/demo/alice"})
    assert at_home.bundle is not None and at_home.bundle.directory == bundle
    assert access("elastic.listen=10.0.0.7:1", environment=here).listen == ("10.0.0.7:1",)
    assert access("elastic.advertise=b.example:3", environment=here).advertise == ("b.example:3",)
    assert access("elastic.coordinator=http://127.0.0.1:9").endpoints == ("http://127.0.0.1:9",)
    alone = access()
    assert (alone.peer, alone.bundle, alone.listen) == (os.uname().nodename, None, ("127.0.0.1:0",))
    assert alone.advertise == () and alone.is_on_one_machine
    with pytest.raises(PeerError, match="is 'bob' of 'demo'"):
        access(environment={**here, "BLOOMERY_PEER": "bob"})


def test_what_is_leased_covers_the_steps_that_overlap() -> None:
    recipe = load_recipe("demo", ("elastic.inner_steps=50", "elastic.overlap_steps=4")).recipe
    rounds = round_settings(recipe)
    assert rounds.inner_steps == recipe.elastic.leased_steps > 50 and rounds.overlap_steps == 4


def test_a_code_that_goes_to_every_peer_is_warned_of_where_int8_sends_less() -> None:
    # 0.0918 bytes of each value to each of 63 others; int8 sends each value twice, but for a 64th.
    assert codec_warning(ElasticSection(codec="sparse", peers=64, density=0.1)) == (
        "sparse among 64 peers sends 2.9 times the bytes of int8: each peer's code goes to every other peer"
    )
    assert codec_warning(ElasticSection(codec="sparse", peers=64)) == ""


class Server:
    """Stands for a server of states at an address; a free port is 5000."""

    made: ClassVar[list[Server]] = []

    def __init__(self, address: str, trust: Any, states: Any, *, rate_limiter: Any) -> None:
        self.asked, self.scheme, self.closed = address, "https", False
        self.address = address.replace(":0", ":5000") or "none"
        self.urls = [f"https://{self.address}"] if address else []
        self.serve = f"serves at {address}"
        Server.made.append(self)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("listen", "advertise", "servers", "urls"),
    [
        ((), ("x:1",), [""], []),
        (("h:7", "i:0"), (), ["h:8", "i:0"], ["https://h:8", "https://i:5000"]),
        (("h:7",), ("x:70", "y:0"), ["h:8"], ["https://x:71", "https://y:8"]),
    ],
    ids=["only dials", "listens", "is dialled elsewhere"],
)
def test_states_are_served_beside_each_port_at_which_a_peer_is_dialled(
    monkeypatch, listen: tuple[str, ...], advertise: tuple[str, ...], servers: list[str], urls: list[str]
) -> None:
    monkeypatch.setattr(state_serving, "StateServer", Server)
    Server.made = []
    states, kept = SimpleNamespace(is_empty=False, keep=lambda digests: kept.append(digests)), list[Any]()
    found: Any = SimpleNamespace(listen=listen, advertise=advertise)
    server = PeerStateServer(found, "trust", states, rate_limiter="limit")  # type: ignore[arg-type]
    assert [one.asked for one in Server.made] == servers and list(server.urls) == urls
    assert server.serve == f"serves at {servers[0]}" and server.is_serving
    states.is_empty = True
    assert not server.is_serving
    server.keep(["d"])
    server.close()
    assert kept == [["d"]] and all(one.closed for one in Server.made)


def test_a_peer_without_certificates_shows_the_token_that_the_coordinator_has_of_its_run(monkeypatch) -> None:
    monkeypatch.setattr(assemble, "run_token", lambda etcd, keys: f"{etcd} {keys.token}")
    etcd: Any = "the token at"
    assert access("elastic.peer=a").trust(etcd).token == f"the token at {Keys('demo').token}".encode()
