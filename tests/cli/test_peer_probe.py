"""How many connections a hop is worth, and what is said of it."""

from __future__ import annotations

import pytest

from bloomery.cli.peer_probe import comparison_text, draw_links, fewest_streams
from bloomery.cli.peer_probe import run as probe
from bloomery.errors import PeerError
from bloomery.transport.bandwidth_probe import LinkMeasurement


def to(**rates):
    return {name: LinkMeasurement(mbit_s=rate, rtt_ms=100.0) for name, rate in rates.items()}


FAR = [(1, to(a=263, b=900)), (2, to(a=500, b=920)), (4, to(a=870, b=930)), (8, to(a=918, b=940))]


def test_the_slowest_link_says_how_many_streams_are_worth_it():
    assert fewest_streams(FAR) == 4
    assert fewest_streams([(1, to(a=940)), (8, to(a=960))]) == 1


def test_who_cannot_be_reached_does_not_count_and_is_named():
    some = [(streams, {**found, "c": "connection refused"}) for streams, found in FAR]

    assert fewest_streams(some) == 4
    text = comparison_text(some)
    assert text.count("connection refused") == 1
    assert "elastic.streams=4" in text and all(len(line) <= 100 for line in text.splitlines())
    assert fewest_streams([(1, {"c": "connection refused"})]) is None
    sometimes = [(1, {**to(a=900), "c": "timed out"}), (8, to(a=920, c=60))]
    assert fewest_streams(sometimes) == 1, "of c nothing is known that could be compared"
    assert "elastic.streams" not in comparison_text([(1, {"c": "connection refused"})])


@pytest.mark.parametrize("wrong", ["", "a", "0", "4,65", "1;2"])
def test_counts_that_make_no_sense_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as refused:
        probe(["demo", "--streams", wrong])

    assert refused.value.code == 2
    assert "--streams" in capsys.readouterr().err


def test_a_picture_of_no_peers_is_refused_in_words(tmp_path):
    with pytest.raises(PeerError, match="No peer is there"):
        draw_links([], {}, [], tmp_path / "links.png")
