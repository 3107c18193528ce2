"""Matches tensors of transformers, DCP or Megatron-DeepSpeed with ours, and refuses those that do not fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from bloomery.config.model import ModelSection
from bloomery.errors import CheckpointError
from bloomery.interchange.families import FAMILIES, family_of, hf_tensors
from bloomery.interchange.families.family import PLAIN_WEIGHTS, Family, HfTensor, stored_shape
from bloomery.interchange.foreign_files import METADATA, is_megatron, read_dcp, read_megatron
from bloomery.interchange.weight_files import PLAIN_TYPES, WeightFiles
from bloomery.model.shape import ResolvedModel, Shape, logical_shapes, resolve

_CHECKED_AT_ONCE = 1 << 20
_EMBEDDING, _HEAD = "embedding.weight", "head.weight"
_OWN_PARTS = ("embedding", "embedding_norm", "positions", "blocks", "final_norm", "head")
_QUANTISED = (
    ".weight_scale_inv",
    ".weight_scale",
    ".SCB",
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".absmax",
)


@dataclass(frozen=True, kw_only=True)
class Match:
    """An entry of the model, and the name under which the files hold it."""

    entry: HfTensor
    stored: str


def as_stored(section: ModelSection, family: Family, files: WeightFiles) -> ModelSection:
    """Return the section with `tied` as transformers interprets it: a stored head that differs from the
    embedding counts.

    Raises CheckpointError if the files cannot hold that many layers.
    """
    if section.layers > len(files.tensors):
        raise CheckpointError(
            f"config.json has {section.layers:,} layers, and the files hold {len(files.tensors)} tensors.",
            remedy="Check that all of the files are there, and that config.json is theirs.",
        )
    if not section.tied:
        return section
    embedding, head = (_found(family, family.names[role], files) for role in (_EMBEDDING, _HEAD))
    if embedding is None or head is None:
        return section
    for name in (embedding, head):
        _refuse_codes(files, name)
    return section if files.are_equal(embedding, head) else replace(section, tied=False)


def matches(
    entries: Sequence[HfTensor], *, model: ResolvedModel, family: Family, files: WeightFiles
) -> tuple[Match, ...]:
    """Return where each entry is stored.

    Raises CheckpointError for a tensor that is missing, has another shape or type, or does not belong to the
    model.
    """
    shapes = logical_shapes(model)
    unclaimed = set(files.tensors)
    matched = []
    for entry in entries:
        stored = _found(family, entry.name, files)
        if stored is None and model.section.tied and entry.parts == (_EMBEDDING,):
            stored = _found(family, family.names[_HEAD], files)  # a tied pair, stored under its other name
        if stored is None:
            raise CheckpointError(
                f"{files.directory} lacks the tensor {entry.name}.",
                remedy="Check that all of its files are there.",
            )
        _refuse_unfit(files, stored, stored_shape(entry, shapes))
        if entry.parts[0].startswith("blocks."):
            _refuse_plain(files, stored)
        unclaimed -= {stored, *_beside(files, stored)}
        matched.append(Match(entry=entry, stored=stored))
    if model.section.tied:
        head = family.names[_HEAD]
        if head in unclaimed:  # equal to the embedding: `as_stored` compared them
            unclaimed -= {head, *_beside(files, head)}
    _refuse_unknown(files, [name for name in files.tensors if name in unclaimed], family)
    return tuple(matched)


def read_logical(
    matched: Sequence[Match], *, model: ResolvedModel, files: WeightFiles
) -> Iterator[tuple[str, Tensor]]:
    """Yield each logical tensor in fp32, read as it is asked for. Raises CheckpointError for NaN and
    infinities.
    """
    for match in matched:
        yield from read_match(match, model=model, files=files)


def read_match(match: Match, *, model: ResolvedModel, files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    """Yield the logical tensors that one stored tensor holds, in fp32. Raises CheckpointError as
    `read_logical`.
    """
    tensor = files.read(match.stored)
    refuse_non_finite(match.stored, tensor, where=_place(match, files))
    yield from zip(match.entry.parts, split_parts(match.entry, tensor.float(), model), strict=True)


def read_rows(match: Match, *, files: WeightFiles, start: int, stop: int) -> Tensor:
    """Return rows [start, stop) of a plain tensor without codes, in fp32. Raises CheckpointError as
    `read_logical`.
    """
    rows = files.rows(match.stored, start, stop)
    refuse_non_finite(match.stored, rows, where=_place(match, files))
    return rows.float()


def _place(match: Match, files: WeightFiles) -> str:
    return str(files.directory / files.tensors[match.stored].file)


def refuse_non_finite(name: str, tensor: Tensor, *, where: str) -> None:
    """Raise CheckpointError if `tensor` holds a NaN or an infinity, since such a weight computes nothing."""
    # Some at a time: asking a whole tensor takes as much memory again.
    if all(bool(some.isfinite().all()) for some in tensor.reshape(-1).split(_CHECKED_AT_ONCE)):
        return
    finite = tensor.isfinite()
    nan = int(tensor.isnan().sum())
    infinite = tensor.numel() - int(finite.sum()) - nan
    first = tuple(int(at) for at in (~finite).nonzero()[0])
    raise CheckpointError(
        f"{name} of {where} holds {nan:,} NaN and {infinite:,} infinities among {tensor.numel():,} values, "
        f"the first at {first}.",
        remedy="Take another copy, or a checkpoint from before the values went wrong.",
    )


def _found(family: Family, name: str, files: WeightFiles) -> str | None:
    return next(
        (stored_name for stored_name in family.stored_names(name) if stored_name in files.tensors), None
    )


def _beside(files: WeightFiles, name: str) -> tuple[str, ...]:
    """Return the tensors that say what the codes of `name` stand for."""
    return files.scheme.claims(name) if files.scheme is not None and files.is_coded(name) else ()


def _refuse_codes(files: WeightFiles, name: str) -> None:
    stored = files.tensors[name]
    where = files.directory / stored.file
    if stored.dtype not in PLAIN_TYPES and not files.is_coded(name):
        raise CheckpointError(
            f"{name} of {where} is stored as {stored.dtype}: codes of quantised weights, or another type "
            f"than {', '.join(PLAIN_TYPES)}.",
            remedy=PLAIN_WEIGHTS,
        )


def _refuse_plain(files: WeightFiles, name: str) -> None:
    """Raise CheckpointError for a plain matrix that config.json says is made of codes."""
    scheme, stored = files.scheme, files.tensors[name]
    if scheme is None or len(stored.shape) != 2 or files.is_coded(name):
        return
    if not any(part in name for part in scheme.skipped):
        raise CheckpointError(
            f"{name} of {files.directory / stored.file} is stored as {stored.dtype}, "
            f"and the quantization_config of config.json asks for {scheme.dtype} with scales.",
            remedy="Remove quantization_config from config.json if the weights are plain, or name the tensor "
            "in its modules_to_not_convert.",
        )


def _refuse_unfit(files: WeightFiles, name: str, wanted: Shape) -> None:
    _refuse_codes(files, name)
    stored = files.tensors[name]
    where = files.directory / stored.file
    if stored.shape != wanted:
        raise CheckpointError(
            f"{name} of {where} has the shape {stored.shape}, and config.json asks for {wanted}.",
            remedy="Check that config.json and the files are of the same model.",
        )


def _refuse_unknown(files: WeightFiles, unclaimed: list[str], family: Family) -> None:
    unknown = [name for name in unclaimed if family.derived is None or not family.derived.fullmatch(name)]
    if not unknown:
        return
    name = unknown[0]
    more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
    quantised = name.endswith(_QUANTISED)
    raise CheckpointError(
        f"{files.directory / files.tensors[name].file} holds {name}, which no {family.name} of this "
        f"config.json has{more}.",
        remedy=f"It belongs to quantised weights. {PLAIN_WEIGHTS}"
        if quantised
        else "Check that config.json and the files are of the same model, without adapters or other heads.",
    )


_PLAIN = (torch.float32, torch.bfloat16, torch.float16)

Lazy = Mapping[str, Callable[[], Tensor]]


def is_foreign(directory: Path) -> bool:
    """Whether the directory is a DCP or a Megatron-DeepSpeed checkpoint."""
    return (directory / METADATA).is_file() or is_megatron(directory)


def read_foreign(
    directory: Path, section: ModelSection, *, vocabulary: int, sequence_length: int
) -> tuple[ResolvedModel, Iterator[tuple[str, Tensor]]]:
    """Return the model of `section` with the values of a foreign checkpoint: (logical name, fp32 tensor), in
    order.

    Tensors may have our names or those of transformers, behind any prefix. Rows that pad the vocabulary are
    left out. Raises CheckpointError, with everything that does not fit, before any tensor is read but a head
    that may be tied.
    """
    model = resolve(section, vocabulary=vocabulary, sequence_length=sequence_length)
    lazy = read_dcp(directory) if (directory / METADATA).is_file() else read_megatron(directory)
    own = logical_shapes(model)
    prefix = _prefix(lazy, next(iter(own)))
    if prefix is not None:
        _refuse_missing(directory, lazy, [prefix + name for name in own])
        _refuse_unclaimed(directory, lazy, prefix, list(own), begins=_OWN_PARTS, tied=(_EMBEDDING, _HEAD))
        return model, (
            (name, _fitting(directory, name, lazy[prefix + name](), shape)) for name, shape in own.items()
        )
    family = family_of(section, kv_heads=model.kv_heads, ffn=model.ffn)
    entries = tuple(hf_tensors(model, family))
    prefix = _prefix(lazy, entries[0].name)
    if prefix is None:
        raise CheckpointError(
            f"{directory} has neither {next(iter(own))} nor {entries[0].name}, behind any prefix.",
            remedy=f"It has {_first_names(sorted(lazy))}. Is it a model of another family than the recipe's?",
        )
    names = [entry.name for entry in entries]
    _refuse_missing(directory, lazy, [prefix + name for name in names])
    theirs, derived = FAMILIES[family].names, FAMILIES[family].derived
    begins = {name.partition(".")[0] for name in theirs.values()}
    tied = theirs[_EMBEDDING], theirs[_HEAD]
    _refuse_unclaimed(directory, lazy, prefix, names, begins=begins, tied=tied, derived=derived)

    def read() -> Iterator[tuple[str, Tensor]]:
        for entry in entries:
            tensor = lazy[prefix + entry.name]()
            wanted = own[entry.parts[0]]
            if len(entry.parts) == 1 and entry.layout == "plain":
                yield entry.parts[0], _fitting(directory, entry.name, tensor, wanted)
                continue
            _refuse_integer_codes(directory, entry.name, tensor)
            for part, value in zip(entry.parts, split_parts(entry, tensor, model), strict=True):
                yield part, _fitting(directory, part, value, own[part])

    return model, read()


def _prefix(lazy: Lazy, name: str) -> str | None:
    """Return what precedes `name` in the checkpoint; None if it is not there. Of several, the shortest
    counts.
    """
    ends = [key.removesuffix(name) for key in lazy if key == name or key.endswith(f".{name}")]
    return min(ends, key=len, default=None)


def _refuse_missing(directory: Path, lazy: Lazy, names: list[str]) -> None:
    missing = [name for name in names if name not in lazy]
    if missing:
        raise CheckpointError(
            f"{directory} lacks {len(missing)} of the recipe's {len(names)} tensors: "
            f"{_first_names(missing)}.",
            remedy="Give the recipe of this model: model.layers, tied, bias and so on must be its own.",
        )


def _refuse_unclaimed(
    directory: Path,
    lazy: Lazy,
    prefix: str,
    names: list[str],
    *,
    begins: Collection[str],
    tied: tuple[str, str],
    derived: re.Pattern[str] | None = None,
) -> None:
    """Raise CheckpointError for tensors of the checkpoint's model that the recipe's model has not.

    begins: the first words of the names of a model's tensors; what else a checkpoint holds, such as an
        optimizer's state, has other ones.
    tied: the embedding and the head. A head that the recipe has not must be equal to the embedding.
    derived: tensors that follow from the settings.
    """
    embedding, head = tied
    claimed = set(names)
    inside = (key.removeprefix(prefix) for key in lazy if key.startswith(prefix))
    more = [
        name
        for name in inside
        if name not in claimed
        and name.partition(".")[0] in begins
        and not (derived and derived.fullmatch(name))
    ]
    if head in more and torch.equal(lazy[prefix + head](), lazy[prefix + embedding]()):
        more.remove(head)
    if more:
        raise CheckpointError(
            f"{directory} holds {len(more)} tensors that the recipe's model has not: {_first_names(more)}.",
            remedy="Give the recipe of this model: model.layers, tied, bias and so on must be its own.",
        )


def _fitting(directory: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the tensor in fp32, without rows that pad the vocabulary."""
    pads = name.endswith(("embedding.weight", "head.weight", "word_embeddings.weight", "embed_tokens.weight"))
    pads = pads or name.endswith(("lm_head.weight", "wte.weight"))
    if pads and tensor.shape[0] > shape[0] and tuple(tensor.shape[1:]) == shape[1:]:
        tensor = tensor[: shape[0]]
    if tuple(tensor.shape) != shape:
        raise CheckpointError(
            f"{name} of {directory} is {tuple(tensor.shape)}, and the recipe's is {shape}.",
            remedy="Give the recipe of this model.",
        )
    _refuse_integer_codes(directory, name, tensor)
    refuse_non_finite(name, tensor, where=str(directory))
    return tensor.float()


def _refuse_integer_codes(directory: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype not in _PLAIN:
        raise CheckpointError(
            f"{name} of {directory} is stored as {tensor.dtype}: codes of quantised weights, or another type "
            "than fp32, bf16 and fp16.",
            remedy="Save the weights themselves in one of these types.",
        )


def _first_names(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def join_parts(entry: HfTensor, parts: Sequence[Tensor], model: ResolvedModel) -> Tensor:
    """Return the Hugging Face tensor made of our `parts`."""
    if entry.layout == "plain":
        return parts[0]
    if entry.layout == "transposed":
        return parts[0].t()
    if entry.layout == "stacked":
        return torch.cat(list(parts))
    if entry.layout == "stacked_transposed":
        return torch.cat(list(parts)).t()
    by_head = [part.unflatten(0, (-1, model.head_dim)) for part in parts]  # [heads, d, …]
    return torch.stack(by_head, dim=1).flatten(0, 2)  # [heads · 3 · d, …]


def split_parts(entry: HfTensor, tensor: Tensor, model: ResolvedModel) -> tuple[Tensor, ...]:
    """Return our parts of the Hugging Face `tensor`, the reverse of `join_parts`."""
    if entry.layout == "plain":
        return (tensor,)
    if entry.layout == "transposed":
        return (tensor.t(),)
    if entry.layout == "stacked":
        return tensor.chunk(len(entry.parts))
    if entry.layout == "stacked_transposed":
        return tensor.t().chunk(len(entry.parts))
    by_head = tensor.unflatten(0, (-1, len(entry.parts), model.head_dim))
    return tuple(part.flatten(0, 1) for part in by_head.unbind(1))
