"""Finds the file of a tokenizer by path, or by `hf:NAME` on Hugging Face."""

from __future__ import annotations

import re
from pathlib import Path

from bloomery.config.data import HUB_PREFIX
from bloomery.config.offline import refuse_network
from bloomery.data.tokenizer import JSON_FILE, MODEL_FILE, tokenizer_in
from bloomery.errors import DataError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FETCH_TIMEOUT_S = 60.0


def find_tokenizer(name: str) -> Path:
    """Return the file of a tokenizer: a path, a directory that holds one, or `hf:` and a name on Hugging
    Face.

    Such a name is looked up in the cache, or fetched once unless the network is forbidden. A text without the
    prefix is a path, whatever it looks like, so the name of a deleted directory never becomes a stranger's
    name.
    """
    if name.startswith(HUB_PREFIX):
        return _named(name.removeprefix(HUB_PREFIX))
    path = Path(name).expanduser()
    if path.is_dir():
        file = tokenizer_in(path)
        if file is None:
            raise DataError(
                f"{path} holds no {JSON_FILE} and no {MODEL_FILE}.",
                remedy="Give the path of the file itself.",
            )
        return file
    if not path.exists() and _NAME.fullmatch(name) and path.suffix not in (".json", ".model"):
        raise DataError(
            f"There is no tokenizer {name!r}: no such file or directory.",
            remedy=f"Check the path. A name on Hugging Face is written {HUB_PREFIX}{name}.",
        )
    return path


def _named(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise DataError(
            f"{name!r} is no name of a tokenizer on Hugging Face.",
            remedy=f"Write {HUB_PREFIX}SOMEBODY/SOMETHING, or the path of a file without {HUB_PREFIX!r}.",
        )
    return _cached(name) or _fetched(name)


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in (JSON_FILE, MODEL_FILE):
        path = try_to_load_from_cache(name, file)
        if isinstance(path, str):
            return Path(path)
    return None


def _fetched(name: str) -> Path:
    refuse_network(
        f"fetch the tokenizer {name!r}, which is not in Hugging Face's cache",
        remedy="Copy its tokenizer.json here and give the path, or fetch it once where there is a network.",
    )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    for file in (JSON_FILE, MODEL_FILE):
        try:
            return Path(hf_hub_download(name, file, etag_timeout=_FETCH_TIMEOUT_S))
        except LocalEntryNotFoundError as unreachable:
            raise _not_found(name, unreachable) from unreachable
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, OSError) as unreachable:
            raise _not_found(name, unreachable) from unreachable
    raise _not_found(name, f"it has neither {JSON_FILE} nor {MODEL_FILE}")


def _not_found(name: str, why: object) -> DataError:
    reason = str(why).strip().splitlines()[0]
    return DataError(
        f"There is no tokenizer {name!r} in Hugging Face's cache, and it was not fetched: {reason}.",
        remedy="Check the name; BLOOMERY_OFFLINE=1 keeps from trying the network.",
    )
