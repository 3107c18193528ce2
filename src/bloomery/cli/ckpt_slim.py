"""`bloomery ckpt slim`: a checkpoint without its optimizer, and files without borrowed storage."""

from __future__ import annotations

import json
from pathlib import Path

from bloomery.cli.arguments import parser
from bloomery.cli.ckpt_words import local_checkpoint, parsed_with_target
from bloomery.errors import CheckpointError

EXAMPLES = """\
bloomery ckpt slim runs/demo/checkpoints/step-000500.i001 slim     the model alone
bloomery ckpt slim pytorch_model.bin slim.bin                      own elements only"""


def run(arguments: list[str]) -> int:
    """Write a slim copy; the original stays. Returns the exit status."""
    options = parser(
        "ckpt slim",
        "Write a copy that takes less: a checkpoint's model without optimizer states, or a torch.save file "
        "whose tensors were saved with the whole storage they are views of. The original stays as it is.",
        examples=EXAMPLES,
    )
    options.add_argument(
        "path", type=Path, metavar="RUN|CHECKPOINT|FILE", help="run or checkpoint directory, or .pt file"
    )
    options.add_argument("--json", action="store_true", help="one JSON object")
    about = "new directory, or new file"
    given = parsed_with_target(options, arguments, metavar="TARGET", about=about, required=True)

    from bloomery.checkpoint.slim import slim_checkpoint, slim_file

    if not given.path.exists():
        raise CheckpointError(f"{given.path} does not exist.", remedy="Check the path.")
    if given.path.is_dir():
        done = slim_checkpoint(local_checkpoint(given.path), given.to)
    else:
        done = slim_file(given.path, given.to)
    if given.json:
        told = {"path": str(done.path), "bytes_before": done.before, "bytes_after": done.after}
        print(json.dumps(told | {"tensors_repaired": done.repaired}))
        return 0
    shared = f"; {done.repaired} tensors had been saved with more than their own" if done.repaired else ""
    print(f"{done.path}: {done.before / 1e6:,.1f} MB before, {done.after / 1e6:,.1f} MB now{shared}")
    return 0
