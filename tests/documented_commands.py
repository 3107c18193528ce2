"""The commands that README and docs show, taken out of their Markdown."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PLACEHOLDERS = {
    "RUN": "runs/mine",
    "RECIPE": "demo",
    "RECIPE|RUN": "demo",
    "PAIR": "tokens/en",
    "NEW": "tokens/new",
    "FILE": "picture.png",
    "URL/NAME/PEER": "file:///backup/mine/oslo",
    "runs/NAME-PEER": "runs/mine-oslo",
    "N": "16",
    "COMMAND": "train",
}
"""What a name in capitals stands for; commands of blocks have none."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
_OPTIONAL = re.compile(r"\[(--[^\]]+)\]")


@dataclass(frozen=True, kw_only=True)
class DocumentedCommand:
    """One command as a page shows it.

    place: the page, below the top of the clone.
    text: what a reader copies.
    words: what follows `bloomery`, with placeholders filled in.
    whole: whether it stands in a block, to be run as it is written; else it is named in a sentence.
    """

    place: str
    text: str
    words: tuple[str, ...]
    whole: bool


def documented_commands() -> list[DocumentedCommand]:
    """Every command of every page, in order; each text of a page once."""
    commands: dict[tuple[str, str], DocumentedCommand] = {}
    for page in PAGES:
        text, place = page.read_text(), page.relative_to(ROOT).as_posix()
        lines = [
            line
            for language, block in _BLOCK.findall(text)
            if language in ("", "sh", "bash", "console")
            for line in block.replace("\\\n", " ").splitlines()
            if re.search(r"(^|[\s/$])bloomery\s", line + " ")
        ]
        named = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", _BLOCK.sub("", text))]
        named = [code for code in named if re.match(r"(\w+=\S* )*bloomery [a-z-]", code)]
        for whole, found in ((True, lines), (False, named)):
            for line in found:
                words = _words(line, whole=whole)
                if words is not None:
                    shown = DocumentedCommand(place=place, text=line.strip(), words=words, whole=whole)
                    commands.setdefault((place, shown.text), shown)
    return list(commands.values())


def _words(line: str, *, whole: bool) -> tuple[str, ...] | None:
    """The words after `bloomery`; None where the line calls no command of ours."""
    words = shlex.split(line if whole else _OPTIONAL.sub(r"\1", line), comments=whole)
    if words[:1] == ["$"]:
        words = words[1:]
    at = next((number for number, word in enumerate(words) if Path(word).name == "bloomery"), None)
    if at is None:
        return None
    words = [word for word in words[at + 1 :] if word != "&"]
    if ">" in words:  # where the shell writes the output
        words = words[: words.index(">")]
    if not whole:
        words = [PLACEHOLDERS.get(word, word) for word in words if word != "…"]
    return tuple(words)
