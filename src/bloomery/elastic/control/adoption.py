"""When a coordinator has lost its data: what the peers remember becomes what it knows.

Peers that see an epoch below one they have seen wait, and write down what they remember. Whoever runs the
coordinator decides that this is to be believed: nobody else can know that the old data will not come back.
"""

from __future__ import annotations

from dataclasses import dataclass

from bloomery.elastic.control.codec import COMMIT, MEMBER, SHARES, TESTIMONY, Testimony, epoch_of
from bloomery.elastic.control.etcd import Condition, Etcd, Outcome, Put, absent
from bloomery.elastic.control.keys import Keys
from bloomery.elastic.control.membership import Membership
from bloomery.elastic.control.snapshot import Snapshot
from bloomery.errors import CoordinatorError


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """What was restored. witnesses: the peers that remembered it; round: -1 where none was committed."""

    epoch: int
    round: int
    witnesses: tuple[str, ...]


def bear_witness(membership: Membership, keys: Keys, me: str, snapshot: Snapshot) -> None:
    """Write down what this peer remembers of what the coordinator has forgotten, if it remembers anything."""
    if snapshot.remembered is not None:
        memory = snapshot.remembered
        membership.offer(keys.testimony(me), TESTIMONY.text(memory), round=memory.commit.round)


def adopt(etcd: Etcd, keys: Keys) -> Adopted:
    """Let the run go on from the newest that peers remember, above the highest epoch that any has seen.

    Raises CoordinatorError where no peer is listed, or another has changed something meanwhile.
    """
    testimonies = {
        item.key.rpartition("/")[2]: TESTIMONY.record(item.value)
        for item in etcd.list(keys.testimonies).items
    }
    epochs = [MEMBER.record(item.value).epoch for item in etcd.list(keys.members).items]
    epochs += [one.epoch for one in testimonies.values()]
    if not epochs:
        raise CoordinatorError(
            f"no peer of the run {keys.run!r} is listed here, so nobody remembers anything",
            remedy="Leave the peers running, or start them; they list themselves. Then ask again.",
        )
    found = etcd.get(keys.epoch)
    known = 0 if found is None else epoch_of(found.value)
    best = max(testimonies.values(), key=_age, default=None)
    epoch = max(known, *epochs) + 1
    conditions = [
        Condition(key=keys.epoch, aspect="modified", wanted=found.modified) if found else absent(keys.epoch)
    ]
    operations = [Put(key=keys.epoch, value=str(epoch))]
    if best is not None:
        later = etcd.list(keys.commits, newest=1).items
        if later and later[0].key >= keys.commit(best.commit.round):
            best = None  # the coordinator knows more than the peers remember
        else:
            operations.append(Put(key=keys.commit(best.commit.round), value=COMMIT.text(best.commit)))
            conditions.append(absent(keys.commit(best.commit.round)))
            if best.shares is not None:
                operations.append(Put(key=keys.shares(best.shares.round), value=SHARES.text(best.shares)))
    if etcd.transact(conditions, operations) is not Outcome.DONE:
        raise CoordinatorError(
            f"the run {keys.run!r} has changed meanwhile", remedy="Look at it with --status, and ask again."
        )
    witnesses = tuple(sorted(name for name, one in testimonies.items() if one == best))
    return Adopted(epoch=epoch, round=best.commit.round if best else -1, witnesses=witnesses)


def _age(testimony: Testimony) -> tuple[int, int, int]:
    shares = testimony.shares
    return (testimony.commit.round, testimony.epoch, len(shares.shares) if shares else -1)
