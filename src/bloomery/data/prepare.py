"""Prepares the data of a run: makes its tokenizer and its datasets, and reuses them at later starts."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from bloomery import durable
from bloomery.config.data import LONGEST_LINE_MIB, DataSection, DatasetSection
from bloomery.config.find import from_home
from bloomery.data.fetch import refuse_incomplete
from bloomery.data.indexed import IndexedDataset
from bloomery.data.pair_files import PARTS
from bloomery.data.pairs import refuse_damaged
from bloomery.data.prepare_build import FORMAT, HELD_OUT, TRAIN, build_in
from bloomery.data.sources import FoundFiles, SourceHashes, find_files
from bloomery.data.storage import as_storage_error, locked_directory, write_whole
from bloomery.data.streaming import CacheLocation, is_elsewhere, is_mirror, mount
from bloomery.data.tokenizer import find_tokenizer, load_tokenizer, refuse_missing_tokenizer
from bloomery.data.tokenizer_files import JSON_FILE, MODEL_FILE, is_json, tokenizer_in
from bloomery.errors import BloomeryError, DataError, OriginGone
from bloomery.events.records import ProgressCallback, ignore_progress

_MANIFEST, _LOCK, _BUILDING, _WANTED = "prepared.json", "prepared.lock", "building", "wanted.json"
_NAMES = {JSON_FILE, MODEL_FILE} | {
    path(Path(name)).name for name in (TRAIN, HELD_OUT) for path in PARTS.values()
}
"""The files of a manifest, some of which each has."""


@dataclass(frozen=True, kw_only=True)
class PreparedDataset:
    """One pair of indexed files.

    text_bytes: size of its documents in UTF-8; 0 if not known.
    """

    name: str
    prefix: Path
    weight: float
    documents: int
    tokens: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The data that a run reads.

    notes: sentences that a person should see, such as what was skipped or is missing.
    fingerprint: names text, split and tokenizer; equal fingerprints give equal samples.
    reused: whether an earlier start had prepared it.
    """

    tokenizer_path: Path
    vocabulary_size: int
    end_of_document_id: int
    train: tuple[PreparedDataset, ...]
    held_out: tuple[PreparedDataset, ...]
    notes: tuple[str, ...]
    fingerprint: str
    reused: bool


def prepare(
    data: DataSection,
    directory: Path,
    *,
    progress: ProgressCallback = ignore_progress,
    is_trained_on: bool = False,
) -> Prepared:
    """Make or find the tokenizer and the datasets of a run.

    `datasets` are used as they are. `sources` are tokenised into `directory`, unless a manifest there shows
    the same text and settings. A kill at any moment leaves either the whole result or none, and the next
    start continues where it was. One process works at a time; others wait, and find the result. The tokenizer
    is trained only on training documents.

    is_trained_on: a model was trained on what is in `directory`. Other text then raises DataError: tokenised
        in its place it would take the model's tokenizer away. Where there is no text any more, the data stay.
    """
    if not data.sources:
        tokenised = _tokenised_before(data, directory)
        _refuse_damaged_pairs(data, tokenised)
        return tokenised
    try:
        files = find_files(data.sources)
        refuse_incomplete(file.path for file in files.files)
        wanted = _wanted(data, files, directory, progress=progress)
    except OriginGone as gone:
        kept = _found_again(data, directory, None) if is_trained_on else None
        if kept is None:
            raise
        _refuse_damaged_pairs(data, kept)
        note = f"{gone.message} The run goes on with the data in {directory}, which it was trained on."
        return replace(kept, notes=(*kept.notes, note))
    prepared = _found_again(data, directory, wanted)
    if prepared is None:
        with as_storage_error(directory):
            directory.mkdir(parents=True, exist_ok=True)
        with locked_directory(directory, name=_LOCK):
            prepared = _found_again(data, directory, wanted)
            if prepared is None:
                if is_trained_on:
                    _refuse_other_text(directory, wanted)
                _build(data, files, directory, wanted, progress=progress)
                prepared = _found_again(data, directory, wanted, reused=False)
                assert prepared is not None, "what was just built fits what was wanted"
    _refuse_damaged_pairs(data, prepared)
    for dataset in prepared.train:
        _refuse_too_small(dataset, data.sequence_length)
    return prepared


def prepare_run(
    data: DataSection, directory: Path, *, progress: ProgressCallback, is_trained_on: bool
) -> Prepared:
    """Do what `prepare` does, on the first rank of a run, which then has its tokenizer in `directory`.

    Beside datasets that are tokens already it lies elsewhere, and that file may be moved or removed.
    """
    prepared = prepare(data, directory, progress=progress, is_trained_on=is_trained_on)
    own = tokenizer_in(directory)
    if prepared.tokenizer_path != own and not (own and is_trained_on):
        content = prepared.tokenizer_path.read_bytes()
        durable.make_directory(directory)
        name, other = (JSON_FILE, MODEL_FILE) if is_json(content) else (MODEL_FILE, JSON_FILE)
        write_whole(directory / name, content)
        with as_storage_error(
            directory / other
        ):  # of an earlier recipe; readers of a run take what they find
            (directory / other).unlink(missing_ok=True)
    return prepared


def prepare_after_first(data: DataSection, directory: Path) -> Prepared:
    """Return what the first rank has prepared; that one knows whether a run was trained on it."""
    try:
        return prepare(data, directory)
    except OriginGone:
        return prepared_of_run(data, directory)


def prepared_of_run(data: DataSection, directory: Path) -> Prepared:
    """Return the tokenizer and the datasets that a run was trained on, whatever its sources hold now.

    Text that is not there, as after a restore, is tokenised as `prepare` does. Raises DataError where the
    sources give other text by then.
    """
    kept = _found_again(data, directory, None) if data.sources else None
    if kept is None:
        return prepare(data, directory, is_trained_on=True)
    _refuse_damaged_pairs(data, kept)
    return kept


def _refuse_other_text(directory: Path, wanted: dict[str, Any]) -> None:
    manifest = _read(directory / _MANIFEST)
    if manifest is not None and manifest.get("wanted") not in (None, wanted):
        raise DataError(
            f"The model was trained on other text, or with another tokenizer, than data.sources gives now; "
            f"{directory} stays as it is.",
            remedy="Bring the old files back (relative names are sought from where the command runs), or "
            "start a run of another name.",
        )


def _refuse_damaged_pairs(data: DataSection, prepared: Prepared) -> None:
    """Compare local pairs with their seals; remote ones are checked block by block as they are fetched."""
    prefixes = [dataset.prefix for dataset in (*prepared.train, *prepared.held_out)]
    here = (prefix for prefix in prefixes if not is_mirror(prefix))
    refuse_damaged(here, may_have_gaps=data.order == "megatron")


def _tokenised_before(data: DataSection, directory: Path) -> Prepared:
    """Return the result for datasets that are tokenised already."""
    if not data.datasets:
        raise DataError("No data is given.", remedy="Set data.sources or data.datasets.")
    if data.tokenizer == "train":
        raise DataError(
            "data.datasets are token ids already, and data.tokenizer does not say whose.",
            remedy="Set data.tokenizer to the path of the tokenizer.json that made them.",
        )
    path = _tokenizer_of(data, directory)
    tokenizer = load_tokenizer(path, end_of_document=data.end_of_document_token)
    prefixes = dataset_prefixes(data, directory)
    train = tuple(_given(section, prefixes) for section in data.datasets)
    for dataset in train:
        _refuse_too_small(dataset, data.sequence_length)
    digest = xxhash.xxh3_128(path.read_bytes())
    for dataset in train:
        digest.update(f"{dataset.name} {dataset.documents} {dataset.tokens}\n".encode())
    held_out = tuple(_given(section, prefixes) for section in data.held_out_datasets)
    return Prepared(
        tokenizer_path=path,
        vocabulary_size=tokenizer.vocabulary_size,
        end_of_document_id=tokenizer.eod,
        train=train,
        held_out=held_out,
        notes=()
        if held_out or data.split
        else ("No data.held_out_datasets are given: there will be no held-out loss.",),
        fingerprint=digest.hexdigest(),
        reused=True,
    )


def _tokenizer_of(data: DataSection, directory: Path) -> Path:
    """Return the file of the tokenizer; where it is gone, the copy that the run has kept of it."""
    try:
        path = find_tokenizer(data.tokenizer)
        refuse_missing_tokenizer(path)
    except BloomeryError:
        own = tokenizer_in(directory)
        if own is None:
            raise
        return own
    return path


def dataset_prefixes(data: DataSection, directory: Path) -> dict[str, Path]:
    """Return the prefix under which each dataset of the recipe can be opened, by its path; remote ones are
    mounted.
    """
    paths = [dataset.path for dataset in (*data.datasets, *data.held_out_datasets)]
    elsewhere = [path for path in dict.fromkeys(paths) if is_elsewhere(path)]
    prefixes = {path: from_home(path) for path in paths if not is_elsewhere(path)}
    refuse_incomplete(prefixes.values())
    if elsewhere:
        place = from_home(data.cache) if data.cache else directory / "cache"
        prefixes |= mount(elsewhere, CacheLocation(directory=place, limit_bytes=int(data.cache_gb * 1e9)))
    return prefixes


def _given(section: DatasetSection, prefixes: dict[str, Path]) -> PreparedDataset:
    prefix = prefixes[section.path]
    dataset = IndexedDataset(prefix)
    return PreparedDataset(
        name=section.name,
        prefix=prefix,
        weight=section.resolved_weight,
        documents=dataset.document_count,
        tokens=dataset.token_count,
        text_bytes=0,
    )


def _refuse_too_small(dataset: PreparedDataset, sequence_length: int) -> None:
    if dataset.tokens <= sequence_length:
        raise DataError(
            f"The dataset {dataset.name!r} ({dataset.prefix}) holds {dataset.tokens:,} tokens, and one "
            f"sample takes {sequence_length + 1:,}.",
            remedy="Give it more text, or make data.sequence_length smaller.",
        )


def _wanted(
    data: DataSection, files: FoundFiles, directory: Path, *, progress: ProgressCallback
) -> dict[str, Any]:
    """Return what the result depends on: names, sizes and contents of the files, and the settings that
    matter. What `directory` has a record of is not read.
    """
    digest, total, hashes = xxhash.xxh3_128(), 0, SourceHashes(directory)
    for number, file in enumerate(files.files):
        content, size = hashes.of(file.path)
        total += size
        digest.update(f"{file.key}\n{content}\n".encode())
        progress("reading", number + 1, len(files.files), "files")
    hashes.keep()
    wanted = {
        "sources": digest.hexdigest(),
        "source_bytes": total,
        "text_field": data.text_field,
        "separator": data.separator,
        "held_out_every": data.held_out_every,
        "end_of_document_token": data.end_of_document_token,
    }
    if data.longest_line_mib != LONGEST_LINE_MIB:  # named only then: what was prepared before still fits
        wanted["longest_line_mib"] = data.longest_line_mib
    if data.prompt_field:
        wanted["prompt_field"] = data.prompt_field
    if data.tokenizer == "train":
        return {
            **wanted,
            "tokenizer": "train",
            "tokenizer_vocabulary": data.tokenizer_vocabulary,
            "tokenizer_split": data.tokenizer_split,
        }
    path = find_tokenizer(data.tokenizer)
    refuse_missing_tokenizer(path)
    load_tokenizer(path, end_of_document=data.end_of_document_token)
    return {**wanted, "tokenizer": xxhash.xxh3_128_hexdigest(path.read_bytes())}


def _found_again(
    data: DataSection, directory: Path, wanted: dict[str, Any] | None, *, reused: bool = True
) -> Prepared | None:
    """Return the tokenised data in `directory` if they are whole and were made from `wanted`; else None.

    wanted: sources and settings, as the manifest notes them; None accepts data that were made from any.
    """
    try:
        manifest = json.loads((directory / _MANIFEST).read_bytes())
        fits = manifest["format"] == FORMAT and wanted in (None, manifest["wanted"])
        whole = all((directory / name).stat().st_size == size for name, size in manifest["files"].items())
        refused = wanted is not None and data.bad_documents == "fail" and manifest["bad_documents"]
        datasets = {
            name: PreparedDataset(name=name, prefix=directory / name, weight=1.0, **counts)
            for name, counts in manifest["datasets"].items()
        }
        train = datasets[TRAIN]
        vocabulary_size, end_of_document_id = manifest["vocabulary_size"], manifest["end_of_document_id"]
        notes = tuple(manifest["notes"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not fits or not whole or refused:
        return None
    prefixes = dataset_prefixes(data, directory)
    held_out = tuple(_given(section, prefixes) for section in data.held_out_datasets)
    return Prepared(
        tokenizer_path=directory / manifest.get("tokenizer_file", JSON_FILE),
        vocabulary_size=vocabulary_size,
        end_of_document_id=end_of_document_id,
        train=(train,),
        held_out=((datasets[HELD_OUT],) if HELD_OUT in datasets else ()) + held_out,
        notes=notes,
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(manifest["wanted"], sort_keys=True).encode()),
        reused=reused,
    )


def _build(
    data: DataSection,
    files: FoundFiles,
    directory: Path,
    wanted: dict[str, Any],
    *,
    progress: ProgressCallback,
) -> None:
    """Make everything in a directory of its own, then move it into place, manifest last.

    An interrupted start for the same text and settings may have left a tokenizer and tokenised pieces of
    text, which are used again.
    """
    building = directory / _BUILDING
    if _read(building / _WANTED) != wanted:
        with as_storage_error(building):
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
        write_whole(building / _WANTED, json.dumps(wanted).encode())
    manifest = _built(data, building, directory)
    if manifest is None:
        manifest = build_in(building, data, files, wanted, progress=progress)
        write_whole(building / _MANIFEST, json.dumps(manifest, indent=1).encode())
    with as_storage_error(directory):
        (directory / _MANIFEST).unlink(missing_ok=True)
        for name in _NAMES - set(manifest["files"]):  # of other settings; some readers take what they find
            (directory / name).unlink(missing_ok=True)
        durable.sync_directory(directory)
        for name in manifest["files"]:
            if (building / name).exists():  # otherwise an interrupted start moved it
                durable.replace(building / name, directory / name)
    write_whole(directory / _MANIFEST, json.dumps(manifest, indent=1).encode())
    shutil.rmtree(building, ignore_errors=True)


def _built(data: DataSection, building: Path, directory: Path) -> dict[str, Any] | None:
    """Return the manifest of what an interrupted start made, if its files are whole in either directory."""
    manifest = _read(building / _MANIFEST)
    try:
        if manifest is None or (data.bad_documents == "fail" and manifest["bad_documents"]):
            return None
        places = [(building / name, directory / name, size) for name, size in manifest["files"].items()]
    except (KeyError, AttributeError):
        return None
    is_whole = all(size in (_size(made), _size(moved)) for made, moved, size in places)
    return manifest if is_whole else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
