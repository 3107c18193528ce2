"""Turns object-store errors into exceptions with one-line messages that show no credentials."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bloomery.errors import StorageError, storage_error

_SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|KEY|CREDENTIAL|SAS", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"(?i)(sig|signature|x-amz-signature|x-amz-credential|token)=[^&\s\"')]+")
_SHOWN_CHARACTERS = 400
_FULL = "No space left on device"
"""The error text of a full file system behind a file:// URL: to try again makes no room."""
WRONG_CREDENTIALS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "credential", "latest/api/token")
_DENIED = (*WRONG_CREDENTIALS, "AccessDenied")
"""Texts in errors of stores when credentials are missing or wrong; the last: on a machine without a role."""
_BEYOND = re.compile(
    r"\b416 (Requested )?Range Not Satisfiable|InvalidRange|range was invalid", re.IGNORECASE
)
"""Texts in errors of bytes that begin at the end of an object, or beyond it."""
_TIMED_OUT = re.compile(r"timed out|operation timeout|deadline exceeded|\b(50[0234]|429)\b", re.IGNORECASE)
"""Texts in errors of a service of credentials that is slow or busy: it is asked again."""


class StoreUnreachable(OSError):
    """The store was not reached, or denied access. Says nothing of the object: it may be intact."""


class AccessDenied(StoreUnreachable, PermissionError):
    """Credentials are missing, wrong, or not allowed to do this."""


class MissingOrDenied(AccessDenied):
    """The object is not there, or may not be read: without the right to list, stores do not say which."""


class PermanentStoreError(StoreUnreachable):
    """An error that no retry helps against, such as a missing bucket or a full disk."""


class BeyondEnd(PermanentStoreError):
    """Bytes were asked for that begin at the end of an object, or beyond it."""


class LocalFileError(OSError):
    """A file here that was to be sent cannot be read: no store is to blame. `filename` names it."""


def storage_failure(error: OSError, *, doing: str) -> StorageError:
    """Return an error of a remote store as a StorageError with a remedy. Raise it `from error`.

    An error with a file's name is that of a disk here, since errors of stores have none.
    """
    if isinstance(error.filename, str):
        return storage_error(error, path=Path(error.filename), doing=doing)
    if isinstance(error, FileNotFoundError):
        remedy = "Is the URL right?"
    elif error.errno == errno.ENOSPC:
        remedy = "The disk there is full: free some space, then start again. What is saved here is kept."
    elif isinstance(error, MissingOrDenied):
        remedy = (
            "The object is missing, or may not be read: without the right to list (s3:ListBucket) a store "
            "does not say which. Give the credentials that right, or check that they are the right ones."
        )
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


@contextmanager
def as_os_error(place: str) -> Iterator[None]:
    """Turn what obstore raises into an OSError with a one-line message. place: the URL, for the message."""
    from obstore import exceptions

    try:
        yield
    except LocalFileError:
        raise
    except (FileNotFoundError, exceptions.NotFoundError) as error:
        if "NoSuchBucket" in str(error):
            raise PermanentStoreError(errno.EIO, f"{place}: {short_text(str(error))}") from error
        raise FileNotFoundError(errno.ENOENT, f"{place} does not exist: not found") from error
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
        raise AccessDenied(errno.EACCES, f"{place}: {short_text(str(error))}") from error
    except (exceptions.InvalidPathError, exceptions.NotSupportedError) as error:
        raise PermanentStoreError(errno.EINVAL, f"{place}: {short_text(str(error))}") from error
    except exceptions.PreconditionError as error:
        raise written_again(place) from error
    except (exceptions.BaseError, OSError) as error:
        text = short_text(str(error))
        if _BEYOND.search(str(error)):
            raise BeyondEnd(errno.EINVAL, f"{place}: {text}") from error
        if any(word in text for word in _DENIED) and not _TIMED_OUT.search(text):
            raise AccessDenied(errno.EACCES, f"{place}: {text}") from error
        if _FULL in text:
            raise PermanentStoreError(errno.ENOSPC, f"{place}: {text}") from error
        raise StoreUnreachable(errno.EIO, f"{place}: {text}") from error


def written_again(place: str) -> PermanentStoreError:
    """Return the error for an object that another version replaced while it was read."""
    return PermanentStoreError(errno.ESTALE, f"{place}: the object was written again while it was read")


def short_text(text: str) -> str:
    """Return the line of an error that says what happened: a code and a message where the store gave them."""
    code, message = re.search(r"<Code>(.*?)</Code>", text), re.search(r"<Message>(.*?)</Message>", text)
    if code is not None:
        text = code[1] + (f": {message[1]}" if message is not None else "")
    line = " ".join(text.partition("Debug source")[0].split())
    return without_secrets(line)[:_SHOWN_CHARACTERS]
