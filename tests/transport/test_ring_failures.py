"""A ring that cannot go on ends on both sides, names the side, and is of no more use."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import numpy as np
import pytest
from tests.transport.test_ring_all_reduce import parts_of


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e38])
def test_what_is_not_finite_is_refused_before_anything_is_sent(members, bad):
    ring = members(2, "int8")
    parts = parts_of(2, 1000)
    parts[0][999] = bad

    refused, _ = ring.all_reduce(parts, of=[0])

    assert refused.kind == "not finite" and refused.culprit is None
    parts[0][999] = 0
    assert not any(isinstance(one, Exception) for one in ring.all_reduce(parts)), "nothing had been sent"
    assert parts[0].tobytes() == parts[1].tobytes()


def test_values_that_a_weight_takes_out_of_bounds_are_refused(members):
    ended = members(2, "int8").all_reduce([np.full(3, 1e20, np.float32)] * 2, of=[0], weight=1e20)
    assert ended[0].kind == "not finite"


def test_a_closed_connection_ends_the_round_and_names_the_side(members):
    for close, culprit in ((lambda hops: hops[1][0][0], "previous"), (lambda hops: hops[0][0][1], "next")):
        ring = members(2, "int8")
        close(ring.hops).close()

        ended = ring.all_reduce(parts_of(2, 100_000), of=[0])[0]

        assert (ended.kind, ended.culprit) == ("closed", culprit)


def test_a_member_lost_within_a_round_ends_it_on_both_sides(members):
    ring = members(3, "int8", threads=1)

    def lose_member_two():
        ring.hops[1][0][1].recv(1, socket.MSG_PEEK)  # member 1 sends to it
        for end in (*ring.hops[1], *ring.hops[2]):
            end[0].shutdown(socket.SHUT_RDWR)

    loser = threading.Thread(target=lose_member_two)
    loser.start()
    ended = ring.all_reduce(parts_of(3, 200_000), of=[0, 1])
    loser.join()

    assert [(one.kind, one.culprit) for one in ended[:2]] == [("closed", "previous"), ("closed", "next")]


def test_a_member_that_does_not_come_is_a_stall_by_its_neighbour(members):
    ring = members(2, "int8")

    ended = ring.all_reduce(parts_of(2, 100), of=[0], stall_s=0.2)[0]

    assert (ended.kind, ended.culprit) == ("stalled", "previous")
    assert "0 of 2 chunks" in ended.message


@pytest.mark.parametrize("count", [100, 2_000_000], ids=["few", "more than sockets hold"])
def test_members_that_begin_later_are_waited_for_as_long_as_is_allowed(members, count):
    ring, over, ended = members(2, "int8"), threading.Event(), list[object]()

    def begin():
        more = {"stall_s": 0.1, "grace_s": 60.0}
        ended.extend(ring.all_reduce(parts_of(2, count), of=[0], each=lambda index: more))
        over.set()

    first = threading.Thread(target=begin)
    first.start()
    assert not over.wait(0.4)
    ring.rings[0].cancel()
    first.join()
    assert ended[0].kind == "cancelled"


def test_after_the_time_that_is_allowed_a_member_that_has_not_begun_is_a_stall(members):
    ended = members(2, "int8").all_reduce(
        parts_of(2, 100), of=[0], stall_s=0.1, each=lambda index: {"grace_s": 0.1}
    )[0]
    assert (ended.kind, ended.culprit) == ("stalled", "previous")


def test_the_deadline_ends_a_round_in_which_something_still_moves(members):
    ended = members(2, "int8").all_reduce(parts_of(2, 100), of=[0], deadline_s=0.2)[0]
    assert (ended.kind, ended.culprit) == ("deadline", "previous")


def test_a_member_that_reads_no_more_because_the_next_one_is_slow_blames_nobody_for_the_silence(members):
    ring, over = members(4, "int8"), threading.Event()
    slow = [end for _, end in ring.hops[1]]

    def take_little():
        while not over.wait(0.02):
            for end in slow:
                with suppress(BlockingIOError):
                    end.recv(2000, socket.MSG_DONTWAIT)

    reader = threading.Thread(target=take_little)
    reader.start()

    def times(index):
        return {"stall_s": 1.0, "deadline_s": 2.5} if index == 1 else {"deadline_s": 6.0}

    ended = ring.all_reduce(parts_of(4, 4_000_000), of=[0, 1, 3], each=times)[1]
    over.set()
    reader.join()

    assert ended.kind == "deadline"


def test_a_failed_ring_is_of_no_more_use(members):
    ring, parts = members(2, "int8"), parts_of(2, 100)
    ring.all_reduce(parts, of=[0], deadline_s=0.1)

    again = ring.all_reduce(parts, of=[0])[0]

    assert again.kind == "closed" and "before" in again.message


@pytest.mark.parametrize("threads", [0, 2])
def test_cancelling_ends_a_running_call_and_every_later_one(members, threads):
    ring, parts = members(2, "int8", threads=threads), parts_of(2, 1_000_000)
    ended = []
    caller = threading.Thread(target=lambda: ended.extend(ring.all_reduce(parts, of=[0])))
    caller.start()
    ring.hops[0][0][1].recv(1)  # it sends

    ring.rings[0].cancel()
    untouched = parts[0].copy()
    caller.join()

    assert ended[0].kind == "cancelled"
    assert np.array_equal(parts[0], untouched)
    assert ring.all_reduce(parts, of=[0])[0].kind == "cancelled"


def test_closing_from_another_thread_ends_a_running_call(members):
    ring, parts = members(2, "int8"), parts_of(2, 100_000)
    ended = []
    caller = threading.Thread(target=lambda: ended.extend(ring.all_reduce(parts, of=[0])))
    caller.start()
    ring.hops[0][0][1].recv(1)

    ring.rings[0].close()
    caller.join()

    assert ended[0].kind == "cancelled"
    assert ring.all_reduce(parts, of=[0])[0].kind == "closed"


def test_a_ring_is_refused_after_a_fork(members):
    ring = members(2, "int8")
    child = os.fork()
    if not child:
        try:
            ring.rings[0].all_reduce(np.zeros(3, np.float32), round=0, epoch=0, stall_s=1, deadline_s=1)
        except RuntimeError as refused:
            os._exit(7 if "fork" in str(refused) else 1)
        os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    parts = parts_of(2, 10)
    assert not any(isinstance(one, Exception) for one in ring.all_reduce(parts))


def test_an_interrupt_ends_a_wait_in_the_main_thread():
    script = """if True:
        import signal, sys, numpy as np
        from bloomery.transport.ring_all_reduce import Ring
        signal.signal(signal.SIGINT, signal.default_int_handler)  # who started the tests may ignore it
        end, key = int(sys.argv[1]), bytes(32)
        ring = Ring(index=0, size=2, next_fds=[end], previous_fds=[end], send_keys=[key], receive_keys=[key],
                    codec="int8")
        try:
            ring.all_reduce(np.zeros(100, np.float32), round=0, epoch=0, stall_s=200, deadline_s=200)
        except KeyboardInterrupt:
            print("interrupted")
    """
    ours, its = socket.socketpair()
    command = [sys.executable, "-c", script, str(its.fileno())]
    with ours, its:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[its.fileno()])
        ours.recv(1)  # it is in the midst
        child.send_signal(signal.SIGINT)

        told, _ = child.communicate(timeout=120)

    assert (told, child.returncode) == ("interrupted\n", 0)
