"""Draws what the console of a training shows as SVG pictures: terminals of three widths, a pipe, a notebook.

A real training runs in a real pseudo-terminal; pyte reads its screen, and rich draws it. It wants pyte, and
`nbclient ipykernel` for the notebook: python tools/console_pictures.py docs/pictures
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

SETTINGS = (
    *("demo-small", "data.sources=text", "run.name=mine", "train.steps=60", "schedule.warmup=16"),
    *(
        "model.layers=2",
        "model.hidden=64",
        "model.ffn=128",
        "data.sequence_length=128",
        "evaluate.every_steps=20",
    ),
    *("data.tokenizer_vocabulary=512", "log.tensorboard=false"),
)
ROWS, MOST_S = 40, 300.0
CELL = """\
import bloomery
settings = dict(setting.split("=", 1) for setting in {settings!r})
number = {{key: int(value) if value.isdecimal() else value for key, value in settings.items()}}
number |= {{"data.sources": ["text"], "log.tensorboard": False}}
outcome = bloomery.fit(bloomery.recipe("demo-small", number))
"""


def main() -> None:
    """Write the pictures into the directory that is named."""
    out = Path(sys.argv[1]).absolute()
    for columns in (80, 100, 200):
        draw(terminal(columns), out / f"console-{columns}.svg", columns, f"bloomery train, {columns} columns")
    draw(piped(), out / "console-pipe.svg", 125, "bloomery train | cat")
    draw(notebook(), out / "console-notebook.svg", 100, "bloomery.fit in a notebook")


def draw(lines: list[str], picture: Path, columns: int, title: str) -> None:
    """Draw the lines as a terminal with a title."""
    console = Console(record=True, width=columns, file=io.StringIO(), legacy_windows=False)
    for line in lines:
        console.print(Text(line), overflow="ignore", crop=False)
    svg = console.export_svg(title=title)
    picture.write_text(
        re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)
    )  # the fonts would be loaded from elsewhere


def place() -> Path:
    """Return a new directory with half a megabyte of real text."""
    directory = Path(tempfile.mkdtemp())
    (directory / "text").mkdir()
    library = sorted(Path(os.__file__).parent.glob("[a-e]*.py"))
    for source in library:
        (directory / "text" / f"{source.stem}.txt").write_text(source.read_text(errors="replace"))
    return directory


def command() -> list[str]:
    """Return the command of the training."""
    return [sys.executable, "-m", "bloomery", "train", *SETTINGS]


def terminal(columns: int) -> list[str]:
    """Return the lines on the screen of a terminal, as they are when the training ends."""
    screen = pyte.Screen(columns, ROWS)
    stream = pyte.ByteStream(screen)
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    process = subprocess.Popen(
        command(), stdin=follower, stdout=follower, stderr=follower, cwd=place(), close_fds=True
    )
    os.close(follower)
    while select.select([leader], [], [], MOST_S)[0]:
        try:
            read = os.read(leader, 65536)
        except OSError:
            break  # the training has closed the terminal
        stream.feed(read)
    process.wait()
    return "\n".join(line.rstrip() for line in screen.display).rstrip().splitlines()


def piped() -> list[str]:
    """Return the lines that a pipe gets."""
    ended = subprocess.run(command(), capture_output=True, text=True, cwd=place(), timeout=MOST_S, check=True)
    return ended.stdout.splitlines()


def notebook() -> list[str]:
    """Return a notebook's cell and its output."""
    import nbformat
    from nbclient import NotebookClient

    settings = [setting for setting in SETTINGS if "=" in setting and "sources" not in setting]
    source = CELL.format(settings=[setting for setting in settings if "tensorboard" not in setting])
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    NotebookClient(book, timeout=MOST_S, resources={"metadata": {"path": str(place())}}).execute()
    lines = ["In [1]: import bloomery", '        bloomery.fit(bloomery.recipe("demo-small", settings))', ""]
    for output in book.cells[0].outputs:
        lines += (output.get("text") or output["data"]["text/plain"]).splitlines()
    return lines


if __name__ == "__main__":
    main()
