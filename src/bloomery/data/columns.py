"""Reads the documents of a column of texts, of Parquet and Arrow files.

Nothing in an Arrow file says that its offsets and indices lie within its data, so they are checked before
they are followed: otherwise a damaged file would end the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bloomery.data.documents import (
    BadDocuments,
    BadText,
    Document,
    checked_text,
    decoded_text,
    size_in_utf8,
)
from bloomery.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa


def path_in(schema: pa.Schema, text_field: str, file: Path) -> tuple[str, ...]:
    """Return the names that lead to the column of texts: its own, or 'a.b' as b inside the structure a.

    Raises DataError where there is none.
    """
    import pyarrow as pa

    if text_field in schema.names:
        return (text_field,)
    names = [*schema.names]
    for field in schema:
        if pa.types.is_struct(field.type):
            names += [f"{field.name}.{inner.name}" for inner in field.type]
    path = tuple(text_field.split("."))
    kind: Any = pa.struct(list(schema))  # Any: pyarrow has no stubs
    for name in path:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            refuse_without(text_field, names, file)
            break
        kind = kind.field(name).type
    return path


def refuse_without(text_field: str, names: list[str], file: Path | str) -> None:
    """Raise DataError where a table has no column of this name."""
    if text_field not in names:
        raise DataError(
            f"{file} has no column {text_field!r}; its columns are {', '.join(names) or 'none'}.",
            remedy="Name the one that holds the text: data.text_field, or --text-field.",
        )


def column_documents(
    batch: pa.RecordBatch, path: tuple[str, ...], file: Path, bad: BadDocuments, *, before: int
) -> Iterator[Document]:
    """Yield the texts of a batch with one column, and add every other value to `bad`.

    path: the names that lead to the texts inside the column. before: the rows of the file before the batch.
    Raises ArrowException for a damaged batch.
    """
    from pyarrow import compute

    column = batch.column(0)
    for name in path[1:]:
        column.validate()
        column = compute.struct_field(column, name)
    for number, value in enumerate(_checked(column).to_pylist(), before + 1):
        text = _text_in(value, ".".join(path))
        if isinstance(text, str):
            yield Document(text=text, place=f"{file}:{number}", size_bytes=size_in_utf8(text))
        else:
            bad.add(text.at(file, number))


def _checked(column: pa.Array) -> pa.Array:
    """Return a column whose offsets and indices lie within its data, without a dictionary.

    Texts become bytes, since Arrow promises UTF-8 and does not check it. Raises ArrowException for damage.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column.indices.validate(full=True)
        return _checked(column.dictionary).take(column.indices)
    if pa.types.is_string(column.type):
        column = column.view(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.view(pa.large_binary())
    column.validate(full=True)
    return column


def _text_in(value: object, text_field: str) -> str | BadText:
    if isinstance(value, bytes):
        return decoded_text(value)
    if isinstance(value, str):
        return checked_text(value)
    return BadText(kind="not text", why=f"column {text_field!r} holds {type(value).__name__}, not text")
