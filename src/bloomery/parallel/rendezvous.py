"""The rendezvous of a peer's ranks in a store, before any process group exists.

Each rank writes an introduction into the store: its host and its recipe. Rank 0 reads them all and writes a
verdict, so that a mistake ends every rank at once, with one message from rank 0.

`ask_store` asks a store that another machine serves, which may freeze and never answer.
`is_lost_rank_error` tells the errors of torch's backends that mean "another rank is gone" from the rest.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from bloomery.errors import RankLost, ReportedElsewhere, TrainingFailed
from bloomery.events.run_lock import host_name
from bloomery.events.timeouts import JOIN_TIMEOUT_S, STORE_TIMEOUT_S
from bloomery.torch_private import FileStore, PrefixStore, Store, TCPStore

RENDEZVOUS_FILE, RENDEZVOUS_STORE = "BLOOMERY_RENDEZVOUS_FILE", "BLOOMERY_RENDEZVOUS_STORE"
"""Environment variables that our launcher sets: a file on this machine, or host:port of its store."""
_STORE = "the store where the ranks meet"
_POLL_S, _SLOWEST_POLL_S = 0.02, 0.5
_STORE_REMEDY = (
    "Look whether its machine is up and can be reached. The same command goes on from the newest checkpoint."
)

# Only the text of a backend's error says that a rank is lost: gloo raises bare RuntimeErrors, and NCCL's
# DistBackendError is also raised for wrong use and for errors of this rank's own device.
SOCKET_ERRORS = (
    "connection closed",
    "connection reset",
    "connection refused",
    "connection timed out",
    "connection was likely closed",
    "closed by peer",
    "closed by remote peer",
    "broken pipe",
    "no route to host",
    "network is unreachable",
    "socket timeout",
    "connect timeout",
    "timed out connecting",
)
"""Phrases in the errors of gloo's, the store's and NCCL's sockets."""
TIMEOUT_ERRORS = (
    "timed out waiting",
    "operation timed out",
    "application timeout caused pair closure",
    "collective operation timeout",
    "wait timeout",
)
"""Phrases of gloo, NCCL's watchdog and the store when an answer did not come."""
NCCL_ERRORS = (
    "ncclremoteerror",
    "remote process exited",
    "nccl communicator was aborted",
    "got completion from peer",
)
"""Further phrases of NCCL: of the other side, of a communicator that the watchdog ended, of InfiniBand."""

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a rank says of itself at the rendezvous.

    host: the name of its machine. machine: a text that tells machines of equal names apart (`machine_id`).
    recipe: its settings by key, as text.
    chosen: what its device makes of the settings that say 'auto', by key.
    refusal, remedy: why it cannot take part, and what to do about it; empty if it can.
    gpu: a text that no other GPU has; "" on a CPU.
    """

    host: str
    recipe: Mapping[str, str]
    chosen: Mapping[str, str] = field(default_factory=dict)
    refusal: str = ""
    remedy: str = ""
    machine: str = ""
    gpu: str = ""


def rendezvous(
    store: Store,
    introduction: Introduction,
    *,
    rank: int,
    world: int,
    check: Callable[[Sequence[Introduction]], None],
    timeout_s: float = JOIN_TIMEOUT_S,
    store_timeout_s: float = STORE_TIMEOUT_S,
) -> None:
    """Introduce this rank to the others and return once rank 0 has accepted all of them.

    check: is called on rank 0 with all introductions, by rank; raises TrainingFailed to refuse them.
    timeout_s: how long a rank may take to come. store_timeout_s: how long the store may take to answer.
    Raises TrainingFailed on rank 0 if a rank refuses, differs, does not come, or `check` raises; the other
    ranks then raise ReportedElsewhere. Raises RankLost if rank 0 or the store does not answer.
    Collective over the peer.
    """
    text = json.dumps(asdict(introduction))
    ask_store(lambda: store.set(f"introduction/{rank}", text), by=_STORE, within_s=store_timeout_s)
    if rank == 0:
        _give_verdict(store, world=world, check=check, timeout_s=timeout_s, store_timeout_s=store_timeout_s)
        return
    # Twice as long as rank 0 waits, which gives up first and names the ranks that are missing.
    if _missing(store, ["verdict"], timeout_s=2 * timeout_s, store_timeout_s=store_timeout_s):
        raise RankLost(
            f"Rank 0, which looks at all recipes and layouts first, said nothing for {2 * timeout_s:.0f} s.",
            remedy="Look at its log and its node, and start all ranks again.",
        )
    verdict = ask_store(lambda: store.get("verdict"), by=_STORE, within_s=store_timeout_s)
    if verdict != b"welcome":
        raise ReportedElsewhere


def open_rendezvous_store() -> Store:
    """Connect to the store of torch.distributed by which ranks find each other, and return it: a file, the
    launcher's TCPStore, or the one at MASTER_ADDR and MASTER_PORT.
    """
    world, timeout = int(os.environ["WORLD_SIZE"]), timedelta(seconds=JOIN_TIMEOUT_S)
    path = os.environ.get(RENDEZVOUS_FILE)
    if path:
        return FileStore(path, world)
    address = os.environ.get(RENDEZVOUS_STORE)
    if address:
        host, _, port = address.rpartition(":")
        served = TCPStore(host, int(port), is_master=False, timeout=timeout)
        return PrefixStore("ranks", served)
    return open_environment_store()


def open_environment_store() -> Store:
    """Open the store at MASTER_ADDR and MASTER_PORT, which rank 0 serves, or torchrun's agent.

    Raises TrainingFailed on rank 0 where another program holds the port.
    """
    try:
        store, _, _ = next(iter(torch_rendezvous("env://", timeout=timedelta(seconds=JOIN_TIMEOUT_S))))
    except dist.DistNetworkError as error:
        if "address already in use" not in str(error).lower():
            raise
        port = os.environ["MASTER_PORT"]
        raise TrainingFailed(
            f"Port {port} of {host_name()}, where the ranks meet, is in use by another program.",
            remedy=f"Choose a free port, on all ranks: MASTER_PORT={int(port) + 1}.",
        ) from error
    return store


def refuse_unequal(ranks: Sequence[Introduction]) -> None:
    """Raise TrainingFailed that names the first rank that refused, or that differs from rank 0.

    ranks: the introductions, by rank. Recipes must be equal, and what 'auto' is resolved to.
    """
    for number, rank in enumerate(ranks):
        if rank.refusal:
            raise TrainingFailed(f"rank {number} on {rank.host}: {rank.refusal}", remedy=rank.remedy)
    for number, rank in enumerate(ranks):
        if rank.recipe != ranks[0].recipe:
            raise TrainingFailed(
                f"Rank {number} on {rank.host} has another recipe than rank 0 on {ranks[0].host}: "
                f"{setting_difference(rank.recipe, ranks[0].recipe)}.",
                remedy="Give every node the same recipe file and the same overrides.",
            )
    for number, rank in enumerate(ranks):
        if rank.chosen != ranks[0].chosen:
            raise TrainingFailed(
                f"Rank {number} on {rank.host} resolves 'auto' differently from rank 0 on {ranks[0].host}: "
                f"{setting_difference(rank.chosen, ranks[0].chosen)}.",
                remedy="Write what all machines can do in place of 'auto'.",
            )


def refuse_shared_gpus(ranks: Sequence[Introduction]) -> None:
    """Raise TrainingFailed that names the first two ranks with one GPU. ranks: the introductions, by rank.

    A launcher that binds tasks to the closest GPU may give one to two of them, and each sees it alone.
    """
    users: dict[str, int] = {}
    for number, rank in enumerate(ranks):
        first = users.setdefault(rank.gpu, number)
        if rank.gpu and first != number:
            raise TrainingFailed(
                f"Ranks {first} and {number} on {rank.host} were given the same GPU ({rank.gpu}).",
                remedy="Give each rank one of its own: `srun --gpus-per-task=1`; or `--gpu-bind=none`, by "
                "which each takes that of its number here; or set CUDA_VISIBLE_DEVICES for each rank.",
            )


def setting_difference(
    theirs: Mapping[str, str], ours: Mapping[str, str], *, there: str = "there", here: str = "here"
) -> str:
    """Describe the first setting in which two recipes differ, with both values.

    there, here: the words for the place of each recipe.
    """
    key = next(key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key))
    return f"{key} is {theirs.get(key, 'missing')} {there} and {ours.get(key, 'missing')} {here}"


def ask_store(call: Callable[[], _Answer], *, by: str, within_s: float = STORE_TIMEOUT_S) -> _Answer:
    """Return what `call`, a question to a store, returns; raise what it raises.

    by: the name of whoever serves the store, for the message.
    within_s: seconds without an answer after which RankLost is raised, as it is if the server is gone.
    """
    ended = threading.Event()
    values: list[_Answer] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            values.append(call())
        except BaseException as error:  # noqa: BLE001 - the edge of a thread: raised again below
            errors.append(error)
        ended.set()

    # A store's own time-outs do not cover a server that keeps the connection open and never answers, so the
    # call runs in a thread, which is left behind when it takes too long.
    threading.Thread(target=ask, daemon=True, name=f"asking {by}").start()
    who = f"{by[:1].upper()}{by[1:]}"
    if not ended.wait(within_s):
        raise RankLost(f"{who} has not answered for {within_s:.0f} s.", remedy=_STORE_REMEDY)
    for error in errors:
        if isinstance(error, RuntimeError) and is_lost_rank_error(error):
            raise RankLost(f"{who} is gone.", remedy=_STORE_REMEDY) from error
        raise error
    return values[0]


@contextmanager
def raising_rank_lost() -> Iterator[None]:
    """Raise RankLost in place of whatever a backend raises in a collective when another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank_error(error):
            raise
        raise RankLost(
            "Another rank of this run is gone.",
            remedy="Its message, if any, says why. The same command goes on from the newest checkpoint.",
        ) from error


def is_lost_rank_error(error: RuntimeError) -> bool:
    """Whether a collective or the store failed because another rank, or the store's server, is gone."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    message = str(error).lower()
    return any(phrase in message for phrase in (*SOCKET_ERRORS, *TIMEOUT_ERRORS, *NCCL_ERRORS))


def _give_verdict(
    store: Store,
    *,
    world: int,
    check: Callable[[Sequence[Introduction]], None],
    timeout_s: float,
    store_timeout_s: float,
) -> None:
    def write(verdict: str) -> None:
        ask_store(lambda: store.set("verdict", verdict), by=_STORE, within_s=store_timeout_s)

    try:
        ranks = _introductions(store, world, timeout_s=timeout_s, store_timeout_s=store_timeout_s)
        refuse_unequal(ranks)
        refuse_shared_gpus(ranks)
        check(ranks)
    except RankLost:
        raise  # the store is gone, so no rank would read a verdict
    except TrainingFailed:
        write("refused")
        raise
    write("welcome")


def _introductions(
    store: Store, world: int, *, timeout_s: float, store_timeout_s: float
) -> list[Introduction]:
    """The introductions of all ranks, by rank, once all have written theirs."""
    keys = [f"introduction/{rank}" for rank in range(world)]
    missing = _missing(store, keys, timeout_s=timeout_s, store_timeout_s=store_timeout_s)
    if missing:
        ranks = [str(rank) for rank, key in enumerate(keys) if key in missing]
        names = ", ".join(ranks[:8]) + (", …" if len(ranks) > 8 else "")
        raise TrainingFailed(
            f"Of {world} ranks, {len(ranks)} did not join within {timeout_s:.0f} s: {names}.",
            remedy="Look at their logs and nodes; start all of them, with the same --nnodes and recipe.",
        )
    texts = ask_store(lambda: [store.get(key) for key in keys], by=_STORE, within_s=store_timeout_s)
    return [Introduction(**json.loads(text)) for text in texts]


def _missing(store: Store, keys: Sequence[str], *, timeout_s: float, store_timeout_s: float) -> list[str]:
    """Wait for keys to be written; return those still missing at the deadline."""
    deadline, missing, pause_s = time.monotonic() + timeout_s, list(keys), _POLL_S

    def still_missing() -> list[str]:
        return [key for key in missing if not store.check([key])]

    while missing := ask_store(still_missing, by=_STORE, within_s=store_timeout_s):
        if time.monotonic() > deadline:
            return missing
        time.sleep(pause_s)
        pause_s = min(_SLOWEST_POLL_S, pause_s * 1.1)
    return []
