"""When each warning about a plan is given, and all that it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.config.load import load_recipe
from bloomery.config.model import ModelSection
from bloomery.plan import advice
from bloomery.plan.block_cost import Spent
from bloomery.plan.layout import Layout
from bloomery.plan.parameters import unusual_shape

GIB = 2**30


def draft(*, memory_gib: float = 100.0, **facts: Any) -> Any:
    hardware = SimpleNamespace(accelerator=SimpleNamespace(memory_gib=memory_gib))
    return SimpleNamespace(request=SimpleNamespace(hardware=hardware), **facts)


@pytest.mark.parametrize(
    ("needed_gib", "told"),
    [
        (
            100.5,
            ["It does not fit: stage 3 needs 100.5 GiB of 100.0 GiB. `--search` lists layouts that do."],
        ),
        (100, ["Memory is tight: 100.0 of 100.0 GiB on stage 3."]),
        (92.25, ["Memory is tight: 92.2 of 100.0 GiB on stage 3."]),
        (91.75, []),
    ],
)
def test_memory_beyond_the_accelerators_or_most_of_it_is_warned_of(
    needed_gib: float, told: list[str]
) -> None:
    assert list(advice._memory(draft(peak_bytes=int(needed_gib * GIB), worst_stage=3))) == told


def pipelined(first: int, last: int, *, pipeline: int = 4) -> Any:
    course = [
        SimpleNamespace(global_batch=batch, micro_batches=count)
        for batch, count in ((1024, first), (1536, 3), (2048, last))
    ]
    return draft(work=SimpleNamespace(layout=Layout(pipeline=pipeline)), course=course)


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        (
            9,
            26,  # 3 of 29 slots
            [
                "The pipeline idles 10% of each step: 26 micro-batches for 4 stages. Fewer stages, a smaller "
                "micro-batch, more chunks or fewer replicas help."
            ],
        ),
        (
            9,
            27,  # a tenth, and a quarter at first
            [
                "While the batch is 1,024, the pipeline idles 25% of each step (9 micro-batches for 4 "
                "stages). A larger first batch is quicker."
            ],
        ),
        (12, 27, []),  # a fifth at first is twice the tenth
        (27, 997, []),  # a tenth at first
    ],
)
def test_a_pipeline_that_idles_more_than_a_tenth_is_warned_of(first: int, last: int, told: list[str]) -> None:
    assert list(advice._bubble(pipelined(first, last))) == told
    assert list(advice._bubble(pipelined(first, last, pipeline=1))) == []


def sharded(needed_gib: dict[int, float], *, asked: list[int] | None = None, **layout: Any) -> Any:
    def peak_with(other: Layout) -> int:
        if asked is not None:
            asked.append(other.data)
        return int(needed_gib[other.data] * GIB)

    shape = Layout(**{"tensor": 2, "data": 8, "zero": 1, **layout})
    return draft(
        work=SimpleNamespace(layout=shape),
        peak_bytes=int(needed_gib[shape.data] * GIB),
        room_bytes=100 * GIB,
        peak_with=peak_with,
    )


def test_shards_of_half_as_many_replicas_and_so_on_are_foretold() -> None:
    assert list(advice._fewer_nodes(sharded({8: 80, 4: 100, 2: 110.5, 1: 200}))) == [
        "On 4 accelerators (2 replicas) the ZeRO-1 shards are larger and it no longer fits: "
        "110.5 GiB of 100.0."
    ]
    asked: list[int] = []
    assert list(advice._fewer_nodes(sharded({8: 80, 4: 81, 2: 82, 1: 83}, asked=asked))) == []
    assert asked == [4, 2, 1]
    for plan in (
        sharded({8: 80, 4: 110}, zero=0),
        sharded({8: 101, 4: 110}),
        sharded({1: 80}, data=1),
        sharded({3: 80, 1: 200}, data=3),
    ):
        assert list(advice._fewer_nodes(plan)) == []


def test_a_slow_network_and_slow_storage_are_warned_of() -> None:
    def told(exchange_s: float, data_s: float) -> list[str]:
        quick = SimpleNamespace(data_parallel_s=9.0, seconds=10.0, data_s=9.0)
        step = SimpleNamespace(data_parallel_s=exchange_s, seconds=10.0, data_s=data_s)
        course = [SimpleNamespace(step=quick), SimpleNamespace(step=step)]
        return list(advice._network(draft(course=course)))

    network = (
        "Reducing gradients between replicas takes 25% of a step on this network: a larger batch, fewer "
        "replicas, or peers that average every few steps ([elastic]) need less."
    )
    storage = "Storage cannot deliver tokens as fast as they are trained on."
    assert told(2.5, 0.1) == [network, storage]
    assert told(2.0, 0.0) == []


@pytest.mark.parametrize(
    ("hidden", "std", "is_told"),
    [(8192, 0.0106, True), (8192, 0.0104, False), (4096, 0.5, False), (8192, "'sqrt(1/3h)'", False)],
)
def test_a_large_initial_deviation_of_a_wide_model_is_warned_of(
    hidden: int, std: float | str, is_told: bool
) -> None:
    recipe = load_recipe("demo", [f"model.hidden={hidden}", f"model.init_std={std}"]).recipe
    told = (
        "init_std = 0.0106 is large for hidden 8,192: sqrt(1/(3h)) is 0.00638, sqrt(2/(5h)) is 0.00699. A "
        "104B run with 0.02 diverged."
    )
    assert list(advice._init(recipe)) == ([told] if is_told else [])


@pytest.mark.parametrize(
    ("tensor", "vocabulary", "hidden", "padded"),
    [(1, 50257, 1024, "50,304"), (4, 50257, 1024, "50,432"), (1, 50304, 1024, None), (1, 50257, 1023, None)],
)
def test_a_vocabulary_that_does_not_divide_is_to_be_padded(
    tensor: int, vocabulary: int, hidden: int, padded: str | None
) -> None:
    recipe = SimpleNamespace(model=SimpleNamespace(hidden=hidden))
    told: Any = list(advice._vocabulary(recipe, tensor=tensor, vocabulary=vocabulary))  # type: ignore[arg-type]
    assert told == (
        []
        if padded is None
        else [
            f"The vocabulary, 50,257, should be padded to {padded} (a multiple of 64 × TP): the head's "
            "matmul is quicker, and the layout masks what is added."
        ]
    )


@pytest.mark.parametrize(("longer", "told"), [(1.25, "25% longer"), (1.02, "")])
def test_dropout_of_attention_is_warned_of_by_how_much_longer_a_block_takes(
    longer: float, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def passes(work: Any) -> Any:
        seconds = longer if work.model.attention_dropout else 1.0
        return SimpleNamespace(forward=Spent(compute_s=seconds), backward=Spent(memory_s=3 * seconds))

    monkeypatch.setattr(advice, "block_passes", passes)
    monkeypatch.setattr(advice, "replace", lambda one, **changed: SimpleNamespace(**{**vars(one), **changed}))
    model = SimpleNamespace(attention_dropout=0.1)
    found = list(advice._dropout(draft(work=SimpleNamespace(model=model, forms_scores=True))))
    assert found == (
        [
            f"Dropout on attention weights forms them explicitly: a block takes {told} than with the fused "
            "kernel of attention_dropout = 0."
        ]
        if told
        else []
    )
    assert list(advice._dropout(draft(work=SimpleNamespace(model=model, forms_scores=False)))) == []


def saved(**changed: Any) -> list[str]:
    usual = {
        "lost_share": 0.05, "best_lost_share": 0.02, "best_interval_s": 1800.0, "interval_s": 7200.0,
        "mean_time_between_failures_s": 5400.0, "ends": True, "saves": 9,
    }  # fmt: skip
    return list(advice._cadence(draft(checkpoints=SimpleNamespace(**{**usual, **changed}))))


def test_a_cadence_that_loses_over_twice_the_least_and_a_hundredth_is_warned_of() -> None:
    assert saved() == [
        "Saving every 2.0 h loses 5.0% of the time to failures and saves; every 30 min would lose 2.0%."
    ]
    assert saved(interval_s=7199.0) == [
        "Saving every 120 min loses 5.0% of the time to failures and saves; every 30 min would lose 2.0%."
    ]
    for calm in (
        {"lost_share": 0.04},
        {"lost_share": 0.01, "best_lost_share": 0.001},
        {"lost_share": None},
        {"best_lost_share": None},
        {"best_interval_s": None},
        {"saves": 1, "interval_s": 1_800.0},  # at the end of a short run alone
    ):
        assert saved(**calm) == []
    assert len(saved(saves=1)) == len(saved(interval_s=1_800.0)) == 1


def test_a_run_that_does_not_end_is_told_how_often_it_fails() -> None:
    assert saved(ends=False, lost_share=1.0) == [
        "This run does not end: it saves every 2.0 h, and a failure comes every 90 min. Its days and costs "
        "are those of a run that loses 99.9% of its time. Set checkpoint.every_minutes: every 30 min would "
        "lose 2.0%."
    ]
    (hopeless,) = saved(ends=False, lost_share=0.99999, best_lost_share=0.9999)
    assert hopeless.endswith("No other cadence helps: every 30 min would lose nearly all, too.")
    (often,) = saved(ends=False, lost_share=0.99999, mean_time_between_failures_s=7.25)
    assert "a failure comes every 7.25 s." in often


def test_warnings_come_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [
        "memory",
        "bubble",
        "data_degree",
        "fewer_nodes",
        "network",
        "init",
        "vocabulary",
        "dropout",
        "cadence",
    ]
    for name in names:
        monkeypatch.setattr(advice, f"_{name}", lambda *_, name=name, **__: [name])
    monkeypatch.setattr(advice, "unusual_shape", lambda model: ["shape"])
    plan = draft(work=SimpleNamespace(layout=Layout(tensor=2)))
    plan.request.recipe = load_recipe("demo").recipe
    assert advice.advice(plan) == [*names[:5], "shape", *names[5:]]


@pytest.mark.parametrize(
    ("hidden", "layers", "heads", "told"),
    [
        (1024, 8, 8, []),
        (1023, 1, 1, []),  # small models have other proportions
        (2200, 40, 20, []),  # 55 and 110
        (2200, 41, 20, ["hidden/layers is 54; published models of 1B parameters and more have 55 to 210."]),
        (2100, 10, 20, []),  # 210
        (2110, 10, 10, ["hidden/layers is 211; published models of 1B parameters and more have 55 to 210."]),
        (1024, 8, 16, []),  # 64
        (1024, 8, 4, []),  # 256
        (1024, 8, 32, ["hidden/heads is 32; published models of 1B parameters and more have 64 to 256."]),
        (1028, 8, 4, ["hidden/heads is 257; published models of 1B parameters and more have 64 to 256."]),
    ],
)
def test_proportions_that_no_published_model_has_are_told(
    hidden: int, layers: int, heads: int, told: list[str]
) -> None:
    assert list(unusual_shape(ModelSection(hidden=hidden, layers=layers, heads=heads))) == told


@pytest.mark.parametrize(
    ("batch", "micro_batch", "data", "ramp_up", "more"),
    [
        (32, 1, 4, "[4,4,80]", "16, 32, 64"),
        (24, 1, 4, "[4,4,80]", "16"),
        (32, 2, 4, "[4,4,80]", "16, 32"),  # 16 micro-batches of the full batch
        (32, 1, 2, "[4,4,80]", ""),  # twice as many can start it
        (12, 1, 4, "[4,4,80]", ""),  # nor do more divide the full batch
        (32, 1, 4, "[]", ""),
    ],
)
def test_a_ramp_up_that_few_replicas_can_start_is_told_with_what_divides_the_full_batch(
    batch: int, micro_batch: int, data: int, ramp_up: str, more: str
) -> None:
    settings = [f"train.global_batch={batch}", f"train.ramp_up={ramp_up}", "train.micro_batch=1"]
    course = [SimpleNamespace(micro_batch=1), SimpleNamespace(micro_batch=micro_batch)]
    plan = draft(work=SimpleNamespace(layout=Layout(pipeline=2, data=data)), course=course)
    plan.request.recipe = load_recipe("demo", settings).recipe
    told = f"The ramp-up's increments let no more than {data} replicas start it; {more} accelerators divide"
    assert list(advice._data_degree(plan)) == ([f"{told} the full batch only."] if more else [])
