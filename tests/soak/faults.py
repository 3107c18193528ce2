"""Faults and hangs planted in the ranks of a supervised run: what is said of each, and done about it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.soak.fault_kinds import WATCHDOG, PlantedFault, planted_faults

from bloomery.events.heartbeat import RankBeat, read_beat
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory

PLANTING = Path(__file__).parent / "planting"
CGROUP = Path("/sys/fs/cgroup/memory")
KINDS = os.environ.get("BLOOMERY_SOAK_KINDS", "")
"""Comma-separated kinds of faults; empty: all."""
DRAW = os.environ.get("BLOOMERY_SOAK_DRAW", "9")
"""The draw whose faults are planted."""
SKIP = int(os.environ.get("BLOOMERY_SOAK_SKIP", "0"))
"""So many faults of the order are left out, for a soak that goes on where another was broken off."""
SEED = int(os.environ.get("BLOOMERY_SOAK_SEED", "1"))
LONG = (
    "train.samples=40_000_000",
    "optim.name=adamw",
    "evaluate.every_steps=20",
    "train.ramp_up=[]",
    "train.compile=off",
)
SHM_MIB = 64
DEADLINE_S = float(os.environ.get("BLOOMERY_SOAK_DEADLINE_S", "240"))
Train = Callable[..., list[str]]


@dataclass
class Rig:
    """A supervised run whose ranks fail on demand.

    kernel: a file whose lines the launcher finds at the end of the kernel's log.
    """

    run: RunDirectory
    command: list[str]
    place: Path
    world: int
    launcher: subprocess.Popen[bytes] | None = None
    has_small_shm: bool = False
    launches: int = 0
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.place / "launcher.log"
        self.plants.mkdir()
        (self.place / "bin").mkdir()
        dmesg = self.place / "bin" / "dmesg"
        dmesg.write_text(f"#!/bin/sh\nPATH=${{PATH#*:}} dmesg; cat {self.place}/kernel 2>/dev/null; true\n")
        dmesg.chmod(0o755)

    @property
    def plants(self) -> Path:
        return self.place / "plants"

    def start(self, *, small_shm: bool) -> None:
        words = [sys.executable, "-m", "bloomery", *self.command]
        if small_shm:
            mount = f'mount -t tmpfs -o size={SHM_MIB}m tmpfs /dev/shm && exec "$@"'
            words = ["unshare", "--mount", "sh", "-c", mount, "sh", *words]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BLOOMERY_")}
        environment |= {
            "PYTHONPATH": str(PLANTING),
            "PLANTED_FAULTS": str(self.plants),
            "PATH": f"{self.place}/bin:{environment['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        with self.log.open("ab") as log:
            self.launcher = subprocess.Popen(words, stdout=log, stderr=log, env=environment)
        self.has_small_shm, self.launches = small_shm, self.launches + 1

    def runs(self, *, small_shm: bool) -> bool:
        """Whether a launcher runs that suits the next fault; one that does not is ended."""
        if self.launcher is None or self.launcher.poll() is not None:
            return False
        if small_shm != self.has_small_shm:
            self.end()
            return False
        return True

    def end(self) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            self.launcher.send_signal(signal.SIGTERM)
            try:
                self.launcher.wait(120)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()

    def told(self, event: str) -> list[dict[str, Any]]:
        return [record for record in read_journal(self.run.operations) if record["event"] == event]

    def stepping(self, *, steps: int) -> list[RankBeat]:
        """Wait until all ranks of the newest attempt have made so many steps, and return their heartbeats."""
        first: dict[str, int] = {}
        seen: list[RankBeat] = []

        def is_there() -> bool:
            assert self.launcher is not None and self.launcher.poll() is None, self.log.read_text()[-2000:]
            attempts = self.told("attempt")
            beats = [read_beat(self.run.heartbeat(rank=rank)) for rank in range(self.world)]
            known = [beat for beat in beats if beat is not None and beat.incarnation]
            if (
                not attempts
                or len(known) < self.world
                or {beat.attempt for beat in known} != {attempts[-1]["attempt"]}
            ):
                time.sleep(0.1)
                return False
            seen[:] = known
            low = min(beat.step for beat in known)
            return low >= first.setdefault(known[0].attempt, low) + steps

        wait_for(is_there)
        return seen

    def plant(self, fault: PlantedFault, victim: RankBeat) -> None:
        if fault.kernel:
            stamp = f"[{time.monotonic():.6f}] "
            with (self.place / "kernel").open("a") as kernel:
                kernel.write(f"{stamp}{fault.kernel}\n")
        for rank in range(self.world):
            code, place = (fault.code, fault.place) if rank == victim.rank else ("", "")
            if rank != victim.rank and fault.others:
                words = WATCHDOG if fault.others == "watchdog" else fault.others
                said = words.format(rank, 7753)
                code = f"time.sleep(4); print({said!r}, file=sys.stderr, flush=True); os.abort()"
            if code:
                draft = self.plants / f".rank-{rank}"
                draft.write_text(json.dumps({"place": place, "code": code}))
                draft.rename(self.plants / f"rank-{rank}")
        if fault.signal:
            os.kill(victim.pid, fault.signal)

    def verdict_on(self, fault: PlantedFault, victim: RankBeat) -> dict[str, Any]:
        """Cause a fault, and return the diagnosis with whether an attempt followed."""
        if fault.at_start:
            self.end()
        diagnoses, attempts = len(self.told("diagnosis")), len(self.told("attempt"))
        with memory_limit(victim.pid, fault.memory_mib) if fault.memory_mib else ExitStack():
            self.plant(fault, victim)
            if fault.at_start:
                self.start(small_shm=fault.small_shm)
                attempts += 1
            launcher = self.launcher
            assert launcher is not None
            is_told = waited_for(
                lambda: len(self.told("diagnosis")) > diagnoses or launcher.poll() is not None
            )
        if not is_told:
            self.end()  # nobody has seen that anything is wrong
        wait_for(lambda: len(self.told("attempt")) > attempts or launcher.poll() is not None)
        said = self.told("diagnosis")[diagnoses:] or [
            {"cause": "nothing", "culprit": {"rank": None}, "summary": ""}
        ]
        return said[0] | {"retried": len(self.told("attempt")) > attempts}


def wait_for(seen: Callable[[], object]) -> None:
    """Wait for something to be seen, beside a run that needs the processor."""
    assert waited_for(seen), "waited in vain"


def waited_for(seen: Callable[[], object]) -> bool:
    """Wait for something to be seen; returns False where it was not."""
    deadline = time.monotonic() + DEADLINE_S
    while not seen():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextmanager
def memory_limit(pid: int, mib: int) -> Iterator[None]:
    """Let the kernel kill a process that takes so much more memory than it has now."""
    group = CGROUP / f"bloomery-soak-{pid}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(mib << 20))
    (group / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        for _ in range(200):
            for line in (group / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (CGROUP / "cgroup.procs").write_text(line)
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def may_limit_and_mount() -> bool:
    return os.geteuid() == 0 and os.access(CGROUP / "memory.limit_in_bytes", os.F_OK)


@pytest.fixture
def rig(train_command: Train, tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*, world: int) -> Rig:
        command = ["launch", *train_command(*LONG, f"train.micro_batch={4 // world}")[1:]]
        command += ["--nproc", str(world), "--supervise"]
        made.append(Rig(run=RunDirectory(tmp_path / "run"), command=command, place=tmp_path, world=world))
        return made[-1]

    yield make
    for each in made:
        each.end()


def told_wrongly(fault: PlantedFault, victim: RankBeat, verdict: dict[str, Any]) -> dict[str, bool]:
    expected = victim.rank if fault.names_rank else None
    return {
        "cause": verdict["cause"] != fault.cause,
        "culprit": verdict["culprit"]["rank"] != expected,
        "retry": verdict["retried"] != fault.retries,
    }


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.needs(may_limit_and_mount, rights="root, to limit memory (cgroup v1) and to mount a file system")
def test_the_verdicts_on_sixty_faults_of_twelve_kinds(
    rig: Callable[..., Rig], capsys: pytest.CaptureFixture[str]
) -> None:
    ours, rng, began = rig(world=2), random.Random(SEED), time.monotonic()
    chosen = [fault for fault in planted_faults(DRAW).values() if not KINDS or fault.kind in KINDS.split(",")]
    rng.shuffle(chosen)
    chosen.sort(key=lambda fault: fault.small_shm)
    chosen = chosen[SKIP:]
    wrong: Counter[str] = Counter()
    details = []
    for fault in chosen:
        if not ours.runs(small_shm=fault.small_shm):
            ours.start(small_shm=fault.small_shm)
        victim = ours.stepping(steps=rng.randrange(7, 14))[rng.randrange(2)]
        verdict = ours.verdict_on(fault, victim)
        found = told_wrongly(fault, victim, verdict)
        wrong.update(name for name, is_wrong in found.items() if is_wrong)
        line = f"{fault.kind}, {fault.place} {fault.code[:60]}: {verdict['cause']} {verdict['culprit']}"
        line += f" {verdict['summary'][:90]}, retried {verdict['retried']}"
        if any(found.values()):
            details.append(line)
        with capsys.disabled():
            print("WRONG" if any(found.values()) else "right", line, flush=True)
    figures = {
        "name": "verdicts",
        "faults": len(chosen),
        "kinds": len({fault.kind for fault in chosen}),
        "causes right": len(chosen) - wrong["cause"],
        "culprits right": len(chosen) - wrong["culprit"],
        "retried or not, right": len(chosen) - wrong["retry"],
        "wrong": details,
        "launchers": ours.launches,
        "seconds": round(time.monotonic() - began, 1),
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert wrong["cause"] <= 3 and wrong["culprit"] <= 3 and wrong["retry"] == 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_of_twelve_planted_hangs_the_verdict_names_the_rank(
    rig: Callable[..., Rig], capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = planted_faults("hangs")
    ours, right, details, began = rig(world=4), 0, [], time.monotonic()
    ours.start(small_shm=False)
    for number, (name, fault) in enumerate(hangs.items()):
        victim = ours.stepping(steps=12)[(number + 1) % 4]
        verdict = ours.verdict_on(fault, victim)
        is_right = not any(told_wrongly(fault, victim, verdict).values())
        right += is_right
        line = f"{name}: rank {victim.rank}: {verdict['cause']}: {verdict['summary']}"
        if not is_right:
            details.append(line)
        with capsys.disabled():
            print("right" if is_right else "WRONG", line, flush=True)
    figures = {
        "name": "hangs",
        "hangs": len(hangs),
        "named": right,
        "wrong": details,
        "seconds": round(time.monotonic() - began, 1),
    }
    with capsys.disabled():
        print(json.dumps(figures))
    assert right >= 11
