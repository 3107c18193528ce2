"""How long each wait of a save may last. One table: an inner wait ends, and says why, before an outer one.

A rank's writer waits for the parts of others; its trainer for the writer's answer; the end of a run, or a
restore, for all saves. What comes after an error has to end before the launcher kills what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOWEST_BYTES_PER_S = 20e6
"""A disk or a link that is slower than this for minutes on end is taken for stuck."""
_LEAST_S = 300.0
_LEAST_TO_PARTNER_S = 60.0
_BETWEEN_S = 60.0
"""What an outer wait has more than what it waits for."""
SAVES_ON_THEIR_WAY = 2

ARENAS_S = 300.0
"""Taking the memory; a gather of ranks waits that long, which torch gives 600 s."""
PATIENCE_S = 5.0
"""Ranks that wait for one of them meet so often, so that no collective has to be patient."""
STRANGER_S = 10.0
"""Whoever connects to a keeper has so long to say who it is."""
WRITER_START_S = 60.0
WRITER_END_S = 3.0
"""A writer has so long to end when it is asked to, and again when it is killed."""
LAST_WORDS_S = 8.0
"""Saves on their way, when the run ends in an error: the launcher kills what is left after 20 s."""
BACKUP_AFTER_ERROR_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """The waits of saving a state. bytes: of all ranks, who write to one disk; part_bytes: a rank's own."""

    bytes: int
    part_bytes: int

    @property
    def parts_s(self) -> float:
        """The committing writer, for parts of other ranks once its own is there."""
        return _LEAST_S + self.bytes / SLOWEST_BYTES_PER_S

    @property
    def answer_s(self) -> float:
        """A trainer, for its writer: its own part, then the others', then the copy for its partner."""
        return 2 * self.parts_s + to_partner_s(self.part_bytes) + _BETWEEN_S

    @property
    def staging_s(self) -> float:
        """A trainer, for its own copying, before it writes the state again."""
        return _LEAST_S + self.part_bytes / SLOWEST_BYTES_PER_S

    @property
    def prune_s(self) -> float:
        """Reading a checkpoint back, and an older one where it is damaged, and removing what goes."""
        return 2 * self.parts_s + _BETWEEN_S

    @property
    def finish_s(self) -> float:
        """All saves on their way, one after the other, and the reading back and pruning after them."""
        return SAVES_ON_THEIR_WAY * (self.answer_s + _BETWEEN_S) + self.prune_s


def to_partner_s(bytes: int) -> float:
    """Sending a part to the rank that keeps it in memory."""
    return _LEAST_TO_PARTNER_S + bytes / SLOWEST_BYTES_PER_S
