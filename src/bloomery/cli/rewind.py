"""`bloomery rewind`: asks a run to go back to an earlier checkpoint, and says what would be lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.cli.argument_values import not_negative
from bloomery.cli.arguments import parser
from bloomery.cli.skip import add_samples, samples_of, skipped_facts, skipped_words, when_words

if TYPE_CHECKING:
    from bloomery.checkpoint.format.catalogue import CommittedCheckpoint
    from bloomery.events.journal import History

EXAMPLES = """\
bloomery rewind runs/demo --to-step 400 --dry-run       say from which checkpoint, and what would be lost
bloomery rewind runs/demo --to-step 400                 go back, and make the same steps again
bloomery rewind runs/demo --to-step 400 --steps 401:700 go back, and leave out the samples of these steps"""


def run(arguments: list[str]) -> int:
    """Run `bloomery rewind`; returns the exit status."""
    options = parser(
        "rewind",
        "Let a run go back to its newest checkpoint at or before a step. The run takes the request after\n"
        "its next step, all ranks alike; a run between peers goes back together. What was abandoned stays\n"
        "in the journal and is no longer part of the run.",
        examples=EXAMPLES,
    )
    options.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    options.add_argument(
        "--to-step", type=not_negative, required=True, metavar="STEP", help="the latest step to keep"
    )
    add_samples(options, required=False)
    options.add_argument("--dry-run", action="store_true", help="say what would be lost; ask for nothing")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    args = options.parse_args(arguments)
    from bloomery.checkpoint.format.catalogue import checkpoints
    from bloomery.cli.run_inputs import run_directory
    from bloomery.errors import CheckpointError
    from bloomery.events.journal import read_history
    from bloomery.events.switches import write_request

    rundir = run_directory(args.run)
    history, listed = read_history(rundir), checkpoints(rundir)
    early = [checkpoint for checkpoint in listed if checkpoint.step <= args.to_step]
    if not early:
        steps = ", ".join(f"{checkpoint.step:,}" for checkpoint in listed) or "none"
        raise CheckpointError(
            f"{rundir.path} has no checkpoint at or before step {args.to_step:,} (there are: {steps})",
            remedy="Go back to a later step, or restore an older checkpoint with `bloomery ckpt copy`.",
        )
    newest = max([listed[-1].step, *(made.report.step for made in history.steps)])
    if args.to_step > newest:
        raise CheckpointError(
            f"{rundir.path} is at step {newest:,}, and cannot go back to step {args.to_step:,}",
            remedy="Give a step that it has made.",
        )
    facts = lost_facts(early[-1], history)
    samples = samples_of(args, history)
    if samples:
        facts["skip"] = skipped_facts(samples, _up_to(early[-1].step, history))
    if not args.dry_run:
        skip = f" {samples.start}:{samples.stop}" if samples else ""
        write_request(rundir, "rewind", f"{args.to_step}{skip}", keep=False)
    if args.json:
        print(json.dumps({"asked": not args.dry_run, **facts}))
        return 0
    print(
        f"From {facts['checkpoint']}: {facts['steps']:,} steps, {facts['samples']:,} samples and "
        f"{facts['seconds'] / 3600:.2f} hours of training are undone (steps {facts['to_step'] + 1:,} to "
        f"{facts['last_step']:,}), and those that the run makes until it takes the request."
    )
    if samples:
        print(skipped_words(facts["skip"]))
    print(when_words(rundir, dry_run=args.dry_run))
    return 0


def lost_facts(checkpoint: CommittedCheckpoint, history: History) -> dict[str, Any]:
    """Return the steps, samples and seconds of training that a run loses by going back to a checkpoint."""
    undone = [made.report for made in history.steps if made.report.step > checkpoint.step]
    kept_reports = [made.report for made in history.steps if made.report.step <= checkpoint.step]
    consumed = kept_reports[-1].consumed_samples if kept_reports else 0
    return {
        "checkpoint": checkpoint.name,
        "to_step": checkpoint.step,
        "last_step": undone[-1].step if undone else checkpoint.step,
        "steps": len(undone),
        "samples": undone[-1].consumed_samples - consumed if undone else 0,
        "seconds": round(sum(report.seconds for report in undone), 3),
    }


def _up_to(step: int, history: History) -> History:
    """Return the history as it is after going back to a step."""
    from dataclasses import replace

    return replace(history, steps=tuple(made for made in history.steps if made.report.step <= step))
