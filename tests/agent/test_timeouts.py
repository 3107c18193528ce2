"""The table of time-outs: each follows from the settings, and what must be larger is larger."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloomery.agent.timeouts import Timeouts, ring_deadline_s, step_deadline_s, table, timeouts_of
from bloomery.cli.peer import run
from bloomery.config.elastic import ElasticSection
from bloomery.transport.connection_pool import DialTiming
from bloomery.transport.sockets import TcpTimeouts


@given(
    stall_s=st.floats(0.5, 120.0),
    lease_s=st.floats(1.0, 600.0),
    grace_s=st.floats(0.1, 3600.0),
)
def test_what_waits_for_something_waits_longer_than_it_takes(stall_s, lease_s, grace_s):
    section = replace(ElasticSection(), stall_s=stall_s, lease_s=lease_s, grace_s=grace_s)
    limits = timeouts_of(section)
    assert limits.connect_s > 2 * limits.turn_s + limits.handshake_s
    assert limits.redial_s <= limits.connect_s and limits.turn_s <= limits.stall_s
    assert limits.ring_s > limits.stall_s and limits.unanswered_s > limits.stall_s
    assert limits.coordinator_s <= limits.lease_s / 2
    assert limits.step_s >= 2 * limits.lease_s
    assert limits.answer_s > 2 * limits.stagger_s
    assert 1 <= limits.tcp.probe_s <= limits.tcp.idle_s <= 30
    assert limits.grace_s == grace_s  # how long the quick wait follows from nothing else


def test_the_table_has_one_row_for_each_time_out():
    rows = [entry.name for entry in table(ElasticSection())]
    assert rows == [field.name for field in fields(Timeouts)]
    assert all(entry.origin and entry.why for entry in table(ElasticSection()))


@given(
    stall_s=st.floats(0.5, 120.0),
    lease_s=st.floats(1.0, 600.0),
    still_s=st.floats(1.0, 3600.0),
)
def test_each_time_out_is_what_its_row_says_it_comes_from(stall_s, lease_s, still_s):
    """The column of origins is arithmetic, so it is calculated here."""
    section = replace(ElasticSection(), stall_s=stall_s, lease_s=lease_s, still_s=still_s)
    known = {f"elastic.{field.name}": getattr(section, field.name) for field in fields(section)}
    product = re.compile(r"^(?:([\d.]+) × )?([a-z.]+_s)(?: / (\d+))?(?: \+ ([a-z_]+_s))?(?=$|[,;])")
    least, most = re.compile(r"at least (?:(\d+) × )?([a-z_]+_s)"), re.compile(r"at most ([\d.]+) s")
    calculated = 0
    for entry in table(section):
        found = product.match(entry.origin)
        if found is not None and ", and " not in entry.origin:
            factor, name, divisor, more = found.groups()
            expected = float(factor or 1) * known[name] / float(divisor or 1) + known.get(more, 0.0)
            if bound := most.search(entry.origin):
                expected = min(expected, float(bound[1]))
            if (bound := least.search(entry.origin)) and ";" not in entry.origin:
                expected = max(expected, float(bound[1] or 1) * known[bound[2]])
            rounding = 1.5 if name in ("elastic.lease_s", "lease_s") else 1e-9
            assert entry.seconds == pytest.approx(expected, rel=1e-9, abs=rounding), entry
            calculated += 1
        known[entry.name] = entry.seconds
    assert calculated >= 12


def test_slow_steps_and_rings_are_given_ten_times_what_they_usually_take():
    limits = timeouts_of(ElasticSection())
    assert step_deadline_s(limits, 0.5) == limits.step_s == 60.0
    assert step_deadline_s(limits, 20.0) == 200.0
    assert ring_deadline_s(limits, 0.0) == limits.ring_s
    assert ring_deadline_s(limits, 300.0) == 3000.0


def test_explain_prints_the_table_and_json(capsys):
    assert run(["explain"]) == 0
    shown = capsys.readouterr().out
    assert all(entry.name in shown and entry.why in shown for entry in table(ElasticSection()))
    assert max(len(line) for line in shown.splitlines()) <= 115
    assert run(["explain", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["seconds"] for row in rows}["lease_s"] == 10.0


def test_explain_follows_a_recipe(capsys):
    assert run(["explain", "demo", "elastic.stall_s=2", "--json"]) == 0
    rows = {row["name"]: row["seconds"] for row in json.loads(capsys.readouterr().out)}
    assert rows["stall_s"] == 2.0 and rows["unanswered_s"] == 8.0


@pytest.mark.parametrize("words", [["--help"], ["explain", "--help"], ["probe", "--help"]])
def test_help_teaches_within_a_line_s_width(capsys, words):
    with pytest.raises(SystemExit) as ended:
        run(words)
    assert ended.value.code == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 115


def test_what_the_sockets_are_given_is_of_the_table():
    section = replace(ElasticSection(), stall_s=2.0, lease_s=8.0)
    limits = timeouts_of(section)
    assert limits.dialing == DialTiming(turn_s=2.0, answer_s=2.0, retry_s=0.2)
    assert limits.tcp == TcpTimeouts(idle_s=12, probe_s=4, probes=3, unanswered_s=8.0)
    assert timeouts_of(replace(section, lease_s=0.5)).tcp.idle_s == 3
    assert timeouts_of(replace(section, lease_s=90.0)).tcp.idle_s == 30


def test_a_ring_has_twelve_stalls_at_least_and_an_end_six_leases_beside_a_save():
    limits = timeouts_of(replace(ElasticSection(), stall_s=2.0, lease_s=8.0))
    assert ring_deadline_s(limits, 0.5) == 24.0 and ring_deadline_s(limits, 3.0) == 30.0
    assert limits.ring_s == 1440.0 and limits.connect_s == 3 * 2.0 + 4.0
    assert limits.ending_s == 1860.0 and limits.coordinator_start_s == 24.0
    assert (limits.start_s, limits.compile_s, limits.save_s) == (1800.0, 900.0, 1800.0)
    slow = timeouts_of(replace(ElasticSection(), lease_s=29.5))
    assert (slow.lease_s, slow.ending_s, slow.coordinator_s) == (30.0, 1980.0, 15.0)
