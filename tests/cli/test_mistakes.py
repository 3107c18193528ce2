"""More than eighty mistakes of users: each is told in a clear message, with a status that is not 0."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.in_process import status_of

from bloomery.agent import assemble
from bloomery.cli import main
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.errors import ConfigError

TEXT, SMALL = "data.sources=text", ("model.layers=1", "model.hidden=32", "model.heads=2", "run.name=mine")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what people have lying about."""
    place = tmp_path_factory.mktemp("mistakes")
    (place / "text").mkdir()
    (place / "text" / "a.txt").write_text("Once upon a time. " * 50)
    (place / "empty").mkdir()
    (place / "notes").mkdir()
    (place / "notes" / "todo").write_text("no run")
    (place / "bad.toml").write_text('[run]\nname = "x"\n[model\n')
    (place / "typo.toml").write_text("[modle]\nlayers = 2\n")
    (place / "flat.toml").write_text("name = 3\n")
    (place / "twice.toml").write_text('[run]\nname = "x"\nname = "y"\n')
    (place / "published").mkdir()
    (place / "published" / "config.json").write_text('{"model_type": "strange"}')
    (place / "half").mkdir()
    (place / "half" / "x.idx").write_bytes(b"")
    (place / "chat.jsonl").write_text('{"prompt": "2+2?", "answer": "4"}\n' * 3)
    (place / "begun" / "incarnations").mkdir(parents=True)
    (place / "begun" / "checkpoints" / "step-000001.i001").mkdir(parents=True)
    (place / "begun" / "recipe.toml").write_text(dump_recipe(load_recipe("demo", [TEXT]).recipe))
    return place


TRAIN = [
    (("dmo",), "Did you mean 'demo'?"),
    (("nofile.toml",), "there is no such file"),
    (("bad.toml",), "bad.toml:3"),
    (("typo.toml",), "Did you mean [model]?"),
    (("notes",), "is a directory without recipe.toml, so it is no run"),
    (("mine",), "Give your own recipe as a path that ends in .toml"),
    (("flat.toml",), "stands in no section"),
    (("twice.toml",), "a key stands once in its table"),
    (("text/a.txt",), "This is not TOML"),
    (("demo", "lr=1e-3"), "is not a setting"),
    (("demo", "train.tokens=1e"), "must be an integer"),
    (("demo", "train.steps=1e3"), "Write 1_000, without a point or an exponent"),
    (("demo", "optim.learning_rate=0"), "must be above 0"),
    (("demo", "run.name=my run"), "cannot name a directory"),
    (("demo", "--nproc", "two"), "is not a whole number of at least 1"),
    (("demo", "data.sources=https://example.org/a.txt"), "Bring it here first: `bloomery data fetch`"),
    (("demo", TEXT, "data.prompt_field=p", "data.order=megatron"), "needs data.sources and data.order"),
    (("demo", TEXT, "data.packing=documents"), "Set data.mask_documents = true with it"),
    (("demo", "log.trackers=wnadb"), "Did you mean 'wandb'?"),
    (("runs/none",), "there is no such file"),
    (("demo", "train.global_batch"), "Write section.key=value"),
    (("demo", "trian.steps=5"), "Did you mean [train]?"),
    (("demo", "train.stepz=5"), "Did you mean train.steps?"),
    (("demo", "train.steps=many"), "must be an integer"),
    (("demo", "train.steps=-5"), "must be at least 0"),
    (("demo", "model.heads=3"), "does not divide model.hidden = 256"),
    (("demo", "optim.learning_rate=1,5"), "must be a number"),
    (("demo", "optim.name=adam"), "Did you mean 'adamw'?"),
    (("demo", "train.precision=fp64"), "It takes 'auto', 'bf16', 'fp32', 'fp16', 'fp8'"),
    (("demo", "train.micro_batch=3"), "The nearest batch that is divisible"),
    (("demo", "parallel.tensor=2"), "Set parallel.tensor = 1, or optim.name = 'adamw'"),
    (("demo", "run.name=../x"), "cannot name a directory"),
    (("demo", "log.form=pretty"), "It takes 'short', 'full', 'json'"),
    (("demo", "checkpoint.every_steps=-1"), "must be at least 0"),
    (("demo", "data.tokenizer_vocabulary=10"), "must be at least 257"),
    (("demo", "schedule.warmup=1e9"), "schedule.warmup"),
    (("demo", "--nproc", "3"), "is not divisible by"),
    (("demo", "--nproc", "0"), "is not a whole number of at least 1"),
    (("demo", "--steps", "5"), "unrecognized arguments"),
    (("demo", "data.sources=nofile.txt"), "does not exist (looked for"),
    (("demo", "data.sources=python:stdlb"), "does not exist (looked for"),
    (("demo", "data.sources=empty"), "holds no text file"),
    (("demo", "data.sources=half"), "A .bin/.idx pair is tokens already"),
    (("demo", "data.sources=[]"), "data.sources"),
    (("demo", "data.sources=text,bad.toml"), "Several sources are a list: data.sources="),
    (("demo", 'data.sources=["text" "half"]'), "Several sources are a list with commas"),
    (("demo", TEXT, "data.tokenizer=nofile.json"), "Cannot read the tokenizer nofile.json"),
    (("demo", TEXT, "data.tokenizer=gpt2"), "A name on Hugging Face is written hf:gpt2"),
    (("demo", TEXT, "data.held_out_datasets=[{name='h', path='no/pair'}]"), "Cannot read no/pair.idx"),
    (("demo", "data.sources=[]", "data.datasets=[{name='d', path='half/x'}]"), "data.tokenizer = 'train'"),
    (("demo", "init.from=nowhere"), "there is no such directory"),
    (("demo", "init.from=notes"), "is neither a run nor a checkpoint of ours"),
    (("demo", "init.from=published"), "model_type 'strange' is none of"),
    (("demo", TEXT, "--run", "bad.toml"), "cannot be made: bad.toml is a file"),
    (("demo", TEXT, "--run", "bad.toml/below/it"), "bad.toml is a file"),
    (
        ("demo", "data.sources=chat.jsonl"),
        "no field 'text' (data.text_field); its fields are 'answer', 'prompt'",
    ),
    (("demo", "data.sources=chat.jsonl", "data.text_field=answer", "data.prompt_field=q"), "no field 'q'"),
    (("demo", "data.sources=chat.jsonl", "data.bad_documents=fail"), "chat.jsonl:1: no field 'text'"),
    (("demo", TEXT, "data.tokenizer=flat.toml"), "neither JSON nor a model of SentencePiece"),
    (("begun", TEXT, "model.layers=3"), "the run was started with 7, and this setting is fixed"),
    (("demo", TEXT, "--run", "begun", "run.seed=7"), "and this setting is fixed"),
    (("begun/checkpoints/step-000001.i001",), "Go on with its run: begun"),
    (("demo", "train.steps=100000000000000000000"), "must be at most 1_000_000_000_000_000"),
    (("demo", f"optim.learning_rate=1{'0' * 400}"), "must be a finite number"),
    (("demo", f"train.steps=1{'0' * 5000}"), "must be an integer"),
    (("demo", "train.steps", "=", "5"), "without blanks"),
]

OTHERS = [
    (("trian", "demo"), "Did you mean `bloomery train`?"),
    (("ckpt", "lst"), "Did you mean `bloomery ckpt list`?"),
    (("ckpt", "list", "runs/none"), "is neither a run directory nor a checkpoint"),
    (("ckpt", "verify", "notes"), "is neither a run directory nor a checkpoint"),
    (("drill", "nothing"), "there is no recipe of this name"),
    (("drill", "demo", "optim.lr=3"), "there is no such setting"),
    (
        ("drill", "demo", "data.sources=none.txt", "--nproc", "1", "--faults", "kill"),
        "does not exist (looked for",
    ),
    (("drill", "demo", "--nproc", "3", "--faults", "kill"), "is not divisible by micro-batch 4"),
    (("generate", "runs/none"), "is neither a run directory nor a checkpoint"),
    (("generate", "runs/none", "--temperature", "-1"), "is not a temperature"),
    (("evaluate", "notes"), "is neither a run directory nor a checkpoint"),
    (("config", "show", "nothing"), "there is no recipe of this name"),
    (("plan", "demo", "run.hardware=cray"), "`bloomery calibrate` measures this machine"),
    (("plot", "runs/none"), "does not exist"),
    (("plot", "notes", "--against", "epochs"), "choose from"),
    (("generate", "text/a.txt"), "is neither a run directory nor a checkpoint"),
    (("generate", "runs/none", "--max-tokens", "-3"), "is not a whole number of at least 1"),
    (("generate", "runs/none", "--top-p", "3"), "is not above 0 and at most 1"),
    (("generate", "runs/none", "--top-p", "half"), "'half' is not above 0 and at most 1"),
    (("dashboard", "notes", "--plan", "bad.toml"), "Write one: bloomery plan RECIPE --json"),
    (("dashboard", "notes", "--host", "0.0.0.0"), "so the page needs a token and TLS"),
    (("ckpt", "copy", "notes", "notes"), "must be a URL"),
    (("guard", "replay", "text/a.txt"), "holds no line of a training"),
    (("mesh", "demo", "parallel.tensor=3"), "does not divide"),
    (("submit", "demo", "submit.scheduler=pbs"), "It takes 'auto', 'slurm'"),
    (("demo", "--minutes", "0"), "is not a number of minutes above 0"),
    (("coordinate", "--port", "9"), "unrecognized arguments"),
    (("plot", "notes", "--output", "x.doc"), "ends in none of"),
    (("report", "runs/none"), "does not exist"),
    (("stop", "runs/none"), "There is no run in runs/none"),
    (("skip", "notes", "--samples", "5:2"), "is not FIRST:END with FIRST below END"),
    (("rewind", "runs/none", "--to-step", "1"), "is neither a run directory nor a checkpoint"),
    (("dashboard", "notes", "--port", "99999"), "is no port: 0 to 65535"),
    (("watch", "runs/none"), "does not exist"),
    (("note", "runs/none", "hello"), "does not exist"),
    (("cancel", "runs/none"), "There is no run in runs/none"),
    (("data", "inspect", "nofile"), "Cannot read nofile.idx"),
    (("data", "tokenize", "text", "--tokenizer", "nofile.json", "--out", "x"), "nofile.json"),
    (("guard", "replay", "nofile.log"), "cannot be read"),
    (("data", "tokenizer", "text", "--vocabulary", "100", "--to", "x"), "of at least 257"),
    (("simulate", "nothing"), "there is no such scenario"),
    (("simulate", "llama3-405b", "run.days=-4"), "must be above 0"),
]


@pytest.mark.parametrize(
    ("words", "told"),
    [(("train", *words), told) for words, told in TRAIN] + OTHERS,
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_a_mistake_is_told_and_costs_nothing(
    words: tuple[str, ...],
    told: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def started(*given: object) -> None:
        raise AssertionError("the training was started")

    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "execve", started)
    before = sorted(place.rglob("*"))
    status = status_of(*words)
    said = capsys.readouterr()
    assert status != 0
    assert told in " ".join(said.err.split()), said.err
    assert "Traceback" not in said.err
    assert sorted(place.rglob("*")) == before  # nothing was made, nothing lost


def test_what_is_missing_or_wrong_is_told_without_torch(place: Path) -> None:
    settings = [list(words) for words, _ in TRAIN if words[-1] != "init.from=published"]
    program = (
        "import sys, os; from bloomery.cli import main; os.execve = None\n"
        f"for words in {settings}:\n"
        "    try: assert main(['train', *words]) in (1, 2), words\n"
        "    except SystemExit as ended: assert ended.code == 2, words\n"
        "    assert not {'torch', 'transformers'} & set(sys.modules), words\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=place, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]


def test_a_tracker_without_its_package_is_told_before_the_training_starts(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delattr(os, "execve")  # which starts it
    assert main(["train", "demo", TEXT, "log.trackers=wandb"]) == 1
    assert "log.trackers names wandb, which is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--supervise",)])
@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (("demo", "data.sources=nofile.txt"), 1, "does not exist (looked for"),
        (("demo", TEXT, "--run", "bad.toml"), 1, "cannot be made: bad.toml is a file"),
        (("demo", TEXT, "--run", "begun", "run.seed=7"), 2, "and this setting is fixed"),
    ],
)
def test_a_launcher_refuses_what_its_ranks_would_before_it_starts_one(
    words: tuple[str, ...],
    more: tuple[str, ...],
    status: int,
    told: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Started(subprocess.Popen):
        def __init__(self, *given: object, **named: object) -> None:
            raise AssertionError("a rank was started")

    monkeypatch.chdir(place)
    monkeypatch.setattr(subprocess, "Popen", Started)
    before = sorted(place.rglob("*"))
    assert main(["launch", *words, "--nproc", "1", *more]) == status
    said = capsys.readouterr().err
    assert " ".join(said.split()).count(told) == 1
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize("more", [(), ("--supervise",)])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("data.sources=nofile.txt",), "does not exist (looked for"),
        ((TEXT, "--run", "bad.toml"), "cannot be made: bad.toml is a file"),
    ],
)
def test_a_peer_refuses_missing_data_before_others_hear_of_it(
    words: tuple[str, ...],
    more: tuple[str, ...],
    told: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def joined(*_: object) -> None:
        raise AssertionError("it asked the coordinator")

    monkeypatch.chdir(place)
    monkeypatch.setattr(assemble, "assemble_agent", joined)
    before = sorted(place.rglob("*"))
    between = ("elastic.inner_steps=3", "elastic.coordinator=http://127.0.0.1:2379")
    assert main(["peer", "demo", *between, *words, *more]) == 1
    assert " ".join(capsys.readouterr().err.split()).count(told) == 1
    assert sorted(place.rglob("*")) == before


def test_a_setting_that_is_given_twice_is_told() -> None:
    loaded = load_recipe("demo", ["train.steps=5", "run.seed=1", "train.steps=6", "run.seed=1"])
    assert loaded.recipe.train.steps == 6 and loaded.recipe.run.seed == 1
    (twice,) = [note for note in loaded.notes if "times" in note]
    assert twice == "train.steps is given 2 times on the command line; the last counts: 6"


def test_the_password_of_a_url_is_told_neither_in_a_note_nor_in_a_mistake() -> None:
    loaded = load_recipe("demo", ["checkpoint.url=s3://a/b", "checkpoint.url=s3://user:secret@host/x"])
    (twice,) = [note for note in loaded.notes if "times" in note]
    assert twice.endswith("the last counts: s3://***@host/x")
    with pytest.raises(ConfigError) as refused:
        load_recipe("demo", ["checkpoint.ulr=s3://user:secret@host/x"])
    assert "'s3://***@host/x'" in str(refused.value) and "secret" not in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        load_recipe("demo", ["data.surces=['s3://user:secret@host/x', 'notes.txt']"])
    assert "s3://***@host/x" in str(refused.value) and "secret" not in str(refused.value)


def test_a_field_that_no_document_has_is_named_with_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bloomery.data.prepare import prepare
    from bloomery.errors import DataError

    (tmp_path / "wrong.jsonl").write_text('{"texte": "hello", "id": 1}\n')
    loaded = load_recipe("demo", [f"data.sources={tmp_path / 'wrong.jsonl'}"])
    with pytest.raises(DataError) as refused:
        prepare(loaded.recipe.data, tmp_path / "data")
    assert "'text'" in refused.value.message and "'id', 'texte'" in refused.value.message
    assert "data.text_field" in (refused.value.remedy or "")
