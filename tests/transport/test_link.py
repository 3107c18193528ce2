"""The ring over an emulated link, which is what the figures over links are measured with."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("offload", [False, True])
def test_nothing_is_faster_than_the_link_allows(monkeypatch, offload):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from emulated_link import emulated

    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(emulated(2, rate_mbit=40, round_trip_ms=20, offload=offload))
        except SystemExit as refused:
            pytest.skip(str(refused))
        command = [
            sys.executable,
            BENCHMARKS / "elastic_ring.py",
            "--json",
            "--rate-mbit=40",
            "--without-gloo",
        ]
        command += ["--elements=1000000", "--rounds=1", "--streams=2", "--warm-up=1"]
        command += [f"--namespaces={','.join(hosts.namespaces)}", f"--addresses={','.join(hosts.addresses)}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)

    share, against_sockets = (json.loads(line)["value"] for line in ended.stdout.splitlines())
    assert 0 < share <= 1
    assert against_sockets > 0
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not set(left.split()) & set(hosts.namespaces)
