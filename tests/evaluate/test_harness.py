"""`lm-eval`, unmodified, scores our checkpoints and their exports equally, and follows a training."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from tests.evaluate.test_saved import exported, run
from tests.interchange.test_generation_files import run_of, their_directory
from tests.train.test_loop import Start, events, go

from bloomery.cli import main
from bloomery.errors import BloomeryError
from bloomery.evaluate.harness import refuse_without_lm_eval, score_tasks, score_with
from bloomery.evaluate.local_tasks import LOCAL_TASKS
from bloomery.evaluate.open_checkpoint import open_saved
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory

__all__ = ["exported", "run"]
HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(
    not HAS_LM_EVAL, reason="lm-eval is not installed: pip install 'bloomery[eval]' (40 packages)"
)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))


@needs_lm_eval
def test_lm_eval_scores_a_checkpoint_and_its_export_equally(run: Path, exported: Path) -> None:
    saved = open_saved(run)
    ours = score_tasks(saved, saved.decoder(device=torch.device("cpu")), LOCAL_TASKS, batch=3)
    theirs = score_with(
        "hf", LOCAL_TASKS, arguments={"pretrained": str(exported), "device": "cpu", "dtype": "float32"}
    )
    assert [score.task for score in ours] == list(LOCAL_TASKS) == [score.task for score in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.samples == other.samples > 0
        assert one.metrics.keys() == other.metrics.keys()
        for name, value in one.metrics.items():
            assert value == pytest.approx(other.metrics[name], rel=1e-5), (one.task, name)


@needs_lm_eval
@pytest.mark.parametrize("adds_bos", [True, False])
def test_requests_of_an_imported_model_have_the_ids_that_lm_eval_gives_the_original(
    tmp_path: Path, adds_bos: bool
) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from bloomery.evaluate.lm_eval_model import SavedModel

    theirs = their_directory(tmp_path / "theirs", adds_bos=adds_bos, settings={})
    saved = open_saved(run_of(theirs, tmp_path))
    ours = SavedModel(saved, saved.decoder(device=torch.device("cpu")))
    original = HFLM(pretrained=str(theirs), device="cpu", dtype="float32")
    assert ours.tok_encode("def main a") == original.tok_encode("def main a")
    assert ours.prefix_token_id == original.prefix_token_id
    pairs = [("def main", " a"), ("", "def main"), ("a", " main def")]
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=n) for n, pair in enumerate(pairs)
    ]
    for one, other in zip(ours.loglikelihood(requests), original.loglikelihood(requests), strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-5) and one[1] == other[1]
    texts = [Instance(request_type="loglikelihood_rolling", doc={}, arguments=("def main a " * 3,), idx=0)]
    assert ours.loglikelihood_rolling(texts) == pytest.approx(original.loglikelihood_rolling(texts), rel=1e-5)
    until = {"until": ["def"], "max_gen_toks": 5, "do_sample": False}
    written = [Instance(request_type="generate_until", doc={}, arguments=("main a", until), idx=0)]
    assert ours.generate_until(written)[0].split() == original.generate_until(written)[0].split()


@needs_lm_eval
def test_following_scores_the_newest_checkpoint_and_the_table_shows_all(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    # A run that stopped at a step goes on one day, and so would following it: its checkpoint is scored once.
    for stop, way in ((8, []), (0, ["--follow"])):
        loaded, path = start("train.samples=80", "checkpoint.every_steps=4", f"guard.stop_at_step={stop}")
        go(loaded, path)
        capsys.readouterr()
        assert main(["evaluate", str(path), "--tasks", "local_pairs", *way]) == 0
        assert "local_pairs" in capsys.readouterr().out
    last = events(path, "step")[-1]["step"]
    records = [record for record in read_journal(RunDirectory(path).evaluations)]
    assert [record["step"] for record in records] == [8, last]
    assert all(0.0 <= score["acc"] <= 1.0 for record in records for score in record["scores"])
    assert main(["evaluate", str(path), "--tasks", "local_pairs", "--follow"]) == 0  # nothing is new
    assert main(["evaluate", str(path), "--table", "--json"]) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [8, last]
    with pytest.raises(BloomeryError, match="There is no task local_pear"):
        saved = open_saved(path)
        score_tasks(saved, saved.decoder(device=torch.device("cpu")), ["local_pear"])


@pytest.mark.skipif(HAS_LM_EVAL, reason="lm-eval is installed")
def test_without_lm_eval_it_says_what_to_install(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BloomeryError, match="not installed"):
        refuse_without_lm_eval()
    assert main(["evaluate", str(run), "--tasks", "local_pairs"]) != 0
    assert "bloomery[eval]" in capsys.readouterr().err
    assert main(["evaluate", str(run), "--table"]) == 0
    assert "has no scores yet" in capsys.readouterr().out
