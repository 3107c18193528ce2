"""How long a simulated year of 1,024 GPUs takes, in seconds of processor time, and how near it is to Daly.

python benchmarks/plan_simulate.py [--json] [--lives N]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

from bloomery.config.load import load_recipe
from bloomery.plan.hardware import load_hardware
from bloomery.plan.overview import make_plan
from bloomery.plan.request import Request
from bloomery.plan.simulate import forecast
from bloomery.plan.simulate.cluster import simulate_cluster
from bloomery.plan.simulate.scenario import scenario_of

BAR_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--lives", type=int, default=16)
    options = parser.parse_args()
    per_day, every_s, save_s, restart_s = 3.0, 1800.0, 5.0, 400.0
    scenario = scenario_of(
        {
            "run": {"name": "a year of 1,024 GPUs", "days": 365},
            "cluster": {"gpus": 1024},
            "checkpoint": {
                "every_minutes": every_s / 60,
                "blocking_s": save_s,
                "durable_s": save_s,
                "restart_s": restart_s,
                "load_s": 0.0,
            },
            "failures": [
                {
                    "name": "any",
                    "count": per_day,
                    "days": 1,
                    "gpus": 1024,
                    "takes_node": False,
                    "detection_s": 0.0,
                }
            ],
        },
        label="benchmark",
    )
    times = []
    for seed in range(options.lives):
        begun = time.process_time()
        simulate_cluster(scenario, seed=seed)
        times.append(time.process_time() - begun)
    found = forecast(scenario, lives=options.lives)
    # Daly (2006), equation 13: M·exp(R/M)·(exp((τ+δ)/M) − 1) seconds for each interval of work τ.
    mean_s = 86_400 / per_day
    wall_s = mean_s * math.exp(restart_s / mean_s) * math.expm1((every_s + save_s) / mean_s)
    daly = every_s / wall_s
    seconds = statistics.median(times)
    rows = [
        {
            "name": "simulate: processor time of one life, a year of 1,024 GPUs",
            "value": seconds,
            "unit": "s",
            "reference": None,
            "bar": BAR_S,
            "ok": seconds <= BAR_S,
        },
        {
            "name": "simulate: goodput, against Daly's formula",
            "value": found.goodput,
            "unit": "share",
            "reference": daly,
            "bar": None,
            "ok": found.low - 0.002 <= daly <= found.high + 0.002,
        },
    ]
    rows.append(_plan_against_simulate(options.lives))
    for row in rows:
        print(json.dumps(row) if options.json else f"{row['name']}: {row['value']:.4g} {row['unit']}")


RECIPES = {
    "tr11-176b": ("a100-80g", None),
    "tr1-13b": ("v100-32g", 128),
    "llmjp-172b": ("h100-80g", None),
    "tr11-176b checkpoint.background=off": ("a100-80g", None),
}
FAILURES_PER_WEEK = (1.0, 7.0, 56.0)


def _plan_against_simulate(lives: int) -> dict[str, object]:
    """The share of time that is lost, by the plan and by simulated lives, of four recipes at three rates."""
    ratios = {}
    for text, (machine, accelerators) in RECIPES.items():
        name, *overrides = text.split()
        for per_week in FAILURES_PER_WEEK:
            hardware = load_hardware(machine)
            plan = make_plan(
                Request(
                    loaded=load_recipe(name, overrides),
                    hardware=hardware,
                    accelerators=accelerators,
                    failures_per_week=per_week,
                )
            )
            kept = plan.draft.checkpoints
            scenario = scenario_of(
                {
                    "run": {"name": name, "days": 700 / per_week},
                    "cluster": {"gpus": 8},
                    "checkpoint": {
                        "every_minutes": kept.interval_s / 60,
                        "blocking_s": kept.blocking_s,
                        "durable_s": kept.save_s,
                        "restart_s": hardware.operation.restart_s,
                        "load_s": kept.load_s,
                    },
                    "failures": [
                        {
                            "name": "any",
                            "count": per_week / 7,
                            "days": 1,
                            "gpus": 8,
                            "takes_node": False,
                            "detection_s": hardware.operation.detection_s,
                        }
                    ],
                },
                label="benchmark",
            )
            simulated = 1 - forecast(scenario, lives=2 * lives).goodput
            ratios[f"{text} at {per_week:g} a week"] = (kept.lost_share or 0.0) / simulated
    worst = max(ratios, key=lambda place: abs(math.log(ratios[place])))
    distance = max(ratios[worst], 1 / ratios[worst])
    return {
        "name": f"plan against simulate: share of lost time, {len(ratios)} cases, the worst ratio",
        "value": distance,
        "unit": "x",
        "reference": f"{worst}: {ratios[worst]:.3f}",
        "bar": "<= 1.1",
        "ok": distance <= 1.1,
    }


if __name__ == "__main__":
    main()
