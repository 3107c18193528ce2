"""A tokenizer's file by path or by name: names are looked up in Hugging Face's cache, then fetched once."""

from __future__ import annotations

import re
from pathlib import Path

from bloomery.config.offline import refuse_network
from bloomery.data.tokenizer import JSON_FILE, MODEL_FILE, tokenizer_in
from bloomery.errors import DataError

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FETCH_TIMEOUT_S = 60.0


def find_tokenizer(name: str) -> Path:
    """The file of a tokenizer: a path, a directory that holds one, or a name in Hugging Face's cache.

    A name that is not cached is fetched once, unless the network is forbidden.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        found = tokenizer_in(path)
        if found is None:
            raise DataError(
                f"{path} holds no {JSON_FILE} and no {MODEL_FILE}.",
                remedy="Give the path of the file itself.",
            )
        return found
    if path.exists() or not _NAME.fullmatch(name) or path.suffix in (".json", ".model"):
        return path
    return _cached(name) or _fetched(name)


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in (JSON_FILE, MODEL_FILE):
        found = try_to_load_from_cache(name, file)
        if isinstance(found, str):
            return Path(found)
    return None


def _fetched(name: str) -> Path:
    refuse_network(
        f"fetch the tokenizer {name!r}, which is no file and not in Hugging Face's cache",
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
        f"There is no tokenizer {name!r}: no such file, not in Hugging Face's cache, not fetched: {reason}.",
        remedy="Check the path or the name; BLOOMERY_OFFLINE=1 keeps from trying the network.",
    )
