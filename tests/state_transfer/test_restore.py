"""From one peer's store, over the wire, into another's."""

from tests.checkpoint.small_run import Run

from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.run_directory import RunDirectory
from bloomery.state_transfer.client import fetch_state
from bloomery.state_transfer.served_states import ServedStates
from bloomery.state_transfer.server import StateServer
from bloomery.state_transfer.source import PeerSource
from bloomery.train.checkpoint_store import Store
from bloomery.train.saved_state import RunStateToSave
from bloomery.transport.trust import Trust


def test_what_one_peer_saved_another_restores_to_the_bit(tmp_path):
    trust = Trust(token=b"a secret of the run")
    theirs = Store(RunDirectory(tmp_path / "theirs"), CheckpointSection(background="off"))
    there = Run(size=600_000)
    theirs.restore(there.parts)
    theirs.save(RunStateToSave(there.fill(3).parts, step=7))
    (saved,) = RunDirectory(tmp_path / "theirs").checkpoints.glob("step-*")
    with StateServer("127.0.0.1:0", trust, ServedStates()) as server:
        origin = PeerSource(peer="a", url=server.offer(saved, round=1, digest="ab12")[0])
        fetched = fetch_state(
            lambda: [origin], "ab12", tmp_path / "fetched", trust, progress_s=120.0, stall_s=60.0
        )
    mine = RunDirectory(tmp_path / "mine")
    mine.checkpoints.mkdir(parents=True)
    fetched.directory.rename(mine.checkpoints / fetched.directory.name)
    here = Run(size=600_000)
    restored = Store(mine, CheckpointSection(background="off")).restore(here.parts)
    assert restored is not None and restored.step == 7 and here.equals(there)
