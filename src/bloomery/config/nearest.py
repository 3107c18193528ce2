"""What somebody may have meant who wrote a name that is not known."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], *, cutoff: float) -> list[str]:
    """The known name that is most like this one, if any is as alike as `cutoff` (0 to 1) wants; else none."""
    from difflib import get_close_matches  # here, since commands that find no mistake are quicker without it

    return get_close_matches(name, list(known), n=1, cutoff=cutoff)
