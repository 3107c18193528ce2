"""`bloomery stop` and `bloomery save`: arm and disarm the switches of a run."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

from bloomery.cli.arguments import parser
from bloomery.errors import BloomeryError, storage_error
from bloomery.events.run_directory import RunDirectory
from bloomery.events.switches import Switches, arm, note_of

_WHAT = {
    "stop": "Save and stop a run, and end each start at once until the switch is disarmed: the tasks that a\n"
    "scheduler has queued end one by one.",
    "save": "Save a checkpoint now and go on.",
}
_EXAMPLES = """\
bloomery {name} runs/mine                 arm the switch runs/mine/control/{name}
bloomery {name} runs/mine --disarm        take it back
bloomery {name} --at /group/switches      the same in the directory that the recipe's control.directory names
"""
_ARMED = {
    "stop": "the run saves and stops after its present step, and starts end at once until `bloomery stop {} "
    "--disarm`",
    "save": "the run saves after its present step",
}


def stop(arguments: list[str]) -> int:
    """Run `bloomery stop`; returns the exit status."""
    return _switch("stop", arguments)


def save(arguments: list[str]) -> int:
    """Run `bloomery save`; returns the exit status."""
    return _switch("save", arguments)


def _switch(name: str, arguments: list[str]) -> int:
    options = parser(name, _WHAT[name], examples=_EXAMPLES.format(name=name))
    options.add_argument("run", metavar="RUN", nargs="?", help="the run directory")
    options.add_argument("--at", metavar="DIR", help="a directory of switches, in place of a run")
    options.add_argument("--disarm", action="store_true", help="remove the switch")
    options.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = options.parse_args(arguments)
    if (chosen.run is None) == (chosen.at is None):
        options.error("give RUN or --at DIR, one of them")
    directories = _directories(chosen)
    if chosen.disarm:
        return _disarm(name, directories, as_json=chosen.json)
    path = _armed(name, directories)
    target = chosen.run or f"--at {chosen.at}"
    if chosen.json:
        print(json.dumps({"switch": name, "armed": str(path)}))
    else:
        print(f"{path} is armed: {_ARMED[name].format(target)}")
    return 0


def _directories(chosen: Namespace) -> list[Path]:
    """Return the directories of the switches: that of --at, or the run's and the one its recipe names."""
    if chosen.at is not None:
        if not Path(chosen.at).is_dir():
            raise BloomeryError(
                f"There is no directory {chosen.at}.", remedy="Give the one that control.directory names."
            )
        return [Path(chosen.at)]
    rundir = RunDirectory(Path(chosen.run))
    if not (rundir.exists() or rundir.control_dir.is_dir()):
        raise BloomeryError(
            f"There is no run in {chosen.run}.", remedy="Give a run directory, for instance runs/demo."
        )
    directories = [rundir.control_dir]
    if rundir.recipe.exists():
        from bloomery.config.load import load_recipe

        elsewhere = load_recipe(str(rundir.recipe)).recipe.control.directory
        directories += [Path(elsewhere)] if elsewhere else []
    return directories


def _armed(name: str, directories: list[Path]) -> Path:
    """Arm the switch in the first directory that can be written, and return its path. Raises StorageError."""
    refused: OSError | None = None
    for directory in directories:
        try:
            arm(directory / name)
        except OSError as error:
            refused = refused or error
            continue
        return directory / name
    assert refused is not None
    raise storage_error(refused, path=directories[0] / name, doing="Arming the switch") from refused


def _disarm(name: str, directories: list[Path], *, as_json: bool) -> int:
    switches, disarmed = Switches(directories), list[str]()
    if switches.armed(name) is None and not as_json:
        print(f"{name} is not armed in {' or '.join(map(str, directories))}")
        return 0
    while path := switches.armed(name):
        note = note_of(path)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise storage_error(error, path=path, doing="Disarming the switch") from error
        disarmed.append(str(path))
        if not as_json:
            print(f"{path} is disarmed" + (f" ({note})" if note else ""))
    if as_json:
        print(json.dumps({"switch": name, "disarmed": disarmed}))
    return 0
