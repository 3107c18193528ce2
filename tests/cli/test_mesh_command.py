from __future__ import annotations

import json
import sys

import pytest

from bloomery.cli import main


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["mesh", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_blooms_384_ranks_are_shown_by_node_in_lines_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "tr11-176b")
    assert status == 0
    assert "384 ranks on 48 nodes, pipeline 12 × data 8 × tensor 4" in out
    assert "96 groups of 4, inside a node" in out
    assert out.splitlines()[-1].split() == ["node-48", "376–383", "11", "6,", "7", "0–3"]
    assert max(map(len, out.splitlines())) <= 100


def test_json_gives_every_rank_its_place_for_any_world(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(
        capsys, "llmjp-172b", "--world", "1024", "--nodes", "gpu[001-128]", "parallel.data=auto", "--json"
    )
    rows = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(rows) == 1024
    assert rows[70] == {"rank": 70, "host": "gpu009", "pipeline": 1, "data": 1, "tensor": 2}


def test_a_layout_that_cannot_be_is_refused_with_one_that_can(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("tr1-13b-tiny", "parallel.tensor=4")
    status, out, err = run(capsys, *tiny, "--world", "8", "--nodes", "a,b,c,d")
    assert status == 1 and not out
    assert run(capsys, *tiny, "--world", "8", "--nodes", "a,b,c,d", "--json") == (1, "", err)
    assert "ranks 0–3 are on a and b" in err
    assert "parallel.tensor=2 parallel.pipeline=1 parallel.data=4" in err
    status, _, err = run(capsys, *tiny, "--world", "6")
    assert status == 1 and "needs a multiple of 4 ranks" in err


def test_nothing_slow_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(sys.modules)
    run(capsys, "tr11-176b")
    assert "torch" not in set(sys.modules) - before
