"""Writes the manifest of a run's Job for Kubernetes: one pod with a launcher on each node."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, TypeAlias

from bloomery.operate.diagnosis import REPEATING_STATUSES
from bloomery.operate.schedulers.interface import JobRequest, SchedulerError

RUN_LABEL = "bloomery.dev/run"
"""Label of the Jobs of a run: a hash of its directory, for a label's value takes no slashes."""
DIRECTORY_ANNOTATION = "bloomery.dev/directory"
"""Annotation of a Job: its run directory."""
JOB_VARIABLE = "BLOOMERY_KUBERNETES_JOB"
"""Environment variable of a pod: the identity of its Job."""
HOSTNAME_LABEL = "kubernetes.io/hostname"
_CONTROLLER = "batch.kubernetes.io/controller-uid"
Manifest: TypeAlias = dict[str, Any]  # Any: JSON


def manifest(request: JobRequest) -> Manifest:
    """Return an Indexed Job (batch/v1). Raises SchedulerError for what such a Job cannot do.

    Its pods end together when more of them have failed than there are spares, and no pod starts twice: the
    supervisor in them starts ranks again. SIGTERM comes `submit.signal_before_s` before the time limit.
    """
    _refuse(request)
    section, nodes = request.section, request.nodes
    grace_s = section.signal_before_s
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "activeDeadlineSeconds": max(1, int(60 * section.minutes) - grace_s),
        "podReplacementPolicy": "Failed",
        "template": {
            "metadata": {"labels": _labels(request)},
            "spec": _pod(request),
        },
    }
    if section.spares:
        spec |= {"backoffLimitPerIndex": 0, "maxFailedIndexes": section.spares}
    else:
        spec |= {"backoffLimit": 0}
    codes = {"containerName": "launcher", "operator": "In", "values": list(REPEATING_STATUSES)}
    spec["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "generateName": f"bloomery-{_dns(request.name)}-",
            "labels": _labels(request),
            "annotations": {DIRECTORY_ANNOTATION: str(request.run)},
        },
        "spec": spec,
    }


def run_label(run: Path) -> str:
    """Return the value of RUN_LABEL for a run directory, by whatever links a path leads there."""
    return _hash_of(os.path.realpath(run))


def run_selector(run: Path) -> str:
    """Return the selector of the Jobs of a run, also of those that an earlier version labelled by the path
    as it was given.
    """
    labels = sorted({run_label(run), _hash_of(str(run))})
    return f"{RUN_LABEL}={labels[0]}" if len(labels) == 1 else f"{RUN_LABEL} in ({','.join(labels)})"


def _hash_of(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()[:32]


def _refuse(request: JobRequest) -> None:
    section = request.section
    if not section.image:
        raise SchedulerError(
            "submit.image is empty, and a pod needs a container image with bloomery in it.",
            remedy="Name one: submit.image=registry/bloomery:0.1",
        )
    if request.tasks > 1 or request.after or section.keep_queued:
        raise SchedulerError(
            "Jobs of Kubernetes do not wait for each other, so there is one task.",
            remedy="Leave out submit.tasks and keep_queued, and ask for enough minutes.",
        )
    for claim in section.volumes:
        if not re.fullmatch(r"[^:]+:/[^:]*", claim):
            raise SchedulerError(
                f"submit.volumes has {claim!r}.", remedy="Write CLAIM:/PATH, a claim and where it is mounted."
            )
    under = [claim.partition(":")[2] for claim in section.volumes]
    if not any(request.run.is_relative_to(path) for path in under):
        raise SchedulerError(
            f"{request.run} lies on no volume, so it would be gone with the pods.",
            remedy="Mount a claim that all nodes may write, submit.volumes=['CLAIM:/PATH'], and --run below.",
        )


def _pod(request: JobRequest) -> Manifest:
    section = request.section
    claims = [claim.partition(":")[::2] for claim in section.volumes]
    volumes: list[Manifest] = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}}
        for number, (name, _) in enumerate(claims)
    ]
    mounts = [{"name": f"claim-{number}", "mountPath": path} for number, (_, path) in enumerate(claims)]
    # The /dev/shm of a container has 64 MiB; batches and saves pass through it.
    volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": section.signal_before_s,
        "affinity": _affinity(request),
        "volumes": volumes,
        "containers": [
            {
                "name": "launcher",
                "image": section.image,
                # Kubernetes reads `$$` as `$`, and `$(NAME)` as one of the container's variables.
                "command": ["/bin/bash", "-c", _script(request).replace("$", "$$")],
                "workingDir": str(request.run),
                "env": [
                    _from_pod("BLOOMERY_HOST", "spec.nodeName"),
                    _from_pod("BLOOMERY_ADDRESS", "status.podIP"),
                    _from_pod(JOB_VARIABLE, f"metadata.labels['{_CONTROLLER}']"),
                ],
                "resources": {"limits": _resources(request)},
                "volumeMounts": mounts,
            }
        ],
    }


def _script(request: JobRequest) -> str:
    """Return what a pod runs: the lines of submit.setup, then the launcher in place of the shell."""
    section = request.section
    nodes = ["--nnodes", str(request.nodes), "--job", f"kubernetes-${JOB_VARIABLE}"]
    words = [_quoted(word) for word in _command(request)]
    launcher = " ".join(["exec", *words, *(nodes if request.nodes > 1 else [])])
    return "\n".join(["set -eo pipefail", "umask 002", *section.setup, launcher])


def _command(request: JobRequest) -> list[str]:
    """Return the launcher's words with the image's own `bloomery` in place of this machine's Python."""
    words = list(request.command)
    return ["bloomery", *words[3:]] if words[1:3] == ["-m", "bloomery"] else words


def _affinity(request: JobRequest) -> Manifest:
    """Return that each pod has a node of its own, and none of the excluded ones."""
    apart = {
        "topologyKey": HOSTNAME_LABEL,
        "labelSelector": {"matchLabels": {RUN_LABEL: run_label(request.run)}},
    }
    affinity: Manifest = {
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]},
    }
    hosts = sorted({*request.section.exclude, *request.exclude})
    if hosts:
        term = {"matchExpressions": [{"key": HOSTNAME_LABEL, "operator": "NotIn", "values": hosts}]}
        selector = {"nodeSelectorTerms": [term]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": selector}
    return affinity


def _resources(request: JobRequest) -> dict[str, str]:
    section = request.section
    asked = {
        "nvidia.com/gpu": str(section.gpus_per_node or ""),
        "cpu": str(section.cpus_per_node or ""),
        "memory": section.memory_per_node,
    }
    return {name: value for name, value in asked.items() if value}


def _from_pod(name: str, field: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _labels(request: JobRequest) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "bloomery",
        "app.kubernetes.io/instance": _dns(request.name),
        RUN_LABEL: run_label(request.run),
    }


def _dns(name: str) -> str:
    """Return a name as Kubernetes allows it: at most 40 of a-z, 0-9 and "-"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-") or "run"


def _quoted(word: str) -> str:
    quoted = word.replace("'", "'\\''")
    return word if re.fullmatch(r"[\w./=,:+-]+", word) else f"'{quoted}'"
