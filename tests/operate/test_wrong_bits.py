"""Who is to blame where a run was stopped for silent corruption."""

from __future__ import annotations

from pathlib import Path

from tests.guard.reports import report

from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory
from bloomery.guard.corruption import SilentCorruption
from bloomery.guard.verdict import Stop
from bloomery.operate.diagnosis import NODE_IS_BAD, Cause
from bloomery.operate.failure_evidence import FailureEvidence, RankEnd
from bloomery.operate.wrong_bits import diagnose_wrong_bits, machine_faults


def words_of_the_guard(rank: int) -> str:
    """Return what a rank prints when the guard stops the run because a rank was named twice."""
    guard = SilentCorruption(faults=2, forget_steps=10_000)
    history, verdict = guard.fresh(), None
    for step in (250, 500):
        found = report(step, corruption_checked=True, corruption="its weights differ", corrupt_ranks=(rank,))
        history, verdict = guard.judge(history, found)
    assert isinstance(verdict, Stop)
    return f"bloomery train: stopped at step 500: {verdict.reason}.\n  The same command goes on from there.\n"


def faulty(run: RunDirectory, *machines: tuple[int, str, bool]) -> RunDirectory:
    """Journal one record for each (rank, host, is_certain)."""
    run.create()
    with Journal(run.journal()) as journal:
        for number, (rank, host, is_certain) in enumerate(machines, start=1):
            machine = {"rank": rank, "host": host, "device": f"cuda:{rank}"}
            fields = {"what": "weights", "is_certain": is_certain, "reason": "its weights differ"}
            journal.write("corruption", incarnation=1, step=250 * number, machines=[machine], **fields)
    return run


def stopped(log: str) -> FailureEvidence:
    return FailureEvidence(ranks=[RankEnd(rank=0, host="node1", status=1, log=log)])


def test_the_machine_of_the_rank_that_was_named_is_kept_out_and_others_are_not(tmp_path: Path) -> None:
    machines = ((3, "node4", True), (1, "node2", True), (3, "node7", True), (3, "node7", True))
    run = faulty(RunDirectory(tmp_path / "run"), *machines)
    diagnosis = diagnose_wrong_bits(run, stopped(words_of_the_guard(3)))
    assert diagnosis is not None and diagnosis.cause in NODE_IS_BAD and diagnosis.retries
    assert (diagnosis.cause, diagnosis.exit_status) == (Cause.SILENT_CORRUPTION, 67)
    culprit = diagnosis.culprit
    assert (culprit.host, culprit.rank, culprit.gpu) == ("node7", 3, "3")
    assert "at 2 checks, the last at step 1000" in diagnosis.summary and len(diagnosis.evidence) == 2


def test_a_record_of_another_form_hides_no_other(tmp_path: Path) -> None:
    run = faulty(RunDirectory(tmp_path / "run"), (3, "node7", True))
    with Journal(run.journal()) as journal:
        for machines in (7, [None], [{"rank": 3}], [{"rank": "x", "host": "h", "device": "d"}]):
            journal.write(
                "corruption",
                incarnation=1,
                step=9,
                machines=machines,
                what="weights",
                is_certain=True,
                reason="r",
            )
    assert [(fault.rank, fault.host) for fault in machine_faults(run)] == [(3, "node7")]


def test_a_rank_that_no_record_is_certain_of_and_other_failures_blame_no_machine(tmp_path: Path) -> None:
    run = faulty(RunDirectory(tmp_path / "run"), (3, "node7", False), (2, "node7", True))
    assert diagnose_wrong_bits(run, stopped(words_of_the_guard(3))) is None
    assert diagnose_wrong_bits(run, stopped("RuntimeError: CUDA error")) is None


def test_a_stop_that_only_the_record_of_a_rank_tells_blames_its_machine_too(tmp_path: Path) -> None:
    run = faulty(RunDirectory(tmp_path / "run"), (3, "node7", True), (3, "node7", True))
    end = RankEnd(rank=0, host="node1", status=1, error=words_of_the_guard(3), log="")
    diagnosis = diagnose_wrong_bits(run, FailureEvidence(ranks=[end]))
    assert diagnosis is not None and diagnosis.culprit.host == "node7"
