"""Collects requests from outside (signals, control files, clocks), on which all ranks then agree."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from bloomery.config.checkpoint import ControlSection
from bloomery.config.setting import LARGEST_COUNT
from bloomery.errors import StoppedBySwitch
from bloomery.events.records import Facts
from bloomery.events.run_directory import CONTROLS, RunDirectory
from bloomery.events.switches import Switches, disarming, note_of, waiting_requests
from bloomery.parallel.mesh import Mesh

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
REQUESTS = ("set", "skip", "rewind")
"""Control files with contents, which the first rank reads for all."""
IMPATIENCE = 2
"""The number of interrupts after which the next one ends the process at once, without a save."""
_NO_DIRECTORY = ControlSection()
_WRITING_S = 5.0
"""An empty request file that is younger than this many seconds may be one that somebody is writing."""


@dataclass(frozen=True, kw_only=True)
class LocalFacts:
    """What only this rank knows, as numbers that can be summed over ranks."""

    save: float
    stop: float
    interrupted: float
    terminated: float
    request: float
    minutes: float
    minutes_since_save: float

    def numbers(self) -> list[float]:
        """Return the numbers in a fixed order, for the one reduction of the step."""
        return [
            self.save,
            self.stop,
            self.interrupted,
            self.terminated,
            self.request,
            self.minutes,
            self.minutes_since_save,
        ]


class Control:
    """Owns the signal handlers and the clocks; only the first rank reads control files and switches.

    section: says where else than in the run directory there are switches.
    ends_process: whether the process ends with this training, so that signals change nothing afterwards.
    """

    def __init__(
        self,
        rundir: RunDirectory,
        mesh: Mesh,
        *,
        section: ControlSection = _NO_DIRECTORY,
        ends_process: bool = False,
    ) -> None:
        self._rundir, self._mesh, self._ends_process = rundir, mesh, ends_process
        self._switches = switches_of(rundir, section)
        self._received: list[str] = []
        self._wants_save = False
        self._save_at: float | None = None
        self._listed_ns, self._unknown = 0, frozenset[str]()
        self._refused: set[str] = set()
        self._rewind = ""
        self._started = self._saved = time.monotonic()
        if mesh.is_first:
            self._tell_waiting()
        # Only the main thread receives signals.
        heard = SIGNALS if threading.current_thread() is threading.main_thread() else ()
        self._previous = {number: signal.signal(number, self._on_signal) for number in heard}
        if heard:  # the launcher holds it back until there is a handler
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    @property
    def interruptions(self) -> int:
        """How often a signal asked this process to stop."""
        return len(self._received)

    def local_facts(self) -> LocalFacts:
        """Return what this rank knows now. Only the first rank reports clocks and files, so sums are its
        values.
        """
        first = self._mesh.is_first
        now = time.monotonic()
        if first:
            self._name_unknown_requests()
        return LocalFacts(
            save=float(
                self._wants_save
                or (first and self._save_at is not None and now >= self._save_at)
                or (first and self._switches.armed("save") is not None)
            ),
            stop=self._stop_switch() if first else 0.0,
            interrupted=float("SIGINT" in self._received),
            terminated=float("SIGTERM" in self._received),
            request=float(first and any(map(self._waits, REQUESTS))),
            minutes=(now - self._started) / 60 if first else 0.0,
            minutes_since_save=(now - self._saved) / 60 if first else 0.0,
        )

    def asked_to_stop(self) -> str:
        """Return why this rank knows that the run shall stop; '' if it knows of nothing. For waits between
        steps.

        Not collective: ranks may know different things.
        """
        facts = self.local_facts()
        return _reason(
            stop=self._name_of_stop(facts.stop),
            interrupted=facts.interrupted > 0,
            terminated=facts.terminated > 0,
        )

    def agree(self, numbers: list[float]) -> Facts:
        """Return the facts from the reduced numbers, equal on every rank.

        Collective over the peer if a request waits. The request files are removed, so that each is carried
        out once; that of a rewind by `settle`. A line that cannot be read is logged and left out.
        """
        save, stop, interrupted, terminated, request, minutes, since_save = numbers
        reason = _reason(
            stop=self._name_of_stop(stop), interrupted=interrupted > 0, terminated=terminated > 0
        )
        facts = Facts(
            save_requested=save > 0,
            stop_requested=reason != "",
            stop_reason=reason,
            minutes_running=minutes,
            minutes_since_save=since_save,
        )
        if save > 0:
            self._wants_save = False
            self._save_at = None
            if self._mesh.is_first:
                self._switches.take("save")
        if request > 0:
            mine = {name: self._take(name, keep=name == "rewind") for name in REQUESTS}
            taken = self._mesh.all_gather_object(mine)[0]
            self._rewind = taken["rewind"]
            facts = replace(
                facts,
                settings_requested=read_settings(taken["set"]),
                skip_requested=read_skips(taken["skip"]),
                rewind_requested=read_rewind(taken["rewind"]),
            )
            if taken["rewind"] and not facts.rewind_requested:
                self._remove_rewind()
        return facts

    def settle(self, facts: Facts, *, stops: bool) -> None:
        """Remove a request for a rewind that was answered; where a stop came first, the next start answers.

        stops: whether the step's verdict ends the run.
        """
        if facts.rewind_requested and not stops:
            self._remove_rewind()

    def _tell_waiting(self) -> None:
        """Warn of requests of before this start that change the samples: whoever asked may have forgotten."""
        for waits, does in waiting_requests(self._rundir):
            log.warning(
                "%s: this start %s after the first step that it makes. Stop it and remove the file if that "
                "is no longer wanted.",
                *(waits, does),
            )

    def _name_unknown_requests(self) -> None:
        """Warn once of each file in control/ that asks for nothing; the directory is listed when it
        changes.
        """
        directory = self._rundir.control_dir
        with suppress(OSError):  # it is missing, or a file was taken while it was listed
            changed_ns = directory.stat().st_mtime_ns
            if changed_ns == self._listed_ns:
                return
            self._listed_ns = changed_ns
            names = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
            for name in sorted(names - {*CONTROLS} - self._unknown):
                log.warning("control/%s asks for nothing: there are %s", name, ", ".join(CONTROLS))
            self._unknown = frozenset(names - {*CONTROLS})

    def restart_save_clock(self) -> None:
        """Restart the clock of saves, since a checkpoint was just taken or begun."""
        self._saved = time.monotonic()

    def save_in(self, seconds: float) -> None:
        """Ask for another save after `seconds`, since one failed, and let the clock wait for that
        one.
        """
        self._saved = time.monotonic()
        self._save_at = self._saved + seconds

    def close(self) -> None:
        """Restore the earlier signal handlers; in a process that now ends, ignore signals.

        Otherwise a second SIGTERM would give its own exit status to a process that has saved and stopped.
        """
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if self._ends_process else handler)

    def _stop_switch(self) -> float:
        """The armed stop switch as a number: 1 and its place among the directories; 0 where none is."""
        path = self._switches.armed("stop")
        return 0.0 if path is None else 1.0 + self._switches.directories.index(path.parent)

    def _name_of_stop(self, number: float) -> str:
        """The name of a stop switch by its number, which is rank 0's, for people; "" for 0."""
        if number <= 1.0:
            return "control/stop" if number else ""
        return str(self._switches.directories[int(number) - 1] / "stop")

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self._wants_save = True
            return
        self._received.append(signal.Signals(number).name)
        if self._received.count("SIGINT") > IMPATIENCE:
            raise KeyboardInterrupt

    def _take(self, name: str, *, keep: bool = False) -> str:
        """Return the content of a control file and remove it; '' on other ranks and without a file.

        An empty file that was just made is left, because its author is about to write it.
        keep: leave a file that is not empty.
        """
        path = self._rundir.control(name)
        if not self._mesh.is_first:
            return ""
        taken = path.with_name(f".taken-{name}")
        try:
            if path.stat().st_size == 0 and time.time() - path.stat().st_mtime < _WRITING_S:
                return ""
            content = _text(path)
            if keep and content:
                return content
            # Renamed and read again: what is asked meanwhile is a file of its own, and not removed unread.
            path.rename(taken)
            content = _text(taken)
            taken.unlink()
        except FileNotFoundError:
            return ""
        except OSError as refused:
            self._refuse(name, refused.strerror or str(refused))
            return ""
        return content

    def _remove_rewind(self) -> None:
        """Remove the request for a rewind that was answered; leave one that was made since."""
        path = self._rundir.control("rewind")
        with suppress(OSError):
            if self._mesh.is_first and _text(path) == self._rewind:
                path.unlink()

    def _waits(self, name: str) -> bool:
        """Whether there is a control file that can be read and removed; another is named once."""
        path = self._rundir.control(name)
        if _may(path, os.R_OK) and _may(path.parent, os.W_OK):
            return True
        if _may(path, os.F_OK):
            self._refuse(name, os.strerror(errno.EACCES))
        return False

    def _refuse(self, name: str, why: str) -> None:
        """Say once that a request is left alone: carried out and not removed, it would count at each step."""
        if name not in self._refused:
            self._refused.add(name)
            log.warning(
                "control/%s is not carried out, for it cannot be read or removed (%s). Remove it, or let the "
                "user that trains read it and write in %s.",
                name,
                why,
                self._rundir.control_dir,
            )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _may(path: Path, mode: int) -> bool:
    """Whether this process may do something with a file; unlike `Path.exists` it raises no OSError."""
    return os.access(path, mode, effective_ids=True)


def switches_of(rundir: RunDirectory, section: ControlSection) -> Switches:
    """Return the switches of a run: in its control directory, and in the directory that its recipe names."""
    return Switches.of_run(rundir, section.directory)


def refuse_when_stopped(rundir: RunDirectory, section: ControlSection, mesh: Mesh) -> None:
    """Raise StoppedBySwitch on every rank where the stop switch is armed. Collective over the peer.

    Rank 0 looks and says what it saw, so that the ranks cannot differ; rank 0's error has the message.
    """
    path = switches_of(rundir, section).armed("stop") if mesh.is_first else None
    note = f" ({note_of(path)})" if path and note_of(path) else ""
    seen = mesh.all_gather_object(f"{path}{note}" if path else "")[0]
    if not seen:
        return
    if path is None:  # another rank tells it
        raise StoppedBySwitch("")
    raise StoppedBySwitch(
        f"Nothing was trained: the switch {seen} is armed.",
        remedy=f"`{disarming(path, rundir)}` lets the run go on.",
    )


def _reason(*, stop: str, interrupted: bool, terminated: bool) -> str:
    """Why to stop, from what any rank has seen; empty for no reason. A signal may have reached only one."""
    if interrupted:
        return "signal SIGINT"
    if terminated:
        return "signal SIGTERM"
    return stop


def read_settings(text: str) -> tuple[tuple[str, str], ...]:
    """Return the `section.key = value` lines of a control/set file."""
    settings = []
    for line in _lines(text):
        key, equals, value = line.partition("=")
        if equals:
            settings.append((key.strip(), value.strip()))
        else:
            log.warning("control/set: %r is not 'section.key = value' and was left out", line)
    return tuple(settings)


def read_skips(text: str) -> tuple[tuple[int, int], ...]:
    """Return the `first:end` lines of a control/skip file: absolute sample ranges without their end."""
    skips = []
    for line in _lines(text):
        first, end = _span(line)
        if 0 <= first < end:
            skips.append((first, end))
        else:
            log.warning(
                "control/skip: %r is not 'first:end' with first < end, counts of a run, and was left out",
                line,
            )
    return tuple(skips)


def read_rewind(text: str) -> tuple[int, ...]:
    """`step first:end` of a control/rewind file, as (step, first, end); () for an empty one.

    The range of samples to leave out may be missing. Of several lines the last counts.
    """
    wanted: tuple[int, ...] = ()
    for line in _lines(text):
        step, _, samples = line.partition(" ")
        first, end = _span(samples.strip() or "0:0")
        if _count(step) >= 0 and 0 <= first <= end:
            wanted = (_count(step), first, end)
        else:
            log.warning("control/rewind: %r is not 'step' or 'step first:end' and was left out", line)
    return wanted


def _span(text: str) -> tuple[int, int]:
    """Return the numbers of `first:end`; -1 for each that is no count of a run."""
    first, _, end = text.partition(":")
    return _count(first.strip()), _count(end.strip())


def _count(text: str) -> int:
    is_count = text.isdecimal() and len(text) <= len(str(LARGEST_COUNT)) and int(text) <= LARGEST_COUNT
    return int(text) if is_count else -1


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())
