"""What `report`, `top` and `status` show of refused files, of odd moments and of full nodes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace as changed
from tests.cli.test_what_reports_tell import LEDGER, PLAN
from tests.cli.test_what_status_tells import GOOD, VIEW
from tests.cli.test_what_views_tell import SUMMARY

from bloomery.cli import report, status, top
from bloomery.errors import StorageError
from bloomery.events.run_directory import RunDirectory
from bloomery.operate.ledger.time_class import TimeClass
from bloomery.operate.node_shm import NodeShm
from bloomery.operate.run_state import RunVerdict


def full(*given: Any, **more: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("option", "place", "told"),
    [
        ("--html", "bloomery.durable.write_whole", "Writing the page failed"),
        ("--png", "bloomery.cli.report.draw_ledger", "Drawing failed"),
    ],
)
def test_a_report_whose_file_cannot_be_written_says_which(
    option: str, place: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    run, file = RunDirectory(tmp_path / "run").create(), tmp_path / f"x.{option[2:]}"
    monkeypatch.setattr(
        "bloomery.operate.ledger.run_ledger.read_ledger", lambda rundir, *, until, bins: LEDGER
    )
    monkeypatch.setattr("bloomery.operate.dashboard.saved_page.saved_page", lambda paths, *, plan: "page")
    monkeypatch.setattr(place, full)
    with pytest.raises(StorageError) as refused:
        report.run([str(run.path), option, str(file)])
    assert refused.value.message.startswith(f"{told} at {file}: No space left on device")
    assert "wrote" not in capsys.readouterr().out


def test_a_report_is_until_a_time_and_tells_no_days_where_nothing_was_kept(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        report.run(["run", "--until", "noon"])
    assert "'noon' is not a time such as 2026-01-31T12:00" in capsys.readouterr().err
    still: Any = SimpleNamespace(
        **vars(LEDGER) | {"history": SimpleNamespace(step=0, kept_steps=0, kept_tokens=0)}
    )
    assert report._figures_text(still, PLAN).rstrip().endswith("at the pace so far: -")


def test_a_run_without_ranks_has_the_time_of_its_classes_too() -> None:
    queued = next(kind for kind in TimeClass if kind is not TimeClass.TRAINING)
    none: Any = SimpleNamespace(
        **vars(LEDGER) | {"ranks": (), "seconds": {queued: 7_200.0}, "total_s": 7_200.0}
    )
    lines = report.report_text(none).splitlines()
    assert [line.split()[-4:] for line in lines if line.startswith("all")] == [["mean", "of", "0", "ranks"]]
    assert any(line.startswith(str(queued)) and "2.0 h" in line for line in lines)


def test_a_sign_of_no_possible_moment_has_a_clock_without_figures() -> None:
    assert [top._clock(moment) for moment in (-1.0, 1e18, float("nan"))] == ["--:--:--"] * 3
    assert top._clock(0.0) != "--:--:--"
    assert top._saved(changed(SUMMARY, written=1e18)).endswith("last sign --:--:--")


def test_the_space_of_dev_shm_is_told_with_the_nodes_and_only_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nodes = (
        NodeShm(host="n1", free_bytes=1 << 29, total_bytes=10 << 30),
        NodeShm(host="n2", free_bytes=6 << 30, total_bytes=8 << 30),
    )
    view = replace(VIEW, verdict=RunVerdict(state=GOOD), jobs=(), shm=nodes)
    monkeypatch.setattr("bloomery.operate.overview.overview", lambda rundir: view)
    monkeypatch.setattr("bloomery.operate.submission.refuse_missing_run", lambda rundir: None)
    monkeypatch.setattr(status, "_nodes", lambda views: [["n1", "idle", "none"]])
    assert status.run([str(tmp_path), "--nodes"]) == 0
    shown = " ".join(word for word in capsys.readouterr().out.split() if "─" not in word)
    name = "a-long-name-of-a-run"
    assert shown.endswith(
        "node run /dev/shm free of GiB used "
        f"n1 {name} 0.50 10.00 95% nearly full: remove what earlier jobs left, or enlarge it "
        f"n2 {name} 6.00 8.00 25%"
    )
    assert status.run([str(tmp_path)]) == 0 and "/dev/shm" not in capsys.readouterr().out
    assert status.run([str(tmp_path), "--nodes", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["runs"][0]["shm"]) == 2
    view = replace(view, shm=())
    assert status.run([str(tmp_path), "--nodes"]) == 0 and "/dev/shm" not in capsys.readouterr().out


def test_a_run_that_has_just_begun_has_figures_of_zero_and_a_loss_that_is_none_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moment = SimpleNamespace(time=lambda: 50.0, strftime=time.strftime, localtime=time.localtime)
    monkeypatch.setattr(status, "time", moment)
    begun = replace(
        VIEW, name="new", verdict=RunVerdict(state=GOOD), done=0.0, step=0, step_s=0.5, left_s=0.0,
        loss="NaN", held_out_loss=0.0, saved=0.0, warnings=(), excluded=(), jobs=(),
    )  # fmt: skip
    (_, row) = (line.split() for line in status._table([begun]).split("\n") if "─" not in line)
    assert " ".join(row) == "new running 0.0% 0.5 0 s NaN 0.0000 50 s ago"
    assert status._page(begun)[1:5] == [
        "  done       step 0, 0.0% of the samples",
        "  speed      0.5 s/step",
        "  time left  0 s",
        "  loss       NaN, held-out 0.0000",
    ]
    assert status._page(replace(begun, loss=0.0))[4] == "  loss       0.0000, held-out 0.0000"
