from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.layouts.comparison import Matrix


@pytest.fixture(scope="session")
def matrix() -> Iterator[Matrix]:
    """Ranks that stay for the whole session. `make soak PART=layouts` compares more steps, and all rows."""
    matrix = Matrix(steps=6)
    yield matrix
    matrix.close()
