import json
from dataclasses import MISSING, fields, replace

import pytest

from bloomery.events.records import Facts, StepReport, as_float, counting, log_line

REPORT = StepReport(
    step=120,
    consumed_samples=1200,
    consumed_tokens=307_200,
    cursor=1200,
    seconds=0.215,
    learning_rate=1.2e-3,
    global_batch=10,
    loss=3.45671234567,
    z_loss=1e-4,
    loss_scale=None,
    gradient_norm=0.512,
    zero_gradients=17,
    update_applied=True,
    refused_updates=2,
    refused_in_a_row=0,
    nan_losses=1,
    samples_per_s=46.5,
    tokens_per_s=11_900.0,
    hardware_tflops=0.45,
    model_tflops=0.42,
    mfu=0.31,
)


def test_a_report_survives_the_journal():
    facts = Facts(skip_requested=((1, 5),), settings_requested=(("log.every_steps", "5"),), stop_reason="x")
    report = replace(REPORT, facts=facts, loss=float("inf"), held_out_loss=2.0)
    assert StepReport.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False))) == report


def test_a_whole_number_comes_back_as_the_float_it_was():
    report = StepReport.from_json({**REPORT.to_json(), "loss": 3, "added_later": 1})
    assert isinstance(report.loss, float)


def test_the_log_line_has_every_field_an_operator_asked_for():
    line = log_line(replace(REPORT, loss_scale=65536.0), total_steps=1255)
    for text in (
        "step 120/1255",
        "samples 1,200",
        "tokens 307,200",
        "0.215 s/step",
        "lr 1.2000e-03",
        "batch 10",
        "loss 3.4567",
        "loss scale 65536.0",
        "grad norm 0.512",
        "zeros 17",
        "skipped 2",
        "nan 1",
        "46.5 samples/s",
        "11,900 tokens/s",
        "TFLOPs 0.420 model 0.450 hardware",
        "MFU 31.0%",
    ):
        assert text in line
    assert "\n" not in line


def test_what_is_not_known_is_a_dash_and_what_is_wrong_stands_out():
    line = log_line(replace(REPORT, mfu=None, update_applied=False), total_steps=None)
    assert "MFU -" in line and "loss scale -" in line and line.endswith("UPDATE REFUSED")


def test_a_report_of_an_earlier_version_claims_nothing_that_was_not_recorded():
    recorded = REPORT.to_json()
    optional = {item.name for item in fields(StepReport) if item.default is not MISSING}
    report = StepReport.from_json({name: recorded[name] for name in recorded if name not in optional})
    assert report == REPORT
    assert not any(getattr(report, name) for name in optional - {"peers", "facts"}) and report.peers == 1
    assert report.facts == Facts()


def test_figures_that_are_not_finite_survive_in_every_part_of_a_report():
    report = replace(
        REPORT,
        gradient_norm=float("-inf"),
        held_out_by_dataset={"a": float("inf"), "b": 2.0},
        inner_sizes={"logit": [float("inf"), 1.0], "hidden": [3.0]},
        corrupt_ranks=(3, 5),
        facts=Facts(rewind_requested=(5, 1, 2), save_requested=True),
    )
    assert StepReport.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False))) == report


def test_what_is_no_number_is_refused():
    for value in (True, "1.0", "nan", None, [1.0]):
        with pytest.raises(ValueError, match="not a number"):
            as_float(value)


def test_bytes_of_a_stage_are_added_up():
    told = []
    add = counting(lambda *progress: told.append(progress), "joining", 10)
    for count in (4, 0, 6):
        add(count)
    assert told == [("joining", done, 10, "bytes") for done in (4, 4, 10)]


@pytest.mark.parametrize("name", ["held_out_loss", "loss_scale", "mfu", "shared_seconds", "memory_bytes"])
def test_a_figure_that_may_be_absent_survives_where_it_is_not_finite(name: str):
    report = replace(REPORT, **{name: float("inf")})
    assert StepReport.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False))) == report
    assert getattr(StepReport.from_json({**REPORT.to_json(), name: None}), name) is None
