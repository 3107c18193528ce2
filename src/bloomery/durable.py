"""Files that outlive a power cut: the only module that calls fsync, and the only one that calls flock.

A file is durable when three things happened in this order: its bytes were synced, it got its name, and the
directory that holds the name was synced. Without the first, a power cut leaves an empty file under the right
name; without the last, it leaves no file at all. A function here that returns has done all that it says.

`hold_directory` and `remove_abandoned` are for temporary directories: the process that makes one locks it,
and later processes remove those whose process has ended.

Every function raises OSError; `errors.storage_error` makes a message for people of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_DRAFT = ".draft"
_LOCK_POLL_S = 0.1
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def write_whole(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Replace a file, or make it: a reader, also after a power cut, finds the old content or the new one.

    Directories that are missing are made. mode: permissions of the new file, less the process's umask.
    """
    make_directory(path.parent)
    draft = _draft_of(path)
    try:
        write_new(draft, content, mode=mode)
        replace(draft, path)
    except BaseException as error:
        _remove_quietly(draft)
        if isinstance(error, OSError) and error.filename in (None, str(draft)):
            error.filename = str(path)  # who tells the error names the file that was asked for
        raise


def write_whole_unsynced(path: Path, content: str) -> None:
    """Replace a file as `write_whole` does, but without a sync: after a power cut it may be empty or missing.

    For what tells of living processes (a heartbeat, who holds a lock), and for memory file systems. Of a path
    in it that is no UTF-8, `?` stands for what cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft_of(path)
    try:
        draft.write_text(content, encoding="utf-8", errors="replace")
        draft.replace(path)
    except BaseException:
        _remove_quietly(draft)
        raise


def refresh(path: Path, content: str) -> None:
    """Replace a process's sign of life as `write_whole_unsynced` does; on a full disk, write over it.

    A full disk has no room for a draft, and lets a file's own blocks be written again: so who is alive still
    shows it. A reader may then meet half of the text, and where it became shorter, blanks behind it.
    """
    try:
        write_whole_unsynced(path, content)
    except OSError as refused:
        if refused.errno not in _FULL or not path.exists():
            raise
        _write_over(path, content.encode(errors="replace"))


def write_new(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Create a file with this content and fsync it. Raises FileExistsError if the path exists.

    The directory's entry for it is durable only after `sync_directory` of its parent, which a caller that
    writes several files there calls once, at the end.
    """
    data = memoryview(content.encode() if isinstance(content, str) else content)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        while data:
            data = data[os.write(file, data) :]
        sync_file(file)
    except BaseException as error:
        _remove_quietly(path)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # the system names no file in an error of one that is open
        raise
    finally:
        os.close(file)


def create(path: Path, content: bytes | str) -> None:
    """Make a durable file, name included. All but one of several who try at once get FileExistsError.

    It gets its name when its bytes are synced, so that who dies meanwhile leaves none that is empty, which
    would keep the others out for ever. A file system without hard links cannot promise that.
    """
    draft = _draft_of(path)
    write_new(draft, content)
    try:
        os.link(draft, path)
    except FileExistsError:
        if draft.stat().st_nlink < 2:  # else NFS has lost its answer, asked again, and met its own link
            raise
    except OSError as refused:
        if refused.errno not in _NO_LINKS:
            raise
        write_new(path, content)
    finally:
        _remove_quietly(draft)
    sync_directory(path.parent)


@contextmanager
def open_new(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing, and sync it when the block ends well; else remove it.

    Raises FileExistsError. Its name is durable only after a `sync_directory`.
    """
    with path.open("xb") as file:
        try:
            yield file
            file.flush()
            sync_file(file.fileno())
        except BaseException:
            _remove_quietly(path)
            raise


def append(path: Path, content: bytes | str) -> None:
    """Add to the end of a file, which is made where it is missing, and sync it."""
    data = memoryview(content.encode() if isinstance(content, str) else content)
    is_new = not path.exists()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        while data:
            data = data[os.write(file, data) :]
        sync_file(file)
    finally:
        os.close(file)
    if is_new:
        sync_directory(path.parent)


def replace(source: Path, target: Path) -> None:
    """Give a file or a directory another name, durably. What is in it was synced before (see `publish`).

    A file takes the place of another; a directory only that of an empty one.
    """
    source.rename(target)
    sync_directory(target.parent)
    if source.parent != target.parent:
        sync_directory(source.parent)


def publish(draft: Path, target: Path) -> None:
    """Sync a file, or a directory with all that is in it, and then give it its name, durably."""
    sync_tree(draft)
    replace(draft, target)


def make_directory(path: Path) -> None:
    """Make a directory and the missing ones above it, durably. Harmless where it is there already."""
    if path.is_dir():
        return
    missing = []
    place = path
    while not place.exists():
        missing.append(place)
        place = place.parent
    path.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync_directory(made.parent)


def sync_file(file: int) -> None:
    """Sync the bytes of an open file.

    After an error nobody calls it again for that file: the kernel forgets the error, and the second call
    would say that all is well.
    """
    os.fsync(file)


def sync_directory(path: Path) -> None:
    """Make what was created, renamed or removed in a directory survive a power cut.

    Some file systems (SMB) sync no directory, and say so: there the server alone decides.
    """
    try:
        _sync_path(path)
    except OSError as refused:
        if refused.errno not in _NO_DIRECTORY_SYNC:
            raise


def sync_tree(path: Path) -> None:
    """Sync a file; or all that is in a directory, and then itself. Symbolic links are not followed."""
    if not path.is_dir():
        _sync_path(path)
        return
    for directory, _, names in os.walk(path, topdown=False, onerror=_raised):
        for name in names:
            file = Path(directory, name)
            if not file.is_symlink():
                _sync_path(file)
        sync_directory(Path(directory))


def remove_drafts(directory: Path) -> None:
    """Remove the temporary files of killed writers from a directory, in which no writer is at work now."""
    for draft in directory.glob(f".*{_DRAFT}"):
        draft.unlink(missing_ok=True)


class LockHeld(Exception):
    """Another process holds a lock. owner: what it wrote about itself, empty where it wrote nothing."""

    def __init__(self, path: Path, owner: str) -> None:
        super().__init__(f"{path} is held by {owner or 'another process'}")
        self.owner = owner


def try_lock(file: int, *, shared: bool = False) -> bool:
    """Lock an open file or directory, and return True; return False where another process holds the lock.

    The lock ends when all descriptors that a process and its children have of this opening are closed.
    shared: several may hold it at once. Raises OSError where the file system has no locks.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: int, *, timeout_s: float, shared: bool = False, poll_s: float = 0.01) -> bool:
    """Lock an open file as `try_lock` does, within `timeout_s`; False where it was held all that time."""
    deadline_s = time.monotonic() + timeout_s
    while not try_lock(file, shared=shared):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(poll_s)
    return True


def unlock(file: int) -> None:
    """Let a lock go while the file stays open."""
    fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked(
    path: Path, *, owner: str, timeout_s: float = 0.0, on_wait: Callable[[str], None] = lambda owner: None
) -> Iterator[int]:
    """Hold the lock of a file during the block, and write in it who does; yields its descriptor.

    owner: a word for people about this process. on_wait: called once with the owner that is waited for.
    Raises LockHeld where another process has it still after `timeout_s`. The directory is made, and made
    again where the last owner removed it.
    """
    deadline_s = time.monotonic() + timeout_s
    has_told = False
    while True:
        make_directory(path.parent)
        with path.open("ab") as file:
            if not try_lock(file.fileno()):
                holder = _content(path)
                if time.monotonic() >= deadline_s:
                    raise LockHeld(path, holder)
                if not has_told:
                    on_wait(holder)
                    has_told = True
                time.sleep(_LOCK_POLL_S)
            elif _is_still_there(file.fileno(), path):  # else its last owner removed it, directory and all
                file.truncate(0)
                file.write(owner.encode())
                file.flush()
                yield file.fileno()
                return


def _draft_of(path: Path) -> Path:
    """A name beside `path` that no other process or thread takes: two writers never share a draft."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{_DRAFT}")


def _write_over(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        content = content.ljust(os.fstat(file).st_size)
        if os.write(file, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(file)


def _remove_quietly(path: Path) -> None:
    with suppress(OSError):  # the error that ended the writing is the one to tell
        path.unlink(missing_ok=True)


def _sync_path(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        sync_file(file)
    finally:
        os.close(file)


def _raised(error: OSError) -> None:
    raise error


def _content(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text(errors="replace")
    return ""


def _is_still_there(file: int, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(file).st_ino
    except FileNotFoundError:
        return False


_YOUNG_S = 60.0
"""The seconds in which a new directory may not yet have been locked by the process that made it."""


def hold_directory(directory: Path) -> int | None:
    """Lock a directory until the returned descriptor is closed.

    Returns None where another process has locked it or its file system has no locks.
    """
    file = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with suppress(OSError):
        if try_lock(file):
            return file
    os.close(file)
    return None


def remove_abandoned(root: Path, prefix: str) -> None:
    """Remove this user's directories in `root` that begin with `prefix` and that no process has locked."""
    for directory in root.glob(f"{prefix}*"):
        try:
            status = directory.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG_S:
                continue
            lock = hold_directory(directory)
        except OSError:  # another process has removed it
            continue
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
