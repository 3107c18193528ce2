"""Peers of which only a hub can be dialled: those that lost their state get it, from whoever has it."""

from __future__ import annotations

import shutil

import pytest

from bloomery.coordination.certificates import init_certificates

HIDDEN, HUB = {"listen": "none"}, {"relay": True}


def killed_and_emptied(crew, name):
    """Kill a peer with its ranks, and remove its run directory."""
    dead = crew.peers[name]
    crew.kill(dead, to="all")
    dead.wait()
    crew.check_digests()
    shutil.rmtree(dead.directory)


@pytest.fixture(params=["token", "certificates"])
def access(request, tmp_path):
    """Options of a peer of this name."""
    if request.param == "token":
        return lambda name: {}
    init_certificates(tmp_path / "bundles", run="run", peers="hbc")
    return lambda name: {"certificates": str(tmp_path / "bundles" / "run" / name)}


def test_a_peer_that_only_dials_fetches_the_state_of_another_one_through_the_hub(crew_of, access):
    crew = crew_of(peers=3)
    crew.start("h", elastic=HUB, serves_nothing=True, **access("h"))
    for name in "bc":
        crew.start(name, elastic=HIDDEN, **access(name))
    crew.until_committed("h", "b", "c", more=2)
    killed_and_emptied(crew, "c")
    crew.until_committed("h", "b")
    back = crew.start("c", elastic=HIDDEN, first=7.0, **access("c"))
    crew.until_committed("h", "b", "c", more=2)
    assert back.notes("replace") and "relaying the state of 'b' to 'c'" in crew.peers["h"].said
    crew.stop()
    crew.check_accounts()
    crew.check_digests()


@pytest.mark.parametrize("relay", [True, False], ids=["relays", "relays nothing"])
def test_a_hub_that_lost_its_state_fetches_it_from_a_peer_that_only_dials(crew_of, relay):
    crew = crew_of(peers=2)
    hub = {"elastic": {"relay": relay}}
    crew.start("h", **hub)
    crew.start("b", elastic=HIDDEN)
    crew.until_committed("h", "b", more=2)
    killed_and_emptied(crew, "h")
    crew.until_committed("b")
    back = crew.start("h", first=7.0, **hub)
    crew.until_committed("h", "b", more=2)
    assert back.notes("replace")
    crew.stop()
    crew.check_accounts()
    crew.check_digests()


def test_a_peer_that_only_dials_gives_the_average_of_a_round_to_another_one(crew_of):
    crew = crew_of(peers=3)
    crew.start("h", elastic=HUB, serves_nothing=True)
    for name in "bc":
        crew.start(name, elastic=HIDDEN)
    crew.until_committed("h", "b", "c", more=2)
    crew.peers["c"].ask("poison")
    crew.until(lambda: crew.peers["c"].events("caught_up"), "c fetches the average that it missed")
    crew.until_committed("h", "b", "c")
    assert not crew.peers["c"].notes("replace")
    assert "relaying the state of 'b' to 'c'" in crew.peers["h"].said
    crew.stop()
    crew.check_accounts()
    crew.check_digests()
