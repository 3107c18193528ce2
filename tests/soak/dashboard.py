"""The dashboard beside a live training, in a real browser: it grows, is acted on, and is found again."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from tests.operate.dashboard.served import served
from tests.operate.dashboard.written_run import wait_until

from bloomery.checkpoint.format.catalogue import checkpoints
from bloomery.events.journal import last_step, loss_curve, read_journal
from bloomery.events.run_directory import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium", package="chromium")]

WITHIN_MS, WITHIN_S = 120_000, 120.0
ENDLESS = (
    "train.samples=1000000",
    "train.ramp_up=[]",
    "evaluate.every_steps=0",
    "checkpoint.every_steps=0",
    "guard.spike=false",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield chromium
        chromium.close()


def test_a_live_training_is_followed_acted_on_and_found_again(
    browser: Browser, train_command: Callable[..., list[str]], tmp_path: Path
) -> None:
    rundir = RunDirectory(tmp_path / "run")
    command = [sys.executable, "-m", "bloomery", *train_command(*ENDLESS)]
    with (tmp_path / "log").open("w") as log:
        trainer = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: last_step(rundir.journal()) > 20, within_s=WITHIN_S)
        with served([rundir.path], "--actions") as dashboard:
            first, second = (browser.new_context().new_page() for _ in range(2))
            complaints: list[str] = []
            asked: list[str] = []
            first.on("pageerror", lambda error: complaints.append(str(error)))
            first.on("request", lambda request: asked.append(request.url))
            first.on("dialog", lambda dialog: dialog.accept())
            for page in (first, second):
                page.goto(dashboard.url)
            seen = shown_step(first)
            wait_until(lambda: shown_step(first) > seen + 20, within_s=WITHIN_S)  # the curve grows
            wait_until(lambda: shown_step(second) >= seen, within_s=WITHIN_S)  # a second tab agrees
            # A planted spike: a rate that is far too high, by the run's own control file.
            usual = planted(rundir)
            trainer.terminate()
            assert trainer.wait(120) is not None
            with (tmp_path / "log").open("a") as log:
                hot = [
                    *command,
                    "optim.learning_rate=3",
                    f"guard.stop_at_step={last_step(rundir.journal()) + 12}",
                ]
                subprocess.run(hot, stdout=log, stderr=log, check=False, timeout=300)
                trainer = subprocess.Popen([*command, "optim.learning_rate=1e-2"], stdout=log, stderr=log)
            wait_until(lambda: abs(highest(first) / planted(rundir) - 1) < 1e-3, within_s=WITHIN_S)
            assert planted(rundir) > usual + 0.5  # higher than the run began
            expect(first.locator("#event-list")).to_contain_text("learning_rate", timeout=WITHIN_MS)

            resumed = last_step(rundir.journal())
            wait_until(lambda: last_step(rundir.journal()) > resumed, within_s=WITHIN_S)
            saved = len(checkpoints(rundir))
            act(first, "save", token="wrong")
            expect(first.locator("#action-told")).to_contain_text("nothing was done")
            act(first, "save", token=dashboard.token)
            expect(first.locator("#action-told")).to_contain_text("saves after its present step")
            wait_until(lambda: len(checkpoints(rundir)) > saved, within_s=WITHIN_S)
            port = dashboard.port
        expect(first.locator("#connection")).to_contain_text("does not answer", timeout=WITHIN_MS)
        with served([rundir.path], "--actions", port=port) as again:
            now = last_step(rundir.journal())
            wait_until(lambda: shown_step(first) > now, within_s=WITHIN_S)  # it has connected again
            act(first, "stop", token=again.token)
            assert trainer.wait(120) == 0
            assert [event["reason"] for event in ends(rundir)][-1].endswith("stop")
        assert complaints == [] and all(url.startswith((again.url, "data:")) for url in asked)
    finally:
        trainer.kill()
        trainer.wait()


def shown_step(page: object) -> int:
    """Return the step that the head of the page shows; 0 before it shows one."""
    text = page.locator("#glance").inner_text()  # type: ignore[attr-defined]
    words = text.replace(",", "").split()
    after = [words[place + 1] for place, word in enumerate(words[:-1]) if word.lower() == "step"]
    return int(after[0].strip(".")) if after and after[0].strip(".").isdecimal() else 0


def highest(page: object) -> float:
    """Return the highest loss that the chart of the page names."""
    text = page.locator("#chart-loss").inner_text()  # type: ignore[attr-defined]
    named = re.search(r"to ([\d.]+\d)", text)
    return float(named[1]) if named else 0.0


def act(page: object, name: str, *, token: str) -> None:
    """Ask for an action on the page."""
    page.locator("#action-token").fill(token)  # type: ignore[attr-defined]
    page.locator("#action-name").select_option(name)  # type: ignore[attr-defined]
    page.locator("#action-form button").click()  # type: ignore[attr-defined]


def planted(rundir: RunDirectory) -> float:
    """Return the highest loss of the run's curve."""
    return max(loss for _, loss in loss_curve(rundir))


def ends(rundir: RunDirectory) -> list[dict]:
    """Return how the processes of the run ended."""
    return [event for event in read_journal(rundir.journal()) if event["event"] == "end"]
