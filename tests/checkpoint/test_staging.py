"""Staging: the bytes of the state as they are when it is asked for, from any device."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from bloomery.checkpoint.format.state import StateEntry, whole
from bloomery.checkpoint.save import staging
from bloomery.checkpoint.save.direct import tensor_bytes
from bloomery.checkpoint.save.staging import CopyPace, _flat_pieces, pin, record_state_ready, stage, unpin
from bloomery.checkpoint.save.write_plan import RankWritePlan, WritePlanner
from bloomery.checkpoint.writer.ranks import Ranks
from bloomery.checkpoint.writer.shared_buffer import SharedBuffer

# Two jobs of ranks, however slow the machine: they have deadlines of their own.
pytestmark = pytest.mark.timeout(900)

DEADLINE_S = 120.0


def share_of(entries: list[StateEntry]) -> RankWritePlan:
    shares = WritePlanner(Ranks(), file_bytes=1 << 16)
    return shares.agree(entries, [shares.digest(entries)])


def staged(entries: list[StateEntry], share: RankWritePlan, buffer: SharedBuffer) -> dict[str, bytes]:
    """What lies in a buffer of each box, by its place in the files."""
    found = {}
    for file in share.files:
        position = file.offset + len(file.header)
        for one in file.items:
            size = one.tensor_in(entries).nbytes
            found[f"{one.entry} {one.rows}"] = bytes(buffer.view[position : position + size])
            position += size
    return found


def expected(entries: list[StateEntry], share: RankWritePlan) -> dict[str, bytes]:
    found = {}
    for one in (one for file in share.files for one in file.items):
        found[f"{one.entry} {one.rows}"] = b"".join(map(bytes, tensor_bytes(one.tensor_in(entries))))
    return found


def test_a_copy_keeps_its_pace_from_the_first_bytes_to_the_last(buffer: SharedBuffer, monkeypatch):
    monkeypatch.setattr(staging, "_COPY_BYTES", 10_000)
    at: list[tuple[int, int]] = []

    class Watched(CopyPace):
        def copied(self, bytes: int) -> None:
            at.append((bytes, buffer.filled))

    entries = state()
    share = share_of(entries)
    stage(share, entries, buffer, Watched(share.bytes, window_s=1.0, throttled=True))
    copied = [position for position, _ in at]
    assert copied == sorted(copied) and share.bytes - 4096 < copied[-1] <= share.bytes
    assert max(later - before for before, later in pairwise([0, *copied])) <= 10_000 + 2 * 4096
    assert all(filled == position for position, filled in at), "the writer may have what was copied"


def test_a_copy_takes_half_of_the_time_that_it_has_and_pauses_where_it_is_ahead(
    monkeypatch: pytest.MonkeyPatch,
):
    now, paused = [100.0], list[float]()
    monkeypatch.setattr(staging, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pace = CopyPace(1000, window_s=8.0, throttled=True)
    monkeypatch.setattr(pace._pauses_no_more, "wait", paused.append)
    for at, copied in ((100.5, 500), (103.0, 600), (103.0, 1000)):
        now[0] = at
        pace.copied(copied)
    assert paused == [1.5, 1.0]
    for idle in (CopyPace(1000, window_s=8.0, throttled=False), CopyPace(0, window_s=8.0, throttled=True)):
        monkeypatch.setattr(idle._pauses_no_more, "wait", paused.append)
        idle.copied(1000)
    assert len(paused) == 2


def unhurried(share: RankWritePlan) -> CopyPace:
    return CopyPace(share.bytes, window_s=0.0, throttled=False)


@pytest.fixture
def buffer() -> Iterator[SharedBuffer]:
    one = SharedBuffer.create(8 << 20, name="test")
    yield one
    one.close()


def state(device: str | torch.device = "cpu") -> list[StateEntry]:
    base = torch.randn(300, 80, device=device)
    tensors = {
        "model.plain": base.clone(),
        "model.turned": base.t(),
        "model.cut": base[:, 2:31],
        "model.one": torch.tensor(3.0, device=device),
        "model.none": torch.zeros(0, 7, device=device),
        "model.mask": torch.rand(17, device=device) > 0.5,
        "model.half": base[:5].to(torch.bfloat16),
        "model.count": torch.arange(9, device=device),
    }
    return [whole(name, tensor) for name, tensor in tensors.items()]


@pytest.mark.parametrize("copy_bytes", [100, 4096, 1 << 30])
def test_pieces_of_a_tensor_are_its_bytes_in_order_none_much_larger_than_a_step(copy_bytes: int):
    for entry in state():
        pieces = list(_flat_pieces(entry.tensor, copy_bytes=copy_bytes))
        assert b"".join(piece.numpy().tobytes() for piece in pieces) == b"".join(tensor_bytes(entry.tensor))
        assert all(0 < len(piece) <= copy_bytes for piece in pieces)


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("offset", [0, 1, 63])
@pytest.mark.parametrize("length", [1, 64, 4096, (4 << 12) + 63, (4 << 12) + 64, (9 << 12) + 77])
def test_a_copy_writes_what_it_is_to_and_nothing_beside(
    monkeypatch: pytest.MonkeyPatch, built: bool, offset: int, length: int
):
    if not built:
        monkeypatch.setattr(staging, "library", lambda: None)
    source = torch.randint(0, 256, (length + 5,), dtype=torch.uint8)
    target = torch.full((length + 200,), 7, dtype=torch.uint8)
    staging._copy_in_memory(target[offset : offset + length], source[5:])
    assert target[offset : offset + length].equal(source[5:])
    assert bool((target[:offset] == 7).all()) and bool((target[offset + length :] == 7).all())


def test_a_share_is_laid_out_once_and_staged_from_whatever_tensors_come(buffer: SharedBuffer):
    shares = WritePlanner(Ranks(), file_bytes=1 << 16)
    first, second = state(), state()
    share = shares.agree(first, [shares.digest(first)])
    assert shares.agree(second, [shares.digest(second)]) is share and len(share.files) > 2
    for entries in (first, second):
        stage(share, entries, buffer, unhurried(share))
        assert staged(entries, share, buffer) == expected(entries, share)
        assert buffer.filled == share.bytes
    assert expected(first, share) != expected(second, share)
    other = [*second, whole("model.more", torch.ones(3))]
    assert shares.agree(other, [shares.digest(other)]) is not share


def test_who_waits_is_not_kept_waiting_by_a_copy_that_begins_later(buffer: SharedBuffer):
    entries = state()
    share = share_of(entries)
    pace = CopyPace(share.bytes, window_s=1e6, throttled=True)  # at this pace it takes days
    pace.stop_pausing()
    copying = threading.Thread(target=stage, args=(share, entries, buffer, pace), daemon=True)
    copying.start()
    copying.join(DEADLINE_S)
    assert not copying.is_alive() and buffer.filled == share.bytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("pinned", [False, True])
def test_a_device_is_copied_from_as_it_was_asked_to_be_while_it_works_on(buffer: SharedBuffer, pinned: bool):
    device = torch.device("cuda", torch.cuda.device_count() - 1)  # not the one that a new thread has
    torch.cuda.set_device(device)
    assert not pinned or pin(buffer, device)
    entries = state(device)
    share = share_of(entries)
    busy = torch.randn(4096, 4096, device=device)
    for _ in range(50):
        busy = busy @ busy / 64
    entries[0].tensor.fill_(7)  # asked for, and not done yet
    ready = record_state_ready(device)
    for _ in range(50):
        busy = busy @ busy / 64  # what a step computes meanwhile
    failures: list[BaseException] = []

    def copy() -> None:
        try:
            stage(share, entries, buffer, unhurried(share), ready=ready)
        except BaseException as error:  # noqa: BLE001  — told below
            failures.append(error)

    copying = threading.Thread(target=copy)
    copying.start()
    copying.join(DEADLINE_S)
    torch.cuda.synchronize(device)
    assert failures == [] and buffer.filled == share.bytes
    assert staged(entries, share, buffer) == expected(entries, share)
    filled = [found for key, found in staged(entries, share, buffer).items() if key.startswith("0 ")]
    assert b"".join(filled) == torch.full((300, 80), 7.0).numpy().tobytes()
    if pinned:
        unpin(buffer)
