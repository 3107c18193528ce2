"""Simulates a run on one cluster with failures, saves, lost work and restarts."""

from __future__ import annotations

import heapq
import math
from random import Random

from bloomery.plan.simulate.scenario import (
    TRAINING,
    ClusterSection,
    FailureSection,
    HoursLedger,
    Life,
    Scenario,
    ScenarioCheckpoints,
)

SAVING, LOST, DETECTION = "saving", "lost work", "not noticed yet"
RESTART, NODES, QUEUE = "restart and load", "waiting for nodes", "waiting in the queue"
MAINTENANCE, SLOW = "maintenance", "slowed by a straggler"
CAUSES = (TRAINING, SAVING, LOST, DETECTION, RESTART, NODES, QUEUE, MAINTENANCE, SLOW)

S_PER_HOUR, MINUTES_PER_HOUR, HOURS_PER_DAY = 3600.0, 60.0, 24.0


def simulate_cluster(scenario: Scenario, *, seed: int) -> Life:
    """Simulate one life of a run. Failures and stragglers come at constant rates (a Poisson process)."""
    assert scenario.cluster is not None and scenario.checkpoint is not None, "checked when it was loaded"
    run = _ClusterState(scenario, scenario.cluster, scenario.checkpoint, Random(seed))
    while not run.account.is_over:
        run.train_to_next_event()
    return run.account.close()


class _ClusterState:
    """The state of a simulated run between two events. All times are hours since its start."""

    def __init__(
        self, scenario: Scenario, cluster: ClusterSection, checkpoint: ScenarioCheckpoints, random: Random
    ) -> None:
        self.account = HoursLedger(end=scenario.hours)
        self._cluster, self._checkpoint, self._random = cluster, checkpoint, random
        self._failures = scenario.failures
        self._rates = [failure.per_gpu_hour * cluster.gpus for failure in scenario.failures]
        self._failure = self._after(sum(self._rates))
        self._straggler = self._after(_rate(cluster.straggler_every_days))
        self._maintenance = cluster.maintenance_every_days * HOURS_PER_DAY or math.inf
        self._job_end = cluster.job_hours or math.inf
        self._spares, self._repaired = cluster.spare_nodes, list[float]()
        self._slow_until = 0.0
        self._next_save = checkpoint.every_minutes / MINUTES_PER_HOUR
        self._at_risk, self._saved = 0.0, list[tuple[float, float]]()

    def train_to_next_event(self) -> None:
        """Train until an event comes, and carry the event out."""
        account = self.account
        slowed = account.now < self._slow_until
        straggler = math.inf if slowed else self._straggler
        ends = {
            "save": self._next_save,
            "failure": self._failure,
            "straggler": straggler,
            "found": self._slow_until if slowed else math.inf,
            "maintenance": self._maintenance,
            "job": self._job_end,
            "end": account.end,
        }
        event = min(ends, key=lambda name: ends[name])
        self._train(ends[event], slowdown=self._cluster.straggler_slowdown if slowed else 1.0)
        happens = {
            "save": self._save,
            "failure": self._fail,
            "straggler": self._slow_down,
            "found": self._replace_straggler,
            "maintenance": self._maintain,
            "job": self._end_job,
        }
        if event in happens and not account.is_over:
            happens[event]()

    def _train(self, until: float, *, slowdown: float) -> None:
        passed = self.account.spend_until(until, TRAINING)
        useful = passed / slowdown
        self.account.move(passed - useful, cause=TRAINING, to=SLOW)
        self._at_risk += useful

    def _save(self) -> None:
        begun = self.account.now
        self._saved.append((begun + self._checkpoint.durable_s / S_PER_HOUR, self._at_risk))
        self.account.count("saves")
        free_again = begun + self._checkpoint.blocking_s / S_PER_HOUR
        self.account.spend_until(min(free_again, self._failure), SAVING)
        self._next_save = self.account.now + self._checkpoint.every_minutes / MINUTES_PER_HOUR
        self._settle()

    def _settle(self) -> None:
        """Once a save is durable, take what it protects off the work at risk."""
        while self._saved and self._saved[0][0] <= self.account.now:
            _, protected = self._saved.pop(0)
            self._at_risk -= protected
            self._saved = [(when, at_risk - protected) for when, at_risk in self._saved]

    def _fail(self) -> None:
        (kind,) = self._random.choices(self._failures, weights=self._rates)
        self._settle()
        self.account.count(kind.name)
        self.account.count("failures")
        self.account.move(self._at_risk, cause=TRAINING, to=LOST)
        self._at_risk, self._saved = 0.0, []
        self._recover(kind)

    def _recover(self, kind: FailureSection) -> None:
        """Detect a failure, replace, restart and load; a failure on the way begins this again."""
        while True:
            self._failure = self.account.now + self._after(sum(self._rates))
            self.account.spend(kind.detection_s / S_PER_HOUR, DETECTION)
            if kind.takes_node:
                self._take_node()
            if not self._restart_is_hit():
                return
            (kind,) = self._random.choices(self._failures, weights=self._rates)
            self.account.count(kind.name)
            self.account.count("failures")

    def _restart_is_hit(self) -> bool:
        """Start again and load, and return whether another failure came first."""
        if self._failure <= self.account.now:  # it broke while nothing ran, and was replaced with the rest
            self._failure = self.account.now + self._after(sum(self._rates))
        seconds = self._checkpoint.restart_s + self._checkpoint.load_s
        ready = self.account.now + seconds / S_PER_HOUR
        self.account.spend_until(min(ready, self._failure), RESTART)
        if self._failure < ready and not self.account.is_over:
            return True
        self._next_save = self.account.now + self._checkpoint.every_minutes / MINUTES_PER_HOUR
        self._slow_until = min(self._slow_until, self.account.now)
        return False

    def _take_node(self) -> None:
        """Take a spare node, a node that was repaired meanwhile, or the first of a repair and another
        node.
        """
        while self._repaired and self._repaired[0] <= self.account.now:
            heapq.heappop(self._repaired)
            self._spares += 1
        if self._spares > 0:
            self._spares -= 1
        else:
            self.account.count("waits for a node")
            wait = self._random.expovariate(1.0) * self._cluster.replacement_hours
            if self._repaired and self._repaired[0] < self.account.now + wait:
                wait = heapq.heappop(self._repaired) - self.account.now
            self.account.spend(wait, NODES)
        back = self.account.now + self._random.expovariate(1.0) * self._cluster.repair_hours
        if self._cluster.spare_nodes:
            heapq.heappush(self._repaired, back)

    def _slow_down(self) -> None:
        self.account.count("stragglers")
        self._slow_until = self.account.now + self._cluster.straggler_found_hours
        self._straggler = self._slow_until + self._after(_rate(self._cluster.straggler_every_days))

    def _replace_straggler(self) -> None:
        self._leave_with_save()
        self._take_node()
        self._come_back()

    def _maintain(self) -> None:
        self.account.count("maintenances")
        self._leave_with_save()
        self.account.spend(self._cluster.maintenance_hours, MAINTENANCE)
        self._maintenance = self.account.now + self._cluster.maintenance_every_days * HOURS_PER_DAY
        self._come_back()

    def _end_job(self) -> None:
        self.account.count("jobs")
        self._leave_with_save()
        self.account.spend(self._random.expovariate(1.0) * self._cluster.queue_hours, QUEUE)
        self._come_back()
        self._job_end = self.account.now + self._cluster.job_hours

    def _leave_with_save(self) -> None:
        """Leave with a stop that was announced: save, wait until the save is durable, and stop."""
        seconds = max(self._checkpoint.blocking_s, self._checkpoint.durable_s)
        self.account.count("saves")
        self.account.spend(seconds / S_PER_HOUR, SAVING)
        self._at_risk, self._saved = 0.0, []

    def _come_back(self) -> None:
        if self._restart_is_hit():
            (kind,) = self._random.choices(self._failures, weights=self._rates)
            self.account.count(kind.name)
            self.account.count("failures")
            self._recover(kind)

    def _after(self, per_hour: float) -> float:
        """Return the hours until the next event of a rate."""
        return self._random.expovariate(per_hour) if per_hour > 0.0 else math.inf


def _rate(every_days: float) -> float:
    """Return the events in an hour, from the mean days between them; 0 means never."""
    return 1.0 / (every_days * HOURS_PER_DAY) if every_days > 0.0 else 0.0
