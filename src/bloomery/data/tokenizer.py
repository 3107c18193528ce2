"""Trains, finds and loads tokenizers: byte-level BPE, any `tokenizer.json`, or a SentencePiece model.

`find_tokenizer` finds the file of a tokenizer by path, or by `hf:NAME` on Hugging Face.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Engine

from bloomery.config.data import HUB_PREFIX
from bloomery.config.environment import refuse_network
from bloomery.config.find import from_home
from bloomery.data.storage import write_whole
from bloomery.data.tokenizer_engines import (
    CODE,
    HARD_TEXTS,
    NOT_PROVEN,
    Coder,
    Encoded,
    HuggingFaceCoder,
    disagreement,
    fast_coder,
    joined,
    probe_texts,
    unproven,
)
from bloomery.data.tokenizer_files import JSON_FILE, MODEL_FILE, is_json, tokenizer_in
from bloomery.errors import DataError, OriginGone

_PIECE = 1 << 18
_TRIED = 2048
_CONTEXT = 16
"""The ids before others that can change their text: those of one character, and some more."""
_AROUND = (("", ""), ("a", "b"), (" ", " "), ("\n", "\n"), ("a ", " b"), ("<", ">"), ("é", "語"))
_BETWEEN_WORDS = re.compile(r"[^\W\d_](?= [^\W\d_])")


class PieceModel:
    """A SentencePiece model. Raises RuntimeError or ValueError for bytes that are not one."""

    name = "sentencepiece"

    def __init__(self, content: bytes) -> None:
        import sentencepiece

        if not content:
            raise ValueError("it is empty")
        self.content = content
        self._model = sentencepiece.SentencePieceProcessor(model_proto=content)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of the texts; control symbols such as </s> are never read out of text."""
        return joined(self._model.encode(list(texts), out_type=int))

    def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]:
        """Return every piece and its id; all are counted, added or not."""
        del with_added_tokens
        return {self._model.id_to_piece(number): number for number in range(self._model.get_piece_size())}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of some ids; control symbols are spelt out unless skipped."""
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            if token >= self._model.get_piece_size():
                continue  # a row of padding of the model's vocabulary: no text, as with a tokenizer.json
            if not self._model.is_control(token):
                run.append(token)
                continue
            parts.append(self._model.decode(run))
            run = []
            if not skip_special_tokens:
                parts.append(self._model.id_to_piece(token))
        return "".join([*parts, self._model.decode(run)])


class Tokenizer:
    """Encodes texts with an engine of Hugging Face or SentencePiece, and has a token that ends a document.

    Text that spells a special token stays text. A fast engine may replace the reference if it gives equal
    ids; see `use_fast` and `prove`.
    """

    def __init__(self, engine: Any, *, end_of_document: str, origin: str) -> None:
        # Any: a tokenizers.Tokenizer, whose package has no stubs, or a PieceModel, which has the same methods
        self._engine = engine
        if not isinstance(engine, PieceModel):
            engine.encode_special_tokens = True  # otherwise a document could end itself in the middle
            engine.no_truncation()  # a tokenizer.json may ask for both, and documents would lose their ends
            engine.no_padding()
        vocabulary: dict[str, int] = engine.get_vocab(with_added_tokens=True)
        if end_of_document not in vocabulary:
            raise DataError(
                f"The tokenizer {origin} has no token {end_of_document!r}, which is to end each document.",
                remedy="Set data.end_of_document_token (--end-of-document) to the token it uses for that.",
            )
        self.eod: int = vocabulary[end_of_document]
        self.end_of_document = end_of_document
        self.vocabulary_size: int = max(vocabulary.values()) + 1
        self.file_name = MODEL_FILE if isinstance(engine, PieceModel) else JSON_FILE
        self._reference: Coder = engine if isinstance(engine, PieceModel) else HuggingFaceCoder(engine)
        self._coder: Coder = self._reference
        self.engine_note = ""

    @property
    def engine(self) -> str:
        """The name of the engine in use: tokenizers, sentencepiece or fastokens."""
        return self._coder.name

    @property
    def reference(self) -> str:
        """The name of the reference engine, whose ids are right by definition."""
        return self._reference.name

    def texts_that_end_documents(self) -> list[str]:
        """Return the added tokens, the end-of-document token included, whose text is encoded as the id that
        ends a document. Each is tried alone, within words, between blanks and within texts that are hard.
        """
        contents = [self.end_of_document]
        if not isinstance(self._engine, PieceModel):
            contents += [str(token.content) for token in self._engine.get_added_tokens_decoder().values()]
        contents = list(dict.fromkeys(contents))[:_TRIED]
        found = []
        for content in contents:
            forms = (content, content.lower(), content.upper(), content.capitalize())
            tried = [f"{before}{form}{after}" for form in forms for before, after in _AROUND]
            tried += [f"{text}{content}{text}" for text in HARD_TEXTS]
            if (self._coder.encode(tried).ids == self.eod).any():
                found.append(content)
        return found

    def use_fast(self) -> None:
        """Encode with the fast engine from now on, if this tokenizer is one that the engine is proven on.

        The engine is also compared on texts made to be hard, and on texts of this tokenizer's own pattern,
        vocabulary and added tokens. If it is not used, `engine_note` says why.
        """
        if isinstance(self._engine, PieceModel):
            self.engine_note = "SentencePiece models have no faster engine here."
            return
        content = json.loads(self._engine.to_str())
        reason = unproven(content)
        if reason:
            self.use_reference(f"The slower engine is used: {reason}.")
            return
        content["post_processor"] = None  # it adds special tokens, which nobody asks for
        fast = fast_coder(json.dumps(content))
        if isinstance(fast, str):
            self.use_reference(f"The slower engine is used: {fast}.")
            return
        self._coder = fast
        self.prove([*HARD_TEXTS, *probe_texts(content)])

    def use_reference(self, note: str = "") -> None:
        """Encode with the reference from now on.

        note: a sentence that says why.
        """
        self._coder = self._reference
        self.engine_note = note

    def prove(self, texts: Sequence[str]) -> None:
        """Compare the fast engine with the reference on some texts, and stop using it at any difference."""
        if self._coder is self._reference:
            return
        difference = disagreement(
            self._coder, self._reference, [text for text in texts if NOT_PROVEN not in text]
        )
        if difference:
            self.use_reference(f"The slower engine is used: {difference}.")

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without an end-of-document token."""
        ids: list[int] = self._encoded([text]).ids.tolist()
        return ids

    def encode_batch(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each document, its end-of-document token last. It uses all cores."""
        return self._encoded(texts).with_last(self.eod)

    def _encoded(self, texts: Sequence[str]) -> Encoded:
        is_proven = not any(NOT_PROVEN in text for text in texts)
        return (self._coder if is_proven else self._reference).encode(texts)

    def decode(self, ids: Sequence[int], *, spells_special: bool = True) -> str:
        """Return the text of some ids. spells_special: special tokens are spelt out, not left out."""
        text: str = self._engine.decode(list(ids), skip_special_tokens=not spells_special)
        return text

    def decode_after(self, ids: Sequence[int], *, before: Sequence[int]) -> str:
        """Return the text that some ids add to that of the ids before them, special tokens spelt out.

        Alone they may have another text: SentencePiece leaves out a blank with which a text begins.
        """
        context = list(before[-_CONTEXT:])
        known, text = self.decode(context), self.decode([*context, *ids])
        return text.removeprefix(known) if text.startswith(known) else self.decode(ids)

    def save(self, path: Path) -> None:
        """Write the tokenizer's file: a `tokenizer.json` that `transformers` reads too, or the model."""
        if isinstance(self._engine, PieceModel):
            write_whole(path, self._engine.content)
        else:
            write_whole(path, self._engine.to_str(pretty=False).encode())


def load_tokenizer(path: Path, *, end_of_document: str) -> Tokenizer:
    """Read a `tokenizer.json` or a SentencePiece model; the first byte shows which it is."""
    try:
        content = path.read_bytes()
    except OSError as missing:
        raise DataError(
            f"Cannot read the tokenizer {path}: {missing.strerror}.",
            remedy="Give the path of a tokenizer.json, or set data.tokenizer = 'train'.",
        ) from missing
    engine = _engine(content, path)
    return Tokenizer(engine, end_of_document=end_of_document, origin=str(path))


def _engine(content: bytes, path: Path) -> Any:  # Any: see Tokenizer
    try:
        return Engine.from_buffer(content) if is_json(content) else PieceModel(content)
    except (ValueError, RuntimeError) as wrong:
        why = wrong if is_json(content) else "it is neither JSON nor a model of SentencePiece"
        raise DataError(
            f"{path} is not a tokenizer: {why}.",
            remedy="Give a tokenizer.json of Hugging Face `tokenizers`, or a SentencePiece .model.",
        ) from wrong


def train_tokenizer(
    texts: Iterable[str], *, vocabulary: int, end_of_document: str, split: str = "text"
) -> Tokenizer:
    """Train a byte-level BPE, which encodes every text and decodes it to itself.

    vocabulary: number of ids; fewer come out if the texts hold too few pairs to merge.
    split: where merges stop. 'text' is GPT-2's pattern. 'code' keeps line ends with their indentation and
    punctuation with a line end, and takes digits in threes, which gives about 4% fewer tokens on source code.

    Id 0 is the end-of-document token. The same texts give the same tokenizer.
    """
    engine = Engine(models.BPE())
    engine.pre_tokenizer = _pre_tokenizer(split)
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end_of_document],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in cut_between_words(text))
    _beside(lambda: engine.train_from_iterator(pieces, trainer=trainer))
    return Tokenizer(engine, end_of_document=end_of_document, origin="trained here")


def _beside(act: Callable[[], None]) -> None:
    """Call `act` in a thread and wait for it, so that Ctrl-C ends the wait while native code computes.

    Native code sees no signal. The thread is left behind then, and ends with the process.
    """
    over: Future[None] = Future()

    def run() -> None:
        try:
            act()
            over.set_result(None)
        except BaseException as error:  # noqa: BLE001  — whoever waits raises it
            over.set_exception(error)

    thread = threading.Thread(target=run, name="train-tokenizer", daemon=True)
    thread.start()
    while thread.is_alive():  # a signal that comes just before a wait without end does not wake it
        thread.join(_POLL_S)
    over.result()


def cut_between_words(text: str, *, most: int = _PIECE) -> Iterator[str]:
    """Yield a text in pieces of about `most` characters, so that training holds no long text many times over.

    It is cut before a single space between two letters, where no split joins what stands on both sides, so
    the same words are counted. A text without such a place within another `most` characters is cut anyway.
    """
    start = 0
    while len(text) - start > 2 * most:
        place = _BETWEEN_WORDS.search(text, start + most, start + 2 * most)
        stop = place.start() + 1 if place else start + most
        yield text[start:stop]
        start = stop
    yield text[start:]


def _pre_tokenizer(split: str) -> Any:  # Any: the engine's package has no stubs
    if split == "text":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(CODE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FETCH_TIMEOUT_S = 60.0
_POLL_S = 0.2


def find_tokenizer(name: str, *, may_fetch: bool = True) -> Path:
    """Return the file of a tokenizer: a path, a directory that holds one, or `hf:` and a name on the Hub.

    Such a name is looked up in the cache, or fetched once unless the network is forbidden, to this process or
    here (`may_fetch`). A text without the prefix is a path, whatever it looks like, so the name of a deleted
    directory never becomes a stranger's name.
    """
    if name.startswith(HUB_PREFIX):
        return _named(name.removeprefix(HUB_PREFIX), may_fetch=may_fetch)
    path = from_home(name)
    if path.is_dir():
        file = tokenizer_in(path)
        if file is None:
            raise DataError(
                f"{path} holds no {JSON_FILE} and no {MODEL_FILE}.",
                remedy="Give the path of the file itself.",
            )
        return file
    if not path.exists() and _NAME.fullmatch(name) and path.suffix not in (".json", ".model"):
        raise DataError(
            f"There is no tokenizer {name!r}: no such file or directory.",
            remedy=f"Check the path. A name on Hugging Face is written {HUB_PREFIX}{name}.",
        )
    return path


def refuse_missing_tokenizer(path: Path) -> None:
    """Raise OriginGone where there is no file of a tokenizer."""
    if not path.exists():
        raise OriginGone(
            f"Cannot read the tokenizer {path}: No such file or directory.",
            remedy="Give the path of a tokenizer.json, or set data.tokenizer = 'train'.",
        )


def _named(name: str, *, may_fetch: bool) -> Path:
    from huggingface_hub.errors import HFValidationError

    try:
        return _cached(name) or _fetched(name, is_forbidden=not may_fetch)
    except HFValidationError as wrong:
        raise DataError(
            f"{name!r} is no name of a tokenizer on Hugging Face.",
            remedy=f"Write {HUB_PREFIX}SOMEBODY/SOMETHING, or the path of a file without {HUB_PREFIX!r}.",
        ) from wrong


def _cached(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in (JSON_FILE, MODEL_FILE):
        path = try_to_load_from_cache(name, file)
        if isinstance(path, str):
            return Path(path)
    return None


def _fetched(name: str, *, is_forbidden: bool) -> Path:
    refuse_network(
        f"fetch the tokenizer {name!r}, which is not in Hugging Face's cache",
        remedy="Copy its tokenizer.json here and give the path, or fetch it once where there is a network.",
        is_forbidden=is_forbidden,
    )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    for file in (JSON_FILE, MODEL_FILE):
        try:
            return Path(hf_hub_download(name, file, etag_timeout=_FETCH_TIMEOUT_S))
        except LocalEntryNotFoundError as unreachable:
            raise _not_found(name, unreachable.__cause__ or unreachable) from unreachable
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, OSError) as unreachable:
            raise _not_found(name, unreachable) from unreachable
    raise _not_found(name, f"it has neither {JSON_FILE} nor {MODEL_FILE}")


def _not_found(name: str, why: object) -> DataError:
    reason = (str(why).strip() or type(why).__name__).splitlines()[0].rstrip(".")
    return DataError(
        f"There is no tokenizer {name!r} in Hugging Face's cache, and it was not fetched: {reason}.",
        remedy="Check the name; BLOOMERY_OFFLINE=1 keeps from trying the network.",
    )
