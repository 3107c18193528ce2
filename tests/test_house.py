"""The code base as a whole: every module on a floor, no class name twice, and ARCHITECTURE.md true."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "bloomery"
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
MOST_NAMES, LONGEST = 30, 400
WALKS = {"Walk 1": 20, "Walk 2": 25, "Walk 3": 25}


@cache
def modules() -> list[str]:
    """Dotted names below bloomery; a package's own `__init__` is the package's name."""
    names = []
    for path in sorted(SRC.rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def contracts() -> list[dict]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


@cache
def floors() -> list[str]:
    (layers,) = (contract["layers"] for contract in contracts() if contract["type"] == "layers")
    return [name.strip().removeprefix("bloomery.") for layer in layers for name in re.split(r"[:|]", layer)]


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(SRC.rglob("*.py"))}


def below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_every_module_stands_on_one_floor_of_the_import_contract() -> None:
    containers = {"", "__main__", "checkpoint"}
    homeless = {
        module: [floor for floor in floors() if below(module, floor)]
        for module in modules()
        if module not in containers and sum(below(module, floor) for floor in floors()) != 1
    }
    assert homeless == {}, "add the package to the layers in pyproject.toml"


def test_the_import_contract_names_few_packages_and_each_is_there() -> None:
    names = floors()
    packages = [name for name in names if (SRC / name.replace(".", "/")).is_dir()]
    assert len(names) == len(set(names)) and len(packages) <= MOST_NAMES
    assert [name for name in names if name not in modules()] == []


def test_torch_is_banned_from_whole_floors() -> None:
    (banned,) = (contract["source_modules"] for contract in contracts() if contract["type"] == "forbidden")
    assert [name for name in banned if name.removeprefix("bloomery.") not in floors()] == []


def test_architecture_marks_the_packages_that_never_load_torch() -> None:
    (banned,) = (contract["source_modules"] for contract in contracts() if contract["type"] == "forbidden")
    marked = {name.replace("/", ".") for name in re.findall(r"^\| `([a-z_/]+)` \| ○ ", ARCHITECTURE, re.M)}
    assert {f"bloomery.{name}" for name in marked} == set(banned)


def test_no_contract_has_an_exception() -> None:
    assert [contract["name"] for contract in contracts() if "ignore_imports" in contract] == []


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(SRC).as_posix())
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert twice == {}


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {}
    for path in sorted(SRC.rglob("*.py")):
        name, lines = path.relative_to(SRC).as_posix(), len(path.read_text().splitlines())
        if lines > LONGEST:
            long[name] = lines
    assert long == {}


def test_every_module_says_in_its_first_line_what_it_holds() -> None:
    silent = [
        path.relative_to(SRC).as_posix()
        for path, tree in trees().items()
        if path.read_text().strip() and not ast.get_docstring(tree)
    ]
    assert silent == []


def paths_in(text: str) -> list[str]:
    return re.findall(r"`([a-z_/]+\.py)`", text)


def test_every_file_that_architecture_names_is_there() -> None:
    assert paths_in(ARCHITECTURE)
    assert [
        path for path in paths_in(ARCHITECTURE) if not (SRC / path).is_file() and not (ROOT / path).is_file()
    ] == []


def test_every_package_has_a_row_in_architecture_with_a_sentence() -> None:
    rows = dict(re.findall(r"^\| `([a-z_./]+)` \| (.+?) \|$", ARCHITECTURE, re.M))
    missing = [name for name in floors() if name.replace(".", "/") not in {r.rstrip("/") for r in rows}]
    assert missing == []
    assert [name for name, sentence in rows.items() if not sentence.endswith(".")] == []


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_passes_few_files(
    walk: str,
) -> None:
    (section,) = (part for part in re.split(r"^## ", ARCHITECTURE, flags=re.M) if part.startswith(walk))
    files = set(paths_in(section))
    assert 10 < len(files) <= WALKS[walk], sorted(files)
