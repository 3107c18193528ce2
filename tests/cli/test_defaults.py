"""What options are where nobody gives them, and that those which are given reach what they are for."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.chaos.faults import KINDS
from bloomery.cli import (
    calibrate,
    chaos,
    ckpt_copy,
    ckpt_list,
    coordinate,
    dashboard,
    data,
    drill,
    evaluate,
    fork,
    generate,
    launch,
    peer,
    plot,
    preflight,
    report,
    simulate,
    status,
    submit,
    sync,
    top,
    train,
    watch,
)
from bloomery.cli.arguments import THE_PARSER, ParserFound
from bloomery.operate.drill.faults import ORDINARY

RUN = Path("run")
LOADING = {"dtype": "auto", "by_layer": False}
START = {"recipe": "demo", "overrides": (), "run": None}
DEFAULTS: dict[str, tuple[Callable[[], Namespace], dict[str, Any]]] = {
    "generate": (
        lambda: generate._parser().parse_intermixed_args(["run"]),
        {
            **{"path": RUN, "prompt": [], "option": "", "prompts": None, "batch": 8, "chat": False},
            **{"system": "", "max_tokens": 200, "temperature": 0.8, "top_k": 0, "top_p": 1.0, "seed": 0},
            **LOADING,
            **{"fallback": False, "json": False},
        },
    ),
    "evaluate": (
        lambda: evaluate._parser().parse_intermixed_args(["run"]),
        {
            **{"path": RUN, "files": [], "by_document": False, "text_field": "text", "separator": ""},
            **{"tasks": None, "limit": None, "shots": None, "include": None, "follow": False},
            **{"every_steps": 1, "patience": 120, "table": False, "batch": 8, "json": False},
            "window": None,
            **LOADING,
        },
    ),
    "watch": (
        lambda: watch._parse(["run"]),
        {
            **{"runs": ["run"], "once": False, "interval": 15, "to": [], "to_file": None, "ping": None},
            **{"escalate_min": 30.0, "pending_h": 1.0, "idle_h": None, "disk_h": 24.0},
            **{"ack": None, "json": False},
        },
    ),
    "launch": (
        lambda: launch._parse(["demo"]),
        {
            **START,
            **{"nproc": None, "nnodes": None, "rdzv": None, "join_timeout": 600, "fallback": False},
            **{"supervise": False, "spares": 0, "job": None},
        },
    ),
    "train": (
        lambda: train._parse(["demo"]),
        {**START, "nproc": 1, "fallback": False, "plain": False, "log": None, "no_hints": False},
    ),
    "peer": (
        lambda: peer._parse(["demo"]),
        {**START, "nproc": 1, "fallback": False, "plain": False, "supervise": False},
    ),
    "drill": (
        lambda: drill._parse(["demo"]),
        {
            **START,
            **{"timeouts": None, "json": False, "nproc": 2, "faults": ORDINARY, "rounds": 1, "random": 0},
            **{"seed": 0, "steps": 5, "patience": 600.0},
        },
    ),
    "preflight": (
        lambda: preflight._parse(["demo"]),
        {
            **START,
            **{"nproc": None, "long": False, "storage": False, "gigabytes": None, "release": None},
            "json": False,
        },
    ),
    "coordinate": (
        lambda: coordinate._parser().parse_args([]),
        {
            **{"data": Path("coordinator"), "listen": None, "certificates": None, "init_certs": None},
            **{"run": None, "days": 3650, "renew": False, "revoke": None, "peers": None, "hosts": ""},
            **{"grant": False, "endpoints": None, "status": None, "adopt": None, "json": False},
        },
    ),
    "dashboard": (
        lambda: dashboard._parse(["run"]),
        {
            **{"runs": ["run"], "host": "127.0.0.1", "port": dashboard._PORT, "interval": 2.5},
            **{"plan": None, "actions": False, "token_file": None, "tls_cert": None, "tls_key": None},
        },
    ),
    "sync": (
        lambda: sync._parse(["run", "s3://b/x"]),
        {
            **{"run": RUN, "place": "s3://b/x", "every": 60.0, "once": False, "checkpoints": False},
            **{"public": False, "beside": False, "json": False},
        },
    ),
    "follow": (
        lambda: sync._follow_options(["run"]),
        {"source": "run", "into": None, "interval": None, "lines": 20, "steps": 10, "once": False},
    ),
    "plot": (
        lambda: plot._parse(["run"]),
        {
            **{"runs": ["run"], "output": Path("curves.png"), "columns": list(plot.COLUMNS)},
            **{"against": "step", "begin": None, "end": None, "log": False, "json": False},
        },
    ),
    "top": (lambda: top._parse(["run"]), {"runs": ["run"], "once": False, "interval": 2.0, "columns": 80}),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_options_that_nobody_gives_are_as_the_help_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    parsed, expected = DEFAULTS[name]
    assert vars(parsed()) == expected | {"version": None}


TEXTS = {
    **{"text_field": "text", "separator": "", "bad_documents": "skip", "longest_line_mib": 256},
    **{"held_out_every": 0, "end_of_document": "<|endoftext|>", "json": False},
}
LIST = {"verify": False, "single_pass": False, "json": False}
SOME: dict[str, tuple[Callable[[list[str]], int], tuple[str, ...], dict[str, Any]]] = {
    "calibrate": (
        calibrate.run,
        (),
        {"to": Path("this-machine.toml"), "disk": Path(), "json": False, "quiet": False},
    ),
    "chaos": (
        chaos.chaos,
        (),
        {
            **{
                "words": (),
                "peers": 4,
                "nproc": 1,
                "rate": 25e6,
                "rtt": 0.05,
                "loss": 0.0,
                "directory": None,
            },
            **{"minutes": 60.0, "faults": 20, "plain": False, "seed": 0, "kinds": tuple(KINDS), "gap": 5.0},
            **{"longest": 8.0, "back": 3.0, "json": False},
        },
    ),
    "ckpt backup": (ckpt_copy.backup, ("run",), {"run": RUN, "workers": 8, "json": False}),
    "ckpt list": (ckpt_list.show_list, ("run",), {"run": "run", "all": False, **LIST}),
    "ckpt prune": (ckpt_list.prune, ("run",), {"run": RUN, "dry_run": False, "json": False}),
    "fork": (fork.run, ("run", "new"), {"run": RUN, "new": Path("new"), "to_step": None, "json": False}),
    "note": (report.note, ("run",), {"run": "run", "text": None, "by": "", "json": False}),
    "simulate": (
        simulate.run,
        (),
        {
            **{"scenario": None, "overrides": (), "lives": 32, "seed": 0, "sweep": None, "png": None},
            "json": False,
        },
    ),
    "status": (status.run, (), {"run": None, "under": Path("runs"), "nodes": False, "json": False}),
    "submit": (
        submit.run,
        ("demo",),
        {
            **START,
            **{"nproc": None, "keep_queued": None, "rehearse": False, "dry_run": False, "json": False},
        },
    ),
}


@pytest.mark.parametrize("name", SOME)
def test_options_of_a_command_that_nobody_gives_are_as_its_help_says(name: str) -> None:
    command, words, expected = SOME[name]
    with pytest.raises(ParserFound) as found:
        command([THE_PARSER])
    assert found.value.parser is not None
    assert vars(found.value.parser.parse_intermixed_args([*words])) == expected | {"version": None}


DATA: dict[tuple[str, ...], dict[str, Any]] = {
    ("audit", "demo", "--to", "x"): {
        **{"recipe": "demo", "overrides": [], "out": Path("x"), "against": [], "text_field": "text"},
        **{"tasks": [], "include": None, "ngram": 13, "tokens": 10**9, "json": False},
    },
    ("fetch", "a", "--to", "x"): {
        **{"sources": ["a"], "to": Path("x"), "shares": 1, "share": 0, "seed": 0, "ratio": [], "threads": 8},
        **{"include": [], "exclude": [], "limit": None, "dry_run": False, "anew": False, "json": False},
    },
    ("tokenizer", "a", "--to", "x.json"): {
        **{"sources": ["a"], "out": Path("x.json"), "vocabulary": 8192, "split": "text", **TEXTS},
    },
    ("tokenize", "a", "--tokenizer", "t", "--to", "x"): {
        **{"sources": ["a"], "out": Path("x"), "tokenizer": "t", "workers": len(os.sched_getaffinity(0))},
        **{"engine": "auto", "part": None, **TEXTS},
    },
    ("verify", "a"): {
        **{"prefix": Path("a"), "tokenizer": None, "end_of_document": "<|endoftext|>", "vocabulary": None},
        "json": False,
    },
    ("report", "demo"): {
        "recipe": "demo", "overrides": [], "png": None, "overlap": False, "json": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("words", DATA, ids=lambda words: words[0])
def test_options_of_data_that_nobody_gives_are_as_the_help_says(words: tuple[str, ...]) -> None:
    given = vars(data._parser().parse_args(words))
    del given["command"]
    given.pop("error", None)
    assert given == DATA[words] | {"version": None}


class Generated:
    """Stands for what loads a model and writes texts, and keeps what it was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loaded: tuple[Path, dict[str, Any]] | None = None
        self.written: list[tuple[Any, ...]] = []
        self.warned: tuple[int, int] | None = None
        monkeypatch.setattr("bloomery.cli.run_inputs.load_saved", self.load)
        stand_in = SimpleNamespace(Sampling=lambda **given: given)
        monkeypatch.setitem(sys.modules, "bloomery.evaluate.generate", stand_in)  # type: ignore[arg-type]
        monkeypatch.setattr(generate, "_opening", lambda options, saved, prompt: [*prompt])
        monkeypatch.setattr(generate, "_warn_if_long", self.warn)
        monkeypatch.setattr(generate, "_write_as_it_comes", lambda *given: self.written.append(given[1:]))
        monkeypatch.setattr(generate, "_write_together", self.write)

    def load(self, path: Path, **given: Any) -> Any:
        self.loaded = path, given
        return SimpleNamespace(saved="saved", decoder="decoder")

    def warn(self, saved: str, opening: int, new: int) -> None:
        assert saved == "saved"
        self.warned = opening, new

    def write(self, options: Namespace, prompts: list[str], *given: Any, first: int) -> None:
        self.written.append((prompts, *given, first))


def test_options_of_generate_reach_the_model_and_the_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Generated(monkeypatch)
    words = (
        "--temperature 0.5 --top-k 7 --top-p 0.9 --seed 11 --max-tokens 33 --dtype bf16 --by-layer --fallback"
    )
    sampling = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 11}
    assert generate.run(["run", "hello", *words.split()]) == 0
    assert seen.loaded == (RUN, {"dtype": "bf16", "by_layer": True, "fallback": True})
    assert seen.warned == (5, 33) and seen.written == [("hello", [*"hello"], "saved", "decoder", sampling)]
    seen.written.clear()
    assert generate.run(["run", "a", "bc", "d", "--batch", "2", *words.split()]) == 0
    assert seen.written == [
        (["a", "bc"], [["a"], ["b", "c"]], "saved", "decoder", sampling, 0),
        (["d"], [["d"]], "saved", "decoder", sampling, 2),
    ]
    assert seen.warned == (2, 33)


def test_options_of_an_evaluation_reach_the_model_and_say_what_is_scored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded: list[Mapping[str, Any]] = []
    monkeypatch.setattr(evaluate, "load_saved", lambda path, **given: loaded.append(given) or "model")
    monkeypatch.setattr(evaluate, "_report", lambda args, model, groups: groups)
    monkeypatch.setattr(evaluate, "_files", lambda args, model: f"files of {model}")
    monkeypatch.setattr(evaluate, "_held_out", lambda model: f"held-out of {model}")
    for name in ("score_once", "follow", "show_table"):
        monkeypatch.setattr(evaluate, name, lambda args, name=name: name)
    file = tmp_path / "a.txt"
    file.touch()
    assert evaluate.run(["run", "--dtype", "bf16", "--by-layer"]) == "held-out of model"
    assert evaluate.run(["run", str(file)]) == "files of model"
    assert loaded == [{"dtype": "bf16", "by_layer": True}, {"dtype": "auto", "by_layer": False}]
    tasks = ["run", "--tasks", "a", "--limit", "3", "--shots", "0"]
    assert evaluate.run(tasks) == "score_once" and evaluate.run([*tasks, "--follow"]) == "follow"
    assert evaluate.run(["run", "--table"]) == "show_table"
    from bloomery.errors import DataError

    with pytest.raises(DataError, match=r"There is no file .*b\.txt"):
        evaluate.run(["run", str(file), str(tmp_path / "b.txt")])
    assert len(loaded) == 2
