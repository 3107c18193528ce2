"""`bloomery ckpt slim`: writes a checkpoint without its optimizer, or a file without unused storage."""

from __future__ import annotations

import json
from pathlib import Path

from bloomery.cli.arguments import parser
from bloomery.cli.ckpt_paths import local_checkpoint, parsed_with_target
from bloomery.errors import CheckpointError

EXAMPLES = """\
bloomery ckpt slim runs/demo/checkpoints/step-000500.i001 slim     keep the model alone
bloomery ckpt slim pytorch_model.bin slim.bin                      keep each tensor's own elements alone"""


def run(arguments: list[str]) -> int:
    """Write a smaller copy; the original stays as it is. Returns the exit status."""
    options = parser(
        "ckpt slim",
        "Write a smaller copy: of a checkpoint, the model without optimizer states; of a torch.save file,\n"
        "each tensor without the larger storage that it is a view of. The original stays as it is.",
        examples=EXAMPLES,
    )
    options.add_argument(
        "path", type=Path, metavar="RUN|CHECKPOINT|FILE", help="a run or checkpoint directory, or a .pt file"
    )
    options.add_argument("--json", action="store_true", help="print one JSON object")
    about = "the directory or file to write"
    args = parsed_with_target(options, arguments, metavar="TARGET", about=about, required=True)

    from bloomery.interchange.slim import slim_checkpoint, slim_file

    if not args.path.exists():
        raise CheckpointError(f"{args.path} does not exist.", remedy="Check the path.")
    if args.path.is_dir():
        done = slim_checkpoint(local_checkpoint(args.path), args.to)
    else:
        done = slim_file(args.path, args.to)
    if args.json:
        facts = {"path": str(done.path), "bytes_before": done.before, "bytes_after": done.after}
        print(json.dumps(facts | {"tensors_repaired": done.repaired}))
        return 0
    shared = f"; {done.repaired} tensors had been saved with unused storage" if done.repaired else ""
    print(f"{done.path}: {done.before / 1e6:,.1f} MB before, {done.after / 1e6:,.1f} MB now{shared}")
    return 0
