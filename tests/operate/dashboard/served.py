"""`bloomery dashboard` as a process of its own, on a free port of this machine."""

from __future__ import annotations

import json
import re
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen


@dataclass
class Served:
    """A dashboard that runs. token: the one that it printed, or ""."""

    url: str
    token: str
    process: subprocess.Popen[str]
    trusted: ssl.SSLContext | None = None

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def get(self, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        """Return status, body and headers of an answer."""
        return self._ask(Request(self.url + path, headers=headers))

    def json(self, path: str) -> Any:
        status, body, _ = self.get(path)
        assert status == 200, body
        return json.loads(body)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, str, dict[str, str]]:
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | headers
        return self._ask(Request(self.url + path, data=data, headers=headers, method="POST"))

    def _ask(self, request: Request) -> tuple[int, str, dict[str, str]]:
        try:
            with urlopen(request, timeout=20, context=self.trusted) as answer:
                return answer.status, answer.read().decode(), dict(answer.headers.items())
        except HTTPError as refused:
            return refused.code, refused.read().decode(), dict(refused.headers.items())


@contextmanager
def served(
    runs: Sequence[Path], *options: str, port: int = 0, trusted: ssl.SSLContext | None = None
) -> Iterator[Served]:
    """Serve the runs until the block ends; the server must end by itself, with status 0, when it is asked."""
    command = [
        sys.executable,
        "-m",
        "bloomery",
        "dashboard",
        *map(str, runs),
        "--port",
        str(port),
        "--interval",
        "0.2",
        *options,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        told: list[str] = []
        while not (found := re.match(r"(https?://\S+)", told[-1] if told else "")):
            told.append(process.stdout.readline())
            assert told[-1].startswith(("note: ", "http")), told
        token = process.stdout.readline().rpartition(" ")[2].strip() if "--actions" in options else ""
        yield Served(found[1], token, process, trusted)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=20)
        assert (process.returncode, rest) == (0, ""), rest
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
