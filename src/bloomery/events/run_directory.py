"""The run directory: the paths of every file that training, supervisors and people share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bloomery import durable
from bloomery.errors import storage_error

CONTROLS = ("save", "stop", "skip", "rewind", "set")


@dataclass(frozen=True)
class RunDirectory:
    """The paths of the files of one run. Only `create` touches the disk."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def create(self) -> RunDirectory:
        """Make the directories that are missing and return self. Raises StorageError."""
        for directory in (
            self.incarnations,
            self.checkpoints,
            self.control_dir,
            self.logs,
            self.tensorboard,
            self.path / "journal",
            self.path / "heartbeat",
        ):
            try:
                durable.make_directory(directory)
            except OSError as error:
                raise storage_error(error, path=directory, doing="Making the run directory") from error
        return self

    def exists(self) -> bool:
        """Whether a run was started in this directory, finished or not."""
        return self.recipe.exists() or self.incarnations.is_dir()

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def sources(self) -> Path:
        """The file that says where each value of the recipe came from."""
        return self.path / "sources.toml"

    @property
    def incarnations(self) -> Path:
        """The directory with one file for each incarnation of the run."""
        return self.path / "incarnations"

    def incarnation(self, number: int) -> Path:
        """The file of one incarnation."""
        return self.incarnations / f"{number:06d}.json"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints, and of the `.partial` directories of unfinished ones."""
        return self.path / "checkpoints"

    @property
    def control_dir(self) -> Path:
        """The directory in which people and supervisors write requests."""
        return self.path / "control"

    @property
    def backups(self) -> Path:
        """The directory with a record of each checkpoint that has a verified copy elsewhere."""
        return self.path / "backups"

    def control(self, request: str) -> Path:
        """The file that makes a request. request: one of CONTROLS."""
        if request not in CONTROLS:
            raise ValueError(f"no such request: {request!r} (there are {', '.join(CONTROLS)})")
        return self.control_dir / request

    def journal(self, *, peer: str = "0", rank: int = 0) -> Path:
        """The journal of the events that one rank wrote."""
        return self.path / "journal" / f"{peer}-{rank}.jsonl"

    @property
    def operations(self) -> Path:
        """The journal of the run's supervisors: attempts, and diagnoses of failures."""
        return self.path / "operations.jsonl"

    @property
    def watch(self) -> Path:
        """The file in which a watcher keeps open incidents, and the free space over time."""
        return self.path / "watch.json"

    @property
    def chronicle(self) -> Path:
        """The chronicle of the run, as Markdown."""
        return self.path / "chronicle.md"

    @property
    def evaluations(self) -> Path:
        """The journal of scores on tasks, written by `bloomery evaluate` beside the training."""
        return self.path / "evaluations.jsonl"

    @property
    def rounds(self) -> Path:
        """The journal of rounds that a peer's agent writes."""
        return self.path / "rounds.jsonl"

    @property
    def known(self) -> Path:
        """The file in which a peer's agent keeps the newest round and epoch that it knows."""
        return self.path / "known.json"

    def journals(self) -> list[Path]:
        """The journals of all ranks that have written one, sorted by name."""
        return sorted((self.path / "journal").glob("*.jsonl"))

    def heartbeat(self, *, peer: str = "0", rank: int = 0) -> Path:
        """The file that says what one rank does, at which step and since when."""
        return self.path / "heartbeat" / f"{peer}-{rank}"

    def stacks(self, *, peer: str = "0", rank: int = 0) -> Path:
        """The file into which SIGUSR2 makes one rank write the stacks of its threads."""
        return self.path / "stacks" / f"{peer}-{rank}.txt"

    @property
    def memory(self) -> Path:
        """The directory with what each rank's device held when its memory ran out."""
        return self.path / "memory"

    @property
    def lock(self) -> Path:
        """The empty file that the process which holds the run has locked."""
        return self.path / "holder.lock"

    @property
    def holder(self) -> Path:
        """The file that names the holder; its modification time is refreshed while the holder lives."""
        return self.path / "holder.json"

    @property
    def logs(self) -> Path:
        """The directory of the text logs of all processes."""
        return self.path / "logs"

    def log(self, *, host: str, rank: int) -> Path:
        """The text log of one process."""
        return self.logs / f"{host}-{rank}.log"

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def profiles(self) -> Path:
        """The directory of what `log.profile_steps` recorded."""
        return self.path / "profiles"

    @property
    def data(self) -> Path:
        """The directory of the prepared tokenizer and datasets, unless the recipe puts them elsewhere."""
        return self.path / "data"

    @property
    def export(self) -> Path:
        """The directory of the exported model."""
        return self.path / "export"
