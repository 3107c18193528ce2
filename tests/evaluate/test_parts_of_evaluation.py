"""What commands that evaluate hand to lm-eval, to the decoder and to the files of a run."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.evaluate.lm_eval_stand_in import OURS, StandIn, put_in_place
from tests.evaluate.test_generate import GREEDY, small
from tests.evaluate.test_lm_eval_requests import PREFIX, model_of

from bloomery.config.model import ModelSection
from bloomery.errors import BloomeryError, CheckpointError
from bloomery.evaluate import generate as generate_module
from bloomery.evaluate import harness, open_checkpoint, saved_files, task_texts
from bloomery.evaluate.generate import Sampling, generate, generate_together
from bloomery.evaluate.local_tasks import LOCAL_TASKS, local_task
from bloomery.evaluate.open_checkpoint import (
    OpenedModel,
    blocks_from_file,
    free_memory_bytes,
    must_load_by_block,
    open_model,
    open_saved,
)
from bloomery.evaluate.saved_files import SavedFiles, find_saved
from bloomery.events.run_directory import RunDirectory
from bloomery.model.shape import logical_shapes, resolve

CPU = torch.device("cpu")


@pytest.fixture
def package() -> Iterator[StandIn]:
    stand_in, before = put_in_place()
    yield stand_in
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def test_our_tasks_are_scored_by_what_their_names_say() -> None:
    found = {name: local_task(name) for name in LOCAL_TASKS}
    documents = {name: task.pop("custom_dataset") for name, task in found.items()}
    assert {name: (part.func.__name__, part.args) for name, part in documents.items()} == {
        name: ("_documents", (name,)) for name in LOCAL_TASKS
    }
    usual = {"test_split": "test", "metadata": {"version": 1.0}}
    mean = {"aggregation": "mean", "higher_is_better": True}
    assert found == {
        "local_pairs": {
            **usual,
            "task": "local_pairs",
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{right}}",
            "target_delimiter": " ",
            "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
        },
        "local_last_word": {
            **usual,
            "task": "local_last_word",
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.rsplit(' ', 1)[0]}}",
            "doc_to_target": "{{' ' + text.rsplit(' ', 1)[1]}}",
            "target_delimiter": "",
            "metric_list": [
                {"metric": "acc", **mean},
                {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
            ],
        },
        "local_texts": {
            **usual,
            "task": "local_texts",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [
                {
                    "metric": "word_perplexity",
                    "aggregation": "weighted_perplexity",
                    "higher_is_better": False,
                },
                {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False},
            ],
        },
    }


def test_documents_of_our_tasks_are_the_lines_of_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = SimpleNamespace(Dataset=SimpleNamespace(from_list=lambda rows: rows))
    monkeypatch.setitem(sys.modules, "datasets", listed)
    for name in LOCAL_TASKS:
        lines = (Path(harness.__file__).parent / "tasks" / f"{name}.jsonl").read_text().splitlines()
        found = local_task(name)["custom_dataset"](split="test")
        assert found == {"test": [json.loads(line) for line in lines]}


def test_a_checkpoint_is_scored_as_a_model_with_the_batch_and_all_that_is_asked(
    package: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(harness, "refuse_without_lm_eval", lambda: given.append("looked"))
    monkeypatch.setattr(harness, "score_with", lambda *told, **more: given.append((told, more)) or "scores")
    module = importlib.import_module(OURS)
    monkeypatch.setattr(module, "SavedModel", lambda *told, **more: (told, more))
    asked: dict[str, Any] = {"limit": 5, "shots": 3, "include": Path("/more")}
    assert harness.score_tasks("saved", "decoder", ["arc"], batch=7, window=64, **asked) == "scores"  # type: ignore[arg-type,comparison-overlap]
    model = (("saved", "decoder"), {"batch": 7, "window": 64})
    assert given == ["looked", ((model, ["arc"]), asked)]


def test_what_a_request_leaves_out_of_its_settings_is_greedy_and_of_256_tokens(package: StandIn) -> None:
    model = model_of(package, small())
    model._saved.model.max_positions = 1000
    given: list[Any] = []
    module = importlib.import_module(OURS)
    module.generate_together = lambda decoder, openings, **told: given.append((openings, told)) or []
    for settings in (
        {},
        {"temperature": 0.7, "top_k": 3},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "max_gen_toks": 9},
        {"do_sample": True, "top_k": None, "top_p": None, "until": None},
    ):
        assert model._continued("3 4", settings) == ""
    assert model._continued("", {}) == ""
    samplings = [told["sampling"] for _, told in given]
    assert samplings == [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, top_k=3),
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=3, top_p=0.9),
        Sampling(temperature=1.0),
        Sampling(temperature=0.0),
    ]
    assert [told["max_new_tokens"] for _, told in given] == [256, 256, 256, 9, 256, 256]
    assert [openings for openings, _ in given] == [[[3, 4]]] * 5 + [[[PREFIX]]]
    assert given[0][1]["ends"] == model._saved.bounds.ends


def test_texts_of_lm_evals_tasks_come_by_task_also_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(*documents: str) -> Any:
        return SimpleNamespace(
            eval_docs=documents,
            doc_to_text=lambda document: document,
            doc_to_target=lambda document: "right",
            config=SimpleNamespace(doc_to_choice=None, target_delimiter=": "),
        )

    loaded = {"group": {"easy": task("a", "b"), "hard": task("c")}, "one": {"one": task("d")}}
    manager = SimpleNamespace(load=lambda names: {"tasks": loaded[names[0]]})
    asked: list[Any] = []
    monkeypatch.setattr(task_texts, "refuse_without_lm_eval", lambda: asked.append("looked"))
    monkeypatch.setattr(task_texts, "known_tasks", lambda *told: asked.append(told) or manager)
    found = task_texts.task_texts(["group", "local_pairs", "one"], include=Path("/more"))
    assert asked == ["looked", (["group", "one"], Path("/more"))]
    assert list(found) == ["local_pairs", "easy", "hard", "one"]
    assert (found["easy"], found["hard"], found["one"]) == (
        ["a: right", "b: right"],
        ["c: right"],
        ["d: right"],
    )

    def refuse(names: list[str]) -> Any:
        raise OSError("no network")

    manager.load = refuse
    with pytest.raises(
        BloomeryError, match="documents of the task one could not be had: no network"
    ) as refused:
        task_texts.task_texts(["one"])
    for advice in (
        "where the Hub can be reached (HF_HOME keeps",
        "JSON lines and name the file in --against",
    ):
        assert advice in refused.value.remedy


def test_as_many_tokens_as_a_model_has_positions_are_drawn() -> None:
    decoder = small("learned")
    assert len(list(generate(decoder, [0, 1, 2], max_new_tokens=6, sampling=GREEDY, ends=()))) == 6
    with pytest.raises(BloomeryError, match="Prompt and new tokens are 9, but the model has 8"):
        generate_together(decoder, [[1], [0, 1, 2]], max_new_tokens=7, sampling=GREEDY, ends=())


def test_the_free_memory_of_a_cpu_is_what_its_control_group_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = small()
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 40))
    for allowed, counts in ((None, 1 << 40), (1 << 50, 1 << 40), (2000, 2000)):
        monkeypatch.setattr(open_checkpoint, "available_memory_bytes", lambda allowed=allowed: allowed)
        assert free_memory_bytes(CPU) == counts
    assert must_load_by_block(decoder.model, device=CPU, dtype=torch.float32)
    with pytest.raises(BloomeryError, match="tokens take"):
        generate_together(decoder, [[1, 2]], max_new_tokens=7, sampling=GREEDY, ends=())


def test_the_free_memory_is_that_of_the_device_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, gpu = small(), torch.device("cuda", 1)
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (2560, 10**12))
    weight = SimpleNamespace(device=gpu, dtype=torch.float32)
    there: Any = SimpleNamespace(head_weight=weight, blocks=decoder.blocks)
    generate_module._refuse_too_large(there, 10, texts=1)  # 2 tensors × 2 blocks × 16 channels × 4 bytes
    with pytest.raises(BloomeryError, match="1 × 11 tokens take") as refused:
        generate_module._refuse_too_large(there, 11, texts=1)
    assert "fewer new tokens (--max-tokens), or for fewer texts at a time (--batch)" in refused.value.remedy
    model = decoder.model
    numbers = sum(parameter.numel() for parameter in decoder.parameters())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (5 * numbers, 0))
    assert not must_load_by_block(model, device=gpu, dtype=torch.float32)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * numbers - 1, 10**12))
    assert must_load_by_block(model, device=gpu, dtype=torch.float32)
    assert asked == [gpu] * 3


def test_a_model_is_what_the_files_of_its_run_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load_tokenizer", "resolve", "text_bounds"):
        answer = SimpleNamespace(vocabulary_size=300, eod=9) if name == "load_tokenizer" else None
        monkeypatch.setattr(
            open_checkpoint,
            name,
            lambda *told, name=name, answer=answer, **more: (
                calls.append((name, told, more)) or answer or name
            ),
        )
    monkeypatch.setattr(open_checkpoint, "generation_files_of", lambda rundir: ("files of", rundir))
    calls: list[Any] = []
    data = SimpleNamespace(end_of_document_token="<end>", sequence_length=32)
    recipe: Any = SimpleNamespace(data=data, model="model section")
    rundir = RunDirectory(Path("run"))
    files = SavedFiles(checkpoint=Path("c"), rundir=rundir, recipe=recipe, tokenizer=Path("t.json"))
    opened = open_model(files)
    assert calls == [
        ("load_tokenizer", (Path("t.json"),), {"end_of_document": "<end>"}),
        ("resolve", ("model section",), {"vocabulary": 300, "sequence_length": 32}),
        ("text_bounds", (("files of", rundir),), {"end_of_document": 9}),
    ]
    assert (opened.checkpoint, opened.recipe, opened.tokenizer_path) == (Path("c"), recipe, Path("t.json"))
    assert (opened.model, opened.bounds, opened.tokenizer.eod) == ("resolve", "text_bounds", 9)
    monkeypatch.setattr(open_checkpoint, "find_saved", lambda path, *, fallback: (path, fallback))
    monkeypatch.setattr(open_checkpoint, "open_model", lambda found: found)
    assert open_saved(Path("run"), fallback=True) == (Path("run"), True)
    assert open_saved(Path("run")) == (Path("run"), False)


@pytest.mark.parametrize("by_layer", [True, False])
def test_weights_are_loaded_at_once_or_by_block(by_layer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def noted(name: str) -> Any:
        return lambda *told, **more: calls.append((name, told, more)) or name

    for name in ("blocks_from_file", "Decoder", "fill", "read_model"):
        monkeypatch.setattr(open_checkpoint, name, noted(name))
    usual: dict[str, Any] = dict.fromkeys(OpenedModel.__dataclass_fields__)
    opened = OpenedModel(**usual | {"model": "shape", "checkpoint": "c"})
    kind = {"device": CPU, "dtype": torch.bfloat16}
    found = opened.decoder(by_layer=by_layer, **kind)  # type: ignore[arg-type]
    if by_layer:
        assert found == "blocks_from_file" and calls == [("blocks_from_file", ("shape", "c"), kind)]
    else:
        assert found == "Decoder"  # type: ignore[comparison-overlap]
        assert calls == [
            ("Decoder", ("shape",), kind),
            ("read_model", ("c",), {}),
            ("fill", ("Decoder", "read_model"), {}),
        ]


def test_a_block_reads_its_own_weights_alone_when_it_computes_and_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = ModelSection(layers=11, hidden=8, heads=2)
    model = resolve(section, vocabulary=32, sequence_length=16)
    shapes, reads = logical_shapes(model), list[list[str]]()

    def read(checkpoint: Path, *, names: list[str]) -> Any:
        reads.append(names)
        return ((name, torch.full(shapes[name], 0.01)) for name in names)

    monkeypatch.setattr(open_checkpoint, "read_model", read)
    decoder = blocks_from_file(model, Path("c"), device=CPU, dtype=torch.bfloat16)
    outside = reads.pop()
    assert not reads and outside and not any(name.startswith("blocks.") for name in outside)
    with torch.inference_mode():
        assert decoder(torch.arange(6)[None]).dtype == torch.bfloat16
    owners = [{name.split(".")[1] for name in names} for names in reads]
    assert owners == [{str(index)} for index in range(11)], "the tenth block is not one of the first's"
    assert sorted(sum(reads, outside)) == sorted(shapes)
    assert all(part.is_meta for block in decoder.blocks for part in block.parameters())


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    rundir = RunDirectory(tmp_path / "run").create()
    rundir.recipe.write_text("")
    return rundir


def test_the_newest_checkpoint_that_is_trusted_is_taken_or_the_newest_intact_one(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = [SimpleNamespace(directory=run.checkpoints / name) for name in ("older", "newer", "suspect")]
    monkeypatch.setattr(saved_files, "checkpoints", lambda rundir: tuple(saved))
    monkeypatch.setattr(saved_files, "trusted", lambda items: items[:2])
    monkeypatch.setattr(saved_files, "newest_trusted", lambda items: items[1] if len(items) > 1 else None)
    monkeypatch.setattr(saved_files, "newest_intact", lambda items: items[0] if len(items) == 2 else None)
    assert saved_files._newest_of(run.path, fallback=False) == run.checkpoints / "newer"
    assert saved_files._newest_of(run.path, fallback=True) == run.checkpoints / "older"
    del saved[:2]
    with pytest.raises(CheckpointError, match=f"No checkpoint of {run.path} is intact"):
        saved_files._newest_of(run.path, fallback=False)
    saved.clear()
    with pytest.raises(CheckpointError, match="has no checkpoints yet") as early:
        saved_files._newest_of(run.path, fallback=True)
    assert "Let `bloomery train` run on" in early.value.remedy
    with pytest.raises(CheckpointError, match="is neither a run directory nor a checkpoint") as other:
        saved_files._newest_of(run.path / "data", fallback=False)
    assert "Give the directory of a run (runs/NAME)" in other.value.remedy


def test_a_checkpoint_is_found_with_the_recipe_and_the_tokenizer_of_its_run(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = SimpleNamespace(data=SimpleNamespace(tokenizer="org/name"), run=SimpleNamespace(offline=False))
    own: list[Path | None] = [Path("own.json"), None]
    monkeypatch.setattr(saved_files, "load_recipe", lambda path: SimpleNamespace(recipe=recipe))
    monkeypatch.setattr(saved_files, "tokenizer_in", lambda data: {run.data: own}[data].pop(0))
    monkeypatch.setattr(
        saved_files, "find_tokenizer", lambda name, may_fetch: Path(f"found {name} {may_fetch}")
    )
    checkpoint = run.checkpoints / "step-000005.i001"
    checkpoint.mkdir()
    with pytest.raises(CheckpointError, match=f"{checkpoint} is neither a run directory nor a checkpoint"):
        find_saved(checkpoint)
    (checkpoint / saved_files.MANIFEST).write_text("{}")
    usual: dict[str, Any] = {"checkpoint": checkpoint, "rundir": run, "recipe": recipe}
    assert find_saved(checkpoint) == SavedFiles(**usual, tokenizer=Path("own.json"))
    assert find_saved(checkpoint) == SavedFiles(**usual, tokenizer=Path("found org/name True"))
    run.recipe.unlink()
    with pytest.raises(CheckpointError, match="does not lie in a run directory") as moved:
        find_saved(checkpoint)
    assert "RUN/checkpoints/step-" in moved.value.remedy


def test_a_checkpoint_is_found_with_its_run_by_a_path_that_does_not_name_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = SimpleNamespace(data=SimpleNamespace(tokenizer="org/name"), run=SimpleNamespace(offline=False))
    read: list[Path] = []
    monkeypatch.setattr(
        saved_files, "load_recipe", lambda path: read.append(Path(path)) or SimpleNamespace(recipe=recipe)
    )
    monkeypatch.setattr(saved_files, "tokenizer_in", lambda data: data / "tokenizer.json")
    checkpoint = run.checkpoints / "step-000005.i001"
    checkpoint.mkdir()
    (checkpoint / saved_files.MANIFEST).write_text("{}")
    for here, path in (
        (run.checkpoints, "step-000005.i001"),
        (run.checkpoints, "./step-000005.i001/"),
        (checkpoint, "."),
        (checkpoint, "../step-000005.i001"),
        (run.path, "checkpoints/step-000005.i001"),
        (run.path.parent, "run/checkpoints/step-000005.i001"),
    ):
        monkeypatch.chdir(here)
        found = find_saved(Path(path))
        assert found.checkpoint.resolve() == checkpoint and found.rundir.path.resolve() == run.path, path
        assert found.checkpoint.parent.parent == found.rundir.path and read[-1].resolve() == run.recipe
    assert str(found.checkpoint) == "run/checkpoints/step-000005.i001", "as it was named"
