"""The whole text of a plan, and its page, against a plan whose figures all differ."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import date

import pytest
from tests.cli.made_plan import CHECKPOINTS, PEERS, RECIPE, made_plan, memory, stretch

from bloomery.cli.plan_tables import date_after, days_text, plan_text, search_text
from bloomery.config.load import parse_recipe
from bloomery.plan.layout import Layout, StageParameters
from bloomery.plan.search import Candidate, SearchResult

TEXT = """\
made on 24 × a100-80g (3 nodes): fits, 311 to 399 s a step, 36.0 h to 9.9 days
  tensor 2 with sequence, pipeline 3 (interleaved, 2 chunks), data 4, ZeRO 1, micro-batch 6,
  recompute full
- One is assumed.
- Another <is>.

parameters
  embedding        1,001
  embedding norm     303
  4 blocks        11,348  each 2,837: attention 1,300, MLP 1,500
  final norm         505
  head                 0  shares the embedding's
  total           13,157
  hidden/layers       16  published: 55 to 210
  hidden/heads        32  published: 64 to 256

memory of one rank, GiB
  stage  blocks  weights  grads  master  optim  activ  logits  buffers  other    total
  ────────────────────────────────────────────────────────────────────────────────────
      0     e+1     1.00   1.25    1.50   1.75   2.00    2.25     2.50   2.75    15.00
      1       2     3.00   3.25    3.50   3.75   4.00    4.25     4.50   4.75  31.00 ◂
      2     1+h     2.00   2.25    2.50   2.75   3.00    3.25     3.50   3.75    23.00
  peak 31.0 of 80.0 GiB on stage 1, most of it reserved

one step of the full batch
  time        346 s, between 311 and 399
  goes to     compute 40%, memory 20%, TP 12%, PP bubble 10%, PP transfer 7%, DP 5%, update 3%,
              waiting 3%
  bottleneck  compute & more
  hardware    120.5 TFLOPs each (101 to 141), 38.6% of the peak
  model       90.5 TFLOPs each (81 to 99), MFU 29.0%
  speed       22,346 tokens/s, 1,234.50 samples/s, 932 tokens/s each

sent in one step
  axis       calls of a rank  busiest rank  all ranks
  ───────────────────────────────────────────────────
  tensor               1,234       1.10 kB    4.40 TB
  pipeline                22       2.20 MB      999 B
  data                    33       3.30 GB    6.60 MB
  embedding                1       5.50 GB    7.70 MB
  world                    2         112 B      500 B

between peers
  round        64 inner steps, 20.5 min, then 45 s of exchange among 5 peers
  sent         2.50 GB by each peer; rounding loses 3.4%
  host memory  3.50 GB of each peer, 4.50 GB at most; 5.50 GB more of four peers while one joins
  utilisation  96.5% of the time goes to training

the run, stretch by stretch
  from step  from sample  steps  batch  micro  m  precision  s/step  days
  ───────────────────────────────────────────────────────────────────────
          0            0  1,000      4      1  2  fp32          130  1.50
      1,000        7,000  1,000      8      2  3  bf16          216  2.50
      2,000       14,000  1,000     16      3  4  bf16          346  4.00
  until the full batch: 4.00 days, 1.00 more than at full speed

the whole run
  length     3,000 steps, 28,000 samples, 896,000 tokens
  rounding   up: the last step is whole, 25,000 samples beyond the length; Megatron-LM rounds down,
             to 2,999 steps
  compute    1.23e+20 FLOPs of the model
  days       7.1, between 1.5 and 9.9 (20 hours a day)
  of that    training 6.1 days, saving 1.2 h, evaluation 2.3 h, failures 3.4 h, exchange 4.5 h
  resources  4,321 accelerator-hours, 5,432 MWh
  cost       6,543 EUR

checkpoints
  size     1.25 GB stored; 2.25 GB with 16-bit weights; those alone 325.00 kB
  time     41.5 s until a save is durable, of which 2.5 s stop the training; 33.5 s to load
  cadence  every 150 steps (90 min): 1,234 saves; a failure loses at most 1.6 h of work
  kept     7 at the end; 8.25 TB of storage at most
  best     every 45 min (75 steps), a failure every 3.5 days (9 in the run)
  lost     4.32% of the time to saves and failures; 3.21% at best; a restart takes 11.0 min

calendar
   day        date   step  sample  tokens  what
  ───────────────────────────────────────────────────────
   0.0  2026-02-27      0       0  0.00e9  the run starts
   1.2  2026-02-28  1,500  10,500  0.34e9  warm-up < ends
  31.5  2026-03-30  3,000  28,000  0.90e9  the run ends

warnings
  - Beware of this.
  - And of <that>.
"""


def section_of(text: str, title: str) -> list[str]:
    """Return the lines beneath a title, without their indentation."""
    lines = text.split("\n")
    start = lines.index(title) + 1
    end = lines.index("", start) if "" in lines[start:] else len(lines)
    return [line[2:] for line in lines[start:end]]


def test_every_figure_of_a_plan_stands_in_its_place() -> None:
    assert plan_text(made_plan(), start="2026-02-27") + "\n" == TEXT


def test_what_a_plan_lacks_is_left_out() -> None:
    plan = made_plan(between_peers=None, warnings=(), assumptions=())
    whole = replace(plan.whole, cost=None, exchange_hours=0.0)
    layout = Layout(tensor=2, pipeline=3, data=4, zero=1)
    draft = replace(
        plan.draft,
        checkpoints=replace(CHECKPOINTS, best_interval_s=None),
        work=replace(plan.draft.work, layout=layout),
        parameters=replace(plan.draft.parameters, positions=77, head=88),
    )
    text = plan_text(replace(plan, whole=whole, draft=draft))
    assert text.startswith(
        "made on 24 × a100-80g (3 nodes): fits, 311 to 399 s a step, 36.0 h to 9.9 days\n"
        "  tensor 2, pipeline 3, data 4, ZeRO 1, micro-batch 6, recompute full\n\nparameters\n"
    )
    assert re.findall(r"^\S.*", text, re.MULTILINE)[1:] == [
        "parameters", "memory of one rank, GiB", "one step of the full batch", "sent in one step",
        "the run, stretch by stretch", "the whole run", "checkpoints", "calendar",
    ]  # fmt: skip
    assert section_of(text, "parameters")[1:7] == [
        "positions           77", "embedding norm     303",
        "4 blocks        11,348  each 2,837: attention 1,300, MLP 1,500",
        "final norm         505", "head                88", "total           13,322",
    ]  # fmt: skip
    assert section_of(text, "the whole run")[-2:] == [
        "of that    training 6.1 days, saving 1.2 h, evaluation 2.3 h, failures 3.4 h",
        "resources  4,321 accelerator-hours, 5,432 MWh",
    ]
    told = [line.split()[0] for line in section_of(text, "checkpoints")]
    assert told == ["size", "time", "cadence", "kept"]
    assert section_of(text, "calendar")[0] == " day   step  sample  tokens  what"
    assert section_of(text, "calendar")[-1] == "31.5  3,000  28,000  0.90e9  the run ends"


@pytest.mark.parametrize("lacking", ["mean_time_between_failures_s", "best_interval_steps"])
def test_without_a_rate_of_failures_no_best_cadence_is_told(lacking: str) -> None:
    plan = made_plan()
    saves = replace(CHECKPOINTS, **{lacking: None})
    text = plan_text(replace(plan, draft=replace(plan.draft, checkpoints=saves)))
    told = [line.split()[0] for line in section_of(text, "checkpoints")]
    assert told == ["size", "time", "cadence", "kept"]


def test_a_run_that_does_not_fit_or_end_says_so_and_sparse_sums_say_what_they_spare() -> None:
    plan = made_plan(between_peers=replace(PEERS, codec="sparse"))
    draft = replace(
        plan.draft, memory=(memory(20.0), memory(1.0)), stages=plan.draft.stages[:2],
        checkpoints=replace(CHECKPOINTS, lost_share=0.9991),
    )  # fmt: skip
    text = plan_text(replace(plan, draft=draft))
    assert "(3 nodes): DOES NOT FIT, 311" in text.split("\n")[0]
    assert section_of(text, "memory of one rank, GiB")[-3:] == [
        "    0     e+1    20.00  20.25   20.50  20.75  21.00   21.25    21.50  21.75  167.00 ◂",
        "    1       2     1.00   1.25    1.50   1.75   2.00    2.25     2.50   2.75     15.00",
        "peak 167.0 of 80.0 GiB on stage 0, most of it reserved",
    ]
    assert section_of(text, "between peers")[1] == (
        "sent         2.50 GB by each peer; 1.50 GB for each other, 12.3% of what int8 sends"
    )
    assert section_of(text, "checkpoints")[-1].startswith("lost     nearly all of the time to saves")


def test_what_most_of_the_memory_is_is_told_of_the_largest_stage() -> None:
    plan = made_plan()
    first, second, third = plan.draft.memory
    memories = (first, replace(second, activations=8 * second.activations), third)
    text = plan_text(replace(plan, draft=replace(plan.draft, memory=memories)))
    assert section_of(text, "memory of one rank, GiB")[-1].endswith("on stage 1, most of it activations")


def test_of_many_stages_the_first_the_last_and_the_largest_are_shown() -> None:
    plan = made_plan()
    for count, worst, shown in [
        (16, 9, list(range(16))),
        (17, 9, [0, 1, 2, "…", 9, 15, 16]),
        (17, 3, [0, 1, 2, 3, 15, 16]),
        (17, 16, [0, 1, 2, "…", 15, 16]),
    ]:
        held = tuple(memory(2.0 if index == worst else 1.0) for index in range(count))
        middle = StageParameters(blocks=5, has_embedding=False, has_head=False)
        draft = replace(plan.draft, memory=held, stages=(middle,) * count)
        rows = section_of(plan_text(replace(plan, draft=draft)), "memory of one rank, GiB")
        first = [row.split()[0] for row in rows[2:-1]]
        assert first == [str(one) for one in shown], (count, worst)


@pytest.mark.parametrize(("setting", "is_told"), [("prune_waits=true", True), ("prune_waits=false", False)])
@pytest.mark.parametrize("place", ["backup", "second_backup"])
def test_what_waits_for_its_backup_is_kept_besides(place: str, setting: str, is_told: bool) -> None:
    plan = made_plan()
    loaded = parse_recipe(RECIPE, (f"{place}.url=file:///mnt/disk", f"{place}.{setting}"), label="made")
    request = replace(plan.draft.request, loaded=loaded)
    text = plan_text(replace(plan, draft=replace(plan.draft, request=request)))
    assert ("8.25 TB of storage at most, besides what waits for its backup\n" in text) is is_told


def test_of_many_stretches_nine_are_shown_evenly_and_a_single_one_has_no_ramp_up() -> None:
    plan = made_plan()
    for count, shown, last in [
        (9, list(range(9)), "until the full batch"),
        (10, [0, 1, 2, 3, 4, 6, 7, 8, 9], "until the full batch"),
        (41, [0, 5, 10, 15, 20, 25, 30, 35, 40], "until the full batch"),
        (1, [0], ""),
    ]:
        course = tuple(stretch(number, days=1.0, batch=16 + number) for number in range(count))
        text = plan_text(replace(plan, draft=replace(plan.draft, course=course)))
        rows = section_of(text, "the run, stretch by stretch")
        starts = [row.split()[0] for row in rows[2:] if row.split()[0].replace(",", "").isdigit()]
        more = [f"9 of {count} stretches; --json has all"] if count > 9 else []
        assert starts[: len(shown)] == [f"{1_000 * number:,}" for number in shown], count
        rest = rows[2 + len(shown) :]
        assert rest[: len(more)] == more and (len(rest) == len(more) + bool(last)), count
        assert "".join(rest[len(more) :]).startswith(last)


def test_parts_of_a_step_below_half_a_percent_are_not_named() -> None:
    plan = made_plan()
    fast = replace(stretch(2, days=4.0, batch=16).step, data_s=345.6 * 0.0051)
    course = (*plan.draft.course[:-1], replace(plan.draft.course[-1], step=fast))
    text = plan_text(replace(plan, draft=replace(plan.draft, course=course)))
    assert "waiting 3%, data 1%" in " ".join(" ".join(section_of(text, "one step of the full batch")).split())


@pytest.mark.parametrize(
    ("days", "text"),
    [(2.0, "2.0 days"), (1.99, "47.8 h"), (2 / 24, "2.0 h"), (1.99 / 24, "119.4 min"), (0.0, "0.0 min")],
)
def test_a_duration_is_told_in_the_unit_of_its_size(days: float, text: str) -> None:
    assert days_text(days) == text


@pytest.mark.parametrize(("days", "text"), [(1.9, "2026-02-28"), (3e6, "after 9999"), (1e12, "after 9999")])
def test_a_date_beyond_the_calendar_is_told_as_such(days: float, text: str) -> None:
    assert date_after(date(2026, 2, 27), days) == text


def test_a_search_lists_twenty_layouts_and_tells_of_the_rest() -> None:
    ranked = tuple(
        Candidate(
            layout=Layout(tensor=2, pipeline=1, data=number, sequence=number == 1), micro_batch=number + 2,
            recompute="full" if number == 1 else "none", step=stretch(0, days=number, batch=1).step,
            mfu=0.5 - number / 100, memory_bytes=number * 2**30, reason="the best" if number == 1 else "DP",
        )
        for number in range(1, 23)
    )  # fmt: skip
    result = SearchResult(
        recipe="made", hardware="a100-80g", accelerators=24, ranked=ranked, too_large=31, indivisible=43,
        nearest="",
    )  # fmt: skip
    lines = search_text(result).split("\n")
    assert lines[:2] == ["made on 24 × a100-80g: 22 layouts fit, 31 do not fit, 43 do not divide", ""]
    assert lines[2:6] == [
        "    layout             micro  recompute   s/step    MFU   GiB  loses by", "─" * 71,
        " 1  TP2·PP1·DP1·Z0·SP      3  full         86.40  49.0%   1.0  the best",
        " 2  TP2·PP1·DP2·Z0         4  none        172.80  48.0%   2.0  DP",
    ]  # fmt: skip
    assert len(lines) == 4 + 20 + 1 and lines[23].split()[0] == "20"
    assert lines[-1] == "and 2 more: --json lists all"
    few = search_text(replace(result, ranked=ranked[:20], nearest="The nearest lacks 3 GiB.")).split("\n")
    assert len(few) == 4 + 20 + 2 and few[-2:] == ["", "- The nearest lacks 3 GiB."]


def test_a_share_that_is_lost_is_never_told_as_all_of_the_time() -> None:
    plan = made_plan()
    saves = replace(
        plan.draft.checkpoints, lost_share=0.99999, best_lost_share=0.999995, failures=1_234_567.0,
        mean_time_between_failures_s=90.0,
    )  # fmt: skip
    text = " ".join(plan_text(replace(plan, draft=replace(plan.draft, checkpoints=saves))).split())
    assert "nearly all of the time to saves and failures; nearly all at best" in text
    assert "100.00%" not in text and "a failure every 1.5 min (1,234,567 in the run)" in text
