"""Uploads to a repository of the Hugging Face Hub: a run's logs to `main`, checkpoints to branches."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.config.data import HUB_PREFIX
from bloomery.config.environment import refuse_network
from bloomery.errors import StorageError
from bloomery.objects import ObjectStat, without_secrets

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}\Z", re.ASCII)
_DENIED = (401, 403)


class HubRepository:
    """A repository of the Hub; the credentials are those of `hf auth login` or HF_TOKEN. See `SyncPlace`.

    Whoever makes it public publishes the logs of the run, so a new one is private unless that is asked for.

    repository: OWNER/NAME. is_public: whether it is made public where it does not exist.
    """

    most_bytes = 32 << 20

    def __init__(self, repository: str, *, is_public: bool = False) -> None:
        if not _NAME.match(repository):
            raise StorageError(
                f"{repository!r} is no name of a repository on the Hub.", remedy="Write hf:OWNER/NAME."
            )
        refuse_network(
            f"reach {repository} on the Hub", remedy="Give a directory instead: file:///path, and copy it."
        )
        logging.getLogger("httpx2").setLevel(logging.WARNING)  # it says each request otherwise
        self.name, self._repository, self._is_public = f"{HUB_PREFIX}{repository}", repository, is_public
        self._is_made = False

    def entries(self) -> dict[str, ObjectStat]:
        """Return the size and mark of each file on `main`; {} where there is no repository."""
        return self.files_of("main")

    def publish(self, files: Mapping[str, bytes]) -> None:
        """Write files to `main` in one commit; the repository is made where it does not exist."""
        self.make()
        self._commit(files, revision="main", message=f"Sync {len(files)} files")

    def remove(self, keys: Collection[str]) -> None:
        """Remove files from `main` in one commit."""
        from huggingface_hub import CommitOperationDelete

        if not keys:
            return
        operations = [CommitOperationDelete(path_in_repo=key, is_folder=False) for key in keys]
        with self._told("Removing from"):
            self._api().create_commit(
                self._repository, operations, commit_message=f"Remove {len(operations)} files"
            )

    def content(self, key: str, *, begin: int = 0) -> bytes:
        """Return the bytes of a file on `main` from `begin` on."""
        with tempfile.TemporaryDirectory() as scratch, self._told("Reading"):
            path = self._api().hf_hub_download(self._repository, key, revision="main", local_dir=scratch)
            return Path(path).read_bytes()[begin:]

    def make(self) -> None:
        """Make the repository where it does not exist."""
        if not self._is_made:
            with self._told("Making"):
                self._api().create_repo(self._repository, private=not self._is_public, exist_ok=True)
            self._is_made = True

    def branches(self) -> set[str]:
        """Return the names of all branches."""
        with self._told("Reading the branches of"):
            return {branch.name for branch in self._api().list_repo_refs(self._repository).branches}

    def files_of(self, revision: str) -> dict[str, ObjectStat]:
        """Return the size and mark of each file on a branch; {} where there is none, or no repository."""
        from huggingface_hub import RepoFile
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        with self._told("Listing"):
            try:
                listed = list(self._api().list_repo_tree(self._repository, recursive=True, revision=revision))
            except RevisionNotFoundError:
                return {}
            except RepositoryNotFoundError as missing:  # 401 says the same, for who may not see it
                if missing.response.status_code in _DENIED:
                    raise
                return {}
        files = [entry for entry in listed if isinstance(entry, RepoFile)]
        return {file.path: ObjectStat(bytes=file.size, mark=file.blob_id) for file in files}

    def publish_branch(self, branch: str, directory: Path, *, message: str) -> None:
        """Put the files of a directory on a branch of their own in one commit.

        The branch begins at the first commit of the repository, so that it holds nothing else.
        """
        self.make()
        with self._told("Publishing a branch of"):
            first = self._api().list_repo_commits(self._repository)[-1].commit_id
            self._api().create_branch(self._repository, branch=branch, revision=first, exist_ok=True)
        files = {
            path.relative_to(directory).as_posix(): path
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        self._commit(files, revision=branch, message=message)

    def _commit(self, files: Mapping[str, bytes | Path], *, revision: str, message: str) -> None:
        from huggingface_hub import CommitOperationAdd

        operations = [
            CommitOperationAdd(path_in_repo=key, path_or_fileobj=content) for key, content in files.items()
        ]
        with self._told("Sending to"):
            self._api().create_commit(self._repository, operations, commit_message=message, revision=revision)

    def _api(self) -> HfApi:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from huggingface_hub import HfApi

        return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)

    @contextmanager
    def _told(self, doing: str) -> Iterator[None]:
        """Turn what huggingface_hub raises into a StorageError of one line."""
        import httpx2
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except HfHubHTTPError as refused:
            line = without_secrets(" ".join(str(refused).split()))[:300]
            is_denied = refused.response is not None and refused.response.status_code in _DENIED
            remedy = (
                "`hf auth login`, or HF_TOKEN with the right to write."
                if is_denied
                else "Try it again later."
            )
            raise StorageError(f"{doing} {self.name} failed: {line}", remedy=remedy) from refused
        except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as failed:
            line = without_secrets(" ".join(str(failed).split()))[:300]
            raise StorageError(
                f"{doing} {self.name} failed: {line}", remedy="Is the Hub reachable from here (HF_ENDPOINT)?"
            ) from failed
