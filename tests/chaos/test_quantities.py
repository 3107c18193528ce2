"""Rates, times and shares as people write them."""

import pytest

from bloomery.chaos.faults import parse_rate, parse_seconds, parse_share


def test_what_people_write_is_understood() -> None:
    assert parse_rate("200mbit") == 25e6
    assert parse_rate("1 Gbit/s") == 125e6
    assert parse_rate("0") == 0.0
    assert parse_rate("8kbit") == 1000.0 and parse_rate("0.5gbitps") == 62.5e6
    assert parse_seconds("50ms") == 0.05 and parse_seconds("20 us") == pytest.approx(2e-5)
    assert parse_seconds("1.5s") == 1.5
    assert parse_share("0.1%") == pytest.approx(0.001)
    assert parse_share("0.25") == 0.25


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_rate, "200"),
        (parse_rate, "200ms"),
        (parse_seconds, "5min"),
        (parse_share, "100%"),
        (parse_share, "1"),
        (parse_share, "x"),
    ],
)
def test_what_is_not_understood_says_what_would_be(read: object, text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        read(text)  # type: ignore[operator]
