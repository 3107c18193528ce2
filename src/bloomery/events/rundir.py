"""The run directory: the one place that spells the paths that training, its watchers and people share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bloomery.events.storage import storage_error

CONTROLS = ("save", "stop", "skip", "set")


@dataclass(frozen=True)
class RunDir:
    """Where everything of one run lies. A value: nothing is read or made until `create`."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    def create(self) -> RunDir:
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
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise storage_error(error, path=directory, doing="Making the run directory") from error
        return self

    def exists(self) -> bool:
        """Say whether a run was begun here, finished or not."""
        return self.recipe.exists() or self.incarnations.is_dir()

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def sources(self) -> Path:
        """Where each value of the recipe came from."""
        return self.path / "sources.toml"

    @property
    def incarnations(self) -> Path:
        """One file for each life of the run."""
        return self.path / "incarnations"

    def incarnation(self, number: int) -> Path:
        """The file of one life of the run."""
        return self.incarnations / f"{number:06d}.json"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, and the `.partial` leftovers of unfinished ones."""
        return self.path / "checkpoints"

    @property
    def control_dir(self) -> Path:
        """Where people and supervisors leave requests."""
        return self.path / "control"

    @property
    def backups(self) -> Path:
        """A record of each checkpoint that was copied elsewhere, read back and found the same."""
        return self.path / "backups"

    def control(self, request: str) -> Path:
        """The file that asks for one of CONTROLS."""
        if request not in CONTROLS:
            raise ValueError(f"no such request: {request!r} (there are {', '.join(CONTROLS)})")
        return self.control_dir / request

    def journal(self, *, peer: str = "0", rank: int = 0) -> Path:
        """The events that one rank wrote."""
        return self.path / "journal" / f"{peer}-{rank}.jsonl"

    @property
    def rounds(self) -> Path:
        """What the parent of a peer's ranks saw of the rounds between peers: a journal, too."""
        return self.path / "rounds.jsonl"

    def journals(self) -> list[Path]:
        """The journals of all ranks that have written one, sorted by name."""
        return sorted((self.path / "journal").glob("*.jsonl"))

    def heartbeat(self, *, peer: str = "0", rank: int = 0) -> Path:
        """The step and clock of one rank."""
        return self.path / "heartbeat" / f"{peer}-{rank}"

    @property
    def lock(self) -> Path:
        """What the holder of the run has locked; empty."""
        return self.path / "holder.lock"

    @property
    def holder(self) -> Path:
        """Who holds the run; its modification time is refreshed while the holder lives."""
        return self.path / "holder.json"

    @property
    def logs(self) -> Path:
        """Text logs of all processes."""
        return self.path / "logs"

    def log(self, *, host: str, rank: int) -> Path:
        """The text log of one process."""
        return self.logs / f"{host}-{rank}.log"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def data(self) -> Path:
        """The prepared tokenizer and datasets, unless the recipe puts them elsewhere."""
        return self.path / "data"

    @property
    def export(self) -> Path:
        """The exported model."""
        return self.path / "export"
