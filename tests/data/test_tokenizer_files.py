"""Tokenizers by path, by directory, by a name that is cached; and no network where it is forbidden."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers

from bloomery.cli.generate import _pieces
from bloomery.config.environment import OfflineRefused, go_offline, is_offline, refuse_network
from bloomery.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer, train_tokenizer
from bloomery.errors import DataError

TEXTS = [f"the cat number {number} sat on the mat, and so did {number * 7} others" for number in range(50)]


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer in a Hugging Face cache, under the name somebody/something."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    commit = "0" * 40
    home = tmp_path / "hub" / "models--somebody--something"
    path = home / "snapshots" / commit / "tokenizer.json"
    path.parent.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    train_tokenizer(TEXTS, vocabulary=280, end_of_document="<end>").save(path)
    return path


def test_a_name_is_found_in_the_cache_without_a_network(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    assert find_tokenizer("hf:somebody/something") == cached
    with pytest.raises(OfflineRefused, match=r"fetch the tokenizer 'somebody/else'.*is forbidden") as refused:
        find_tokenizer("hf:somebody/else")
    assert "tokenizer.json" in refused.value.remedy


def test_a_path_or_a_directory_is_taken_before_any_name(cached: Path, tmp_path: Path) -> None:
    assert find_tokenizer(str(cached)) == cached == find_tokenizer(str(cached.parent))
    with pytest.raises(DataError, match=r"holds no tokenizer\.json and no tokenizer\.model"):
        find_tokenizer(str(tmp_path))
    missing = find_tokenizer(str(tmp_path / "none.json"))
    with pytest.raises(DataError, match="Cannot read the tokenizer"):
        load_tokenizer(missing, end_of_document="<end>")


def test_only_what_says_that_it_is_a_name_is_looked_up_elsewhere(
    cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("bloomery.data.tokenizer._fetched", asked.append)
    for name in ("runs/tokenizer", "train", "somebody/something"):
        with pytest.raises(DataError, match="no such file or directory") as refused:
            find_tokenizer(name)
        assert f"hf:{name}" in refused.value.remedy
    for wrong in ("hf:", "hf:/etc/passwd", "hf:a/b/c"):
        with pytest.raises(DataError, match="is no name of a tokenizer"):
            find_tokenizer(wrong)
    assert asked == []


def test_one_switch_turns_the_libraries_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    go_offline(environment)
    assert environment["HF_HUB_OFFLINE"] == environment["BLOOMERY_OFFLINE"] == "1"
    for value, offline in (("1", True), ("0", False), ("", False), ("yes", True)):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("BLOOMERY_OFFLINE", value)
        assert is_offline() is offline
    with pytest.raises(OfflineRefused, match="needed to breathe"):
        refuse_network("breathe", remedy="Hold it.")


@pytest.fixture(scope="module")
def model() -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=written,
        vocab_size=120,
        model_type="bpe",
        hard_vocab_limit=False,
        byte_fallback=False,
        minloglevel=2,
    )
    return written.getvalue()


@pytest.fixture
def pieces(model: bytes, tmp_path: Path) -> Tokenizer:
    (tmp_path / "tokenizer.model").write_bytes(model)
    return load_tokenizer(find_tokenizer(str(tmp_path)), end_of_document="</s>")


def test_a_sentencepiece_model_gives_its_own_ids(pieces: Tokenizer, model: bytes, tmp_path: Path) -> None:
    engine = sentencepiece.SentencePieceProcessor(model_proto=model)
    pieces.use_fast()
    assert pieces.engine == "sentencepiece" and "SentencePiece" in pieces.engine_note
    encoded = pieces.encode_batch(TEXTS)
    expected = [[*engine.encode(text), engine.eos_id()] for text in TEXTS]
    assert [one.tolist() for one in encoded.split()] == expected
    assert pieces.vocabulary_size == engine.get_piece_size()
    pieces.save(tmp_path / "again" / pieces.file_name)
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == model


def test_a_text_that_spells_a_control_symbol_does_not_end_the_document(pieces: Tokenizer) -> None:
    (ids,) = pieces.encode_batch(["the cat </s> the mat"]).split()
    assert np.count_nonzero(ids == pieces.eod) == 1
    assert pieces.decode(ids.tolist()).endswith("the mat</s>")


@pytest.fixture
def blanks_first(tmp_path: Path) -> Tokenizer:
    """A tokenizer.json such as Llama 2's: a blank before each text, left out when it is decoded."""
    blank = "\N{LOWER ONE EIGHTH BLOCK}"
    engine = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", byte_fallback=True))
    prepend = tokenizers.normalizers.Prepend(blank), tokenizers.normalizers.Replace(" ", blank)
    engine.normalizer = tokenizers.normalizers.Sequence(list(prepend))
    decode = tokenizers.decoders
    engine.decoder = decode.Sequence(
        [decode.Replace(blank, " "), decode.ByteFallback(), decode.Fuse(), decode.Strip(" ", 1, 0)]
    )
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "</s>", *bytes_], show_progress=False
    )
    engine.train_from_iterator(TEXTS, trainer)
    engine.save(str(tmp_path / "tokenizer.json"))
    return load_tokenizer(tmp_path / "tokenizer.json", end_of_document="</s>")


@pytest.mark.parametrize("kind", ["pieces", "blanks_first"])
def test_what_is_written_piece_by_piece_is_the_text_with_its_blanks(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    text = "the cat sat on the mat, and so did others"
    ids = tokenizer.encode(text)
    for begin in range(len(ids)):
        opening, rest = ids[:begin], ids[begin:]
        before = tokenizer.decode(opening)
        written = "".join(piece for piece, _, _ in _pieces(iter(rest), opening, tokenizer, {tokenizer.eod}))
        assert before + written == text == before + tokenizer.decode_after(rest, before=opening)


def test_an_id_of_padding_has_no_text(pieces: Tokenizer) -> None:
    ids = pieces.encode("the cat")
    assert pieces.decode([*ids, pieces.vocabulary_size, pieces.vocabulary_size + 7]) == "the cat"


def test_what_is_neither_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"{}", b"\x00\x01nonsense"):
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(DataError, match="is not a tokenizer"):
            load_tokenizer(tmp_path / "tokenizer.model", end_of_document="</s>")
