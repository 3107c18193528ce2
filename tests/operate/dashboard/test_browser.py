"""The page in a real browser: it grows with a journal, acts for the token alone, and shows markup as text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from tests.operate.dashboard.served import served
from tests.operate.dashboard.written_run import WrittenRun, healed_run, wait_until

from bloomery.events.journal import Journal
from bloomery.operate.dashboard.saved_page import saved_page

pytestmark = pytest.mark.needs("chromium", package="chromium")

MARKUP = '<img src=x onerror="window.injected=1"><script>window.injected=2</script>'
WITHIN_MS = 20_000
LOADED = "html[data-loaded]"
SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
expect.set_options(timeout=WITHIN_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield chromium
        chromium.close()


class WatchedPage:
    """A page whose requests and complaints are kept."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.page: Page = browser.new_context(**context).new_page()
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", self._keep)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("dialog", lambda dialog: dialog.accept())
        self.page.goto(url)
        self.page.wait_for_selector(LOADED, timeout=WITHIN_MS)

    def _keep(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)


def test_a_page_follows_a_run_and_acts_for_the_token_alone(browser: Browser, tmp_path: Path) -> None:
    run = healed_run(tmp_path / "healed")
    with served([run.rundir.path], "--actions") as dashboard:
        watched, second = WatchedPage(browser, dashboard.url), WatchedPage(browser, dashboard.url)
        page, port = watched.page, dashboard.port
        expect(page.locator("#glance")).to_contain_text("Step 91", timeout=WITHIN_MS)
        expect(page.locator("#chart-loss")).to_contain_text("from 2.4")

        run.steps(9)  # the curve grows, in both tabs
        for tab in (page, second.page):
            expect(tab.locator("#glance")).to_contain_text("Step 100", timeout=WITHIN_MS)
        run.steps(1, loss=41.5)
        run.event("guard", guard="spike", action="watch", reason="a planted spike")
        run.steps(9)
        expect(page.locator("#chart-loss")).to_contain_text("to 41.5", timeout=WITHIN_MS)
        expect(page.locator("#event-list")).to_contain_text("a planted spike")
        marks = page.evaluate("bloomery.charts[0].marks.map((mark) => [mark.event.kind, mark.event.at.step])")
        assert ["guard", 101] in marks and ["rewind", 60] in marks

        page.locator("#chart-loss").focus()  # by keyboard alone
        page.keyboard.press("+")
        expect(page.locator("#range")).to_contain_text("from")
        page.keyboard.press("0")
        expect(page.locator("#range")).to_have_text("the whole run")
        page.get_by_role("button", name=re.compile("show guard at step 101")).click()
        expect(page.locator("#range")).to_contain_text("from 98")
        expect(page.locator("#chart-loss")).to_contain_text("to 41.5")

        expect(page.locator("#goodput-table")).to_contain_text("Effective time")
        page.get_by_role("button", name=re.compile("show guard at step 101")).focus()
        run.event("guard", guard="spike", action="watch", reason="told while the list is walked")
        expect(page.locator("#event-list")).to_contain_text("while the list is walked")
        assert page.evaluate("document.activeElement.ariaLabel").startswith("show guard at step 101")

        page.locator("#action-token").fill("wrong")
        page.locator("#action-form button").click()
        expect(page.locator("#action-told")).to_contain_text("nothing was done")
        assert not run.rundir.control("save").exists()
        page.locator("#action-token").fill(dashboard.token)
        page.locator("#action-form button").click()
        expect(page.locator("#action-told")).to_contain_text("saves after its present step")
        assert run.rundir.control("save").exists()
        refused = [line for line in watched.complaints if "403" in line]
        assert len(refused) == 1 and watched.complaints == refused
        watched.complaints.clear()
    run.steps(5)
    expect(page.locator("#connection")).to_contain_text("does not answer", timeout=WITHIN_MS)
    with served([run.rundir.path], port=port) as again:  # the page connects again by itself
        expect(page.locator("#glance")).to_contain_text("Step 115", timeout=WITHIN_MS)
        expect(page.locator("#actions")).to_be_hidden()
        assert all(url.startswith((again.url, "data:")) for url in watched.asked + second.asked)
        assert all("ERR_CONNECTION_REFUSED" in line or "INCOMPLETE" in line for line in watched.complaints)


def test_four_peers_of_which_one_is_killed_are_seen_as_such(browser: Browser, tmp_path: Path) -> None:
    """The processes are real and write real heartbeats; what their rounds were stands in their journals."""
    peers = ("oslo", "<b>rome", "wien", "bern")
    runs = [peer_run(tmp_path / name, me=name, peers=peers) for name in peers]
    processes = [beating(run) for run in runs]
    try:
        with served([run.rundir.path for run in runs]) as dashboard:
            watched = WatchedPage(browser, dashboard.url)
            page = watched.page
            cards = page.locator("#glance article")
            expect(cards).to_have_count(4)
            expect(page.locator("#peer-pictures svg")).to_have_count(2)
            ring = page.locator("#peer-pictures svg.ring")
            assert "<b>rome to wien 20 Mbit/s" in str(ring.get_attribute("aria-label"))
            expect(ring).to_contain_text("slowest: 20 Mbit/s")
            expect(page.locator("#peer-pictures svg.rounds rect")).to_have_count(5 * 4 + 5 * 4 - 1)
            expect(page.locator("#mesh-map .slow")).to_contain_text("rank 1")
            for card in cards.all():
                expect(card).to_contain_text("running")
            legend = page.locator("#chart-loss .u-legend")  # all are drawn, and one curve of each is named
            expect(legend).to_contain_text("oslo: smoothed")
            assert "bern: smoothed" in legend.inner_text() and "each step" not in legend.inner_text()
            assert page.locator("#chart-parts .u-legend .u-series").count() == 1 + 2
            runs[3].event("guard", guard="spike", reason="told of a run that is not focused")
            wait_until(
                lambda: page.evaluate(
                    "bloomery.page.marks().some((mark) => mark.text.includes('not focused'))"
                )
            )
            processes[2].kill()
            expect(cards.nth(2)).to_contain_text("Not healthy: gone")
            expect(cards.nth(2)).to_contain_text("no process since")
            for alive in (0, 1, 3):
                expect(cards.nth(alive)).to_contain_text("running")
            assert page.evaluate("document.querySelectorAll('main b, main img').length") == 0
            assert watched.complaints == []
            keep_pictures(page)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def peer_run(path: Path, *, me: str, peers: tuple[str, ...]) -> WrittenRun:
    """A run of two ranks, of which the second is slow, and six rounds; the last peer missed the third.

    Where the first round began is not known, so five are drawn over time.
    """
    run = WrittenRun(path)
    run.start()
    run.steps(12)
    with Journal(run.rundir.journal(rank=1)) as journal:
        journal.write("step", incarnation=1, step=12, spent={"forward and backward": 0.3})
    began = time.time() - 60.0
    with run.rundir.rounds.open("w") as file:
        for number in range(1, 7):
            members = [*peers[:3], *([peers[3]] if number != 3 else [])]
            told = {"event": "round", "time": began + 10.0 * number, "round": number, "members": members}
            ring = {"ring": list(peers), "ring_mbit_s": [200.0, 20.0, 90.0, 90.0], "ring_s": 2.0}
            file.write(json.dumps(told | ring | {"included": True, "peer": me}) + "\n")
    return run


def beating(run: WrittenRun) -> subprocess.Popen[str]:
    """Start a process that writes the heartbeats of both ranks, and lives until it is killed."""
    program = (
        "import sys; from bloomery.events.heartbeat import Heartbeat, RankActivity\n"
        "from bloomery.events.run_directory import RunDirectory\n"
        "for rank in (0, 1):\n"
        "    beat = Heartbeat(RunDirectory(sys.argv[1]).heartbeat(rank=rank), rank=rank, world=2)\n"
        "    beat.at(step=12, memory_bytes=1e9); beat.enter(RankActivity.COMPUTING); beat.start()\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(run.rundir.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def keep_pictures(page: Page) -> None:
    """Keep a picture of the page as people see it, in build/screenshots: desktop, dark, phone, magnified."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for name, width, height, scheme in (
        ("desktop", 1280, 900, "light"),
        ("dark", 1280, 900, "dark"),
        ("phone", 390, 844, "light"),
        ("magnified", 640, 450, "light"),  # what a window of 1280 shows at 200%
    ):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_viewport_size({"width": width, "height": height})
        expect(page.locator(f"html[data-theme={scheme}]")).to_be_attached()
        wait_until(lambda width=width: page.evaluate("document.documentElement.scrollWidth") <= width)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


def test_the_page_is_walked_by_the_tab_key_in_reading_order(browser: Browser, tmp_path: Path) -> None:
    with served([healed_run(tmp_path / "healed").rundir.path], "--actions") as dashboard:
        page = WatchedPage(browser, dashboard.url).page
        expect(page.locator("#chart-loss")).to_contain_text("now 2.4")
        walked: list[int] = []
        for _ in range(80):
            page.keyboard.press("Tab")
            place = page.evaluate(
                """() => {
                    const at = document.activeElement, box = at.getBoundingClientRect();
                    if (at === document.body) return -1;
                    const named = at.hasAttribute("aria-label") || at.hasAttribute("aria-labelledby");
                    if (!named && !at.textContent && !(at.labels && at.labels.length)) return -2;
                    if (!box.width || !box.height) return -2;
                    return [...document.querySelectorAll("*")].indexOf(at);
                }"""
            )
            if place == -1:
                break
            walked.append(place)
        assert -2 not in walked and walked == sorted(set(walked))  # each has a name, is seen, and comes once
        ends = page.evaluate(
            "['.skip', '#theme', '#chart-loss', '#action-form button'].map((name) => "
            "[...document.querySelectorAll('*')].indexOf(document.querySelector(name)))"
        )
        assert set(ends) <= set(walked)


def test_a_saved_report_draws_itself_without_a_server(browser: Browser, tmp_path: Path) -> None:
    file, fresh = tmp_path / "run.html", WrittenRun(tmp_path / "fresh")
    fresh.start()
    file.write_text(saved_page([fresh.rundir.path]))
    assert "No step was recorded yet" in WatchedPage(browser, file.as_uri()).page.locator("main").inner_text()
    file.write_text(saved_page([healed_run(tmp_path / "healed").rundir.path]))
    watched = WatchedPage(browser, file.as_uri())
    expect(watched.page.locator("#no-curves")).to_be_hidden()
    expect(watched.page.locator("#chart-parts")).to_contain_text("now forward and backward 0.08, waiting for")
    assert watched.page.evaluate("bloomery.ticks([1.202e9, 1.2022e9, 1.2024e9], 2e5)") == [
        "1.2020 G",
        "1.2022 G",
        "1.2024 G",
    ]
    batch = watched.page.evaluate("bloomery.charts.find((chart) => chart.spec.id === 'batch').plot.scales.y")
    assert batch["min"] == 0 < 8 < batch["max"]
    expect(watched.page.locator("#chart-loss")).to_contain_text("now 2.4")
    expect(watched.page.locator("#event-list")).to_contain_text("back to step 50")
    watched.page.locator("input[value=time]").check()
    expect(watched.page.locator("#chart-loss .u-legend")).to_contain_text("time")
    assert watched.complaints == [] and watched.asked[0] == file.as_uri()
    assert all(url.startswith("data:") for url in watched.asked[1:])


def test_markup_stays_text_and_bad_files_are_told(browser: Browser, tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "<b>run")
    run.start(host=MARKUP, device=MARKUP, versions={"bloomery": "99.0"}, changes={MARKUP: ["1", MARKUP]})
    run.steps(30)
    run.steps(1, held_out_loss=3.0, held_out_by_dataset={MARKUP: 3.0, "code": 2.0})
    run.event("guard", guard=MARKUP, reason=MARKUP)
    run.event(MARKUP, what=MARKUP)
    run.event("checkpoint", path=MARKUP)
    run.event("slow_ranks", slow=[[MARKUP, MARKUP, MARKUP]], usual_s=MARKUP, ranks=MARKUP)
    run.operation("note", text=MARKUP, by=MARKUP)
    run.operation("diagnosis", cause=MARKUP, summary=MARKUP, culprit={"host": MARKUP}, gives_up=MARKUP)
    run.event("round", round=1, members=[MARKUP, "b"], included=True, peer=MARKUP, ring_s=0.1)
    run.event("left_out", round=1, whom="b", why=MARKUP)
    run.rundir.heartbeat().write_text(
        f'{{"rank": 0, "world": 1, "host": {MARKUP!r}, "activity": "x", "time": 1}}'.replace(
            "'", '"'
        ).replace(MARKUP, MARKUP.replace('"', '\\"'))
    )
    empty = tmp_path / "no-run"
    empty.mkdir()
    with served([run.rundir.path, empty, tmp_path / "gone"]) as dashboard:
        wait_until(lambda: dashboard.json("api/runs")["runs"][0]["rows"] == 31)
        watched = WatchedPage(browser, dashboard.url, color_scheme="dark", reduced_motion="reduce")
        page = watched.page
        expect(page.locator("#event-list")).to_contain_text(MARKUP, timeout=WITHIN_MS)
        for place in ("#save-table", "#rank-table", "#peer-table", "#chart-loss"):
            expect(page.locator(place)).to_contain_text("<img src=x")
        summary = page.locator("#glance")
        for words in ("<b>run", "99.0 wrote this journal", "is no run directory", "does not exist"):
            expect(summary).to_contain_text(words)
        assert page.evaluate(
            "[window.injected, document.querySelectorAll('img, b, main script').length]"
        ) == [None, 0]
        assert watched.complaints == [] and all(
            url.startswith((dashboard.url, "data:")) for url in watched.asked
        )
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            expect(page.locator(f"html[data-theme={scheme}]")).to_be_attached()
            found = Axe().run(page).response["violations"]
            assert [(rule["id"], rule["nodes"][0]["html"][:200]) for rule in found] == []
        page.set_viewport_size({"width": 360, "height": 740})
        wait_until(lambda: page.evaluate("document.documentElement.scrollWidth") <= 360)
        with run.rundir.journal().open("a") as journal:
            journal.write('{"event": "step", "st')
        expect(summary).to_contain_text("is unfinished")
        shutil.rmtree(run.rundir.path)
        expect(summary).to_contain_text("has vanished")
        expect(page.locator("#chart-loss")).to_contain_text("now 2.7184")  # and what was read is still there
        assert watched.complaints == []
