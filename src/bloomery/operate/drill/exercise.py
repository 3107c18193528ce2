"""Trains a real, supervised run, injects faults into it one after the other, and measures each recovery."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from bloomery.config.submit import SubmitSection
from bloomery.errors import TrainingFailed
from bloomery.events.heartbeat import RankActivity, RankBeat
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.drill.allocation import DrillNodes
from bloomery.operate.drill.faults import DrillFault, DrillTarget, inject
from bloomery.operate.drill.phases import RecoveryPhases, phases_of
from bloomery.operate.exclusions import Exclusions
from bloomery.operate.newest_checkpoint import newest_step
from bloomery.operate.standstill import read_beats
from bloomery.operate.supervise import RestartBudget

_POLL_S = 0.05
_END_S = 120.0
_WORDS_S = 5.0
"""Ranks that outlive their launcher keep its standard error open for no longer than this."""
_SPEAKS_S = 10.0
"""A rank on another node lives if its heartbeat is not older."""
_SPEAKS = ("was ended by", "failed with status", "no rank has moved", "could not", "lost another")


@dataclass(frozen=True, kw_only=True)
class DrillResult:
    """The outcome of one fault.

    survived: whether the run made a step after it by itself.
    cause: the cause that the supervisor found; "" where it found none.
    """

    fault: DrillFault
    survived: bool
    phases: RecoveryPhases
    cause: str = ""


@dataclass(kw_only=True)
class DrillPlan:
    """What a drill does.

    command: the words after `bloomery launch`, which start the run supervised.
    steps_between: the steps that the run makes before each fault.
    patience_s: the seconds within which the run must step again after a fault.
    private_shm_mib: the size of a /dev/shm of the run's own; 0 leaves it the machine's.
    nodes: where the run trains.
    """

    rundir: RunDirectory
    command: Sequence[str]
    world: int
    faults: Sequence[DrillFault]
    seed: int = 0
    steps_between: int = 5
    patience_s: float = 600.0
    private_shm_mib: int = 0
    nodes: DrillNodes = field(default_factory=DrillNodes)


@dataclass
class _Launcher:
    """The launcher of the run, and what it said when, in seconds since 1970."""

    plan: DrillPlan
    process: subprocess.Popen[str] | None = None
    said: list[tuple[float, str]] = field(default_factory=list)
    listener: threading.Thread | None = None

    def start(self) -> None:
        command = [*self.plan.nodes.launch(), *self.plan.command]
        if self.plan.private_shm_mib:
            mount = f"mount -t tmpfs -o size={self.plan.private_shm_mib}m tmpfs /dev/shm && exec"
            command = ["unshare", "--mount", "sh", "-c", f'{mount} "$@"', "sh", *command]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self.listener = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self.listener.start()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append((time.time(), line.rstrip()))

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def spoke_after(self, moment: float) -> float | None:
        """Return when it first spoke of a failure after a moment."""
        lines = [time for time, line in self.said if time > moment and any(word in line for word in _SPEAKS)]
        return min(lines, default=None)

    def last_words(self) -> str:
        """Return the last lines of a launcher that has ended."""
        if self.listener is not None:
            self.listener.join(_WORDS_S)  # what it said as it ended may not have been read yet
        return "\n".join(line for _, line in self.said[-5:])

    def end(self) -> None:
        """End the launcher with its ranks."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def exercise(plan: DrillPlan, *, say: Callable[[str], None]) -> Iterator[DrillResult]:
    """Yield the outcome of each fault. Raises TrainingFailed where the run ends by itself before.

    A supervisor gives up after some restarts without a newer checkpoint (RestartBudget). The drill shall not
    bring that about: before a fault that it would not bear, it waits until the run has saved again.
    """
    rng, launcher = Random(plan.seed), _Launcher(plan)
    saved_step, restarts = -1, 0  # of the newest checkpoint; the faults since it which ended the attempt
    with ExitStack() as stack:
        stack.callback(launcher.end)
        launcher.start()
        for fault in plan.faults:
            # Where the only checkpoint is damaged there is none to go back to.
            beats = _stepping(
                plan,
                launcher,
                saves=2 if fault is DrillFault.FLIP else 1,
                newer_than=saved_step if restarts >= RestartBudget().without_progress else -1,
            )
            if (newest := newest_step(plan.rundir)) > saved_step:
                saved_step, restarts = newest, 0
            restarts += fault.ends_attempt
            shm = Path(f"/proc/{beats[0].pid}/root/dev/shm") if plan.private_shm_mib else None
            assert launcher.process is not None
            target = DrillTarget(
                rundir=plan.rundir, beats=beats, launcher=launcher.process.pid, shm=shm, nodes=plan.nodes
            )
            struck = time.time()
            try:
                undo = inject(fault, target, rng)
            except ProcessLookupError:
                continue  # the rank has just ended by itself
            stack.callback(undo)
            say(f"{fault}: injected at step {beats[0].step}")
            yield _recovery(plan, launcher, fault, struck, step=max(beat.step for beat in beats))
            undo()


def _recovery(
    plan: DrillPlan, launcher: _Launcher, fault: DrillFault, struck: float, *, step: int
) -> DrillResult:
    """Wait until the run steps again, and return what it took."""
    deadline = time.monotonic() + plan.patience_s
    noticed: float | None = None
    while time.monotonic() < deadline:
        if not launcher.is_running:
            if fault == DrillFault.LAUNCHER and noticed is None:
                noticed = time.time()
                _await_ranks_end(plan, deadline)
                _let_nodes_back(plan)
                launcher.start()
            elif fault != DrillFault.LAUNCHER:
                break
        if _has_stepped(plan, fault, struck, step):
            break
        time.sleep(_POLL_S)
    operations = list(read_journal(plan.rundir.operations))
    diagnoses = [event for event in operations if event["event"] == "diagnosis" and event["time"] > struck]
    phases = phases_of(
        struck,
        noticed=noticed if fault == DrillFault.LAUNCHER else launcher.spoke_after(struck),
        operations=operations,
        events=read_journal(plan.rundir.journal()),
    )
    survived = launcher.is_running and _has_stepped(plan, fault, struck, step)
    cause = str(diagnoses[0]["cause"]) if diagnoses else ""
    return DrillResult(fault=fault, survived=survived, phases=phases, cause=cause)


def _has_stepped(plan: DrillPlan, fault: DrillFault, struck: float, step: int) -> bool:
    beats = read_beats(plan.rundir, ranks=range(plan.world), attempt="")
    if len(beats) < plan.world:
        return False
    if not fault.ends_attempt:
        return all(beat.step > step + plan.steps_between for beat in beats.values())
    operations = [event for event in read_journal(plan.rundir.operations) if event["event"] == "attempt"]
    name = operations[-1]["attempt"] if operations and operations[-1]["time"] > struck else ""
    began, is_journalled = None, False
    for event in read_journal(plan.rundir.journal()):
        if event["event"] == "start" and event["time"] > struck:
            began, is_journalled = event["step"], False
        elif event["event"] == "step":  # a rank's heartbeat may tell of a step before its journal does
            is_journalled = True
    if not name or began is None or not is_journalled:
        return False
    return all(beat.attempt == name and beat.step > began for beat in beats.values())


def _stepping(plan: DrillPlan, launcher: _Launcher, *, saves: int, newer_than: int) -> list[RankBeat]:
    """Wait for some steps of all ranks and for checkpoints, and return the heartbeats.

    saves: how many there must be. newer_than: the step that the newest must be beyond; -1 for any.
    """
    deadline, first = time.monotonic() + plan.patience_s, None
    while time.monotonic() < deadline:
        if not launcher.is_running:
            raise TrainingFailed(
                f"The drill's run has ended by itself:\n{launcher.last_words()}", remedy="Mend it first."
            )
        beats = read_beats(plan.rundir, ranks=range(plan.world), attempt="")
        living = [
            beat
            for beat in beats.values()
            if beat.activity != RankActivity.ENDED and _lives(beat, plan.nodes)
        ]
        if (
            len(living) == plan.world
            and len({beat.attempt for beat in living}) == 1
            and living[0].incarnation
        ):
            first = min(beat.step for beat in living) if first is None else first
            count = len(list(plan.rundir.checkpoints.glob("*/manifest.json")))
            is_saved = count >= saves and newest_step(plan.rundir) > newer_than
            if is_saved and min(beat.step for beat in living) >= first + plan.steps_between:
                return living
        time.sleep(_POLL_S)
    raise TrainingFailed(
        f"The drill's run made no {plan.steps_between} steps and {saves} checkpoints"
        f"{f' beyond step {newer_than}' if newer_than >= 0 else ''} in {plan.patience_s:.0f} s.",
        remedy="Save more often (checkpoint.every_steps), or give it more time with --patience.",
    )


def _await_ranks_end(plan: DrillPlan, deadline: float) -> None:
    """Wait until the ranks of a killed launcher have ended, as a scheduler waits before it starts anew."""
    while time.monotonic() < deadline:
        beats = read_beats(plan.rundir, ranks=range(plan.world), attempt="")
        if not any(_lives(beat, plan.nodes) for beat in beats.values()):
            return
        time.sleep(_POLL_S)


def _let_nodes_back(plan: DrillPlan) -> None:
    """Empty the list of nodes in quarantine that an allocation's drill has of its own.

    A launcher that was killed counts as a lost node, and a scheduler would start the run on another one. A
    drill has the nodes of its job to itself, and knows that they are well.
    """
    if plan.nodes.is_allocation:
        exclusions = Exclusions.of(plan.rundir, SubmitSection())
        for host in exclusions.nodes():
            exclusions.release(host)


def _lives(beat: RankBeat, nodes: DrillNodes) -> bool:
    """Return whether a rank runs: by its process here, and by its heartbeat on another node."""
    if nodes.reach(beat.host):
        return time.time() - beat.time < _SPEAKS_S
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with suppress(OSError):
        return ") Z " not in Path(f"/proc/{beat.pid}/stat").read_text()
    return False


@contextmanager
def small_disk(mib: int) -> Iterator[Path]:
    """Yield a directory on a tmpfs of its own, which is gone afterwards. Needs root. Raises OSError."""
    directory = Path(tempfile.mkdtemp(prefix="bloomery-drill-"))
    try:
        options = ["-t", "tmpfs", "-o", f"size={mib}m", "tmpfs"]
        done = subprocess.run(["mount", *options, str(directory)], capture_output=True, check=False)
        if done.returncode:
            raise OSError(f"no tmpfs can be mounted here: {done.stderr.decode(errors='replace').strip()}")
        try:
            yield directory
        finally:
            subprocess.run(["umount", "--lazy", str(directory)], check=False)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
