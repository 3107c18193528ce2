"""How logits are compared: where, with which tokens, within which memory, and what is said of it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bloomery.config.model import ModelSection
from bloomery.errors import ExportRefused
from bloomery.interchange import logits_check
from bloomery.interchange.logits_check import LogitsCheck, check_logits
from bloomery.model.shape import ResolvedModel, resolve

SECTION = ModelSection(layers=2, hidden=8, heads=2, norm="layernorm", position="learned", activation="gelu")


@pytest.fixture
def model() -> ResolvedModel:
    return resolve(SECTION, vocabulary=50, sequence_length=24)


def check(largest: float = 0.0, tolerance: float = 1e-5, way: str = "whole") -> LogitsCheck:
    return LogitsCheck(largest=largest, tolerance=tolerance, where="somewhere.", way=way)


def test_small_models_are_compared_here_and_larger_ones_elsewhere(
    model: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    size = logits_check._weight_bytes(model)
    embeddings, heads, norms = 50 * 8 + 24 * 8, 50 * 8, 2 * 8
    block = 4 * 8 * 8 + 2 * 8 * 32 + 2 * norms
    assert size == 4 * (embeddings + heads + 2 * block + norms), "fp32, without biases"

    def noted(where: str) -> Any:
        def compare(*given: object, **how: object) -> LogitsCheck:
            asked.append((where, given, how))
            return check(way=where)

        return compare

    monkeypatch.setattr(logits_check, "_compare", noted("here"))
    monkeypatch.setattr(logits_check, "_compared_elsewhere", noted("elsewhere"))
    paths = (tmp_path / "checkpoint", tmp_path / "export")
    for small, where in ((size, "here"), (size - 1, "elsewhere")):
        found = check_logits(model, *paths, dtype=torch.bfloat16, way="blocks", small_bytes=small)
        assert found.way == where
        assert asked.pop() == (where, (model, *paths), {"dtype": torch.bfloat16, "way": "blocks"})
    assert check_logits(model, *paths, dtype=torch.float32).way == "here"
    assert asked.pop() == ("here", (model, *paths), {"dtype": torch.float32, "way": "auto"})


@pytest.mark.parametrize("largest", [1.5e-5, float("nan"), float("inf")])
def test_logits_that_differ_by_more_than_rounding_are_refused_with_where(
    model: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: float
) -> None:
    monkeypatch.setattr(logits_check, "_compare", lambda *_, **__: check(largest))
    with pytest.raises(ExportRefused) as refused:
        check_logits(model, tmp_path, tmp_path, dtype=torch.float32)
    said = f"The exported model's logits differ from ours by up to {largest:.3g} (tolerated: 1e-05), "
    assert refused.value.message == said + "somewhere."
    monkeypatch.setattr(logits_check, "_compare", lambda *_, **__: check(1e-5))
    assert check_logits(model, tmp_path, tmp_path, dtype=torch.float32).largest == 1e-5


def test_the_other_process_is_asked_for_the_model_as_it_is_here(
    model: ResolvedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answers: list[Any] = []
    asked: list[tuple[list[str], dict[str, Any]]] = []

    def run(command: list[str], **how: Any) -> Any:
        asked.append((command, how))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(returncode=answer[0], stdout=answer[1], stderr=answer[2])

    def compare() -> LogitsCheck:
        return logits_check._compared_elsewhere(
            model, Path("checkpoint"), Path("export"), dtype=torch.float16, way="blocks"
        )

    monkeypatch.setattr(logits_check.subprocess, "run", run)
    answers.append((0, "a warning\n" + json.dumps(asdict(check(0.5, 0.25))) + "\n", "noise"))
    assert compare() == check(0.5, 0.25)
    ((command, how),) = asked
    assert command == [sys.executable, "-m", "bloomery.interchange.logits_check"]
    assert json.loads(how.pop("input")) == {
        "section": asdict(replace(SECTION, vocabulary=50, max_positions=24)),
        "checkpoint": str(tmp_path / "checkpoint"),
        "directory": str(tmp_path / "export"),
        "dtype": "float16",
        "way": "blocks",
    }
    assert how == {"capture_output": True, "text": True, "timeout": 86_400.0, "check": False}
    for status, told, said in (
        (1, "first\nMemoryError: no memory\n", "could not be compared with ours: MemoryError: no memory"),
        (-9, "", "could not be compared with ours: it ended with status -9"),
    ):
        answers.append((status, "", told))
        with pytest.raises(ExportRefused, match=f"{said}(?s:.*)Where memory was short"):
            compare()
    answers.append(subprocess.TimeoutExpired(command, 86_400.0))
    with pytest.raises(ExportRefused, match=r"(?s)took longer than 24 hours.*Nothing was kept"):
        compare()


def test_the_other_process_reads_what_it_is_asked_and_answers_in_one_line(
    model: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[object] = []

    def compare(*what: object, **how: object) -> LogitsCheck:
        given.extend([what, how])
        return check(0.5, 0.25)

    asked = {
        "section": asdict(replace(SECTION, vocabulary=50, max_positions=24)),
        "checkpoint": "/there/checkpoint",
        "directory": "/there/export",
        "dtype": "bfloat16",
        "way": "auto",
    }
    monkeypatch.setattr(logits_check, "_compare", compare)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked)))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    logits_check.main()
    assert json.loads(sys.stdout.getvalue()) == asdict(check(0.5, 0.25))  # type: ignore[attr-defined]
    (found, *paths), how = given  # type: ignore[misc, has-type]
    assert (found.vocabulary, found.max_positions, found.section.layers) == (50, 24, 2)
    assert paths == [Path("/there/checkpoint"), Path("/there/export")]
    assert how == {"dtype": torch.bfloat16, "way": "auto"}


def test_the_probe_is_of_the_whole_vocabulary_and_no_longer_than_the_positions(model: ResolvedModel) -> None:
    tokens = logits_check._probe_tokens(model)
    assert tokens.shape == (2, 24) and int(tokens.max()) < 50
    assert tokens[0, :3].tolist() == [0, 2654435761 % 50, (2 * 2654435761 % 2**32) % 50]
    long = resolve(replace(SECTION, max_positions=65), vocabulary=300, sequence_length=24)
    assert logits_check._probe_tokens(long).shape == (2, 64)
    rotary = resolve(replace(SECTION, position="rotary"), vocabulary=300, sequence_length=24)
    assert logits_check._probe_tokens(rotary).shape == (2, 64)
    assert len(logits_check._probe_tokens(long).unique()) > 90


def test_both_models_run_whole_where_they_take_less_than_the_share_of_the_free_memory(
    model: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = [1000.0]
    monkeypatch.setattr(logits_check, "_weight_bytes", lambda model: 300)
    monkeypatch.setattr(logits_check, "_free_memory_bytes", lambda: free[0])
    assert logits_check._way_that_fits(model) == "blocks"
    free[0] = 1001.0
    assert logits_check._way_that_fits(model) == "whole"


def test_the_free_memory_is_what_the_kernel_says_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "MemTotal:       9000 kB\nMemFree:   100 kB\nMemAvailable:    2000 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda path: text)
    assert logits_check._free_memory_bytes() == 2000 * 1024
    monkeypatch.setattr(Path, "is_file", lambda path: False)
    assert logits_check._free_memory_bytes() == float("inf")


def compared(
    own: torch.Tensor,
    their: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    *,
    note: str = "",
    way: str = "auto",
) -> LogitsCheck:
    monkeypatch.setattr(logits_check, "_whole", lambda *given: (own, their, note))
    monkeypatch.setattr(logits_check, "_by_blocks", lambda *given: (own, their + 2.0, note))
    monkeypatch.setattr(logits_check, "_way_that_fits", lambda model: "blocks")
    model: Any = None
    return logits_check._compare(model, Path("a"), Path("b"), dtype=torch.float32, way=way)  # type: ignore[arg-type]


def test_the_tolerance_follows_the_largest_logit_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.zeros(1, 3, 2)
    own[0, 1, 1] = -40.0
    their = own.clone()
    their[0, 2, 0] = 2.5e-4
    found = compared(own, their, monkeypatch, way="whole")
    assert (found.way, found.where, found.tolerance) == ("whole", "", pytest.approx(4e-4))
    assert found.largest == pytest.approx(2.5e-4)
    their[0, 2, 0] = 5e-4
    assert "most at position 2 of the probe" in compared(own, their, monkeypatch, way="whole").where
    assert compared(own, their, monkeypatch, way="whole", note="block 3").where == "block 3"
    small = compared(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2), monkeypatch, way="whole")
    assert small.tolerance == 1e-5
    their[0, 0, 0] = float("nan")
    assert compared(own, their, monkeypatch, way="whole").largest == float("inf")
    by_blocks = compared(own, own, monkeypatch)
    assert (by_blocks.way, by_blocks.largest) == ("blocks", 2.0)
    with pytest.raises(
        ExportRefused, match=r"logits are \(1, 2, 2\), ours \(1, 3, 2\)(?s:.*)Check vocab_size"
    ):
        compared(own, own[:, :2], monkeypatch, way="whole")


def test_the_hub_is_forbidden_during_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with logits_check._offline():
        assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in os.environ
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(RuntimeError), logits_check._offline():
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        raise RuntimeError
    assert os.environ["HF_HUB_OFFLINE"] == "0"


class Doubling(nn.Module):
    """A block that returns a tuple, as those of transformers may."""

    def forward(self, hidden: torch.Tensor, other: int) -> tuple[torch.Tensor, str]:
        return 2 * hidden + other, "more"


def test_what_left_a_block_enters_the_next_and_the_hooks_are_gone_afterwards() -> None:
    block = Doubling()
    logits, left = logits_check._through(block, None, lambda: block(torch.ones(2), 3)[0] + 100)
    assert logits.tolist() == [105.0] * 2 and left.tolist() == [5.0] * 2
    logits, left = logits_check._through(block, left, lambda: block(torch.ones(2), 3)[0] + 100)
    assert logits.tolist() == [113.0] * 2 and left.tolist() == [13.0] * 2
    with pytest.raises(ZeroDivisionError):
        logits_check._through(block, left, lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert block(torch.ones(1), 0)[0].item() == 2.0
