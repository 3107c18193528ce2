from __future__ import annotations

import numpy as np

from bloomery.diloco.outer_update import digest

VALUES = np.random.default_rng(1).standard_normal(3_000_000).astype(np.float32)


def test_a_digest_does_not_depend_on_cuts_or_threads():
    whole = digest(VALUES, threads=1)

    assert digest(VALUES, threads=4) == whole
    assert digest(*np.array_split(VALUES, 7), threads=3) == whole
    assert digest(VALUES[:1], VALUES[1:1], VALUES[1:]) == whole
    assert digest(VALUES.reshape(1000, 3000)) == whole


def test_one_bit_anywhere_changes_it():
    whole = digest(VALUES)
    for place in (0, 262_143, 262_144, VALUES.size - 1):
        other = VALUES.copy()
        other.view(np.uint32)[place] ^= 1
        assert digest(other) != whole


def test_blocks_that_change_places_change_it():
    blocks = VALUES[: 1 << 20].reshape(4, -1)

    assert digest(blocks[0], blocks[1]) != digest(blocks[1], blocks[0])
    assert digest(VALUES[:1]) != digest(VALUES[:2])
    assert len(digest()) == 64
