"""What schedulers are handed, as whole texts, and what their answers mean, as whole records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.config.submit import SubmitSection
from bloomery.errors import StorageError
from bloomery.operate.schedulers import kubernetes, machine, machine_queue, slurm
from bloomery.operate.schedulers.interface import (
    JobRequest,
    JobState,
    QueuedJob,
    SchedulerError,
    SchedulerNode,
    SchedulerSilent,
)
from bloomery.operate.schedulers.kubernetes import Kubernetes
from bloomery.operate.schedulers.kubernetes_manifest import _dns, _quoted, manifest
from bloomery.operate.schedulers.machine import OneMachine
from bloomery.operate.schedulers.machine_queue import MachineJob
from bloomery.operate.schedulers.slurm import Slurm, _names, batch_script, parse_job, state_of


def asked(**fields: Any) -> JobRequest:
    told: dict[str, Any] = {
        "name": "seven", "run": Path("/runs/seven"), "directory": Path("/home/ann"),
        "command": ("bloomery", "launch", "a b"), "nodes": 1,
    }  # fmt: skip
    return JobRequest(**{**told, "section": SubmitSection(**fields.pop("section", {})), **fields})


def test_a_batch_script_is_this() -> None:
    section = {
        "minutes": 61.0,
        "signal_before_s": 300,
        "setup": ("module load x",),
        "more": ("--mail-user=a",),
    }
    request = asked(tasks=2, section=section, top_up=("bloomery", "submit", "--fill up"))
    assert batch_script(request) == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=bloomery-seven\n"
        "#SBATCH --comment=bloomery:/runs/seven\n"
        "#SBATCH --chdir=/home/ann\n"
        "#SBATCH --nodes=1\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --time=01:01:00\n"
        "#SBATCH --array=1-2%1\n"
        "#SBATCH --signal=USR1@300\n"
        "#SBATCH --output=/runs/seven/logs/job-%A_%a.log\n"
        "#SBATCH --no-requeue\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --mail-user=a\n"
        "\n"
        "set -euo pipefail\n"
        "umask 002\n"
        'echo "$(date +%FT%T) job $SLURM_JOB_ID begins on $SLURM_JOB_NODELIST"\n'
        "set +u  # what sets an environment up, such as conda, reads variables that nobody has set\n"
        "module load x\n"
        "set -u\n"
        "# A queue that cannot be filled ends no training.\n"
        "bloomery submit '--fill up' || echo \"the queue could not be filled\"\n"
        "status=0\n"
        "srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=120 "
        "--output=/runs/seven/logs/job-%j-%N-%t.log bash -c "
        "'trap '\"'\"''\"'\"' USR1; exec bloomery launch '\"'\"'a b'\"'\"'' || status=$?\n"
        'echo "$(date +%FT%T) job $SLURM_JOB_ID ends with status $status"\n'
        'exit "$status"\n'
    )
    assert Slurm({}).script(request) == batch_script(request)


def test_the_script_of_one_machine_is_this(tmp_path: Path) -> None:
    request = asked(section={"setup": ("export A=1",)}, top_up=("bloomery", "submit", "a b"))
    assert OneMachine(tmp_path).script(request) == (
        "set -euo pipefail\numask 002\nset +u\nexport A=1\nset -u\n"
        "bloomery submit 'a b' || echo \"the queue could not be filled\"\n"
        "trap '' USR1\nexec bloomery launch 'a b'\n"
    )
    assert OneMachine(tmp_path).script(asked()) == (
        "set -euo pipefail\numask 002\ntrap '' USR1\nexec bloomery launch 'a b'\n"
    )


@pytest.mark.parametrize("wrong", ['a"b', "a\nb", "a\x1bb"])
def test_what_sbatch_would_split_is_refused(wrong: str) -> None:
    with pytest.raises(SchedulerError, match="cannot stand in a batch script"):
        batch_script(asked(section={"partition": wrong}))


STATES = {
    JobState.PENDING: ("PENDING", "REQUEUED", "CONFIGURING", "REQUEUE_FED"),
    JobState.HELD: ("REQUEUE_HOLD",),
    JobState.RUNNING: ("RUNNING", "STAGE_OUT", "SIGNALING", "RESIZING"),
    JobState.SUSPENDED: ("SUSPENDED", "STOPPED"),
    JobState.COMPLETING: ("COMPLETING",),
    JobState.ENDED: ("COMPLETED", "CANCELLED", "PREEMPTED", "REVOKED"),
    JobState.FAILED: ("FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
}


def test_each_word_of_slurm_is_a_state_and_each_state_waits_is_over_or_runs() -> None:
    found = {state: tuple(word for word in words if state_of(word, "None") == state)
             for state, words in STATES.items()}  # fmt: skip
    assert found == STATES
    held = ("JobHeldUser", "JobHeldAdmin", "JobHoldMaxRequeue", "launch failed requeued held")
    assert {state_of("PENDING", reason) for reason in held} == {JobState.HELD}
    assert state_of("PENDING", "DependencyNeverSatisfied") == JobState.NEVER
    assert state_of("RUNNING", "JobHeldUser") == JobState.RUNNING
    assert {state for state in JobState if state.is_queued} == {
        JobState.PENDING,
        JobState.HELD,
        JobState.NEVER,
    }
    assert {state for state in JobState if state.is_over} == {JobState.ENDED, JobState.FAILED}


@pytest.mark.parametrize(
    ("index", "job", "tasks"),
    [
        ("N/A", "4711", 1), ("", "4711", 1), ("3", "4700_3", 1), ("2-5%1", "4700_[2-5]", 4),
        ("2-5,7,9-10%2", "4700_[2-5,7,9-10]", 7), ("7%1", "4700_7", 1), ("2-5,x", "4700_[2-5,x]", 1),
    ],
)  # fmt: skip
def test_tasks_of_an_array_are_named_as_scancel_takes_them(index: str, job: str, tasks: int) -> None:
    at = ["2031-05-06T07:08:09", "N/A", "Unknown"]
    parts = ["4711", "4700", index, "PENDING", "(null)", "ann", "", *at, " c "]
    start = time.mktime((2031, 5, 6, 7, 8, 9, 0, 0, -1))
    assert parse_job("\x1f".join(parts)) == (
        QueuedJob(
            job=job, state=JobState.PENDING, state_text="PENDING", user="ann", tasks=tasks,
            expected_start=start,
        ),
        "c",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n1,n2", ("n1", "n2")),
        ("iam[07-09,11],login", ("iam07", "iam08", "iam09", "iam11", "login")),
        ("r[1-2]c,r[10]", ("r1c", "r2c", "r10")),
        ("a[098-101]", ("a098", "a099", "a100", "a101")),
        ("a[x]", ()),
    ],
)
def test_a_short_list_of_nodes_is_read_without_asking(text: str, names: tuple[str, ...]) -> None:
    assert _names(text) == names


def test_a_list_is_expanded_by_slurm_only_where_it_has_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(command: Any, **options: Any) -> Any:
        calls.append((command, options))
        return SimpleNamespace(returncode=0, stdout="n1\nn2\n", stderr="")

    monkeypatch.setattr(slurm.subprocess, "run", run)
    own = Slurm({"A": "b"})
    assert [own.expanded(text) for text in ("", "(null)", "n3,n4")] == [(), (), ("n3", "n4")] and not calls
    assert own.expanded("n[1-2]") == ("n1", "n2")
    assert calls == [
        (
            ("scontrol", "show", "hostnames", "n[1-2]"),
            {"input": None, "capture_output": True, "text": True, "errors": "replace", "timeout": 60.0,
             "check": False, "env": {"A": "b"}},
        )
    ]  # fmt: skip


def test_a_scheduler_that_is_missing_or_refuses_without_an_error_text_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not Slurm.is_here() and not Kubernetes.is_here()
    with pytest.raises(SchedulerError, match="sinfo is not on this machine, so SLURM"):
        Slurm().nodes()
    for name in ("sbatch", "kubectl"):
        (tmp_path / name).touch(mode=0o755)
    assert Slurm.is_here() and Kubernetes.is_here()
    refused = SimpleNamespace(returncode=1, stdout="one\ntwo\n", stderr=" \n")
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: refused)
    with pytest.raises(SchedulerError, match="SLURM refused sinfo: one; two"):
        Slurm().nodes()
    with pytest.raises(SchedulerError, match="Kubernetes refused kubectl get: one; two"):
        Kubernetes().nodes()
    refused.stderr = "sbatch: fatal: Could not establish a configuration source"
    for ask in (Slurm().nodes, lambda: Slurm()._run("sbatch")):
        with pytest.raises(SchedulerError) as unreached:
            ask()
        assert unreached.value.remedy.endswith("can be reached: scontrol ping.")
    refused.stderr = "sbatch: error: Batch job submission failed: Requested time limit is invalid"
    with pytest.raises(SchedulerError) as wrong:
        Slurm()._run("sbatch")
    assert "in [submit]" in wrong.value.remedy and not isinstance(wrong.value, SchedulerSilent)
    refused.stderr = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    with pytest.raises(SchedulerSilent):
        Slurm()._run("sbatch")
    refused.stderr = "why\n"  # what was done before it failed is not what is to be told
    with pytest.raises(SchedulerError, match=r"SLURM refused sinfo: why\n"):
        Slurm().nodes()
    with pytest.raises(SchedulerError, match=r"Kubernetes refused kubectl get: why\n"):
        Kubernetes().nodes()
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: late(options["timeout"]))

    def late(seconds: float) -> None:
        raise subprocess.TimeoutExpired("x", seconds)

    with pytest.raises(SchedulerSilent, match="SLURM has not answered sinfo for 60 s"):
        Slurm().nodes()
    with pytest.raises(SchedulerSilent, match="Kubernetes has not answered kubectl get for 60 s"):
        Kubernetes().nodes()


KUBERNETES = {
    "image": "registry/bloomery:1", "volumes": ("shared:/runs",), "minutes": 60.0, "signal_before_s": 300,
}  # fmt: skip


def test_a_manifest_is_this() -> None:
    command = ("/usr/bin/python3", "-m", "bloomery", "launch", "it's $HOME")
    request = asked(name="My_Run 7-", nodes=2, command=command, section=KUBERNETES | {"minutes": 60.5})
    made = manifest(request)
    labels = made["metadata"]["labels"]
    hashed = labels["bloomery.dev/run"]
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    shared = {"app.kubernetes.io/name": "bloomery", "app.kubernetes.io/instance": "my-run-7",
              "bloomery.dev/run": hashed}  # fmt: skip
    script = (
        "set -eo pipefail\numask 002\nexec bloomery launch 'it'\\''s $$HOME' --nnodes 2 "
        "--job kubernetes-$$BLOOMERY_KUBERNETES_JOB"
    )

    def of_pod(name: str, field: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}

    container = {
        "name": "launcher",
        "image": "registry/bloomery:1",
        "command": ["/bin/bash", "-c", script],
        "workingDir": "/runs/seven",
        "env": [
            of_pod("BLOOMERY_HOST", "spec.nodeName"),
            of_pod("BLOOMERY_ADDRESS", "status.podIP"),
            of_pod("BLOOMERY_KUBERNETES_JOB", "metadata.labels['batch.kubernetes.io/controller-uid']"),
        ],
        "resources": {"limits": {}},
        "volumeMounts": [
            {"name": "claim-0", "mountPath": "/runs"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    apart = {"topologyKey": "kubernetes.io/hostname",
             "labelSelector": {"matchLabels": {"bloomery.dev/run": hashed}}}  # fmt: skip
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 300,
        "affinity": {"podAntiAffinity": {required: [apart]}},
        "volumes": [
            {"name": "claim-0", "persistentVolumeClaim": {"claimName": "shared"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
        "containers": [container],
    }
    codes = {"containerName": "launcher", "operator": "In", "values": [2, 65, 66]}
    assert made == {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "generateName": "bloomery-my-run-7-",
            "labels": shared,
            "annotations": {"bloomery.dev/directory": "/runs/seven"},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "activeDeadlineSeconds": 60 * 60 + 30 - 300,
            "podReplacementPolicy": "Failed",
            "template": {"metadata": {"labels": shared}, "spec": pod},
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        },
    }
    assert Kubernetes().script(request) == json.dumps(made, indent=2) + "\n"
    assert len(hashed) == 32 and manifest(asked(section=KUBERNETES | {"minutes": 1.0}))["spec"][
        "activeDeadlineSeconds"
    ] == 1  # fmt: skip


def test_names_and_words_are_written_as_kubernetes_and_a_shell_take_them() -> None:
    given = ("A__b", "x" * 39 + "_yz", "-a.b-", "é", "x" * 60)
    assert [_dns(name) for name in given] == ["a-b", "x" * 39, "a-b", "run", "x" * 40]
    words = ("a.b/c=d,e:f+g-h_1", "a b", "", "$A", "it's")
    assert [_quoted(word) for word in words] == [words[0], "'a b'", "''", "'$A'", "'it'\\''s'"]
    own = asked(section=KUBERNETES, command=("bloomery-launch", "-x", "a"))
    script = manifest(own)["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert script.splitlines()[-1] == "exec bloomery-launch -x a"
    for volumes in (("a:b",), (":/b",), ("a:/b:c",), ("a",)):
        with pytest.raises(SchedulerError, match=r"submit\.volumes has"):
            manifest(asked(section=KUBERNETES | {"volumes": volumes}))
    manifest(asked(section=KUBERNETES | {"volumes": ("a:/else", "b:/runs/seven")}))


def test_a_job_of_kubernetes_is_created_and_named_by_what_the_cluster_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, Any]] = []

    def run(command: list[str], **options: Any) -> Any:
        calls.append((command, options))
        return SimpleNamespace(returncode=0, stdout="job.batch/bloomery-seven-x7\n", stderr="")

    monkeypatch.setattr(kubernetes.subprocess, "run", run)
    request = asked(section=KUBERNETES)
    assert Kubernetes("ours").submit(request) == ["bloomery-seven-x7"]
    assert calls == [
        (
            ["kubectl", "--namespace", "ours", "create", "-f", "-", "-o", "name"],
            {"input": Kubernetes().script(request), "capture_output": True, "text": True,
             "errors": "replace", "timeout": 60.0, "check": False},
        )
    ]  # fmt: skip


def test_jobs_of_one_machine_are_queued_with_who_and_when(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[Path] = []
    monkeypatch.setattr(machine_queue, "start_runner", started.append)
    monkeypatch.setattr(machine.getpass, "getuser", lambda: "ann")
    monkeypatch.setattr(machine, "time", SimpleNamespace(time=lambda: 1234.56789))
    request = asked(run=tmp_path, tasks=2, section={"minutes": 7.0, "signal_before_s": 44})
    assert OneMachine(tmp_path).submit(request) == ["1", "2"] and started == [tmp_path]
    script = OneMachine(tmp_path).script(request)
    assert machine_queue.read_jobs(tmp_path) == [
        MachineJob(
            number=number, command=("bash", "-c", script), directory="/home/ann", minutes=7.0,
            signal_before_s=44, user="ann", submitted=1234.568,
        )
        for number in (1, 2)
    ]  # fmt: skip
    with pytest.raises(SchedulerError, match="wants 2 nodes"):
        OneMachine(tmp_path).submit(asked(run=tmp_path, nodes=2))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Queueing a job"):
        OneMachine(tmp_path).submit(asked(run=tmp_path / "file"))
    with pytest.raises(StorageError, match="Cancelling a job"):
        OneMachine(tmp_path / "file").cancel(["1"])

    def nameless() -> str:
        raise KeyError("no such user")

    monkeypatch.setattr(machine.getpass, "getuser", nameless)
    OneMachine(tmp_path).submit(request)
    assert machine_queue.read_jobs(tmp_path)[-1].user == str(os.getuid())


def test_a_machine_is_idle_without_the_process_of_its_queue(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "host_name", lambda: "n1")
    monkeypatch.setattr(machine_queue, "has_runner", lambda run: run == tmp_path)
    assert OneMachine(tmp_path).nodes() == [SchedulerNode(name="n1", state="allocated")]
    assert OneMachine(tmp_path / "x").nodes() == [SchedulerNode(name="n1", state="idle")]


def test_a_runner_is_started_apart_from_the_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    (tmp_path / "queue" / "runner.log").write_text("before\n")
    calls: list[tuple[Any, Any]] = []

    def start(command: list[str], **options: Any) -> None:
        options["stdout"].write(b"told\n")
        assert options.pop("stdout") is options.pop("stderr")
        calls.append((command, options))

    monkeypatch.setattr(machine_queue.subprocess, "Popen", start)
    machine_queue.start_runner(tmp_path)
    command = [sys.executable, "-m", "bloomery.operate.schedulers.machine_queue", str(tmp_path)]
    assert calls == [(command, {"stdin": subprocess.DEVNULL, "start_new_session": True})]
    assert (tmp_path / "queue" / "runner.log").read_text() == "before\ntold\n"


def test_the_lock_names_its_holder_while_it_is_held_and_a_queue_that_is_none_has_no_runner(
    tmp_path: Path,
) -> None:
    assert not machine_queue.has_runner(tmp_path)
    (tmp_path / "queue").mkdir()
    lock = tmp_path / "queue" / "runner.lock"
    lock.write_text("a longer text than any number of a process")
    with machine_queue._hold(tmp_path) as is_ours:
        assert is_ours and lock.read_text() == str(os.getpid()) and machine_queue.has_runner(tmp_path)
        with machine_queue._hold(tmp_path) as is_second:
            assert not is_second
        assert lock.read_text() == str(os.getpid()), "the second one took nothing of the first"
    assert lock.read_text() == "" and not machine_queue.has_runner(tmp_path)


@pytest.mark.parametrize(
    ("command", "said", "helps"),
    [
        ("sbatch", "Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("sbatch", "fatal: Could not establish a configuration source", "scontrol ping"),
        ("sbatch", "Socket timed out on send/recv operation", "scontrol ping"),
        ("sbatch", "Batch job submission failed: Timed out", "scontrol ping"),
        ("sbatch", "Connection refused", "scontrol ping"),
        ("sbatch", "Requested node configuration is not available", "--dry-run"),
        ("squeue", "Requested node configuration is not available", "scontrol ping"),
        ("scancel", "Invalid job id specified", "bloomery status"),
    ],
)
def test_who_did_not_reach_slurm_looks_at_its_controller_and_who_was_refused_at_the_recipe(
    command: str, said: str, helps: str
) -> None:
    assert helps in slurm._remedy(command, said)
