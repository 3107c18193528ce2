"""The newest checkpoint of a run, by which a supervisor sees whether an attempt brought the run on."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.errors import CheckpointError
from bloomery.events.run_directory import RunDirectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, order=True)
class NewestCheckpoint:
    """The newest checkpoint of a run. One that was saved later is greater, also of an earlier step.

    A rewind undoes steps, and what is saved after it is newer than what it undid. A rewind alone, or a start
    from an earlier checkpoint, makes none that is greater.

    incarnation, step: those of the checkpoint; 0 and -1 where there is none.
    """

    incarnation: int = 0
    step: int = -1


NO_CHECKPOINT = NewestCheckpoint()


def newest_checkpoint(rundir: RunDirectory, *, known: NewestCheckpoint = NO_CHECKPOINT) -> NewestCheckpoint:
    """Return the newest checkpoint that is part of a run; NO_CHECKPOINT where there is none.

    known: what it was before, which is returned where the disk does not say: no supervisor ends for that.
    """
    try:
        found = checkpoints(rundir)
    except (OSError, CheckpointError) as refused:
        log.warning("the checkpoints of %s could not be listed: %s", rundir.path, refused)
        return known
    if not found:
        return NO_CHECKPOINT
    newest = max(found, key=lambda checkpoint: checkpoint.step)
    return NewestCheckpoint(incarnation=newest.incarnation, step=newest.step)


def newest_step(rundir: RunDirectory) -> int:
    """Return the step of the newest checkpoint; -1 where there is none, or where the disk does not say."""
    return newest_checkpoint(rundir).step
