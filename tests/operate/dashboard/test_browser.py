"""The page in a real browser: it grows with a journal, acts for the token alone, and shows markup as text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from tests.operate.dashboard.served import served
from tests.operate.dashboard.written_run import WrittenRun, healed_run, wait_until

from bloomery.operate.dashboard.saved_page import saved_page

pytestmark = pytest.mark.needs("chromium", package="chromium")

MARKUP = '<img src=x onerror="window.injected=1"><script>window.injected=2</script>'
WITHIN_MS = 20_000
LOADED = "html[data-loaded]"
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


def test_a_saved_report_draws_itself_without_a_server(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_text(saved_page([healed_run(tmp_path / "healed").rundir.path]))
    watched = WatchedPage(browser, file.as_uri())
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
        glance = page.locator("#glance")
        for words in ("<b>run", "99.0 wrote this journal", "is no run directory", "does not exist"):
            expect(glance).to_contain_text(words)
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
            serious = [
                (rule["id"], rule["nodes"][0]["html"][:200])
                for rule in found
                if rule["impact"] in ("serious", "critical")
            ]
            assert serious == []
        page.set_viewport_size({"width": 360, "height": 740})
        wait_until(lambda: page.evaluate("document.documentElement.scrollWidth") <= 360)
