"""The parts of `gpu.py`: which jobs each has, and which figures and bars come of them.

A new job is a call of `Session.measured` in a part, and what it measures is a kind in `gpu_workers.py`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from contract import Measurement
from gpu_figures import LENGTH, against_peers, figures, outer_step, ratio, speed_job
from gpu_run import (
    LOSS_CHUNK,
    STEPS,
    CommandFailed,
    NoTime,
    planned,
    recipe_text,
    roomy_directory,
    step_times,
    trained,
)
from gpu_session import FAMILIES, ROOT, TOLERANCES, Figures, Session

from bloomery.config.recipe import TrainSection

STYLES: dict[str, dict[str, Any]] = {
    "BLOOM style": {"family": "bloom"},
    "BLOOM style, dropout 0.1": {"family": "bloom", "dropout": 0.1},
    "documents of 1,024 tokens": {"family": "llama", "document_tokens": 1024},
}
NOISE_RUNS = (("bf16", 0), ("fp8", 0), ("bf16", 1), ("bf16", 2))
SCALINGS = ("row", "block")
"""What shares a scale, of those for which an H200 has units."""
OTHER_SIZES = ("0.3B", "3B", "1B", "8B")
OTHER_LENGTHS = (4096, 2048, 8192)
NO_TESTS = 5
"""pytest's status where none of the tests that it was given is left to run."""


def _check(session: Session, options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """Each family in each precision against itself in fp32, a run that is resumed, and the marked tests.

    All at once, since none of it is timed.
    """
    precisions = ["fp32", *TOLERANCES]
    with ThreadPoolExecutor(1 if session.tiny else len(FAMILIES) + 2) as pool:
        families = [
            pool.submit(
                session.measured, kind="learn", size=session.size("0.3B"), family=name, precisions=precisions
            )
            for name in FAMILIES
        ]
        others = [
            pool.submit(check, session)
            for title, check in (
                ("a stopped run goes on and is exported", _resumes_and_exports),
                ("marked tests fail", _marked_tests),
            )
            if not session.knows(title)
        ]
        for family, waiting in zip(FAMILIES, families, strict=True):
            losses = waiting.result()
            if "left_out" not in losses:
                yield _near_fp32(session, family, losses)
        for other in others:
            yield other.result()


def _near_fp32(session: Session, family: str, losses: Figures) -> list[Measurement]:
    exact = losses.get("fp32", float("nan"))
    found = []
    for precision in TOLERANCES:
        loss = losses.get(precision, float("nan"))
        reference = losses.get("failure", f"after 8 steps: {loss:.4f} and {exact:.4f}")
        share = abs(loss - exact) / exact
        found.append(
            session.judged(f"{family} in {precision}: loss from fp32's", share, "", reference=reference)
        )
    return found


def _resumes_and_exports(session: Session) -> list[Measurement]:
    """Train a few steps, some more by the same command, and export."""
    title = "a stopped run goes on and is exported"
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        train = ["train", "demo-small", "--run", str(run), "data.sources=['python:stdlib']"]
        train += [
            "data.tokenizer_vocabulary=300",
            "model.layers=2",
            "schedule.warmup=2",
            "log.tensorboard=false",
        ]
        # `ckpt export` compares the logits of transformers with ours.
        export = ["ckpt", "export", str(run), str(Path(directory) / "exported")]
        try:
            for arguments in ([*train, "train.steps=4"], [*train, "train.steps=8"], export):
                session.command([sys.executable, "-m", "bloomery", *arguments], job="resume")
        except NoTime:
            return []
        except CommandFailed as failure:
            return [session.judged(title, 0.0, "", reference=str(failure))]
        lines = (run / "journal" / "0-0.jsonl").read_text(encoding="utf-8").splitlines()
        starts = [event["step"] for event in map(json.loads, lines) if event["event"] == "start"]
    reference = f"bloomery train twice, ckpt export; it began at the steps {starts}"
    return [session.judged(title, float(starts == [0, 4]), "", reference=reference)]


def _marked_tests(session: Session) -> list[Measurement]:
    command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "tests/gpu"]
    try:
        printed = session.command(command, job="tests", accepts=(0, NO_TESTS))
    except NoTime:
        return []
    except CommandFailed as failure:
        return [session.judged("marked tests fail", 1.0, "", reference=str(failure))]
    return [session.judged("marked tests fail", 0.0, "", reference=printed.strip().splitlines()[-1])]


def _speed(session: Session, options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """The bars of 1B and 8B."""
    base = speed_job(session, "1B", LENGTH, "bf16")
    session.say(base.get("machine", ""))
    yield figures(session, "1B llama, bf16, 4,096", base)
    yield outer_step(session, base)
    wide = speed_job(session, "8B", LENGTH, "bf16")
    yield figures(session, "8B llama, bf16, 4,096", wide)
    yield against_peers(session, "1B", LENGTH, base, ("transformers",))
    narrow = speed_job(session, "8B", LENGTH, "fp8")
    yield figures(session, "8B llama, fp8, 4,096", narrow)
    yield ratio(session, "8B, 4,096: FP8 against bf16", wide, narrow)


def _scalings(session: Session, options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """FP8 with finer scales than one for each factor, where there is a setting for them."""
    if "fp8_scaling" not in {field.name for field in fields(TrainSection)}:
        return
    base = speed_job(session, "8B", LENGTH, "bf16")
    for scaling in SCALINGS:
        job = {"kind": "speed", "size": session.size("8B"), "length": session.length(LENGTH)}
        narrow = session.measured(**job, precision="fp8", settings={"fp8_scaling": scaling})
        yield figures(session, f"8B llama, fp8 by {scaling}, 4,096", narrow)
        yield ratio(session, f"8B, 4,096: FP8 by {scaling} against bf16", base, narrow)


def _sizes(session: Session, options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """All sizes, lengths and precisions, and the peers beside them."""
    for length in options.sequences:
        for size in options.sizes:
            base = speed_job(session, size, length, "bf16")
            narrow = speed_job(session, size, length, "fp8")
            yield figures(session, f"{size} llama, bf16, {length:,}", base)
            yield figures(session, f"{size} llama, fp8, {length:,}", narrow)
            yield ratio(session, f"{size}, {length:,}: FP8 against bf16", base, narrow)
            if length == LENGTH and size != "8B":  # a peer's 8B does not fit
                yield against_peers(session, size, length, base, ("transformers", "minimal model"))


def _styles(session: Session, options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """Each style's step against that of a Llama of the same sizes, all in bf16."""
    base = speed_job(session, "1B", LENGTH, "bf16")
    for name, style in STYLES.items():
        told = session.measured(
            kind="speed", size=session.size("1B"), length=session.length(LENGTH), precision="bf16", **style
        )
        yield figures(session, f"1B {name}, bf16, 4,096", told)
        yield ratio(session, f"1B, 4,096: {name} against llama", base, told)


def _head(session: Session, options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """What head and loss hold at most, beside fp32 logits written out."""
    sizes = (512, 32, 4096) if session.tiny else (8192, 2048, 131_072)
    tokens, hidden, vocabulary = sizes
    told = session.measured(kind="head", tokens=tokens, hidden=hidden, vocabulary=vocabulary)
    if "left_out" in told:
        return
    ours = told.get("ours", {}).get("bytes", float("nan"))
    reference = told.get("failure") or "; ".join(
        f"{name} {figures['bytes'] / 2**30:.4g} GiB, {1e3 * figures['seconds']:.4g} ms"
        for name, figures in told.items()
    )
    reference = f"{reference}; ours by {LOSS_CHUNK} tokens"
    titles = {
        "naive": "head, 8,192 x 131,072: memory of the naive one",
        "naive compiled": "head, 8,192 x 131,072: memory of the naive one, compiled",
    }
    yield [
        session.judged(title, told[name]["bytes"] / ours, "x", reference=reference)
        if name in told
        else session.judged(title, float("nan"), "x", reference=reference)
        for name, title in titles.items()
        if name in told or name == "naive"
    ]


def _noise(session: Session, options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """FP8's loss from that of bf16 with the same initial values, in the spread of bf16 over seeds."""
    told = session.measured(
        kind="noise",
        size=session.size("0.3B"),
        length=session.length(1024),
        runs=[list(one) for one in NOISE_RUNS],
    )
    if "left_out" in told:
        return
    last = {name: figures["last"] for name, figures in told.items() if name != "failure"}
    spread = [loss for name, loss in last.items() if name.startswith("bf16")]
    off = abs(last.get("fp8 0", float("nan")) - last.get("bf16 0", float("nan")))
    noise = max(spread) - min(spread) if len(spread) == 3 else float("nan")
    reference = told.get("failure") or ", ".join(f"{name}: {loss:.4f}" for name, loss in last.items())
    title = "FP8's loss from bf16's, in spreads of seeds"
    yield [session.judged(title, off / noise if noise else float("nan"), "", reference=reference)]


def _run(session: Session, options: argparse.Namespace) -> Iterator[list[Measurement]]:
    """A real training of 1B with saves beside it, and what the planner says of it, calibrated here."""
    base = speed_job(session, "1B", LENGTH, "bf16")
    sizes, samples = _sizes_of(session)
    parameters = 12 * sizes["layers"] * sizes["hidden"] ** 2 + 2 * sizes["vocabulary"] * sizes["hidden"]
    directory = roomy_directory(parameters)
    try:
        recipe = directory / "recipe.toml"
        steps = 12 if session.tiny else STEPS
        length = session.length(LENGTH)
        text = recipe_text(sizes, length=length, samples=samples, steps=steps, compiled=not session.tiny)
        recipe.write_text(text, encoding="utf-8")
        yield from _trained_and_planned(session, recipe, directory, base)
    finally:
        shutil.rmtree(directory)


def _trained_and_planned(
    session: Session, recipe: Path, directory: Path, base: Figures
) -> Iterator[list[Measurement]]:
    """base: what a step of the same sizes took; its seconds count if the training has none."""
    seconds, peak = base.get("seconds", float("nan")), base.get("bytes") or float("nan")
    title = "1B: step beside an asynchronous save"
    try:
        events = trained(recipe, directory / "run", partial(session.command, job="train"))
    except NoTime:
        pass
    except CommandFailed as failure:
        yield [session.judged(title, float("nan"), "x", reference=str(failure))]
    else:
        times = step_times(events)
        reference = (
            f"mean of {len(times.beside)} steps beside saves to {directory.parent} against the median of "
            f"{len(times.alone)} others; their median {times.median_ratio:.4g} x"
        )
        reference += "".join(f"; {one['why']}" for one in events if one["event"] == "checkpoint_degraded")
        yield [session.judged(title, times.mean_ratio, "x", reference=reference)]
        seconds = median(times.alone) if times.alone else seconds
        if session.tiny:  # the memory of a CPU is that of its process
            peak = max(event["memory_bytes"] for event in events if event["event"] == "step")
    titles = ("1B: planned step time, off by", "1B: planned memory, off by")
    try:
        step_s, peak_bytes = planned(
            recipe, _calibrated(session, directory), partial(session.command, job="plan")
        )
    except NoTime:
        return
    except CommandFailed as failure:
        yield [session.judged(one, float("nan"), "%", reference=str(failure)) for one in titles]
        return
    time_off, memory_off = (abs(one - 1) for one in (step_s / seconds, peak_bytes / peak))
    told_s = f"planned {step_s:.4g} s, measured {seconds:.4g} s"
    told_bytes = f"planned {peak_bytes / 2**30:.4g} GiB beside the context, measured {peak / 2**30:.4g}"
    yield [
        session.judged(titles[0], 100 * time_off, "%", reference=told_s),
        session.judged(titles[1], 100 * memory_off, "%", reference=told_bytes),
    ]


def _calibrated(session: Session, directory: Path) -> Path:
    """The hardware file of this machine; for tiny sizes another's, since to measure takes a minute."""
    if session.tiny:
        return ROOT / "hardware" / "h200.toml"
    machine = directory / "machine.toml"
    calibrate = ["calibrate", "--to", str(machine), "--disk", str(directory)]
    session.command([sys.executable, "-m", "bloomery", *calibrate], job="calibrate")
    return machine


def _sizes_of(session: Session) -> tuple[dict[str, int], int]:
    from gpu_workers import SIZES, shape_of

    size, length = session.size("1B"), session.length(LENGTH)
    return SIZES[size], shape_of({"size": size, "length": length}).samples


Part = Callable[[Session, argparse.Namespace], Iterator[list[Measurement]]]
PARTS: dict[str, Part] = {
    "check": _check,
    "speed": _speed,
    "run": _run,
    "styles": _styles,
    "head": _head,
    "noise": _noise,
    "scalings": _scalings,
    "sizes": _sizes,
}
