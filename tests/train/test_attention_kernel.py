"""The kernel of attention is decided once, by the first rank, and a resumed run takes the same."""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.real_ranks import train_on_ranks
from tests.train.test_loop import events, go
from torch import nn

from bloomery import durable
from bloomery.config.load import load_recipe
from bloomery.config.recipe import Recipe
from bloomery.errors import StorageError, TrainingFailed
from bloomery.events.journal import read_journal
from bloomery.events.run_directory import RunDirectory
from bloomery.parallel.axis import Axis
from bloomery.parallel.mesh import Mesh
from bloomery.train import attention_kernel
from bloomery.train.attention_kernel import AttentionChoice, AttentionDecision, decide_attention

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def recipe(*settings: str) -> Recipe:
    return load_recipe("demo", ["train.precision=bf16", "model.vocabulary=512", *settings]).recipe


@pytest.fixture
def rundir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU whose measurements are scripted: at each, flash is quicker by turns. What was measured."""
    sizes_seen: list[Any] = []

    def measure(kernels: Any, sizes: Any, device: Any, **_: Any) -> Any:
        sizes_seen.append(sizes)
        flash = 0.5 if len(sizes_seen) % 2 else 3.0
        return {"cudnn": 1e-3, "flash": flash * 1e-3}, {"efficient": "no groups"}

    monkeypatch.setattr(attention_kernel, "measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    return sizes_seen


def decided(rundir: RunDirectory, *settings: str, mesh: Mesh | None = None) -> AttentionDecision:
    return decide_attention(recipe(*settings), mesh or Mesh(device=GPU), rundir, vocabulary=512)


def test_the_quickest_kernel_is_taken_again_by_a_resume_and_in_later_phases(
    rundir: RunDirectory, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = decided(rundir)
    assert (first.kernel, first.why) == ("flash", "the quickest here")
    again = decided(rundir, "train.micro_batch_changes=[[8, 2]]", "log.every_steps=7")
    assert (again.kernel, again.why) == ("flash", "the quickest when the run began")
    assert again.seconds == first.seconds and len(measured) == 1
    # Other sizes are measured anew, and so is another kind of GPU.
    assert decided(rundir, "train.micro_batch=2").kernel == "cudnn" and len(measured) == 2
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    assert decided(rundir, "train.micro_batch=2").kernel == "flash" and len(measured) == 3


def test_what_was_measured_is_said_with_sizes_and_times(rundir: RunDirectory, measured: list[Any]) -> None:
    mesh = Mesh(device=GPU, tensor=Axis(ranks=(0, 1)))
    settings = ("model.heads=8", "model.kv_heads=4", "model.hidden=512", "data.sequence_length=256")
    told = decided(rundir, *settings, "train.micro_batch=2", mesh=mesh)
    assert told.line() == (
        "attention by flash (the quickest here); forward and backward of 2 × 256 tokens, 4 heads of queries "
        "and 2 of keys of 64, bfloat16: flash 0.5 ms, cudnn 1 ms, efficient cannot (no groups)"
    )
    assert json.loads(json.dumps(told.to_json())) == told.to_json()


def test_a_damaged_file_is_measured_anew_with_a_word(
    rundir: RunDirectory, measured: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    for damage in (b"{", b"[]", b'{"decision": {"more": 1}}', b"\xff"):
        rundir.attention.write_bytes(damage)
        with caplog.at_level(logging.WARNING):
            decided(rundir)
        assert "is damaged" in caplog.text
        caplog.clear()
    assert len(measured) == 4
    decided(rundir)
    assert len(measured) == 4 and not caplog.text


def test_a_disk_that_does_not_keep_or_give_the_kernel_ends_the_start(
    rundir: RunDirectory, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write_whole", full)
        with pytest.raises(StorageError, match="Keeping the kernel of attention"):
            decided(rundir)
    rundir.attention.mkdir()
    with pytest.raises(StorageError, match="Reading the kernel of attention"):
        decided(rundir)


@pytest.mark.parametrize(
    ("settings", "device"),
    [
        ((), CPU),
        (("model.position=alibi",), GPU),
        (("model.attention_dropout=0.1",), GPU),
        (("data.mask_documents=true",), GPU),
    ],
)
def test_nothing_is_measured_where_there_is_nothing_to_choose(
    settings: tuple[str, ...], device: torch.device, rundir: RunDirectory, measured: list[Any]
) -> None:
    assert decided(rundir, *settings, mesh=Mesh(device=device)).kernel == ""
    assert not measured and not rundir.attention.exists()


def test_deterministic_runs_take_the_first_kernel_that_is_repeatable_unmeasured(
    rundir: RunDirectory, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        attention_kernel, "refusal_of", lambda kernel, *_: "no fp32" if kernel == "flash" else ""
    )
    assert decided(rundir, "train.deterministic=true").kernel == "efficient"
    monkeypatch.setattr(attention_kernel, "refusal_of", lambda *_: "nothing")
    assert decided(rundir, "train.deterministic=true").kernel == "math"
    assert not measured and not rundir.attention.exists()


def test_a_named_kernel_that_cannot_run_is_one_clear_error(rundir: RunDirectory) -> None:
    with pytest.raises(
        TrainingFailed, match=r"train.attention = cudnn cannot .* on cpu: needs a GPU"
    ) as told:
        decided(rundir, "train.attention=cudnn", mesh=Mesh(device=CPU))
    assert "train.attention = auto" in told.value.remedy


def test_a_run_computes_by_the_kernel_that_it_names_and_tells_of_it(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    loaded, path = start("train.attention=math", "guard.stop_at_step=2", "model.hidden_dropout=0.0")
    with torch.profiler.profile() as profile:
        go(loaded, path, say=lines.append)
    ran = {event.key for event in profile.key_averages()}
    assert "aten::_safe_softmax" in ran and not any("flash_attention" in name for name in ran)
    assert "attention by math (train.attention = math)" in lines
    (begun,) = events(path, "start")
    assert begun["attention"]["kernel"] == "math"


def _measure_differently(slower_on_first: str, rank: int) -> None:
    """Have a CPU measure, and find one kernel slower on the first rank, and the other on the others."""

    def measure(*_: Any, **__: Any) -> Any:
        slow = slower_on_first if rank == 0 else {"flash": "math", "math": "flash"}[slower_on_first]
        return {"flash": 1.0, "math": 1.0} | {slow: 2.0}, {}

    attention_kernel.measure = measure  # type: ignore[assignment]
    attention_kernel._chooses_by_time = lambda device: True


def test_ranks_agree_with_the_first_and_a_resumed_run_with_the_first_start(
    tmp_path: Path, corpus: Path
) -> None:
    path = tmp_path / "run"
    settings = [f"data.sources={corpus}", "model.hidden_dropout=0.0", "train.ramp_up=[]"]
    for stop, slower in ((2, "flash"), (4, "math")):
        ended = train_on_ranks(
            *(2, path, *settings, f"guard.stop_at_step={stop}"), plant=partial(_measure_differently, slower)
        )
        assert len(set(ended)) == 1, ended
    rundir = RunDirectory(path)
    for rank in range(2):
        starts = [event for event in read_journal(rundir.journal(rank=rank)) if event["event"] == "start"]
        assert [event["attention"]["kernel"] for event in starts] == ["math", "math"]
    assert json.loads(rundir.attention.read_text())["decision"]["kernel"] == "math"


def test_a_run_that_goes_on_elsewhere_takes_the_kernel_that_its_checkpoint_names(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [{"flash": 2.0, "math": 1.0}, {"flash": 1.0, "math": 2.0}]
    monkeypatch.setattr(attention_kernel, "_chooses_by_time", lambda device: True)
    monkeypatch.setattr(attention_kernel, "measure", lambda *_, **__: (seconds.pop(0), {}))
    settings = ("model.hidden_dropout=0.0", f"checkpoint.url=file://{tmp_path}/store")
    for stop, name in ((2, "here"), (3, "elsewhere")):
        loaded, path = start(*settings, f"guard.stop_at_step={stop}", name=name)
        go(loaded, path)
        (begun,) = events(path, "start")
        assert begun["step"] == (0 if name == "here" else 2) and begun["attention"]["kernel"] == "math"
    assert begun["attention"]["why"] == "the quickest when the run began" and len(seconds) == 1
    assert not RunDirectory(path).attention.exists()


def test_what_a_checkpoint_names_goes_before_the_run_directory_and_other_gpus_measure_anew(
    rundir: RunDirectory,
    measured: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved = replace(decided(rundir), kernel="cudnn").to_json()

    def resumed(saved: Any) -> str:
        return decide_attention(recipe(), Mesh(device=GPU), rundir, vocabulary=512, saved=saved).kernel

    assert resumed(saved) == "cudnn" and resumed({}) == "flash" and len(measured) == 1
    assert resumed({**saved, "of": "another version"}) == "flash"
    assert "the checkpoint's kernel of attention is not understood" in caplog.text
    rundir.attention.unlink()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    assert resumed(saved) == "cudnn" and len(measured) == 2, "the second measurement finds it the quickest"


def test_a_file_of_before_says_what_it_was_found_for_beside_the_decision(
    rundir: RunDirectory, measured: list[Any]
) -> None:
    decision = decided(rundir).to_json()
    old = {"found_for": decision.pop("found_for"), "decision": {**decision, "kernel": "cudnn"}}
    rundir.attention.write_text(json.dumps(old))
    assert decided(rundir).kernel == "cudnn" and len(measured) == 1


def test_the_kernel_is_chosen_once_in_a_process_and_saved_only_where_it_was_measured() -> None:
    asked: list[Any] = []
    module = nn.Module()
    measured = AttentionDecision(kernel="math", why="", found_for={"device": "H200"})
    for decision, is_saved in ((measured, True), (replace(measured, found_for={}), False)):
        choice = AttentionChoice(module, decide=lambda saved, own=decision: asked.append(saved) or own)  # type: ignore[arg-type, misc, func-returns-value]
        assert choice.to_json() == {}
        flash_was = torch.backends.cuda.flash_sdp_enabled()
        choice.begin({"kernel": "math"})
        choice.begin({"kernel": "flash"})
        assert choice.decision is decision and module.tiles_plain_attention is False
        assert torch.backends.cuda.flash_sdp_enabled() is False
        assert choice.to_json() == (decision.to_json() if is_saved else {})
        choice.close()
        assert torch.backends.cuda.flash_sdp_enabled() is flash_was is True
    assert asked == [{"kernel": "math"}] * 2
