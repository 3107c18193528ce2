"""How long a simulated year of 1,024 GPUs takes, in seconds of processor time, and how near it is to Daly.

python benchmarks/plan_simulate.py [--json] [--lives N]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time

from bloomery.plan.simulate.cluster import simulate_cluster
from bloomery.plan.simulate.forecast import forecast
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
    for row in rows:
        print(json.dumps(row) if options.json else f"{row['name']}: {row['value']:.4g} {row['unit']}")


if __name__ == "__main__":
    main()
