import json
from dataclasses import replace

import pytest

from bloomery.cli import main
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import ConfigError, DataError
from bloomery.events.journal import Journal
from bloomery.events.records import StepReport
from bloomery.events.run_directory import RunDirectory
from bloomery.plan import progress as progress_module
from bloomery.plan.hardware import load_hardware
from bloomery.plan.overview import make_plan
from bloomery.plan.progress import at_other_scales, progress_of, progress_rows
from bloomery.plan.request import Request
from bloomery.plan.schedule import consumed_after, phase_at

RECIPE = "tr1-13b"


def report(train, step, *, seconds):
    consumed = consumed_after(train, step)
    batch = phase_at(train, consumed_after(train, step - 1)).global_batch
    return StepReport(
        step=step,
        consumed_samples=consumed,
        consumed_tokens=consumed * 2048,
        cursor=consumed,
        seconds=seconds,
        learning_rate=1e-4,
        global_batch=batch,
        loss=3.0,
        z_loss=0.0,
        loss_scale=None,
        gradient_norm=1.0,
        zero_gradients=0,
        update_applied=True,
        refused_updates=0,
        refused_in_a_row=0,
        nan_losses=0,
        samples_per_s=batch / seconds,
        tokens_per_s=batch * 2048 / seconds,
        hardware_tflops=40.0,
        model_tflops=30.0,
        mfu=0.24,
    )


@pytest.fixture
def run(tmp_path):
    """A run of the 13B recipe: steps around the full batch, and one that was abandoned."""
    loaded = load_recipe(RECIPE)
    rundir = RunDirectory(tmp_path / "run").create()
    rundir.recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    train = loaded.recipe.train
    rundir.incarnation(1).write_text(json.dumps({"base": None}))
    rundir.incarnation(2).write_text(json.dumps({"base": {"step": 29_015, "incarnation": 1}}))
    with Journal(rundir.journal()) as journal:
        for step in range(29_000, 29_021):
            incarnation = 1 if step <= 29_015 else 2
            journal.write("step", incarnation=incarnation, **report(train, step, seconds=22.3).to_json())
        abandoned = report(train, 29_030, seconds=1.0).to_json()
        journal.write("step", incarnation=1, **abandoned)
    return rundir.path


def progress(run, **options):
    loaded = load_recipe(str(run / "recipe.toml"))
    return progress_of(Request(loaded=loaded, hardware=load_hardware("v100-32g"), **options), run)


def test_no_accelerators_are_refused_for_a_run_too(run):
    with pytest.raises(ConfigError, match="a run needs at least one accelerator"):
        progress(run, accelerators=0)


def test_what_is_left_of_a_ramp_up_is_walked_batch_by_batch(tmp_path):
    """The first batches are small: at their speed the whole run would seem to take years."""
    loaded = load_recipe(RECIPE)
    rundir = RunDirectory(tmp_path / "run").create()
    rundir.recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    request = Request(loaded=loaded, hardware=load_hardware("v100-32g"), accelerators=128)
    plan = make_plan(request)
    first = plan.draft.course[0]
    rundir.incarnation(1).write_text(json.dumps({"base": None}))
    with Journal(rundir.journal()) as journal:
        for step in range(1, 21):
            seconds = 2 * first.step.seconds
            journal.write(
                "step", incarnation=1, **report(loaded.recipe.train, step, seconds=seconds).to_json()
            )
    found = progress_of(request, rundir.path)
    training_s = sum(stretch.seconds for stretch in plan.draft.course)
    assert found.days_left == pytest.approx(2 * training_s / 86_400, rel=0.01)
    assert found.planned_days_left == pytest.approx(training_s / 86_400, rel=0.01)
    assert found.planned_step_s == pytest.approx(first.step.seconds)
    full, speed = plan.draft.course[-1], plan.speed
    share = first.global_batch / first.step.seconds / (full.global_batch / full.step.seconds)
    planned = (found.planned_model_teraflops, found.planned_hardware_teraflops, found.planned_mfu)
    wanted = (speed.model_teraflops * share, speed.hardware_teraflops * share, speed.mfu * share)
    assert share < 1.0 and planned == pytest.approx(wanted)
    assert (found.total_samples, found.total_tokens) == (146_484_375, 146_484_375 * 2048)


@pytest.mark.parametrize(("consumed", "at"), [(1_024, 0), (3_072, 2_048), (3_071, 2_047), (9, 0)])
def test_a_step_is_planned_as_where_it_began_in_the_run(consumed, at, monkeypatch):
    loaded = load_recipe(RECIPE)
    request = Request(loaded=loaded, hardware=load_hardware("v100-32g"), accelerators=128)
    plan = make_plan(request)
    asked = []

    def phase_of(train, sample):
        asked.append(sample)
        return replace(phase_at(train, sample), recompute="selective")

    def time_of(work, parameters, **told):
        asked.append(told)
        return plan.draft.course[0].step

    monkeypatch.setattr(progress_module, "phase_at", phase_of)
    monkeypatch.setattr(progress_module, "step_time", time_of)
    last = replace(report(loaded.recipe.train, 29_020, seconds=1.0), consumed_samples=consumed)
    assert progress_module._planned_step_s(request, plan, last) == plan.draft.course[0].step.seconds
    assert asked == [at, {"global_batch": 1024, "recompute": "selective"}]


def test_what_is_left_follows_from_the_measured_speed(run):
    found = progress(run, accelerators=128, hours_per_day=20)
    assert found.consumed_samples == 10_698_064
    assert found.step == 29_020
    assert found.step_s == 22.3
    assert (found.model_teraflops, found.hardware_teraflops, found.mfu) == (30.0, 40.0, 0.24)
    assert (found.samples_per_s, found.tokens_per_s) == pytest.approx((1024 / 22.3, 1024 * 2048 / 22.3))
    assert (found.hardware, found.run, found.hours_per_day) == ("v100-32g", str(run), 20)
    left = -(-(146_484_375 - 10_698_064) // 1024) * 1024  # the last step is whole
    assert found.days_left == pytest.approx(left / (1024 / 22.3) / 3600 / 20)
    assert found.consumed_tokens == found.consumed_samples * 2048


def test_ranks_and_speed_are_those_of_todays_incarnation_and_not_of_all_that_ever_wrote(run):
    train = load_recipe(RECIPE).recipe.train
    rundir = RunDirectory(run)
    for rank in range(256):
        rundir.journal(rank=rank).touch()  # what an earlier start left behind
    rundir.incarnation(3).write_text(json.dumps({"base": {"step": 29_018, "incarnation": 2}}))
    with Journal(rundir.journal()) as journal:
        for incarnation, ranks in ((1, 256), (2, 256), (3, 128)):
            journal.write("start", incarnation=incarnation, step=0, ranks=ranks)
        for step in (29_019, 29_020, 29_021):
            journal.write("step", incarnation=3, **report(train, step, seconds=44.0).to_json())
    found = progress(run)
    assert (found.step, found.accelerators, found.steps_measured, found.step_s) == (29_021, 128, 3, 44.0)


def test_other_numbers_of_accelerators_say_when_they_divide(run):
    found = {one.accelerators: one for one in progress(run, accelerators=128).elsewhere}
    assert set(found) == {32, 64, 256, 512}
    assert found[64].note == ""
    assert found[256].note == "", "the run is past its ramp-up, whose batches it does not divide"
    here = progress(run, accelerators=128).days_left
    assert found[64].days_left > 1.7 * here
    assert found[256].days_left < here / 1.7
    fewer = {one.accelerators for one in progress(run, accelerators=16).elsewhere}
    assert fewer == {8, 32, 64}  # a replica has 8, so 4 cannot hold the model


def test_another_number_than_that_of_the_ranks_that_were_measured_is_one_of_the_other_scales(run):
    rundir, train = RunDirectory(run), load_recipe(RECIPE).recipe.train
    rundir.incarnation(3).write_text(json.dumps({"base": {"step": 29_020, "incarnation": 2}}))
    with Journal(rundir.journal()) as journal:
        journal.write("start", incarnation=3, step=29_020, ranks=128)
        journal.write("step", incarnation=3, **report(train, 29_021, seconds=44.0).to_json())
    usual, asked = progress(run), progress(run, accelerators=1_024)
    assert (asked.accelerators, asked.step_s, asked.days_left) == (128, 44.0, usual.days_left)
    assert [one.accelerators for one in usual.elsewhere] == [32, 64, 256, 512]
    assert [one.accelerators for one in asked.elsewhere] == [32, 64, 256, 512, 1_024]
    assert asked.elsewhere[:4] == usual.elsewhere and progress(run, accelerators=64) == usual
    assert usual.days_left / 9 < asked.elsewhere[-1].days_left < usual.days_left / 5
    with pytest.raises(ConfigError, match="no multiple of 8"):
        progress(run, accelerators=100)


def test_a_number_of_accelerators_divides_the_batch_where_it_gives_whole_micro_batches():
    loaded = load_recipe(RECIPE)
    request = Request(loaded=loaded, hardware=load_hardware("v100-32g"), accelerators=128)
    plan = make_plan(request)
    work = replace(plan.draft.work, micro_batch=4)
    plan = replace(plan, draft=replace(plan.draft, work=work))
    found = {one.accelerators: one for one in at_other_scales(request, plan, 2_048, 10.0)}
    assert [count for count, one in found.items() if one.days_left is not None] == [512, 1_024]
    assert {found[count].note for count in (4_096, 8_192)} == {"does not divide the batch"}
    assert {found[count].note for count in (512, 1_024)} == {"once the full batch is reached"}
    whole = [one.accelerators for one in at_other_scales(request, plan, 20, 10.0)]
    assert whole == [40, 80], "10 accelerators hold no whole number of replicas"


def test_planned_stands_against_measured(run):
    found = progress(run, accelerators=128)
    assert found.planned_step_s == pytest.approx(found.planned_days_left / found.days_left * found.step_s)
    assert found.planned_model_teraflops == pytest.approx(found.planned_mfu * 125, rel=1e-6)
    rows = {name: cells for name, *cells in progress_rows(found)}
    assert rows["s/step"][1:] == ["22.3", f"{22.3 / found.planned_step_s:.2f}"]
    assert rows["MFU"][1:] == ["24.0%", f"{0.24 / found.planned_mfu:.2f}"]
    rows = {name: cells for name, *cells in progress_rows(replace(found, mfu=None))}
    assert rows["MFU"] == [f"{found.planned_mfu:.1%}", "-", "-"]


def test_a_speed_that_a_run_began_to_report_is_the_median_of_those_reports(run):
    train = load_recipe(RECIPE).recipe.train
    rundir = RunDirectory(run)
    rundir.incarnation(3).write_text(json.dumps({"base": {"step": 29_020, "incarnation": 2}}))

    def follow(*shares):
        with Journal(rundir.journal()) as journal:
            for mfu in shares:
                follow.step += 1
                one = replace(report(train, follow.step, seconds=44.0), mfu=mfu)
                journal.write("step", incarnation=3, **one.to_json())
        return progress(run, accelerators=128).mfu

    follow.step = 29_020
    with Journal(rundir.journal()) as journal:
        journal.write("start", incarnation=3, step=29_020, ranks=128)
    assert follow(None, None) is None
    assert follow(0.2, 0.4) == pytest.approx(0.3)
    assert follow(None) is None


def test_what_was_planned_as_nothing_has_no_ratio(run):
    found = progress(run, accelerators=128)
    rows = {name: cells for name, *cells in progress_rows(replace(found, planned_mfu=0.0))}
    assert rows["MFU"] == ["0.0%", "24.0%", "-"]


def test_the_age_of_a_run_is_what_lies_between_its_first_event_and_its_last(run):
    journal = RunDirectory(run).journal()
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["time"] = 1_700_000_000.0 + 43_200.0 * number  # half a day apart
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert progress(run, accelerators=128).started_days_ago == (len(lines) - 1) / 2


def test_a_peers_steps_are_counted_with_the_other_peers(tmp_path):
    loaded = load_recipe("diloco-internet")
    rundir = RunDirectory(tmp_path / "run").create()
    rundir.recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    rundir.incarnation(1).write_text(json.dumps({"base": None}))
    with Journal(rundir.journal()) as journal:
        for step, peers in ((100, 4), (101, 2)):
            one = replace(
                report(loaded.recipe.train, step, seconds=0.5),
                consumed_samples=3_200,
                global_batch=8,
                peers=peers,
            )
            journal.write("step", incarnation=1, **one.to_json())
    found = progress(rundir.path, accelerators=1)
    left = 15_625 - 3_200  # samples of 128 tokens, of 2,000,000
    assert found.total_steps == 101 + -(-left // 16) and found.peers == 2
    assert found.samples_per_s == 32.0 and found.days_left == pytest.approx(-(-left // 16) * 0.5 / 86_400)
    assert found.planned_tokens_per_s * found.planned_step_s == pytest.approx(2 * 8 * 128)


@pytest.mark.parametrize(("batch_before", "total"), [(4, 400 + 900 * 8), (64, 6_400 + 900 * 8)])
def test_a_run_of_steps_whose_batch_was_changed_has_its_other_steps_left(tmp_path, batch_before, total):
    settings = ["train.tokens=0", "train.steps=1000", "train.global_batch=8", "train.micro_batch=8"]
    loaded = load_recipe("demo", [*settings, "model.vocabulary=8192"])
    rundir = RunDirectory(tmp_path / "run").create()
    rundir.recipe.write_text(dump_recipe(loaded.recipe), encoding="utf-8")
    rundir.incarnation(1).write_text(json.dumps({"base": None}))
    with Journal(rundir.journal()) as journal:
        last = replace(report(loaded.recipe.train, 100, seconds=0.5), consumed_samples=100 * batch_before)
        journal.write("step", incarnation=1, **last.to_json())
    found = progress(rundir.path, accelerators=1)
    assert (found.total_steps, found.total_samples) == (1000, total)
    assert found.days_left == pytest.approx(900 * 0.5 / 86_400)


def test_a_run_whose_recipe_leaves_the_vocabulary_to_its_tokenizer_has_recorded_it(run):
    (run / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 700}}}), encoding="utf-8")
    loaded = load_recipe(RECIPE, ["model.vocabulary='auto'", f"data.tokenizer={run}/tokenizer.json"])
    for vocabulary in (51_200, 60_000):
        with Journal(RunDirectory(run).journal()) as journal:
            journal.write("data", incarnation=2, step=29_020, vocabulary=vocabulary)
        request = Request(loaded=loaded, hardware=load_hardware("v100-32g"), accelerators=128)
        number = load_recipe(RECIPE, [f"model.vocabulary={vocabulary}"])
        assert progress_of(request, run) == progress_of(replace(request, loaded=number), run)


def test_a_run_without_steps_is_told(tmp_path):
    rundir = RunDirectory(tmp_path / "run").create()
    rundir.recipe.write_text(dump_recipe(load_recipe(RECIPE).recipe), encoding="utf-8")
    with pytest.raises(DataError, match="no steps"):
        progress(rundir.path)


def test_the_command_prints_it_and_takes_overrides(run, capsys):
    assert main(["plan", "--at", str(run), "--gpus", "128", "--hours-per-day", "20"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert "planned (on v100-32g) against measured" in shown
    assert main(["plan", "--at", str(run), "train.tokens=400_000_000_000", "--gpus", "128", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total_samples"] == 195_312_500
