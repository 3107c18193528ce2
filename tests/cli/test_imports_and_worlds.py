"""What `ckpt import` reads and tells, how many ranks a training has, and how progress is drawn."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cli.test_demo_steps import Recorder
from tests.cli.test_what_data_commands_tell import ROWS

from bloomery.cli import ckpt_export, data_pairs, train
from bloomery.cli.arguments import ProgressLines, data_bar
from bloomery.cli.ckpt import run
from bloomery.errors import CheckpointError, TrainingFailed


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A directory of another program's model, whose reading and writing are replaced."""
    source = tmp_path / "theirs"
    source.mkdir()
    model = SimpleNamespace(family="llama", tokenizer=Path("t.json"))
    monkeypatch.setattr(ckpt_export, "_refuse_no_model", lambda directory: None)
    monkeypatch.setattr(ckpt_export, "_read_model", lambda args: model)
    monkeypatch.setattr(
        ckpt_export, "_write_run", lambda path, found, args, progress: (path / "recipe.toml").write_text("x")
    )
    return SimpleNamespace(source=source, model=model)


def test_an_import_is_published_as_a_whole_and_told_with_what_to_do_next(
    imported: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    target, source = tmp_path / "run", imported.source
    assert run(["import", str(source), str(target)]) == 0
    assert capsys.readouterr().out == (
        f"{target}: llama, from {source}\n"
        f'  try: bloomery generate {target} "Once upon a time"\n'
        f"  train on: bloomery train {target}/continue.toml data.sources=YOUR_TEXT\n"
    )
    assert [path.name for path in target.iterdir()] == ["recipe.toml"]
    with pytest.raises(CheckpointError, match="exists already"):
        run(["import", str(source), str(target)])
    assert run(["import", str(source), "--to", str(tmp_path / "other"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "run": f"{tmp_path}/other", "family": "llama", "from": str(source),
    }  # fmt: skip

    def torn(*given: Any) -> None:
        raise CheckpointError("it is torn")

    monkeypatch.setattr(ckpt_export, "_write_run", torn)
    with pytest.raises(CheckpointError, match="it is torn"):
        run(["import", str(source), str(tmp_path / "third")])
    imported.model.tokenizer = None
    with pytest.raises(CheckpointError, match=r"theirs has no tokenizer\.json and no tokenizer\.model"):
        run(["import", str(source), str(tmp_path / "third")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run", "theirs"]


def test_a_foreign_model_is_read_with_the_recipe_and_the_tokenizer_that_were_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Found:
        tokenizer: Any = "its own"

    asked: list[Any] = []
    foreign = [False]

    def read(path: Path, model: Any, **sizes: int) -> Any:
        asked.append((path, model.layers, sizes))
        return "resolved", "tensors"

    monkeypatch.setattr("bloomery.data.tokenizer_files.tokenizer_in", lambda path: None)
    monkeypatch.setattr(
        "bloomery.data.tokenizer.load_tokenizer",
        lambda path, *, end_of_document: (
            asked.append((path, end_of_document)) or SimpleNamespace(vocabulary_size=777)
        ),
    )
    monkeypatch.setattr("bloomery.interchange.tensor_matching.is_foreign", lambda path: foreign[0])
    monkeypatch.setattr("bloomery.interchange.tensor_matching.read_foreign", read)
    monkeypatch.setattr("bloomery.interchange.huggingface.import_", lambda path: Found())
    monkeypatch.setattr("bloomery.interchange.huggingface.Imported", lambda **given: given)
    given = Namespace(path=tmp_path, tokenizer=None, recipe=None, end_of_document=None)
    assert ckpt_export._read_model(given) == Found(tokenizer=None)
    given.tokenizer = Path("mine.json")
    assert ckpt_export._read_model(given) == Found(tokenizer=Path("mine.json"))
    foreign[0] = True
    for recipe, tokenizer in ((None, Path("mine.json")), ("demo-small", None)):
        given.recipe, given.tokenizer = recipe, tokenizer
        with pytest.raises(CheckpointError, match="describes neither its model nor its tokenizer"):
            ckpt_export._read_model(given)
    given.tokenizer = Path("mine.json")
    found: Any = ckpt_export._read_model(given)
    model = found.pop("model")
    assert model.layers == 4 and found == {
        "resolved": "resolved", "family": "a model", "tensors": "tensors", "tokenizer": Path("mine.json"),
    }  # fmt: skip
    assert asked == [
        (Path("mine.json"), "<|endoftext|>"), (tmp_path, 4, {"vocabulary": 777, "sequence_length": 512}),
    ]  # fmt: skip
    assert given.end_of_document == "<|endoftext|>", "the run's recipe names the same one"
    given.end_of_document = "</s>"
    ckpt_export._read_model(given)
    assert asked[2] == (Path("mine.json"), "</s>")


def test_the_token_that_ends_a_document_is_named_by_the_directory_or_by_hand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts: list[str | None] = ["</s>", None]
    monkeypatch.setattr(
        "bloomery.interchange.described_weights.end_of_document_of", lambda directory: texts.pop(0)
    )
    assert ckpt_export._eos_of(Path("theirs")) == "</s>"
    with pytest.raises(CheckpointError, match=r"theirs/tokenizer_config\.json names no eos_token"):
        ckpt_export._eos_of(Path("theirs"))


def test_the_ranks_of_a_training_are_its_own_or_those_of_its_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import os

    for name in ("RANK", "WORLD_SIZE", "BLOOMERY_HOST", train.LAUNCHER):
        monkeypatch.delenv(name, raising=False)
    variables: list[dict[str, str]] = [{}]
    monkeypatch.setattr("bloomery.operate.launcher.node_name", lambda environment: "n7")
    monkeypatch.setattr("bloomery.operate.launcher.rank_variables", lambda environment: variables[0])
    assert train._world(Namespace(nproc=3)) == 3 and os.environ["BLOOMERY_HOST"] == "n7"
    variables[0] = {"RANK": "2", "WORLD_SIZE": "8"}
    assert train._world(Namespace(nproc=3)) == 3, "this process starts ranks, and is none"
    assert train._world(Namespace(nproc=1)) == 8 and os.environ["RANK"] == "2"
    with pytest.raises(TrainingFailed, match="--nproc 3 would start ranks, and this process is rank 2 of 8"):
        train._world(Namespace(nproc=3))
    monkeypatch.setenv(train.LAUNCHER, "77")
    assert train._world(Namespace(nproc=3)) == 8


def test_progress_is_drawn_on_a_terminal_told_in_lines_elsewhere_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import rich.progress

    from bloomery.events.records import ignore_progress

    with data_bar(shown=False) as progress:
        assert progress is ignore_progress
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with data_bar(shown=True, lines=True) as progress:
        assert isinstance(progress, ProgressLines)
        progress._said = -1e9
        progress("reading", 3, 8, "files")
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "reading: 3 files of 8 files (38%)\n")
    calls: list[Any] = []

    class Bars:
        def __init__(self, *columns: Any, console: Any) -> None:
            assert console.stderr

        def __enter__(self) -> Bars:
            return self

        def __exit__(self, *given: object) -> None: ...

        def add_task(self, stage: str, **given: Any) -> str:
            calls.append(("add", stage, given))
            return f"task {stage}"

        def update(self, task: str, **given: Any) -> None:
            calls.append((task, given))

    monkeypatch.setattr(rich.progress, "Progress", Bars)
    with data_bar(shown=True) as progress:
        progress("reading", 1_500_000, 3_000_000, "bytes")
        progress("reading", 2_000_000, 3_000_000, "bytes", "soon")
        progress("joining", 1_234, 0, "documents")
    assert calls == [
        ("add", "reading", {"total": 3_000_000, "amount": "", "note": ""}),
        ("task reading", {"completed": 1_500_000, "amount": "1.5 MB", "note": ""}),
        ("task reading", {"completed": 2_000_000, "amount": "2.0 MB", "note": "soon"}),
        ("add", "joining", {"total": None, "amount": "", "note": ""}),
        ("task joining", {"completed": 1_234, "amount": "1,234 documents", "note": ""}),
    ]


def test_the_picture_of_a_datas_shares_has_groups_above_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, epochs, rest = list[Any](), list[Any](), list[Any]()
    figure = Recorder(rest)
    pyplot = SimpleNamespace(
        subplots=lambda *given, **options: (figure, (Recorder(shares), Recorder(epochs))), close=figure.close
    )
    module = SimpleNamespace(use=figure.use, pyplot=pyplot)
    monkeypatch.setitem(sys.modules, "matplotlib", module)  # type: ignore[arg-type]
    data_pairs._draw(ROWS[:1], ROWS[1:], Path("x.png"))
    assert shares[0][1] == [0, 1] and shares[0][2] == pytest.approx([30.0, 70.0])
    assert shares[1][1] == pytest.approx([25.0, 75.0]) and shares[1][2] == [0, 1]
    assert ("set_yticklabels", ["n" * 29 + "…", "m" * 30], {"fontsize": 7}) in shares
    assert epochs[0][1:3] == ([0, 1], [1.25, 0.5]) and epochs[1][1] == 1.0
    assert ("savefig", Path("x.png"), {}) in rest and rest[-1][0] == "close"
