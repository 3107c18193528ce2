"""Every option that a command reads is one that it, or a command that it shares parts with, accepts."""

from __future__ import annotations

import argparse
import ast
from functools import cache
from pathlib import Path

import pytest

CLI = Path(__file__).parents[2] / "src" / "bloomery" / "cli"
TREES = {path.stem: ast.parse(path.read_text()) for path in sorted(CLI.glob("*.py"))}


@cache
def accepted(module: str) -> set[str]:
    """The names under which a module's parsers keep the arguments that they accept."""
    names = set()
    for call in ast.walk(TREES[module]):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr == "set_defaults":
            names |= {keyword.arg for keyword in call.keywords if keyword.arg}
        if call.func.attr == "add_argument":
            given = {keyword.arg: keyword.value for keyword in call.keywords}
            flags = [flag.value for flag in call.args if isinstance(flag, ast.Constant)]
            long = next((flag for flag in flags if flag.startswith("--")), flags[0])
            named = given.get("dest")
            names.add(named.value if isinstance(named, ast.Constant) else long.lstrip("-").replace("-", "_"))
    return names


def called(value: ast.expr) -> str:
    """What a value is the call of, or the value as it is written, to its first bracket."""
    return ast.unparse(value.func if isinstance(value, ast.Call) else value).partition("(")[0]


@cache
def read(module: str) -> set[str]:
    """The attributes that a module reads of what a parser returned."""
    parsed = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.arg) and node.annotation and "Namespace" in ast.unparse(node.annotation):
            parsed.add(node.arg)
        if isinstance(node, ast.Assign) and called(node.value).endswith(".parse_args"):
            parsed |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {
        node.attr
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in parsed
    } - set(dir(argparse.ArgumentParser()))


@cache
def imported(module: str) -> set[str]:
    """The modules of commands that a module imports, also when it runs."""
    nodes = list(ast.walk(TREES[module]))
    modules = {
        node.module.rpartition(".")[2]
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bloomery.cli.")
    }
    modules |= {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == "bloomery.cli"
        for alias in node.names
        if alias.name in TREES
    }
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return modules | {other for other in TREES if f"bloomery.cli.{other}" in texts}


@cache
def sharing(module: str) -> set[str]:
    """The modules that this one imports, also when it runs, and those that import it."""
    return imported(module) | {other for other in TREES if module in imported(other)} - {"__init__"}


@pytest.mark.parametrize("module", [module for module in TREES if read(module)])
def test_a_command_reads_only_arguments_that_it_accepts(module: str) -> None:
    missing = read(module) - accepted(module) - accepted("arguments")
    assert missing - set().union(*(accepted(other) for other in sharing(module))) == set()


SHARED = {"arguments", "run_inputs"}
"""Modules whose arguments are read by the commands that add them."""


@cache
def used(module: str) -> set[str]:
    """The names of arguments that a module reads of what a parser returned, or gives to what reads them."""
    declared, parsed = set[ast.AST](), set[str]()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".add_argument", "_parser")):
            declared |= {part for given in node.args for part in ast.walk(given)}
        if isinstance(node, ast.arg) and node.annotation and "Namespace" in ast.unparse(node.annotation):
            parsed.add(node.arg)
        if isinstance(node, ast.Assign) and "parse" in called(node.value):
            parsed |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {
        node.attr
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in parsed
    } | {
        node.value.lstrip("-")
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in declared
    }


@pytest.mark.parametrize("module", [module for module in TREES if accepted(module)])
def test_an_argument_that_a_command_accepts_is_read(module: str) -> None:
    readers = [module, *(sharing(module) if module in SHARED else ())]
    unread = accepted(module) - set().union(*(used(reader) for reader in readers))
    assert unread <= {"version", "command"}, "an option without an effect"
