"""In which order the parts of a run are made and closed, and what each is given of the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bloomery.config.convert import settings_of
from bloomery.config.load import load_recipe
from bloomery.events.heartbeat import RankActivity
from bloomery.events.run_directory import RunDirectory
from bloomery.events.run_lock import host_name
from bloomery.parallel.mesh import Mesh
from bloomery.plan.recomputation import Recomputation
from bloomery.train import assemble
from bloomery.train.attention_kernel import AttentionDecision
from bloomery.train.settings import StartOptions
from bloomery.train.step import Compilation

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PREPARED = SimpleNamespace(vocabulary_size=300)


class Made:
    """A run whose parts are names, and what they were made with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, device: torch.device, compiled: bool) -> None:
        self.order: list[str] = []
        self.given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.mesh = Mesh(device=device, rank=1, world=2)
        object.__setattr__(self.mesh, "close", lambda: self.order.append("mesh closed"))
        self.heartbeat = SimpleNamespace(
            start=lambda: self.note("heartbeat.start") or self.heartbeat,
            enter=lambda activity: self.note(f"heartbeat.{activity}"),
            expect_no_compilation=lambda: self.note("no compilation"),
            tick="tick",
        )
        queue = SimpleNamespace(queue="queue", close=lambda: self.order.append("batches closed"))
        self.stream = SimpleNamespace(batches=queue, stream=SimpleNamespace(mixtures=[1, 2, 3]))
        self.control = SimpleNamespace(close=lambda: self.order.append("control closed"))
        self.observers = SimpleNamespace(close=lambda: self.order.append("observers closed"))
        self.store = SimpleNamespace(incarnation=6)
        self.attention = SimpleNamespace(close=lambda: self.order.append("attention closed"))
        self.model = SimpleNamespace(weights="weights", decoder="decoder")
        self.settings = SimpleNamespace(recipe="of the step under way")
        answers: dict[str, Any] = {
            "join_mesh": self.mesh,
            "_take_and_prepare": ("changes", PREPARED),
            "token_cost": "cost",
            "_compilation": Compilation(on=compiled, why="why"),
            "decide_attention": AttentionDecision(kernel="flash", why="why"),
            "AttentionChoice": self.attention,
            "_build_model": self.model,
            "build_data_stream": self.stream,
            "build_held_out": "held out",
            "Control": self.control,
            "Observers": self.observers,
            "_build_backup": "backup",
            "peering_of_environment": "peering",
            "AutoRecompute": self._chosen,
            "least_room_bytes": 7.0,
            "RunSettings": self.settings,
            "CorruptionCheck": "check",
            "announce_interludes": ["announced"],
            "measure_peak_flops": 5.0,
            "Metrics": "metrics",
            "resolve_precision": "bf16",
            "Optimizers": "optimizers",
            "LossScale": "scale",
            "begins_with": "begin",
            "training_bigrams": "bigrams",
            "summarise_data": "summary",
            "build_outer": "outer",
            "refuse_when_stopped": None,
            "prove_shared": None,
            "Trainer": "trainer",
        }
        for name, answer in answers.items():
            monkeypatch.setattr(assemble, name, self.part(name, answer))
        for name, held in (
            ("deterministic_kernels", None),
            ("make_heartbeat", self.heartbeat),
            ("explaining_out_of_memory", None),
            ("Journal", "journal"),
            ("_open_store", self.store),
        ):
            monkeypatch.setattr(assemble, name, self.context(name, held))

    def _chosen(self, recipe: Any) -> Recomputation:
        return Recomputation(mode="mlp" if recipe.train.recompute == "auto" else "none", why="")

    def note(self, name: str) -> None:
        self.order.append(name)

    def part(self, name: str, answer: Any) -> Any:
        def make(*told: Any, **more: Any) -> Any:
            self.order.append(name)
            self.given[name] = told, more
            return answer

        return make

    def context(self, name: str, held: Any) -> Any:
        @contextmanager
        def enter(*told: Any, **more: Any) -> Iterator[Any]:
            self.order.append(name)
            self.given[name] = told, more
            yield held
            self.order.append(f"{name} closed")

        return enter

    def build(self, *settings: str, path: Path, **options: Any) -> Any:
        loaded = load_recipe("demo", ["train.precision=bf16", *settings])
        rundir, start = RunDirectory(path), StartOptions(say=print, **options)
        with assemble.build_trainer(loaded, rundir, start) as trainer:
            assert trainer == "trainer"
            self.order.append("built")
        return loaded, rundir, start


def test_the_parts_of_a_run_are_made_in_order_and_closed_in_reverse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch, device=CPU, compiled=False)
    made.build(path=tmp_path)
    at = made.order.index
    for before, after in (
        ("join_mesh", "deterministic_kernels"),
        ("refuse_when_stopped", "prove_shared"),
        ("prove_shared", "_take_and_prepare"),
        ("make_heartbeat", "_take_and_prepare"),
        ("_take_and_prepare", "heartbeat.start"),
        ("heartbeat.start", f"heartbeat.{RankActivity.BUILDING}"),
        (f"heartbeat.{RankActivity.BUILDING}", "Control"),
        ("explaining_out_of_memory", "_build_model"),
        ("no compilation", "_build_model"),
        ("deterministic_kernels", "AttentionChoice"),
        ("_build_backup", "_open_store"),
    ):
        assert at(before) < at(after), (before, after)
    assert made.order[at("built") + 1 :] == [
        "_open_store closed",
        "observers closed",
        "Journal closed",
        "batches closed",
        "attention closed",
        "control closed",
        "explaining_out_of_memory closed",
        "make_heartbeat closed",
        "deterministic_kernels closed",
        "mesh closed",
    ]


def test_what_auto_recomputes_is_chosen_once_it_is_known_whether_the_model_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch, device=CPU, compiled=True)
    loaded, _, _ = made.build("train.recompute=auto", path=tmp_path)
    assert made.given["AutoRecompute"] == (
        (loaded, made.mesh),
        {"vocabulary": 300, "compiled": True, "room_bytes": 7.0},
    )
    at = made.order.index
    assert at("_compilation") < at("least_room_bytes") < at("AutoRecompute") < at("_build_model")
    assert made.given["token_cost"][1]["recompute"] == "mlp", "what the step's figures count"


def test_each_part_of_a_run_gets_those_that_it_works_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch, device=CPU, compiled=True)
    loaded, rundir, start = made.build(path=tmp_path, take_fallback=True, ends_process=True)
    recipe, mesh, given = loaded.recipe, made.mesh, made.given
    (parallel,), joined = given["join_mesh"]
    assert parallel is recipe.parallel and joined["recipe"] == settings_of(recipe)
    assert joined["choices"](CPU) == assemble._choices(recipe, CPU)
    assert given["deterministic_kernels"] == ((), {"wanted": recipe.train.deterministic})
    assert given["refuse_when_stopped"] == ((rundir, recipe.control, mesh), {})
    assert given["prove_shared"] == (
        (rundir.path,),
        {"rank": 1, "node": host_name(), "gather": mesh.all_gather_object},
    )
    assert given["explaining_out_of_memory"] == ((loaded, rundir, mesh), {"vocabulary": 300})
    assert given["Control"] == ((rundir, mesh), {"section": recipe.control, "ends_process": True})
    assert given["token_cost"] == (
        (recipe.model,),
        {
            "vocabulary": 300,
            "sequence_length": recipe.data.sequence_length,
            "recompute": recipe.train.recompute,
        },
    )
    assert given["_compilation"] == ((recipe, "cost", mesh), {})
    (decoder,), chosen = given["AttentionChoice"]
    assert decoder == "decoder" and chosen["decide"]({"kernel": "math"}).kernel == "flash"
    saved = {"kernel": "math"}
    assert given["decide_attention"] == ((recipe, mesh, rundir), {"vocabulary": 300, "saved": saved})
    assert given["_build_model"] == ((recipe, PREPARED, mesh), {"compiled": True})
    assert given["build_held_out"] == ((recipe, PREPARED, made.model, mesh), {"report_progress": "tick"})
    assert given["Journal"] == ((rundir.journal(rank=1),), {})
    assert given["_build_backup"][0][:5] == (recipe, rundir, mesh, made.control, start)
    assert given["_build_backup"][0][6] == "tick"
    assert given["_open_store"] == ((recipe, rundir, mesh, "backup"), {})
    assert given["RunSettings"] == (
        (recipe,),
        {
            "mesh": mesh,
            "data_stream": made.stream,
            "store": made.store,
            "held_out": "held out",
            "journal": "journal",
            "say": print,
            "auto_recompute": made._chosen,
        },
    )
    (model,), check = given["CorruptionCheck"]
    assert model is made.model and check.pop("incarnation")() == 6
    assert check == {"mesh": mesh, "settings": made.settings, "journal": "journal"}
    assert given["announce_interludes"] == ((["held out"], "peering"), {})
    assert given["measure_peak_flops"] == ((CPU, "bf16"), {})
    metrics = given["Metrics"][1]
    assert metrics.pop("queue")() == "queue" and metrics.pop("mixture")() == 3
    assert metrics == {
        "mesh": mesh,
        "control": made.control,
        "interludes": ["announced", "check"],
        "cost": "cost",
        "peak_flops": 5.0,
        "sequence_length": recipe.data.sequence_length,
        "enter": made.heartbeat.enter,
    }
    assert given["resolve_precision"] == (("bf16", CPU), {})
    assert given["Optimizers"] == (("weights", recipe.optim), {"precision": "bf16"})
    assert given["begins_with"] == ((recipe.init, made.model, mesh), {"say": print})
    trainer = given["Trainer"][1]
    learner, begun = trainer.pop("learner"), trainer.pop("on_begin")
    assert (learner.model, learner.optimizers, learner.loss_scale, learner.begin) == (
        made.model,
        "optimizers",
        "scale",
        "begin",
    )
    assert learner.bigrams() == "bigrams" and given["training_bigrams"] == ((recipe, PREPARED), {})
    assert trainer.pop("make_outer")("the trainer") == "outer"
    assert given["build_outer"] == (
        (recipe,),
        {
            "trainer": "the trainer",
            "model": made.model,
            "mesh": mesh,
            "data_stream": made.stream,
            "peering": "peering",
        },
    )
    assert trainer == {
        "mesh": mesh,
        "data_stream": made.stream,
        "settings": made.settings,
        "store": made.store,
        "control": made.control,
        "metrics": "metrics",
        "held_out": "held out",
        "journal": "journal",
        "observers": made.observers,
        "heartbeat": made.heartbeat,
        "take_fallback": True,
        "check": "check",
    }
    beginning = begun.__self__
    assert (beginning.loaded, beginning.changes, beginning.mesh, beginning.rundir) == (
        loaded,
        "changes",
        mesh,
        rundir,
    )
    assert (beginning.journal, beginning.compilation.on) == ("journal", True)
    assert beginning.attention is learner.attention is made.attention
    assert (beginning.observers, beginning.heartbeat) == (made.observers, made.heartbeat)
    assert beginning.options is start and beginning.summarise() == "summary"
    assert beginning.recipe_now() == "of the step under way"
    assert given["summarise_data"] == ((recipe, PREPARED, made.stream), {})
    assert "no compilation" not in made.order


@pytest.mark.parametrize(
    ("device", "compiled", "told"), [(CPU, False, True), (CPU, True, False), (GPU, False, False)]
)
def test_only_an_eager_run_on_a_cpu_compiles_nothing_at_all(
    device: torch.device, compiled: bool, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch, device=device, compiled=compiled)
    made.build(path=tmp_path)
    assert ("no compilation" in made.order) is told


def test_nodes_of_a_run_in_a_store_share_no_directory_and_a_run_may_have_no_held_out_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch, device=CPU, compiled=False)
    monkeypatch.setattr(assemble, "build_held_out", lambda *told, **more: None)
    made.build("checkpoint.url=s3://bucket/run", path=tmp_path, peering="given")
    assert "prove_shared" not in made.order and "peering_of_environment" not in made.order
    assert made.given["announce_interludes"] == (([], "given"), {})
    assert made.given["Trainer"][1]["held_out"] is None
