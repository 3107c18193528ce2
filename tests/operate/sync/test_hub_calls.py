"""What the Hub is asked and answers, call by call."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from bloomery.errors import BloomeryError, StorageError
from bloomery.objects import ObjectStat
from bloomery.operate.sync.hub import HubRepository
from bloomery.operate.sync.places import open_place


def test_what_the_hub_says_is_told_in_one_line_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    place: Any = open_place("hf:a/b")
    api = SimpleNamespace()
    monkeypatch.setattr(place, "_api", lambda: api)

    def refuse(status: int | None) -> Any:
        def fail(*words: Any, **more: Any) -> Any:
            response: Any = (
                None if status is None else SimpleNamespace(status_code=status, headers={}, request=None)
            )
            error = HfHubHTTPError.__new__(HfHubHTTPError)
            Exception.__init__(error, f"{status}\n  " + "x" * 400)
            error.response = response
            raise error

        return fail

    login = "`hf auth login`, or HF_TOKEN with the right to write."
    for status, remedy in (
        (401, login),
        (403, login),
        (500, "Try it again later."),
        (None, "Try it again later."),
    ):
        api.create_repo = refuse(status)
        with pytest.raises(StorageError) as refused:
            place.make()
        assert refused.value.message == f"Making hf:a/b failed: {status} " + "x" * (
            300 - len(str(status)) - 1
        )
        assert refused.value.remedy == remedy

    def broken(*words: Any, **more: Any) -> Any:
        raise ConnectionError("it\nis lost")

    api.list_repo_refs = broken
    with pytest.raises(StorageError) as failed:
        place.branches()
    assert failed.value.message == "Reading the branches of hf:a/b failed: it is lost"
    assert "HF_ENDPOINT" in failed.value.remedy


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, ValueError, httpx2.ReadTimeout])
def test_whatever_a_hub_fails_with_is_told_without_the_token(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    from huggingface_hub.errors import HfHubHTTPError

    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    place: Any = HubRepository("a/b")
    refusal = HfHubHTTPError.__new__(HfHubHTTPError)
    Exception.__init__(refusal, "hf_secret is known")
    refusal.response = SimpleNamespace(status_code=500)  # type: ignore[assignment]
    for error, words in ((kind("with hf_secret"), "with ***"), (refusal, "*** is known")):

        def fail(*given: Any, error: Exception = error, **more: Any) -> Any:
            raise error

        monkeypatch.setattr(place, "_api", lambda fail=fail: SimpleNamespace(list_repo_refs=fail))
        with pytest.raises(StorageError, match="Reading the branches of hf:a/b failed") as refused:
            place.branches()
        assert refused.value.message.endswith(f"failed: {words}")


def test_a_hub_is_reached_where_the_network_is_allowed_and_at_the_address_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = logging.getLogger("httpx2")
    log.setLevel(logging.DEBUG)
    place = HubRepository("a/b")
    assert log.level == logging.WARNING, "it says each request otherwise"
    monkeypatch.setattr("huggingface_hub.HfApi", lambda *, endpoint: (endpoint,))
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    for address, reached in (("", None), ("http://127.0.0.1:9", "http://127.0.0.1:9")):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert place._api() == (reached,)  # type: ignore[comparison-overlap]
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    with pytest.raises(BloomeryError, match="reach a/b on the Hub") as refused:
        HubRepository("a/b")
    assert "file:///path" in refused.value.remedy


def test_a_branch_that_is_not_there_has_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.errors import RevisionNotFoundError

    def missing(*given: Any, **more: Any) -> Any:
        raise RevisionNotFoundError.__new__(RevisionNotFoundError)

    place: Any = HubRepository("a/b")
    monkeypatch.setattr(place, "_api", lambda: SimpleNamespace(list_repo_tree=missing))
    assert place.files_of("step-000001.i001") == {}


@pytest.mark.parametrize(("status", "is_told"), [(401, True), (403, True), (404, False)])
def test_a_repository_that_may_not_be_seen_is_not_taken_for_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, status: int, is_told: bool
) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError

    def missing(*given: Any, **more: Any) -> Any:
        refusal = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
        Exception.__init__(refusal, "no repository")
        refusal.response = SimpleNamespace(status_code=status)  # type: ignore[assignment]
        raise refusal

    place: Any = HubRepository("a/b")
    monkeypatch.setattr(place, "_api", lambda: SimpleNamespace(list_repo_tree=missing))
    if not is_told:
        assert place.entries() == {}
        return
    with pytest.raises(StorageError, match="Listing hf:a/b failed") as refused:
        place.entries()
    assert "hf auth login" in refused.value.remedy


def test_the_folders_of_a_repository_are_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import RepoFile, RepoFolder

    listed = [
        RepoFolder(path="logs", oid="f"),
        RepoFile(path="logs/a.log", size=7, oid="b"),
    ]
    place: Any = HubRepository("a/b")
    monkeypatch.setattr(place, "_api", lambda: SimpleNamespace(list_repo_tree=lambda *_, **__: listed))
    assert place.entries() == {"logs/a.log": ObjectStat(bytes=7, mark="b")}


def test_the_hub_is_asked_for_commits_on_the_branch_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place: Any = HubRepository("a/b")
    calls: list[Any] = []

    def commit(repository: str, operations: Any, *, commit_message: str, revision: str = "main") -> None:
        told = [(type(one).__name__[15:], one.path_in_repo) for one in operations]
        calls.append((repository, told, commit_message, revision))

    api = SimpleNamespace(
        create_commit=commit,
        create_repo=lambda name, *, private, exist_ok: calls.append((name, private, exist_ok)),
        create_branch=lambda name, *, branch, revision, exist_ok: calls.append((branch, revision, exist_ok)),
        list_repo_commits=lambda name: [SimpleNamespace(commit_id=number) for number in ("new", "old")],
        list_repo_refs=lambda name: SimpleNamespace(branches=[SimpleNamespace(name="x")]),
    )
    monkeypatch.setattr(place, "_api", lambda: api)
    place.publish({"k": b"1", "l": b"2"})
    place.publish({"k": b"1"})
    place.remove([])
    place.remove(["k", "l"])
    (tmp_path / "deep").mkdir()
    for name in ("z", "deep/a"):
        (tmp_path / name).write_text("x")
    place.publish_branch("step-1", tmp_path, message="Step 1")
    assert calls == [
        ("a/b", True, True),
        ("a/b", [("Add", "k"), ("Add", "l")], "Sync 2 files", "main"),
        ("a/b", [("Add", "k")], "Sync 1 files", "main"),
        ("a/b", [("Delete", "k"), ("Delete", "l")], "Remove 2 files", "main"),
        ("step-1", "old", True),
        ("a/b", [("Add", "deep/a"), ("Add", "z")], "Step 1", "step-1"),
    ]
    assert place.branches() == {"x"} and place.most_bytes == 32 << 20


def test_each_refusal_of_the_hub_says_what_was_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Any:
            def fail(*given: Any, **more: Any) -> Any:
                raise ConnectionError("it is lost")

            return fail

    place: Any = HubRepository("a/b")
    monkeypatch.setattr(place, "_api", Refusing)
    said = {}
    for name, ask in (
        ("Making", place.make),
        ("Listing", place.entries),
        ("Reading", lambda: place.content("k")),
        ("Removing from", lambda: place.remove(["k"])),
        ("Reading the branches of", place.branches),
    ):
        with pytest.raises(StorageError) as refused:
            ask()
        said[name] = refused.value.message
    place._is_made = True
    for name, ask in (
        ("Sending to", lambda: place.publish({"k": b"1"})),
        ("Publishing a branch of", lambda: place.publish_branch("x", tmp_path, message="")),
    ):
        with pytest.raises(StorageError) as refused:
            ask()
        said[name] = refused.value.message
    assert said == {name: f"{name} hf:a/b failed: it is lost" for name in said} and len(said) == 7
