"""`bloomery note`: adds a person's note to the chronicle of a run."""

from __future__ import annotations

import json

from bloomery.cli.argument_values import is_utf8
from bloomery.cli.arguments import parser
from bloomery.cli.run_inputs import existing_run
from bloomery.errors import BloomeryError

EXAMPLES = """\
bloomery note runs/mine "node7 went back to the vendor"
bloomery note runs/mine                                   write chronicle.md anew, without a note
"""


def run(arguments: list[str]) -> int:
    """Add a note and write the chronicle; returns 0."""
    options = parser(
        "note",
        "Add a note to RUN/chronicle.md, which writes itself from the records of the run: each problem, its\n"
        "diagnosis, what was done and what it cost. Notes, and what stands below its last line, are kept.",
        examples=EXAMPLES,
    )
    options.add_argument("run", metavar="RUN", help="the run directory")
    options.add_argument("text", metavar="TEXT", nargs="?", help="the note")
    options.add_argument("--by", default="", metavar="NAME", help="who writes it (default: your account)")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = options.parse_args(arguments)
    from bloomery.operate.ledger.chronicle import add_note, write_chronicle

    rundir = existing_run(chosen.run)
    if chosen.text is not None:
        if not chosen.text.strip():
            raise BloomeryError("The note is empty.", remedy='Write it: bloomery note RUN "what happened"')
        for text in (chosen.text, chosen.by):
            if not is_utf8(text):
                raise BloomeryError("The note is not UTF-8.", remedy="Give it in UTF-8 (LC_ALL=C.UTF-8).")
        add_note(rundir, chosen.text, by=chosen.by)
    path = write_chronicle(rundir)
    if chosen.json:
        print(json.dumps({"noted": chosen.text, "chronicle": None if path is None else str(path)}))
    elif path is None:
        print("noted; the chronicle begins with the first start of the run")
    else:
        print(path)
    return 0
