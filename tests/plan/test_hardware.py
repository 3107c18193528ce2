from dataclasses import asdict

import pytest

from bloomery.config.elastic import ElasticSection
from bloomery.config.load import load_recipe
from bloomery.errors import ConfigError
from bloomery.plan.hardware import (
    TABLES,
    SiteLink,
    dump_hardware,
    load_hardware,
    load_link,
    parse_hardware,
    settings_of,
    shipped_hardware,
    shipped_links,
)
from bloomery.plan.peer_round import plan_round

SOURCES = {"v100-32g", "a100-80g", "dgx-a100-80g", "h100-80g", "dgx-h100", "h200"}


def test_the_machines_of_the_sources_are_shipped():
    assert set(shipped_hardware()) == SOURCES
    assert set(shipped_links()) == {"internet-0.5g", "internet-1g", "internet-2g", "internet-4g"}
    assert load_hardware("v100-32g").node.accelerators == 4
    assert load_hardware("a100-80g").network.gbit_per_s == 400
    assert load_hardware("h100-80g").network.gbit_per_s == 800


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_every_figure_of_a_shipped_machine_has_a_source(name):
    import tomllib

    raw = tomllib.loads(shipped_hardware()[name].read_text(encoding="utf-8"))
    given = {f"{table}.{key}" for table in TABLES for key in raw.get(table, {})}
    assert given == set(raw["sources"])
    assert all(raw["sources"].values())


@pytest.mark.parametrize("name", ["internet-0.5g", "internet-1g", "internet-2g", "internet-4g"])
def test_a_link_has_its_speed_in_its_name(name):
    assert f"internet-{load_link(name).gbit_per_s:g}g" == name


def test_a_dumped_file_loads_back_equal(tmp_path):
    hardware = load_hardware("a100-80g")
    path = tmp_path / "mine.toml"
    path.write_text(dump_hardware(hardware), encoding="utf-8")
    assert asdict(load_hardware(str(path))) == asdict(hardware)


def test_a_file_with_mistakes_is_refused_with_all_of_them():
    raw = {
        "accelerator": {"memory_gib": -1.0, "memory_gb_per_s": "fast"},
        "node": {"accelerators": 0, "wheels": 4},
        "engine": {},
    }
    with pytest.raises(ConfigError) as refused:
        parse_hardware(raw, label="mine.toml")
    keys = {one.key for one in refused.value.mistakes}
    assert keys == {
        "accelerator.memory_gib",
        "accelerator.memory_gb_per_s",
        "node.accelerators",
        "node.wheels",
        "engine",
    }
    assert "in the hardware file mine.toml" in str(refused.value)


def test_what_has_to_be_a_table_and_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError) as refused:
        parse_hardware(
            {"accelerator": 5, "node": {"accelerators": 8}, "sources": "papers"}, label="mine.toml"
        )
    told = [(one.key, one.value, one.problem, one.remedy) for one in refused.value.mistakes]
    assert told == [
        ("accelerator", 5, "must be a table", "Write [accelerator] on its own line."),
        ("sources", "papers", "must be a table", "Write [sources] on its own line."),
    ]
    (tmp_path / "link.toml").write_text("link = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"link = 3  \(link.toml\): must be a table"):
        load_link(str(tmp_path / "link.toml"))


@pytest.mark.parametrize(
    ("text", "stranger"), [("gbit_per_s = 10.0", "gbit_per_s"), ("[network]", "network")]
)
def test_a_links_file_with_figures_of_no_table_of_a_link_is_refused(tmp_path, text, stranger):
    path = tmp_path / "mine.toml"
    path.write_text(f"{text}\n[link]\nlatency_ms = 5.0\n")
    with pytest.raises(ConfigError, match=r"in the link file mine\.toml") as refused:
        load_link(str(path))
    assert [(wrong.key, wrong.problem) for wrong in refused.value.mistakes] == [
        (stranger, "there is no such table")
    ]


def test_an_unknown_machine_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"Did you mean 'a100-80g'\?"):
        load_hardware("a100-80gb")
    with pytest.raises(ConfigError, match="internet-4g"):
        load_link("internet-9g")


def test_units_stand_in_every_name():
    units = ("_gib", "_s", "_teraflops", "_efficiency", "_us", "_ns", "_w", "gbit_per_s", "_hour")
    bare = {
        "kind", "efficiency", "overlap", "accelerators", "currency", "power_usage_effectiveness",
        "step_jitter",
        "matmul_half_size", "failures_per_1000_accelerator_days",
    }  # fmt: skip
    for table in TABLES.values():
        for key in settings_of(table):
            assert key.endswith(units) or key in bare, key


def test_what_a_sparse_round_sends_grows_with_the_peers_and_is_told_beside_int8():
    link = load_link("internet-1g")
    rounds = {
        peers: plan_round(
            ElasticSection(inner_steps=50, codec="sparse", peers=peers, outer_momentum=0.0),
            link,
            parameters=1 << 30,
            step_s=1.0,
            state_bytes=12.0 * (1 << 30),
        )
        for peers in (1, 2, 4, 256)
    }
    code = (1 << 30) * 84 / 4096
    assert {peers: told.sent_bytes for peers, told in rounds.items()} == {
        1: 0.0, 2: code, 4: 3 * code, 256: 255 * code
    }  # fmt: skip
    assert rounds[4].part_of_int8 < 1 / 20 and rounds[256].part_of_int8 > 1
    assert rounds[4].host_bytes == 12 * (1 << 30)


@pytest.mark.parametrize("peers", [1, 2, 5])
def test_a_round_sends_its_part_of_the_parameters_and_waits_for_every_hop(peers):
    overrides = [f"elastic.peers={peers}", "elastic.inner_steps=10", "elastic.codec=fp32"]
    elastic = load_recipe("demo", overrides).recipe.elastic
    link = SiteLink(gbit_per_s=2.0, efficiency=0.5, latency_ms=30.0, outer_step_s=1.5)
    round_ = plan_round(elastic, link, parameters=10_000_000, step_s=0.25, state_bytes=1e8)
    sent_bytes = 2 * (peers - 1) / peers * 4 * 10_000_000
    exchange_s = sent_bytes / (0.5 * 2e9 / 8) + 2 * (peers - 1) * 0.030 + 1.5
    assert round_.sent_bytes == pytest.approx(sent_bytes) and round_.inner_s == 2.5
    assert round_.exchange_s == pytest.approx(exchange_s)
    assert round_.utilisation == pytest.approx(2.5 / (2.5 + exchange_s))


def test_files_of_machines_and_links_may_lie_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text(dump_hardware(load_hardware("h200")), encoding="utf-8")
    (tmp_path / "line.toml").write_text("[link]\ngbit_per_s = 7.0\n", encoding="utf-8")
    assert asdict(load_hardware("~/mine.toml")) == asdict(load_hardware("h200"))
    assert load_link("~/line.toml").gbit_per_s == 7.0
