"""What launchers, submissions and states of a run tell people to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bloomery.config.load import load_recipe
from bloomery.errors import TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.launcher import node_group, rank_variables
from bloomery.operate.schedulers.interface import SchedulerError
from bloomery.operate.submission import check_submittable, kept_submission

TASK = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-2]"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def refusal_of(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(TrainingFailed) as refused:
        call()
    return refused.value.message, refused.value.remedy


@pytest.mark.parametrize(
    ("environment", "message", "remedy"),
    [
        (
            {"RANK": "0"},
            "RANK is set in the environment and WORLD_SIZE is not, so this rank does not know its place.",
            "Set both, unset both, or start with `bloomery launch`: `unset RANK`.",
        ),
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE is set in the environment and RANK is not, so this rank does not know its place.",
            "Set both, unset both, or start with `bloomery launch`: `unset WORLD_SIZE`.",
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2"},
            "RANK=2 is no rank of WORLD_SIZE=2.",
            "Ranks count from 0 to WORLD_SIZE - 1.",
        ),
        (
            {"RANK": "two", "WORLD_SIZE": "2"},
            "RANK='two' in the environment is not a whole number.",
            "Start with srun, mpirun, torchrun or `bloomery launch`, which set it.",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0"},
            "OMPI_COMM_WORLD_SIZE is not set.",
            "Start with srun, mpirun, torchrun or `bloomery launch`, which set it.",
        ),
        (
            TASK | {"RANK": "0", "WORLD_SIZE": "4"},
            "The environment says RANK=0 and WORLD_SIZE=4, but srun has started this process as rank 1 of 4.",
            "Leave RANK and WORLD_SIZE out: bloomery reads what srun says.",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"},
            "This job has 4 tasks, and the command was started without srun: it would train alone.",
            "Write `srun` before it, or `srun -n 1` for a run of one rank.",
        ),
        (
            MPI,
            "mpirun does not say on which machine rank 0 is.",
            "Tell all ranks: mpirun -x MASTER_ADDR=HOST-OF-RANK-0 …",
        ),
    ],
)
def test_a_rank_that_does_not_know_its_place_says_what_to_start_it_with(
    environment: dict[str, str], message: str, remedy: str
) -> None:
    assert refusal_of(lambda: rank_variables(environment, address_of=str)) == (message, remedy)


@pytest.mark.parametrize(
    ("environment", "message", "remedy"),
    [
        (
            MPI,
            "mpirun has started 4 launchers, each of which would start all ranks.",
            "Under mpirun write `bloomery train` in place of `bloomery launch`.",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1", "SLURM_JOB_NUM_NODES": "2"},
            "This job has 2 nodes, and `bloomery launch` was started only on the first.",
            "Write `srun --ntasks-per-node=1` before it.",
        ),
        (
            TASK | {"SLURM_STEP_NUM_NODES": "2"},
            "srun has started 4 launchers on 2 nodes, each would start its node's ranks.",
            "Write `srun --ntasks-per-node=1 bloomery launch`, or `srun bloomery train` for one task a rank.",
        ),
    ],
)
def test_launchers_that_were_started_wrongly_say_how_to_start_them(
    environment: dict[str, str], message: str, remedy: str
) -> None:
    assert refusal_of(lambda: node_group(environment, address_of=str)) == (message, remedy)


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        (
            ["submit.signal_before_s=90", "submit.minutes=1.5"],
            "submit.signal_before_s = 90 is no less than the 1.5 minutes of submit.minutes.",
            "Lower it, or ask for more minutes.",
        ),
        (
            ["submit.tasks=3", "submit.keep_queued=2"],
            "submit.tasks and submit.keep_queued both say how many jobs are queued.",
            "Leave one of them out.",
        ),
    ],
)
def test_settings_of_a_submission_that_do_not_fit_say_which_to_change(
    overrides: list[str], message: str, remedy: str
) -> None:
    with pytest.raises(SchedulerError) as refused:
        check_submittable(load_recipe("demo", overrides), overrides=overrides)
    assert (refused.value.message, refused.value.remedy) == (message, remedy)


@pytest.mark.parametrize(
    ("record", "message", "remedy"),
    [
        (None, "was never submitted.", "`bloomery submit RECIPE` does it; "),
        ("{", "submission.json cannot be read: ", "Submit with the recipe: bloomery submit RECIPE"),
        ("[]", "submission.json cannot be read: ", "Submit with the recipe: bloomery submit RECIPE"),
        ('{"recipe": "demo"}', "submission.json cannot be read: ", "Submit with the recipe: "),
        ('{"overrides": 5}', "submission.json cannot be read: ", "Submit with the recipe: "),
    ],
)
def test_a_submission_that_is_not_there_or_damaged_says_how_to_submit(
    tmp_path: Path, record: str | None, message: str, remedy: str
) -> None:
    if record is not None:
        (tmp_path / "submission.json").write_text(record)
    with pytest.raises(TrainingFailed) as refused:
        kept_submission(RunDirectory(tmp_path))
    assert message in refused.value.message and refused.value.remedy.startswith(remedy)


def test_a_submission_that_cannot_be_read_is_told_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "submission.json").mkdir()
    with pytest.raises(TrainingFailed, match=r"submission\.json cannot be read: .*directory"):
        kept_submission(RunDirectory(tmp_path))
