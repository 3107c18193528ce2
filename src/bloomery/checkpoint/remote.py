"""Objects elsewhere: s3://, gs://, az:// and file:// through obstore, and the checkpoints among them.

Credentials come from the environment or the machine (AWS_ACCESS_KEY_ID or the machine's role,
GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY, …), never from a recipe, and no message of this
module shows one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import xxhash

from bloomery.checkpoint.manifest import MANIFEST, parse_name
from bloomery.checkpoint.source import Ranges, Source
from bloomery.config.backup import SCHEMES
from bloomery.config.offline import refuse_network
from bloomery.errors import CheckpointError, StorageError
from bloomery.events.incarnation import Base, bases_of, visible

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CHECKPOINTS = "checkpoints"
_CHUNK_BYTES = 16 << 20
_SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|KEY|CREDENTIAL|SAS", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"(?i)(sig|signature|x-amz-signature|x-amz-credential|token)=[^&\s\"')]+")
_SHOWN_CHARACTERS = 400
_DENIED = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "credential", "latest/api/token")
"""What stores say where credentials are missing or wrong; the last is asked of a machine that has no role."""


def is_remote(text: str) -> bool:
    """Say whether a command's argument is a URL of objects rather than a path."""
    return text.partition("://")[0] in SCHEMES and "://" in text


@dataclass(frozen=True, kw_only=True)
class Stat:
    """An object's size, and a mark that changes when it is written again."""

    bytes: int
    mark: str


class Remote:
    """The objects under one URL, by key. Methods raise OSError: FileNotFoundError where there is none."""

    def __init__(self, url: str, *, retry_s: float = 60.0) -> None:
        self.url = url.rstrip("/")
        self._store = _opened(self.url, retry_s=retry_s)

    def put(self, key: str, content: Path | bytes) -> None:
        """Write an object, large ones in parts. Nobody sees it before it is whole."""
        import obstore

        with _told(self.place(key)):
            obstore.put(self._store, key, content)

    def stat(self, key: str) -> Stat:
        """Return an object's size and mark."""
        import obstore

        with _told(self.place(key)):
            found = obstore.head(self._store, key)
        return Stat(bytes=found["size"], mark=str(found["e_tag"] or found["last_modified"]))

    def content(self, key: str, *, begin: int = 0, end: int | None = None) -> memoryview:
        """Return an object's bytes [begin, end), fewer where it ends before."""
        import obstore

        with _told(self.place(key)):
            if begin == 0 and end is None:
                return memoryview(obstore.get(self._store, key).bytes())
            size = obstore.head(self._store, key)["size"] if end is None else end
            if begin >= size:
                return memoryview(b"")
            return memoryview(obstore.get_range(self._store, key, start=begin, end=size))

    def digest(self, key: str) -> str:
        """Return the xxh3-128 of an object, read back from its beginning to its end."""
        import obstore

        hasher = xxhash.xxh3_128()
        with _told(self.place(key)):
            for chunk in obstore.get(self._store, key).stream(min_chunk_size=_CHUNK_BYTES):
                hasher.update(memoryview(chunk))
        return hasher.hexdigest()

    def keys(self, prefix: str) -> list[str]:
        """Return the keys under a prefix, which ends at a `/`, sorted."""
        import obstore

        with _told(self.place(prefix)):
            return sorted(found["path"] for batch in obstore.list(self._store, prefix) for found in batch)

    def delete(self, key: str) -> None:
        """Remove an object."""
        import obstore

        with _told(self.place(key)):
            obstore.delete(self._store, key)

    def place(self, key: str = "") -> str:
        """Return an object's URL, for messages."""
        return f"{self.url}/{key}" if key else self.url

    @property
    def handle(self) -> ObjectStore:
        """The store, for ranged reads."""
        return self._store


class RemoteCheckpoint:
    """A checkpoint among objects, as a `Source`: what is read of it is fetched, and nothing else."""

    def __init__(self, remote: Remote, prefix: str) -> None:
        self._remote, self._prefix = remote, prefix.strip("/")

    @property
    def name(self) -> str:
        """The checkpoint's own name."""
        return (self._prefix or self._remote.url).rsplit("/", 1)[-1]

    def place(self, file: str = "") -> str:
        """Return the URL of a file, or of the checkpoint."""
        return self._remote.place(self._key(file))

    def content(self, file: str, *, at_most: int) -> bytes:
        """Return the first `at_most` bytes of a file."""
        size = min(at_most, self._remote.stat(self._key(file)).bytes)
        return bytes(self._remote.content(self._key(file), end=size)) if size else b""

    def size(self, file: str) -> int:
        """Return a file's bytes."""
        return self._remote.stat(self._key(file)).bytes

    def open(self, file: str) -> Ranges:
        """Open a file: ask for its size, so that a missing one is found now."""
        return _RemoteFile(self._remote, self._key(file))

    def _key(self, file: str) -> str:
        return "/".join(part for part in (self._prefix, file) if part)


def remote_checkpoints(remote: Remote, *, abandoned: bool = False) -> list[RemoteCheckpoint]:
    """Return the committed checkpoints of a backed-up run, oldest first. Raises OSError, CheckpointError.

    abandoned: also those that a rewind left behind, as far as its incarnations were copied, too.
    """
    found: list[tuple[Base, RemoteCheckpoint]] = []
    for key in remote.keys(f"{CHECKPOINTS}/"):
        _, _, rest = key.partition("/")
        name, _, file = rest.partition("/")
        parsed = parse_name(name)
        if file == MANIFEST and parsed is not None:
            found.append((parsed, RemoteCheckpoint(remote, f"{CHECKPOINTS}/{name}")))
    if found and not abandoned:
        shown = visible((base for base, _ in found), bases_of(remote_incarnations(remote)))
        found = [item for item in found if item[0] in shown]
    return [checkpoint for _, checkpoint in sorted(found, key=lambda item: item[0])]


def remote_incarnations(remote: Remote) -> dict[str, bytes]:
    """Return the records of a backed-up run's incarnations, by URL. Raises OSError."""
    records = {}
    for key in remote.keys("incarnations/"):
        name = key.rpartition("/")[2]
        if name.endswith(".json") and name.removesuffix(".json").isdecimal():
            records[remote.place(key)] = bytes(remote.content(key))
    return records


def remote_source(url: str) -> Source:
    """Return the checkpoint at a URL, or the newest of its run. Raises CheckpointError, StorageError."""
    remote = Remote(url)
    try:
        if parse_name(url.rstrip("/").rsplit("/", 1)[-1]) is not None:
            return RemoteCheckpoint(remote, "")
        found = remote_checkpoints(remote)
    except OSError as error:
        raise remote_failure(error, doing="Looking for checkpoints") from error
    if not found:
        raise CheckpointError(
            f"{url} holds no finished checkpoint", remedy="Give the URL of a run's backup, or of one of it."
        )
    return found[-1]


def remote_failure(error: OSError, *, doing: str) -> StorageError:
    """Return an error of a remote store as one for people. Raise it `from error`."""
    if isinstance(error, FileNotFoundError):
        remedy = "Is the URL right?"
    elif isinstance(error, PermissionError):
        remedy = (
            "Credentials are missing, wrong, or not allowed to do this. They come from the environment "
            "(for s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role of the machine)."
        )
    else:
        remedy = "Is the store reachable from here, and does the bucket exist? What is saved here is kept."
    return StorageError(f"{doing} failed: {error.strerror or error}", remedy=remedy)


def without_secrets(text: str) -> str:
    """Return a message without the credentials of this process's environment, and signatures of URLs."""
    for name, value in os.environ.items():
        if len(value) >= 4 and _SECRET_NAMES.search(name):
            text = text.replace(value, "***")
    return _SECRET_IN_URL.sub(r"\1=***", text)


class _RemoteFile:
    """One object, read in ranges. Nothing is cached, and nothing asked for beyond its end."""

    def __init__(self, remote: Remote, key: str) -> None:
        self._remote, self._key = remote, key
        self._bytes = remote.stat(key).bytes

    def read_into(self, views: Sequence[memoryview], *, begin: int) -> int:
        end = min(begin + sum(map(len, views)), self._bytes)
        content = self._remote.content(self._key, begin=begin, end=end) if begin < end else memoryview(b"")
        position = 0
        for view in views:
            part = content[position : position + len(view)]
            view[: len(part)] = part
            position += len(part)
        return position

    def __enter__(self) -> _RemoteFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is open."""


def _opened(url: str, *, retry_s: float) -> ObjectStore:
    scheme = url.partition("://")[0]
    if scheme not in SCHEMES:
        raise CheckpointError(
            f"{without_secrets(url)} is no place for objects", remedy=f"One of {', '.join(SCHEMES)}://…"
        )
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    options: dict[str, Any] = {}  # Any: obstore's own mappings
    if scheme == "file":
        options["mkdir"] = True
    else:
        refuse_network(f"reach {without_secrets(url)}", remedy="Copy it by way of a disk: file:///path.")
        plain = os.environ.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT", "")).startswith("http://")
        options["client_options"] = {
            "connect_timeout": timedelta(seconds=10),
            "timeout": timedelta(seconds=300),
            "allow_http": plain,
        }
        options["retry_config"] = {"max_retries": 4, "retry_timeout": timedelta(seconds=retry_s)}
    try:
        return from_url(url, **options)
    except (BaseError, ValueError, OSError) as error:
        raise StorageError(
            f"{without_secrets(url)} cannot be used: {_short(str(error))}",
            remedy="Is the URL right, and are the credentials in the environment?",
        ) from error


@contextmanager
def _told(place: str) -> Iterator[None]:
    """Turn what obstore raises into an OSError of one line."""
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise OSError(errno.EIO, f"{place}: {_short(str(error))}") from error
        raise FileNotFoundError(errno.ENOENT, f"{place} does not exist") from error
    except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
        raise PermissionError(errno.EACCES, f"{place}: {_short(str(error))}") from error
    except (BaseError, OSError) as error:
        text = _short(str(error))
        denied = any(word in text for word in _DENIED)
        kind = PermissionError if denied else OSError
        raise kind(errno.EACCES if denied else errno.EIO, f"{place}: {text}") from error


def _short(text: str) -> str:
    """Return the line of an error that says what happened: a code and a message where the store gave them."""
    code, message = re.search(r"<Code>(.*?)</Code>", text), re.search(r"<Message>(.*?)</Message>", text)
    if code is not None:
        text = code[1] + (f": {message[1]}" if message is not None else "")
    line = " ".join(text.partition("Debug source")[0].split())
    return without_secrets(line)[:_SHOWN_CHARACTERS]
