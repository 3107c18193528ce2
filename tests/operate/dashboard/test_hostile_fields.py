"""Every field that a peer or a log can set holds markup, or another type than it should: it stays text."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tests.operate.dashboard.served import served
from tests.operate.dashboard.written_run import WrittenRun, healed_run, wait_until

from bloomery.events.heartbeat import RankBeat
from bloomery.operate.dashboard.run_events import _TITLES
from bloomery.operate.dashboard.step_columns import StepLine

MARKUP = '<img src=x onerror="window.injected=1"></td><script>window.injected=2</script>'
HOSTILE: tuple[Any, ...] = (
    MARKUP,
    [MARKUP, [MARKUP], {MARKUP: MARKUP}],
    {MARKUP: MARKUP, "host": MARKUP},
    -1e308,
)
BEYOND_FLOATS = 10**400
KEPT = ("event", "time", "incarnation", "step")


def read_fields() -> list[str]:
    """Return the name of every field that the code of the page and of the ledger asks an event for."""
    packages = (resources.files(f"bloomery.operate.{name}") for name in ("dashboard", "ledger"))
    parts = (part for package in packages for part in package.iterdir() if part.name.endswith(".py"))
    code = "".join(part.read_text() for part in parts)
    return sorted(set(re.findall(r"""(?:\.get\(|\[)["'](\w+)["']""", code)) - set(KEPT))


def hostile_run(path: Path, value: Any) -> WrittenRun:
    """Write a run whose every event, step and heartbeat has this value in every field that is read."""
    run = healed_run(path)
    read = read_fields()
    assert {"members", "ring", "whom", "culprit", "skip", "host", "by"} <= set(read)
    hostile = dict.fromkeys([*read, MARKUP], value)
    for name in [*_TITLES, "round", "data", "evaluation", "checkpoint", MARKUP]:
        run.event(name, **hostile)
        run.operation(name, **hostile)
    rounds = [
        hostile
        | {"event": "round", "time": 9.0, "round": number, "members": [MARKUP, "b"], "ring": [MARKUP, "b"]}
        for number in (1, value, 2)
    ]
    odd = [hostile | {"event": "round", "time": value, "members": members} for members in (value, [value])]
    run.rundir.rounds.write_text("".join(json.dumps(event) + "\n" for event in [*rounds, *odd, *rounds]))
    numbers = {field.name: value for field in fields(RankBeat)}
    sound = {"rank": 0, "world": 2, "time": 1.0, "step": 5}
    run.rundir.heartbeat().write_text(json.dumps({name: str(own) for name, own in numbers.items()} | sound))
    run.rundir.heartbeat(rank=1).write_text(json.dumps(numbers))
    for name in (field for field in StepLine.__struct_fields__ if field not in KEPT):
        run.steps(1, loss=3.0)
        run.event("step", **{name: value}, step=run.step)
    run.steps(1, loss=2.5)
    (run.rundir.path / "submission.json").write_text(json.dumps(hostile))
    return run


def test_runs_of_hostile_fields_are_answered(tmp_path: Path) -> None:
    runs = [
        hostile_run(tmp_path / str(number), value) for number, value in enumerate((*HOSTILE, BEYOND_FLOATS))
    ]
    with served([run.rundir.path for run in runs]) as dashboard:
        wait_until(lambda: all(run["loss"] == 2.5 for run in dashboard.json("api/runs")["runs"]))
        for number in range(len(runs)):
            assert dashboard.json(f"api/panels?run={number}")["events"]
            assert dashboard.json(f"api/curves?run={number}&name=loss&name=seconds~")
        assert dashboard.get("metrics")[1].count("\nbloomery_loss{") == len(runs)


@pytest.mark.needs("chromium", package="chromium")
def test_markup_in_any_field_stays_text_on_the_page(tmp_path: Path) -> None:
    from playwright.sync_api import expect, sync_playwright

    runs = [hostile_run(tmp_path / f"{number}", value) for number, value in enumerate(HOSTILE)]
    with sync_playwright() as playwright, served([run.rundir.path for run in runs]) as dashboard:
        wait_until(lambda: all(run["loss"] == 2.5 for run in dashboard.json("api/runs")["runs"]))
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = chromium.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text))
        page.goto(dashboard.url)
        page.wait_for_selector("html[data-loaded]", state="attached")
        for number in range(len(runs)):
            expect(page.locator("#glance input").nth(number)).to_be_checked()
            page.locator("#focused").select_option(str(number))
            for place in ("#event-list", "#rank-table", "#peer-table", "#save-table", "#charts"):
                expect(page.locator(place)).not_to_be_empty()
            expect(page.locator("#connection")).to_contain_text("Up to date")
        assert page.evaluate("[window.injected, document.querySelectorAll('img, main script').length]") == [
            None,
            0,
        ]
        assert complaints == []
        chromium.close()
