"""What all tests share: a tiny run, and `needs` for tests that not every machine can run.

    @pytest.mark.needs("xz", package="xz-utils")
    @pytest.mark.needs(may_mount, rights="root, to mount a file system")

A test that lacks something is skipped, and listed at the end with what to install or to be. Where
BLOOMERY_SKIP_NOTHING is set, as in continuous integration, a missing package is a failure; rights are not,
for no installation gives them.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections import Counter
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings
from tests.tiny_run import corpus, prepared, start, train_command

__all__ = ["corpus", "prepared", "start", "train_command"]

NEEDS = "needs(program or check, *, package=…, rights=…): what a test wants of the machine"


# The suite tries the same examples each time, so that a change is judged by what it changed;
# HYPOTHESIS_PROFILE=explore looks for new ones. No deadline: an example takes as long
# as the machine's other work lets it.
settings.register_profile("suite", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture(autouse=True)
def environment_as_before() -> Iterator[None]:
    """Take back what a command set in this process's environment, such as that the network is forbidden."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
    if read_once := sys.modules.get("huggingface_hub.constants"):  # by a test that forbade the network
        read_once.HF_HUB_OFFLINE = before.get("HF_HUB_OFFLINE", "0") == "1"  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", NEEDS)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    """Collect tests without collecting garbage, which would walk all modules and tests again and again.

    These stay until the end, so later walks leave them out.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        (wanted,) = marker.args
        if wanted() if callable(wanted) else shutil.which(wanted):
            continue
        package, rights = marker.kwargs.get("package"), marker.kwargs.get("rights")
        remedy = f"apt-get install {package}" if package else f"run as {rights}"
        if package and os.environ.get("BLOOMERY_SKIP_NOTHING"):
            pytest.fail(f"this machine lacks what the test needs: {remedy}", pytrace=False)
        item.user_properties.append(("needs", remedy))
        pytest.skip(f"needs: {remedy}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    remedies = Counter(
        value for report in skipped for name, value in report.user_properties if name == "needs"
    )
    if remedies:
        terminalreporter.section("not tested on this machine")
        for remedy, count in sorted(remedies.items()):
            terminalreporter.line(f"{count} test{'s' if count > 1 else ''}: {remedy}")
