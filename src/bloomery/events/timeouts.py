"""The time-outs of a run on one cluster that its ranks and its launcher share, in seconds."""

from __future__ import annotations

COLLECTIVE_TIMEOUT_S = 600
"""A collective of torch.distributed that one rank does not come to ends with an error after this."""
JOIN_TIMEOUT_S = 300.0
"""How long a rank may take to introduce itself: torch loads slowly from a cold disk."""
STORE_TIMEOUT_S = 60.0
"""How long a store may take to answer, on a machine where much else happens."""
RANK_ZERO_SILENCE_S = 600.0
"""The seconds without a status of rank 0's task, such as preparing the data, after which rank 0 is lost."""
RANK_ZERO_STALL_S = 3600.0
"""The seconds without progress or computation after which rank 0 hangs, though it still writes its status."""
GRACE_S = 60.0
"""The seconds that the other ranks may take to save and end once one rank has ended; then they are killed."""
GRACE_AFTER_FAILURE_S = 20.0
"""The same once a rank has failed: the others can no longer save together."""
GRACE_AFTER_SIGNAL_S = 3.0
"""The same once a signal has ended a rank: the others can only notice that it is gone."""
