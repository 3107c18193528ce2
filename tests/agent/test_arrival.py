"""A peer that starts while its coordinator is just started again."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from bloomery.agent.assemble import PeerAccess
from bloomery.agent.timeouts import timeouts_of
from bloomery.config.elastic import ElasticSection
from bloomery.coordination.etcd_process import free_ports, start_single
from bloomery.errors import CoordinatorAway


def access(port: int, **limits: float) -> PeerAccess:
    return PeerAccess(
        run="run",
        peer="a",
        endpoints=(f"http://127.0.0.1:{port}",),
        bundle=None,
        listen=(),
        advertise=(),
        timeouts=replace(timeouts_of(ElasticSection()), coordinator_s=0.2, **limits),
    )


def test_a_coordinator_that_comes_later_is_waited_for_and_that_is_told(tmp_path, caplog):
    (port,) = free_ports(1)
    mine, servers = access(port, coordinator_start_s=120.0), []
    with mine.etcd() as etcd:
        waiting = threading.Thread(target=mine.answered, args=(etcd,))
        waiting.start()
        waiting.join(1.0)
        assert waiting.is_alive() and "waiting" in caplog.text and str(port) in caplog.text
        servers.append(start_single(tmp_path / "etcd", port=port))
        waiting.join(120.0)
    servers[0].stop()
    assert not waiting.is_alive()


def test_one_that_never_comes_is_named_in_the_end():
    (port,) = free_ports(1)
    mine = access(port, coordinator_start_s=0.5)
    with mine.etcd() as etcd, pytest.raises(CoordinatorAway, match=str(port)):
        mine.answered(etcd)
