"""The chronicle of a run as Markdown: what went wrong, why, what was done, and what it cost."""

from __future__ import annotations

import getpass
import logging
import re
import threading
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType

from bloomery import durable
from bloomery.errors import BloomeryError, storage_error
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger.clock import read_steadily
from bloomery.operate.ledger.figures import duration
from bloomery.operate.ledger.operations import Event, time_of
from bloomery.operate.ledger.run_history import Incident
from bloomery.operate.ledger.run_ledger import RunLedger, read_ledger

log = logging.getLogger(__name__)

BY_HAND = "<!-- bloomery never changes what stands below this line -->"
_HEAD = "Written from the journal and operations.jsonl, anew at each incident; `bloomery note` adds to it."
_LONGEST, _MOST_LINES = 300, 12
_POLL_S, _JOIN_S = 1.0, 60.0
_PUNCTUATION = re.compile(r"([\\`*_{}\[\]<>#|~&!@$^]|:(?=//))")
_AT_BEGIN = re.compile(r"^(\d*)([-+=.)])")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_DOTTED = re.compile(r"(?<=www)\.", re.I)


def write_chronicle(rundir: RunDirectory, *, now: float | None = None) -> Path | None:
    """Write chronicle.md from the records of a run, and return its path; None where nothing was recorded.

    What people wrote below the line BY_HAND is kept. Raises StorageError.

    now: the present time, in seconds since 1970; None takes the clock.
    """
    ledger = read_ledger(rundir, now=now, ranks="first")
    if ledger is None:
        return None
    path = rundir.chronicle
    text = chronicle_text(ledger, list(read_steadily(rundir.operations)), name=rundir.name)
    try:
        notes = _written_by_hand(path)
        whole = f"{text}\n{BY_HAND}\n".encode(errors="replace") + notes.encode(errors="surrogateescape")
        if not path.exists() or path.read_bytes() != whole:
            durable.write_whole(path, whole)
    except OSError as error:
        raise storage_error(error, path=path, doing="Writing the chronicle") from error
    return path


def add_note(rundir: RunDirectory, text: str, *, by: str = "") -> None:
    """Record a person's note; the chronicle shows it at its time. Raises StorageError."""
    with Journal(rundir.operations, is_shared=True, is_needed=True) as journal:
        journal.write("note", incarnation=0, step=0, text=text, by=by or _user())


def chronicle_text(ledger: RunLedger, operations: Sequence[Event], *, name: str) -> str:
    """Return the chronicle as Markdown. Texts of records stay text, whatever Markdown or HTML they hold."""
    history = ledger.history
    entries = [
        (incident.time, _incident_text(incident, seconds, goodput))
        for incident, seconds, goodput in zip(
            history.incidents, ledger.incident_s, ledger.goodput_at_incident, strict=True
        )
    ]
    entries += [(time, f"### {_clock(time)} · {as_text(change)}\n") for time, change in history.changes]
    entries += [
        (time, _note_text(event, time))
        for event in operations
        if event["event"] == "note" and (time := time_of(event)) is not None
    ]
    parts = [f"# Chronicle of {as_text(name)}\n", f"{_HEAD}\n", _summary(ledger)]
    parts += [text for _, text in sorted(entries, key=lambda entry: entry[0])]
    return "\n".join(parts)


def as_text(words: str) -> str:
    """Return one line of Markdown that shows `words` as they are: no markup, links, HTML or further lines."""
    line = _CONTROL.sub(" ", words)
    line = line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
    line = _DOTTED.sub(r"\\.", _PUNCTUATION.sub(r"\\\1", line.strip()))
    return _AT_BEGIN.sub(r"\1\\\2", line)


def as_block(lines: Iterable[str]) -> str:
    """Return a fenced block that shows lines as they are."""
    shown = [_CONTROL.sub(" ", line)[:_LONGEST] for text in lines for line in text.splitlines() or [""]]
    if len(shown) > _MOST_LINES:
        shown = [*shown[: _MOST_LINES - 1], f"… {len(shown) - _MOST_LINES + 1} further lines"]
    longest = max((len(run) for line in shown for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join([f"{fence}text", *shown, fence])


def _summary(ledger: RunLedger) -> str:
    history = ledger.history
    rows = [f"- from {_clock(ledger.begin)} to {_clock(ledger.end)}: {duration(ledger.end - ledger.begin)}"]
    rows.append(f"- step {history.step:,}, {history.kept_tokens:,} tokens")
    rows.append(
        f"- effective time {ledger.effective_time:.1%}, ETTR {ledger.ettr:.1%}, goodput of tokens "
        f"{ledger.token_goodput():.1%} (first rank; `bloomery report` has all)"
    )
    for cause, (number, seconds, steps) in ledger.by_cause().items():
        rows.append(f"- {as_text(cause)}: {number} ×, {duration(seconds)}, {steps:,} steps lost")
    return "\n".join(rows) + "\n"


def _incident_text(incident: Incident, seconds: float, goodput: float) -> str:
    whom = f": {as_text(incident.culprit)}" if incident.culprit else ""
    times = f" ({incident.times} times in a row)" if incident.times > 1 else ""
    surely = "sure" if incident.sure else "likely"
    lines = [incident.summary, *(line for line in incident.evidence if line != incident.summary)]
    cost = f"{duration(seconds)}, {incident.steps_lost:,} steps"
    return "\n".join(
        [
            f"### {_clock(incident.time)} · {as_text(incident.cause)}{whom}{times}\n",
            f"Problem, at step {incident.step:,}, and its evidence:\n",
            as_block(line for line in lines if line),
            "",
            f"- diagnosis: {as_text(incident.cause)}, {surely}",
            f"- done: {as_text(incident.action) or 'nothing'}",
            *([f"- what helps: {as_text(incident.remedy)}"] if incident.remedy else []),
            f"- cost: {cost}; effective time so far {goodput:.1%}\n",
        ]
    )


def _note_text(event: Event, time: float) -> str:
    lines = str(event.get("text", "")).splitlines() or [""]
    quoted = "\n".join(f"> {as_text(line)}".rstrip() for line in lines)
    return f"### {_clock(time)} · note by {as_text(str(event.get('by', '')))}\n\n{quoted}\n"


def _written_by_hand(path: Path) -> str:
    """Return what people wrote; bytes that are no UTF-8 stay, as surrogates."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return "\n## Notes by hand\n"
    is_all = text.endswith(BY_HAND)  # an editor may write no newline at the end
    _, line, notes = (f"\n{text}\n" if is_all else f"\n{text}").partition(f"\n{BY_HAND}\n")
    # a file without the line was written by a person: all of it is kept
    return notes if line else f"\n{text}"


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "somebody"


class ChronicleKeeper:
    """Writes the chronicle from a thread when operations.jsonl has grown, and once more at its end.

    A failure to write is logged, for it must not disturb a run.
    """

    def __init__(self, rundir: RunDirectory) -> None:
        self._rundir, self._closed = rundir, threading.Event()
        self._thread = threading.Thread(target=self._run, name="chronicle", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write the chronicle and stop the thread."""
        self._closed.set()
        self._thread.join(_JOIN_S)

    def __enter__(self) -> ChronicleKeeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        written = self._size()
        while not self._closed.wait(_POLL_S):
            size = self._size()
            if size != written:
                self._write()
                written = size
        self._write()

    def _write(self) -> None:
        try:
            write_chronicle(self._rundir)
        except BloomeryError as refused:
            log.warning("the chronicle was not written: %s", refused)
        except Exception:
            # The edge of a thread: whatever the records hold, the run goes on.
            log.exception("the chronicle was not written")

    def _size(self) -> int:
        try:
            return self._rundir.operations.stat().st_size
        except OSError:
            return 0
