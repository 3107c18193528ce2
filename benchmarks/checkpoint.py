"""Saving: what it costs the training beside it, and how near it comes to what the disk can take.

Everything that is compared is measured in turns in one run, and a ratio is the median over rounds, so that a
machine that slows down slows both. The disk is the one under `--directory`; one in memory is refused.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract import Measurement, measurement, report
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from bloomery.checkpoint.format.catalogue import CommittedCheckpoint
from bloomery.checkpoint.format.state import StateEntry, whole
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.run_directory import RunDirectory
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave

PARTS = ("blocking", "steps", "save")
TENSOR_BYTES = 16 << 20
READ_BACK_S = 120.0
ALONE = 4
"""Steps without a save after each."""
WAYS = (
    {"at_once": 1, "piece_bytes": 32 << 20, "is_reserved": False},
    {"at_once": 2, "piece_bytes": 32 << 20, "is_reserved": False},
    {"at_once": 4, "piece_bytes": 8 << 20, "is_reserved": True},
)
"""Of writing directly: the quickest counts, in each round anew."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    directory = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.directory))
    try:
        _refuse_memory(directory)
        _start_torch_distributed(directory)
        chosen = [part for part in PARTS if options.only in (None, part)]
        found: list[Measurement] = []
        for part in chosen:
            found += _MEASURES[part](options, directory / part)
        return report(found, as_json=options.json)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        shutil.rmtree(directory, ignore_errors=True)


class State:
    """Tensors of 16 MiB, so many as make up the state."""

    def __init__(self, bytes: int) -> None:
        rows = TENSOR_BYTES // 4096
        count = max(1, bytes // TENSOR_BYTES)
        self.tensors = {f"model.{number:04d}": torch.randn(rows, 1024) for number in range(count)}

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def state_entries(self) -> Iterable[StateEntry]:
        return [whole(name, tensor) for name, tensor in self.tensors.items()]

    def state_values(self) -> dict[str, Any]:
        return {}

    def load_state_values(self, values: Any) -> None:
        pass


class Work:
    """What a step computes: products with all of torch's threads, for about so many seconds."""

    def __init__(self) -> None:
        self._left, self._right = torch.randn(512, 512), torch.randn(512, 512)
        self._count = 1
        self()

    def last(self, seconds: float) -> None:
        for _ in range(3):
            self._count = max(1, round(self._count * seconds / _timed(self)))

    def __call__(self) -> None:
        for _ in range(self._count):
            self._left @ self._right


def measure_blocking(options: argparse.Namespace, directory: Path) -> list[Measurement]:
    """Seconds for which a save stops the training: ours, one copy of the state, and DCP's."""
    state, work = State(int(options.gigabytes * 1e9)), Work()
    copy = _memcpy_of(state)
    copy_s = median(_timed(copy) for _ in range(3))
    rows: dict[str, list[float]] = {"copy": [], "ours": [], "short": [], "dcp thread": [], "dcp process": []}
    with _store(directory, state) as store:
        _ours(store, state, work, step=1)  # the buffers are made, and the pace is known
        for number in range(options.rounds):
            rows["copy"].append(_timed(copy))
            work.last(4 * copy_s)
            rows["ours"].append(_ours(store, state, work, step=2 * number + 2))
            work.last(1.2 * copy_s)
            rows["short"].append(_ours(store, state, work, step=2 * number + 3))
            for kind in AsyncCheckpointerType:
                if number < options.peer_rounds:
                    rows[f"dcp {kind.value}"].append(_dcp_async(state, directory / "dcp", kind))
            _tell(f"round {number + 1} of {options.rounds}", rows)
    medians = {name: median(times) for name, times in rows.items() if times}
    table = ", ".join(f"{name} {1000 * seconds:.1f}" for name, seconds in medians.items())
    about = f"{state.bytes / 1e9:.2f} GB; ms: {table}; {_machine()}"
    dcp_s = min(medians[name] for name in medians if name.startswith("dcp"))
    return [
        measurement(
            "checkpoint: blocking of a save, step 4 × a copy",
            medians["ours"] / medians["copy"],
            unit="copies",
            reference=about,
            bar="<= 0.1",
        ),
        measurement(
            "checkpoint: blocking of a save, step 1.2 × a copy",
            medians["short"] / medians["copy"],
            unit="copies",
            reference=about,
            bar="<= 0.1",
        ),
        measurement(
            "checkpoint: worst blocking of all",
            max(*rows["ours"], *rows["short"]) / medians["copy"],
            unit="copies",
            reference=about,
            bar="<= 1.2",
        ),
        measurement(
            "checkpoint: blocking of DCP's async_save over ours",
            dcp_s / medians["ours"],
            unit="x",
            reference=about,
            bar=">= 20",
        ),
    ]


def measure_steps(options: argparse.Namespace, directory: Path) -> list[Measurement]:
    """How much slower steps are beside which the state is copied or written; the throttle is on.

    Each save goes on beside as many steps as it takes: the first has the copying beside it, all have writing.
    A few steps without a save follow each.
    """
    state, work = State(int(options.gigabytes * 1e9 / 5)), Work()
    copy = _memcpy_of(state)
    work.last(options.copies * median(_timed(copy) for _ in range(9)))
    firsts, others, alone = [], [], []
    with _store(directory, state) as store:
        _ours(store, state, work, step=1)
        store.take_save_results()  # that one: below it would end a stretch
        for number in range(options.steps):
            stretch = [_step(store, state, work, save=number + 2)]
            while not store.take_save_results():
                stretch.append(_step(store, state, work))
            firsts.append(stretch[0])
            others += stretch[1:]
            _drop(store.checkpoints())
            alone += [_step(store, state, work) for _ in range(ALONE)]
    quiet_s = median(alone)
    spread = ", ".join(f"{one:.3f}" for one in np.quantile(alone, (0.1, 0.9)))
    about = (
        f"{len(firsts)} saves of {state.bytes / 1e9:.2f} GB beside {len(firsts + others)} steps; {len(alone)}"
        f" steps alone of {quiet_s:.3f} s (a tenth below and above: {spread}); {_machine()}"
    )
    return [
        measurement(
            f"checkpoint: a step of {options.copies:g} copies beside {what}",
            100 * (median(times) / quiet_s - 1),
            unit="%",
            reference=about,
            bar=bar,
        )
        for what, times, bar in (
            ("a save", firsts + others, "<= 5"),
            ("the copying of a save", firsts, None),
            ("the writing of a save", others, None),
        )
        if times
    ]


def _step(store: Store, state: State, work: Work, *, save: int | None = None) -> float:
    begun = time.perf_counter()
    if save is not None:
        assert store.begin_save(RunStateToSave({"model": state}, step=save))
    work()
    store.wait_staged()
    return time.perf_counter() - begun


def measure_save(options: argparse.Namespace, directory: Path) -> list[Measurement]:
    """GB/s from the call until everything is durable: ours, the disk's limit, and DCP's."""
    state = State(int(options.gigabytes * 1e9))
    rows: dict[str, list[float]] = {"limit": [], "ours": [], "dcp": []}
    with _store(directory, state, throttle=False) as store, _aligned(state.bytes) as buffer:
        for step in (1, 2):  # both buffers
            store.save(RunStateToSave({"model": state}, step=step))
        store.take_save_results()
        _wait_until_read_back(store)
        for number in range(options.rounds):
            limits = [
                _timed(lambda way=way: _write_directly(buffer, directory / "raw", **way)) for way in WAYS
            ]
            rows["limit"].append(min(limits))
            (directory / "raw").unlink()
            rows["ours"].append(_timed(lambda number=number: _durably(store, state, step=number + 3)))
            _wait_until_read_back(store)
            _drop(store.checkpoints())
            if number < options.peer_rounds:
                rows["dcp"].append(_timed(lambda: _dcp_save(state, directory / "dcp")))
                shutil.rmtree(directory / "dcp", ignore_errors=True)
            _tell(f"round {number + 1} of {options.rounds}", rows)
    speeds = {name: state.bytes / 1e9 / median(times) for name, times in rows.items() if times}
    table = ", ".join(f"{name} {speed:.2f}" for name, speed in speeds.items())
    about = (
        f"{state.bytes / 1e9:.2f} GB; GB/s: {table}; limit: O_DIRECT from memory, in pieces of 32 MiB one or "
        f"two at once, or of 8 MiB four at once into blocks that were reserved, and fsync; {_machine()}"
    )
    title, paired = "checkpoint: a durable save against", _paired(rows["limit"], rows["ours"])
    found = [measurement(f"{title} the disk's limit", paired, unit="x", reference=about, bar=">= 0.85")]
    if "dcp" in speeds:
        ratio = speeds["ours"] / speeds["dcp"]
        found.append(measurement(f"{title} DCP", ratio, unit="x", reference=about, bar=">= 2.5"))
        most = speeds["limit"] / speeds["dcp"]  # no save is quicker than the disk
        found.append(measurement("checkpoint: the disk's limit against DCP", most, unit="x", reference=about))
    return found


def _paired(slower: Sequence[float], faster: Sequence[float]) -> float:
    return median(theirs / ours for theirs, ours in zip(slower, faster, strict=True))


_MEASURES: dict[str, Callable[[argparse.Namespace, Path], list[Measurement]]] = {
    "blocking": measure_blocking,
    "steps": measure_steps,
    "save": measure_save,
}


def _memcpy_of(state: State) -> Callable[[], None]:
    """Return what copies the state into memory that is warm, as memcpy does: with one thread."""
    pairs = [(tensor.clone().numpy(), tensor.numpy()) for tensor in state.tensors.values()]

    def copy() -> None:
        for target, source in pairs:
            np.copyto(target, source)

    copy()
    return copy


@contextmanager
def _store(directory: Path, state: State, *, throttle: bool = True) -> Iterator[Store]:
    section = CheckpointSection(background="on", throttle=throttle)
    with Store(RunDirectory(directory / "run").create(), section) as store:
        # Reading back and removing what is old come after a save, and are not part of it.
        store._prune = lambda length: None  # type: ignore[method-assign]
        store.restore({"model": state})
        yield store


def _drop(saved: Iterable[CommittedCheckpoint]) -> None:
    for found in saved:
        shutil.rmtree(found.directory)


def _ours(store: Store, state: State, work: Work, *, step: int) -> float:
    """Seconds that a save beside a step blocks: to begin it, and to wait before the state is written.

    Two steps without a save go before, as in a run.
    """
    for _ in range(2):
        work()
        store.wait_staged()
    begun = time.perf_counter()
    assert store.begin_save(RunStateToSave({"model": state}, step=step))
    blocked = time.perf_counter() - begun
    work()
    blocked += _timed(store.wait_staged)
    store.wait_for_saves()
    _drop(store.checkpoints()[:-1])  # the newest is being read back: the next save would report damage
    return blocked


def _durably(store: Store, state: State, *, step: int) -> None:
    store.save(RunStateToSave({"model": state}, step=step))
    (failed,) = {one.failure for one in store.take_save_results()}
    assert failed is None, failed


def _wait_until_read_back(store: Store) -> None:
    """Wait until the newest checkpoint has been read back, as it long has been when a run saves again."""
    background = store._saver.background
    newest = store.newest()
    assert background is not None and newest is not None
    deadline = time.monotonic() + READ_BACK_S
    while newest.directory.name not in background.check._outcomes:
        assert time.monotonic() < deadline, f"{newest.directory} was not read back in {READ_BACK_S:.0f} s"
        time.sleep(0.01)


def _dcp_async(state: State, directory: Path, kind: AsyncCheckpointerType) -> float:
    shutil.rmtree(directory, ignore_errors=True)
    begun = time.perf_counter()
    future = dcp.async_save(state.tensors, checkpoint_id=str(directory), async_checkpointer_type=kind)
    blocked = time.perf_counter() - begun
    future.result()
    shutil.rmtree(directory, ignore_errors=True)
    return blocked


def _dcp_save(state: State, directory: Path) -> None:
    writer = dcp.FileSystemWriter(str(directory), sync_files=True)
    dcp.save(state.tensors, storage_writer=writer)


@contextmanager
def _aligned(bytes: int) -> Iterator[memoryview]:
    memory = mmap.mmap(-1, bytes + -bytes % mmap.PAGESIZE)
    view = memoryview(memory)
    noise = os.urandom(1 << 20)
    for start in range(0, len(view), len(noise)):
        view[start : start + len(noise)] = noise[: len(view) - start]
    yield view
    view.release()
    memory.close()


def _write_directly(
    buffer: memoryview, path: Path, *, at_once: int, piece_bytes: int, is_reserved: bool
) -> None:
    """Do what the disk cannot be asked to do faster."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    if is_reserved:
        os.posix_fallocate(file, 0, len(buffer))
    starts = range(0, len(buffer), piece_bytes)
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda start: os.pwrite(file, buffer[start : start + piece_bytes], start), starts))
    os.fsync(file)
    os.close(file)


def _timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def _tell(title: str, rows: dict[str, list[float]]) -> None:
    gc.collect()
    shown = ", ".join(f"{name} {times[-1]:.4f}" for name, times in rows.items() if times)
    print(f"{title}: {shown} s", file=sys.stderr, flush=True)


def _machine() -> str:
    return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _refuse_memory(directory: Path) -> None:
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(directory)], capture_output=True, text=True, check=True
    ).stdout.strip()
    if kind in ("tmpfs", "ramfs"):
        raise SystemExit(f"{directory} is in memory: name a place on a disk with --directory")


def _start_torch_distributed(directory: Path) -> None:
    """DCP's asynchronous saves want a process group, of one."""
    dist.init_process_group("gloo", init_method=f"file://{directory / 'meeting'}", rank=0, world_size=1)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", choices=PARTS, help="measure this alone")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer-rounds", type=int, default=3, help="rounds in which DCP takes part")
    parser.add_argument("--steps", type=int, default=20, help="saves, each beside a step or more")
    parser.add_argument("--copies", type=float, default=12, help="so many copies of the state a step takes")
    parser.add_argument("--directory", default=".", help="on the disk to measure")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
