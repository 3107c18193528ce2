import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bloomery.checkpoint.save import save_checkpoint
from bloomery.checkpoint.state import whole
from bloomery.cli.ckpt import run
from bloomery.errors import CheckpointError
from bloomery.events.incarnation import begin
from bloomery.events.rundir import RunDir


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """Return a run of two incarnations: steps 10 and 20, of which 20 was abandoned, then 15."""
    rundir = RunDir(tmp_path / "run").create()
    entries = [whole("model.a", torch.randn(30, 30)), whole("optim.a", torch.randn(30, 30))]
    first = begin(rundir, base=None, reason="start")
    for step in (10, 20):
        about = {"consumed_tokens": step * 1_000_000}
        save_checkpoint(rundir.checkpoints, entries, step=step, incarnation=first, about=about)
    second = begin(rundir, base=(10, first), reason="rewind")
    save_checkpoint(rundir.checkpoints, entries, step=15, incarnation=second)
    return rundir


def damage(rundir: RunDir) -> None:
    path = next((rundir.checkpoints / "step-000010.i001").glob("optim-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_list_shows_the_runs_checkpoints_in_a_narrow_table(rundir: RunDir, capsys):
    assert run(["list", str(rundir.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step", "10", "15"]
    assert "10,000,000" in lines[1] and lines[1].endswith("complete")
    assert max(map(len, lines)) <= 100


def test_the_list_can_show_what_was_abandoned_and_check_everything(rundir: RunDir, capsys):
    damage(rundir)
    assert run(["list", str(rundir.path), "--all", "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "damaged" in lines[1] and "verified" in lines[2] and "abandoned, verified" in lines[3]
    assert max(map(len, lines)) <= 100


def test_the_list_is_there_for_programs(rundir: RunDir, capsys):
    assert run(["list", str(rundir.path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], row["incarnation"]) for row in rows] == [(10, 1), (15, 2)]
    assert rows[0]["tokens"] == 10_000_000 and rows[0]["bytes"] > 7200


def test_verify_says_what_is_damaged_and_fails(rundir: RunDir, capsys):
    assert run(["verify", str(rundir.path)]) == 0
    damage(rundir)
    assert run(["verify", str(rundir.path)]) == 1
    told = capsys.readouterr().out
    assert "optim-r00000-of-00001-000.safetensors at byte 0" in told and "optim.a" in told
    assert run(["verify", str(rundir.checkpoints / "step-000015.i002"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_show_describes_the_newest_or_the_one_given(rundir: RunDir, capsys):
    assert run(["show", str(rundir.path)]) == 0
    assert "step 15, incarnation 2" in capsys.readouterr().out
    assert run(["show", str(rundir.checkpoints / "step-000010.i001"), "--tensors"]) == 0
    told = capsys.readouterr().out
    assert "consumed_tokens: 10000000" in told and "model.a  float32 [30, 30]" in told
    assert run(["show", str(rundir.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == 15 and shown["parts"]["optim"]["bytes"] == 3600


def test_a_run_without_checkpoints_and_a_wrong_path_are_told_apart(tmp_path: Path, capsys):
    rundir = RunDir(tmp_path / "new").create()
    assert run(["list", str(rundir.path)]) == 0
    assert "no checkpoints yet" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="no checkpoints yet"):
        run(["show", str(rundir.path)])
    with pytest.raises(CheckpointError, match="neither a run directory nor a checkpoint"):
        run(["list", str(tmp_path / "nothing")])


def test_without_a_known_part_the_command_explains_itself(capsys):
    assert run(["--help"]) == 0
    assert "verify" in capsys.readouterr().out
    assert run(["lst"]) == 2
    assert "list" in capsys.readouterr().err


def test_looking_at_checkpoints_does_not_load_torch(rundir: RunDir):
    code = (
        "import sys; from bloomery.cli.ckpt import run\n"
        f"run(['list', {str(rundir.path)!r}, '--verify']); run(['show', {str(rundir.path)!r}])\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
