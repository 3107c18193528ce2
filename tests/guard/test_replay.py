import json
import math
import signal
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.guard.reports import noisy, report

from bloomery.cli import guard as guard_command
from bloomery.config.checkpoint import GuardSection
from bloomery.errors import StorageError
from bloomery.guard import logs, replay
from bloomery.guard.judge import watching_guards
from bloomery.guard.logs import Columns, read_columns
from bloomery.guard.replay import replay_columns
from bloomery.guard.verdict import CarryOn, Save

REPEATS = ". The run goes back and makes the same steps again"
"""What the ladder adds to the reason of a guard."""
LINE = (
    " iteration {step:8d}/  311541 | consumed samples: {samples:12d} "
    "| elapsed time per iteration (ms): {ms:.1f} | learning rate: {rate:.3E} "
    "| global batch size: {batch:5d} | lm loss: {loss:.6E} | loss scale: {scale:.1f} "
    "| grad norm: {norm:.3f} | num zeros: 0.0 | number of skipped iterations: {skipped:3d} "
    "| number of nan iterations:   0 |\n"
)


def line(step, loss=2.5, **changed):
    usual = dict(samples=step * 8, ms=1000.0, rate=1e-4, batch=8, scale=4096.0, norm=1.0, skipped=0)
    return LINE.format(step=step, loss=loss, **{**usual, **changed})


def columns_of(tmp_path, text) -> Columns:
    path = tmp_path / "training.log"
    path.write_text(text)
    return read_columns(path)


def replayed(columns, **settings):
    return [(one.step, one.guard) for one in replay_columns(columns, GuardSection(**settings))]


def line_by_line(columns: Columns):
    """What each guard says when it is shown every line, as in a run."""
    found = []
    for guard in watching_guards(GuardSection()):
        history = guard.fresh()
        for index in range(len(columns)):
            if columns.resumed[index]:
                history = guard.resumed(history)
            history, verdict = guard.judge(history, columns.report(index))
            if not isinstance(verdict, CarryOn | Save):
                found.append((index, guard.name, verdict.reason))
    return sorted(found)


def eventful(seed):
    """Everything at once: spikes, a slow rise, NaNs, skipped updates, a gap, other batches and paces."""
    random = np.random.default_rng(seed)
    steps = np.arange(1, 6001)
    losses = 2.5 + 4.0 * np.exp(-steps / 150) + 0.02 * random.standard_t(4, 6000)
    losses[1500:1520] += 0.5
    losses[2500:3400] += 0.001 * np.arange(900)
    losses[4000:4002] = math.nan
    norms = np.exp(0.1 * random.standard_normal(6000))
    norms[1490:1500] *= 8
    paces = 1000 * (1 + 0.005 * random.standard_normal(6000))
    paces[5000:5100] *= 1.2
    text = []
    for index, step in enumerate(steps.tolist()):
        changed = {"batch": 16 if step > 2000 else 8, "ms": paces[index] * (2 if step > 2000 else 1)}
        changed |= {"norm": norms[index], "samples": step * 8, "scale": 4096.0 if step < 4500 else 256.0}
        if 3700 < step < 3705:
            changed["skipped"] = 1
        if not 4600 < step < 4900:
            text.append(line(step, losses[index], **changed))
    return "".join(text)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_replay_says_what_the_guards_say_line_by_line(tmp_path, seed):
    columns = columns_of(tmp_path, eventful(seed))
    found = [(one.line, one.guard, one.verdict.reason) for one in replay_columns(columns, GuardSection())]
    assert [line for line, *_ in found] == sorted(line for line, *_ in found)
    expected = line_by_line(columns)
    assert len({name for _, name, _ in expected}) >= 4
    bare = [(line, name, reason.partition(REPEATS)[0]) for line, name, reason in found]
    assert sorted(bare) == expected and any(REPEATS in reason for *_, reason in found)


def spiking(steps, *, at, **changed):
    """A log whose loss is high from a step on, for a while, and is no number 30 steps later."""
    losses = noisy(steps)
    losses[at - 1 : at + 15] = [3.5] * 16
    losses[at + 29] = math.nan
    return "".join(line(step, loss, **changed) for step, loss in enumerate(losses, 1))


def test_many_lines_are_judged_by_processes_that_say_the_same(tmp_path, monkeypatch):
    logs = [columns_of(tmp_path, spiking(300, at=at)) for at in (200, 230)]
    alone = [replay_columns(columns, GuardSection()) for columns in logs]
    monkeypatch.setattr(replay, "_MANY_LINES", 300)
    monkeypatch.setattr(replay.os, "cpu_count", lambda: 2)
    assert [replay_columns(columns, GuardSection()) for columns in logs] == alone
    for found, at in zip(alone, (200, 230), strict=True):
        steps = [one.step for one in found]
        assert steps == sorted(steps) and steps[-1] == at + 30
        assert [one.guard for one in found] == ["spike"] * 3 + ["not_finite"]


@pytest.mark.parametrize(
    ("rewind_steps", "batch", "skip", "in_steps"),
    [
        (100, 8, range(99 * 8, 209 * 8 + 200 * 8), False),
        (100, 0, range(99, 209 + 200), True),
        (198, 8, range(8, 209 * 8 + 200 * 8), False),
        (199, 8, range(209 * 8 + 200 * 8), False),
        (5000, 0, range(209 + 200), True),
    ],
)
def test_what_a_second_rewind_leaves_out_begins_after_the_step_that_the_run_goes_back_to(
    tmp_path, rewind_steps, batch, skip, in_steps
):
    columns = columns_of(tmp_path, spiking(300, at=200, batch=batch))
    found = replay_columns(columns, GuardSection(spike_rewind_steps=rewind_steps, spike_skip_steps=200))
    (rewind,) = [one for one in found if one.again is not None]
    assert (rewind.step, rewind.again.skip, rewind.in_steps) == (209, skip, in_steps)
    assert rewind.verdict.to_step == rewind.again.to_step == max(199 - rewind_steps, 0)
    assert ("steps' samples" in rewind.again.reason) is in_steps


def test_a_step_to_go_back_to_is_found_though_it_is_thousands_of_lines_ago(tmp_path):
    columns = columns_of(tmp_path, spiking(1600, at=1500))
    found = replay_columns(columns, GuardSection(spike_rewind_steps=1400))
    (rewind,) = [one for one in found if one.again is not None]
    assert rewind.again.skip.start == 99 * 8


def test_calm_lines_are_judged_in_blocks_and_not_one_by_one(tmp_path, monkeypatch):
    calls, real = [], logs.Columns.report
    monkeypatch.setattr(
        logs.Columns, "report", lambda columns, index: calls.append(index) or real(columns, index)
    )
    steps = np.arange(1, 5001)
    losses = 2.5 + 0.02 * np.random.default_rng(1).standard_normal(5000)
    columns = columns_of(
        tmp_path, "".join(line(step, loss) for step, loss in zip(steps, losses, strict=True))
    )
    assert replay_columns(columns, GuardSection()) == []
    assert len(calls) < 5000 / 4, "a log of 1 GB has three million lines"


def test_lines_are_read_alike_in_pieces_and_at_once(tmp_path, monkeypatch):
    text = eventful(3)
    whole = columns_of(tmp_path, text)
    monkeypatch.setattr(logs, "CHUNK_BYTES", 10_000)
    pieces = read_columns(tmp_path / "training.log", workers=2)
    for name in ("step", "loss", "gradient_norm", "shared_seconds", "refused"):
        assert np.array_equal(getattr(whole, name), getattr(pieces, name), equal_nan=True), name


def test_a_line_without_a_loss_is_a_loss_that_is_not_a_number(tmp_path):
    text = [line(step, loss) for step, loss in enumerate(noisy(400), 1)]
    text[300] = text[300].replace(" lm loss: ", " other loss: ")
    columns = columns_of(tmp_path, "".join(text))
    assert math.isnan(columns.loss[300]) and columns.learning_rate[300] == 1e-4
    assert replayed(columns) == [(301, "not_finite")]


def test_fields_may_be_missing_and_other_lines_lie_between(tmp_path):
    short = " iteration {step:8d}/ 100 | lm loss: {loss:.4E} | grad norm: {norm:.3f} |\n"
    text = "".join(
        "time (ms)\n[exiting program] iteration over\n" + short.format(step=step, loss=loss, norm=1.0)
        for step, loss in enumerate([*noisy(300), *[3.5] * 12], 1)
    )
    columns = columns_of(tmp_path, text)
    assert len(columns) == 312 and math.isnan(columns.learning_rate[0])
    assert ("spike" in {guard for _, guard in replayed(columns)}) and columns.loss[-1] == 3.5


def test_lines_may_begin_with_the_time_and_differ_from_one_to_the_next(tmp_path):
    text = (
        line(1, 2.0) + "[2024-05-01 10:00:00.123]" + line(2, 2.5) + line(3, 3.0).replace("num zeros", "zeros")
    )
    columns = columns_of(tmp_path, text + line(4, 3.5).replace(" | num zeros: 0.0", ""))
    assert columns.step.tolist() == [1, 2, 3, 4] and columns.loss.tolist() == [2.0, 2.5, 3.0, 3.5]
    assert columns.shared_seconds.tolist() == [1.0] * 4


def test_a_line_that_is_still_being_written_is_left_to_another_time(tmp_path):
    whole = line(1) + line(2)
    columns = columns_of(tmp_path, whole + line(3)[:-30])
    assert columns.step.tolist() == [1, 2]
    assert columns_of(tmp_path, whole + line(3)).step.tolist() == [1, 2, 3]


def test_the_search_for_a_loss_scale_at_the_start_is_no_alarm(tmp_path):
    sought = [line(step, 9.0, skipped=1, scale=2.0 ** (32 - step)) for step in range(1, 21)]
    sought = [one.replace(" lm loss: 9.000000E+00 |", "") for one in sought]
    rest = [line(step, loss) for step, loss in enumerate(noisy(400), 21)]
    assert replayed(columns_of(tmp_path, "".join(sought + rest))) == []


def journal(tmp_path, records):
    path = tmp_path / "0-0.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_journal_is_judged_with_its_resumes(tmp_path):
    before = [{"event": "step", **report(step, loss).to_json()} for step, loss in enumerate(noisy(300), 1)]
    worse = [1.02 * loss for loss in noisy(60, seed=1)]
    after = [{"event": "step", **report(step, loss).to_json()} for step, loss in enumerate(worse, 251)]
    path = journal(
        tmp_path, [{"event": "start", "step": 0}, *before, {"event": "start", "step": 250}, *after]
    )
    columns = read_columns(path)
    assert columns.resumed.sum() == 1 and columns.resumed[300] == 1
    found = replay_columns(columns, GuardSection(spike=False))
    assert [(one.guard, type(one.verdict).__name__) for one in found] == [("resume_parity", "Stop")]
    assert 255 <= found[0].step <= 300


def test_the_peers_of_each_step_are_read_from_a_journal(tmp_path):
    path = journal(tmp_path, [{"event": "step", **report(step, peers=step).to_json()} for step in (1, 3)])
    columns = read_columns(path)
    assert [columns.report(index).peers for index in (0, 1)] == [1, 3]


def test_a_start_at_the_end_of_one_piece_belongs_to_the_next(tmp_path, monkeypatch):
    steps = [{"event": "step", **report(step, loss).to_json()} for step, loss in enumerate(noisy(40), 1)]
    path = journal(tmp_path, [*steps[:20], {"event": "start", "step": 20}, *steps[20:]])
    size = len((json.dumps(steps[0]) + "\n").encode())
    for piece in range(size // 2, 3 * size, size // 3):
        monkeypatch.setattr(logs, "CHUNK_BYTES", piece)
        columns = read_columns(path, workers=1)
        assert columns.step.tolist() == list(range(1, 41)) and np.flatnonzero(columns.resumed).tolist() == [
            20
        ]


def test_a_file_without_any_line_of_a_training_is_refused(tmp_path):
    with pytest.raises(StorageError, match="holds no line of a training"):
        columns_of(tmp_path, "nothing\nhere\n")
    with pytest.raises(StorageError, match="cannot be read"):
        read_columns(tmp_path / "absent")


def test_a_growing_log_is_followed_until_it_is_interrupted(tmp_path):
    path = tmp_path / "training.log"
    path.write_text("starting\n")
    command = [sys.executable, "-m", "bloomery", "guard", "replay", str(path), "--follow", "--json"]
    # Who started the tests may ignore interrupts, which children inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        signal.signal(signal.SIGINT, before)
        try:
            losses = [*noisy(300), *[3.5] * 11]
            with path.open("a") as log:
                for step, loss in enumerate(losses[:305], 1):
                    log.write(line(step, loss))
                log.write(line(306, 3.5)[:40])  # a line that is being written
                log.flush()
                assert process.stdout is not None
                began = json.loads(process.stdout.readline())
                assert (began["step"], began["kind"]) == (303, "fast spike")
                log.write(line(306, 3.5)[40:])
                log.writelines(line(step, loss) for step, loss in enumerate(losses[306:], 307))
            rewind = json.loads(process.stdout.readline())
            assert (rewind["step"], rewind["action"]) == (310, "rewind")
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_followed_log_that_begins_anew_is_read_at_once_and_told_like_the_first(
    tmp_path, monkeypatch, capsys
):
    path, pauses = tmp_path / "training.log", []
    spiking = [line(step, loss) for step, loss in enumerate([*noisy(300), *[3.5] * 11], 1)]
    path.write_text("".join(spiking) + line(312))

    def rotated(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt
        path.write_text("".join(spiking))

    monkeypatch.setattr(guard_command, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=rotated))
    assert guard_command._follow(Namespace(log=path, png=None, json=True), GuardSection()) == 0
    told = [json.loads(words)["step"] for words in capsys.readouterr().out.splitlines()]
    assert told and told[: len(told) // 2] == told[len(told) // 2 :] and 303 in told
