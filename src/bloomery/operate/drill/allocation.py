"""The nodes on which a drill trains: this machine, or all nodes of the SLURM job of its batch script."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from bloomery.errors import TrainingFailed
from bloomery.operate.launcher import node_name


@dataclass(frozen=True, kw_only=True)
class DrillNodes:
    """The nodes of a drill.

    count: their number. here: the name of this one in heartbeats. is_allocation: whether srun reaches them.
    """

    count: int = 1
    here: str = ""
    is_allocation: bool = False

    def launch(self) -> list[str]:
        """Return the words that start `bloomery launch …` on every node."""
        words = [sys.executable, "-m", "bloomery", "launch"]
        # The nodes decide together what a failure ends, as they do in a job of `bloomery submit` with spares.
        return ["srun", "--ntasks-per-node=1", "--no-kill", *words] if self.is_allocation else words

    def reach(self, host: str) -> list[str]:
        """Return the words before a command that let it run on a node beside the training; [] here."""
        if not self.is_allocation or host == self.here:
            return []
        return ["srun", "--overlap", "--quiet", "--nodes=1", "--ntasks=1", f"--nodelist={host}"]


def drill_nodes(environment: Mapping[str, str] | None = None) -> DrillNodes:
    """Return the nodes of this job; only this machine outside of a job and in a job of one node.

    Raises TrainingFailed within a step, where srun cannot start another on the same nodes.
    """
    given = os.environ if environment is None else environment
    count = int(given.get("SLURM_JOB_NUM_NODES", "1") or 1)
    if "SLURM_JOB_ID" not in given or count == 1:
        return DrillNodes()
    if given.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise TrainingFailed(
            f"srun has started {given['SLURM_STEP_NUM_TASKS']} drills, each of which would start all ranks.",
            remedy="Write `bloomery drill` in the batch script without srun: it starts the launchers itself.",
        )
    return DrillNodes(count=count, here=node_name(given), is_allocation=True)
