"""From one peer's store, over the wire, into another's."""

from small_run import Run

from bloomery.checkpoint.store import Store
from bloomery.config.keeping import CheckpointSection
from bloomery.elastic.links.trust import Trust
from bloomery.elastic.serving.fetch import fetch_state
from bloomery.elastic.serving.origin import Origin
from bloomery.elastic.serving.server import StateServer
from bloomery.elastic.serving.shelf import Shelf
from bloomery.events.rundir import RunDir


def test_what_one_peer_saved_another_restores_to_the_bit(tmp_path):
    trust = Trust(token=b"a secret of the run")
    theirs = Store(RunDir(tmp_path / "theirs"), CheckpointSection(background="off"))
    there = Run(size=600_000)
    theirs.restore(there.parts)
    theirs.save(there.fill(3).parts, step=7)
    (saved,) = RunDir(tmp_path / "theirs").checkpoints.glob("step-*")
    with StateServer("127.0.0.1:0", trust, Shelf()) as server:
        origin = Origin(peer="a", url=server.offer(saved, round=1, digest="ab12")[0])
        fetched = fetch_state(
            lambda: [origin], "ab12", tmp_path / "fetched", trust, progress_s=120.0, stall_s=60.0
        )
    mine = RunDir(tmp_path / "mine")
    mine.checkpoints.mkdir(parents=True)
    fetched.directory.rename(mine.checkpoints / fetched.directory.name)
    here = Run(size=600_000)
    restored = Store(mine, CheckpointSection(background="off")).restore(here.parts)
    assert restored is not None and restored.step == 7 and here.equals(there)
