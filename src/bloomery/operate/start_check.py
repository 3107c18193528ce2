"""Checks the nodes of a run before its ranks start: the quick preflight of `bloomery launch --supervise`.

It starts no process of its own but nvidia-smi and git, and takes well under a second without GPUs.
`bloomery preflight` measures matmuls and an all-reduce besides.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bloomery import durable
from bloomery.checkpoint.writer.leftover_memory import free_left_over, memory_directory
from bloomery.config.environment import variables_of
from bloomery.config.load import LoadedRecipe
from bloomery.events.incarnation import identity
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.diagnosis import Cause, Culprit, Diagnosis
from bloomery.operate.node_checks import NodeFinding, bad_hosts, judge_nodes
from bloomery.operate.node_facts import NodeFacts, gather_facts
from bloomery.operate.supervise import JobReactions
from bloomery.plan.parameters import count_parameters
from bloomery.plan.request import vocabulary_of, with_local_vocabulary

log = logging.getLogger(__name__)

_AGAIN_S = 5.0
"""The seconds after which a node with a finding checks again: a job may just have ended there."""
_BYTES_OF_PARAMETER = 12


@dataclass(frozen=True, kw_only=True)
class StartCheck:
    """What the nodes of a run must have.

    gpus: of each node. disk_gb: what must be free for the run directory.
    environment: the variables that its ranks get from the recipe.
    memory_directory: of the memory file system in which runs keep copies of checkpoints.
    """

    gpus: int
    disk_gb: float
    environment: Mapping[str, str]
    memory_directory: Path = Path("/dev/shm")

    def gather(self, rundir: RunDirectory, host: str) -> NodeFacts:
        """Return the facts of this node; gathers them a second time where something is wrong.

        What other runs have left in its memory is freed before: it would make the node unfit.
        """
        durable.make_directory(rundir.path)
        own = memory_directory(self.memory_directory, rundir.path.resolve(), identity(rundir))
        for path in free_left_over(self.memory_directory, but=own):
            log.info("memory that a run had left behind was freed: %s", path)
        facts = gather_facts(rundir.path, host=host)
        if bad_hosts(self.judge({host: facts})):
            time.sleep(_AGAIN_S)
            facts = gather_facts(rundir.path, host=host)
        return facts

    def judge(self, nodes: Mapping[str, NodeFacts]) -> list[NodeFinding]:
        """Return what is wrong with these nodes, each by itself and compared with the others."""
        return judge_nodes(nodes, disk_gb=self.disk_gb, gpus=self.gpus, environment=self.environment)

    def unfit_hosts(
        self,
        rundir: RunDirectory,
        nodes: Mapping[str, NodeFacts],
        *,
        say: Callable[[str], None],
        reactions: JobReactions | None,
    ) -> list[str]:
        """Journal versions and findings, say what is wrong, and return the hosts that must not be used.

        reactions: puts them into quarantine; None outside of a scheduler's job.
        """
        findings = self.judge(nodes)
        for finding in findings:
            say(f"preflight: {finding}\n  {finding.remedy}")
        with Journal(rundir.operations, is_shared=True) as journal:
            journal.write("preflight", incarnation=0, step=0, **_record(nodes, findings))
        unfit = bad_hosts(findings)
        if reactions is not None:
            for host in unfit:
                words = [finding.what for finding in findings if finding.host == host and finding.is_bad]
                reactions.on_bad_node(_diagnosis(host, words))
        return unfit


def _diagnosis(host: str, words: list[str]) -> Diagnosis:
    return Diagnosis(
        cause=Cause.UNFIT_NODE,
        culprit=Culprit(host=host),
        summary=f"{host} is not fit to train: {'; '.join(words)}",
        evidence=tuple(f"preflight: {what}" for what in words),
        sure=True,
    )


def start_check_of(loaded: LoadedRecipe) -> StartCheck | None:
    """Return what a recipe wants of its nodes; None where control.preflight is off."""
    recipe = loaded.recipe
    if not recipe.control.preflight:
        return None
    disk_gb = checkpoint_bytes(loaded) * (recipe.checkpoint.keep_last + 1) / 1e9
    variables = variables_of(recipe.environment)
    return StartCheck(
        gpus=recipe.submit.gpus_per_node,
        disk_gb=disk_gb,
        environment=variables,
        memory_directory=Path(recipe.checkpoint.memory_directory),
    )


def checkpoint_bytes(loaded: LoadedRecipe) -> int:
    """Return about how many bytes a checkpoint has: fp32 weights and two moments of each.

    A vocabulary that only a tokenizer elsewhere knows counts as large as one that is trained.
    """
    model, data = loaded.recipe.model, loaded.recipe.data
    vocabulary = vocabulary_of(with_local_vocabulary(loaded).recipe) or data.tokenizer_vocabulary
    count = count_parameters(model, vocabulary=vocabulary, sequence_length=data.sequence_length)
    return _BYTES_OF_PARAMETER * count.total


def _record(nodes: Mapping[str, NodeFacts], findings: list[NodeFinding]) -> dict[str, object]:
    """Return the versions that most nodes have, those of the nodes that differ, and the findings."""
    names = sorted({name for facts in nodes.values() for name in facts.versions})
    usual = {
        name: Counter(facts.versions.get(name, "missing") for facts in nodes.values()).most_common(1)[0][0]
        for name in names
    }
    differ = {
        host: {name: facts.versions.get(name, "missing") for name in names}
        for host, facts in nodes.items()
        if any(facts.versions.get(name, "missing") != usual[name] for name in names)
    }
    finding_records = [
        {"host": finding.host, "what": finding.what, "is_bad": finding.is_bad} for finding in findings
    ]
    return {"hosts": list(nodes), "versions": usual, "differ": differ, "findings": finding_records}
