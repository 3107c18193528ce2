"""The page, the JSON and the progress of a plan, against figures that all differ."""

from __future__ import annotations

import re
from dataclasses import asdict, replace

import pytest
from tests.cli.made_plan import CHECKPOINTS, PEERS, made_plan, memory, stretch

from bloomery.cli.plan import progress_text
from bloomery.cli.plan_figures import FORMULAS, as_figures
from bloomery.cli.plan_page import STYLE, page
from bloomery.cli.plan_tables import plan_text
from bloomery.plan.overview import Plan
from bloomery.plan.progress import OtherScale, RunProgress

HEAD = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>made on 24 × a100-80g</title><style></style></head><body>
<h1>made on 24 × a100-80g</h1>
<p class="lead">TP2·PP3×2·DP4·Z1, micro-batch 6,
recompute full. One is assumed. Another &lt;is&gt;.</p>
"""
SHADES = ["#4269d0", "#efb118", "#97bbf5", "#6cc5b0", "#ff725c", "#a463f2", "#9c6b4e", "#9498a0"]
KINDS = ["weights", "gradients", "master", "optimizer", "activations", "logits", "buffers", "reserved"]


def sections(plan: Plan, *, start: str | None = None) -> dict[str, str]:
    """Return the page's text under each of its headings; under "" what stands before the first."""
    head, *parts = page(plan, start=start).replace(STYLE, "").split("<h2>")
    return {"": head} | dict(part.split("</h2>\n", 1) for part in parts)


def test_the_page_shows_the_plan_and_its_cards() -> None:
    parts = sections(made_plan(), start="2026-02-27")
    head, cards = parts[""].split("<dl>")
    assert head == HEAD
    assert re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", cards) == [
        ("fits", "yes, 31.0 of 80 GiB"), ("step", "311 to 399 s"), ("bottleneck", "compute &amp; more"),
        ("MFU", "29.0%"), ("hardware TFLOPs each", "120"), ("tokens/s", "22,346"),
        ("run", "36.0 h to 9.9 days"), ("accelerator-hours", "4,321"),
    ]  # fmt: skip
    assert list(parts)[1:] == [
        "Memory of one rank, by pipeline stage", "Ramp-up: global batch over time", "Calendar", "Warnings",
        "Everything",
    ]  # fmt: skip
    assert parts["Warnings"] == "<ul><li>Beware of this.</li><li>And of &lt;that&gt;.</li></ul>\n"
    everything = plan_text(made_plan(), start="2026-02-27").replace("&", "&amp;")
    everything = everything.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;")
    assert parts["Everything"] == f"<pre>{everything}</pre>\n</body></html>\n"


def test_a_plan_that_does_not_fit_and_has_no_warnings_says_so_on_its_page() -> None:
    plan = made_plan(warnings=())
    parts = sections(replace(plan, draft=replace(plan.draft, memory=(memory(20.0),) * 3)))
    assert "<dt>fits</dt><dd>NO, 167.0 of 80 GiB</dd>" in parts[""]
    assert parts["Warnings"] == "<ul><li>none</li></ul>\n"


def test_the_calendar_of_a_page_has_dates_only_where_it_knows_the_first() -> None:
    def cells(start: str | None) -> list[list[str]]:
        table = sections(made_plan(), start=start)["Calendar"]
        return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)]

    dated = [
        ["day", "date", "step", "sample", "tokens", "what"],
        ["0.0", "2026-02-27", "0", "0", "0", "the run starts"],
        ["1.2", "2026-02-28", "1,500", "10,500", "336,000,000", "warm-up &lt; ends"],
        ["31.5", "2026-03-30", "3,000", "28,000", "896,000,000", "the run ends"],
    ]
    assert cells("2026-02-27") == dated
    assert cells(None) == [row[:1] + row[2:] for row in dated]
    assert [row[1] for row in cells("9999-12-30")[1:]] == ["9999-12-30", "9999-12-31", "after 9999"]


def test_bars_of_memory_stand_one_after_the_other_to_one_scale() -> None:
    """80 GiB of room, and 8% more, take 822 of the 900 units across; a row takes 22 down."""
    drawn = sections(made_plan())["Memory of one rank, by pipeline stage"]
    key, drawing = drawn.split("</p>")
    assert re.findall(r"background:(.*?)\"></i>(\w+)<", key) == list(zip(SHADES, KINDS, strict=True))
    assert drawing.startswith('<svg viewBox="0 0 900 92" role="img">')
    texts = re.findall(r'<text x="([\d.]+)" y="(\d+)">(.*?)</text>', drawing)
    assert texts == [
        ("0", "15", "0: 1 blocks"), ("225.7", "15", "15.0"), ("0", "37", "1: 2 blocks"),
        ("377.9", "37", "31.0"), ("0", "59", "2: 1 blocks"), ("301.8", "59", "23.0"),
    ]  # fmt: skip
    rects = re.findall(
        r'<rect x="(.*?)" y="(.*?)" width="(.*?)" height="16" fill="(.*?)"><title>(.*?)<', drawing
    )
    assert [rect[1] for rect in rects] == ["3"] * 8 + ["25"] * 8 + ["47"] * 8
    assert [rect[3] for rect in rects] == SHADES * 3
    assert rects[:2] + rects[8:9] == [
        ("78.0", "3", "9.5", "#4269d0", "weights: 1.00 GiB"),
        ("87.5", "3", "11.9", "#efb118", "gradients: 1.25 GiB"),
        ("78.0", "25", "28.5", "#4269d0", "weights: 3.00 GiB"),
    ]
    limit = '<line class="line" x1="839.1" x2="839.1" y1="0" y2="70" stroke-width="2"/>'
    limit += '<text class="soft" text-anchor="end" x="839.1" y="86.0">80 GiB</text></svg>\n'
    assert drawing.endswith(limit)


def test_bars_beyond_the_room_are_drawn_to_a_smaller_scale() -> None:
    plan = made_plan()
    draft = replace(plan.draft, memory=(memory(20.0),) * 3)  # 167 GiB each
    drawn = sections(replace(plan, draft=draft))["Memory of one rank, by pipeline stage"]
    assert 'x="844.1" y="15">167.0</text>' in drawn  # 78 + 822 / 1.08 + 5
    assert 'x1="442.6"' in drawn  # 78 + 822 / 1.08 × 80 / 167


@pytest.mark.parametrize(
    ("days", "points", "marks"),
    [
        (
            (1.5, 2.5, 4.0),  # four days of ramp-up, of six that are shown
            "60.0,162.5 260.0,162.5 260.0,115.0 593.3,115.0 593.3,20.0 860.0,20.0",
            ["0", "1.5", "3", "4.5", "6 days", "0", "8", "16"],
        ),
        (
            (0.5, 0.5, 4.0),
            "60.0,162.5 326.7,162.5 326.7,115.0 593.3,115.0 593.3,20.0 860.0,20.0",
            ["0", "9", "18", "27", "36 hours", "0", "8", "16"],
        ),
        (
            (0.01, 0.01, 4.0),
            "60.0,162.5 326.7,162.5 326.7,115.0 593.3,115.0 593.3,20.0 860.0,20.0",
            ["0", "10.8", "21.6", "32.4", "43.2 minutes", "0", "8", "16"],
        ),
        ((4.0,), "60.0,20.0 860.0,20.0", ["0", "1", "2", "3", "4 days", "0", "8", "16"]),
    ],
)
def test_the_ramp_up_is_a_staircase_over_half_as_much_time_again(
    days: tuple[float, ...], points: str, marks: list[str]
) -> None:
    batches = (4, 8, 16)[-len(days) :]
    course = [stretch(n, days=d, batch=b) for n, (d, b) in enumerate(zip(days, batches, strict=True))]
    plan = made_plan()
    plan = replace(plan, draft=replace(plan.draft, course=tuple(course)))
    drawn = sections(plan)["Ramp-up: global batch over time"]
    assert re.findall(r'points="(.*?)"', drawn) == [points]
    placed = re.findall(r'text-anchor="(\w+)" x="([\d.]+)" y="([\d.]+)">(.*?)</text>', drawn)
    assert [mark[3] for mark in placed] == marks
    assert [mark[:3] for mark in placed] == [
        ("middle", "60.0", "230.0"), ("middle", "260.0", "230.0"), ("middle", "460.0", "230.0"),
        ("middle", "660.0", "230.0"), ("middle", "860.0", "230.0"), ("end", "54.0", "214.0"),
        ("end", "54.0", "119.0"), ("end", "54.0", "24.0"),
    ]  # fmt: skip
    assert re.findall(r' d="(.*?)"', drawn) == ["M60 210H860", "M60 115H860", "M60 20H860"]


def test_every_figure_of_the_json_is_the_plans() -> None:
    plan = made_plan()
    figures = as_figures(plan)
    ramp_up = {"samples": 12_000, "seconds": 4 * 86_400, "penalty_s": 86_400}
    assert figures.pop("ramp_up") == pytest.approx(ramp_up)
    step = figures.pop("step")
    assert step == asdict(plan.draft.course[-1].step) | {
        "seconds": pytest.approx(345.6), "low_s": plan.draft.course[-1].step.low_s,
        "high_s": plan.draft.course[-1].step.high_s, "bottleneck": "compute",
    }  # fmt: skip
    assert step["compute_s"] == pytest.approx(0.4 * 345.6) and step["low_s"] < 345.6 < step["high_s"]
    ramp = figures.pop("ramp")
    assert ramp[1] == {
        "first_step": 1_000, "first_sample": 7_000, "steps": 1_000, "global_batch": 8, "micro_batch": 2,
        "micro_batches": 3, "precision": "bf16", "step_s": pytest.approx(216.0),
        "seconds": pytest.approx(216_000.0),
    }  # fmt: skip
    assert [one["global_batch"] for one in ramp] == [4, 8, 16]
    stages = figures["memory"].pop("stages")
    assert figures.pop("memory") == {
        "fits": True, "capacity_bytes": 80 * 2**30, "peak_bytes": 31 * 2**30, "peak_stage": 1,
    }  # fmt: skip
    held = [stage.pop("rank_parameters") for stage in stages]
    assert held[1] > held[0] > 0
    assert stages[2] == asdict(memory(2.0)) | {
        "total": 23 * 2**30, "blocks": 1, "has_embedding": False, "has_head": True,
    }  # fmt: skip
    assert [stage["has_embedding"] for stage in stages] == [True, False, False]
    proportions = figures.pop("proportions")
    assert [(one["name"], one["ratio"], one["is_usual"]) for one in proportions] == [
        ("hidden/layers", 16, False), ("hidden/heads", 32, False),
    ]  # fmt: skip
    words = "up: the last step is whole, 25,000 samples beyond the length; "
    words += "Megatron-LM rounds down, to 2,999 steps"
    assert figures == {
        "recipe": "made", "hardware": "a100-80g", "accelerators": 24, "nodes": 3,
        "assumptions": ["One is assumed.", "Another <is>."],
        "layout": asdict(plan.draft.work.layout) | {"micro_batch": 6, "recompute": "full"},
        "parameters": {
            "total": 13_157, "embedding": 1_001, "positions": 0, "embedding_norm": 303, "blocks": 11_348,
            "layers": 4, "final_norm": 505, "head": 0,
            "without_embeddings": plan.draft.parameters.without_embeddings,
            "block": {"attention_norm": 11, "query_key_norm": 12, "attention": 1_300, "mlp_norm": 14,
                      "mlp": 1_500, "matrices": 2_700, "total": 2_837},
        },
        "speed": asdict(plan.speed),
        "traffic": asdict(plan.traffic) | {"total_bytes": pytest.approx(4.4e12 + 1_499.0 + 14.3e6)},
        "run": asdict(plan.whole) | {"last_step": words},
        "checkpoints": asdict(CHECKPOINTS),
        "between_peers": asdict(PEERS),
        "calendar": [asdict(event) for event in plan.calendar],
        "warnings": ["Beware of this.", "And of <that>."],
        "formulas": FORMULAS,
    }  # fmt: skip
    assert as_figures(made_plan(between_peers=None))["between_peers"] is None


PROGRESS = RunProgress(
    run="demo", hardware="a100-80g", step=1_234, total_steps=5_678, peers=1, consumed_samples=10_500,
    total_samples=42_000, consumed_tokens=336_000, total_tokens=1_344_000, accelerators=8, hours_per_day=20.0,
    steps_measured=55, step_s=2.345, samples_per_s=1_045.678, tokens_per_s=33_461.0, model_teraflops=60.5,
    hardware_teraflops=80.5, mfu=0.19, days_left=3.5, planned_step_s=1.2, planned_days=2.2,
    planned_days_left=1.7, planned_tokens_per_s=66_000.0, planned_model_teraflops=121.0,
    planned_hardware_teraflops=161.0, planned_mfu=0.38, started_days_ago=4.4,
    elsewhere=(OtherScale(accelerators=1_024, days_left=0.05, note="for a day"),
               OtherScale(accelerators=3, days_left=None, note="does not divide")),
)  # fmt: skip
PROGRESS_TEXT = """\
demo: 25.0% done

samples  10,500 of 42,000
tokens   336,000 of 1,344,000
steps    1,234 of 5,678
speed    1,045.68 samples/s, 2.35 s/step (median of the last 55)
left     3.5 days with 20 hours a day

on other numbers of accelerators
  accelerators      left
  ───────────────────────────────────────
         1,024  72.0 min  for a day
             3         -  does not divide

planned (on a100-80g) against measured
  figure                planned  measured  measured/planned
  ─────────────────────────────────────────────────────────
  s/step                    1.2     2.345              1.95
  tokens/s               66,000    33,461              0.51
  model TFLOPs each         121      60.5              0.50
  hardware TFLOPs each      161      80.5              0.50
  MFU                     38.0%     19.0%              0.50
  days left                 1.7       3.5              2.06
"""


def test_the_progress_of_a_run_stands_beside_its_plan() -> None:
    assert progress_text(PROGRESS) + "\n" == PROGRESS_TEXT
    of_peer = progress_text(replace(PROGRESS, peers=3, elsewhere=()))
    assert "steps    1,234 of 5,678 of this peer, one of 3\n" in of_peer
    assert "on other numbers" not in of_peer
