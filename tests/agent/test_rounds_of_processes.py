"""Rounds between real processes: parents, ranks, sockets, etcd; killed, stopped, left, joined.

Three peers train as long as this module is tested; each test hurts them, and leaves them whole.
"""

from __future__ import annotations

import json
import signal

import pytest
from tests.agent.crew import Crew

from bloomery.cli.peer import run as peer_command
from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.etcd_process import start_member, start_single


@pytest.fixture(scope="module")
def three(tmp_path_factory, coordinator):
    with Crew(tmp_path_factory.mktemp("three"), coordinator.endpoint, "three", peers=3) as crew:
        crew.limits = {"answer_s": 5.0}  # a slow disk is not taken for a peer's silence
        crew.step_s = 0.1  # they go on while tests look on: quicker rounds show no more
        for name in "abc":
            crew.start(name)
        yield crew
        crew.stop()


def are_whole(crew: Crew) -> None:
    """All three take part, nothing was lost and nothing counted twice."""
    crew.until_committed("a", "b", "c")
    crew.check_accounts()
    crew.check_digests()


def test_peers_train_to_the_end_and_hold_the_same(crew_of):
    crew = crew_of(peers=2)
    peers = [crew.start("a", samples=200, world=2), crew.start("b", samples=200, world=2, step_s=0.02)]
    assert [peer.wait() for peer in peers] == [0, 0]
    crew.check_accounts()
    crew.check_digests()
    last = crew.rounds()[max(crew.rounds())]
    assert last.position.consumed >= 200 and not last.position.holes
    for peer in peers:
        for rank in (0, 1):  # each has a ring of its own
            (halt,) = peer.notes("halt", rank=rank)
            assert halt["digest"] == last.digest and not halt["failed"]


def test_one_peer_alone_has_rounds_too(crew_of):
    crew = crew_of(peers=1)
    assert crew.start("a", samples=60).wait() == 0
    assert [commit.members for _, commit in sorted(crew.rounds().items())][1:] == [("a",)] * 5
    crew.check_accounts()


def test_a_peer_that_dies_between_rings_is_dropped_and_comes_back_by_starting_again(three):
    are_whole(three)
    dead = three.peers["b"]
    dead.ask("hold")
    three.kill(dead)
    three.until_committed("a", "c")
    assert dead.wait() != 0
    dead.unask("hold")
    three.start("b")
    are_whole(three)


def journalled(peer, round):
    return [event for event in peer.events("round") if event["round"] == round]


def is_tried(peer, epoch):
    return any(note["epoch"] == epoch for note in peer.notes("reduce"))


@pytest.mark.parametrize("whom", ["rank", "all"])
def test_a_peer_that_dies_in_the_ring_costs_no_survivor_its_part(three, whom):
    are_whole(three)
    dead = three.peers["b"]
    dead.ask("stop_in_ring")
    three.until((dead.directory / "in_ring").exists, "b is in the ring")
    epoch = dead.notes("reduce")[-1]["epoch"]
    for name in "ac":
        three.until(lambda name=name: is_tried(three.peers[name], epoch), f"{name} is in the ring")
    three.kill(dead, to=whom)
    three.until_committed("a", "c")
    round = max(note["round"] for note in dead.notes("ready"))
    assert set(three.rounds()[round].members) == {"a", "c"}
    for name in "ac":
        three.until(lambda name=name: journalled(three.peers[name], round), f"{name} writes the round down")
        (event,) = journalled(three.peers[name], round)
        assert set(event["members"]) == {"a", "c"} and event["included"] and event["ring_s"] > 0.0
        mine = [note for note in three.peers[name].notes("ready") if note["round"] == round]
        assert [note["tokens"] for note in mine] == [12]  # offered once, and all of it is in
        tried = [note for note in three.peers[name].notes("reduce") if note["round"] == round]
        assert [set(note["members"]) for note in tried] == [{"a", "b", "c"}, {"a", "c"}]
    for left in ("stop_in_ring", "in_ring"):
        dead.unask(left)
    three.start("b")
    are_whole(three)


def test_a_rank_stopped_in_the_ring_is_left_out_and_comes_back(three):
    are_whole(three)
    stopped = three.peers["b"]
    stopped.ask("stop_in_ring")
    three.until((stopped.directory / "in_ring").exists, "b is in the ring")
    stopped.signal(signal.SIGSTOP)
    for left in ("stop_in_ring", "in_ring"):
        stopped.unask(left)
    three.until_committed("a", "c", more=2)
    stopped.signal(signal.SIGCONT)
    are_whole(three)


def test_a_peer_that_stood_still_loses_its_lease_and_comes_back_with_the_others_state(three):
    are_whole(three)
    still = three.peers["b"]
    replaced = len(still.notes("replace"))
    still.signal(signal.SIGSTOP, to="all")
    three.until_committed("a", "c", more=2)
    still.signal(signal.SIGCONT, to="all")
    are_whole(three)
    assert len(still.notes("replace")) > replaced


def told_of(crew, event, whom):
    return [one for one in crew.peers["b"].events(event) if one["whom"] == whom]


def test_what_is_not_finite_and_what_differs_is_left_out_and_told(three):
    are_whole(three)
    replaced = [len(three.peers[name].notes("replace")) for name in "ac"]
    three.peers["a"].ask("poison")
    three.until(lambda: told_of(three, "left_out", "a"), "a is left out")
    three.until_committed("a", "b", "c")
    three.peers["c"].ask("differ")
    three.until(lambda: told_of(three, "parity", "c"), "c is found to differ")
    are_whole(three)
    for name in "ac":  # each fetched the averages that it missed, and no state
        missed = [note["round"] for note in three.peers[name].notes("catch up")]
        assert missed and missed == [event["round"] for event in three.peers[name].events("caught_up")]
    assert [len(three.peers[name].notes("replace")) for name in "ac"] == replaced


def test_a_newcomer_fetches_the_state_and_leaves_at_once_when_asked(three):
    are_whole(three)
    newcomer = three.start("d", first=7.0)  # its own first weights are others
    three.until_committed("a", "b", "c", "d", more=2)
    assert newcomer.notes("replace")
    newcomer.process.send_signal(signal.SIGTERM)
    assert newcomer.wait() == 0
    assert [event["why"] for event in newcomer.events("leave")] == ["signal 15"]
    are_whole(three)


def test_a_newcomer_refuses_a_state_whose_bytes_are_not_what_its_digest_says_and_names_the_source(three):
    are_whole(three)
    for name in "abc":
        three.peers[name].ask("lie")
    newcomer = three.start("f")
    three.until(lambda: newcomer.events("refused"), "f finds that it was given another state")
    for name in "abc":
        three.peers[name].unask("lie")
    three.until_committed("a", "b", "c", "f")
    assert {one["whom"] for one in newcomer.events("refused")} <= set("abc")
    newcomer.signal(signal.SIGTERM, to="parent")
    assert newcomer.wait() == 0
    are_whole(three)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"settings": {"optim.learning_rate": "0.1"}}, "optim.learning_rate is 0.002 there and 0.1 here"),
        ({"data": "two"}, "the dataset 'x' is one there and two here"),
    ],
    ids=["settings", "data"],
)
def test_a_peer_of_other_settings_or_other_data_is_told_which_and_never_averaged(crew_of, other, told):
    crew, settings = crew_of(), {"run.seed": "1", "optim.learning_rate": "0.002"}
    crew.start("a", settings=settings)
    crew.until_committed("a")
    stranger = crew.start("b", **{**other, "settings": settings | other.get("settings", {})})
    crew.dead.append(stranger)
    assert stranger.wait() != 0
    assert f"'a', who was there before, trains another run: {told}" in stranger.said
    crew.until_committed("a", more=2)
    assert not [commit for commit in crew.rounds().values() if "b" in commit.members]
    crew.stop()


def test_a_newcomer_whose_rank_does_not_take_the_state_is_unlisted_until_it_does(three):
    are_whole(three)
    (three.base / "e").mkdir()
    (three.base / "e" / "hold_replace").touch()
    usual, three.limits = three.limits, three.limits | {"step_s": 3.0}
    newcomer = three.start("e", first=7.0)
    three.limits = usual
    three.until(lambda: newcomer.events("evicted"), "e is unlisted")
    are_whole(three)
    newcomer.unask("hold_replace")
    three.until_committed("a", "b", "c", "e")
    assert newcomer.events("back")
    newcomer.process.send_signal(signal.SIGTERM)
    assert newcomer.wait() == 0
    are_whole(three)


def test_a_newcomer_that_took_longer_than_rounds_makes_up_for_them_by_their_averages(crew_of):
    crew = crew_of(peers=2, grace_s=4.0)  # so long a round waits for who is overtaken, and for who is slow
    slow, other = (crew.start(name, step_s=0.2, world=2) for name in "ab")
    crew.until_committed("a", "b")
    (crew.base / "n").mkdir()
    (crew.base / "n" / "hold_replace").touch()
    newcomer = crew.start("n", first=7.0, world=2)
    crew.until(lambda: newcomer.notes("replace"), "n begins to load a state")
    crew.until_committed("a", "b", more=2)
    slow.ask("hold")
    newcomer.unask("hold_replace")
    newest = max(crew.rounds())
    crew.until(
        lambda: any(note["round"] >= newest for note in newcomer.notes("catch up", rank=1)), "n is caught up"
    )
    slow.unask("hold")
    crew.until_committed("a", "b", "n")
    (loaded,) = newcomer.notes("replace")
    made_up_for = [note["round"] for note in newcomer.notes("catch up")]
    assert made_up_for == list(range(loaded["round"] + 1, made_up_for[-1] + 1)) and len(made_up_for) >= 2
    assert {event["round"] for event in newcomer.events("caught_up")} == set(made_up_for)
    crew.until_committed("a", "b", "n")
    crew.until(lambda: not any((other.directory / "averages").iterdir()), "averages that nobody needs go")
    crew.check_digests()
    crew.check_accounts()


def test_a_newcomer_may_begin_within_a_round(crew_of):
    crew = crew_of(peers=1, join="overlapped")
    first = crew.start("a", step_s=0.05, inner_steps=20)
    crew.until_committed("a")
    newcomer = crew.start("b")
    crew.until_committed("a", "b", more=2)
    assert next(event["newcomer"] for event in newcomer.events("go")) is False
    assert min(note["tokens"] for note in newcomer.notes("ready")) > 0
    assert first.process.poll() is None
    crew.stop()
    crew.check_accounts()
    crew.check_digests()


def test_a_newcomer_that_waits_with_nothing_trains_a_share_where_nobody_else_is_left(crew_of):
    crew = crew_of(peers=1, inner_steps=100_000)
    first = crew.start("a", inner_steps=100_000)  # its round does not end
    crew.until(crew.rounds, "the run has begun")
    newcomer = crew.start("b")
    crew.until(lambda: newcomer.notes("ready"), "b waits for the end of a round that it has no share of")
    assert newcomer.notes("ready")[0]["tokens"] == 0
    crew.kill(first, to="all")
    crew.until_committed("b", more=2)
    assert newcomer.notes("ready")[1]["tokens"] > 0
    crew.stop()
    crew.check_accounts()
    crew.check_digests()


def test_the_slow_are_asked_for_what_they_have_and_not_dropped(crew_of):
    crew = crew_of(peers=2, patience_s=0.2, lease_s=60.0, stall_s=60.0)
    crew.start("a")
    slow = crew.start("b", step_s=0.5, inner_steps=10_000)
    last = crew.until_committed("a", "b", more=3).round
    crew.stop()
    crew.check_accounts()
    members = [set(commit.members) for round, commit in sorted(crew.rounds().items()) if 0 < round <= last]
    together = next(number for number, found in enumerate(members) if "b" in found)
    assert all(found == {"a", "b"} for found in members[together:])
    assert min(note["tokens"] for note in slow.notes("ready")) > 0


def test_peers_with_certificates_encrypt_and_one_of_another_authority_is_not_let_in(crew_of, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for directory in (ours, theirs):
        init_certificates(directory, run="secured", peers=["a", "b", "c"])
    crew = crew_of(peers=2, encrypt="tls", stall_s=1.0)
    for name in "ab":
        crew.start(name, certificates=str(ours / "secured" / name))
    crew.until_committed("a", "b", more=2)
    crew.start("c", certificates=str(theirs / "secured" / "c"))
    crew.until(lambda: "refused a connection" in crew.peers["a"].said + crew.peers["b"].said, "c is refused")
    crew.until_committed("a", "b", more=2)
    assert not any("c" in commit.members for commit in crew.rounds().values())
    crew.stop()
    crew.check_accounts()


def test_peers_outlive_the_coordinator_and_go_on_when_it_is_back(tmp_path):
    server = start_single(tmp_path / "etcd")
    try:
        with Crew(tmp_path, server.endpoint, "outage", peers=2) as crew:
            for name in "ab":
                crew.start(name)
            crew.until_committed("a", "b", more=2)
            server.kill()
            crew.until(
                lambda: "coordinator" in crew.peers["a"].said, "a notices that the coordinator is away"
            )
            server = start_member(server.member)
            crew.until_committed("a", "b", more=3)
            assert all(peer.process.poll() is None for peer in crew.peers.values())
            crew.stop()
            crew.check_accounts()
            crew.check_digests()
    finally:
        server.stop()


def test_links_are_measured_when_somebody_comes_and_shown(three, capsys, tmp_path, monkeypatch):
    are_whole(three)
    names = {three.keys.rate(name) for name in "abc"}
    three.until(
        lambda: {item.key for item in three.etcd.list(three.keys.peers).items} >= names,
        "each has measured its links",
    )
    recipe = ["demo", "run.name=three", "elastic.inner_steps=3", "elastic.peer=guest"]
    monkeypatch.setenv("BLOOMERY_COORDINATOR", three.endpoint)
    picture = tmp_path / "links.svg"
    assert peer_command(["probe", *recipe, "--json", "--picture", str(picture)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["now"]) >= set("abc") and set(found["order"]) >= set("abc")
    assert all(found["now"][name]["mbit_s"] > 0 and found["now"][name]["rtt_ms"] > 0 for name in "abc")
    assert set(found["rates"]) <= {"a", "b", "c", "d"} and b"<svg" in picture.read_bytes()
    assert peer_command(["probe", *recipe]) == 0
    assert "order of the ring: a →" in capsys.readouterr().out
    assert peer_command(["probe", *recipe, "--streams", "1,2", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert list(compared["streams"]) == ["1", "2"] and compared["worthwhile"] in (1, 2)
    assert set(compared["streams"]["2"]) >= set("abc")
    are_whole(three)
