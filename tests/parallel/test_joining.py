"""How ranks find each other, which groups they make, and what torch is asked for in each collective."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bloomery.config.parallel import ParallelSection
from bloomery.errors import RankLost, TrainingFailed
from bloomery.events.machine import machine_id
from bloomery.events.run_lock import host_name
from bloomery.events.timeouts import COLLECTIVE_TIMEOUT_S, JOIN_TIMEOUT_S, STORE_TIMEOUT_S
from bloomery.parallel import axis as axis_module
from bloomery.parallel import mesh as mesh_module
from bloomery.parallel import rendezvous as rendezvous_module
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh, join_mesh, mesh_of
from bloomery.parallel.rendezvous import (
    Introduction,
    ask_store,
    open_environment_store,
    open_rendezvous_store,
)
from bloomery.plan.ranks import Degrees

CPU = torch.device("cpu")
Calls = list[tuple[Any, ...]]


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What a rank of a launcher does to join; nobody else is there."""
    calls: Calls = []

    def rendezvous(store: Any, own: Introduction, *, rank: int, world: int, check: Any) -> None:
        calls.append(("met", store, own, rank, world, check))

    def ask(call: Any, *, by: str, within_s: float) -> Any:
        calls.append(("asked", by, within_s))
        return call()

    monkeypatch.setattr(mesh_module, "open_rendezvous_store", lambda: "the store")
    monkeypatch.setattr(mesh_module, "ask_store", ask)
    monkeypatch.setattr(mesh_module, "rendezvous", rendezvous)
    monkeypatch.setattr(mesh_module, "PrefixStore", lambda *told: told)
    monkeypatch.setattr(mesh_module, "_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(dist, "init_process_group", lambda **told: calls.append(("group", told)))
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, timeout: calls.append(("new", tuple(ranks), timeout)) or "g"
    )
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    return calls


def test_a_rank_introduces_itself_and_joins_the_group_of_its_backend(joined: Calls) -> None:
    def choices(device: torch.device) -> Mapping[str, str]:
        return {"train.precision": f"what {device} can"}

    mesh = join_mesh(ParallelSection(tensor=2), recipe={"a": "1"}, choices=choices)
    asked, met, group, *made = joined
    assert asked == ("asked", "the store where the ranks meet", JOIN_TIMEOUT_S + STORE_TIMEOUT_S)
    own = Introduction(
        host=host_name(), machine=machine_id(), recipe={"a": "1"}, chosen={"train.precision": "what cpu can"}
    )
    assert met[:5] == ("met", "the store", own, 3, 4)
    assert group[1] == {
        "backend": "gloo",
        "store": ("group", "the store"),
        "rank": 3,
        "world_size": 4,
        "timeout": timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        "device_id": None,
    }
    assert {ranks for _, ranks, _ in made} == {(0, 1), (2, 3), (0, 2), (1, 3)}
    assert {timeout for _, _, timeout in made} == {timedelta(seconds=COLLECTIVE_TIMEOUT_S)}
    assert (mesh.rank, mesh.world, mesh.store, mesh.device) == (3, 4, "the store", CPU)
    assert (mesh.tensor.ranks, mesh.tensor.index, mesh.data.ranks, mesh.data.index) == ((2, 3), 1, (1, 3), 1)
    hosts = [Introduction(host=host, recipe={}) for host in ("a", "b", "b", "b")]
    with pytest.raises(TrainingFailed):
        met[5](hosts)
    clones = [Introduction(host="a", machine=machine, recipe={}) for machine in ("1", "2", "2", "2")]
    with pytest.raises(TrainingFailed, match=r"ranks 0–1 are on a \(1\) and a \(2\)"):
        met[5](clones)
    met[5]([Introduction(host="a", machine=machine, recipe={}) for machine in ("1", "1", "2", "2")])


def test_a_rank_on_a_gpu_joins_over_nccl(joined: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(mesh_module, "_device", lambda: gpu)
    properties = {gpu: SimpleNamespace(uuid="4d1f")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(mesh_module, "mesh_of", lambda degrees, **told: Mesh(device=told["device"]))
    assert join_mesh(ParallelSection()).device == gpu
    assert joined[1][2].gpu == "4d1f"
    (told,) = [call[1] for call in joined if call[0] == "group"]
    assert (told["backend"], told["device_id"]) == ("nccl", gpu)


def test_the_mesh_is_made_for_the_stages_of_the_schedule(
    joined: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(mesh_module, "mesh_of", lambda *told, **more: given.append(more) or Mesh(device=CPU))
    join_mesh(ParallelSection(pipeline=2, chunks=2, schedule="zbv"), ties_embedding=False)
    layout = {"chunks": 2, "schedule": "zbv", "ties_embedding": False}
    assert given == [{"rank": 3, "device": CPU} | layout]


@pytest.mark.parametrize(
    ("parallel", "told"),
    [
        (ParallelSection(tensor=3), ""),
        (
            ParallelSection(data=4, zero=1, shard_degree=3),
            "parallel.shard_degree = 3 does not divide the data",
        ),
    ],
)
def test_a_rank_that_cannot_take_part_says_so_where_the_ranks_meet(
    parallel: ParallelSection, told: str, joined: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: Any, own: Introduction, **more: Any) -> None:
        joined.append(("met", own))
        raise TrainingFailed("the first rank says why")

    monkeypatch.setattr(mesh_module, "rendezvous", refuse)
    with pytest.raises(TrainingFailed, match="the first rank says why"):
        join_mesh(parallel)
    own = joined[-1][1]
    assert own.refusal.startswith(told) and own.refusal and own.remedy and own.chosen == {}
    if told:
        assert own.remedy == "Choose a divisor of them, the ranks of one node for instance, or 'auto'."


def test_replicas_and_shards_of_a_rank_are_its_data_axis_or_parts_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: tuple(ranks))

    def ranks(shard: int) -> tuple[Any, Any]:
        mesh = mesh_of(Degrees(pipeline=1, data=4, tensor=1, shard=shard), rank=2, device=CPU)
        return (mesh.shard.ranks, mesh.shard.index), (mesh.replica.ranks, mesh.replica.index)

    assert ranks(1) == (((2,), 0), ((0, 1, 2, 3), 2))
    assert ranks(2) == (((2, 3), 0), ((0, 2), 1))
    assert ranks(4) == (((0, 1, 2, 3), 2), ((2,), 0))


def test_the_store_of_the_launcher_is_a_file_or_an_address_or_else_the_environments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("FileStore", "TCPStore", "PrefixStore"):
        monkeypatch.setattr(
            rendezvous_module, name, lambda *told, name=name, **more: (name, *told, *([more] if more else []))
        )
    monkeypatch.setattr(rendezvous_module, "open_environment_store", lambda: "environment")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("BLOOMERY_RENDEZVOUS_FILE", raising=False)
    monkeypatch.delenv("BLOOMERY_RENDEZVOUS_STORE", raising=False)
    assert open_rendezvous_store() == "environment"
    monkeypatch.setenv("BLOOMERY_RENDEZVOUS_STORE", "fe80::1:29500")
    told = {"is_master": False, "timeout": timedelta(seconds=JOIN_TIMEOUT_S)}
    assert open_rendezvous_store() == ("PrefixStore", "ranks", ("TCPStore", "fe80::1", 29500, told))
    monkeypatch.setenv("BLOOMERY_RENDEZVOUS_FILE", "there")
    assert open_rendezvous_store() == ("FileStore", "there", 4)


def test_a_port_that_is_taken_is_named_with_the_next_one_and_other_errors_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = [dist.DistNetworkError("EADDRINUSE: Address already in use"), dist.DistNetworkError("no route")]

    def meet(url: str, timeout: timedelta) -> Any:
        assert (url, timeout) == ("env://", timedelta(seconds=JOIN_TIMEOUT_S))
        if errors:
            raise errors.pop(0)
        return iter([("store", 0, 1)])

    monkeypatch.setattr(rendezvous_module, "torch_rendezvous", meet)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(TrainingFailed, match=f"Port 29500 of {host_name()}, where the ranks meet") as taken:
        open_environment_store()
    assert taken.value.remedy == "Choose a free port, on all ranks: MASTER_PORT=29501."
    with pytest.raises(dist.DistNetworkError, match="no route"):
        open_environment_store()
    assert open_environment_store() == "store"


def test_a_store_is_asked_in_a_thread_and_its_errors_are_raised_here() -> None:
    assert ask_store(lambda: 5, by="the store") == 5

    def fail(error: BaseException) -> Any:
        def call() -> None:
            raise error

        return call

    with pytest.raises(KeyError, match="x"):
        ask_store(fail(KeyError("x")), by="the store")
    with pytest.raises(ConnectionResetError, match="connection reset"):
        ask_store(fail(ConnectionResetError("connection reset")), by="the store")
    with pytest.raises(RuntimeError, match="ours"):
        ask_store(fail(RuntimeError("ours")), by="the store")
    with pytest.raises(RankLost, match=r"^The store is gone\."):
        ask_store(fail(RuntimeError("Connection reset by peer")), by="the store")
    with pytest.raises(RankLost, match=r"^The store of Node-1 is gone\."):
        ask_store(fail(RuntimeError("Connection reset by peer")), by="the store of Node-1")


class Keys:
    """A store with some keys, and a clock that moves while somebody waits for others."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
        self.keys, self.now, self.pauses = dict(keys), 0.0, list[float]()
        monkeypatch.setattr(
            rendezvous_module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        )

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def get(self, key: str) -> bytes:
        return self.keys[key]

    def set(self, key: str, value: str) -> None:
        self.keys[key] = value


def test_whoever_does_not_come_is_named_of_many_the_first_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Introduction(host="n0", recipe={})
    text = json.dumps({"host": "n1", "recipe": {}})
    store: Any = Keys(monkeypatch, **{"introduction/4": text})
    check: Any = None
    with pytest.raises(TrainingFailed) as refused:
        rendezvous_module.rendezvous(store, own, rank=0, world=12, check=check, timeout_s=10.0)
    assert refused.value.message == ("Of 12 ranks, 10 did not join within 10 s: 1, 2, 3, 5, 6, 7, 8, 9, ….")
    assert store.keys["verdict"] == "refused"
    assert store.pauses[0] == 0.02 and max(store.pauses) == 0.5 and store.pauses == sorted(store.pauses)
    assert 10.0 < store.now <= 10.5


def test_the_others_wait_twice_as_long_for_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Keys(monkeypatch)
    own = Introduction(host="n1", recipe={"a": "1"}, chosen={"b": "2"})
    check: Any = None
    with pytest.raises(RankLost, match="said nothing for 20 s"):
        rendezvous_module.rendezvous(store, own, rank=1, world=2, check=check, timeout_s=10.0)
    assert 20.0 < store.now <= 20.5
    assert json.loads(store.keys["introduction/1"]) == {
        "host": "n1",
        "gpu": "",
        "machine": "",
        "recipe": {"a": "1"},
        "chosen": {"b": "2"},
        "refusal": "",
        "remedy": "",
    }


def test_a_store_that_is_lost_gets_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Keys(monkeypatch)

    def lost(ranks: Any) -> None:
        raise RankLost("the store is gone", remedy="")

    with pytest.raises(RankLost):
        own = Introduction(host="n0", recipe={})
        rendezvous_module.rendezvous(store, own, rank=0, world=1, check=lost)
    assert "verdict" not in store.keys


def test_collectives_are_over_the_axis_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    member = Axis(index=1, ranks=(4, 6), group="group")  # type: ignore[arg-type]
    flat = torch.arange(6.0)

    def noted(name: str) -> Any:
        def call(*told: Any, **more: Any) -> str:
            tensors = [one.tolist() if isinstance(one, torch.Tensor) else one for one in told]
            calls.append((name, *tensors, more))
            return "work"

        return call

    for name in ("all_reduce", "reduce", "broadcast"):
        monkeypatch.setattr(axis_module.dist, name, noted(name))
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(axis_module, name, noted(name))
    monkeypatch.setattr(axis_module.dist, "get_backend", lambda group: {"group": "nccl"}[group])
    whole, own, asynchronous = [*range(6)], [3, 4, 5], {"group": "group", "async_op": True}
    member.all_reduce(flat)
    member.all_reduce(flat, maximum=True)
    member.reduce_scatter(flat)
    member.all_gather(flat)
    begun = [
        member.begin_all_reduce(flat),
        member.begin_all_gather(flat),
        member.begin_reduce_scatter(flat, range(6)),
        member.begin_reduce_scatter(flat, range(2, 4)),
        member.begin_all_gather(flat, range(6)),
        member.begin_all_gather(flat, range(1, 4)),
        member.begin_all_gather(flat, range(4, 6)),
    ]
    assert calls == [
        ("all_reduce", whole, dist.ReduceOp.SUM, {"group": "group"}),
        ("all_reduce", whole, dist.ReduceOp.MAX, {"group": "group"}),
        ("_reduce_scatter", own, whole, {"group": "group"}),
        ("_all_gather", whole, own, {"group": "group"}),
        ("all_reduce", whole, asynchronous),
        ("_all_gather", whole, own, asynchronous),
        ("_reduce_scatter", own, whole, asynchronous),
        ("reduce", [2], {"dst": 4, **asynchronous}),
        ("reduce", [3], {"dst": 6, **asynchronous}),
        ("_all_gather", whole, own, asynchronous),
        ("broadcast", [1, 2], {"src": 4, **asynchronous}),
        ("broadcast", [3], {"src": 6, **asynchronous}),
        ("broadcast", [4, 5], {"src": 6, **asynchronous}),
    ]
    assert [len(pending.works) for pending in begun] == [1, 1, 1, 2, 1, 2, 1]
    monkeypatch.setattr(axis_module.dist, "get_backend", lambda group: "gloo")
    calls.clear()
    member.begin_reduce_scatter(flat, range(2, 4))
    assert calls == [("all_reduce", [2, 3], asynchronous)]


def test_bytes_are_exchanged_with_each_rank_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    operations: list[Any] = []

    def run(given: list[Any]) -> list[Any]:
        operations.extend(given)
        for one in given:
            if one[0] is dist.irecv:
                one[1].fill_(one[2])
        return [SimpleNamespace(wait=lambda: operations.append("waited"))] * 2

    monkeypatch.setattr(dist, "P2POp", lambda *told: told)
    monkeypatch.setattr(dist, "batch_isend_irecv", run)
    arriving = {rank: torch.zeros(2, dtype=torch.uint8) for rank in (3, 1)}
    sent = {2: torch.ones(2, dtype=torch.uint8), 0: torch.ones(3, dtype=torch.uint8)}
    Mesh(device=CPU, world=4).exchange(sent, arriving)
    assert [(one[0], one[2]) for one in operations[:4]] == [
        (dist.isend, 0),
        (dist.isend, 2),
        (dist.irecv, 1),
        (dist.irecv, 3),
    ]
    assert operations[4:] == ["waited"] * 2 and operations[1][1] is sent[2]
    assert {rank: tensor.tolist() for rank, tensor in arriving.items()} == {3: [3, 3], 1: [1, 1]}
    operations.clear()
    Mesh(device=torch.device("meta"), world=4).exchange(sent, {})
    assert [one[1].device.type for one in operations[:2]] == ["meta", "meta"], "the device's backend sends"
    copied: list[torch.Tensor] = []
    on_device = torch.zeros(2, dtype=torch.uint8)
    here: Any = SimpleNamespace(to=lambda device: on_device, copy_=copied.append)
    Mesh(device=CPU, world=4).exchange({}, {3: here})
    assert copied == [on_device] and on_device.tolist() == [3, 3]


def test_words_of_other_lengths_are_gathered_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [{"a": "é" * 9}, [1, None, 2.5], "x"]
    texts = [json.dumps(word).encode() for word in words]

    def all_gather(into: list[torch.Tensor], own: torch.Tensor) -> None:
        for tensor, text in zip(into, texts, strict=True):
            if tensor.dtype == torch.int64:
                tensor.fill_(len(text))
            else:
                assert tensor.numel() == max(map(len, texts)) == own.numel()
                tensor[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    assert Mesh(device=CPU, rank=2, world=3).all_gather_object(words[2]) == words


def test_each_task_of_the_first_rank_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    monkeypatch.setattr(
        mesh_module, "run_as_rank_zero", lambda *told: calls.append(("runs", *told)) or "result"
    )
    monkeypatch.setattr(
        mesh_module, "wait_for_rank_zero", lambda *told, **more: calls.append(("waits", *told, more))
    )
    store: Any = "store"
    first, later = (Mesh(device=CPU, rank=rank, world=2, store=store) for rank in range(2))
    task: Any = "task"
    for number in range(2):
        assert first.run_on_rank_zero(task, doing="counting") == "result"
        assert later.run_on_rank_zero(task, doing="counting") is None
        key = f"rank_zero_task/{number}"
        assert calls[-2:] == [("runs", "store", key, "task"), ("waits", "store", key, {"doing": "counting"})]


def test_what_the_first_rank_has_is_copied_to_all_and_all_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: Calls = []
    for name in ("all_reduce", "broadcast", "barrier"):
        monkeypatch.setattr(dist, name, lambda *told, name=name, **more: calls.append((name, *told, more)))
    mesh, tensor = Mesh(device=CPU, rank=1, world=2), torch.ones(2)
    assert mesh.all_reduce(tensor) is tensor is mesh.broadcast(tensor)
    mesh.barrier()
    assert calls == [("all_reduce", tensor, {}), ("broadcast", tensor, {"src": 0}), ("barrier", {})]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_question_to_the_store_has_the_time_that_it_may_take(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"host": "n", "recipe": {}})
    store: Any = Keys(monkeypatch, **{"introduction/1": text, "verdict": b"welcome"})
    asked: list[Any] = []

    def ask(call: Any, *, by: str, within_s: float) -> Any:
        asked.append((by, within_s))
        return call()

    monkeypatch.setattr(rendezvous_module, "ask_store", ask)
    own, check = Introduction(host="n", recipe={}), lambda ranks: None
    rendezvous_module.rendezvous(store, own, rank=rank, world=2, check=check, store_timeout_s=7.0)
    assert asked == [("the store where the ranks meet", 7.0)] * (4 if rank == 0 else 3)
