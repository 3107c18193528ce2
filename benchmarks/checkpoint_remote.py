"""Backing up: sending a checkpoint's files against a bare obstore put of the same files, to a real S3 API.

    python benchmarks/checkpoint_remote.py [--json] [--megabytes 128] [--rounds 3]

The API is moto's server in a process of its own. The bar is on the sending alone; the whole, with all that a
backup asks the store beside it, is told too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import obstore
import torch
from contract import Measurement, measurement, report
from obstore.store import from_url

from bloomery.checkpoint.format.catalogue import verify
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.remote.remote_run import remote_source
from bloomery.checkpoint.remote.shared_upload import POLL_S, UploadCoordinator, notes_of
from bloomery.checkpoint.remote.transfer import upload_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects, SentFile

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


HELPER = """
import sys
from pathlib import Path
from bloomery.checkpoint.remote.shared_upload import BackupHelper
from bloomery.events.run_directory import RunDirectory
rank, world, poll_s = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
helper = BackupHelper(RunDirectory(Path(sys.argv[1])), rank=rank, world=world, poll_s=poll_s)
print("ready", flush=True)
sys.stdin.read()
helper.close()
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
            measured = [
                *_measured(place, endpoint, options),
                _ranks_against_one(place, endpoint, options.megabytes),
            ]
            return report(measured, as_json=options.json)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _ranks_against_one(
    place: Path, endpoint: str, megabytes: int, *, world: int = 8, link_mb_s: float = 3.0
) -> Measurement:
    """Measure a backup by one rank and by `world` ranks, each behind a link of its own to the store.

    The links are the limit, as between nodes and a store: moto takes many times as much. Three quarters of
    `megabytes` are sent. The ranks look for requests and notes less often the more there is to send.
    """
    poll_s = POLL_S * megabytes / 128
    elements = megabytes * 750_000 // 4 // (2 * world)
    entries = [whole(f"part{number}.a", torch.randn(elements)) for number in range(2 * world)]
    seconds: list[float] = []
    for count in (1, world):
        rundir = RunDirectory(place / f"ranks{count}").create()
        directory = save_checkpoint(rundir.checkpoints, entries, step=1, incarnation=1)
        bucket = f"ranks-{count}"
        urllib.request.urlopen(
            urllib.request.Request(f"{endpoint}/{bucket}", method="PUT"), timeout=60
        ).close()
        links = [Link(endpoint, bytes_per_s=link_mb_s * 1e6) for _ in range(count)]
        helpers = [
            subprocess.Popen(
                [sys.executable, "-c", HELPER, str(rundir.path), str(rank), str(count), str(poll_s)],
                env=os.environ | {"AWS_ENDPOINT_URL": links[rank].endpoint},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(1, count)
        ]
        for helper in helpers:
            assert helper.stdout is not None and helper.stdout.readline()  # it is ready
        os.environ["AWS_ENDPOINT_URL"] = links[0].endpoint
        begun = time.perf_counter()
        upload_checkpoint(
            directory,
            Objects(f"s3://{bucket}"),
            notes=notes_of(rundir, directory.name),
            others=UploadCoordinator(rundir, world=count, poll_s=poll_s),
        )
        seconds.append(time.perf_counter() - begun)
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        assert verify(remote_source(f"s3://{bucket}/checkpoints/{directory.name}")) == []
        for helper in helpers:
            helper.communicate(timeout=60)
    size = read_manifest(directory).bytes
    return measurement(
        f"checkpoint_remote: {world} ranks against one rank",
        seconds[0] / seconds[1],
        unit="x",
        reference=f"{size / 1e6:.0f} MB, a link of {link_mb_s:.0f} MB/s for each rank: {seconds[0]:.1f} s by "
        f"one, {seconds[1]:.1f} s by {world}; every byte verified afterwards; moto",
        bar=">= 3",
    )


class Link:
    """A relay to the store that passes on so many bytes a second, over all its connections together."""

    def __init__(self, endpoint: str, *, bytes_per_s: float) -> None:
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self._store, self._bytes_per_s = (host, int(port)), bytes_per_s
        self._free_at, self._turn = time.monotonic(), threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            store = socket.create_connection(self._store)
            threading.Thread(
                target=self._pass, args=(client, store), kwargs={"is_limited": True}, daemon=True
            ).start()
            threading.Thread(target=self._pass, args=(store, client), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, *, is_limited: bool = False) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_limited:
                    with self._turn:
                        self._free_at = max(self._free_at, time.monotonic()) + len(data) / self._bytes_per_s
                        wait_s = self._free_at - time.monotonic()
                    time.sleep(max(0.0, wait_s))
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


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
        f"MB/s: bare put {size / median(bare) / 1e6:.0f}, backup {size / median(sending) / 1e6:.0f}, "
        f"verified {size / median(whole_s) / 1e6:.0f}; {size / 1e6:.0f} MB, {options.rounds} rounds, moto"
    )
    ratio = median(theirs / ours for theirs, ours in zip(bare, sending, strict=True))
    both = median(theirs / ours for theirs, ours in zip(bare, whole_s, strict=True))
    return [
        measurement(
            "checkpoint_remote: sending against a bare put", ratio, unit="x", reference=reference, bar=BAR
        ),
        measurement("checkpoint_remote: sent and verified", both, unit="x", reference=reference),
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

    def send(self, key: str, path: Path) -> SentFile:
        begun = time.perf_counter()
        sent = super().send(key, path)
        self.seconds += time.perf_counter() - begun
        return sent

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
