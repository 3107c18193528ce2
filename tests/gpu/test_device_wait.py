"""A stream of a GPU that does not come to its end ends the wait of the host."""

from __future__ import annotations

import pytest
import torch

from bloomery.errors import RankLost
from bloomery.parallel.device_wait import wait_for_device
from bloomery.parallel.host_numbers import to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no accelerator"),
]
GPU = torch.device("cuda")


def test_the_host_waits_for_a_stream_until_its_deadline() -> None:
    wait_for_device(GPU, within_s=60.0)
    torch.cuda._sleep(20_000_000_000)  # cycles: some ten seconds
    with pytest.raises(RankLost, match="timed out"):
        wait_for_device(GPU, within_s=0.2)
    wait_for_device(GPU, within_s=600.0)


def test_numbers_come_to_a_gpu_while_its_stream_is_busy() -> None:
    torch.cuda._sleep(2_000_000_000)
    numbers = to_device([1.0, 0.1], dtype=torch.float64, device=GPU)
    assert not torch.cuda.current_stream().query(), "the copy did not wait for the stream"
    assert numbers.tolist() == [1.0, 0.1]
