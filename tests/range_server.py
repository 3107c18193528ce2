"""An HTTP server on loopback that gives ranges, counts what it gave, and can hang up, or fall silent."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Served:
    """What a server does.

    hang_ups: how many of the next bodies to break off half way. silences: how many of the next bodies to stop
    half way, without hanging up. most_bytes: break off each longer body there; 0: none.
    """

    url: str = ""
    hang_ups: int = 0
    silences: int = 0
    most_bytes: int = 0
    given_bytes: int = 0
    requests: list[str] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    """What was asked for, and how much of it was given, of each body: (begin, bytes)."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # of 5, some of many connections that come at once would be dropped


@contextmanager
def serving(directory: Path) -> Iterator[Served]:
    """Serve a directory until the block ends."""
    served, lock, over = Served(), threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            path = directory / self.path.lstrip("/")
            if not path.is_file():
                self.send_error(404)
                return
            content = path.read_bytes()
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted and int(wanted[1]) >= len(content):
                self.send_error(416)
                return
            part = content[int(wanted[1]) : int(wanted[2] or len(content)) + 1] if wanted else content
            self.send_response(206 if wanted else 200)
            if wanted:
                last = int(wanted[1]) + len(part) - 1
                self.send_header("Content-Range", f"bytes {wanted[1]}-{last}/{len(content)}")
            self.send_header("Content-Length", str(len(part)))
            self.send_header("ETag", f'"{len(content)}-{path.stat().st_mtime_ns}"')
            self.end_headers()
            if body:
                with lock:
                    silent = served.silences > 0
                    broken = not silent and served.hang_ups > 0
                    served.silences -= silent
                    served.hang_ups -= broken
                    part = part[: len(part) // 2] if broken or silent else part
                    if served.most_bytes and len(part) > served.most_bytes:
                        part, broken = part[: served.most_bytes], True
                    served.ranges.append((int(wanted[1]) if wanted else 0, len(part)))
                    served.given_bytes += len(part)
                    served.requests.append(self.path)
                self.wfile.write(part)
                if silent:
                    self.wfile.flush()
                    over.wait(600)
                self.close_connection = broken or silent

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
