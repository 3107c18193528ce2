"""A coordinator that comes back without its data, while peers are there or were down too: real processes."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from tests.agent.crew import Crew

from bloomery.cli.coordinate import run as coordinate
from bloomery.coordination.etcd_process import start_single
from bloomery.protocol.encoding import decode
from bloomery.protocol.records import KnownRun

ADOPT = "bloomery coordinate --adopt"


class Site:
    """A crew, and a coordinator whose data can be lost."""

    def __init__(self, base, **elastic):
        self.base = base
        self.server = start_single(base / "first")
        self.crew = Crew(base, self.server.endpoint, "cold", **elastic)

    def lose_the_coordinator(self):
        self.server.kill()

    def bring_an_empty_one(self):
        self.server = start_single(self.base / "second", port=self.server.member.port)

    def adopt(self):
        assert coordinate(["--adopt", "cold", "--endpoints", self.server.endpoint]) == 0

    def known(self, name):
        """The newest commit in a peer's run directory."""
        return decode((self.base / name / "known.json").read_text(), KnownRun).commit

    def saved(self, name):
        """The round whose state a peer has on its disk."""
        with np.load(self.base / name / "saved.npz") as stored:
            return int(stored["round"])

    def until_told_to_adopt(self, *names):
        crew = self.crew
        for name in names:
            peer = crew.peers[name]
            crew.until(lambda peer=peer: ADOPT in peer.said, f"{name} says what to do")
        knowing = [name for name in names if (self.base / name / "known.json").exists()]
        for name in knowing:
            key = crew.keys.recovery_record(name)
            crew.until(lambda key=key: crew.etcd.get(key) is not None, f"{name} tells what it knows")
            assert crew.etcd.get(key).lease


@pytest.fixture
def site(tmp_path):
    @contextmanager
    def make(**elastic):
        made = Site(tmp_path, **elastic)
        with made.crew:
            yield made
        made.server.stop()

    return make


@pytest.mark.parametrize("keeps", [{"a": 3, "b": 4}, {"a": 4, "b": 4}])
def test_a_cold_start_of_everything_goes_on_from_the_newest_state_on_a_disk_and_never_from_round_0(
    site, capsys, keeps
):
    with site(peers=2, minimum_peers=2, grace_s=2.0, patience_s=1.0) as here:
        crew = here.crew
        for name in "ab":
            crew.start(name, keeps=keeps[name])
        crew.until(lambda: max(crew.rounds(), default=0) >= 9, "nine rounds")
        crew.peers["b"].ask("hold")  # so that little more is committed while they are killed
        for name in "ab":
            crew.kill(crew.peers[name], to="all")
        before = crew.rounds()
        crew.peers["b"].unask("hold")
        here.lose_the_coordinator()
        here.bring_an_empty_one()
        kept = max(here.saved(name) for name in "ab")
        newest = max(kept, *(here.known(name).round for name in "ab"))
        assert newest >= 8 and kept >= 6
        for name in "ab":
            assert crew.peers[name].wait() != 0
            crew.start(name, keeps=keeps[name])
        here.until_told_to_adopt("a", "b")
        assert not crew.rounds() and not crew.peers["a"].notes("replace")
        here.adopt()
        told = capsys.readouterr().out
        assert f"goes on after round {newest}" in told
        crew.until_committed("a", "b", more=2)
        rounds = crew.rounds()
        assert 0 not in rounds
        back = [one for one in rounds.values() if one.rewind_to is not None]
        assert ("No peer that is here holds" in told) == bool(back) == (newest != kept)
        for one in back:
            assert (one.round, one.rewind_to) == (newest + 1, kept)
            assert (one.digest, one.position) == (before[kept].digest, before[kept].position)
        consumed = [one.position.consumed for round, one in sorted(rounds.items()) if round > newest]
        assert consumed == sorted(consumed) and consumed[-1] > before[8].position.consumed
        crew.stop()


def test_a_fresh_peer_at_an_empty_coordinator_does_not_take_the_state_of_those_who_know_better(site):
    with site(peers=1, minimum_peers=1, grace_s=1.0, patience_s=1.0) as here:
        crew = here.crew
        old = crew.start("b", keeps=1)
        crew.until_committed("b", more=5)
        here.lose_the_coordinator()
        here.bring_an_empty_one()
        here.until_told_to_adopt("b")
        fresh = crew.start("a", first=7.0)
        here.until_told_to_adopt("a")
        assert not crew.rounds()
        newest = here.known("b")
        here.adopt()
        crew.until_committed("a", "b", more=2)
        assert not old.notes("replace") and fresh.notes("replace")
        assert min(crew.rounds()) == newest.round
        crew.stop()
        crew.check_digests()


def test_a_peer_of_the_lost_run_does_not_join_one_that_was_begun_anew_under_its_name(site):
    with site(peers=1, minimum_peers=1, grace_s=1.0, patience_s=1.0) as here:
        crew = here.crew
        old = crew.start("b", keeps=1)
        crew.until_committed("b", more=3)
        crew.kill(old, to="all")
        here.lose_the_coordinator()
        here.bring_an_empty_one()
        round = here.known("b").round
        crew.start("a", first=7.0)
        crew.until(lambda: max(crew.rounds(), default=0) > round, "a alone has begun the run anew")
        crew.until(lambda: here.known("a").epoch > here.known("b").epoch, "its epochs are higher")
        saved = (here.base / "b" / "saved.npz").read_bytes()
        assert old.wait() != 0
        back = crew.start("b", keeps=1)
        crew.dead.append(back)
        assert back.wait() != 0 and "another run called 'cold'" in back.said
        assert not back.notes("replace") and (here.base / "b" / "saved.npz").read_bytes() == saved
        crew.until_committed("a")
        crew.stop()
