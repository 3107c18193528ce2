"""A SentencePiece model behind the few calls that a tokenizer needs."""

from __future__ import annotations

from collections.abc import Sequence

from bloomery.data.coder import Encoded, joined


class PieceModel:
    """A SentencePiece model. Raises RuntimeError or ValueError for bytes that are none."""

    name = "sentencepiece"

    def __init__(self, content: bytes) -> None:
        import sentencepiece

        if not content:
            raise ValueError("it is empty")
        self.content = content
        self._model = sentencepiece.SentencePieceProcessor(model_proto=content)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """The ids of each text; control symbols such as </s> are never read out of text."""
        return joined(self._model.encode(list(texts), out_type=int))

    def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]:
        """Every piece and its id; all are counted, added or not."""
        del with_added_tokens
        return {self._model.id_to_piece(number): number for number in range(self._model.get_piece_size())}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of some ids; control symbols are spelt out unless skipped."""
        parts: list[str] = []
        run: list[int] = []
        for token in ids:
            if not self._model.is_control(token):
                run.append(token)
                continue
            parts.append(self._model.decode(run))
            run = []
            if not skip_special_tokens:
                parts.append(self._model.id_to_piece(token))
        return "".join([*parts, self._model.decode(run)])
