"""Checkpoints of several blocks, made without torch: a file that all peers have, and one of its own."""

import json
import random
from contextlib import suppress
from pathlib import Path

from bloomery.checkpoint.format.commit import Part, begin_partial, commit, partial_directory
from bloomery.checkpoint.format.data_file import HashingWriter
from bloomery.checkpoint.format.manifest import IndexedBox, read_index, read_manifest

MIB = 1 << 20


def make_checkpoint(directory, *, own, common=7, size=5 * MIB + 12_345, step=12, incarnation=3):
    """A whole checkpoint: `model` is a function of `common`, `optim` of `own`."""
    contents = {
        "model": random.Random(common).randbytes(size),
        "optim": random.Random(1000 + own).randbytes(size),
    }
    return write_checkpoint(directory, contents, step=step, incarnation=incarnation)


def write_checkpoint(directory, contents, *, step, incarnation=3):
    """A whole checkpoint of these bytes, one tensor and one file each; an unfinished one is begun anew."""
    partial = partial_directory(directory, step=step, incarnation=incarnation)
    begin_partial(partial)
    parts = []
    for part, content in contents.items():
        size = len(content)
        name = f"{part}-r00000-of-00001-000.safetensors"
        header = json.dumps(
            {f"{part}.x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        ).encode()
        header += b" " * (-(8 + len(header)) % 4096)
        lead = len(header).to_bytes(8, "little") + header
        with HashingWriter(partial / name) as file:
            file.write(memoryview(lead))
            file.write(memoryview(content))
            record = file.finish()
        box = IndexedBox(
            name=f"{part}.x",
            dtype="uint8",
            global_shape=(size,),
            offset=(0,),
            shape=(size,),
            scope="shared",
            file=name,
            begin=len(lead),
            end=len(lead) + size,
        )
        parts.append((record, box))
    made = Part(files=tuple(record for record, _ in parts), boxes=tuple(box for _, box in parts))
    return commit(partial, [made], step=step, incarnation=incarnation, time=1.0, values={}, about={})


def content_of(checkpoint, part):
    """The bytes of one of its tensors."""
    data = (checkpoint / f"{part}-r00000-of-00001-000.safetensors").read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def files_of(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def forged(checkpoint, directory, *, prefix):
    """A copy of a checkpoint with a byte of a tensor named `prefix…` changed, and with the hashes of that."""
    manifest = read_manifest(checkpoint)
    index = read_index(checkpoint, manifest)
    changed = next(box for box in index.boxes if box.name.startswith(prefix))
    partial = partial_directory(directory, step=manifest.step, incarnation=manifest.incarnation)
    begin_partial(partial)
    records = []
    for record in manifest.files:
        content = bytearray((checkpoint / record.name).read_bytes())
        if record.name == changed.file:
            content[changed.begin] ^= 1
        with HashingWriter(partial / record.name) as file:
            file.write(memoryview(content))
            records.append(file.finish())
    made = Part(files=tuple(records), boxes=index.boxes)
    return commit(
        partial,
        [made],
        step=manifest.step,
        incarnation=manifest.incarnation,
        time=1.0,
        values=manifest.values,
        about=manifest.about,
    )


def open_files_of(directory: Path) -> list[str]:
    """The names of the files of a directory that this process has open, sorted."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            path = descriptor.readlink()
            names += [path.name] if path.parent == directory else []
    return sorted(names)
