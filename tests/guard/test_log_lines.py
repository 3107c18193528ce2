import math

import numpy as np
import pytest
from tests.guard.reports import noisy

from bloomery.config.checkpoint import GuardSection
from bloomery.errors import StorageError
from bloomery.guard.log_lines import FIELDS, parsed_lines
from bloomery.guard.logs import read_columns
from bloomery.guard.replay import replay_columns
from bloomery.guard.verdict import Rewind

LOSSES = [*noisy(300), *[3.5] * 12]
LINES = [
    f" iteration {step:8d}/ 5000 | consumed samples: {512 * step:12d} "
    "| elapsed time per iteration (ms): 1000.0 | learning rate: 1.000E-04 | global batch size:   512 "
    f"| lm loss: {loss:.6E} | loss scale: 65536.0 | grad norm: 0.765 "
    "| number of skipped iterations:   0 | number of nan iterations:   0 |"
    for step, loss in enumerate(LOSSES, 1)
]
VALIDATION = (
    "-" * 60 + "\n validation loss at iteration {step} | lm loss value: 2.5E+00 | lm loss PPL: 1.2E+01 | \n"
    "validation results at iteration {step} | lm_loss value: 2.5E+00 |\n"
    "saving checkpoint at iteration {step:8d} to /ckpt\n(min, max) time across ranks (ms):\n{line}"
)


def each(change):
    return "\n".join(change(line) for line in LINES) + "\n"


ODD = {
    "Windows": each(lambda line: line + "\r"),
    "colours": each(lambda line: f"\x1b[32m{line}\x1b[0m".replace("loss: ", "loss: \x1b[1;31m")),
    "a progress bar": each(lambda line: "  5%|#     | 15/300\r" + line),
    "torchrun": each(lambda line: "[default7]:" + line),
    "time first": each(lambda line: f" [2025-08-01 09:31:44.{len(line)}]{line}"),
    "a logger": each(lambda line: f"2024-05-01 10:00:00,123 INFO iteration_log.py:8 RE-run - {line}"),
    "quoted": each(lambda line: "> " + line),
    "no spaces": each(lambda line: line.replace(" | ", "|").replace(": ", ":")),
    "equals signs": each(lambda line: line.replace(": ", "=")),
    "underscores": each(lambda line: line.replace("lm loss", "lm_loss").replace("grad norm", "grad_norm")),
    "capitals": each(lambda line: line.replace("iteration", "Iteration", 1).replace("lm loss", "LM loss")),
    "another name": each(lambda line: line.replace("lm loss", "train loss")),
    "other losses": each(lambda line: line.replace("| loss sc", "| z_loss: 1.0 | mtp_1 loss: 9.5 | loss sc")),
    "a loss before it": each(lambda line: line.replace("| lm loss", "| loss: 9.5 | lm loss")),
    "commas": each(lambda line: line.replace(" |", ",")),
    "samples first": each(lambda line: f" samples/sec: 37.{len(line)} |{line}"),
    "small exponents": each(lambda line: line.replace("E+00", "e+00").replace("E-04", "e-04")),
    "evaluations": "\n".join(
        VALIDATION.format(step=at, line=line) if at % 7 == 0 else line for at, line in enumerate(LINES, 1)
    )
    + "\n",
    "two ranks": each(lambda line: f"[default3]:{line}\n[default7]:{line}"),
    "shapes in turns": "\n".join(
        line if at % 2 else line.replace(" | number of nan iterations:   0", "")
        for at, line in enumerate(LINES)
    )
    + "\n",
}
ODD["Windows, shapes in turns"] = ODD["shapes in turns"].replace("\n", "\r\n")


@pytest.mark.parametrize("how", ODD)
def test_lines_of_many_makes_are_read_as_the_plain_ones_are(how):
    plain = parsed_lines(("\n".join(LINES) + "\n").encode())
    odd = parsed_lines(ODD[how].encode())
    if how == "two ranks":
        odd = odd[::2]
    assert plain[:, 0].tolist() == [*range(1, 313)]
    assert np.allclose(plain[:, 1], LOSSES, atol=1e-5) and np.array_equal(odd, plain, equal_nan=True)


def test_numbers_with_units_of_thousands_are_read():
    line = (
        "[default0]:07/02/2024 22:32:06 [INFO|DP=0|PP=3|TP=0|n5]: iteration: {step} / 100 "
        "| consumed_tokens: 1.05M | elapsed_time_per_iteration_ms: 12.3K | global_batch_size: 1.02K "
        "| lm_loss: {loss:.3g} | lr: 3.3e-05 | grad_norm: {norm} \n"
    )
    text = "".join(
        line.format(step=step, loss=9.25, norm="1.4M" if step % 2 else 870) for step in range(1, 40)
    )
    rows = [dict(zip(FIELDS, row, strict=True)) for row in parsed_lines(text.encode()).tolist()]
    assert [row["step"] for row in rows] == [*range(1, 40)]
    assert rows[0]["shared_seconds"] == pytest.approx(12.3) and rows[0]["global_batch"] == 1020
    assert (rows[0]["loss"], rows[0]["learning_rate"]) == (9.25, 3.3e-5)
    assert (rows[0]["gradient_norm"], rows[1]["gradient_norm"]) == (1.4e6, 870.0)


def test_losses_in_words_and_lines_without_one_are_no_numbers():
    lines = [*LINES[:20], LINES[20].replace("2.", "nan, not 2."), LINES[21].replace(" lm loss", " other")]
    lines += [
        line.replace(f"{loss:.6E}", "inf") for line, loss in zip(LINES[22:40], LOSSES[22:40], strict=True)
    ]
    losses = parsed_lines("\n".join(lines).encode() + b"\n")[:, 1]
    assert len(losses) == 40 and np.isfinite(losses[:20]).all()
    assert math.isnan(losses[20]) and math.isnan(losses[21]) and np.isposinf(losses[22:]).all()


def test_lines_that_another_process_tore_are_left_out_and_are_no_loss_that_is_not_a_number():
    torn = [
        line[:60] + "[rank 5] hello\n" + line[60:] if at % 9 == 5 else line for at, line in enumerate(LINES)
    ]
    torn[100], torn[101] = LINES[100][: LINES[100].index("E+00")], LINES[101][: LINES[101].index(" lm loss")]
    rows = parsed_lines("\n".join(torn).encode() + b"\n")
    whole = [at + 1 for at in range(len(LINES)) if at % 9 != 5 and at not in (100, 101)]
    assert rows[:, 0].tolist() == whole and np.isfinite(rows[:, 1]).all()


def columns_of(tmp_path, text, name="training.log"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_columns(path)


def test_ranks_that_print_the_same_line_are_one_and_no_restart(tmp_path):
    columns = columns_of(tmp_path, ODD["two ranks"])
    assert len(columns) == 312 and not columns.resumed.any()
    assert [finding.guard for finding in replay_columns(columns, GuardSection())] == ["spike", "spike"]


def short(step, loss):
    return f"iteration {step}/ 90000 | lm loss: {loss:.6E} |\n"


@pytest.mark.parametrize("every", [10, 25, 100])
def test_logs_with_a_line_in_many_steps_are_judged(tmp_path, every):
    losses = [*noisy(60, spread=0.004), 4.0, 4.5, 4.0, *noisy(9, spread=0.004)]
    text = "".join(short(40_000 + every * at, loss) for at, loss in enumerate(losses))
    found = replay_columns(columns_of(tmp_path, text), GuardSection())
    first = found[0].verdict
    assert isinstance(first, Rewind) and first.judged_step == 40_000 + 60 * every


def test_the_interval_of_a_log_may_change(tmp_path):
    early = [short(step, loss) for step, loss in enumerate(noisy(300), 1)]
    late = [short(300 + 100 * at, loss) for at, loss in enumerate([*noisy(40, spread=0.002), 4.0, 4.5], 1)]
    found = replay_columns(columns_of(tmp_path, "".join(early + late)), GuardSection())
    assert [type(finding.verdict) for finding in found] == [Rewind] and found[0].step == 300 + 4100


def test_a_mean_of_many_steps_that_comes_back_is_told_and_left_alone(tmp_path):
    losses = [*noisy(60, spread=0.004), 2.8, *noisy(20, seed=1, spread=0.004)]
    text = "".join(short(40_000 + 50 * at, loss) for at, loss in enumerate(losses))
    found = replay_columns(columns_of(tmp_path, text), GuardSection())
    assert [getattr(finding.verdict, "kind", "") for finding in found] == ["fast spike", "recovered"]


def test_a_second_run_in_the_same_file_is_judged_by_itself(tmp_path):
    falling = [2.3 + 6.0 * math.exp(-step / 120) + loss - 2.5 for step, loss in enumerate(noisy(1200))]
    run = "".join(short(step, loss) for step, loss in enumerate(falling, 1))
    assert replay_columns(columns_of(tmp_path, run + run), GuardSection()) == []


def test_what_is_skipped_is_told_in_steps_where_a_log_has_no_samples(tmp_path):
    text = "".join(short(step, loss) for step, loss in enumerate(LOSSES, 5001))
    rewind = next(
        one for one in replay_columns(columns_of(tmp_path, text), GuardSection()) if one.again is not None
    )
    assert rewind.in_steps and isinstance(rewind.again, Rewind)
    assert rewind.again.skip == range(5200, rewind.step + 200)
    assert "steps' samples from step 5,200" in rewind.again.reason
    with_samples = "".join(line + "\n" for line in LINES).replace(" | global batch size:   512", "")
    assert columns_of(tmp_path, with_samples).global_batch.tolist() == [512.0] * 312


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("\n".join(LINES).replace("lm loss", "denoising loss"), "denoising loss"),
        ("\n".join(LINES).encode("utf-16"), "iconv"),
        (b"\x1f\x8b\x08\x00whatever", "gunzip"),
        ("iteration 5 loss 3.2\n" * 9, "no field of its own: iteration 5 loss 3.2"),
        ("iteration 5 | loss 3.2 | lr 0.1\n" * 9, "no field of its own: iteration 5 "),
        ("[iteration 5/9] train_loss=3.2 lr=1\n" * 9, "no field of its own: iteration 5/9"),
    ],
)
def test_a_log_that_cannot_be_judged_is_refused_with_what_to_do(tmp_path, text, told):
    with pytest.raises(StorageError, match=told):
        columns_of(tmp_path, text)


def test_a_log_of_steps_without_a_loss_is_one_of_losses_that_are_no_numbers(tmp_path):
    text = "iteration 5 | loss scale: 1.0 | number of skipped iterations: 1 |\n" * 9
    assert np.isnan(columns_of(tmp_path, text).loss).all()


def test_a_loss_that_climbs_steadily_is_no_jump(tmp_path):
    """Means of ten steps vary so little that a slow wave is many of their spreads high."""
    waves = [
        2.35 + 0.03 * math.sin(at / 70) + loss for at, loss in enumerate(noisy(2000, level=0, spread=0.006))
    ]
    text = "".join(short(10 * at, loss) for at, loss in enumerate(waves, 1000))
    kinds = [finding.verdict for finding in replay_columns(columns_of(tmp_path, text), GuardSection())]
    assert not [verdict for verdict in kinds if isinstance(verdict, Rewind)]


@pytest.mark.parametrize("step", ["1202026-11-05 10:00:01 node-3", "12E", "1.2.3", "5-3/ 9", "7E-"])
def test_a_line_whose_step_another_process_wrote_into_is_left_out(step):
    torn = f" iteration {step} | lm loss: 2.5 | grad norm: 1.0 |"
    assert len(parsed_lines(f"{torn}\n".encode())) == 0
    found = parsed_lines("\n".join([*LINES[:20], torn, *LINES[20:40], ""]).encode())
    assert found[:, FIELDS.index("step")].tolist() == [*range(1, 41)]
    assert parsed_lines(b" iteration 7.: lm loss: 2.5 | lm loss: 3.5 |\n")[0, 0] == 7.0
