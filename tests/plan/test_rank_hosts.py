from __future__ import annotations

import pytest

from bloomery.errors import BloomeryError, TrainingFailed
from bloomery.plan.ranks import (
    Degrees,
    HostRanks,
    groups_across_hosts,
    hosts_of_ranks,
    indices_on_node,
    ranks_by_host,
    reach_words,
    read_hosts,
    refuse_tensor_groups_across_hosts,
)

BLOOM = Degrees(pipeline=12, data=8, tensor=4)


def test_a_range_of_hosts_keeps_its_width() -> None:
    assert read_hosts("a, gpu[08-11].site,node[9-10]") == [
        "a",
        "gpu08.site",
        "gpu09.site",
        "gpu10.site",
        "gpu11.site",
        "node9",
        "node10",
    ]


def test_the_width_of_a_range_is_that_of_its_first_number() -> None:
    assert read_hosts("n[0-12]")[::12] == ["n0", "n12"]
    assert read_hosts("n[08-100]")[:3] == ["n08", "n09", "n10"] and read_hosts("n[08-100]")[-1] == "n100"


@pytest.mark.parametrize(("text", "says"), [("a,b!", "'b!'"), ("a,,b", "''"), ("a,b,a", "a is given twice")])
def test_what_is_no_list_of_hosts_is_refused(text: str, says: str) -> None:
    with pytest.raises(BloomeryError, match=says):
        read_hosts(text)


def test_every_rank_has_its_seat_and_nodes_that_do_not_divide_are_refused_with_those_that_do() -> None:
    hosts = hosts_of_ranks(["a", "b", "c"], world=12)
    assert [(one.host, list(one.ranks)) for one in ranks_by_host(hosts)] == [
        ("a", [0, 1, 2, 3]),
        ("b", [4, 5, 6, 7]),
        ("c", [8, 9, 10, 11]),
    ]
    with pytest.raises(BloomeryError, match="12 ranks do not divide among 5 nodes") as refused:
        hosts_of_ranks(list("abcde"), world=12)
    assert "1, 2, 3, 4, 6, 12" in refused.value.remedy


def test_blooms_tensor_lines_stay_inside_nodes_of_8_and_its_stages_lie_four_nodes_apart() -> None:
    hosts = hosts_of_ranks([f"node-{number}" for number in range(48)], world=384)
    assert groups_across_hosts(BLOOM, "tensor", hosts) == []
    assert len(groups_across_hosts(BLOOM, "pipeline", hosts)) == 32
    first, fifth = (ranks_by_host(hosts)[number] for number in (0, 4))
    assert [indices_on_node(BLOOM, axis, first) for axis in ("pipeline", "data", "tensor")] == [
        "0",
        "0, 1",
        "0–3",
    ]
    assert indices_on_node(BLOOM, "pipeline", fifth) == "1"
    assert reach_words(BLOOM, "tensor", hosts) == "96 groups of 4, inside a node"
    assert reach_words(BLOOM, "pipeline", hosts) == "32 groups of 12, 32 of them across nodes"


def test_a_tensor_line_that_crosses_nodes_is_refused_with_a_layout_that_fits() -> None:
    degrees, hosts = Degrees(pipeline=2, data=2, tensor=8), hosts_of_ranks(list("abcd"), world=32)
    refuse_tensor_groups_across_hosts(degrees, hosts)
    hosts = hosts_of_ranks([f"n{number}" for number in range(8)], world=32)
    with pytest.raises(TrainingFailed, match="ranks 0–7 are on n0 and n1") as refused:
        refuse_tensor_groups_across_hosts(degrees, hosts)
    assert "parallel.tensor=4 parallel.pipeline=2 parallel.data=4" in refused.value.remedy
    refuse_tensor_groups_across_hosts(Degrees(pipeline=2, data=4, tensor=4), hosts)


@pytest.mark.parametrize(
    ("degrees", "layout"),
    [
        (Degrees(pipeline=3, tensor=4), "parallel.tensor=2 parallel.pipeline=3 parallel.data=2"),
        (Degrees(data=3, tensor=4), "parallel.tensor=3 parallel.pipeline=1 parallel.data=4"),
    ],
)
def test_the_layout_that_fits_keeps_the_pipeline_and_is_no_wider_than_what_was_asked(
    degrees: Degrees, layout: str
) -> None:
    hosts = hosts_of_ranks(["a", "b"], world=12)
    with pytest.raises(TrainingFailed, match="ranks 4–7 are on a and b") as refused:
        refuse_tensor_groups_across_hosts(degrees, hosts)
    assert refused.value.remedy == f"A layout that fits 12 ranks: {layout}."


def test_a_group_that_leaves_a_node_and_comes_back_lies_across_nodes() -> None:
    assert groups_across_hosts(Degrees(data=3), "data", ["a", "b", "a"]) == [(0, 1, 2)]
    assert reach_words(Degrees(data=3), "data", ["a", "b", "a"]) == "1 group of 3, 1 of them across nodes"


def test_indices_that_lie_apart_are_listed_and_a_tensor_degree_of_the_nodes_size_is_kept() -> None:
    degrees = Degrees(pipeline=1, data=16, tensor=1)
    apart = HostRanks(host="a", ranks=range(2, 6))
    assert indices_on_node(degrees, "data", apart) == "2–5"
    strided = Degrees(pipeline=3, data=1, tensor=2)
    assert indices_on_node(strided, "pipeline", HostRanks(host="a", ranks=range(6))) == "0–2"
    assert indices_on_node(strided, "pipeline", HostRanks(host="a", ranks=range(2, 6))) == "1, 2"
    assert read_hosts("n[9-11]") == ["n9", "n10", "n11"] and read_hosts("n[10-11]") == ["n10", "n11"]
    hosts = ["a"] * 3 + ["b"] * 5
    with pytest.raises(TrainingFailed, match="must stay inside a node, and nodes have 3 or 5 of the ranks"):
        refuse_tensor_groups_across_hosts(Degrees(pipeline=1, data=2, tensor=4), hosts)
    crossed = ["a"] * 2 + ["b"] * 4 + ["c"] * 2
    with pytest.raises(TrainingFailed, match="ranks 0–3 are on a and b") as refused:
        refuse_tensor_groups_across_hosts(Degrees(pipeline=1, data=2, tensor=4), crossed)
    assert "parallel.tensor=2 parallel.pipeline=1 parallel.data=4" in refused.value.remedy


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("a,,b", "Separate names by commas, node-1,node-2; a range is node[01-12]."),
        ("a b", "Separate names by commas, node-1,node-2; a range is node[01-12]."),
        ("a[9-2]", "Write the first and the last number, at most 100,000 hosts: node[01-12]."),
    ],
)
def test_a_list_of_hosts_that_is_none_says_how_to_write_one(text: str, remedy: str) -> None:
    with pytest.raises(BloomeryError) as refused:
        read_hosts(text)
    assert refused.value.remedy == remedy
