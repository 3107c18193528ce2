"""Processes forked from one that has loaded what they need, once for each process of the suite.

The first who asks starts it, so all ask for the same. It finds what is installed, not what lies in tests/,
and passes over without a word what it does not find.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

PRELOADED = (
    "bloomery.train.checkpoint_store",
    "bloomery.parallel.build",
    "bloomery.parallel.optimizers",
    "bloomery.train.loop",
    "bloomery.train.step",
    # torch loads these in the first backward of a pipeline's stage: a second of processor time for each rank.
    "torch.distributed.pipelining._backward",
    "torch.fx.experimental.symbolic_shapes",
)


def forked() -> ForkServerContext:
    """The context whose processes are forked so."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context
