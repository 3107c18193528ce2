"""Work of the first rank that others wait for: hours if need be, and not for ever."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._distributed_c10d import FileStore

from bloomery.errors import DataError, RankLost, ToldElsewhere
from bloomery.parallel import errands
from bloomery.parallel.errands import SILENCE_S, STALL_S, Sign, Tick, do_first, wait_for_first

KEY, DOING = "errand/0", "preparing the data"
EVERY_S = 100.0


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Iterator[Sign]], None]:
    """Waits on a clock of its own, on which the first rank gives its next sign every 100 s."""

    def waits(signs: Iterator[Sign]) -> None:
        store, now = FileStore(str(tmp_path / "store"), 1), [0.0]

        def sleep(_: float) -> None:
            now[0] += EVERY_S
            sign = next(signs, None)
            if sign is not None:
                store.set(KEY, json.dumps(asdict(sign)))

        monkeypatch.setattr(errands, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
        wait_for_first(store, KEY, doing=DOING)

    return waits


@pytest.mark.parametrize("grows", ["steps", "processor_s"])
def test_whoever_gets_on_is_waited_for_for_hours(wait: Callable[[Iterator[Sign]], None], grows: str) -> None:
    count = int(10 * STALL_S / EVERY_S)
    usual = {"steps": 0, "processor_s": 0}
    signs = [Sign(count=number, **(usual | {grows: number // 30})) for number in range(1, count)]
    wait(iter([*signs, Sign(count=-1, outcome="done", **usual)]))


def test_whoever_lives_and_does_not_get_on_is_given_up_and_named(
    wait: Callable[[Iterator[Sign]], None],
) -> None:
    signs = (Sign(count=number, steps=3, processor_s=4) for number in range(1, 10**6))
    with pytest.raises(RankLost, match="Rank 0, which was preparing the data, lives, but has not got on"):
        wait(signs)


@pytest.mark.parametrize("signs", [0, 5])
def test_whoever_falls_silent_is_given_up_and_named(
    wait: Callable[[Iterator[Sign]], None], signs: int
) -> None:
    given = (Sign(count=number, steps=number, processor_s=0) for number in range(1, signs + 1))
    silence = f"no sign of life for {SILENCE_S:.0f} s"
    with pytest.raises(RankLost, match=f"Rank 0, which was preparing the data, has given {silence}"):
        wait(given)


def test_what_the_first_made_is_its_own_and_the_others_go_on(tmp_path: Path) -> None:
    def task(tick: Tick) -> str:
        tick()
        return "made"

    assert both(tmp_path, task) == ["made", None]


def test_when_the_first_fails_it_says_why_and_the_others_end_without_a_word(tmp_path: Path) -> None:
    def task(tick: Tick) -> str:
        raise DataError("nowhere.txt does not exist")

    first, second = both(tmp_path, task)
    assert isinstance(first, DataError) and isinstance(second, ToldElsewhere)


def both(directory: Path, task: Callable[[Tick], str]) -> list[object]:
    """What became of two ranks."""

    def one(rank: int) -> object:
        store = FileStore(str(directory / "store"), 2)
        try:
            return do_first(store, KEY, task) if rank == 0 else wait_for_first(store, KEY, doing=DOING)
        except (DataError, ToldElsewhere) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))
