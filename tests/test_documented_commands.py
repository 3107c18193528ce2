"""Every command in README and docs is one that exists, with options and settings that exist."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from tests.documented_commands import PAGES, ROOT, DocumentedCommand, documented_commands

from bloomery.cli import COMMANDS, main
from bloomery.config.checkpoint import RETIRED
from bloomery.config.load import load_recipe, sections
from bloomery.config.setting import key_of
from bloomery.config.validate import check_recipe
from bloomery.plan.ranks import degrees_of

COMMANDS_SHOWN = documented_commands()


class Parsed(BaseException):
    """Ends a command once its words are parsed."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options


@pytest.fixture(scope="module", autouse=True)
def parsing_alone() -> Iterator[None]:
    """Commands stop where they have parsed their arguments."""
    kept = {name: getattr(argparse.ArgumentParser, name) for name in ("parse_args", "parse_intermixed_args")}

    def stopping(name: str) -> object:
        def parse(self: argparse.ArgumentParser, *given: object, **more: object) -> None:
            raise Parsed(kept[name](self, *given, **more))

        return parse

    for name in kept:
        setattr(argparse.ArgumentParser, name, stopping(name))
    yield
    for name, function in kept.items():
        setattr(argparse.ArgumentParser, name, function)


def parsed(words: tuple[str, ...]) -> argparse.Namespace | str:
    """The options that the words mean, or what is said against them."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(words)
        except Parsed as done:
            return done.options
        except SystemExit as ended:
            status = ended.code
    return argparse.Namespace() if status == 0 else said.getvalue() or f"status {status}"


def is_incomplete(told: str) -> bool:
    """Whether words are missing, as where a sentence names a command, or an option without its value."""
    return "arguments are required" in told or "expected one argument" in told


@pytest.mark.parametrize(
    "command", COMMANDS_SHOWN, ids=lambda command: f"{command.place}: {command.text[:60]}"
)
def test_a_documented_command_parses(command: DocumentedCommand, tmp_path: Path) -> None:
    first = command.words[0] if command.words else "--help"
    assert first in COMMANDS or first in ("--help", "--version"), command.text
    (tmp_path / "runs").mkdir()  # where the documents have pictures and pages written
    with contextlib.chdir(tmp_path):
        told = parsed(command.words)
    if isinstance(told, str):
        assert is_incomplete(told) and not command.whole, told
        return
    overrides = getattr(told, "overrides", ())
    recipe = getattr(told, "recipe", None)
    if not isinstance(recipe, str):
        return
    if recipe.endswith(".toml") and (ROOT / recipe).is_file():
        recipe = str(ROOT / recipe)
    is_shipped = "/" not in recipe and not recipe.endswith(".toml")
    is_there = is_shipped or (Path(recipe).is_file() and recipe != str(ROOT / "examples/continued.toml"))
    loaded = load_recipe(recipe if is_there else "demo", overrides or ())
    if is_shipped and command.words[0] in ("train", "launch", "peer"):
        degrees = degrees_of(loaded.recipe.parallel, world=told.nproc or 1)
        assert degrees is not None, f"{command.text}: another number of ranks is wanted"
        check_recipe(loaded.recipe, loaded.sources, data_degree=degrees.data)


def test_a_command_that_does_not_exist_is_found() -> None:
    assert "no command" in str(parsed(("ckpt", "lst", "runs/mine")))
    assert "unrecognized" in str(parsed(("report", "runs/mine", "--pictures")))
    assert len(COMMANDS_SHOWN) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_are_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    named = re.findall(r"`((?:docs|recipes|hardware|benchmarks|tests|src|native)/[\w./-]+)`", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_settings_that_a_page_names_exist(page: Path) -> None:
    known = {name: {key_of(field) for field in fields(section)} for name, section in sections().items()}
    named = re.findall(r"`([a-z_]+)\.([a-z_0-9]+)(?: ?= ?[^`]*)?`", page.read_text())
    unknown = {f"{section}.{key}" for section, key in named if section in known and key not in known[section]}
    assert unknown - RETIRED.keys() == set()
