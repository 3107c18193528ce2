"""A run whose clock was set back has the ledger of the same run with a steady clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.operate.ledger.test_ledger import T0, killed_once, operation, start, step, write_run

from bloomery.operate.ledger.clock import read_steadily
from bloomery.operate.ledger.run_ledger import read_ledger

HOUR = 3600.0
TWO_CLOCKS = [10000.0, 10001.0, 9900.0, 9901.0, 10100.0, 10101.0, 10000.0, 10001.0, 10200.0, 10201.0]


def ahead(events: list[dict[str, Any]], seconds: float) -> list[dict[str, Any]]:
    return [{**event, "time": event["time"] + seconds} for event in events]


@pytest.mark.parametrize("place", [1, 4, 8])
def test_a_clock_that_was_set_back_changes_no_class_of_time(tmp_path: Path, place: int) -> None:
    events = [start(4, starting=4.0), *(step(4 + 2 * n, n, compute=2.0) for n in range(1, 9))]
    events.append({**operation(21, "end"), "incarnation": 1, "finished": True, "spent": {"ending": 1.0}})
    steady = read_ledger(write_run(tmp_path / "steady", events, [], {1: None}), now=T0 + 30)
    changed = [*ahead(events[:place], HOUR), *events[place:]]
    ledger = read_ledger(write_run(tmp_path / "changed", changed, [], {1: None}), now=T0 + 30)
    assert steady is not None and ledger is not None
    assert ledger.end - ledger.begin == pytest.approx(21)
    assert ledger.seconds == pytest.approx(steady.seconds)
    assert ledger.token_goodput() == pytest.approx(steady.token_goodput()) and ledger.token_goodput() <= 1.0


def test_records_of_attempts_before_the_clock_was_set_back_are_within_the_run(tmp_path: Path) -> None:
    events, operations, bases = killed_once()
    changed = [*ahead(events[:6], HOUR), *events[6:]], [*ahead(operations[:3], HOUR), *operations[3:]]
    ledger = read_ledger(write_run(tmp_path, *changed, bases), now=T0 + 1000)
    assert ledger is not None
    assert ledger.end - ledger.begin < 60 and ledger.history.kept_steps == 5
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.end - ledger.begin)


@pytest.mark.parametrize(
    ("times", "read"),
    [
        ([100, 200, 150, 300], [100, 200, 150, 300]),
        ([100, 200, 9000, 300, 400], [100, 200, 9000, 300, 400]),
        ([1000, 1100, 5, 1200], [1000, 1100, 5, 1200]),
        ([9000, 9100, 9200, 500, 600], [300, 400, 500, 500, 600]),
        ([9000, 500, 600, 100, 200], [0, 0, 100, 100, 200]),
        (TWO_CLOCKS, TWO_CLOCKS),
    ],
    ids=["another node", "one line too late", "one too early", "set back", "set back twice", "two clocks"],
)
def test_only_a_clock_that_stays_back_moves_earlier_times(
    tmp_path: Path, times: list[float], read: list[float]
) -> None:
    path = tmp_path / "journal"
    lines = [json.dumps({"event": "note", "time": time}) for time in times]
    path.write_text("\n".join(["{torn", *lines]) + '\n{"event": "no time"}\n')
    assert [event["time"] for event in read_steadily(path) if "time" in event] == read
    assert list(read_steadily(tmp_path / "none")) == []
