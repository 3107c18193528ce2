"""The exceptions of the program, each with a remedy for the user; an OSError becomes a StorageError."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bloomery.frozen import dataclass

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_GONE = {errno.ENOENT, errno.ESTALE}
_NOT_A_DIRECTORY = {errno.EEXIST, errno.ENOTDIR}


# A path made of an address has one slash.
_LOGIN = re.compile(r"(:/{1,2})[^/@\s'\"]+@")


def without_logins(text: str) -> str:
    """Return a text without the user names and passwords of the addresses in it."""
    return _LOGIN.sub(r"\1***@", text)


class BloomeryError(Exception):
    """An error that a user can fix. It is printed as a message and a remedy, without a traceback.

    Logins within addresses are left out of both.
    """

    exit_status = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        message = without_logins(message)
        super().__init__(message)
        self.message = message
        self.remedy = without_logins(remedy)

    def __str__(self) -> str:
        return f"{self.message}\n  {self.remedy}" if self.remedy else self.message


def remedy_in(text: str) -> str:
    """Return the remedy in the text of an error, `TypeName: message` with the remedy below; "" for none.

    What other libraries write below their messages is none.
    """
    name = text.partition(":")[0]
    kind = globals().get(name)
    is_ours = isinstance(kind, type) and issubclass(kind, BloomeryError)
    lines = text.partition("\n  ")[2].splitlines()
    return lines[0].strip() if is_ours and lines else ""


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake in what the user wrote.

    key: the setting or option.
    value: what was written; None where nothing was.
    source: where it was written.
    problem, remedy: what is wrong, and what to do.
    """

    key: str
    value: object
    source: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f" = {self.value!r}"
        return f"{self.key}{shown}  ({self.source}): {self.problem}\n      {self.remedy}"


class ConfigError(BloomeryError):
    """All mistakes in a recipe or on the command line. of: what holds the mistakes, for the message."""

    exit_status = 2

    def __init__(self, mistakes: Sequence[Mistake], *, of: str = "the recipe") -> None:
        self.mistakes = tuple(mistakes)
        count = len(self.mistakes)
        lines = "\n".join(f"  {number}. {mistake}" for number, mistake in enumerate(self.mistakes, 1))
        super().__init__(f"{count} mistake{'s' if count != 1 else ''} in {of}:\n{lines}")


class UsageError(BloomeryError):
    """A command line whose words do not go together, or cannot be meant; nothing was begun."""

    exit_status = 2


class DataError(BloomeryError):
    """A corpus, a tokenizer or an indexed file that cannot be used as it is."""


class OriginGone(DataError):
    """The text or the tokenizer that data are made of is not there; a run that has its data needs neither."""


class CheckpointError(BloomeryError):
    """A checkpoint that is missing, damaged, or of another model."""


class ExportRefused(CheckpointError):
    """The exported model gave other logits than the model it was made from, so it was not kept."""


class RunBusy(BloomeryError):
    """Another process that is alive holds the run lock."""


class StorageError(BloomeryError):
    """The disk refused: no space, no permission, or the directory is gone."""


class TrainingFailed(BloomeryError):
    """Training cannot go on; what was saved is safe."""


class StoppedBySwitch(BloomeryError):
    """The run's stop switch is armed, so nothing was trained; a queue may go on to its next task."""

    exit_status = 0


class RankLost(TrainingFailed):
    """Another rank of this peer is gone. The launcher does not report this rank as the one that failed."""

    exit_status = 3


class ReportedElsewhere(RankLost):
    """Another rank reports the error, so this one ends without a message."""

    def __init__(self) -> None:
        super().__init__("")


class PeerError(BloomeryError):
    """Raised between peers: one is gone, refused a request, or sent what cannot be trusted."""


class CoordinatorError(BloomeryError):
    """The coordinator of a run between peers refused, or holds what no peer of this version wrote."""


class CoordinatorAway(CoordinatorError):
    """No endpoint of the coordinator answered in time. What was asked may be asked again later."""


def of_disk(error: OSError) -> StorageError | None:
    """Return a disk's refusal of a file as a StorageError; None for any other error of the system."""
    known = error.errno in _FULL | _FORBIDDEN | _GONE | _NOT_A_DIRECTORY | {errno.EISDIR, errno.ENAMETOOLONG}
    if not known or not isinstance(error.filename, str | os.PathLike):
        return None
    return storage_error(error, path=Path(error.filename), doing="The command")


def is_full(error: BaseException | None) -> bool:
    """Say whether an error is that of a full disk, or of a quota or limit that is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


def storage_error(error: OSError, *, path: Path, doing: str, bytes_needed: int | None = None) -> StorageError:
    """Return a disk's error as a StorageError with the path and a remedy. Raise it `from error`.

    doing: what failed, as the beginning of a sentence: "Saving a checkpoint".
    bytes_needed: what was to be written, for the message of a full disk; None where it is not known.
    """
    message = f"{doing} failed at {path}: {error.strerror or error}"
    if error.errno == errno.ENOSPC and _has_no_inodes(path):
        free = f"{_megabytes(free_bytes(path))} free"
        return StorageError(
            f"{message} (no inodes are left: the file system holds as many files as it can; {free})",
            remedy="Remove files that nobody needs (df -i counts them); space alone does not help.",
        )
    if error.errno in _FULL:
        message += _space(path, bytes_needed)
        remedy = "Free some space or raise the quota, then start again. Files that were finished are intact."
        if error.errno == errno.EFBIG:
            remedy = "A limit on file sizes is set (ulimit -f): raise it, then start again."
    elif error.errno in _FORBIDDEN:
        remedy = "Make it writable, or choose another directory (for a run: --run DIRECTORY)."
    elif error.errno in _GONE:
        remedy = "Is the path right, and the disk still mounted? Bring it back, or choose another."
    elif error.errno == errno.EISDIR:
        remedy = "A directory is where a file is needed: move it away, or name a file."
    elif error.errno in _NOT_A_DIRECTORY:
        remedy = "A file is where a directory is needed: move it away, or choose another directory."
    else:
        remedy = "Check the disk (dmesg, df), then start again. Files that were finished are intact."
    return StorageError(message, remedy=remedy)


def require_space(path: Path, *, doing: str, bytes_needed: int) -> None:
    """Raise StorageError, before the first byte is written, where `bytes_needed` do not fit on the disk."""
    if free_bytes(path) >= bytes_needed:
        return
    raise StorageError(
        f"{doing} was refused at {path}: no space" + _space(path, bytes_needed),
        remedy="Free some space, or lower checkpoint.keep_last; earlier checkpoints are untouched.",
    )


def free_bytes(path: Path) -> int:
    """Return the bytes that an ordinary user may still write on the disk where `path` is, or would be."""
    facts = os.statvfs(nearest_existing(path))
    return facts.f_bavail * facts.f_frsize


def _has_no_inodes(path: Path) -> bool:
    """Say whether the file system holds as many files as it can, however many bytes are free."""
    try:
        facts = os.statvfs(nearest_existing(path))
    except OSError:
        return False
    return facts.f_files > 0 and facts.f_favail == 0


def nearest_existing(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _space(path: Path, bytes_needed: int | None) -> str:
    needed = "" if bytes_needed is None else f"{_megabytes(bytes_needed)} needed, "
    try:
        return f" ({needed}{_megabytes(free_bytes(path))} free)"
    except OSError:  # the directory is gone too: the message stands without the figure
        return f" ({needed}free space unknown)"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


class ThreadEnded(CoordinatorError):
    """An unexpected error ended a thread without which this peer cannot take part in the run."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(
            f"the thread '{name}' of this peer ended: {type(error).__name__}: {str(error)[:500]}",
            remedy="This is a mistake in bloomery, not in your run: please report it with the log.",
        )


def reporting_errors(
    run: Callable[[], None], *, name: str, on_error: Callable[[CoordinatorError], None]
) -> Callable[[], None]:
    """Return a function for a thread, which calls `run` and reports the error that ended it.

    So nobody goes on as if the thread still worked.

    name: the thread's, for the message.
    on_error: called once with the error; not called if `run` returned.
    """

    def guarded() -> None:
        try:
            run()
        except CoordinatorError as error:
            on_error(error)
        except Exception as error:
            import logging  # here, because every command imports this module

            logging.getLogger(__name__).exception("the thread '%s' ended", name)
            on_error(ThreadEnded(name, error))

    return guarded
