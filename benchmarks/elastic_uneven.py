"""Peers of unequal speed, and a newcomer that is slower than the rounds.

Real agents, a coordinator, connections, rings and fetches on this machine; the ranks are NumPy's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from contract import Measurement, measurement, report
from elastic import CommitClock
from tests.agent.crew import Crew

from bloomery.coordination.etcd_process import start_single

SPEEDS = {"a": 1, "b": 3, "c": 12}
STEP_S = 0.02
ROUNDS = 20
ELEMENTS, STATE_BYTES = 250_000, 15_000_000
ROUND_STEPS, ROUND_S = 10, 4.0
TRANSFER_ROUNDS = 1.4


def main(arguments: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json", action="store_true")
    chosen = options.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        server = start_single(Path(place) / "etcd")
        try:
            found = [
                *speeds(server.endpoint, Path(place)),
                *slow_newcomer(server.endpoint, Path(place)),
            ]
        finally:
            server.stop()
    return report(found, as_json=chosen.json)


def speeds(endpoint: str, place: Path) -> list[Measurement]:
    """Three peers whose steps take 1, 3 and 12 times as long; the slow ones are hurried in each round."""
    patient = {"patience_s": 0.2, "lease_s": 60.0, "stall_s": 60.0, "inner_steps": 12}
    base = place / "speeds"
    base.mkdir()
    with Crew(base, endpoint, "speeds", peers=len(SPEEDS), minimum_peers=len(SPEEDS), **patient) as crew:
        for name, slowness in SPEEDS.items():
            crew.start(name, step_s=STEP_S * slowness, inner_steps=12)
        crew.until(lambda: max(crew.rounds(), default=0) >= ROUNDS, f"{ROUNDS} rounds")
        crew.stop()
        crew.check_accounts()
        rounds = {round: commit for round, commit in crew.rounds().items() if 0 < round <= ROUNDS}
        steps = {
            name: sum(note["tokens"] for note in peer.notes("ready")) for name, peer in crew.peers.items()
        }
    left_out = sum(len(commit.left_out) for commit in rounds.values())
    whole = sum(set(commit.members) == set(SPEEDS) for commit in rounds.values())
    told = ", ".join(f"{name} {count}" for name, count in steps.items())
    what = f"elastic_uneven: speeds 1 : 3 : 12, {ROUNDS} rounds"
    return [
        measurement(f"{what}: left out", left_out, unit="parts", reference="nobody is ill", bar="<= 0"),
        measurement(
            f"{what}: commits of all three",
            whole,
            unit="commits",
            reference=f"every sample counted once; tokens of each: {told}",
            bar=f">= {ROUNDS}",
        ),
    ]


def slow_newcomer(endpoint: str, place: Path) -> list[Measurement]:
    """A newcomer whose transfer takes 1.4 rounds: it finishes it, and fetches the averages since then."""
    base, names = place / "newcomer", "abc"
    base.mkdir()
    rate = 8e-6 * STATE_BYTES / len(names) / (TRANSFER_ROUNDS * ROUND_S)
    chosen = {"bandwidth_limit_mbit_s": rate, "grace_s": 60.0, "inner_steps": ROUND_STEPS}
    with Crew(base, endpoint, "newcomer", peers=len(names), **chosen) as crew:
        sizes = {"elements": ELEMENTS, "rest": STATE_BYTES - 4 * ELEMENTS, "inner_steps": ROUND_STEPS}
        for name in names:
            crew.start(name, step_s=ROUND_S / ROUND_STEPS, **sizes)
        clock = CommitClock(endpoint, "newcomer")
        crew.until_committed(*names, more=2)
        newcomer = crew.start("n", first=7.0, step_s=ROUND_S / ROUND_STEPS, **sizes)
        crew.until(lambda: newcomer.notes("holding"), "the newcomer is ready")
        began = time.monotonic()
        usual = clock.usual_gap(began)
        seconds = clock.first(began, lambda commit: "n" in commit.members)
        longest = clock.longest_gap(began)
        (whole,) = newcomer.events("replaced")
        made_up_for = newcomer.events("caught_up")
        crew.stop()
        crew.check_accounts()
        crew.check_digests()
    beside = f"rounds of {usual:.2f} s; the transfer took {whole['seconds']:.2f} s "
    beside += f"({whole['seconds'] / usual:.2f} rounds), {len(made_up_for)} averages were fetched after it"
    return [
        measurement(
            "elastic_uneven: a newcomer, from the end of its transfer to its first commit",
            (seconds - whole["seconds"]) / usual,
            unit="rounds",
            reference=beside,
            bar="<= 1.0",
        ),
        measurement(
            "elastic_uneven: the others stall for it",
            longest - usual,
            unit="s",
            reference=f"the longest time between two commits was {longest:.2f} s",
            bar="<= 1.0",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
