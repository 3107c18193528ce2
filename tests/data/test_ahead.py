from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bloomery.data.ahead import read_ahead


def test_items_come_in_order_and_whole() -> None:
    assert list(read_ahead(iter(range(1000)), count=3)) == list(range(1000))
    assert list(read_ahead(iter(()), count=3)) == []


def test_an_error_comes_after_the_items_before_it() -> None:
    def broken() -> Iterator[int]:
        yield 1
        yield 2
        raise ValueError("three")

    seen = []
    with pytest.raises(ValueError, match="three"):
        for item in read_ahead(broken(), count=4):
            seen.append(item)
    assert seen == [1, 2]


def test_a_consumer_that_leaves_ends_the_thread() -> None:
    def endless() -> Iterator[int]:
        while True:
            yield 1

    before = threading.active_count()
    items = read_ahead(endless(), count=2)
    assert next(items) == 1
    items.close()
    assert threading.active_count() == before
