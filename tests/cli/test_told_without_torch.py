"""What is wrong with the run, the model or the target is told before torch is loaded, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bloomery.config.load import dump_recipe, load_recipe

SAVED = "run/checkpoints/step-000001.i001"

MISTAKES = [
    (("generate", "text", "hi"), "is neither a run directory nor a checkpoint"),
    (("generate", "begun", "hi"), "has no checkpoints yet"),
    (("generate", SAVED, "hi", "--system", "x"), "--system wants --chat"),
    (("generate", "bare/checkpoints/step-000001.i001", "hi"), "there is no bare/recipe.toml"),
    (("generate", "forgetful/checkpoints/step-000001.i001", "hi"), "no longer holds the tokenizer"),
    (("evaluate", "text"), "is neither a run directory nor a checkpoint"),
    (("evaluate", SAVED, "none.txt"), "There is no file none.txt"),
    (("evaluate", SAVED, "--shots", "3"), "--shots wants --tasks"),
    (("evaluate", SAVED, "--tasks", ""), "--tasks names no task"),
    (("ckpt", "export", "text", "new"), "is neither a run directory nor a checkpoint"),
    (("ckpt", "export", SAVED, "text"), "text exists already"),
    (("ckpt", "import", "nowhere", "new"), "nowhere is not a directory"),
    (("ckpt", "import", "text", "new"), "text has no config.json"),
    (("ckpt", "import", "strange", "new"), "model_type 'gpt9' is none of"),
    (("ckpt", "import", "broken", "new"), "is not JSON in UTF-8"),
    (("ckpt", "import", "strange", "text"), "text exists already"),
    (("ckpt", "slim", "nowhere", "new"), "nowhere does not exist"),
    (("ckpt", "slim", "text", "new"), "is neither a run directory nor a checkpoint"),
    (("ckpt", "slim", "text/a.txt", "text"), "text exists already"),
]

PROGRAM = """
import contextlib, io, json, sys
from bloomery.cli import main
said = []
for words in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code
    heavy = sorted({"torch", "transformers"} & set(sys.modules))
    said.append([status, err.getvalue(), heavy])
print(json.dumps(said))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Runs, directories and models that a person might name by mistake."""
    recipe = dump_recipe(load_recipe("demo", ["data.sources=text"]).recipe)
    for run in ("begun", "run", "bare", "forgetful"):
        (tmp_path / run / "incarnations").mkdir(parents=True)
        (tmp_path / run / "data").mkdir()
        if run != "bare":
            (tmp_path / run / "recipe.toml").write_text(recipe)
        if run != "begun":
            (tmp_path / run / "checkpoints" / "step-000001.i001").mkdir(parents=True)
            (tmp_path / run / "checkpoints" / "step-000001.i001" / "manifest.json").write_text("{}")
    (tmp_path / "run" / "data" / "tokenizer.json").write_text("{}")
    for name, config in (("strange", '{"model_type": "gpt9"}'), ("broken", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("Once upon a time. ")
    return tmp_path


def test_it_is_told_without_torch_and_nothing_is_left(place: Path) -> None:
    before = sorted(place.rglob("*"))
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([words for words, _ in MISTAKES])],
        cwd=place,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    for (words, told), (status, said, heavy) in zip(MISTAKES, json.loads(ended.stdout), strict=True):
        assert status in (1, 2), words
        assert told in " ".join(said.split()), (words, said)
        assert not heavy, words
    assert sorted(place.rglob("*")) == before
