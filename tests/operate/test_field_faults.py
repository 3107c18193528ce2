"""The verdict on sixty failures as they were reported from the field."""

from __future__ import annotations

from tests.operate.field_faults import FAULTS

from bloomery.operate.blame import diagnose


def test_sixty_failures_from_the_field_have_the_right_cause_culprit_and_retry() -> None:
    assert len(FAULTS) == 60 and len({fault.cause for fault in FAULTS}) >= 12
    wrong_cause, wrong_culprit, wrong_retry = [], [], []
    for fault in FAULTS:
        diagnosis = diagnose(fault.evidence)
        if diagnosis.cause != fault.cause:
            wrong_cause.append((fault.name, diagnosis.cause))
        if (diagnosis.culprit.host, diagnosis.culprit.rank) != (fault.host, fault.rank):
            wrong_culprit.append((fault.name, str(diagnosis.culprit)))
        if diagnosis.retries != fault.retries:
            wrong_retry.append(fault.name)
    assert len(wrong_cause) <= 3, wrong_cause
    assert len(wrong_culprit) <= 3, wrong_culprit
    assert wrong_retry == []
