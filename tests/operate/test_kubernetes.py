"""Kubernetes as a scheduler: manifests against the API's own schema, and what its records mean."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.faults.commands import Said

from bloomery.cli import launch
from bloomery.config.submit import SubmitSection
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.job_context import job_context
from bloomery.operate.schedulers.interface import JobRequest, JobState, SchedulerError, SchedulerNode
from bloomery.operate.schedulers.kubernetes import Kubernetes, parse_job, parse_node
from bloomery.operate.schedulers.kubernetes_manifest import (
    JOB_VARIABLE,
    RUN_LABEL,
    manifest,
    run_label,
    run_selector,
)
from bloomery.operate.submission import Submission, request_of

SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parent / "kubernetes_job.schema.json").read_text())
)
USUAL: dict[str, Any] = {
    "scheduler": "kubernetes",
    "image": "registry.example/bloomery:0.1",
    "volumes": ("shared:/shared",),
    "minutes": 60.0,
}


def request(*, nodes: int = 2, command: tuple[str, ...] = (), tasks: int = 1, **section: Any) -> JobRequest:
    launch = (
        "/usr/bin/python3",
        "-m",
        "bloomery",
        "launch",
        "my.toml",
        "data.sources=['a b']",
        "--supervise",
    )
    return JobRequest(
        name="My Run_7",
        run=Path("/shared/runs/mine"),
        directory=Path("/shared"),
        command=command or launch,
        nodes=nodes,
        section=SubmitSection(**(USUAL | section)),
        exclude=("node7",),
        tasks=tasks,
    )


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"spares": 1, "gpus_per_node": 8, "cpus_per_node": 96, "memory_per_node": "400G"},
        {"exclude": ("node3",), "setup": ("export A=1",), "volumes": ("a:/shared", "b:/data")},
    ],
)
def test_the_manifest_is_a_job_of_the_api_and_names_no_field_that_it_does_not_know(section: dict) -> None:
    made = manifest(request(**section))
    SCHEMA.validate(made)
    made["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(jsonschema.ValidationError, match="completionsMode"):
        SCHEMA.validate(made)


@pytest.mark.parametrize("release", ["1.31", "1.34", "1.37"])
def test_other_releases_of_the_api_know_every_field_of_the_manifest(release: str) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="pip install kubernetes-validate: 108 MB of schemas, so no dependency"
    )
    made = manifest(request(spares=1, gpus_per_node=8, exclude=("node3",)))
    assert kubernetes_validate.validate(made, release, strict=True) == release
    made["spec"]["template"]["spec"]["hostname_"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="hostname_"):
        kubernetes_validate.validate(made, release, strict=True)


def test_pods_have_nodes_of_their_own_and_never_the_excluded_ones() -> None:
    spec = manifest(request(exclude=("node3",), spares=1))["spec"]
    affinity = spec["template"]["spec"]["affinity"]
    (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["node3", "node7"]
    assert affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert (spec["maxFailedIndexes"], spec["backoffLimitPerIndex"]) == (1, 0), "as many pods may fail as wait"
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 65, 66]
    assert spec["activeDeadlineSeconds"] + spec["template"]["spec"]["terminationGracePeriodSeconds"] == 3600


def test_a_pod_runs_the_launcher_in_place_of_its_shell(tmp_path: Path) -> None:
    pod = manifest(request(spares=1, nodes=3, setup=("export SET=up-$$-$(echo so)",)))["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    program = tmp_path / "bloomery"
    program.write_text('#!/bin/sh\necho "$SET"\nfor word; do echo "$word"; done\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", JOB_VARIABLE: "uid-1"}
    command = [word.replace("$$", "$") for word in container["command"]]  # as the kubelet does
    assert "$(" not in "".join(container["command"]).replace("$$", "")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    words = [f"up-{done.stdout.split('-')[1]}-so", "launch", "my.toml", "data.sources=['a b']", "--supervise"]
    assert done.stdout.splitlines() == [*words, "--nnodes", "3", "--job", "kubernetes-uid-1"]
    context = job_context(environment)
    assert context is not None and context.name == "kubernetes-uid-1" and context.end() is None


def test_the_launchers_of_a_job_with_a_spare_start_ranks_on_all_other_nodes() -> None:
    settings = ["submit.nodes=4", "submit.spares=1", "submit.image=x", "submit.volumes=['shared:/shared']"]
    submission = Submission(recipe="demo", overrides=tuple(settings), directory="/shared")
    run = RunDirectory(Path("/shared/runs/demo"))
    made = manifest(request_of(submission, submission.load(), run, tasks=1))
    (container,) = made["spec"]["template"]["spec"]["containers"]
    words = shlex.split(container["command"][2].splitlines()[-1].removeprefix("exec bloomery launch "))
    options = launch._parse(words)
    assert (made["spec"]["completions"], options.nnodes, options.spares) == (5, 5, 1)
    assert launch._nodes_with_ranks(options) == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"image": ""}, "submit.image is empty"),
        ({"volumes": ()}, "lies on no volume"),
        ({"volumes": ("shared",)}, "'shared'"),
        ({"keep_queued": 2}, "one task"),
        ({"tasks": 3}, "one task"),
    ],
)
def test_what_a_job_of_kubernetes_cannot_do_is_refused(wrong: dict, said: str) -> None:
    with pytest.raises(SchedulerError, match=said):
        manifest(request(**wrong))


def job(spec: dict | None = None, deleted: bool = False, **status: Any) -> dict:
    metadata = {"name": "bloomery-x-abc", "uid": "u1", "creationTimestamp": "2026-11-24T00:00:00Z"}
    metadata |= {"deletionTimestamp": "2026-11-24T00:05:00Z"} if deleted else {}
    return {"kind": "Job", "metadata": metadata, "spec": spec or {}, "status": status}


def pod(phase: str, *, node: str = "", why: str = "", owner: str = "u1") -> dict:
    conditions = [{"type": "PodScheduled", "status": "False", "message": why}] if why else []
    spec = {"nodeName": node} if node else {}
    return {
        "kind": "Pod",
        "metadata": {"ownerReferences": [{"uid": owner}]},
        "spec": spec,
        "status": {"phase": phase, "conditions": conditions},
    }


def holds(kind: str, **more: str) -> list[dict]:
    return [{"type": kind, "status": "True", "lastTransitionTime": "2026-11-24T01:00:00Z", **more}]


STATES: list[tuple[dict, list[dict], JobState, str]] = [
    (job(active=2), [pod("Running", node="a"), pod("Running", node="b")], JobState.RUNNING, ""),
    (
        job(active=2),
        [pod("Running", node="a"), pod("Pending", why="0/4 nodes are available")],
        JobState.PENDING,
        "0/4 nodes are available",
    ),
    (job(), [pod("Running", owner="another")], JobState.PENDING, ""),
    (job({"suspend": True}), [], JobState.HELD, "suspended"),
    (job(deleted=True, active=2), [pod("Running", node="a")], JobState.COMPLETING, ""),
    (job(conditions=holds("Complete"), succeeded=2), [], JobState.ENDED, ""),
    (
        job(conditions=holds("Failed", reason="DeadlineExceeded", message="Job was active too long")),
        [],
        JobState.FAILED,
        "DeadlineExceeded: Job was active too long",
    ),
]


@pytest.mark.parametrize(("record", "pods", "state", "reason"), STATES)
def test_what_the_records_of_the_api_mean(
    record: dict, pods: list[dict], state: JobState, reason: str
) -> None:
    SCHEMA.validate({key: record[key] for key in ("metadata", "status")})
    told = parse_job(record | {"spec": record["spec"] | {"activeDeadlineSeconds": 60}}, pods)
    assert told.state == state and told.reason.startswith(reason)
    assert told.ends is None or told.state.is_over
    assert told.submitted == 1795478400.0


def test_a_suspended_job_names_the_command_that_lets_it_start() -> None:
    record = job({"suspend": True})
    record["metadata"]["namespace"] = "llm"
    words = shlex.split(parse_job(record, []).reason.removeprefix("suspended: "))
    patch = ["kubectl", "patch", "job", "bloomery-x-abc", "--namespace=llm", "--type=merge"]
    assert words == [*patch, '--patch={"spec":{"suspend":false}}']


def test_nodes_that_are_cordoned_or_down_say_so() -> None:
    def node(ready: str, **spec: Any) -> dict:
        conditions = [{"type": "Ready", "status": ready, "message": "kubelet stopped"}]
        return {"metadata": {"name": "a"}, "spec": spec, "status": {"conditions": conditions}}

    assert parse_node(node("True")) == SchedulerNode(name="a", state="ready", reason="")
    cordoned = SchedulerNode(name="a", state="drained", reason="cordoned")
    assert parse_node(node("True", unschedulable=True)) == cordoned
    assert parse_node(node("Unknown", unschedulable=True)) == SchedulerNode(
        name="a", state="down", reason="kubelet stopped"
    )


@pytest.fixture
def without_kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PATH", str(tmp_path))
    yield


def test_a_machine_without_kubectl_says_what_to_do(without_kubectl: None) -> None:
    with pytest.raises(SchedulerError, match="kubectl is not on this machine"):
        Kubernetes().nodes()


def test_submit_prints_the_manifest(here: Callable[..., Said], tmp_path: Path) -> None:
    asked = ("submit.scheduler=kubernetes", "submit.image=x", f"submit.volumes=['c:{tmp_path}']")
    said = here("submit", "demo", *asked, "--run", tmp_path / "run", "--dry-run")
    assert said.status == 0, said
    SCHEMA.validate(json.loads(said.out))
    refused = here("submit", "demo", "submit.scheduler=kubernetes", "--run", tmp_path / "run", "--dry-run")
    refused.refuses("submit.image is empty")


def test_a_pod_is_a_jobs_own_where_any_of_its_owners_is_the_job_and_not_where_it_has_none() -> None:
    nobodys, shared = pod("Running", node="a"), pod("Running", node="b")
    del nobodys["metadata"]["ownerReferences"]
    assert parse_job(job(active=1), [nobodys]).state == JobState.PENDING
    shared["metadata"]["ownerReferences"].insert(0, {"uid": "another"})
    found = parse_job(job(active=1), [nobodys, shared])
    assert (found.state, found.nodes) == (JobState.RUNNING, ("b",))


def test_an_object_without_conditions_may_say_so_with_a_null() -> None:
    assert parse_job(job(conditions=None), [pod("Running", node="a")]).state == JobState.RUNNING
    assert parse_node({"metadata": {"name": "a"}, "status": {"conditions": None}}).state == "down"
    new = pod("Pending", node="a")
    del new["status"]
    assert parse_job(job(active=1), [new]).state == JobState.PENDING, "it has just been made"


def test_the_nodes_of_a_cluster_are_all_that_it_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    conditions = [{"type": "Ready", "status": "True"}]
    items = [{"metadata": {"name": name}, "status": {"conditions": conditions}} for name in ("a", "b")]
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> Any:
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps({"items": items}), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert [(node.name, node.state) for node in Kubernetes().nodes()] == [("a", "ready"), ("b", "ready")]
    assert asked == [["kubectl", "get", "nodes", "-o", "json"]]


def selected(selector: str, labels: dict[str, str]) -> bool:
    """Return whether the API's selector, `key=value` or `key in (value,value)`, takes an object."""
    found = re.fullmatch(r"([\w./-]+)(?:=(\w+)| in \(([\w,]+)\))", selector)
    assert found is not None, selector
    key, value, values = found.groups()
    return labels.get(key) in (values.split(",") if values else [value])


def test_a_run_is_found_by_whatever_links_lead_to_it(tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "home").symlink_to(tmp_path / "runs")
    paths = [tmp_path / "home" / "mine", tmp_path / "runs" / "mine"]
    for submitted_at in paths:
        volumes = (f"shared:{tmp_path}",)
        asked = replace(request(volumes=volumes), run=submitted_at, directory=tmp_path)
        labels = manifest(asked)["spec"]["template"]["metadata"]["labels"]
        assert all(selected(run_selector(path), labels) for path in paths)
        assert not selected(run_selector(tmp_path / "runs" / "other"), labels)
    assert not paths[0].is_relative_to(paths[1]) and run_label(paths[0]) == run_label(paths[1])
    earlier = {RUN_LABEL: hashlib.sha256(str(paths[0]).encode()).hexdigest()[:32]}
    assert selected(run_selector(paths[0]), earlier), "a Job that an earlier version submitted"
