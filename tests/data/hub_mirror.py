"""A mirror of the Hub's API for datasets, over HTTP on loopback: listing by pages, and files by ranges."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_" + "s" * 34


class Mirror:
    """What the server has, and what it was asked.

    token: the one that it wants; "" for none. gated: whether the token's account may not read. faults: status
    codes with which the next reads of files are answered. cuts: whether ranges come half. is_plain: whether
    the server knows no ranges, and gives whole files.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = dict(files)
        self.token, self.gated, self.cuts, self.is_plain = "", False, False, False
        self.faults: list[int] = []
        self.asked: list[tuple[str, str]] = []
        self.endpoint = ""


@contextmanager
def mirror(files: Mapping[str, bytes]) -> Iterator[Mirror]:
    """Serve the dataset owner/texts."""
    kept = Mirror(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"mirror": kept}))
    kept.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    mirror: Mirror

    def do_GET(self) -> None:
        kept, parts = self.mirror, urlsplit(self.path)
        kept.asked.append((self.path, self.headers.get("Range", "")))
        if kept.token and self.headers.get("Authorization") != f"Bearer {kept.token}":
            return self._refuse(401, "RepoNotFound", "Invalid username or password.")
        if "/owner/texts" not in parts.path:
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if "/resolve/" in parts.path:
            return self._file(parts.path.partition(f"/resolve/{COMMIT}/")[2])
        if "/tree/" in parts.path:
            return self._tree(int(parse_qs(parts.query).get("cursor", ["0"])[0]))
        if not parts.path.endswith(("/revision/main", f"/revision/{COMMIT}")):
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        return self._answer(json.dumps({"id": "owner/texts", "sha": COMMIT, "siblings": []}).encode())

    def _tree(self, cursor: int) -> None:
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            | ({} if path.endswith(".md") else {"lfs": _pointer(content)})
            for path, content in sorted(self.mirror.files.items())
        ]
        link = {}
        if cursor + 2 < len(entries):
            following = f"{self.mirror.endpoint}/api/datasets/owner/texts/tree/{COMMIT}?cursor={cursor + 2}"
            link = {"Link": f'<{following}>; rel="next"'}
        self._answer(json.dumps(entries[cursor : cursor + 2]).encode(), **link)

    def _file(self, path: str) -> None:
        if self.mirror.gated:
            return self._refuse(403, "GatedRepo", "Access to dataset owner/texts is restricted.")
        if self.mirror.faults:
            return self._refuse(self.mirror.faults.pop(0), "", "Busy")
        content = self.mirror.files[path]
        if self.mirror.is_plain:
            return self._answer(content)
        begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        part = content[int(begin) : int(end) + 1]
        part = part[: len(part) // 2] if self.mirror.cuts else part
        self._answer(part, status=206, **{"Content-Range": f"bytes {begin}-{end}/{len(content)}"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._answer(b"{}", status=status, **{"X-Error-Code": code, "X-Error-Message": message})

    def _answer(self, body: bytes, *, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


def _pointer(content: bytes) -> dict[str, object]:
    return {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
