"""Which collective of torch a reduce_scatter becomes, by the backend of its process group."""

import pytest
import torch

from bloomery.parallel import axis
from bloomery.parallel.axis import Axis


@pytest.mark.parametrize(("backend", "called"), [("gloo", "all_reduce"), ("nccl", "reduce_scatter")])
def test_gloo_sums_whole_tensors_and_other_backends_the_shard_alone(
    backend: str, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(axis.dist, "get_backend", lambda group: backend)
    monkeypatch.setattr(axis.dist, "all_reduce", lambda flat, group: calls.append("all_reduce"))
    monkeypatch.setattr(axis, "_reduce_scatter", lambda own, flat, group: calls.append("reduce_scatter"))
    own = Axis(index=1, ranks=(0, 1)).reduce_scatter(torch.arange(6.0))
    assert calls == [called] and own.tolist() == [3.0, 4.0, 5.0]
