"""Which checkpoints of a run directory go, by what their manifests say, and what is on record of copies."""

import json
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

from bloomery.checkpoint.format.catalogue import (
    CommittedCheckpoint,
    abandoned_checkpoints,
    checkpoints,
    is_copied,
    newest_intact,
    record_copy,
    refusal_of_damage,
    remote_copies,
)
from bloomery.checkpoint.format.manifest import DamagedCheckpoint
from bloomery.checkpoint.format.retention import held_out_losses, last_single_pass, prune_plan
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.config.checkpoint import CheckpointSection
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory


def save(rundir: RunDirectory, *steps: int, incarnation: int = 1, **about: object) -> None:
    for step in steps:
        save_checkpoint(
            rundir.checkpoints,
            [whole("model.a", torch.ones(2))],
            step=step,
            incarnation=incarnation,
            about=about,
        )


def planned(
    rundir: RunDirectory,
    *,
    intact: Collection[str] | None = None,
    not_backed_up: Collection[str] = (),
    **section,
) -> dict[str, tuple[str, ...]]:
    """The reasons to keep each checkpoint. intact: the names of those that are; None for all."""
    decided = prune_plan(
        rundir,
        section=CheckpointSection(**{"keep_last": 1, "keep_tenths": False, **section}),
        run_length_steps=100,
        is_intact=lambda item: intact is None or item.name in intact,
        not_backed_up=not_backed_up,
    )
    assert [item.checkpoint for item in decided] == sorted(item.checkpoint for item in decided)
    return {item.checkpoint.name: item.why for item in decided}


NAMES = {step: f"step-0000{step}.i001" for step in (10, 20, 30, 40, 50)}


@pytest.fixture
def run(rundir: RunDirectory) -> RunDirectory:
    begin(rundir, base=None, reason="start")
    return rundir


def test_what_nothing_speaks_for_goes_and_the_rest_says_why_it_stays(run: RunDirectory):
    save(run, *NAMES)
    assert planned(run, keep_every_steps=20, not_backed_up={NAMES[30], "step-000099.i001"}) == {
        NAMES[10]: (),
        NAMES[20]: ("every 20",),
        NAMES[30]: ("not backed up",),
        NAMES[40]: ("every 20",),
        NAMES[50]: ("last 1", "newest intact"),
    }
    assert planned(run, intact={NAMES[10], NAMES[20]}, keep_last=2)[NAMES[20]] == ("newest intact",)
    assert set(planned(run, intact=()).values()) == {("nothing is known to be intact",)}
    assert planned(run, keep_tenths=True)[NAMES[30]] == ("tenth 3",)


def test_intactness_is_asked_newest_first_until_one_is_intact(run: RunDirectory):
    save(run, *NAMES)
    asked: list[int] = []

    def is_intact(item: CommittedCheckpoint) -> bool:
        asked.append(item.step)
        return item.step <= 30

    prune_plan(run, section=CheckpointSection(), run_length_steps=None, is_intact=is_intact)
    assert asked == [50, 40, 30]


def test_the_lowest_held_out_losses_are_kept_and_what_is_no_number_is_no_loss(run: RunDirectory):
    for step, loss in zip(NAMES, (3.0, 1.5, 2.0, float("inf"), float("nan")), strict=True):
        save(run, step, held_out_loss=loss)
    save(run, 60, held_out_loss=1)  # not written by an evaluation
    save(run, 70)
    assert held_out_losses(checkpoints(run)) == {10: 3.0, 20: 1.5, 30: 2.0}
    why = planned(run, keep_best=2)
    assert why[NAMES[20]] == ("best",) and why[NAMES[30]] == ("best 2",)
    assert [name for name, reasons in why.items() if reasons] == [NAMES[20], NAMES[30], "step-000070.i001"]
    (run.checkpoints / NAMES[20] / "manifest.json").write_text("{}")
    assert planned(run, keep_best=1)[NAMES[30]] == ("best",)


def test_the_last_one_before_a_first_epoch_ended_is_kept_as_the_manifests_tell(run: RunDirectory):
    save(run, 10, cursor=5, epoch_end_ahead=9)
    save(run, 20, cursor=9, epoch_end_ahead=20)
    save(run, 30, cursor=19, epoch_end_ahead=20)
    save(run, 40, cursor=30)
    save(run, 50, cursor=60, epoch_end_ahead=70)
    assert [step for step, name in NAMES.items() if "first epoch's end" in planned(run)[name]] == [10, 30]
    (run.checkpoints / NAMES[10] / "manifest.json").write_text("{}")
    assert "first epoch's end" in planned(run)[NAMES[30]] and planned(run)[NAMES[10]] == ()


def test_what_a_rewind_may_need_is_kept_beside_the_newest(run: RunDirectory):
    save(run, *NAMES)
    decided = prune_plan(
        run,
        section=CheckpointSection(keep_last=1, keep_tenths=False),
        run_length_steps=None,
        is_intact=lambda item: True,
        reach_steps=(25,),
    )
    assert [item.checkpoint.step for item in decided if item.why] == [20, 30, 50]


def test_of_two_of_one_step_the_later_one_is_kept_for_it(run: RunDirectory):
    save(run, 10, 20)
    begin(run, base=(20, 1), reason="restart")
    save(run, 20, incarnation=2)
    assert planned(run) == {
        NAMES[10]: (),
        NAMES[20]: (),
        "step-000020.i002": ("last 1", "newest intact"),
    }
    only_the_older = planned(run, intact={NAMES[20]})
    assert only_the_older[NAMES[20]] == ("newest intact",) and only_the_older["step-000020.i002"]
    assert all(planned(run, intact=()).values()), "nothing goes while nothing is known to be intact"


def test_what_a_rewind_abandoned_goes_when_an_intact_one_has_reached_its_step(run: RunDirectory):
    save(run, 10, 20, 30)
    begin(run, base=(10, 1), reason="rewind")
    assert [item.step for item in abandoned_checkpoints(run)] == [20, 30]
    left_behind = ("abandoned; the run has not passed it",)
    assert planned(run)[NAMES[20]] == planned(run)[NAMES[30]] == left_behind
    save(run, 20, incarnation=2)
    assert planned(run)[NAMES[20]] == () and planned(run)[NAMES[30]] == left_behind
    assert planned(run, intact={NAMES[10]})[NAMES[20]] == left_behind
    assert planned(run, intact=())[NAMES[20]] == left_behind


def test_the_last_of_a_single_pass_reads_no_sample_twice_and_says_so_itself(run: RunDirectory):
    ends = {10: {"cursor": 5, "first_epoch_end": 9}, 20: {"cursor": 9, "first_epoch_end": 9}}
    ends |= {30: {"cursor": 10, "first_epoch_end": 9}, 40: {"cursor": 11}, 50: {"first_epoch_end": 99}}
    for step, about in ends.items():
        save(run, step, **about)
    last = last_single_pass(checkpoints(run))
    assert last is not None and last.step == 20
    save(run, 60, cursor=12, first_epoch_end=None)
    last = last_single_pass(checkpoints(run))
    assert last is not None and last.step == 60, "there is no end of an epoch"
    (run.checkpoints / "step-000060.i001" / "manifest.json").write_text("{}")
    assert last_single_pass(checkpoints(run)[2:]) is None


def test_the_last_of_a_single_pass_is_kept_though_an_epoch_ended_before_it(run: RunDirectory):
    for step, cursor in ((10, 5), (20, 9), (30, 14), (40, 15), (50, 20), (60, 25), (70, 30)):
        ahead = {"epoch_end_ahead": 8} if cursor < 8 else {}
        save(run, step, cursor=cursor, first_epoch_end=8, first_repeat=15, **ahead)
    last = last_single_pass(checkpoints(run))
    assert last is not None and last.step == 40, (
        "eight samples ended an epoch, and the sixteenth is its first again"
    )
    kept = {name for name, why in planned(run).items() if "first epoch's end" in why}
    assert kept == {"step-000010.i001", "step-000040.i001"}


def test_the_newest_intact_one_is_looked_for_among_those_given_in_any_order(run: RunDirectory):
    save(run, *NAMES)
    for step in (40, 50):
        next((run.checkpoints / NAMES[step]).glob("model-*")).write_bytes(b"")
    found = newest_intact(reversed(checkpoints(run)))
    assert found is not None and found.step == 30 and found.base == (30, 1)
    assert newest_intact(checkpoints(run)[3:]) is None
    damage = DamagedCheckpoint("step-000050.i001 is damaged")
    assert f"{NAMES[30]}: continue from it with --fallback" in refusal_of_damage(damage, NAMES[30]).remedy
    assert "No older checkpoint is intact" in refusal_of_damage(damage, "").remedy


def test_each_copy_is_on_record_once_with_what_it_holds_and_where(run: RunDirectory):
    name, url = NAMES[10], f"s3://b/run/checkpoints/{NAMES[10]}"
    for what, size in (("model", 5), ("all", 9)):
        record_copy(run, name, url=url, what=what, bytes=size)
    record_copy(run, name, url=f"s3://other/checkpoints/{name}", what="model", bytes=5, place="second")
    record_copy(run, NAMES[20], url="s3://b/x", what="all", bytes=1)
    found = remote_copies(run)
    assert sorted(found) == [name, NAMES[20]]
    assert [(copy.url, copy.what, copy.bytes) for copy in found[name]] == [
        (url, "all", 9),
        (f"s3://other/checkpoints/{name}", "model", 5),
    ]
    for where, what, counts in (
        ("s3://b/run", "all", True),
        ("s3://b/run/", "model", True),
        ("s3://other", "model", True),
        ("s3://other", "all", False),
        ("s3://b", "all", False),
    ):
        assert is_copied(found[name], name=name, url=where, what=what) is counts
    record_copy(run, name, url="s3://c/x", what="all", bytes=2)
    assert [copy.url for copy in remote_copies(run)[name]][:2] == [url, "s3://c/x"]


def test_a_record_of_an_earlier_version_is_read_and_one_that_is_damaged_counts_as_none(run: RunDirectory):
    path: Path = run.backups / f"{NAMES[10]}.json"
    path.parent.mkdir(exist_ok=True)
    copy = {"url": "s3://b/x", "what": "all", "bytes": 1, "time": 2.0}
    path.write_text(json.dumps(copy))
    assert [one.url for one in remote_copies(run)[NAMES[10]]] == ["s3://b/x"]
    for damaged in ("", "[]", "{", '{"copies": 5}', '{"copies": [{"url": "s3://b/x"}]}', "7"):
        path.write_text(damaged)
        assert remote_copies(run) == {}
    record_copy(run, NAMES[10], url="s3://b/y", what="all", bytes=1)
    assert [one.url for one in remote_copies(run)[NAMES[10]]] == ["s3://b/y"]


def test_the_newest_from_before_a_climb_is_kept_as_the_newest_readable_manifest_says(
    rundir: RunDirectory,
) -> None:
    begin(rundir, base=None, reason="start")
    save(rundir, 10, 20, 30)
    save(rundir, 40, before_climb=29)
    assert [step for step, name in NAMES.items() if planned(rundir).get(name)] == [20, 40]
    assert planned(rundir)[NAMES[20]] == ("before a climb of the loss",)
    save(rundir, 50, before_climb=None)
    assert [step for step, name in NAMES.items() if planned(rundir).get(name)] == [50], "it came down again"
    (rundir.checkpoints / NAMES[50] / "manifest.json").write_text("{}")
    assert planned(rundir)[NAMES[20]] == ("before a climb of the loss",)
    save(rundir, 60, before_climb=9)
    assert not planned(rundir)[NAMES[10]], "none is as early"
