"""The Python API of `import bloomery`: load recipes and models, read journals, train, iterate over samples.

Everything slow is imported when it is used. docs/reference/api.md has examples of all of it, which are tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from bloomery.config.load import LoadedRecipe
    from bloomery.config.recipe import Recipe
    from bloomery.data.prepare import Prepared
    from bloomery.data.tokenizer import Tokenizer
    from bloomery.evaluate.open_checkpoint import OpenedModel
    from bloomery.model.decoder import Decoder
    from bloomery.train.state import TrainingOutcome

PathLike = str | Path


class LanguageModel:
    """A model of a run or of a checkpoint, with its tokenizer and recipe; `load` returns one.

    decoder: the network, a `torch.nn.Module` in evaluation mode.
    tokenizer: `encode` and `decode`.
    recipe: the recipe of its run, by sections, such as `recipe.model.layers`.
    checkpoint: the directory of the checkpoint.
    """

    def __init__(self, opened: OpenedModel, decoder: Decoder) -> None:
        self._opened = opened
        self.decoder = decoder
        self.tokenizer: Tokenizer = opened.tokenizer
        self.recipe: Recipe = opened.recipe
        self.checkpoint: Path = opened.checkpoint

    def logits(self, text: str | Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [tokens, vocabulary], or [b, tokens, vocabulary] for ids [b, tokens].

        text: a text, which is encoded, or token ids.
        """
        import torch

        ids = self.tokenizer.encode(text) if isinstance(text, str) else text
        tokens = torch.as_tensor(ids, dtype=torch.int64, device=self.decoder.device)
        rows = tokens if tokens.dim() == 2 else tokens[None]
        with torch.inference_mode():
            logits = self.decoder.logits(self.decoder(rows)).float()
        return logits if tokens.dim() == 2 else logits[0]

    def generate(
        self,
        prompt: str = "",
        *,
        max_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> str:
        """Return what the model writes after `prompt`, as `bloomery generate` does.

        temperature: 0 takes the likeliest token each time.
        top_k, top_p: 0 and 1 leave no token out.
        Raises BloomeryError where the model has no positions for so many tokens, or a number makes no sense.
        """
        from bloomery.evaluate.generate import Sampling, generate

        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        bounds = self._opened.bounds
        opening = bounds.opening(self.tokenizer.encode(prompt))
        drawn = generate(
            self.decoder, opening, max_new_tokens=max_tokens, sampling=sampling, ends=bounds.ends
        )
        written = [token for token in drawn if token not in bounds.ends]
        return self.tokenizer.decode_after(written, before=opening)


def load(
    path: PathLike, *, device: str = "cpu", dtype: str = "fp32", fallback: bool = False
) -> LanguageModel:
    """Open a run (its newest checkpoint) or one checkpoint, and load its weights.

    device: as torch names it. dtype: 'fp32', 'bf16' or 'fp16', to which weights are rounded.
    fallback: take the newest intact checkpoint of a run where the newest is damaged.
    Raises CheckpointError where there is none, or where it is damaged.
    """
    import torch

    from bloomery.config.find import from_home
    from bloomery.errors import BloomeryError
    from bloomery.evaluate.open_checkpoint import open_saved
    from bloomery.parallel.precision import DTYPES

    if dtype not in DTYPES:
        raise BloomeryError(f"{dtype!r} is no type of weights.", remedy=f"Give one of {', '.join(DTYPES)}.")
    opened = open_saved(from_home(path), fallback=fallback)
    decoder = opened.decoder(device=torch.device(device), dtype=DTYPES[dtype])
    return LanguageModel(opened, decoder.eval())


def journal(run: PathLike, event: str = "step") -> dict[str, list[Any]]:
    """Return the events of one kind from a run's journal, as columns of equal length, by field.

    event: 'step' (of each step what its last incarnation recorded), 'start', 'checkpoint', 'guard' …; a
        field that an event lacks is None. `pandas.DataFrame(bloomery.journal(run))` is a data frame.
    Raises StorageError where there is no run.
    """
    from bloomery.config.find import from_home
    from bloomery.errors import StorageError
    from bloomery.events.incarnation import read_incarnations, visibility
    from bloomery.events.journal import kept_steps, read_journal
    from bloomery.events.run_directory import RunDirectory

    rundir = RunDirectory(from_home(run))
    if not rundir.exists():
        raise StorageError(f"{run} is no run directory.", remedy="Give the directory of a run, runs/NAME.")
    rows: Iterator[Mapping[str, Any]] = read_journal(rundir.journal())
    if event == "step":
        rows = kept_steps(rows, visibility(read_incarnations(rundir)), needed=set())
    else:
        rows = (row for row in rows if row["event"] == event)
    columns: dict[str, list[Any]] = {}
    for number, row in enumerate(rows):  # a list of the rows takes several times as much memory
        for name in row:
            if name not in columns:
                columns[name] = [None] * number
        for name, column in columns.items():
            column.append(row.get(name))
    return columns


def recipe(name: PathLike, settings: Mapping[str, object] | None = None) -> LoadedRecipe:
    """Return a recipe: a shipped one by name, a .toml file, or that of a run, with settings replaced.

    settings: by key, for instance {"train.steps": 100, "data.sources": ["notes.txt"]}.
    Raises ConfigError with every mistake; `init.from` completes it as on the command line.
    """
    from bloomery.cli.arguments import load_completed
    from bloomery.config.validate import check_recipe

    overrides = [f"{key}={_as_toml(key, value)}" for key, value in (settings or {}).items()]
    loaded = load_completed(str(name), overrides)
    check_recipe(loaded.recipe, loaded.sources)
    return loaded


def _as_toml(key: str, value: Any) -> str:
    """Return a value as TOML: numbers and arrays of NumPy and torch too, and mappings as inline tables."""
    from bloomery.config.convert import toml_value
    from bloomery.errors import ConfigError, Mistake

    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return f"[{', '.join(_as_toml(key, entry) for entry in value)}]"
    if isinstance(value, Mapping):
        entries = (f"{name} = {_as_toml(f'{key}.{name}', entry)}" for name, entry in value.items())
        return f"{{ {', '.join(entries)} }}"
    if isinstance(value, bool | int | float | str | Path):
        return toml_value(str(value) if isinstance(value, Path) else value)
    problem = f"is no value of a setting, but {type(value).__name__}"
    remedy = "Give a number, a text, a list or a mapping; leave a setting out for its default."
    raise ConfigError([Mistake(key=key, value=value, source="settings", problem=problem, remedy=remedy)])


def fit(
    loaded: LoadedRecipe | PathLike, run: PathLike | None = None, *, progress: bool = True
) -> TrainingOutcome:
    """Train a recipe in this process, or go on with its run, and return how it ended.

    loaded: a recipe, or what `recipe` takes: a name, a .toml file, or a run to go on with.
    run: the run directory; None is runs/NAME, with the recipe's name.
    progress: show a bar, in a notebook too; otherwise nothing is printed.
    The outcome has `step`, `finished` and `reason`. Raises BloomeryError as the command does.
    """
    from bloomery.config.environment import follow_recipe
    from bloomery.config.find import from_home, run_path
    from bloomery.config.load import LoadedRecipe
    from bloomery.config.peer_settings import refuse_alone
    from bloomery.events.run_directory import RunDirectory
    from bloomery.train.loop import train
    from bloomery.train.settings import StartOptions

    if not isinstance(loaded, LoadedRecipe):
        name, loaded = str(loaded), recipe(loaded)
        run = run_path(name, run=run, name=loaded.recipe.run.name)
    refuse_alone(loaded.recipe, loaded.sources)
    follow_recipe(offline=loaded.recipe.run.offline)
    path = from_home(run) if run is not None else Path("runs") / loaded.recipe.run.name
    return train(
        loaded, RunDirectory(path), StartOptions(say=_say_nothing, form="bar" if progress else "short")
    )


def _say_nothing(line: str) -> None:
    """Print nothing: a notebook gets the bar."""


class SampleOrder:
    """The samples of a run in the order in which it trains on them; `samples` returns one.

    It is a map-style dataset for `torch.utils.data.DataLoader`: sample i is {"tokens", "targets"}, each
    int64 [data.sequence_length]; a target is the token after the one at its place, or -100 where it does not
    count. Without shuffling, a loader of batches of the recipe's size sees what the run sees at each step,
    as long as no skip, rewind or change of the mixture has come on the way.
    """

    def __init__(self, loaded: LoadedRecipe, prepared: Prepared) -> None:
        from bloomery.data.answers import AnswerTokens
        from bloomery.data_loader.reading import Samples
        from bloomery.train.data_stream import run_samples, stream_of_run, training_documents

        section = loaded.recipe.data
        self._prepared = prepared
        datasets = training_documents(section, self._prepared.train)
        stream = stream_of_run(loaded.recipe, self._prepared.train, datasets)
        self._samples = Samples(
            stream.order,
            datasets,
            sequence_length=section.sequence_length,
            vocabulary_size=self._prepared.vocabulary_size,
            layouts=stream.layouts,
            eod=self._prepared.end_of_document_id,
            answers=[AnswerTokens(dataset) for dataset in datasets] if section.prompt_field else (),
        )
        self._length = run_samples(loaded.recipe)

    def __len__(self) -> int:
        """The number of samples of the whole run, epochs included."""
        return self._length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample. Raises IndexError beyond the run's last one."""
        (sample,) = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, torch.Tensor]]:
        """Return several samples at once, as a DataLoader asks for them."""
        import numpy as np

        for index in indices:
            if not 0 <= index < self._length:
                raise IndexError(f"sample {index} of {self._length}")
        inputs, targets = self._samples.read(np.asarray(indices, dtype=np.int64))
        return [
            {"tokens": tokens, "targets": wanted}
            for tokens, wanted in zip(_rows(inputs), _rows(targets), strict=True)
        ]


def samples(run: PathLike | LoadedRecipe, directory: PathLike | None = None) -> SampleOrder:
    """Return the samples of a run, or of a recipe, in the order of its training, as a torch dataset.

    directory: where a recipe's text is tokenised, as in a run's `data`; needed only for a recipe.
    """
    from bloomery.config.find import from_home
    from bloomery.config.load import LoadedRecipe, load_recipe
    from bloomery.data.prepare import prepare, prepared_of_run
    from bloomery.errors import StorageError
    from bloomery.events.run_directory import RunDirectory

    if not isinstance(run, LoadedRecipe):
        rundir = RunDirectory(from_home(run))
        loaded = load_recipe(str(rundir.recipe))
        return SampleOrder(loaded, prepared_of_run(loaded.recipe.data, rundir.data))
    if directory is None:
        raise StorageError(
            "samples() of a recipe needs a directory for its tokens.", remedy="Give directory=…, or a run."
        )
    return SampleOrder(run, prepare(run.recipe.data, from_home(directory)))


def _rows(read: np.ndarray) -> Iterator[torch.Tensor]:
    """Yield the rows of int32 [k, L] as int64 tensors of their own."""
    import torch

    for row in read:
        yield torch.from_numpy(row.astype("int64"))
