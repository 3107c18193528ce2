"""Commands on checkpoints tell how many bytes they have read, of how many, up to all."""

from pathlib import Path

from tests.checkpoint.small_run import Run

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.checkpoint.format.manifest import read_manifest
from bloomery.cli.ckpt import verify_watched
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.records import counting
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.slim import slim_checkpoint
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave


class Told:
    """What a progress callback was told, by stage."""

    def __init__(self) -> None:
        self.stages: dict[str, list[tuple[int, int]]] = {}

    def __call__(self, stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        assert unit == "bytes"
        self.stages.setdefault(stage, []).append((done, total))


def saved(tmp_path: Path) -> Path:
    rundir = RunDirectory(tmp_path / "run").create()
    run, store = Run(size=1 << 19), Store(rundir, CheckpointSection(background="off"))
    store.restore(run.parts)
    store.save(RunStateToSave(run.fill(1).parts, step=1, values={"train": {}, "data": {}}))
    return checkpoints(rundir)[-1].directory


def test_verifying_tells_each_read_and_ends_at_all_bytes_of_the_data(tmp_path: Path) -> None:
    directory, told = saved(tmp_path), Told()
    assert verify_watched(directory, told) == []
    ((stage, reads),) = told.stages.items()
    manifest = read_manifest(directory)
    assert stage == f"verifying {directory.name}" and len(reads) >= len(manifest.files)
    assert reads[-1] == (manifest.bytes - manifest.index_bytes, manifest.bytes)


def test_slimming_tells_what_it_reads_of_the_model(tmp_path: Path) -> None:
    directory, told = saved(tmp_path), Told()
    slim_checkpoint(directory, tmp_path / "slim", progress=told)
    (reads,) = told.stages.values()
    (model,) = (file for file in read_manifest(directory).files if file.name.startswith("model-"))
    assert reads == sorted(reads) and reads[-1][1] == model.bytes and 0 < reads[-1][0] <= model.bytes


def test_counts_add_up() -> None:
    told = Told()
    count = counting(told, "x", 10)
    for step in (1, 2, 3):
        count(step)
    assert told.stages == {"x": [(1, 10), (3, 10), (6, 10)]}
