"""Rates, times and shares as people write them."""

import pytest

from bloomery.chaos.faults import rate_bytes_s, seconds, share


def test_what_people_write_is_understood() -> None:
    assert rate_bytes_s("200mbit") == 25e6
    assert rate_bytes_s("1 Gbit/s") == 125e6
    assert rate_bytes_s("0") == 0.0
    assert seconds("50ms") == 0.05
    assert seconds("1.5s") == 1.5
    assert share("0.1%") == pytest.approx(0.001)
    assert share("0.25") == 0.25


@pytest.mark.parametrize(
    ("read", "text"), [(rate_bytes_s, "200"), (seconds, "5min"), (share, "100%"), (share, "x")]
)
def test_what_is_not_understood_says_what_would_be(read: object, text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        read(text)  # type: ignore[operator]
