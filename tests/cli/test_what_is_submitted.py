"""What of a recipe goes into its jobs, and what is refused before a rehearsal of it is made."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.test_what_status_tells import Submitted

from bloomery.cli import submit
from bloomery.errors import BloomeryError
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import arm


def test_what_weights_say_of_their_model_goes_into_the_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Submitted(monkeypatch)
    monkeypatch.setattr(
        "bloomery.cli.arguments.settings_from_weights",
        lambda recipe, overrides: [f"model.layers={len(overrides)}"],
    )
    words = ["demo", "submit.tasks=5", "--keep-queued", "2", "--run", str(tmp_path / "run")]
    assert submit.run(words) == 0
    _, submission, loaded, _ = seen.asked.pop()
    assert submission.overrides == ("submit.tasks=5", "submit.keep_queued=2", "model.layers=2")
    assert loaded.recipe.model.layers == 2


def test_a_run_of_several_peers_is_refused_before_it_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, made = Submitted(monkeypatch), list[object]()
    monkeypatch.setattr(
        "bloomery.operate.rehearsal.rehearsal_of", lambda recipe, **_: made.append(recipe) or ()
    )
    with pytest.raises(BloomeryError, match="peer"):
        submit.run(["diloco-internet", "--rehearse", "--dry-run"])
    assert not made and not seen.asked


def test_the_script_of_a_stopped_run_is_shown_though_no_job_of_it_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, rundir = Submitted(monkeypatch), RunDirectory(tmp_path / "run").create()
    arm(rundir.control("stop"))
    assert submit.run(["demo", "--run", str(rundir.path), "--dry-run"]) == 0
    assert capsys.readouterr().out == "script for 1\n"
    with pytest.raises(BloomeryError, match="is armed"):
        submit.run(["demo", "--run", str(rundir.path)])
    assert not seen.asked


def test_a_job_that_starts_asks_the_scheduler_of_its_run_wherever_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Submitted(monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert submit.run(["demo", "submit.tasks=5", "--keep-queued", "2", "--run", "mine"]) == 0
    assert submit.run(["--top-up", "mine"]) == 0
    asked = [(section.tasks, section.keep_queued, place) for section, place in seen.schedulers]
    assert asked == [(5, 2, tmp_path / "mine")] * 2
    assert [call[3] for call in seen.asked] == [RunDirectory(Path("mine"))] * 2


def test_what_was_submitted_gives_way_to_the_command_line_and_to_a_shipped_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bloomery.operate.submission import Submission, keep_submission

    seen = Submitted(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "demo"):
        kept = Submission(recipe="demo", overrides=("submit.tasks=5",), directory="/", nproc=3)
        keep_submission(RunDirectory(Path(name)).create(), kept)
    taken = []
    for words in (["mine"], ["mine", "submit.tasks=6", "--nproc", "4", "--run", "other"], ["demo"]):
        assert submit.run([*words, "--keep-queued", "2"]) == 0
        _, submission, loaded, rundir = seen.asked.pop()
        taken.append((loaded.recipe.submit.tasks, submission.nproc, rundir.path))
    assert taken == [(5, 3, Path("mine")), (6, 4, Path("other")), (1, None, Path("runs/demo"))]


@pytest.mark.parametrize("how", ["a setting", "the environment"])
def test_the_certificates_of_a_peer_name_it_and_are_found_from_wherever_its_jobs_start(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    from bloomery.coordination.certificates import init_certificates

    monkeypatch.chdir(tmp_path)
    for name in ("BLOOMERY_PEER", "BLOOMERY_COORDINATOR", "BLOOMERY_CERTIFICATES"):
        monkeypatch.delenv(name, raising=False)
    init_certificates(Path("c"), run="diloco-internet", peers=["oslo"])
    given = ["elastic.coordinator=https://10.0.0.9:2379"]
    if how == "a setting":
        given.append("elastic.certificates=c/diloco-internet/oslo")
    else:
        monkeypatch.setenv("BLOOMERY_CERTIFICATES", "c/diloco-internet/oslo")
    bundle = f"elastic.certificates={tmp_path}/c/diloco-internet/oslo"
    assert submit._peer_settings("diloco-internet", given) == ["elastic.peer=oslo", bundle]
    assert submit._peer_settings("demo", given) == []


def test_a_run_that_a_switch_of_its_group_stops_is_neither_made_nor_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, run = Submitted(monkeypatch), tmp_path / "run"
    arm(tmp_path / "group" / "stop")
    for words in ([], ["--keep-queued", "2"]):
        with pytest.raises(BloomeryError, match="group/stop is armed"):
            submit.run(["demo", f"control.directory={tmp_path}/group", "--run", str(run), *words])
    assert not run.exists() and not seen.asked
