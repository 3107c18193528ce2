"""Kubernetes as a scheduler, by kubectl: a run is an Indexed Job with one pod on each node."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bloomery.operate.schedulers.interface import (
    JobRequest,
    JobState,
    QueuedJob,
    SchedulerError,
    SchedulerNode,
    SchedulerSilent,
)
from bloomery.operate.schedulers.kubernetes_manifest import HOSTNAME_LABEL, manifest, run_selector

_ANSWER_S = 60.0
Record = dict[str, Any]
"""An object of the API. Any: parsed JSON."""


class Kubernetes:
    """Speaks to the cluster of the present context through kubectl.

    namespace: where the Jobs are; "": that of the context.
    """

    name = "kubernetes"

    def __init__(self, namespace: str = "") -> None:
        self._namespace = ["--namespace", namespace] if namespace else []

    @staticmethod
    def is_here() -> bool:
        """Return whether this machine has kubectl."""
        return shutil.which("kubectl") is not None

    def script(self, request: JobRequest) -> str:
        """Return the manifest as JSON, which `kubectl create -f` takes."""
        return json.dumps(manifest(request), indent=2) + "\n"

    def submit(self, request: JobRequest) -> list[str]:
        """Create the Job; returns its name."""
        output = self._run("create", "-f", "-", "-o", "name", given=self.script(request))
        return [output.strip().rpartition("/")[2]]

    def jobs(self, *, name: str, run: Path) -> list[QueuedJob]:
        """Return the Jobs of a run that the cluster still keeps."""
        items = self._items("jobs,pods", f"--selector={run_selector(run)}")
        pods = [item for item in items if item["kind"] == "Pod"]
        return [parse_job(item, pods) for item in items if item["kind"] == "Job"]

    def cancel(self, jobs: Sequence[str]) -> None:
        """Delete the Jobs; their pods get SIGTERM, and time to save."""
        if jobs:
            self._run("delete", "job", "--ignore-not-found", "--wait=false", *jobs)

    def exclude(self, jobs: Sequence[str], nodes: Sequence[str]) -> None:
        """Replace the exclusions of Jobs that are suspended; those of others cannot be changed."""
        term = {"matchExpressions": [{"key": HOSTNAME_LABEL, "operator": "NotIn", "values": list(nodes)}]}
        selector = {"nodeSelectorTerms": [term]} if nodes else None
        affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}}
        change = json.dumps({"spec": {"template": {"spec": {"affinity": affinity}}}})
        for job in jobs:
            self._run("patch", "job", job, "--type=merge", "--patch", change)

    def nodes(self) -> list[SchedulerNode]:
        """Return the nodes of the cluster."""
        return [parse_node(item) for item in self._items("nodes")]

    def _items(self, *what: str) -> list[Record]:
        output = self._run("get", *what, "-o", "json")
        try:
            return list(json.loads(output)["items"])
        except (ValueError, KeyError, TypeError) as damage:
            raise SchedulerError(
                f"kubectl get {what[0]} printed no list: {damage!r}.", remedy="Look with kubectl itself."
            ) from damage

    def _run(self, *command: str, given: str | None = None) -> str:
        try:
            done = subprocess.run(
                ["kubectl", *self._namespace, *command],
                input=given,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_ANSWER_S,
                check=False,
            )
        except FileNotFoundError as missing:
            raise SchedulerError(
                "kubectl is not on this machine, so Kubernetes cannot be asked.",
                remedy="Install it, or write submit.scheduler=machine.",
            ) from missing
        except subprocess.TimeoutExpired as late:
            raise SchedulerSilent(
                f"Kubernetes has not answered kubectl {command[0]} for {_ANSWER_S:.0f} s.",
                remedy="Look whether the cluster is up: kubectl cluster-info.",
            ) from late
        if done.returncode:
            output = (done.stderr.strip() or done.stdout.strip()).replace("\n", "; ")
            raise SchedulerError(
                f"Kubernetes refused kubectl {command[0]}: {output}",
                remedy="Correct what it names in [submit], or the context: kubectl config current-context.",
            )
        return done.stdout


def parse_job(job: Record, pods: Iterable[Record]) -> QueuedJob:
    """Return a Job of the API as a record. pods: pods of this Job and perhaps of others."""
    uid = job["metadata"].get("uid")
    own = [
        pod
        for pod in pods
        if any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences", ()))
    ]
    state, word, reason = _state(job, own)
    status = job.get("status", {})
    nodes = [pod["spec"]["nodeName"] for pod in own if pod.get("spec", {}).get("nodeName")]
    started = _seconds(status.get("startTime")) if not state.is_queued else None
    limit_s = job.get("spec", {}).get("activeDeadlineSeconds")
    over = _seconds(status.get("completionTime")) or _transition(job)
    ends = over if state.is_over else (started + limit_s if started and limit_s else None)
    return QueuedJob(
        job=job["metadata"]["name"],
        state=state,
        state_text=word,
        reason=reason,
        nodes=tuple(sorted(set(nodes))),
        started=started,
        ends=ends,
        submitted=_seconds(job["metadata"].get("creationTimestamp")) or 0.0,
    )


def parse_node(node: Record) -> SchedulerNode:
    """Return a node of the API as a record: "ready", "drained" (cordoned) or "down"."""
    ready = _condition(node, "Ready")
    if ready is None or ready["status"] != "True":
        return SchedulerNode(
            name=node["metadata"]["name"], state="down", reason=str((ready or {}).get("message", ""))
        )
    is_cordoned = bool(node.get("spec", {}).get("unschedulable"))
    return SchedulerNode(
        name=node["metadata"]["name"],
        state="drained" if is_cordoned else "ready",
        reason="cordoned" if is_cordoned else "",
    )


def _state(job: Record, pods: Sequence[Record]) -> tuple[JobState, str, str]:
    """Return the state of a Job, the API's own word for it, and why it waits or failed."""
    if _holds(job, "Failed"):
        condition = _condition(job, "Failed") or {}
        reason = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
        return JobState.FAILED, "Failed", reason
    if _holds(job, "Complete"):
        return JobState.ENDED, "Complete", ""
    if "deletionTimestamp" in job["metadata"] or _holds(job, "FailureTarget"):
        return JobState.COMPLETING, "Terminating", ""
    if job.get("spec", {}).get("suspend"):
        return JobState.HELD, "Suspended", f"suspended: {_resumption(job['metadata'])}"
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase", "Pending") == "Pending"]
    if waiting or not pods:
        reasons = [(_condition(pod, "PodScheduled") or {}).get("message", "") for pod in waiting]
        return JobState.PENDING, "Pending", next((reason for reason in reasons if reason), "")
    return JobState.RUNNING, "Running", ""


def _resumption(metadata: Record) -> str:
    """Return the command that lets a suspended Job start, as a shell takes it."""
    within = f" --namespace={metadata['namespace']}" if metadata.get("namespace") else ""
    change = '{"spec":{"suspend":false}}'
    return f"kubectl patch job {metadata['name']}{within} --type=merge --patch='{change}'"


def _condition(item: Record, kind: str) -> Record | None:
    conditions = item.get("status", {}).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == kind), None)


def _holds(item: Record, kind: str) -> bool:
    condition = _condition(item, kind)
    return condition is not None and condition.get("status") == "True"


def _transition(job: Record) -> float | None:
    condition = _condition(job, "Failed") or _condition(job, "Complete") or {}
    return _seconds(condition.get("lastTransitionTime"))


def _seconds(text: object) -> float | None:
    """Return a time of the API in seconds since 1970; None where there is none."""
    return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else None
