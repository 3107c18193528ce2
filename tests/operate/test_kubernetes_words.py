"""What is asked of Kubernetes and read from its answers, and who gets no answer."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.operate.test_kubernetes import holds, job, pod
from tests.operate.test_kubernetes import request as kubernetes_request
from tests.operate.test_scheduler_words import RUN, Commands, commands

from bloomery.operate.schedulers.interface import (
    JobState,
    QueuedJob,
    SchedulerError,
    SchedulerNode,
)
from bloomery.operate.schedulers.kubernetes import Kubernetes, parse_job, parse_node
from bloomery.operate.schedulers.kubernetes_manifest import manifest, run_label
from bloomery.operate.schedulers.slurm import Slurm

__all__ = ["commands"]


def test_a_run_of_kubernetes_is_found_by_its_label_in_its_namespace(commands: Commands) -> None:
    running = job(active=1, startTime="2026-11-24T00:10:00Z") | {"spec": {"activeDeadlineSeconds": 600}}
    pods = [pod("Running", node="b"), pod("Running", node="a"), pod("Running", node="z", owner="another")]
    commands.answers("kubectl", json.dumps({"items": [running, *pods]}))
    (found,) = Kubernetes("ours").jobs(name="x", run=RUN)
    assert commands.called() == [
        f"kubectl --namespace ours get jobs,pods --selector=bloomery.dev/run={run_label(RUN)} -o json"
    ]
    began = 1795478400.0 + 600.0
    assert (found.state, found.nodes, found.started, found.ends) == (
        JobState.RUNNING,
        ("a", "b"),
        began,
        began + 600.0,
    )
    commands.answers("kubectl", "{}")
    with pytest.raises(SchedulerError, match="printed no list"):
        Kubernetes().jobs(name="x", run=RUN)
    commands.answers("kubectl", "", error="forbidden", status=1)
    with pytest.raises(SchedulerError, match="forbidden"):
        Kubernetes().jobs(name="x", run=RUN)


def told(record: dict, *pods: dict) -> QueuedJob:
    return parse_job(record | {"spec": record["spec"] | {"activeDeadlineSeconds": 60}}, pods)


def test_the_records_of_kubernetes_say_when_a_job_began_and_ended() -> None:
    began = {"startTime": "2026-11-24T00:10:00Z"}
    waits = told(job(**began), pod("Pending"), pod("Running", node="a"))
    assert (waits.state, waits.started, waits.ends) == (JobState.PENDING, None, None)
    done = told(job(conditions=holds("Complete"), completionTime="2026-11-24T00:50:00Z", **began))
    failed = told(job(conditions=holds("Failed", reason="x"), **began))
    assert (done.ends, failed.ends) == (1795478400.0 + 3000.0, 1795478400.0 + 3600.0)
    about = told(job(conditions=holds("FailureTarget"), **began), pod("Running"))
    assert about.state == JobState.COMPLETING
    not_yet = [{"type": "Failed", "status": "False"}, {"type": "Complete", "status": "Unknown"}]
    assert told(job(conditions=not_yet), pod("Running")).state == JobState.RUNNING
    assert told(job(), pod("Pending", why=""), pod("Pending", why="no room")).reason == "no room"
    nothing = {"metadata": {"name": "a"}}
    assert parse_node(nothing) == SchedulerNode(name="a", state="down")


def test_nodes_are_excluded_from_a_job_of_kubernetes_and_let_back(commands: Commands) -> None:
    commands.answers("kubectl", "")
    for nodes in (["n1", "n2"], []):
        Kubernetes().exclude(["job-a", "job-b"], nodes)
    excluded, second, back, _ = (call.partition(" --patch ") for call in commands.called())
    assert excluded[0] == "kubectl patch job job-a --type=merge" == back[0]
    assert second == ("kubectl patch job job-b --type=merge", *excluded[1:])
    kind = "requiredDuringSchedulingIgnoredDuringExecution"

    def terms(text: str) -> Any:
        return json.loads(text)["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][kind]

    assert terms(back[2]) is None
    ((expression,),) = (term["matchExpressions"] for term in terms(excluded[2])["nodeSelectorTerms"])
    assert expression == {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1", "n2"]}


def test_the_manifest_asks_for_what_the_recipe_says() -> None:
    section = {
        "spares": 1, "gpus_per_node": 8, "cpus_per_node": 96, "memory_per_node": "400G", "minutes": 90.0,
        "signal_before_s": 444, "setup": ("export A=1",), "volumes": ("claim-a:/shared", "claim-b:/data"),
    }  # fmt: skip
    spec = manifest(kubernetes_request(nodes=5, **section))["spec"]
    assert (spec["completions"], spec["parallelism"], spec["maxFailedIndexes"]) == (5, 5, 1)
    assert (spec["activeDeadlineSeconds"], spec["podReplacementPolicy"]) == (90 * 60 - 444, "Failed")
    pods = spec["template"]["spec"]
    assert (pods["terminationGracePeriodSeconds"], pods["restartPolicy"]) == (444, "Never")
    (container,) = pods["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8", "cpu": "96", "memory": "400G"}}
    assert (container["image"], container["workingDir"]) == (
        "registry.example/bloomery:0.1",
        "/shared/runs/mine",
    )
    script = container["command"][2].splitlines()
    assert script[:3] == ["set -eo pipefail", "umask 002", "export A=1"]
    assert script[3].endswith("--nnodes 5 --job kubernetes-$$BLOOMERY_KUBERNETES_JOB")
    claims = {one["name"]: one.get("persistentVolumeClaim", one.get("emptyDir")) for one in pods["volumes"]}
    mounts = {one["mountPath"]: claims[one["name"]] for one in container["volumeMounts"]}
    claims = {"/shared": {"claimName": "claim-a"}, "/data": {"claimName": "claim-b"}}
    assert mounts == claims | {"/dev/shm": {"medium": "Memory"}}
    sources = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"]}
    assert sources["BLOOMERY_HOST"] == "spec.nodeName" and sources["BLOOMERY_ADDRESS"] == "status.podIP"
    alone = manifest(kubernetes_request(nodes=1))["spec"]
    assert (alone["backoffLimit"], "maxFailedIndexes" in alone) == (0, False)
    assert "--nnodes" not in alone["template"]["spec"]["containers"][0]["command"][2]


def test_pods_keep_apart_from_those_of_their_own_run() -> None:
    made = manifest(kubernetes_request())
    labels = made["spec"]["template"]["metadata"]["labels"]
    affinity = made["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    (apart,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    label = "bloomery.dev/run"
    assert (
        apart["labelSelector"]["matchLabels"]
        == {label: labels[label]}
        == {label: run_label(Path("/shared/runs/mine"))}
    )
    assert run_label(Path("/shared/runs/mine")) != run_label(Path("/shared/runs/other"))
    assert made["metadata"]["annotations"] == {"bloomery.dev/directory": "/shared/runs/mine"}
    assert made["metadata"]["labels"][label] == labels[label]


def test_a_run_beside_its_volume_and_one_that_waits_for_another_are_refused() -> None:
    beside = replace(kubernetes_request(), run=Path("/shared2/runs/mine"))
    with pytest.raises(SchedulerError, match="lies on no volume"):
        manifest(beside)
    with pytest.raises(SchedulerError, match="one task"):
        manifest(replace(kubernetes_request(), after="7"))


@pytest.mark.parametrize(
    ("scheduler", "failure", "remedy"),
    [
        (Slurm(), FileNotFoundError(), "write submit.scheduler=machine"),
        (Slurm(), subprocess.TimeoutExpired("sinfo", 60.0), "scontrol ping"),
        (Kubernetes(), FileNotFoundError(), "write submit.scheduler=machine"),
        (Kubernetes(), subprocess.TimeoutExpired("kubectl", 60.0), "kubectl cluster-info"),
        (Kubernetes(), None, "kubectl config current-context"),
    ],
    ids=["no slurm", "slurm is late", "no kubectl", "kubernetes is late", "kubernetes refuses"],
)
def test_who_gets_no_answer_of_a_scheduler_is_told_where_to_look(
    monkeypatch: pytest.MonkeyPatch,
    scheduler: Slurm | Kubernetes,
    failure: Exception | None,
    remedy: str,
) -> None:
    def run(command: list[str], **more: Any) -> Any:
        if failure is not None:
            raise failure
        return SimpleNamespace(returncode=1, stderr="no", stdout="")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SchedulerError) as refused:
        scheduler.nodes()
    assert remedy in refused.value.remedy
