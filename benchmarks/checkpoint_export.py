"""What export and import of a model in Hugging Face form hold in memory, and how well the logits agree.

    python benchmarks/checkpoint_export.py [--json] [--megabytes 1000] [--family llama …]

Each family is exported in a process of its own. Growth: the process' peak of resident memory, less what it
had after its imports. The logits are compared in another process, block by block.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FAMILIES = {
    "llama": {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu"},
    "bloom": {
        "norm": "layernorm",
        "position": "alibi",
        "activation": "gelu_tanh",
        "bias": True,
        "tied": True,
        "embedding_norm": True,
    },
    "gpt2": {
        "norm": "layernorm",
        "position": "learned",
        "activation": "gelu_tanh",
        "bias": True,
        "tied": True,
    },
}
HIDDEN, HEADS, VOCABULARY, LENGTH = 1024, 16, 32_000, 1024
ALLOWED_BYTES = 256 << 20
AGREEMENT = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--megabytes", type=int, default=1000, help="of the model, in fp32")
    parser.add_argument("--family", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(_export(options.one, options.megabytes)))
        return
    for family in options.family:
        command = [sys.executable, __file__, "--one", family, "--megabytes", str(options.megabytes)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        for row in _rows(family, json.loads(done.stdout)):
            print(json.dumps(row) if options.json else f"{row['name']}: {row['value']:.4g} {row['unit']}")


def _rows(family: str, found: dict[str, float]) -> list[dict[str, object]]:
    bar = found["largest"] + ALLOWED_BYTES
    return [
        {
            "name": f"export {family}: growth of resident memory",
            "value": found["growth"] / 2**20,
            "unit": "MiB",
            "reference": found["model"] / 2**20,
            "bar": bar / 2**20,
            "ok": found["growth"] <= bar,
        },
        {
            "name": f"import {family}: growth of the process's own memory",
            "value": found["import_growth"] / 2**20,
            "unit": "MiB",
            "reference": found["model"] / 2**20,
            "bar": bar / 2**20,
            "ok": found["import_growth"] <= bar,
        },
        {
            "name": f"export {family}: largest difference of a logit",
            "value": found["difference"],
            "unit": "",
            "reference": found["tolerance"],
            "bar": AGREEMENT,
            "ok": found["difference"] <= AGREEMENT,
        },
    ]


def _export(family: str, megabytes: int) -> dict[str, float]:
    import torch

    from bloomery.checkpoint.format.state import whole
    from bloomery.checkpoint.save.direct import save_checkpoint
    from bloomery.config.model import ModelSection
    from bloomery.model.shape import logical_shapes, resolve

    def resolved(layers: int):
        section = ModelSection(
            layers=layers,
            hidden=HIDDEN,
            heads=HEADS,
            vocabulary=VOCABULARY,
            max_positions=LENGTH,
            **FAMILIES[family],
        )
        return resolve(section, vocabulary=VOCABULARY, sequence_length=LENGTH)

    def bytes_of(model) -> int:
        return sum(4 * torch.Size(shape).numel() for shape in logical_shapes(model).values())

    block = bytes_of(resolved(2)) - bytes_of(resolved(1))
    model = resolved(max(1, round((megabytes * 1e6 - bytes_of(resolved(1))) / block) + 1))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        generator = torch.Generator().manual_seed(1)
        entries = []
        for name, shape in logical_shapes(model).items():
            value = torch.randn(shape, generator=generator) * (0.02 if len(shape) > 1 else 0.1)
            entries.append(whole(f"model.{name}", value + 1.0 if name.endswith("norm.weight") else value))
        checkpoint = save_checkpoint(Path(directory), entries, step=0, incarnation=1)
        largest = max(entry.nbytes for entry in entries)
        # The values lived here: the export is measured in a process that never held them.
        command = [sys.executable, "-c", _MEASURED, family, str(checkpoint), str(Path(directory) / "out")]
        begun = time.perf_counter()
        done = subprocess.run(
            [*command, str(model.section.layers)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr)
        told = json.loads(done.stdout.splitlines()[-1])
        command = [sys.executable, "-c", _IMPORTED, *(f"{directory}/{name}" for name in ("out", "run"))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        told |= json.loads(done.stdout.splitlines()[-1])
        return told | {
            "largest": largest,
            "model": bytes_of(model),
            "seconds": time.perf_counter() - begun,
        }


_MEASURED = """
import json, sys
sys.path.insert(0, "benchmarks")
from pathlib import Path
from checkpoint_export import FAMILIES, HEADS, HIDDEN, LENGTH, VOCABULARY
from bloomery.interchange import huggingface
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # what an import of a model loads
from bloomery.config.model import ModelSection
from bloomery.model.shape import resolve
family, checkpoint, out, layers = sys.argv[1:]
section = ModelSection(layers=int(layers), hidden=HIDDEN, heads=HEADS, vocabulary=VOCABULARY,
                       max_positions=LENGTH, **FAMILIES[family])
model = resolve(section, vocabulary=VOCABULARY, sequence_length=LENGTH)
def resident(what):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: it was the parent's
before = resident("VmRSS")
done = huggingface.export(model, Path(checkpoint), Path(out), way="blocks")
growth = resident("VmHWM") - before
print(json.dumps({"growth": growth, "difference": done.largest_difference, "tolerance": done.tolerance}))
"""

_IMPORTED = """
import json, sys, threading
from pathlib import Path
import torch
from safetensors import safe_open
from bloomery.cli import ckpt_export
from bloomery.data.tokenizer import train_tokenizer
from bloomery.interchange import huggingface
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # what an import of a model loads
out, run = map(Path, sys.argv[1:])
tokenizer = train_tokenizer(["to be or not to be"], vocabulary=300, end_of_document="<|endoftext|>")
tokenizer.save(out / "tokenizer.json")
(out / "checksums.xxh128").unlink(missing_ok=True)  # the tokenizer is new
def own():
    # Pages of the mapped files are the system's to take back.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
before, peak, over = own(), [0], threading.Event()
def watch():
    while not over.wait(0.005):
        peak[0] = max(peak[0], own())
watching = threading.Thread(target=watch, daemon=True)
watching.start()
assert ckpt_export.import_([str(out), str(run), "--end-of-document", "<|endoftext|>"]) == 0
over.set()
watching.join()
print(json.dumps({"import_growth": peak[0] - before}))
"""


if __name__ == "__main__":
    main()
