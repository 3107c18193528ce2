"""What the level of a history is said to be, on histories whose level is known."""

import pytest

from bloomery.guard.level import described


@pytest.mark.parametrize("count", [16, 64, 130])
@pytest.mark.parametrize("slope", [-0.5, 0.0, 0.25])
def test_values_on_a_line_have_its_slope_and_no_spread(count: int, slope: float) -> None:
    values = [10.0 + slope * step for step in range(count)]
    centre, spread, found = described(values, floor=0.0)
    newer = values[count // 2 :]
    assert centre == pytest.approx(sum(newer) / len(newer))
    assert found == pytest.approx(slope) and 0.0 <= spread < 1e-9
