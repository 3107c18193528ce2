"""Each place in the source that writes or renames a file does so through `durable`, or says here why not."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import bloomery

SOURCE = Path(bloomery.__file__).parent
_LOG = "a log: its last lines may be lost with the machine"
_MEMORY = "lies in a memory file system, which does not outlive the machine"
_AGAIN = "what a command prints to a file: the same command makes it again"
_CACHE = "a cache of what lies elsewhere, whose blocks are checked by their sums whenever a process opens it"

UNSYNCED = {
    "data/duplicates.py:_Keepers.__init__": "scratch of a command that begins anew after a kill",
    "data/duplicates.py:_allocated": "scratch of a command that begins anew after a kill",
    "data/duplicate_candidates.py:KeyFiles.__init__": "scratch of a command that begins anew after a kill",
    "data/duplicate_candidates.py:KeyFiles.candidates": "scratch of a command that begins anew after a kill",
    "data/duplicate_candidates.py:_divided": "scratch of a command that begins anew after a kill",
    "data/tokenize_worker.py:output_for_messages": "a pipe to the process that started this one",
    "cli/data_audit.py:_png": "into memory; its caller writes it through durable",
    "calibrate/machine.py:process_gib": "a text in a temporary directory, for a measurement",
    "calibrate/machine.py:disk_gb_per_s": "measures a disk, and removes the file",
    "checkpoint/writer/shared_buffer.py:SharedBuffer.create": _MEMORY,
    "parallel/device_wait.py:_write_flight_record": "a dump of an ending rank, as NCCL's watchdog writes it",
    "interchange/huggingface.py:_write_tokenizer": "the export is published, and so synced, as a whole",
    "checkpoint/save/peer_snapshots.py:_move": _MEMORY,
    "checkpoint/writer/partner.py:_receive_into": _MEMORY,
    "checkpoint/format/data_file.py:HashingWriter.__init__": "synced by `finish`, through durable",
    "checkpoint/format/data_file.py:_opened": "past the page cache; `write_image` syncs it, through durable",
    "interchange/generation_files.py:export_generation_files": "the export is synced, as a whole",
    "interchange/slim.py:slim_file": "torch writes by path; it is published, and so synced, afterwards",
    "checkpoint/remote/shared_upload.py:FileSender._note": "spares reading a copy back; if lost it is read",
    "checkpoint/format/verified_reader.py:_opened": "for reading only",
    "cli/fork.py:_share": "the fork is published, and so synced, as a whole",
    "cli/demo_steps.py:draw_png": _AGAIN,
    "cli/plot.py:draw": _AGAIN,
    "diloco/stored_average.py:StoredAverage.save": "a copy for peers; without it they fetch the state",
    "state_transfer/averages.py:_Download._begin": "removed after use, and at a start",
    "cli/guard.py:draw_replay": _AGAIN,
    "cli/report.py:draw_ledger": _AGAIN,
    "operate/sync/mirror.py:RunMirror._fetch_growing": "a copy: what a power cut takes is fetched again",
    "operate/sync/keeper.py:SyncTurn.is_ours": "an empty file to lock",
    "train/control.py:Control._take": "takes a request away, which is carried out at once",
    "operate/sync/published.py:_link": "links to files that are durable; a torn directory is made again",
    "operate/drill/faults.py:flip_checkpoint_bit": "damages a checkpoint on purpose",
    "operate/drill/faults.py:_fill": "takes the free space of a file system, and is removed",
    "operate/schedulers/machine_queue.py:start_runner": _LOG,
    "operate/schedulers/machine_queue.py:_opened": _LOG,
    "operate/schedulers/machine_queue.py:_hold": "a file to lock; its number tells of a living process",
    "operate/node_facts.py:_clock_s": "reads the clock of a file system, and removes the file",
    "operate/storage_probe.py:_write": "measures a file system, and removes the file",
    "operate/watch/watcher.py:RunWatcher._locked": "a file to lock",
    "cli/data_pairs.py:_draw": _AGAIN,
    "cli/peer_probe.py:draw_links": _AGAIN,
    "cli/simulate.py:draw_life": _AGAIN,
    "cli/simulate.py:draw_sweep": _AGAIN,
    "cli/config.py:_reference": _AGAIN,
    "cli/plan.py:_write": _AGAIN,
    "cli/standard_output.py:open_streams": "descriptors that are open",
    "cli/standard_output.py:discard_output": "/dev/null",
    "cli/rank_output.py:_RankLog.write": _LOG,
    "data/fetch.py:_bring": "grows over starts; it is published, and so synced, when it is whole",
    "data/sealing.py:SealWriter.__init__": "synced by `commit`, through durable",
    "train/rank_diagnostics.py:write_stacks_on_signal": "stacks of a process that hangs now",
    "data/indexed.py:IndexedWriter.__init__": "synced by `_commit`, through durable",
    "data/block_cache.py:BlockCache.__init__": _CACHE,
    "data/streaming.py:_bring_index": _CACHE,
    "coordination/etcd_log.py:shorten": _LOG,
    "coordination/etcd_process.py:launch": _LOG,
    "chaos/processes.py:ManagedProcess.start": _LOG,
    "state_transfer/partial_checkpoint.py:PartialCheckpoint.__init__": "synced by `finish`, through durable",
    "events/run_lock.py:_locked": "an empty file to lock",
    "events/journal.py:Journal.__init__": "a power cut costs the lines of steps that are trained again",
    "events/journal.py:Journal._follow_path": "as above",
}
"""Where a file is written or renamed without `durable`: module and function, and why that is right."""

_WRITING_METHODS = {"write_text", "write_bytes", "savefig", "tofile"}
_WRITING_CALLS = {
    "os": {"replace", "rename", "renames", "link", "fdopen"},
    "shutil": {"move", "copy", "copy2", "copyfile", "copytree"},
    "torch": {"save"},
    "np": {"save", "savez"},
    "tempfile": {"NamedTemporaryFile", "mkstemp"},
}


class _Writes(ast.NodeVisitor):
    """Finds calls that write or rename, by the function that they are in."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int]] = []
        self._within: list[str] = []

    def _enter(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()

    visit_FunctionDef = visit_ClassDef = visit_AsyncFunctionDef = _enter  # type: ignore[assignment]

    def visit_Call(self, node: ast.Call) -> None:
        if _writes(node):
            self.found.append((".".join(self._within), node.lineno))
        self.generic_visit(node)


def _writes(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        return function.id == "open" and _is_writing_mode(call, position=1)
    if not isinstance(function, ast.Attribute):
        return False
    owner = function.value.id if isinstance(function.value, ast.Name) else ""
    if owner == "durable":
        return False
    if owner == "os" and function.attr == "open":
        return "O_RDONLY" not in ast.unparse(call)
    if owner in _WRITING_CALLS:
        return function.attr in _WRITING_CALLS[owner]
    if function.attr == "open":
        return _is_writing_mode(call, position=0)
    if function.attr in {
        "rename",
        "replace",
    }:  # of a path: a text's has two arguments, a dataclass's has names
        return len(call.args) == 1 and not call.keywords
    return function.attr in _WRITING_METHODS


def _is_writing_mode(call: ast.Call, *, position: int) -> bool:
    modes = [argument for argument in call.args[position : position + 1]]
    modes += [keyword.value for keyword in call.keywords if keyword.arg == "mode"]
    return any(
        isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) & set("wax+")
        for mode in modes
    )


def _found(tree: ast.Module) -> list[tuple[str, int]]:
    writes = _Writes()
    writes.visit(tree)
    return writes.found


@cache
def _sources() -> dict[str, ast.Module]:
    """Each module but durable itself, by its path, parsed."""
    paths = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}
    return {
        name: ast.parse(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if name != "durable.py"
    }


@cache
def _all() -> list[tuple[str, str, int]]:
    return [(name, function, line) for name, tree in _sources().items() for function, line in _found(tree)]


def test_every_file_is_written_durably_or_says_why_not():
    unknown = [
        f"src/bloomery/{name}:{line} ({function})"
        for name, function, line in _all()
        if f"{name}:{function}" not in UNSYNCED
    ]
    assert not unknown, (
        "These write or rename a file without bloomery.durable, so a power cut may leave it empty or "
        f"missing. Use durable, or add a reason to UNSYNCED: {unknown}"
    )


def test_no_reason_is_left_of_a_place_that_is_gone():
    assert set(UNSYNCED) - {f"{name}:{function}" for name, function, _ in _all()} == set()


def test_syncs_and_locks_are_called_in_one_module_alone():
    callers = {
        f"{name}:{node.lineno}"
        for name, tree in _sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in {"fsync", "fdatasync", "flock", "lockf"}
    }
    assert callers == set()


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')",
        "open(path, mode='ab')",
        "path.open('wb')",
        "path.open('r+b')",
        "path.open(mode='x')",
        "path.write_text(text)",
        "path.write_bytes(data)",
        "os.replace(one, other)",
        "os.rename(one, other)",
        "partial.rename(final)",
        "path(staged).replace(path(target))",
        "os.open(path, os.O_WRONLY | os.O_CREAT)",
        "os.open(path, flags)",
        "torch.save(state, path)",
    ],
)
def test_a_new_unsynced_write_would_be_found(line: str):
    assert _found(ast.parse(f"def made():\n    {line}\n")) == [("made", 2)]


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "path.open('rb')",
        "text.replace('a', 'b')",
        "replace(section, steps=1)",
        "os.open(path, os.O_RDONLY)",
        "durable.replace(one, other)",
    ],
)
def test_reading_and_other_replacing_is_not_taken_for_writing(line: str):
    assert _found(ast.parse(f"def made():\n    {line}\n")) == []
