"""Finds recipes by path or by the name of a shipped one, and the most similar name of an unknown one.

Also replaces the `~` with which a path begins, and makes paths absolute.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from bloomery.errors import ConfigError, Mistake

_RECORD = "recipe.toml"


def nearest(name: str, known: Iterable[str], *, cutoff: float) -> list[str]:
    """Return a list with the most similar known name, or an empty one.

    cutoff: the least similarity, from 0 to 1.
    """
    from difflib import get_close_matches  # imported here, because only mistakes need it

    return get_close_matches(name, list(known), n=1, cutoff=cutoff)


def find_recipe(path_or_name: str) -> Path:
    """Return the file of a recipe, given by the name of a shipped recipe, by a path, or by a run's directory.

    Raises ConfigError where there is none.
    """
    path = from_home(path_or_name)
    if path.suffix != ".toml" and path.name == path_or_name and not path.is_file():
        shipped = shipped_recipes()
        if path_or_name in shipped:
            return shipped[path_or_name]
        if is_run(path):
            return path / _RECORD
        if path.is_dir():
            remedy = "Give a .toml file, a shipped recipe's name, or a run's directory: runs/NAME."
            raise _refused(path_or_name, "is a directory without recipe.toml, so it is no run", remedy)
        near = nearest(path_or_name, shipped, cutoff=0.5)
        hint = f"Did you mean '{near[0]}'? " if near else ""
        raise _refused(
            path_or_name,
            "there is no recipe of this name",
            f"{hint}Shipped: {', '.join(shipped)}. Give your own recipe as a path that ends in .toml.",
        )
    if is_run(path):
        return path / _RECORD
    if is_run(path.parent.parent) and path.parent.name == "checkpoints":
        run = path.parent.parent
        remedy = (
            f"Go on with its run: {run}. Or begin another from it: a recipe and init.from={path_or_name}."
        )
        raise _refused(path_or_name, "is a checkpoint", remedy)
    if path.is_dir():
        raise _refused(path_or_name, "is a directory", "Give the .toml file inside it.")
    if not path.exists():
        raise _refused(
            path_or_name,
            "there is no such file",
            "Check the path; `bloomery config show demo` shows a recipe.",
        )
    return path


def is_run(path: Path) -> bool:
    """Whether a path is the directory of a run that has begun."""
    return (path / _RECORD).is_file() and (path / "incarnations").is_dir()


def run_path(recipe: str, *, run: str | Path | None, name: str) -> Path:
    """Return --run, else the run's directory given as the recipe, else the one of the recipe's name.

    recipe, run: what the command line gives. name: the recipe's run.name.
    """
    given = from_home(recipe)
    if run is None and recipe not in shipped_recipes() and is_run(given):
        return given
    return Path(run or Path("runs") / name)


def name_of(directory: Path) -> str:
    """Return a run.name for the run in a directory: the directory's name, with `-` for what none may have."""
    return re.sub(r"[^\w.+-]", "-", directory.resolve().name).lstrip(".+-") or "run"


def shipped_recipes() -> dict[str, Path]:
    """Return the files of the shipped recipes by name, sorted.

    They are in `recipes/` at the top of a clone; a wheel installs that directory as data.
    """
    return shipped_files("recipes")


def shipped_files(kind: str) -> dict[str, Path]:
    """Return the TOML files of a shipped directory (`recipes` or `hardware`) by name, sorted."""
    files = _in_clone(kind) or _installed(kind) or _in_target(kind)
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def _in_clone(kind: str) -> list[Path]:
    clone = Path(__file__).parents[3]
    return list((clone / kind).glob("*.toml")) if (clone / "pyproject.toml").is_file() else []


def _installed(kind: str) -> list[Path]:
    from importlib import metadata  # only an installed bloomery needs it, and it is slow to import

    try:
        listed = metadata.files("bloomery") or []
    except metadata.PackageNotFoundError:
        return []
    files = [file for file in listed if file.suffix == ".toml" and file.parts[-3:-1] == ("bloomery", kind)]
    located = (Path(str(file.locate())).resolve() for file in files)
    return [path for path in located if path.is_file()]


def _in_target(kind: str) -> list[Path]:
    # `pip install --target` moves data beside the packages and leaves the list of files as it was.
    return list((Path(__file__).parents[2] / "share" / "bloomery" / kind).glob("*.toml"))


def _refused(path_or_name: str, problem: str, remedy: str) -> ConfigError:
    return ConfigError(
        [Mistake(key="recipe", value=path_or_name, source="command line", problem=problem, remedy=remedy)]
    )


def from_home(path: str | Path) -> Path:
    """Return a path with `~` or `~USER` replaced by that home directory.

    Where it is not known, as in a container without that user, the path stays as it is: whoever opens it says
    that there is no such file. `Path.expanduser` raises RuntimeError.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111


def whole_path(path: str) -> str:
    """Return a path that every command reads alike, wherever it runs; `~`, each node's own, stays."""
    return path if path.startswith("~") else str(Path(path).absolute())
