"""The figures of hardware, links and scenarios: what each is where a file leaves it out, and its bounds."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

import pytest

from bloomery.config.setting import declaration_of
from bloomery.plan.hardware import TABLES, SiteLink
from bloomery.plan.simulate.scenario import FAILURES, SECTIONS, FailureSection

FIGURES = {
    "accelerator": {
        "kind": "'gpu' gpu|cpu",
        "memory_gib": "required > 0",
        "reserved_gib": "0.0 ≥ 0",
        "memory_gb_per_s": "required > 0",
        "memory_efficiency": "0.8 > 0 ≤ 1",
        "bf16_teraflops": "0.0 ≥ 0",
        "fp16_teraflops": "0.0 ≥ 0",
        "fp8_teraflops": "0.0 ≥ 0",
        "fp32_teraflops": "0.0 ≥ 0",
        "matmul_efficiency": "0.7 > 0 ≤ 1",
        "fp8_efficiency": "0.55 > 0 ≤ 1",
        "matmul_half_size": "96.0 ≥ 0",
        "attention_efficiency": "0.4 > 0 ≤ 1",
        "attention_pass_ns": "0.0 ≥ 0",
        "exponential_ns": "0.0 ≥ 0",
        "kernel_us": "5.0 ≥ 0",
        "power_w": "0.0 ≥ 0",
    },
    "node": {
        "accelerators": "required ≥ 1",
        "link_gb_per_s": "0.0 ≥ 0",
        "link_efficiency": "0.8 > 0 ≤ 1",
        "link_us": "5.0 ≥ 0",
        "overlap": "0.8 ≥ 0 ≤ 1",
        "overhead_power_w": "0.0 ≥ 0",
    },
    "network": {
        "gbit_per_s": "0.0 ≥ 0",
        "efficiency": "0.7 > 0 ≤ 1",
        "latency_us": "10.0 ≥ 0",
    },
    "storage": {
        "write_gb_per_s": "1.0 > 0",
        "read_gb_per_s": "1.0 > 0",
    },
    "operation": {
        "price_per_accelerator_hour": "0.0 ≥ 0",
        "currency": "'USD'",
        "power_usage_effectiveness": "1.2 ≥ 1",
        "failures_per_1000_accelerator_days": "0.5 ≥ 0",
        "detection_s": "60.0 ≥ 0",
        "restart_s": "300.0 ≥ 0",
        "step_jitter": "0.02 ≥ 0 ≤ 0.5",
    },
    "link": {
        "gbit_per_s": "1.0 > 0",
        "efficiency": "0.4 > 0 ≤ 1",
        "latency_ms": "50.0 ≥ 0",
        "outer_step_s": "7.5 ≥ 0",
    },
}

SCENARIOS = {
    "run": {
        "name": "required",
        "notes": "''",
        "days": "365.0 > 0 ≤ 36500",
    },
    "cluster": {
        "gpus": "required ≥ 1",
        "gpus_per_node": "8 ≥ 1",
        "spare_nodes": "0 ≥ 0",
        "repair_hours": "48.0 > 0",
        "replacement_hours": "4.0 ≥ 0",
        "job_hours": "0.0 ≥ 0",
        "queue_hours": "0.0 ≥ 0",
        "maintenance_every_days": "0.0 ≥ 0",
        "maintenance_hours": "8.0 ≥ 0",
        "straggler_every_days": "0.0 ≥ 0",
        "straggler_slowdown": "1.3 ≥ 1",
        "straggler_found_hours": "6.0 ≥ 0",
    },
    "checkpoint": {
        "every_minutes": "required > 0",
        "blocking_s": "0.0 ≥ 0",
        "durable_s": "0.0 ≥ 0",
        "restart_s": "300.0 ≥ 0",
        "load_s": "60.0 ≥ 0",
    },
    "elastic": {
        "peers": "required ≥ 1",
        "inner_steps": "100 ≥ 1",
        "step_s": "required > 0",
        "speed_spread": "0.0 ≥ 0 ≤ 0.9",
        "parameters": "required > 0",
        "bits": "8.0 > 0 ≤ 64",
        "bandwidth_mbit_s": "required > 0",
        "latency_ms": "0.0 ≥ 0",
        "groups": "1 ≥ 1",
        "fragments": "1 ≥ 1",
        "overlap": "False",
        "outer_s": "0.0 ≥ 0",
        "leaves_per_peer_day": "0.0 ≥ 0",
        "crashes_per_peer_day": "0.0 ≥ 0",
        "detection_s": "10.0 ≥ 0",
        "absent_hours": "12.0 ≥ 0",
        "join_s": "0.0 ≥ 0",
        "join_blocks": "False",
    },
    "failures": {
        "name": "required",
        "count": "required ≥ 0",
        "days": "required > 0",
        "gpus": "required ≥ 1",
        "takes_node": "True",
        "detection_s": "60.0 ≥ 0",
    },
}


def told(figure: Field[Any]) -> str:
    """The default of a figure, then its bounds or choices."""
    declared = declaration_of(figure)
    parts = ["required" if figure.default is MISSING else repr(figure.default)]
    bounds = ((">", declared.above), ("≥", declared.minimum), ("≤", declared.maximum))
    parts += [f"{sign} {bound:g}" for sign, bound in bounds if bound is not None]
    return " ".join([*parts, *(["|".join(declared.choices)] if declared.choices else [])])


@pytest.mark.parametrize(
    ("tables", "expected"),
    [({**TABLES, "link": SiteLink}, FIGURES), ({**SECTIONS, FAILURES: FailureSection}, SCENARIOS)],
)
def test_each_figure_has_its_default_and_bounds(
    tables: dict[str, type], expected: dict[str, dict[str, str]]
) -> None:
    found = {name: {figure.name: told(figure) for figure in fields(table)} for name, table in tables.items()}
    assert found == expected
    assert all(declaration_of(figure).help for table in tables.values() for figure in fields(table))
