"""The ranks of a peer and its agent: who is waited for, and whose status counts."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.cli import peer
from bloomery.config.load import load_recipe


def test_the_status_of_a_peer_is_that_of_its_ranks_or_of_its_agent(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loaded = load_recipe("demo")

    def ending(*, failed: bool) -> Any:
        return SimpleNamespace(why="all is done", failed=failed)

    assert peer._ended(0, None, loaded) == 1 and peer._ended(7, None, loaded) == 7
    assert capsys.readouterr().out == ""
    assert peer._ended(0, ending(failed=False), loaded) == 0
    assert peer._ended(0, ending(failed=True), loaded) == 1
    assert peer._ended(7, ending(failed=True), loaded) == 7
    assert "this peer's part of 'demo' ended: all is done" in capsys.readouterr().out


def test_an_agent_hears_whether_its_ranks_failed_and_one_that_fails_ends_nothing_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def led(agent: Any, start: Any) -> tuple[int, Any, list[bool]]:
        heard: list[bool] = []
        stand_in: Any = SimpleNamespace(
            open=lambda: None, run=agent, path=Path("/s"), ranks_ended=lambda *, failed: heard.append(failed)
        )
        return *peer.lead(stand_in, start), heard

    def broken() -> None:
        raise RuntimeError("the agent is broken")

    assert led(lambda: "well", lambda path: int(path != "/s")) == (0, "well", [False])
    assert led(lambda: "well", lambda path: 7) == (7, "well", [True])
    assert led(broken, lambda path: 0) == (0, None, [False])
    (failed,) = (record for record in caplog.records if record.name == peer.log.name)
    assert failed.exc_info and "its ranks end as well" in failed.getMessage()


@pytest.mark.parametrize("status", [0, 7, None])
def test_an_agent_is_open_before_its_ranks_start_and_is_waited_for_when_they_have_ended(
    status: int | None,
) -> None:
    done, over = list[Any](), threading.Event()

    def agent() -> str:
        over.wait(30.0)
        done.append("agent")
        return "well"

    def start(path: str) -> int:
        done.append("ranks")
        if status is None:
            raise OSError(8, "Exec format error")
        return status

    def ended(*, failed: bool) -> None:
        done.append(failed)
        over.set()

    stand_in: Any = SimpleNamespace(
        open=lambda: done.append("open"), run=agent, path=Path("/s"), ranks_ended=ended
    )
    if status is None:
        with pytest.raises(OSError, match="Exec format"):
            peer.lead(stand_in, start)
    else:
        assert peer.lead(stand_in, start) == (status, "well")
    assert done == ["open", "ranks", status != 0, "agent"]
