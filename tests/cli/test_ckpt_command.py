import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bloomery.checkpoint.format.catalogue import remote_copies
from bloomery.checkpoint.format.state import whole
from bloomery.checkpoint.remote.backup_duty import Duty, write_duty
from bloomery.checkpoint.remote.transfer import download_checkpoint
from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import ckpt_copy, ckpt_list
from bloomery.cli.ckpt import run
from bloomery.cli.tables import table_text
from bloomery.errors import CheckpointError, RunBusy, UsageError
from bloomery.events.incarnation import begin
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import lock_run


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    """Return a run of two incarnations: steps 10 and 20, of which 20 was abandoned, then 15."""
    rundir = RunDirectory(tmp_path / "run").create()
    entries = [whole("model.a", torch.randn(30, 30)), whole("optim.a", torch.randn(30, 30))]
    first = begin(rundir, base=None, reason="start")
    for step in (10, 20):
        about = {"consumed_tokens": step * 1_000_000}
        save_checkpoint(rundir.checkpoints, entries, step=step, incarnation=first, about=about)
    second = begin(rundir, base=(10, first), reason="rewind")
    save_checkpoint(rundir.checkpoints, entries, step=15, incarnation=second)
    return rundir


def damage(rundir: RunDirectory) -> None:
    path = next((rundir.checkpoints / "step-000010.i001").glob("optim-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_list_shows_the_runs_checkpoints_in_a_narrow_table(rundir: RunDirectory, capsys):
    assert run(["list", str(rundir.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(lines.pop(1)) == {"─"}
    assert [line.split()[0] for line in lines] == ["step", "10", "15"]
    assert "10,000,000" in lines[1] and "  complete" in lines[1]
    assert max(map(len, lines)) <= 100


def test_figures_in_the_list_are_whole_whatever_a_checkpoint_is_kept_for():
    row = {"step": 20, "incarnation": 1, "time": 0.0, "bytes": 450_100, "tokens": 10_240, "loss": 5.5402}
    row |= {"held_out_loss": 5.5408, "abandoned": False, "state": "complete", "backup_what": "weights"}
    row |= {"kept": ["last 3", "tenth 10", "for a rewind", "newest intact", "best"]}
    cells = ckpt_list._cells(row)
    shown = table_text([ckpt_list._COLUMNS, cells], wrap=False).splitlines()[-1]
    assert len(shown) <= 100 and all(cell in shown for cell in cells[:-1])


def test_the_list_can_show_what_was_abandoned_and_check_everything(rundir: RunDirectory, capsys):
    damage(rundir)
    assert run(["list", str(rundir.path), "--all", "--verify"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "damaged" in lines[2] and "verified" in lines[3] and "abandoned" in lines[4]
    assert max(map(len, lines)) <= 100


def test_tenths_of_a_peers_run_are_of_the_steps_that_it_makes_itself(rundir: RunDirectory, capsys):
    elastic = "keep_last = 1\n[elastic]\ninner_steps = 5\npeers = 2\n"
    rundir.recipe.write_text(RECIPE.replace("keep_last = 1\nkeep_tenths = false\n", elastic))
    assert run(["list", str(rundir.path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["kept"][:1] for row in rows] == [["tenth 5"], ["last 1"]]  # 10 and 15 of 20 steps, not of 40


def test_the_list_is_there_for_programs(rundir: RunDirectory, capsys):
    assert run(["list", str(rundir.path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["step"], row["incarnation"]) for row in rows] == [(10, 1), (15, 2)]
    assert rows[0]["tokens"] == 10_000_000 and rows[0]["bytes"] > 7200


def test_verify_says_what_is_damaged_and_fails(rundir: RunDirectory, capsys):
    assert run(["verify", str(rundir.path)]) == 0
    damage(rundir)
    assert run(["list", str(rundir.path), "--verify"]) == 1 and run(["list", str(rundir.path)]) == 0
    assert "damaged" in capsys.readouterr().out
    assert run(["verify", str(rundir.path)]) == 1
    told = capsys.readouterr().out
    assert "optim-r00000-of-00001-000.safetensors at byte 0" in told and "optim.a" in told
    assert run(["verify", str(rundir.checkpoints / "step-000015.i002"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problems"] == []


def test_show_describes_the_newest_or_the_one_given(rundir: RunDirectory, capsys):
    assert run(["show", str(rundir.path)]) == 0
    assert "step 15, incarnation 2" in capsys.readouterr().out
    assert run(["show", str(rundir.checkpoints / "step-000010.i001"), "--tensors"]) == 0
    told = capsys.readouterr().out
    assert "consumed_tokens: 10000000" in told and "model.a  float32 [30, 30]" in told
    assert run(["show", str(rundir.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["step"] == 15 and shown["parts"]["optim"]["bytes"] == 3600


def test_a_run_without_checkpoints_and_a_wrong_path_are_told_apart(tmp_path: Path, capsys):
    rundir = RunDirectory(tmp_path / "new").create()
    assert run(["list", str(rundir.path)]) == 0
    assert "no checkpoints yet" in capsys.readouterr().out
    for part in (["show"], ["verify"], ["verify", "--json"]):
        with pytest.raises(CheckpointError, match="no checkpoints yet"):
            run([*part, str(rundir.path)])
    (tmp_path / "another bucket").mkdir()
    with pytest.raises(CheckpointError, match="nothing was verified"):
        run(["verify", f"file://{tmp_path}/another bucket"])
    with pytest.raises(CheckpointError, match="neither a run directory nor a checkpoint"):
        run(["list", str(tmp_path / "nothing")])


def test_without_a_known_part_the_command_explains_itself(capsys):
    assert run(["--help"]) == 0
    assert "verify" in capsys.readouterr().out
    assert run(["lst"]) == 2
    assert "list" in capsys.readouterr().err


def test_looking_at_checkpoints_does_not_load_torch(rundir: RunDirectory):
    code = (
        "import sys; from bloomery.cli.ckpt import run\n"
        f"run(['list', {str(rundir.path)!r}, '--verify']); run(['show', {str(rundir.path)!r}])\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


RECIPE = """
[run]
name = "small"
[model]
layers = 1
hidden = 16
heads = 2
[train]
steps = 40
global_batch = 1
[data]
sequence_length = 8
[optim]
learning_rate = 1e-3
[guard]
corruption_steps = 0
spike = false
not_finite_losses = 0
refused_updates = 0
[checkpoint]
keep_last = 1
keep_tenths = false
"""


def test_diff_tells_tensors_and_elements_apart(rundir: RunDirectory, tmp_path: Path, capsys):
    older, newer = (str(rundir.checkpoints / name) for name in ("step-000010.i001", "step-000015.i002"))
    assert run(["diff", older, older, "--contents"]) == 0
    assert "nothing differs" in capsys.readouterr().out
    assert run(["diff", older, newer, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["about"]["step"] == [10, 15] and told["shape or type"] == {}
    tensor = torch.arange(6.0).reshape(2, 3)
    one = save_checkpoint(tmp_path / "a", [whole("model.a", tensor)], step=1, incarnation=1)
    changed = [whole("model.a", tensor + torch.eye(2, 3) / 4), whole("model.b", tensor)]
    other = save_checkpoint(tmp_path / "b", changed, step=1, incarnation=1)
    assert run(["diff", str(one), str(other), "--contents", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["only in other"] == ["model.b"] and told["elements"] == {"model.a": 0.25}


def test_prune_says_what_would_go_and_removes_it_when_asked(rundir: RunDirectory, capsys):
    with pytest.raises(CheckpointError, match=r"no recipe\.toml"):
        run(["prune", str(rundir.path)])
    rundir.recipe.write_text(RECIPE)
    assert run(["prune", str(rundir.path), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "step-000010.i001  would be removed" in told and "step-000015.i002  kept: last 1" in told
    assert len(list(rundir.checkpoints.iterdir())) == 3
    assert run(["prune", str(rundir.path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["checkpoint"], row["removed"]) for row in rows] == [
        ("step-000010.i001", True),
        ("step-000015.i002", False),
        ("step-000020.i001", False),
    ], "what was abandoned stays until the run has passed it"


def test_a_run_that_is_being_trained_is_not_pruned(rundir: RunDirectory):
    rundir.recipe.write_text(RECIPE)
    with lock_run(rundir):
        assert run(["prune", str(rundir.path), "--dry-run"]) == 0
        with pytest.raises(RunBusy, match="is being trained by process"):
            run(["prune", str(rundir.path)])
    assert len(list(rundir.checkpoints.iterdir())) == 3


def test_a_run_is_held_while_its_checkpoints_are_pruned(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []

    def while_a_trainer_starts(directory: Path) -> None:
        with pytest.raises(RunBusy) as busy:
            lock_run(rundir)
        refused.append(busy.value.message)

    rundir.recipe.write_text(RECIPE)
    monkeypatch.setattr(ckpt_list, "remove_kept", while_a_trainer_starts)
    assert run(["prune", str(rundir.path)]) == 0
    assert [f"is being pruned by process {os.getpid()}" in message for message in refused] == [True]
    with lock_run(rundir):
        pass


def test_the_help_of_prune_names_all_objects_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["prune", "--help"])
    assert "and one for each upload that was cut short" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["list", "prune", "backup"])
def test_a_checkpoint_in_the_place_of_its_run_is_told_as_one(command: str, rundir: RunDirectory):
    with pytest.raises(CheckpointError, match=r"i002 is a checkpoint, and a run is wanted here") as refused:
        run([command, str(rundir.checkpoints / "step-000015.i002")])
    assert refused.value.remedy == f"Give its run: {rundir.path}."


def test_a_copy_goes_to_a_url_and_comes_back_as_a_run(rundir: RunDirectory, tmp_path: Path, capsys):
    rundir.recipe.write_text(RECIPE)
    url = f"file://{tmp_path}/elsewhere"
    assert run(["copy", str(rundir.path), url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["to"].endswith("checkpoints/step-000015.i002") and told["bytes_sent"] == told["bytes"]
    assert run(["list", str(rundir.path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [bool(row["backup"]) for row in rows] == [False, True]
    assert run(["list", url]) == 0 and run(["verify", url]) == 0 and run(["show", url]) == 0
    assert "intact" in capsys.readouterr().out
    back = tmp_path / "back"
    back.mkdir()
    assert run(["copy", url, str(back)]) == 0
    assert "verified" in capsys.readouterr().out
    assert run(["diff", str(rundir.path), str(back), "--contents"]) == 0
    assert (back / "recipe.toml").read_text() == RECIPE
    assert {path.name for path in (back / "incarnations").iterdir()} == {"000001.json", "000002.json"}
    with pytest.raises(UsageError, match="must be a URL"):
        run(["copy", str(rundir.path), str(back)])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo").touch()
    with pytest.raises(CheckpointError, match="neither a run directory nor a checkpoint"):
        run(["copy", url, str(tmp_path / "notes")])
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["todo"]
    assert run(["copy", str(rundir.checkpoints / "step-000010.i001"), f"{url}-2", "--what", "model"]) == 0
    assert run(["list", str(rundir.path)]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert "weights" in first and "yes" in second


def test_what_does_not_belong_into_a_checkpoint_is_noticed_by_its_size(rundir: RunDirectory, capsys):
    (rundir.checkpoints / "step-000015.i002" / "core.dump").write_bytes(bytes(9000))
    assert run(["list", str(rundir.path)]) == 0
    told = capsys.readouterr().out
    assert "step 15 takes 225%" in told and "step 10 takes" not in told


def test_a_run_that_others_may_not_write_is_copied_and_stays_as_it_is(
    rundir: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = sorted(rundir.path.rglob("*"))
    monkeypatch.setattr("os.access", lambda path, rights: not Path(path).is_relative_to(rundir.path))
    assert run(["copy", str(rundir.path), (tmp_path / "away").as_uri()]) == 0
    assert sorted(rundir.path.rglob("*")) == files
    assert (tmp_path / "away" / "checkpoints" / "step-000015.i002" / "manifest.json").exists()


def test_a_copy_into_a_run_holds_it_so_that_no_trainer_sweeps_what_is_not_whole_yet(
    rundir: RunDirectory, tmp_path: Path, monkeypatch
):
    rundir.recipe.write_text(RECIPE)
    url, back = f"file://{tmp_path}/elsewhere", RunDirectory(tmp_path / "back")
    assert run(["copy", str(rundir.path), url]) == 0
    refused: list[RunBusy] = []

    def while_a_trainer_starts(*given, **named):
        with pytest.raises(RunBusy) as busy:
            lock_run(back)
        refused.append(busy.value)
        return download_checkpoint(*given, **named)

    monkeypatch.setattr(ckpt_copy, "download_checkpoint", while_a_trainer_starts)
    assert run(["copy", url, str(back.path)]) == 0
    (told,) = refused
    assert f"is being restored by process {os.getpid()}" in told.message and "Ctrl-C" in told.remedy
    with lock_run(back):
        pass


def test_a_copy_into_a_run_that_is_being_trained_is_refused(rundir: RunDirectory, tmp_path: Path):
    rundir.recipe.write_text(RECIPE)
    url = f"file://{tmp_path}/elsewhere"
    assert run(["copy", str(rundir.path), url]) == 0
    with lock_run(rundir), pytest.raises(RunBusy, match="is being trained by process"):
        run(["copy", url, str(rundir.path)])


def test_a_backup_by_hand_goes_where_the_recipe_says_also_while_the_run_trains(
    rundir: RunDirectory, tmp_path: Path, capsys
):
    with pytest.raises(CheckpointError, match=r"no recipe\.toml"):
        run(["backup", str(rundir.path)])
    rundir.recipe.write_text(RECIPE)
    with pytest.raises(CheckpointError, match="names no place"):
        run(["backup", str(rundir.path)])
    rundir.recipe.write_text(RECIPE + f'\n[backup]\nurl = "file://{tmp_path}/elsewhere"\n')
    with lock_run(rundir):
        assert run(["backup", str(rundir.path), "--json"]) == 0
    sent = json.loads(capsys.readouterr().out)
    assert sent["to"].endswith("checkpoints/step-000015.i002") and sent["bytes_sent"] == sent["bytes"] > 0
    assert set(remote_copies(rundir)) == {"step-000015.i002"}
    assert run(["verify", sent["to"]]) == 0 == run(["verify", f"{sent['to']}/"])
    assert run(["backup", str(rundir.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["bytes_sent"] == 0


def test_a_backup_of_a_peer_by_hand_goes_beside_those_of_the_other_peers(
    rundir: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir.recipe.write_text(RECIPE + f'\n[backup]\nurl = "file://{tmp_path}/elsewhere"\n')
    write_duty(rundir, Duty(peer="north", writes=True, covered=-1))
    assert run(["backup", str(rundir.path), "--json"]) == 0
    sent = json.loads(capsys.readouterr().out)
    assert sent["to"] == f"file://{tmp_path}/elsewhere/small/north/checkpoints/step-000015.i002"
