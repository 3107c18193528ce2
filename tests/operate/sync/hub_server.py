"""A server on loopback that speaks the part of the Hub's API that `huggingface_hub` uses for repositories."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_the_tests"
PAGE = 3
"""Entries in one page of a listing, so that more than one is asked for."""


@dataclass
class Repository:
    """Branches as lists of commits, each a dict of all files. private: as it was asked for."""

    private: bool
    commits: dict[str, list[str]] = field(default_factory=dict)
    trees: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, bytes]) -> str:
        oid = hashlib.sha1(f"{branch}{len(self.trees)}".encode()).hexdigest()
        self.trees[oid] = files
        self.commits.setdefault(branch, []).append(oid)
        return oid

    def files(self, branch: str) -> dict[str, bytes]:
        return self.trees[self.commits[branch][-1]]


@dataclass
class Hub:
    """What the server holds and was asked. refusals: how many of the next commits it answers with 503."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    committed_bytes: int = 0
    refusals: int = 0


@contextmanager
def hub_served() -> Iterator[Hub]:
    """Serve an empty Hub until the block ends."""
    hub, lock = Hub(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm, wbufsize = True, -1  # else each answer waits for an acknowledgement

        def handle_one(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length)
            parts = urlsplit(self.path)
            with lock:
                hub.requests.append(f"{self.command} {parts.path}")
                if self.headers.get("Authorization") != f"Bearer {TOKEN}" and "/objects/" not in parts.path:
                    status, answer, headers = 401, b'{"error":"who are you?"}', {}
                else:
                    path = [unquote(part) for part in parts.path.strip("/").split("/")]
                    status, answer, headers = _answer(hub, self.command, path, parse_qs(parts.query), body)
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer)

        do_GET = do_POST = do_PUT = do_HEAD = handle_one

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


Answer = tuple[int, bytes, dict[str, str]]


def _json(value: object, status: int = 200, **headers: str) -> Answer:
    return status, json.dumps(value).encode(), headers


def _answer(hub: Hub, method: str, path: list[str], query: dict[str, list[str]], body: bytes) -> Answer:
    match method, *path:
        case "POST", "api", "repos", "create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            if name in hub.repositories:
                return _json({"error": "exists", "url": f"{hub.url}/{name}"}, 409)
            made = hub.repositories[name] = Repository(private=wanted.get("visibility") == "private")
            made.commit("main", {".gitattributes": b""})
            return _json({"url": f"{hub.url}/{name}"})
        case "PUT", "objects", oid:
            hub.objects[oid] = body
            return _json({})
        case "POST", owner, name, "info", "lfs", "objects", "batch":
            return _batch(hub, json.loads(body))
        case "GET" | "HEAD", owner, name, "resolve", revision, *key if len(path) > 4:
            return _resolve(hub, f"{owner}/{name}", revision, "/".join(key))
        case _, "api", "models", owner, name, *rest:
            repository = hub.repositories.get(f"{owner}/{name}")
            if repository is None:
                return _json({"error": "none"}, 404, **{"X-Error-Code": "RepoNotFound"})
            return _of_repository(hub, repository, rest, query, body)
    return _json({"error": f"{method} {path}"}, 404)


def _of_repository(
    hub: Hub, repository: Repository, path: list[str], query: dict[str, list[str]], body: bytes
) -> Answer:
    match path:
        case ["refs"]:
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": commits[-1]}
                for name, commits in repository.commits.items()
            ]
            return _json({"branches": branches, "converts": [], "tags": []})
        case ["commits", branch]:
            commit = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "title": "", "message": ""}
            return _json([commit | {"id": oid} for oid in reversed(repository.commits[branch])])
        case ["branch", branch]:
            if branch in repository.commits:
                return _json({"error": "exists"}, 409)
            repository.commits[branch] = [json.loads(body)["startingPoint"]]
            return _json({})
        case ["tree", branch]:
            is_deep = query.get("recursive", ["False"])[0].lower() in ("true", "1")
            return _tree(hub, repository, branch, int(query.get("cursor", ["0"])[0]), is_deep=is_deep)
        case ["preupload", branch]:
            return _preupload(repository, branch, json.loads(body))
        case ["commit", branch]:
            return _commit(hub, repository, branch, body)
    return _json({"error": str(path)}, 404)


def _tree(hub: Hub, repository: Repository, branch: str, begin: int, *, is_deep: bool) -> Answer:
    if branch not in repository.commits:
        return _json({"error": "none"}, 404, **{"X-Error-Code": "RevisionNotFound"})
    files = [
        (key, file) for key, file in sorted(repository.files(branch).items()) if is_deep or "/" not in key
    ]
    page = [
        {"type": "file", "path": key, "size": len(content), "oid": _blob(content)}
        for key, content in files[begin : begin + PAGE]
    ]
    more = (
        f"{hub.url}/api/models/{_name_of(hub, repository)}/tree/{branch}?recursive=True&cursor={begin + PAGE}"
    )
    link = {"Link": f'<{more}>; rel="next"'} if begin + PAGE < len(files) else {}
    return _json(page, **link)


def _preupload(repository: Repository, branch: str, wanted: dict) -> Answer:
    files = repository.files(branch)
    answers = [
        {
            "path": file["path"],
            "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
            "shouldIgnore": False,
            "oid": _blob(files[file["path"]]) if file["path"] in files else None,
        }
        for file in wanted["files"]
    ]
    return _json({"files": answers})


def _commit(hub: Hub, repository: Repository, branch: str, body: bytes) -> Answer:
    if hub.refusals:
        hub.refusals -= 1
        return _json({"error": "busy"}, 503)
    hub.committed_bytes += len(body)
    files = dict(repository.files(branch))
    for line in body.decode().splitlines():
        operation = json.loads(line)
        value = operation["value"]
        match operation["key"]:
            case "file":
                files[value["path"]] = base64.b64decode(value["content"])
            case "lfsFile":
                files[value["path"]] = hub.objects[value["oid"]]
            case "deletedFile":
                del files[value["path"]]
    oid = repository.commit(branch, files)
    return _json({"commitUrl": f"{hub.url}/{_name_of(hub, repository)}/commit/{oid}", "commitOid": oid})


def _batch(hub: Hub, wanted: dict) -> Answer:
    objects = [
        {**item, "actions": {"upload": {"href": f"{hub.url}/objects/{item['oid']}", "header": {}}}}
        for item in wanted["objects"]
    ]
    return _json({"transfer": "basic", "objects": objects})


def _resolve(hub: Hub, name: str, revision: str, key: str) -> Answer:
    repository = hub.repositories[name]
    content = repository.files(revision).get(key)
    if content is None:
        return _json({"error": "none"}, 404, **{"X-Error-Code": "EntryNotFound"})
    headers = {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": repository.commits[revision][-1]}
    return 200, content, {**headers, "Content-Type": "application/octet-stream"}


def _name_of(hub: Hub, repository: Repository) -> str:
    return next(name for name, known in hub.repositories.items() if known is repository)


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
