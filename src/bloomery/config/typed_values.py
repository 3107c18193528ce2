"""Values of settings as a shell passes them: TOML where they are TOML, else bare text."""

from __future__ import annotations

import re
import tomllib
from typing import Any, get_type_hints

from bloomery.config.convert import alternatives

_SEPARATOR = "separator"
_LINE_ENDS = {r"\n": "\n", r"\r": "\r", r"\t": "\t"}


def override_value(section: type | None, name: str, text: str) -> Any:
    """Return the value of an override, parsed as TOML where it is TOML, else the bare text.

    A text setting takes the bare text (`run.name=7`), and a list of texts takes a single text
    (`data.sources=notes.txt`), because quotes within a shell's quotes are hard to write.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:
        parsed = {}
    bare = typed_separator(text) if name == _SEPARATOR else text.strip()
    value = parsed["value"] if list(parsed) == ["value"] else bare
    hints = get_type_hints(section) if section is not None else {}
    annotation = hints.get(name, hints.get(f"{name}_"))
    if annotation is not None and alternatives(annotation) == (str,) and not isinstance(value, str):
        return bare
    if annotation == tuple[str, ...] and isinstance(value, str):
        return [value]
    return value


def typed_separator(text: str) -> str:
    r"""Return a separator of documents with the line ends and tabs that `\n`, `\r` and `\t` in it stand for.

    No shell turns them into such within its quotes. Before a letter a backslash stays one: `\newpage`.
    """
    return re.sub(r"\\[nrt](?![A-Za-z])", lambda escape: _LINE_ENDS[escape.group()], text)
