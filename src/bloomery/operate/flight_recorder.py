"""Reads the dumps of torch's flight recorder after a time-out, and finds ranks that missed a collective.

A dump is a pickle of plain values. It is read by an unpickler that refuses every class and function, so that
a file of another's making can hold wrong numbers and no code. See torch/distributed/flight_recorder.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST_BYTES = 64 << 20
_BUFFER = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
_PREFIXES = ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_FR_DUMP_TEMP_FILE")
_NAME = "flight-"
MOST_TOLD = 3
"""Process groups that are told of one failure, where different ranks were missing in them."""

Flight = Mapping[str, Sequence[Any]]  # Any: (number, name); as JSON a list
"""By process group: the number of the last collective that a rank began, and its name."""


@dataclass(frozen=True, kw_only=True)
class FlightFinding:
    """Ranks that differ from the others of a process group. words: one sentence."""

    culprits: tuple[int, ...]
    words: str


def flight_variables(environment: Mapping[str, str], stacks: Path) -> dict[str, str]:
    """Return the variables that let torch dump into a run's directory of stacks, less those that are set.

    There are none where no flight recorder is on.
    """
    if not any(environment.get(name, "0") not in ("", "0") for name in _BUFFER):
        return {}
    return {name: str(stacks / _NAME) for name in _PREFIXES if name not in environment}


def read_flight(stacks: Path, rank: int, *, since: float) -> Flight:
    """Return what a rank dumped since a moment, in seconds since 1970; {} where nothing can be read."""
    path = stacks / f"{_NAME}{rank}"
    try:
        facts = path.stat()
        if facts.st_mtime < since or facts.st_size > _MOST_BYTES:
            return {}
        return last_collectives(_PlainUnpickler(io.BytesIO(path.read_bytes())).load())
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    except (IndexError, MemoryError, RecursionError, OverflowError):  # of a damaged pickle
        return {}


def last_collectives(dump: Any) -> Flight:  # Any: a file's content
    """Return the last collective of each process group in a dump. Raises TypeError and KeyError."""
    flight: dict[str, tuple[int, str]] = {}
    for entry in dump["entries"]:
        if entry["is_p2p"]:
            continue
        group = ":".join(str(part) for part in entry["process_group"])
        number, name = int(entry["collective_seq_id"]), str(entry["profiling_name"]).partition(":")[2]
        if number >= flight.get(group, (0, ""))[0]:
            flight[group] = (number, name)
    return flight


def find_absent(flights: Mapping[int, Flight]) -> FlightFinding | None:
    """Return the ranks that did not come to a collective, or called another one than the others.

    A rank that waits in one process group comes late to its others. So of the ranks that are behind in some
    group those are named that wait in none; where each waits for another, all of them are.

    None where all that dumped agree. flights: what each rank dumped; ranks that dumped nothing are left out.
    """
    by_group: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)
    for rank, flight in flights.items():
        for group, last in flight.items():
            by_group[group][rank] = (int(last[0]), str(last[1]))
    groups = sorted(by_group.items())
    waiting = {rank for _, lasts in groups for rank in _waiting(lasts)}
    named: dict[int, None] = {}
    words: list[str] = []
    for finding in _findings(groups, waiting) or _findings(groups, set()):
        if not set(finding.culprits) <= set(named):
            named |= dict.fromkeys(finding.culprits)
            words.append(finding.words)
    if not words:
        return None
    more = f"; and {len(words) - MOST_TOLD} more groups differ" if len(words) > MOST_TOLD else ""
    return FlightFinding(culprits=tuple(named), words="; ".join(words[:MOST_TOLD]) + more)


def _findings(
    groups: Sequence[tuple[str, Mapping[int, tuple[int, str]]]], waiting: Collection[int]
) -> list[FlightFinding]:
    """Return what differs in each group. waiting: ranks that are not named for being behind."""
    found = []
    for group, lasts in groups:
        most = max(number for number, _ in lasts.values())
        late = sorted(rank for rank, (number, _) in lasts.items() if number < most)
        behind = [rank for rank in late if rank not in waiting]
        if behind:
            name = next(name for number, name in lasts.values() if number == most)
            first = lasts[behind[0]][0]
            words = f"{_ranks(behind)} did not come to {name} {most} of group {group}, and began {first} last"
            found.append(FlightFinding(culprits=tuple(behind), words=words))
        if late:
            continue
        names = defaultdict[str, list[int]](list)
        for rank, (_, called) in sorted(lasts.items()):
            names[called].append(rank)
        if len(names) > 1:
            usual = max(names, key=lambda called: len(names[called]))
            other = next(called for called in names if called != usual)
            words = f"{_ranks(names[other])} called {other} where others called {usual}, as {most} of {group}"
            found.append(FlightFinding(culprits=tuple(names[other]), words=words))
    return found


def _waiting(lasts: Mapping[int, tuple[int, str]]) -> list[int]:
    """Return the ranks that wait for others of a group: all where they called different collectives."""
    most = max(number for number, _ in lasts.values())
    ahead = [rank for rank, (number, _) in lasts.items() if number == most]
    differ = len({name for _, name in lasts.values()}) > 1
    return ahead if len(ahead) < len(lasts) or differ else []


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, texts, lists, tuples and dicts; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a dump of the flight recorder")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("a dump of the flight recorder refers to nothing outside of it")


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
