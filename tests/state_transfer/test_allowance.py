import pytest

from bloomery.state_transfer.server import CONNECTIONS
from bloomery.state_transfer.source import STALL_S
from bloomery.transport.sockets import RateLimiter


class Clock:
    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds


def test_what_is_sent_in_the_long_run_is_what_is_allowed_whatever_the_pauses():
    clock = Clock()
    allowance = RateLimiter(1000.0, clock=lambda: clock.now, sleep=clock.sleep)
    for _ in range(100):
        allowance.take(50)
    assert abs(clock.now - (100 * 50 / 1000 - 0.1)) < 1e-9
    clock.now += 60.0  # a pause earns no more than a tenth of a second
    began = clock.now
    for _ in range(100):
        allowance.take(50)
    assert abs(clock.now - began - (5.0 - 0.1)) < 1e-9


def test_without_a_limit_nobody_waits():
    def never(seconds):
        raise AssertionError

    RateLimiter(0.0, sleep=never).take(10**12)


@pytest.mark.parametrize("mbit_s", [1, 10, 50, 100, 1000])
def test_all_who_are_served_at_once_have_a_turn_before_they_take_the_server_for_dead(mbit_s):
    bytes_s = mbit_s * 1e6 / 8
    assert CONNECTIONS * RateLimiter(bytes_s).piece_bytes / bytes_s <= STALL_S / 2
