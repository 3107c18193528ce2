"""Backing up: sending a checkpoint's files against a bare obstore put of the same files, to a real S3 API.

    python benchmarks/checkpoint_remote.py [--json] [--megabytes 128] [--rounds 3]

The API is moto's server in a process of its own. A backup reads everything back and compares it; the bar is
on the sending alone, and the whole, reading back included, is told beside it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import obstore
import torch
from contract import measurement, report
from obstore.store import from_url

from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.remote.transfer import upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.objects import Objects

BAR = ">= 0.9"
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
import logging; logging.getLogger("werkzeug").setLevel(logging.ERROR)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--megabytes", type=int, default=128, help="size of the checkpoint (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default 3)")
    options = parser.parse_args(arguments)
    place = Path(tempfile.mkdtemp(prefix="bench-remote-"))
    try:
        with _server() as endpoint:
            return report(_measured(place, endpoint, options), as_json=options.json)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _measured(place: Path, endpoint: str, options: argparse.Namespace):
    tensors = [torch.randn(options.megabytes * 125_000) for _ in range(2)]
    entries = [whole("model.a", tensors[0]), whole("optim.a", tensors[1])]
    directory = save_checkpoint(place, entries, step=1, incarnation=1)
    size = read_manifest(directory).bytes
    bare, sending, whole_s = [], [], []
    for number in range(-1, options.rounds):  # the first is not counted
        url = f"s3://bench-{number + 1:03d}"
        request = urllib.request.Request(f"{endpoint}/bench-{number + 1:03d}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()
        remote = _Timed(f"{url}/run")
        turns = [lambda url=url: _bare(url, directory), lambda it=remote: _backed_up(it, directory, place)]
        seconds = {turn: turns[turn]() for turn in ((0, 1) if number % 2 else (1, 0))}
        if number >= 0:
            bare.append(seconds[0])
            whole_s.append(seconds[1])
            sending.append(remote.seconds)
    reference = (
        f"MB/s: bare put {size / median(bare) / 1e6:.0f}, backup {size / median(sending) / 1e6:.0f}, with "
        f"reading back {size / median(whole_s) / 1e6:.0f}; {size / 1e6:.0f} MB, {options.rounds} rounds, moto"
    )
    ratio = median(theirs / ours for theirs, ours in zip(bare, sending, strict=True))
    both = median(theirs / ours for theirs, ours in zip(bare, whole_s, strict=True))
    return [
        measurement(
            "checkpoint_remote: sending against a bare put", ratio, unit="x", reference=reference, bar=BAR
        ),
        measurement("checkpoint_remote: sent, read back and verified", both, unit="x", reference=reference),
    ]


def _bare(url: str, directory: Path) -> float:
    store = from_url(f"{url}/bare", client_options={"allow_http": True})
    begun = time.perf_counter()
    for path in sorted(directory.iterdir()):
        obstore.put(store, path.name, path)
    return time.perf_counter() - begun


def _backed_up(remote: Objects, directory: Path, place: Path) -> float:
    begun = time.perf_counter()
    upload_checkpoint(directory, remote, notes=place / "notes")
    return time.perf_counter() - begun


class _Timed(Objects):
    """Counts the seconds of sending."""

    seconds = 0.0

    def put(self, key: str, content: Path | bytes) -> None:
        begun = time.perf_counter()
        super().put(key, content)
        self.seconds += time.perf_counter() - begun


@contextmanager
def _server() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        endpoint = f"http://127.0.0.1:{int(process.stdout.readline())}"
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }
        try:
            yield endpoint
        finally:
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
