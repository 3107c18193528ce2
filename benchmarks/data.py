"""Text to tokens, end to end, against Hugging Face's `encode_batch` and the same writer at equal cores.

The corpus is text that this machine has: sources, headers and documents, each once. Both sides run as
processes of their own, interleaved, and are timed from their start to their end; both write a pair, and the
pairs must be equal to the byte. The tokenizer (32,000 entries, GPT-2's split) is trained before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from contract import Measurement, measurement, report

END = "<|endoftext|>"
ROOTS = (sys.prefix, sys.base_prefix, "/usr/share", "/usr/lib/python3", "/usr/include", "/usr/lib")
ENDINGS = (
    ".py",
    ".rst",
    ".md",
    ".html",
    ".txt",
    ".h",
    ".hpp",
    ".pyi",
    ".js",
    ".c",
    ".cpp",
    ".tex",
    ".css",
    ".xml",
)
LARGEST_BYTES, SMALLEST_BYTES = 400_000, 20
SHARE_OF_PYTHON = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--only", choices=("tokenize",), default="tokenize", help="which part")
    parser.add_argument("--megabytes", type=int, default=200, help="text to tokenise (default: 200)")
    parser.add_argument("--rounds", type=int, default=3, help="times each side runs (default: 3)")
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count() or 1, help="for both sides (default: all)"
    )
    parser.add_argument("--peer", nargs=3, metavar=("TEXT", "TOKENIZER", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        tokenize_as_peer(*map(Path, options.peer))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        found = tokenizing(Path(directory), options.megabytes, rounds=options.rounds, cores=options.cores)
    return report(found, as_json=options.json)


def tokenizing(directory: Path, megabytes: int, *, rounds: int, cores: int) -> Sequence[Measurement]:
    text, tokenizer = directory / "text.jsonl", directory / "tokenizer.json"
    size = write_corpus(text, megabytes * 1_000_000)
    train(text, tokenizer)
    ours, theirs = [], []
    for number in range(rounds):
        ours.append(seconds(our_command(text, tokenizer, directory / "ours", cores), cores))
        if number == 0 or number < rounds - 1:  # ours stand on both sides of theirs
            theirs.append(seconds(peer_command(text, tokenizer, directory / "theirs"), cores))
    equal = all(
        (directory / f"ours{end}").read_bytes() == (directory / f"theirs{end}").read_bytes()
        for end in (".bin", ".idx")
    )
    tokens = (directory / "ours.bin").stat().st_size / 2
    mine, other = statistics.median(ours), statistics.median(theirs)
    about = (
        f"{size / 1e6:.0f} MB of {size / tokens:.2f} bytes a token, {cores} cores, whole processes: ours "
        f"{mine:.2f} s ({size / mine / 1e6:.1f} MB/s), encode_batch {other:.2f} s "
        f"({size / other / 1e6:.2f} MB/s)"
    )
    return [
        measurement("data: tokenise and write", other / mine, unit="x", reference=about, bar=">= 15"),
        measurement(
            "data: files equal to the byte", float(equal), unit="", reference="both pairs", bar=">= 1"
        ),
        measurement("data: tokens a second", tokens / mine / 1e6, unit="M/s", reference=about),
    ]


def our_command(text: Path, tokenizer: Path, out: Path, cores: int) -> list[str]:
    command = [sys.executable, "-m", "bloomery", "data", "tokenize", str(text), "--tokenizer", str(tokenizer)]
    return [*command, "--out", str(out), "--workers", str(cores), "--json"]


def peer_command(text: Path, tokenizer: Path, out: Path) -> list[str]:
    return [sys.executable, __file__, "--peer", str(text), str(tokenizer), str(out)]


def seconds(command: list[str], cores: int) -> float:
    """How long a process took, on as many threads as there are cores."""
    environment = os.environ | {"RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": "true"}
    started = time.monotonic()
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    return time.monotonic() - started


def tokenize_as_peer(text: Path, tokenizer: Path, out: Path) -> None:
    """What one would write with `tokenizers`: read, encode a thousand documents at once, write."""
    from tokenizers import Tokenizer

    from bloomery.data.indexed import IndexedWriter

    engine = Tokenizer.from_file(str(tokenizer))
    engine.encode_special_tokens = True
    end = engine.token_to_id(END)
    with text.open(encoding="utf-8") as lines, IndexedWriter(out, dtype="<u2") as writer:
        batch: list[str] = []
        for line in lines:
            batch.append(json.loads(line)["text"])
            if len(batch) == 1000:
                write_batch(engine, batch, writer, end)
                batch = []
        write_batch(engine, batch, writer, end)


def write_batch(engine, batch: list[str], writer, end: int) -> None:
    for encoded in engine.encode_batch(batch, add_special_tokens=False):
        writer.add_document([*encoded.ids, end])


def write_corpus(path: Path, wanted_bytes: int) -> int:
    """Write distinct texts of this machine as JSON lines; returns their bytes. Python's are at most half."""
    seen: set[bytes] = set()
    written = python = 0
    with path.open("w", encoding="utf-8") as lines:
        for file in files():
            if written >= wanted_bytes:
                break
            is_python = file.suffix in (".py", ".pyi")
            if is_python and python > wanted_bytes * SHARE_OF_PYTHON:
                continue
            content = text_of(file, seen)
            if content:
                lines.write(json.dumps({"text": content}, ensure_ascii=False) + "\n")
                written += (size := len(content.encode()))
                python += size * is_python
    return written


def files() -> Iterator[Path]:
    for root in ROOTS:
        for directory, folders, names in os.walk(root):
            folders.sort()
            yield from (Path(directory, name) for name in sorted(names) if name.endswith(ENDINGS))


def text_of(file: Path, seen: set[bytes]) -> str:
    """A file's text, or nothing where it is small, large, not UTF-8, or was there before."""
    try:
        if not SMALLEST_BYTES <= file.stat().st_size <= LARGEST_BYTES:
            return ""
        content = file.read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            return ""
        seen.add(digest)
        return content.decode()
    except (OSError, UnicodeDecodeError):
        return ""


def train(text: Path, tokenizer: Path) -> None:
    from bloomery.data.tokenizer import train_tokenizer

    with text.open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for number, line in enumerate(lines) if number % 8 == 0]
    train_tokenizer(texts, vocabulary=32_000, end_of_document=END).save(tokenizer)


if __name__ == "__main__":
    raise SystemExit(main())
