"""All that wants an accelerator, in one command: correctness, then speed and memory.

    python benchmarks/gpu.py --within 840 --keep found.jsonl

Parts, in the order in which they run. check: three families learn in bf16 and in FP8 what they learn in fp32;
a run is saved, goes on and is exported; the tests that are marked `gpu` pass. speed: the bars of 1B and 8B,
FP8, compiled transformers, the outer step, and time by part. run: a real training with asynchronous saves,
and the planner calibrated there. styles: BLOOM's ALiBi, dropout and documents against a Llama of 1B. head:
memory against written-out logits. noise: the loss in FP8 over 500 steps. scalings: FP8 with finer scales.
sizes: all other sizes and lengths.

Each measurement is a process of its own, so that one that fails costs no other. A job begins only if what it
is predicted to take is left of `--within`. Each figure is printed as soon as it is there, and at the end a
table of all bars. With `--keep` a second call goes on where the first ended.

On a machine that has torch, transformers and nothing of ours: `gpu_bundle.py`. `--tiny` shows on any machine
that everything runs, in this one process.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from contract import Measurement, report
from gpu_parts import OTHER_LENGTHS, OTHER_SIZES, PARTS
from gpu_session import BARS, Session


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    session = Session(within_s=options.within, tiny=options.tiny, keep=options.keep)
    for name in options.parts:
        session.say(f"part {name}; {session.left_s:.0f} s are left")
        for found in PARTS[name](session, options):
            report(session.newly_seen(found), as_json=options.json)
    table = table_of_bars(session.seen, session.left_out)
    print(table, file=sys.stderr if options.json else sys.stdout, flush=True)
    return 0 if all(one.ok for one in session.seen.values()) else 1


def table_of_bars(seen: Mapping[str, Measurement], left_out: Sequence[str]) -> str:
    """All bars, with what was found of them, in at most 100 columns.

    seen: by title. left_out: jobs for which there was no time.
    """
    lines = [f"{'bar':<56}{'wanted':>10}{'found':>12}  verdict"]
    for title, bar in BARS.items():
        one = seen.get(title)
        if one is None:
            lines.append(f"{title:<56}{bar:>10}{'':>12}  not run")
            continue
        value, is_judged = one.value, one.bar is not None
        verdict = "failed" if math.isnan(value) else "met" if one.ok else "missed"
        verdict = verdict if is_judged or not one.ok else "not judged"
        lines.append(f"{title:<56}{bar:>10}{value:>12.4g}  {verdict}")
    lines += [f"left out: {what}"[:100] for what in left_out]
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--within", metavar="SECONDS", type=float, default=840.0, help="begin no job that takes longer"
    )
    parser.add_argument("--keep", metavar="FILE", type=Path, help="keep what jobs found, and go on from it")
    parser.add_argument("--sizes", nargs="+", choices=OTHER_SIZES, default=list(OTHER_SIZES))
    parser.add_argument("--sequences", nargs="+", type=int, default=list(OTHER_LENGTHS))
    parser.add_argument("--tiny", action="store_true", help="only show that it runs, on any machine")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
