"""Tokenizers that are fetched from the Hub by their name, here from a server on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from bloomery.config.environment import OfflineRefused
from bloomery.data.tokenizer import find_tokenizer, train_tokenizer
from bloomery.errors import DataError


class Hub(BaseHTTPRequestHandler):
    """Answers for files as the Hub does. files: by the path below the address. status: for what it lacks."""

    files: dict[str, bytes]
    status: int

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        content = self.files.get(self.path.removesuffix("?").replace("/resolve/main", ""))
        repository = self.path[1:].partition("/resolve/")[0]
        self.send_response(self.status if content is None else 200)
        if content is None and self.status == 404:
            is_known = any(path.startswith(f"/{repository}/") for path in self.files)
            self.send_header("X-Error-Code", "EntryNotFound" if is_known else "RepoNotFound")
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "1" * 40)
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        return content or b""

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub that has a tokenizer of somebody/something, and of somebody/else another file alone."""
    train_tokenizer(["the cat sat"] * 20, vocabulary=270, end_of_document="<end>").save(tmp_path / "one.json")
    files = {
        "/somebody/something/tokenizer.json": (tmp_path / "one.json").read_bytes(),
        "/somebody/else/README.md": b"none here",
    }
    handler = type("Handler", (Hub,), {"files": files, "status": 404})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    for name, value in (
        ("ENDPOINT", address),
        ("HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"),
        ("HF_HUB_CACHE", str(tmp_path / "hub")),
    ):
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.delenv("BLOOMERY_OFFLINE", raising=False)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_name_that_no_cache_has_is_fetched_once(hub: type[Hub]) -> None:
    path = find_tokenizer("hf:somebody/something")
    assert path.read_bytes() == hub.files["/somebody/something/tokenizer.json"]
    hub.files = {}
    assert find_tokenizer("hf:somebody/something") == path


def test_a_name_without_a_json_is_that_of_a_model_of_sentencepiece(hub: type[Hub]) -> None:
    hub.files = {"/somebody/third/tokenizer.model": b"pieces"}
    path = find_tokenizer("hf:somebody/third")
    assert path.name == "tokenizer.model" and path.read_bytes() == b"pieces"
    hub.files = {}
    assert find_tokenizer("hf:somebody/third") == path


@pytest.mark.parametrize(
    ("name", "status", "why"),
    [
        ("somebody/else", 404, "it has neither tokenizer.json nor tokenizer.model"),
        ("nobody/nothing", 404, "404 Client Error"),
        ("somebody/else", 403, "403"),
    ],
)
def test_a_tokenizer_that_cannot_be_fetched_is_refused_with_the_hubs_reason(
    hub: type[Hub], name: str, status: int, why: str
) -> None:
    hub.status = status
    with pytest.raises(DataError) as refused:
        find_tokenizer(f"hf:{name}")
    said = refused.value.message
    assert f"no tokenizer {name!r}" in said and why in said
    assert said.endswith(".") and not said.endswith("..") and "\n" not in said


def test_a_name_that_leads_to_no_tokenizer_is_told_with_what_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name, said, remedy in (
        (
            "empty",
            "empty holds no tokenizer.json and no tokenizer.model.",
            "Give the path of the file itself.",
        ),
        (
            "owner/name",
            "There is no tokenizer 'owner/name': no such file or directory.",
            "Check the path. A name on Hugging Face is written hf:owner/name.",
        ),
        (
            "hf:a/b/c",
            "'a/b/c' is no name of a tokenizer on Hugging Face.",
            "Write hf:SOMEBODY/SOMETHING, or the path of a file without 'hf:'.",
        ),
    ):
        with pytest.raises(DataError) as refused:
            find_tokenizer(name)
        assert (refused.value.message, refused.value.remedy) == (said, remedy)
    for name in ("a b", "openai/gpt2.git", "a--b", "../gpt2", "caf\u00e9/b", ""):
        with pytest.raises(DataError, match="is no name of a tokenizer on Hugging Face"):
            find_tokenizer(f"hf:{name}")


def test_a_name_that_no_cache_has_is_not_fetched_where_the_network_is_forbidden(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    with pytest.raises(
        OfflineRefused, match="needed to fetch the tokenizer 'somebody/something', which is not"
    ):
        find_tokenizer("hf:somebody/something")
    monkeypatch.delenv("BLOOMERY_OFFLINE")
    path = find_tokenizer("hf:somebody/something")
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    assert find_tokenizer("hf:somebody/something") == path, "it is in the cache"
