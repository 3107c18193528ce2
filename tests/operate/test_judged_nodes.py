"""How the nodes of a job are judged by their facts."""

from __future__ import annotations

import pytest
from tests.operate.test_preflight import nodes

from bloomery.operate.node_checks import bad_hosts, judge_nodes


@pytest.mark.parametrize(
    ("more", "hosts", "is_bad"),
    [
        ({"b": {"all_reduce_gb_per_s": 8.4}}, ["b"], True),
        ({"b": {"all_reduce_gb_per_s": 8.6}}, [], False),
        ({"b": {"clock_s": 5.1}}, ["b"], False),
        ({"b": {"clock_s": 4.9}}, [], False),
        ({"b": {"inodes": 9_999}}, ["b"], False),
        ({"b": {"inodes": 0}}, ["b"], False),
        ({"b": {"teraflops": 0.0}}, ["b"], True),
        ({"b": {"inodes": 10_000}}, [], False),
        ({"b": {"shm_share": 0.05}}, [], False),
        ({"b": {"teraflops": 169.0}}, ["b"], True),
        ({"b": {"teraflops": 171.0}}, [], False),
        ({"a": {"teraflops": None}, "b": {"teraflops": None}, "c": {"teraflops": 9.0}}, [], False),
        ({"a": {"teraflops": 900.0}}, [], False),
        ({"a": {"versions": {"torch": "3"}}, "b": {"versions": {"torch": "3"}}}, ["c", "d"], False),
    ],
)
def test_a_node_is_judged_at_the_limits(more: dict[str, dict], hosts: list[str], is_bad: bool) -> None:
    usual = {"all_reduce_gb_per_s": 10.0}
    facts = nodes(**{host: usual | more.get(host, {}) for host in "abcd"})
    found = judge_nodes(facts)
    assert [finding.host for finding in found] == hosts
    assert bad_hosts(found) == (hosts if is_bad else [])


def test_an_interface_is_named_by_its_first_letters_or_as_a_whole_and_may_be_unknown() -> None:
    facts = nodes(
        a={"interfaces": ("eth0",)},
        b={"interfaces": None},
        c={"interfaces": ("ib0",)},
        d={"interfaces": ("eth1",)},
    )
    (finding,) = judge_nodes(facts, environment={"NCCL_SOCKET_IFNAME": "=eth"})
    assert (finding.host, finding.is_bad) == ("c", True) and "an interface eth, which" in finding.what


@pytest.mark.parametrize(
    "variable", ["NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME"]
)
def test_the_interfaces_of_each_variable_that_names_some_are_looked_for(variable: str) -> None:
    for others in (("lo",), ()):
        facts = nodes(**{host: {"interfaces": ("eth0",)} for host in "abc"}, d={"interfaces": others})
        found = judge_nodes(facts, environment={variable: "eth0,eth", "NCCL_DEBUG": "INFO"})
        told = [f"an interface {name}, which {variable} names, is not there" for name in ("eth", "eth0")]
        assert sorted((finding.host, finding.what) for finding in found) == [("d", line) for line in told]
    assert judge_nodes(facts, environment={variable: "", "NCCL_NET": "Socket"}) == []


def test_a_slow_node_is_told_with_the_unit_of_what_was_measured() -> None:
    facts = nodes(
        **{host: {"all_reduce_gb_per_s": 10.0} for host in "acd"},
        b={"all_reduce_gb_per_s": 4.0, "teraflops": 100.0, "versions": {}},
    )
    told = [finding.what for finding in judge_nodes(facts)]
    assert told[-2:] == [
        "matmuls reach 100 TFLOP/s, and 200 on the median node",
        "all-reduce reach 4 GB/s, and 10 on the median node",
    ]
    assert all(line.partition(" is ")[2].startswith("missing, and ") for line in told[:-2]) and told[:-2]
