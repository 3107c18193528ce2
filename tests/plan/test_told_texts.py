"""Refusals and sentences of plans to the letter, and the figures of a machine that nobody measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bloomery.config.load import load_recipe
from bloomery.config.parallel import ParallelSection
from bloomery.errors import BloomeryError, ConfigError
from bloomery.plan import hardware as module
from bloomery.plan.hardware import (
    Accelerator,
    Hardware,
    Network,
    Node,
    Operation,
    SiteLink,
    Storage,
    dump_hardware,
    load_hardware,
    load_link,
    parse_hardware,
    shipped_hardware,
    shipped_links,
    this_machine,
)
from bloomery.plan.ranks import read_hosts, wrong_ranks_error
from bloomery.plan.request import Request, refuse_impossible, vocabulary_of
from bloomery.plan.step_time import StepTime
from bloomery.plan.timeline import Stretch, last_step_words

GIB = 2**30
LOCAL = Hardware(
    name="local",
    accelerator=Accelerator(
        memory_gib=10.0, memory_gb_per_s=100.0, memory_efficiency=0.5, fp32_teraflops=3.0, fp8_teraflops=9.0
    ),
    node=Node(accelerators=4, link_gb_per_s=10.0, link_efficiency=0.25),
    network=Network(gbit_per_s=80.0, efficiency=0.5),
)


def refusals(call: Callable[[], object]) -> list[tuple[str, object, str, str, str]]:
    with pytest.raises(ConfigError) as refused:
        call()
    return [(one.key, one.value, one.source, one.problem, one.remedy) for one in refused.value.mistakes]


def test_rates_are_what_each_part_reaches_of_its_peak() -> None:
    assert LOCAL.memory_bytes_per_s == 50e9 and LOCAL.link_bytes_per_s == 2.5e9
    assert LOCAL.network_bytes_per_s == 5e9
    assert [LOCAL.peak_flops(name) for name in ("fp32", "bf16", "fp8", "auto")] == [3e12, 0.0, 9e12, 3e12]
    both = replace(LOCAL, accelerator=replace(LOCAL.accelerator, bf16_teraflops=7.0))
    assert both.peak_flops("auto") == 7e12


def test_a_machine_is_written_table_by_table_and_read_by_its_names() -> None:
    text = dump_hardware(replace(LOCAL, notes='a "note"', sources={"node.accelerators": "counted"}))
    assert text.startswith('name = "local"\nnotes = "a \\"note\\""\n\n[accelerator]\nkind = "gpu"\n')
    assert "\n\n[node]\naccelerators = 4\nlink_gb_per_s = 10.0\n" in text
    assert text.endswith('\n\n[sources]\n"node.accelerators" = "counted"\n')
    raw = {"accelerator": {"memory_gib": 1, "memory_gb_per_s": 2}, "node": {"accelerators": 3}}
    read = parse_hardware(raw, label="mine.toml")
    assert (read.name, read.notes, read.sources) == ("mine", "", {})
    assert (read.network, read.storage, read.operation) == (Network(), Storage(), Operation())
    named = parse_hardware({**raw, "name": "n", "notes": "t", "sources": {"a": 3}}, label="mine.toml")
    assert (named.name, named.notes, named.sources) == ("n", "t", {"a": "3"})
    assert refusals(lambda: parse_hardware({**raw, "engine": {}}, label="mine.toml")) == [
        (
            "engine", None, "mine.toml", "there is no such table",
            "There are accelerator, node, network, storage, operation and sources.",
        )
    ]  # fmt: skip


def test_machines_and_links_that_cannot_be_read_are_refused_with_what_is_there(tmp_path: Path) -> None:
    machines, links = ", ".join(shipped_hardware()), ", ".join(shipped_links())
    measures = "`bloomery calibrate` measures this machine."
    unknown = "there is no such file, nor a shipped one of this name"
    assert refusals(lambda: load_hardware("h300")) == [
        (
            "--hardware", "h300", "command line", unknown,
            f"Did you mean 'h200'? Shipped: {machines}. {measures}",
        )
    ]  # fmt: skip
    assert refusals(lambda: load_hardware("zzz"))[0][4] == f"Shipped: {machines}. {measures}"
    assert refusals(lambda: load_hardware("internet-1g"))[0][3] == unknown, "a link is no machine"
    assert load_hardware("h200.toml").name == "h200" and load_link("internet-2g.toml").gbit_per_s == 2.0
    broken = tmp_path / "broken.toml"
    broken.write_text("[node\n")
    ((key, value, source, problem, remedy),) = refusals(lambda: load_hardware(str(broken)))
    assert (key, value, source) == ("--hardware", str(broken), "command line")
    assert problem.startswith("cannot be read: Expected ']'")
    assert remedy == "`bloomery calibrate` writes one; the shipped ones are examples."
    assert refusals(lambda: load_link("internet-9g")) == [
        (
            "--link", "internet-9g", "command line", "there is no such file or shipped link",
            f"Shipped: {links}.",
        )
    ]  # fmt: skip
    assert refusals(lambda: load_link(str(broken)))[0][4] == "See hardware/internet-1g.toml."
    broken.write_text("[link]\nefficiency = 2.0\n")
    with pytest.raises(ConfigError, match=r"in the link file broken\.toml") as refused:
        load_link(str(broken))
    assert (refused.value.mistakes[0].key, refused.value.mistakes[0].source) == (
        "link.efficiency",
        "broken.toml",
    )
    broken.write_text("notes = 'no table'\n")
    assert load_link(str(broken)) == SiteLink()


def processor(tmp_path: Path, text: str, *, cores: int, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": GIB // 2048}.__getitem__)
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    machine = this_machine(gpus=tmp_path / "none", processor=path, memory_gib=2.0)
    assert machine is not None
    return machine


def test_a_machine_that_nobody_measured_is_estimated_from_its_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "model name : X\ncpu MHz\t\t: 2000.0\nflags\t\t: fpu avx2 avx avx512_bf16\ncpu MHz : 9.0\n"
    found = processor(tmp_path, text, cores=3, monkeypatch=monkeypatch)
    expected = Hardware(
        name="this machine (3 cores, not measured)",
        notes="Estimated from the processor's description; `bloomery calibrate` measures it.",
        accelerator=Accelerator(
            kind="cpu",
            memory_gib=2.0,
            reserved_gib=0.5,
            memory_gb_per_s=36.0,
            fp32_teraflops=3 * 2e9 * 32 / 1e12,
            bf16_teraflops=2 * 3 * 2e9 * 32 / 1e12,
            matmul_efficiency=0.5,
            attention_efficiency=0.1,
        ),
        node=Node(accelerators=1),
        storage=Storage(write_gb_per_s=0.5, read_gb_per_s=0.5),
        operation=Operation(step_jitter=0.0, failures_per_1000_accelerator_days=0.0),
    )
    assert {**vars(found)} == {**vars(expected)}


@pytest.mark.parametrize(
    ("flags", "fp32", "bf16"),
    [
        ("Features : fp asimd bf16", 16 * 2.5e9, 2 * 16 * 2.5e9),
        ("flags : avx", 16 * 2.5e9, 0.0),
        ("flags : avx2", 32 * 2.5e9, 0.0),
        ("flags : avx512f avx512bf16", 64 * 2.5e9, 2 * 64 * 2.5e9),
        ("flags : avx512f avx512_bf16 amx_bf16", 64 * 2.5e9, 8 * 64 * 2.5e9),
        ("flags : sse", 8 * 2.5e9, 0.0),
        ("", 8 * 2.5e9, 0.0),
    ],
)
def test_instruction_sets_decide_over_operations_in_a_cycle(
    flags: str, fp32: float, bf16: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = processor(tmp_path, f"{flags}\n", cores=10, monkeypatch=monkeypatch).accelerator
    assert found.fp32_teraflops == pytest.approx(10 * fp32 / 1e12)
    assert found.bf16_teraflops == pytest.approx(10 * bf16 / 1e12)
    assert found.memory_gb_per_s == 100.0, "of one socket at most"


def test_a_gpu_is_known_by_the_first_word_that_its_model_has(tmp_path: Path) -> None:
    for number, model in enumerate(("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "information").write_text(f"Model: {model}\n")
    first = this_machine(gpus=tmp_path)
    assert first is not None and first.name == "h100-80g"
    (tmp_path / "0" / "information").unlink()
    second = this_machine(gpus=tmp_path)
    assert second is not None and second.name == "v100-32g"
    assert set(module._BY_MODEL.values()) <= set(shipped_hardware())


OPTIONS: list[tuple[dict[str, Any], tuple[str, object, str, str]]] = [
    (
        {"accelerators": 0},
        ("--gpus", 0, "a run needs at least one accelerator", "Give at least 6, one replica (TP × PP)."),
    ),
    (
        {"accelerators": 4},
        (
            "--gpus", 4, "is no multiple of 6, the accelerators of one replica (tensor 2 × pipeline 3)",
            "6 would do; or change parallel.tensor, parallel.pipeline.",
        ),
    ),
    (
        {"accelerators": 13},
        (
            "--gpus", 13, "is no multiple of 6, the accelerators of one replica (tensor 2 × pipeline 3)",
            "12 or 18 would do; or change parallel.tensor, parallel.pipeline.",
        ),
    ),
    (
        {"failures_per_week": -0.5},
        ("--failures-per-week", -0.5, "is negative", "Give 0 or more; BLOOM saw 1 to 2 a week on 384 GPUs."),
    ),
    (
        {"hours_per_day": 0.0},
        ("--hours-per-day", 0.0, "a day has 24 hours", "Give more than 0, at most 24."),
    ),
    (
        {"hours_per_day": 24.5},
        ("--hours-per-day", 24.5, "a day has 24 hours", "Give more than 0, at most 24."),
    ),
    (
        {"data_tokens": 0.5},
        ("--data-tokens", 0.5, "is less than one token", "Give the tokens of one epoch, for instance 341e9."),
    ),
    (
        {"accelerators": 6 * 10**9},
        ("--gpus", 6_000_000_000, "is no machine", "Give at most 1,000,000,000."),
    ),
    (
        {"price_per_accelerator_hour": -1.0},
        ("--price", -1.0, "is negative", "Give a price, or leave it out."),
    ),
]  # fmt: skip
SPLIT = ("optim.name=adamw", "model.layers=6", "parallel.tensor=2", "parallel.pipeline=3")


@pytest.mark.parametrize(("options", "refused"), OPTIONS)
def test_each_option_that_cannot_be_is_refused_with_what_could(
    options: dict[str, Any], refused: tuple[str, object, str, str]
) -> None:
    request = Request(loaded=load_recipe("demo", SPLIT), hardware=LOCAL, **options)
    key, value, problem, remedy = refused
    assert refusals(lambda: refuse_impossible(request)) == [(key, value, "command line", problem, remedy)]


def test_options_at_their_bounds_are_taken() -> None:
    loaded = load_recipe("demo", [*SPLIT, "train.global_batch=16"])
    at_bounds: dict[str, Any] = {
        "accelerators": 12, "failures_per_week": 0.0, "hours_per_day": 24.0, "data_tokens": 1.0,
        "price_per_accelerator_hour": 0.0,
    }  # fmt: skip
    refuse_impossible(Request(loaded=loaded, hardware=LOCAL, **at_bounds))


def test_what_the_machine_does_not_have_is_refused_with_where_it_was_written() -> None:
    loaded = load_recipe(
        "demo", ["optim.name=adamw", "model.heads=8", "parallel.tensor=8", "train.precision=fp16"]
    )
    told = refusals(lambda: refuse_impossible(Request(loaded=loaded, hardware=LOCAL)))
    assert told == [
        (
            "parallel.tensor", 8, "command line", "exceeds the 4 of a local node",
            "Tensor parallelism stays inside a node: at most 4.",
        ),
        (
            "train.precision", "fp16", "command line", "local has no units for fp16",
            "It has fp8, fp32; or choose another --hardware.",
        ),
    ]  # fmt: skip
    changing = ["train.precision=fp16", "train.precision_changes=[[96,'bf16'],[192,'fp8']]"]
    told = refusals(lambda: refuse_impossible(Request(loaded=load_recipe("demo", changing), hardware=LOCAL)))
    assert [(one[0], one[1]) for one in told] == [("train.precision", "bf16"), ("train.precision", "fp16")]
    unknown = load_recipe("demo", ["data.tokenizer=some.json"])
    assert vocabulary_of(unknown.recipe) == 0 and vocabulary_of(loaded.recipe) > 0
    assert refusals(lambda: refuse_impossible(Request(loaded=unknown, hardware=LOCAL))) == [
        (
            "model.vocabulary", "auto", "default",
            "is the tokenizer's, and no tokenizer.json can be read at some.json",
            "Say how many tokens it has: model.vocabulary=50257.",
        )
    ]  # fmt: skip


def test_a_last_step_that_is_whole_is_told_with_what_is_beyond() -> None:
    def words(*overrides: str, steps: int, batch: int) -> str:
        parts = dict.fromkeys(StepTime.__dataclass_fields__, 0.0)
        stretch = Stretch(
            first_step=0, first_sample=0, steps=steps, global_batch=batch, micro_batch=1, micro_batches=batch,
            precision="fp32", step=StepTime(**parts),
        )  # fmt: skip
        return last_step_words(load_recipe("demo", ["train.tokens=0", *overrides]).recipe, [stretch])

    assert words("train.samples=9001", steps=1126, batch=8) == (
        "up: the last step is whole, 7 samples beyond the length; Megatron-LM rounds down, to 1,125 steps"
    )
    assert words("train.samples=9008", steps=1126, batch=8) == ""
    assert words("train.steps=5", steps=1126, batch=8) == ""
    peers = ("elastic.inner_steps=10", "elastic.peers=2")
    assert "beyond" not in words("train.samples=80", *peers, steps=5, batch=8)
    assert ", 9 samples beyond" in words("train.samples=71", *peers, steps=5, batch=8)


@pytest.mark.parametrize(
    ("parallel", "world", "told", "number"),
    [
        ({}, 0, "parallel.data = 1 needs a multiple of 1 ranks, but 0 rank was started.", 1),
        (
            {"tensor": 2, "pipeline": 3}, 5,
            "parallel.tensor = 2 and parallel.pipeline = 3 needs a multiple of 6 ranks, but 5 ranks were "
            "started.", 6,
        ),
        (
            {"data": 4, "tensor": 2}, 1,
            "parallel.data = 4 and parallel.tensor = 2 needs 8 ranks, but 1 rank was started.", 8,
        ),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_told_with_those_that_do(
    parallel: dict[str, int], world: int, told: str, number: int
) -> None:
    error = wrong_ranks_error(ParallelSection(**parallel), world=world)  # type: ignore[arg-type]
    assert error.message == told
    assert error.remedy == (
        f"Start with --nproc {number} or change the degrees; parallel.data=auto takes what is there."
    )


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("n[3-1]", "[3-1] is not the range of a list of hosts."),
        ("n[0-100000]", "[0-100000] is not the range of a list of hosts."),
        ("-a", "'-a' is not a host name."),
        ("a-", "'a-' is not a host name."),
        ("a..b", "'a..b' is not a host name."),
        ("x" * 64, f"'{'x' * 64}' is not a host name."),
        ("b,a,c,a,b", "The host a is given twice."),
    ],
)
def test_what_is_no_list_of_hosts_is_told(text: str, refused: str) -> None:
    with pytest.raises(BloomeryError) as told:
        read_hosts(text)
    assert told.value.message == refused


def test_hosts_at_the_bounds_of_names_and_ranges_are_taken() -> None:
    assert read_hosts(f"{'x' * 63}.a-b_c,n[7-7]") == ["x" * 63 + ".a-b_c", "n7"]
    assert len(read_hosts("n[0-99999]")) == 100_000 and read_hosts("n[008-010]b")[2] == "n010b"
