from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bloomery.data.documents import read_ahead
from bloomery.errors import DataError


def test_items_come_in_order_and_whole() -> None:
    assert list(read_ahead(iter(range(1000)), count=3, what=str)) == list(range(1000))
    assert list(read_ahead(iter(()), count=3, what=str)) == []


def test_an_error_comes_after_the_items_before_it() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("three")

    seen = []
    with pytest.raises(ValueError, match="three"):
        for item in read_ahead(broken(), count=4, what=str):
            seen.append(item)
    assert seen == [1, 2]


def test_a_consumer_that_leaves_ends_the_thread() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    items = read_ahead(endless(), count=2, what=str)
    assert next(items) == 1
    items.close()
    assert not any(thread.name == "read-ahead" for thread in threading.enumerate())


def test_a_source_that_falls_silent_is_named_and_left_behind() -> None:
    never = threading.Event()

    def hanging() -> Iterator[int]:
        yield 1
        never.wait(60)

    items = read_ahead(hanging(), count=2, what=lambda: "text of corpus.jsonl", silence_s=2.0)
    assert next(items) == 1
    with pytest.raises(DataError, match=r"Waited 2 s for text of corpus\.jsonl"):
        next(items)
    never.set()
