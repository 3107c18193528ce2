"""What scenario files and overrides are read as, and the whole of each refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.errors import ConfigError
from bloomery.plan.simulate.scenario import (
    ClusterSection,
    FailureSection,
    Life,
    Scenario,
    ScenarioCheckpoints,
    ScenarioPeers,
    ScenarioRun,
    load_scenario,
    scenario_of,
    shipped_scenarios,
)

TEXT = """\
[run]
name = "mine"
days = 10

[cluster]
gpus = 16

[checkpoint]
every_minutes = 30

[[failures]]
name = "GPU"
count = 4
days = 2
gpus = 8

[[failures]]
name = "v1.2 link"
count = 1
days = 1
gpus = 8
takes_node = false
"""
MINE = Scenario(
    run=ScenarioRun(name="mine", days=10.0),
    cluster=ClusterSection(gpus=16),
    checkpoint=ScenarioCheckpoints(every_minutes=30.0),
    failures=(
        FailureSection(name="GPU", count=4.0, days=2.0, gpus=8),
        FailureSection(name="v1.2 link", count=1.0, days=1.0, gpus=8, takes_node=False),
    ),
)


def refusals(call: Any) -> list[tuple[str, object, str, str, str]]:
    with pytest.raises(ConfigError) as refused:
        call()
    return [(one.key, one.value, one.source, one.problem, one.remedy) for one in refused.value.mistakes]


def test_a_file_of_ones_own_is_read_by_its_path_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT, encoding="utf-8")
    assert load_scenario(str(path)) == MINE
    overrides = [
        "run.notes = two words = many",
        " checkpoint.load_s=7.5",
        "failures.v1.2 link.count=9",
        "cluster.gpus=24",
    ]
    assert load_scenario(str(path), overrides) == replace(
        MINE,
        run=replace(MINE.run, notes="two words = many"),
        cluster=replace(MINE.cluster, gpus=24),  # type: ignore[type-var]
        checkpoint=replace(MINE.checkpoint, load_s=7.5),  # type: ignore[type-var]
        failures=(MINE.failures[0], replace(MINE.failures[1], count=9.0)),
    )


def test_a_scenario_between_peers_has_neither_cluster_nor_failures() -> None:
    elastic = {"peers": 2, "step_s": 1.0, "parameters": 1e9, "bandwidth_mbit_s": 100.0}
    found = scenario_of({"run": {"name": "far"}, "elastic": elastic}, label="test")
    peers = ScenarioPeers(peers=2, step_s=1.0, parameters=1e9, bandwidth_mbit_s=100.0)
    assert found == Scenario(run=ScenarioRun(name="far"), elastic=peers)
    assert found.hours == 365 * 24


def test_rates_and_goodput_by_hand() -> None:
    assert MINE.hours == 240.0 and MINE.failures[0].per_gpu_hour == 4 / (2 * 24 * 8)
    assert Life(hours={"training": 3.0, "saving": 1.0}, events={}, spans=()).goodput == 0.75
    assert Life(hours={"saving": 1.0}, events={}, spans=()).goodput == 0.0


def test_every_mistake_of_a_file_is_told_with_its_place(tmp_path: Path) -> None:
    raw = {
        "cluster": {"gpus": 0},
        "checkpoint": 5,
        "failures": [3, {"name": "x", "count": 1.0, "days": 0.0, "gpus": 8}],
        "weather": {},
    }
    brackets = "Write it in brackets, on a line of its own."
    found = refusals(lambda: scenario_of(raw, label=tmp_path / "a" / "mine.toml"))
    assert {one[2] for one in found} == {"mine.toml"}
    assert [(key, value, problem) for key, value, _, problem, _ in found] == [
        ("weather", None, "there is no such section"),
        ("run.name", None, "is required and missing"),
        ("cluster.gpus", 0, "must be at least 1"),
        ("checkpoint", 5, "must be a table"),
        ("failures[0]", 3, "must be a table"),
        ("failures[1].days", 0.0, "must be above 0"),
    ]
    assert found[0][4] == "There are run, cluster, checkpoint, elastic, failures." and found[3][4] == brackets


@pytest.mark.parametrize(
    ("changed", "overrides", "key", "problem"),
    [
        ("cluster = 5", ["cluster.gpus=8"], "cluster", "must be a table"),
        ("failures = 5", [], "failures", "must be an array of tables"),
        ("failures = 5", ["failures.a.count=1"], "failures.a.count", "there is no such kind of failure"),
        ("[failures]\nname = 'a'", [], "failures", "must be an array of tables"),
        ("failures = ['a']", ["failures.a.count=1"], "failures.a.count", "there is no such kind of failure"),
    ],
)
def test_what_has_to_be_a_table_and_is_none_is_refused_with_overrides_too(
    changed: str, overrides: list[str], key: str, problem: str, tmp_path: Path
) -> None:
    cluster = "" if "cluster" in changed else "[cluster]\ngpus = 8\n"
    rest = f"[run]\nname = 'x'\n[checkpoint]\nevery_minutes = 5\n{cluster}"
    text = f"{rest}{changed}" if changed.startswith("[") else f"{changed}\n{rest}"
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    (found,) = refusals(lambda: load_scenario(str(tmp_path / "mine.toml"), overrides))
    assert (found[0], found[3]) == (key, problem)


CLUSTER = {"run": {"name": "any"}, "cluster": {"gpus": 16}, "checkpoint": {"every_minutes": 30.0}}


@pytest.mark.parametrize(
    ("changed", "refused"),
    [
        (
            {"elastic": {"peers": 2, "step_s": 1.0, "parameters": 1e9, "bandwidth_mbit_s": 1.0}},
            (
                "cluster", None, "label", "give either [cluster] or [elastic]",
                "Describe one cluster, or peers between sites; not both, and not neither.",
            ),
        ),
        (
            {"cluster": {"gpus": 20}},
            (
                "cluster.gpus", 20, "label", "is no whole number of nodes of 8",
                "Take 16 or 24, or set cluster.gpus_per_node.",
            ),
        ),
        (
            {"cluster": {"gpus": 3, "gpus_per_node": 4}},
            (
                "cluster.gpus", 3, "label", "is no whole number of nodes of 4",
                "Take 4 or 4, or set cluster.gpus_per_node.",
            ),
        ),
    ],
)  # fmt: skip
def test_sections_that_do_not_go_together_are_refused(changed: dict[str, Any], refused: tuple[Any]) -> None:
    assert refusals(lambda: scenario_of(CLUSTER | changed, label="label")) == [refused]


def test_a_scenario_needs_a_cluster_with_checkpoints_or_peers() -> None:
    neither = refusals(lambda: scenario_of({"run": {"name": "any"}}, label="x"))
    assert [one[:4] for one in neither] == [("cluster", None, "x", "give either [cluster] or [elastic]")]
    without = {key: value for key, value in CLUSTER.items() if key != "checkpoint"}
    assert refusals(lambda: scenario_of(without, label="x")) == [
        ("checkpoint", None, "x", "is missing", "Add [checkpoint] with every_minutes = 30.")
    ]
    assert scenario_of(CLUSTER | {"cluster": {"gpus": 12, "gpus_per_node": 4}}, label="x").cluster


@pytest.mark.parametrize(
    ("cluster", "problem"),
    [
        ({"gpus": 20, "gpus_per_node": 0}, "cluster.gpus_per_node must be at least 1"),
        ({"gpus": -3}, "cluster.gpus must be at least 1"),
        ({"gpus": "many"}, "cluster.gpus must be an integer ≥ 1, and is text"),
        ({"gpus": 20, "gpus_per_node": "few"}, "cluster.gpus_per_node must be an integer ≥ 1, and is text"),
    ],
)
def test_numbers_that_count_nothing_are_refused_once_by_themselves(
    cluster: dict[str, Any], problem: str
) -> None:
    found = refusals(lambda: scenario_of(CLUSTER | {"cluster": cluster}, label="x"))
    assert [f"{one[0]} {one[3]}" for one in found] == [problem]


def test_an_override_may_give_a_section_that_the_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace("[checkpoint]\nevery_minutes = 30\n", ""), encoding="utf-8")
    assert load_scenario(str(path), ["checkpoint.every_minutes=30"]) == MINE


@pytest.mark.parametrize("text", ["nonsense", "run=3", "run.=3", "run.name"])
def test_an_override_that_is_no_setting_is_refused_with_an_example(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT, encoding="utf-8")
    remedy = "Write section.key=value, for instance checkpoint.every_minutes=15."
    expected = (text, None, "mine.toml", "is not a setting", remedy)
    assert refusals(lambda: load_scenario(str(path), ["run.days=1", text])) == [expected]


def test_an_override_of_an_unknown_failure_is_told_with_the_kinds_there_are(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(TEXT, encoding="utf-8")
    assert refusals(lambda: load_scenario(str(path), ["failures.Moon.count=1"])) == [
        (
            "failures.Moon.count", 1, "mine.toml", "there is no such kind of failure",
            "The scenario has 'GPU', 'v1.2 link'.",
        )
    ]  # fmt: skip
    path.write_text(TEXT.partition("[[failures]]")[0], encoding="utf-8")
    (none,) = refusals(lambda: load_scenario(str(path), ["failures.Moon.count=1"]))
    assert none[4] == "The scenario has none."


def test_files_that_are_no_toml_or_no_scenario_are_refused(tmp_path: Path) -> None:
    for name, content in (("a.toml", b"[run"), ("b.toml", b"\xff")):
        (tmp_path / name).write_bytes(content)
        (refused,) = refusals(lambda name=name: load_scenario(str(tmp_path / name)))
        assert refused[:3] == ("syntax", None, name) and refused[4] == "Mend the file: it is not TOML."
    (tmp_path / "c.txt").write_text(TEXT, encoding="utf-8")
    shipped = ", ".join(sorted(shipped_scenarios()))
    for name in (str(tmp_path / "c.txt"), str(tmp_path / "none.toml")):
        assert refusals(lambda name=name: load_scenario(name)) == [
            (
                "scenario", name, "command line", "there is no such scenario",
                f"Shipped: {shipped}. One of your own is given as a path, ending in .toml.",
            )
        ]  # fmt: skip


def test_a_scenario_may_lie_in_a_home_directory_and_one_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.toml").write_text(TEXT, encoding="utf-8")
    assert load_scenario("~/mine.toml") == MINE

    def refuse(path: Path, **how: str) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    path = str(tmp_path / "mine.toml")
    problem, remedy = "cannot be read: Permission denied", "Check who may read it."
    assert refusals(lambda: load_scenario(path)) == [("scenario", path, "command line", problem, remedy)]
