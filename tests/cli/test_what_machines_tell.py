"""What `preflight`, `guard replay`, `mesh` and `calibrate` print of nodes, logs, layouts and machines."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.cli.test_demo_steps import Recorder
from tests.cli.test_views import REPEATED, STOPPED, TOLD, finding

from bloomery.cli import calibrate, guard, mesh, preflight
from bloomery.config.load import load_recipe
from bloomery.errors import BloomeryError, RankLost, StorageError, TrainingFailed
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.node_checks import NodeFinding
from bloomery.operate.node_facts import GpuFacts, NodeFacts
from bloomery.plan.hardware import dump_hardware, load_hardware

GPU = GpuFacts(**{name: 1 for name in GpuFacts.__dataclass_fields__})
FULL = NodeFacts(
    host="n1", gpus=(GPU, GPU), cores=8, memory_gib=123.44, disk_gb=678.91, shm_share=0.756, clock_s=-1.26,
    teraflops=345.67, all_reduce_gb_per_s=12.345,
)  # fmt: skip


def test_nodes_are_a_table_with_their_findings_below(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = {"n1": FULL, "n2": NodeFacts(host="n2", clock_s=0.5)}
    findings = [
        NodeFinding(host="n1", what="is slow", remedy="Look at it.", is_bad=False),
        NodeFinding(host="n2", what="has no disk", remedy="Buy one.", is_bad=True),
    ]
    preflight._show(nodes, findings, as_json=False)
    lines = [line for line in capsys.readouterr().out.splitlines() if "─" not in line]
    assert [line.split() for line in lines[1:3]] == [
        [
            "n1",
            "346",
            "12.3",
            "2",
            "123.4",
            "678.9",
            "76%",
            "-1.3",
        ],
        ["n2", "0", "-", "0", "0.0", "0.0", "-", "+0.5"],
    ]
    assert " ".join(lines[0].split()) == (
        "node TFLOP/s all-reduce GB/s GPUs memory GiB disk GB /dev/shm free clock s"
    )
    assert lines[3:] == [
        "warning: n1: is slow", "  Look at it.", "left out: n2: has no disk", "  Buy one.", "2 findings",
    ]  # fmt: skip
    preflight._show(nodes, [], as_json=False)
    assert capsys.readouterr().out.splitlines()[-1] == "nothing is wrong"
    preflight._show(nodes, findings, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert list(told["nodes"]) == ["n1", "n2"] and told["nodes"]["n1"]["teraflops"] == 345.67
    assert told["findings"][1] == {"host": "n2", "what": "has no disk", "remedy": "Buy one.", "is_bad": True}


def test_storage_is_measured_with_this_nodes_share_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    times = SimpleNamespace(is_equal=True, bytes_written=6_000_000_000, save_s=4.0, load_s=3.0)
    whole = SimpleNamespace(save_s=(4.44, 13.33), load_s=(3.33, 9.99))

    def forecast(measured: Any, *, total: int, nodes: int) -> Any:
        asked.append(("forecast", measured, total, nodes))
        return whole

    monkeypatch.setattr("bloomery.operate.start_check.checkpoint_bytes", lambda loaded: 17_000_000_001)
    monkeypatch.setattr("bloomery.operate.storage_probe.forecast", forecast)
    monkeypatch.setattr(
        "bloomery.operate.storage_probe.measure_storage",
        lambda place, *, total, writers: asked.append((place, total, writers)) or times,
    )
    monkeypatch.setattr("bloomery.operate.submission.nodes_of", lambda section, parallel: 3)
    monkeypatch.setattr(
        preflight, "require_space", lambda path, *, doing, bytes_needed: asked.append((path, bytes_needed))
    )
    monkeypatch.setattr(preflight, "host_name", lambda: "n1")
    rundir, loaded = RunDirectory(tmp_path), load_recipe("demo")

    def measure(*, nodes: int = 1, json: bool = False, **options: Any) -> None:
        asked.clear()
        given = {"gigabytes": None, "nproc": None, **options}
        preflight._storage(rundir, loaded, Namespace(json=json, **given), nodes=nodes)

    measure()
    place = tmp_path / "preflight" / f"storage-n1@{os.getpid()}"
    third = 5_666_666_667  # rounded up
    assert asked == [
        (tmp_path, third), (place, third, 2), ("forecast", [times], 17_000_000_001, 3),
    ]  # fmt: skip
    assert capsys.readouterr().out == (
        "n1: 6.00 GB saved in 4.00 s (1.50 GB/s), read in 3.00 s (2.00 GB/s)\n"
        "a checkpoint of 17.00 GB from 3 nodes: saved in 4.4 s if the path of each node is the limit, "
        "13.3 s if\nwhat all share is; read in 3.3 s or 10.0 s\n"
    )
    killed, others = (tmp_path / "preflight" / name for name in ("storage-n1@1", "storage-n1-b@1"))
    for left in (killed, others):
        left.mkdir(parents=True)
        os.utime(left, (0.0, 0.0))
    measure(nodes=5, gigabytes=1.5, nproc=4, json=True)
    assert asked[1:] == [(place, 1_500_000_000, 4), ("forecast", [times], 17_000_000_001, 5)]
    assert others.exists() and not killed.exists()
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("n1: 6.00 GB saved")
    times.is_equal = False
    with pytest.raises(TrainingFailed, match="is not what was written"):
        measure()


def test_each_node_of_a_step_waits_for_the_facts_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, group, now = RunDirectory(tmp_path), SimpleNamespace(nodes=3), [1_000.0]
    context: Any = SimpleNamespace(name="job-7")
    monkeypatch.setattr("bloomery.operate.launcher.node_group", lambda environment: None)
    monkeypatch.setattr("bloomery.operate.job_context.job_context", lambda environment: context)
    assert preflight._of_all_nodes(rundir, FULL) == {"n1": FULL}
    monkeypatch.setattr("bloomery.operate.launcher.node_group", lambda environment: group)
    monkeypatch.setattr("bloomery.operate.job_context.job_context", lambda environment: None)
    assert preflight._of_all_nodes(rundir, FULL) == {"n1": FULL} and not list(tmp_path.iterdir())
    monkeypatch.setattr("bloomery.operate.job_context.job_context", lambda environment: context)
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def arrives(seconds: float) -> None:
        now[0] += seconds
        if 1_001.0 < now[0] < 1_002.0:
            for host in ("n10", "n2"):
                path = tmp_path / "preflight" / "job-7" / f"{host}.json"
                path.write_text(json.dumps(NodeFacts(host=host).to_json()))

    monkeypatch.setattr("time.sleep", arrives)
    found = preflight._of_all_nodes(rundir, FULL)
    assert list(found) == ["n1", "n2", "n10"] and found["n1"] == FULL
    assert now[0] == pytest.approx(1_001.0), "it looks five times a second"
    group.nodes, now[0] = 5, 1_002.0
    with pytest.raises(RankLost, match=r"2 of 5 nodes said nothing for 300 s; these did: n1, n10, n2\."):
        preflight._of_all_nodes(rundir, FULL)


def test_nodes_are_judged_by_the_room_for_checkpoints_and_the_gpus_of_the_recipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("bloomery.operate.start_check.checkpoint_bytes", lambda loaded: 2_500_000_000)
    monkeypatch.setattr(
        "bloomery.operate.node_checks.judge_nodes",
        lambda nodes, *, disk_gb, gpus, environment: asked.append((nodes, disk_gb, gpus, environment)) or [],
    )
    settings = ["checkpoint.keep_last=3", "submit.gpus_per_node=8", "environment.variables=['A_B=1']"]
    assert preflight._findings({"n1": FULL}, load_recipe("demo", settings)) == []
    assert asked == [({"n1": FULL}, 10.0, 8, {"A_B": "1"})]


def test_a_queue_is_told_who_may_start_and_one_that_does_not_answer_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    loaded, rundir = load_recipe("demo"), RunDirectory(tmp_path)
    answer: list[Any] = [["71", "72"]]

    def exclude(scheduler: Any, rundir: Any, *, name: str, section: Any, nodes: Any) -> Any:
        asked.append((scheduler, name, nodes))
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    monkeypatch.setattr("bloomery.operate.exclusions.exclude_in_queue", exclude)
    monkeypatch.setattr("bloomery.operate.submission.scheduler_of", lambda section, path: f"at {path}")
    held: Any = SimpleNamespace(nodes=lambda: {"n9", "n2"})

    def told(*, as_json: bool = False) -> Any:
        preflight._tell_queue(rundir, loaded, held, Namespace(json=as_json))
        return capsys.readouterr()

    assert told().out == "71, 72 may start there\n"
    assert told(as_json=True).err == "71, 72 may start there\n"
    assert asked[0] == (f"at {tmp_path}", "demo", ["n2", "n9"])
    answer[0] = []
    assert told().out == ""
    answer[0] = BloomeryError("no answer")
    assert told().out == "the queue could not be told: no answer\n"


class Columns:
    """The columns of a log of some steps."""

    def __init__(self, *losses: float) -> None:
        self.loss = np.array(losses)
        self.step = np.arange(1_001, 1_001 + len(losses))

    def __len__(self) -> int:
        return len(self.loss)


def replayed(monkeypatch: pytest.MonkeyPatch, columns: Columns, findings: list[Any]) -> None:
    monkeypatch.setattr("bloomery.guard.logs.read_columns", lambda path, **options: columns)
    monkeypatch.setattr("bloomery.guard.replay.replay_columns", lambda columns, section: findings)


def test_a_replay_shows_200_findings_and_tells_of_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        guard, "draw_replay",
        lambda columns, findings, path, *, title: drawn.append((len(findings), path, title)),
    )  # fmt: skip
    log, picture = tmp_path / "a.log", tmp_path / "x.png"
    for count, more in ((200, []), (1_201, ["  … and 1,001 more: --json has all of them"])):
        replayed(monkeypatch, Columns(*[1.0] * 1_500), [TOLD] * count)
        assert guard.run(["replay", str(log), "--png", str(picture)]) == 0
        assert capsys.readouterr().out.splitlines() == [
            f"1,500 lines, steps 1,001 to 2,500: {count} told",
            *["  step 1,200 | spike | would tell (fast spike): it rose"] * 200, *more,
            f"Drawn into {picture}.",
        ]  # fmt: skip
    assert drawn == [(200, picture, "a.log"), (1_201, picture, "a.log")]
    assert guard.run(["replay", str(log), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 1_201 and len(drawn) == 2


def test_a_growing_log_is_read_when_it_has_grown_and_each_finding_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, drawn, read, pauses, now = tmp_path / "a.log", list[Any](), list[Any](), list[float](), [1_000.0]
    log.write_text("x")
    other = finding(STOPPED.verdict)
    found: list[Any] = [TOLD]
    columns = Columns(1.0)

    class Reader:
        def __init__(self, path: Path) -> None:
            self.path = path

        def columns(self, *, may_be_empty: bool) -> Columns:
            read.append((self.path, may_be_empty))
            now[0] += 0.25 if len(read) == 1 else 5.0
            return columns

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            found.append(other)
            log.write_text("xx")
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("bloomery.guard.logs.LogReader", Reader)
    judged: list[int] = []
    monkeypatch.setattr(
        "bloomery.guard.replay.replay_columns",
        lambda columns, section: judged.append(section.spike_patience) or list(found),
    )
    monkeypatch.setattr(guard, "draw_replay", lambda *given, title: drawn.append((given[2], title)))
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.sleep", sleep)
    other = type(other)(guard="loss", line=4, step=1_201, verdict=other.verdict)
    words = ["--follow", "--png", str(tmp_path / "x.png"), "guard.spike_patience=33"]
    assert guard.run(["replay", str(log), *words]) == 0 and judged == [33, 33]
    assert capsys.readouterr().out.splitlines() == [
        "  step 1,200 | spike | would tell (fast spike): it rose",
        "  step 1,201 | loss | would stop: it is over",
    ]
    assert read == [(log, True)] * 2 and pauses == [2.0, 2.0, 15.0]
    assert drawn == [(tmp_path / "x.png", "a.log")] * 2
    pauses[:] = [0.0, 0.0]
    assert guard.run(["replay", str(log), "--follow", "--json"]) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["step"], one["guard"], one["action"]) for one in told] == [
        (1_200, "spike", "watch"), (1_201, "loss", "stop"),
    ]  # fmt: skip
    with pytest.raises(StorageError, match=r"none\.log cannot be read: No such file"):
        guard.run(["replay", str(tmp_path / "none.log"), "--follow"])
    columns.loss, pauses[:] = columns.loss[:0], [0.0, 0.0]
    monkeypatch.setattr("bloomery.guard.replay.replay_columns", None)
    assert guard.run(["replay", str(log), "--follow"]) == 0, "an empty log is judged when it has a line"


def test_the_picture_of_a_replay_has_the_losses_and_the_first_findings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    drawing = Recorder(calls)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(use=drawing.use, pyplot=drawing))
    monkeypatch.setattr(guard, "BINS", 2)
    monkeypatch.setattr(guard, "MOST_MARKS", 3)
    columns: Any = Columns(5.0, float("nan"), 4.0, 6.0, 3.0, 2.0)
    findings = [TOLD, TOLD, finding(REPEATED), STOPPED]
    guard.draw_replay(columns, findings, Path("x.png"), title="a.log")
    (filled,) = [call for call in calls if call[0] == "fill_between"]
    assert [list(part) for part in filled[1:4]] == [[1_001, 1_005], [4.0, 2.0], [6.0, 3.0]]
    (line,) = [call for call in calls if call[0] == "plot"]
    assert [list(part) for part in line[1:3]] == [[1_001, 1_005], [5.0, 3.0]]
    marks = [(call[1], call[2]["label"], call[2]["color"]) for call in calls if call[0] == "axvline"]
    assert marks == [(1_200, "told", "#e87f3a"), (1_200, None, "#e87f3a"), (1_200, "rewind", "#c1292e")]
    assert ("set", {"xlabel": "step", "ylabel": "loss", "title": "a.log"}) in calls
    assert ("savefig", Path("x.png"), {}) in calls and calls[-1][0] == "close"
    calls.clear()
    few: Any = Columns(5.0, 4.0)
    guard.draw_replay(few, [STOPPED], Path("x.png"), title="a.log")
    assert not [call for call in calls if call[0] == "fill_between"]
    assert [call[2]["label"] for call in calls if call[0] == "axvline"] == ["stop"]


def test_ranks_are_shown_by_node_with_how_far_each_axis_reaches(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.ranks_per_node=auto", "optim.name=adamw"]
    assert mesh.run(["demo", *words, "--world", "4", "--nodes", "a,b", "parallel.data=1", "--stages"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line and "─" not in line]
    assert lines[0] == "demo: 4 ranks on 2 nodes, pipeline 2 × data 1 × tensor 2"
    assert [line.split()[0] for line in lines[1:3]] == ["tensor", "pipeline"]
    assert [line.split() for line in lines[3:6]] == [
        ["node", "ranks", "pipeline", "data", "tensor"], ["a", "0–1", "0", "0", "0,", "1"],
        ["b", "2–3", "1", "0", "0,", "1"],
    ]  # fmt: skip
    assert lines[6].endswith(" parameters in 2 stages")
    heads = ["stage", "pipeline", "blocks", "parameters", "weights", "a", "rank", "masters", "a", "rank"]
    assert lines[7].split() == heads
    stages = [line.split() for line in lines[8:]]
    assert [stage[:2] for stage in stages] == [["0", "0"], ["1", "1"]]
    counts = [[int(cell.replace(",", "")) for cell in stage[-3:]] for stage in stages]
    assert sum(count[0] for count in counts) == int(lines[6].split()[0].replace(",", ""))
    for parameters, weights, masters in counts:
        assert parameters / 2 <= weights < parameters and masters == weights
    parts = ["parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2", "optim.name=adamw"]
    assert mesh.run(["demo", *parts, "--world", "2", "parallel.data=1", "--stages"]) == 0
    stages = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[-4:]]
    assert stages == [["0", "0"], ["1", "1"], ["2", "0"], ["3", "1"]], "each rank has two stages"
    assert mesh.run(["demo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "demo: 1 rank on 1 node, pipeline 1 × data 1 × tensor 1"
    assert lines[-1].split() == ["node-1", "0", "0", "0", "0"]


def test_a_layout_that_cannot_train_its_batch_is_shown_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train.global_batch=12", "train.micro_batch=4", "optim.name=adamw", "train.ramp_up=[]"]
    assert mesh.run(["demo", *words, "--world", "2"]) == 0
    assert "\nthis layout cannot train: train.global_batch: " in capsys.readouterr().out


def test_a_machine_is_measured_in_a_process_of_its_own_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.cli.train import MALLOC, PREPARED

    executed: list[Any] = []
    target, disk = tmp_path / "mine.toml", tmp_path / "disk"
    disk.mkdir()
    words = ["--to", str(target), "--disk", str(disk)]
    monkeypatch.setenv("MALLOC_TOP_PAD_", "5")
    monkeypatch.delenv(PREPARED, raising=False)
    monkeypatch.setattr("os.execve", lambda *given: executed.append(given))
    hardware = load_hardware("a100-80g")
    measured: list[Any] = []

    def measure(disk: Path, *, say: Any) -> Any:
        say("the disk")
        measured.append(disk)
        return hardware

    monkeypatch.setitem(sys.modules, "bloomery.calibrate.machine", SimpleNamespace(measure_machine=measure))  # type: ignore[arg-type]
    assert calibrate.run(words) == 0
    ((program, command, environment),) = executed
    assert program == sys.executable and command[1:] == ["-m", "bloomery", "calibrate", *words]
    assert environment["MALLOC_TOP_PAD_"] == "5" and environment[PREPARED] == "1"
    assert environment.items() >= {(name, MALLOC[name]) for name in MALLOC if name != "MALLOC_TOP_PAD_"}
    capsys.readouterr()
    monkeypatch.setenv(PREPARED, "1")
    assert calibrate.run(words) == 0 and len(executed) == 1
    shown = capsys.readouterr()
    assert shown.out == f"wrote {target}: bloomery plan RECIPE --hardware {target}\n"
    assert shown.err == "measuring the disk …\n" and measured == [disk] * 2
    assert target.read_text(encoding="utf-8") == dump_hardware(hardware)
    assert calibrate.run([*words, "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out)
    assert (told["wrote"], told["name"], shown.err) == (str(target), "a100-80g", "")
    for closed in (disk, tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr("os.access", lambda path, rights, closed=closed: path != closed)
            with pytest.raises(StorageError, match=f"^{closed} cannot be written"):
                calibrate.run(words)
    for wrong in (["--disk", str(tmp_path / "none")], ["--to", str(tmp_path / "none" / "x.toml")]):
        with pytest.raises(StorageError, match="none cannot be written"):
            calibrate.run([*words, *wrong])
