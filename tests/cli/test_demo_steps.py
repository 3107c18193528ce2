"""The demo's parts: how the recipe is fitted, what is compared, exported, sampled and drawn."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.cli import demo_steps
from bloomery.cli.demo_steps import EAGER_SHARE, EFFICIENCY, TOKEN_UNIT, Fitted, fitted_recipe, refitted
from bloomery.config.load import dump_recipe, load_recipe
from bloomery.data.prepare import Prepared, PreparedDataset
from bloomery.errors import DataError, TrainingFailed
from bloomery.events.journal import Journal
from bloomery.events.run_directory import RunDirectory


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def machine(monkeypatch: pytest.MonkeyPatch, peaks: list[float], *, compiles: bool = True) -> None:
    """Let a machine reach these speeds, one after the other, and a token cost a million operations."""
    left = list(peaks)
    monkeypatch.setattr(demo_steps, "measure_peak_flops", lambda device, precision: left.pop(0))
    monkeypatch.setattr(demo_steps, "lacking_toolchain", lambda: "" if compiles else "no compiler")
    monkeypatch.setattr(demo_steps, "token_cost", lambda *model, **sizes: SimpleNamespace(model=1_000_000))


@pytest.mark.parametrize(
    ("peaks", "minutes", "compiles", "name", "tokens", "lasts"),
    [
        # 0.4e12 × 0.5 / 1e6 are 200,000 tokens a second: 12 million in a minute, and all take 0.24 minutes.
        ([0.1e12, 0.4e12, 0.2e12], 1.0, True, "demo-small", 2_900_000, "0.2"),
        # 0.004e12: 2,000 a second, in a minute 7 units of 16,384.
        ([0.004e12] * 3, 1.0, True, "demo-small", 7 * TOKEN_UNIT, "1.0"),
        ([0.004e12] * 3, 1.0, False, "demo-small", 6 * TOKEN_UNIT, "0.9"),
        ([0.5e12] * 3, 10.0, True, "demo", 5_000_000, "0.6"),
        ([0.4999e12] * 3, 10.0, True, "demo-small", 2_900_000, "0.2"),
    ],
)
def test_the_recipe_is_chosen_and_cut_by_the_best_of_three_measurements(
    peaks: list[float], minutes: float, compiles: bool, name: str, tokens: int, lasts: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert (EFFICIENCY, EAGER_SHARE) == ({"demo": 0.3, "demo-small": 0.5}, 0.9)
    machine(monkeypatch, peaks, compiles=compiles)
    fitted = fitted_recipe(RunDirectory(tmp_path), minutes=minutes)
    assert (fitted.name, fitted.tokens) == (name, tokens)
    assert fitted.overrides == [f"train.tokens={tokens}"]
    assert fitted.loaded.recipe.run.name == name
    assert fitted.summary == (
        f"   this machine multiplies {max(peaks) / 1e12:.2f} TFLOP/s: recipe {name}, {tokens:,} tokens, "
        f"about {lasts} minutes of training"
    )


def test_the_cost_of_a_token_is_that_of_the_recipes_own_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, [0.4e12] * 3)
    asked: list[Any] = []
    monkeypatch.setattr(
        demo_steps, "token_cost", lambda *model, **sizes: asked.append(sizes) or SimpleNamespace(model=1)
    )
    fitted_recipe(RunDirectory(tmp_path), minutes=1.0)
    assert asked == [{"vocabulary": 4096, "sequence_length": 512}]


def test_too_little_time_for_one_unit_of_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 16,384 tokens at 1,000 a second take 16.384 seconds.
    machine(monkeypatch, [0.002e12] * 6)
    assert fitted_recipe(RunDirectory(tmp_path), minutes=16.385 / 60).tokens == TOKEN_UNIT
    with pytest.raises(TrainingFailed, match=r"0.2725 minutes are not enough") as refused:
        fitted_recipe(RunDirectory(tmp_path), minutes=16.35 / 60)
    assert "--minutes 1 or more" in str(refused.value.remedy)


def test_a_demo_that_was_begun_keeps_its_recipe_and_another_run_is_refused(rundir: RunDirectory) -> None:
    for name in ("demo-small", "demo"):
        rundir.recipe.write_text(dump_recipe(load_recipe(name, ["train.tokens=81920"]).recipe))
        fitted = fitted_recipe(rundir, minutes=5.0)
        assert (fitted.name, fitted.tokens, fitted.overrides) == (name, 81_920, ["train.tokens=81920"])
        assert fitted.summary == f"   {rundir.path} was begun: recipe {name}, 81,920 tokens"
    rundir.recipe.write_text(dump_recipe(load_recipe("demo", ["model.layers=3"]).recipe))
    with pytest.raises(TrainingFailed, match="holds another run than the demo"):
        fitted_recipe(rundir, minutes=5.0)


@pytest.mark.parametrize(
    ("speeds", "left_s", "tokens"),
    [
        ([100.0] * 4, 0.0, None),  # too few steps to judge by
        ([100.0] * 5, 0.0, TOKEN_UNIT),
        ([1e9, 100.0, 200.0, 300.0, 1e3], 600.0, 9 * TOKEN_UNIT),  # the median without the first
        ([200.0] * 6, 7_291.0, None),  # nine tenths of a hundred units fit
        ([200.0] * 6, 7_290.8, 89 * TOKEN_UNIT),
    ],
)
def test_a_slower_machine_gets_as_many_tokens_as_the_median_of_its_steps_allows(
    speeds: list[float], left_s: float, tokens: int | None, rundir: RunDirectory
) -> None:
    given = [f"train.tokens={100 * TOKEN_UNIT}"]
    fitted = Fitted(loaded=load_recipe("demo-small", given), name="demo-small", overrides=given, summary="s")
    with Journal(rundir.journal()) as journal:
        journal.write("start", incarnation=1, step=0)
        for step, speed in enumerate(speeds, 1):
            journal.write("step", incarnation=1, step=step, consumed_tokens=2_730 * step, tokens_per_s=speed)
    found = refitted(fitted, rundir, left_s=left_s)
    assert (None if found is fitted else found.tokens) == tokens
    assert found is fitted or found.overrides == [f"train.tokens={tokens}"]


def test_smoothed_values_are_means_of_the_last_ones() -> None:
    assert demo_steps.smoothed((4.0, 2.0, 6.0, 8.0), window=3) == pytest.approx([4.0, 3.0, 4.0, 16 / 3])
    flat = demo_steps.smoothed((26.0, *[1.0] * 25))
    assert flat[24] == pytest.approx(2.0) and flat[25] == pytest.approx(1.0)


@pytest.fixture
def trained(rundir: RunDirectory) -> RunDirectory:
    """A run that was killed after step 3 and went on from step 2."""
    rundir.incarnation(1).write_text('{"base": null}')
    rundir.incarnation(2).write_text('{"base": {"step": 2, "incarnation": 1}}')
    with Journal(rundir.journal()) as journal:
        journal.write("start", incarnation=1, step=0)
        for step, loss, held_out in ((1, 6.0, None), (2, 5.0, 5.5), (3, 4.5, 4.9)):
            journal.write("step", incarnation=1, step=step, loss=loss, held_out_loss=held_out)
        journal.write("save", incarnation=1, step=9, held_out_loss=1.0)
        journal.write("start", incarnation=2, step=2)
        for step, loss, held_out in ((3, 4.0, 4.5), (4, 3.0, None)):
            journal.write("step", incarnation=2, step=step, loss=loss, held_out_loss=held_out)
    return rundir


def test_curves_are_of_the_last_life_that_made_each_step(trained: RunDirectory) -> None:
    assert demo_steps.held_out_curve(trained) == [(2, 5.5), (3, 4.5)]
    assert list(demo_steps.restarts(trained)) == [2]


class Recorder:
    """An object that records the calls of its methods, each of which returns it."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **options: Any) -> Any:
            words = [list(one) if isinstance(one, tuple) else one for one in given if one is not self]
            self.calls.append((name, *words, options))
            return (self, self) if name == "subplots" else "drawn" if name == "uncolorize" else self

        return call


def test_the_picture_holds_both_curves_and_a_line_at_each_restart(
    trained: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    drawing = Recorder(calls)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(use=drawing.use, pyplot=drawing))
    demo_steps.draw_png(trained, Path("loss.png"))
    blue = {"color": "tab:blue"}
    assert calls[:2] == [("use", "Agg", {}), ("subplots", {"figsize": (9, 5), "dpi": 120})]
    assert calls[2:6] == [
        ("plot", [1, 2, 3, 4], [6.0, 5.0, 4.0, 3.0],
         {"linewidth": 0.6, "alpha": 0.45, "label": "training, each step"} | blue),
        ("plot", [1, 2, 3, 4], [6.0, 5.5, 5.0, 4.5],
         {"linewidth": 1.6, "label": "training, smoothed"} | blue),
        ("plot", [2, 3], [5.5, 4.5], "o-", {"color": "tab:orange", "markersize": 4, "label": "held out"}),
        ("axvline", 2, {"color": "tab:red", "linestyle": ":", "linewidth": 1, "label": "resumed at step 2"}),
    ]  # fmt: skip
    assert calls[6:] == [
        ("set", {"xlabel": "step", "ylabel": "loss (nats a token)", "title": "run"}),
        ("grid", {"visible": True, "alpha": 0.3}), ("legend", {}), ("tight_layout", {}),
        ("savefig", Path("loss.png"), {}), ("close", {}),
    ]  # fmt: skip


def test_the_drawing_for_a_terminal_holds_both_curves(
    trained: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setitem(sys.modules, "plotext", Recorder(calls))
    assert demo_steps.draw_terminal(trained) == "drawn"
    assert calls == [
        ("clear_figure", {}), ("theme", "clear", {}), ("plotsize", 90, 16, {}),
        ("plot", [1, 2, 3, 4], [6.0, 5.5, 5.0, 4.5], 
         {"marker": "braille", "label": "training loss, smoothed"}),
        ("scatter", [2, 3], [5.5, 4.5], {"marker": "o", "label": "held out"}),
        ("xlabel", "step", {}), ("build", {}), ("uncolorize", {}),
    ]  # fmt: skip


def test_without_held_out_losses_only_the_training_is_drawn(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir.incarnation(1).write_text('{"base": null}')
    with Journal(rundir.journal()) as journal:
        journal.write("step", incarnation=1, step=1, loss=2.0, held_out_loss=None)
    calls: list[Any] = []
    drawing = Recorder(calls)
    monkeypatch.setitem(sys.modules, "plotext", drawing)
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace(use=drawing.use, pyplot=drawing))
    demo_steps.draw_terminal(rundir)
    demo_steps.draw_png(rundir, Path("loss.png"))
    assert [call[0] for call in calls].count("plot") == 3
    assert not {"scatter", "axvline"} & {call[0] for call in calls}


DATA = PreparedDataset(name="x", prefix=Path("x/held-out"), weight=1.0, documents=2, tokens=9, text_bytes=5)


def prepared(*held_out: PreparedDataset) -> Prepared:
    return Prepared(
        tokenizer_path=Path("t"), vocabulary_size=99, end_of_document_id=7, train=(), held_out=held_out,
        notes=(), fingerprint="f", reused=False,
    )  # fmt: skip


def test_the_data_goes_where_the_training_looks_and_nothing_held_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, recipe, asked = RunDirectory(tmp_path / "new"), load_recipe("demo").recipe, list[Any]()
    made = [prepared(DATA), prepared()]

    def prepare(data: Any, directory: Path, *, progress: Any) -> Prepared:
        assert rundir.data.parent.is_dir()
        asked.append((data, directory))
        return made.pop(0)

    monkeypatch.setattr(demo_steps, "prepare", prepare)
    assert demo_steps.prepare_text(recipe, rundir, shown=False) == prepared(DATA)
    assert asked == [(recipe.data, rundir.data)]
    with pytest.raises(DataError, match="is held out"):
        demo_steps.prepare_text(recipe, rundir, shown=False)


def test_the_model_and_xz_compress_the_same_held_out_files(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("demo-small").recipe
    asked: list[Any] = []

    def note(*words: Any) -> Any:
        asked.append(words)
        return words

    saved = SimpleNamespace(decoder=lambda device: f"decoder on {device.type}")
    monkeypatch.setattr(demo_steps, "open_saved", lambda path: note("open", path) and saved)
    monkeypatch.setattr(demo_steps, "IndexedDataset", lambda prefix: f"pair {prefix}")
    monkeypatch.setattr(
        demo_steps, "held_out_batches", lambda pair, **sizes: note("batches", pair, sizes) and "batches"
    )
    documents = [SimpleNamespace(key=key, text=text) for key, text in (("a", "no"), ("b", "ä"), ("c", "xyz"))]
    monkeypatch.setattr(demo_steps, "documents_of", lambda data: documents if data is recipe.data else [])
    every = recipe.data.held_out_every
    monkeypatch.setattr(demo_steps, "is_held_out", lambda key, one_in: key != "a" and one_in == every)

    def compress(decoder: str, batches: str, *, text_bytes: int) -> Any:
        note("compress", decoder, batches, text_bytes)
        return SimpleNamespace(bits_per_byte=1.25)

    monkeypatch.setattr(demo_steps, "compress", compress)
    monkeypatch.setattr(demo_steps, "xz_bits_per_byte", lambda texts: note("xz", texts) and 2.5)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    found = demo_steps.compare_with_xz(recipe, prepared(DATA), rundir)
    assert found == demo_steps.Compression(bits_per_byte=1.25, xz_bits_per_byte=2.5)
    assert asked == [
        ("open", rundir.path),
        ("batches", "pair x/held-out", {"sequence_length": 512, "rows": 16, "eod": 7}),
        ("compress", "decoder on cpu", "batches", 5),
        ("xz", ["ä".encode(), b"xyz"]),
    ]


def test_a_sample_is_the_prompt_and_what_follows_without_ends_of_documents(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    tokenizer = SimpleNamespace(
        eod=7, encode=lambda text: [len(text)], decode_after=lambda ids, before: f"{ids} after {before}"
    )
    bounds = SimpleNamespace(opening=lambda ids: [7, *ids], ends={7})
    saved = SimpleNamespace(decoder=lambda device: device, tokenizer=tokenizer, bounds=bounds)
    monkeypatch.setattr(demo_steps, "open_saved", lambda path: asked.append(path) or saved)

    def generate(*given: Any, **options: Any) -> list[int]:
        asked.append((*given, options))
        return [3, 4, 7]

    monkeypatch.setattr(demo_steps, "generate", generate)
    assert demo_steps.sample(rundir, prompt="def ") == "def [3, 4] after [7, 4]"
    sampling = demo_steps.Sampling(temperature=0.6, top_p=0.95)
    options = {"max_new_tokens": 160, "sampling": sampling, "ends": {7}}
    assert asked == [rundir.path, (torch.device("cpu"), [7, 4], options)]


def test_an_export_replaces_the_earlier_one_and_tells_its_difference(
    rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir.export.mkdir()
    saved = SimpleNamespace(
        model="model", checkpoint="checkpoint", tokenizer_path=Path("t"),
        tokenizer=SimpleNamespace(end_of_document="<eod>"),
    )  # fmt: skip
    monkeypatch.setattr(demo_steps, "open_saved", lambda path: saved if path == rundir.path else None)

    def export(*given: Any, **options: Any) -> Any:
        assert not rundir.export.exists()
        assert given == ("model", "checkpoint", rundir.export)
        assert options == {"tokenizer": Path("t"), "end_of_document": "<eod>"}
        return SimpleNamespace(directory=Path("e"), parameters=1_234_567, largest_difference=2.34e-6)

    monkeypatch.setattr(demo_steps, "export", export)
    done = demo_steps.export_verified(rundir)
    assert done == demo_steps.ExportedDemo(
        directory=Path("e"), parameters=1_234_567,
        summary="   e: 1,234,567 parameters; transformers gives our logits to within 2e-06",
    )  # fmt: skip
