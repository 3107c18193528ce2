"""Lists and reads the files of a dataset on the Hugging Face Hub, or on a mirror with its API."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from bloomery.config.data import HUB_PREFIX
from bloomery.config.environment import refuse_network
from bloomery.data.remote_files import RemoteFile
from bloomery.errors import DataError
from bloomery.objects import without_secrets

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_ADDRESS = re.compile(
    r"(?P<name>[\w.-]{1,96}/[\w.-]{1,96})"
    r"(?:@(?P<revision>[\w./-]{1,128}))?(?::(?P<folder>[\w./ -]{1,512}))?\Z",
    re.ASCII,
)
_DENIED, _MISSING = (401, 403), 404
_HERE = "Set HF_TOKEN or use `hf auth login`, with an account that may read it; HF_ENDPOINT names a mirror."


class HubDataset:
    """The files of one commit of a dataset's repository, read in pieces; see `remote_files.FileSource`.

    address: OWNER/NAME, OWNER/NAME@REVISION, and behind either :FOLDER for the files below a folder.
    Credentials come from HF_TOKEN or `hf auth login`, and are never part of a message.
    """

    def __init__(self, address: str) -> None:
        """Check the address. Raises DataError for one that is none; uses no network."""
        found = _ADDRESS.match(address)
        if found is None:
            raise DataError(
                f"{HUB_PREFIX}{address} is no dataset of the Hub.",
                remedy=f"Write {HUB_PREFIX}OWNER/NAME, {HUB_PREFIX}OWNER/NAME@REVISION or …:FOLDER.",
            )
        self.url = f"{HUB_PREFIX}{address}"
        refuse_network(f"read {self.url}", remedy="Fetch it where there is a network, and bring the files.")
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it says each request otherwise
        self._name, self._revision = found["name"], found["revision"] or "main"
        self._folder = (found["folder"] or "").strip("/")
        self._commit = ""

    def files(self) -> list[RemoteFile]:
        """Return the files of the revision's present commit, sorted; later reads are of that commit."""
        from huggingface_hub import RepoFile

        with self._told("list"):
            api = self._api()
            commit = api.dataset_info(self._name, revision=self._revision).sha
            if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-f]{40}", commit):
                raise ValueError("its answer names no commit")
            self._commit = commit
            listed = list(
                api.list_repo_tree(
                    self._name, self._folder or None, recursive=True, revision=commit, repo_type="dataset"
                )
            )
        files = [
            RemoteFile(
                path=self._checked(entry.path),
                size_bytes=entry.size,
                sha256=entry.lfs.sha256 if entry.lfs is not None else "",
                version=entry.blob_id,
            )
            for entry in listed
            if isinstance(entry, RepoFile)
        ]
        return sorted(files, key=lambda file: file.path)

    def read(self, path: str, *, start: int, length: int) -> bytes:
        """Return `length` bytes of a file from byte `start` on, as of the listed commit; fewer at its end.

        Raises DataError if retries do not get them.
        """
        from huggingface_hub import hf_hub_url, utils

        hub: Any = utils  # it exports what it imports, which its types do not say
        address = hf_hub_url(
            self._name, path, repo_type="dataset", revision=self._commit, endpoint=self._endpoint()
        )
        headers = hub.build_hf_headers() | {"Range": f"bytes={start}-{start + length - 1}"}
        with self._told(f"read {path} of"):
            answer = hub.http_backoff("GET", address, headers=headers, follow_redirects=True)
            hub.hf_raise_for_status(answer)
            if answer.status_code != 206 and (start or len(answer.content) > length):
                raise ValueError("its server sends only whole files, not pieces")
            return bytes(answer.content)

    def _checked(self, path: str) -> str:
        """Return a path that lies below the directory to fetch into. Raises DataError for others."""
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or "\\" in path or "\0" in path or ".." in parts:
            raise DataError(
                f"{self.url} lists a file {path[:80]!r}, which would lie outside of the directory.",
                remedy="Do not fetch from there: its list is wrong, or hostile.",
            )
        return path

    def _endpoint(self) -> str | None:
        return os.environ.get("HF_ENDPOINT") or None

    def _api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self._endpoint())

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Turn what huggingface_hub raises into a DataError of one line."""
        import httpx2
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

        try:
            yield
        except GatedRepoError as gated:
            raise DataError(
                f"{self.url} is gated: its owner lets those read it who asked, and this account may not.",
                remedy="Ask for access on its page, then set HF_TOKEN to a token of that account.",
            ) from gated
        except HfHubHTTPError as refused:
            line = without_secrets(" ".join(str(refused).split()))[:300]
            status = refused.response.status_code if refused.response is not None else 0
            remedy = _HERE if status in (*_DENIED, _MISSING) else "Try it again later: what is here is kept."
            raise DataError(f"Cannot {doing} {self.url}: {line}", remedy=remedy) from refused
        except (httpx2.HTTPError, OSError, RuntimeError, ValueError, KeyError) as failed:
            line = without_secrets(" ".join(str(failed).split()))[:300]
            raise DataError(
                f"Cannot {doing} {self.url}: {line}.", remedy="Is the Hub reachable from here (HF_ENDPOINT)?"
            ) from failed
