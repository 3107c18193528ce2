"""Our checkpoints as a model of EleutherAI's `lm-eval`, whose harness then scores them unmodified.

Imported only where lm-eval is installed (the extra `eval`); see `harness`. Tokens, windows and prefixes are
those that lm-eval's own `hf` model gives an export of the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM

from bloomery.evaluate.generate import Sampling, generate_together
from bloomery.evaluate.open_checkpoint import OpenedModel
from bloomery.evaluate.scoring import score_tokens
from bloomery.events.run_directory import RunDirectory
from bloomery.interchange.generation_files import generation_files_of
from bloomery.model.decoder import Decoder
from bloomery.model.loss import IGNORED

_MOST_NEW_TOKENS = 256


class SavedModel(TemplateLM):
    """A decoder and its tokenizer, for `lm_eval.simple_evaluate(model=…)`.

    batch: requests that are computed together. window: tokens seen at once; None for the model's positions.
    """

    def __init__(
        self, saved: OpenedModel, decoder: Decoder, *, batch: int = 8, window: int | None = None
    ) -> None:
        super().__init__()
        self._saved, self._decoder, self._batch, self._window = saved, decoder, batch, window
        is_imported = generation_files_of(RunDirectory(saved.checkpoint.parent.parent)) is not None
        # Exports of runs that began here put nothing before a text; an import's tokenizer says itself.
        self._begins = list(saved.bounds.begins) if is_imported else []

    @property
    def eot_token_id(self) -> int:
        """Return the id that ends a document."""
        return self._saved.tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """Return the id that stands before a text of which every token is scored."""
        return self._saved.bounds.empty

    @property
    def max_length(self) -> int:
        """Return the number of positions that a window may have."""
        return self._window or self._saved.model.max_positions

    @property
    def tokenizer_name(self) -> str:
        """Return the tokenizer file's path, by which lm-eval tells the requests that it caches apart."""
        return str(self._saved.tokenizer_path)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,  # noqa: FBT001  — lm-eval calls it so
        **unused: object,
    ) -> list[int]:
        """Return a text's ids, with those before a text where the tokenizer adds them."""
        ids = self._saved.tokenizer.encode(string)
        adds = add_special_tokens is not False and ids[: len(self._begins)] != self._begins
        return [*self._begins, *ids] if adds else ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: FBT001, FBT002  — lm-eval's signature
        """Return the log-probability of each text, in windows that each see one token before them."""
        windows: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            for context, continuation in utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((number, *utils.make_disjoint_window((context, continuation))))
        scores = self._loglikelihood_tokens([(None, *window[1:]) for window in windows])
        totals = [0.0] * len(requests)
        for (number, *_), (score, _) in zip(windows, scores, strict=True):
            totals[number] += score
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **unused: object
    ) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether greedy decoding would give it) for each request.

        requests: (unused, ids of the context, ids of the continuation that is scored).
        """
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        longest_first = sorted(range(len(requests)), key=lambda at: -sum(map(len, requests[at][1:])))
        for start in range(0, len(longest_first), self._batch):
            chosen = longest_first[start : start + self._batch]
            for at, result in zip(chosen, self._scored([requests[at] for at in chosen]), strict=True):
                results[at] = result
        return results

    def _scored(self, requests: Sequence[tuple[Any, list[int], list[int]]]) -> Iterator[tuple[float, bool]]:
        rows, wanted = [], []
        for _, context, continuation in requests:
            whole = (context + continuation)[-(self.max_length + 1) :]
            scored = min(len(continuation), len(whole) - 1)
            rows.append(whole[:-1])
            wanted.append([IGNORED] * (len(whole) - 1 - scored) + whole[len(whole) - scored :])
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        targets = torch.tensor([row + [IGNORED] * (width - len(row)) for row in wanted])
        result = score_tokens(self._decoder, tokens, targets)
        counts = targets != IGNORED
        for row in range(len(rows)):
            log_probability = float(result.log_probabilities[row].double().sum())
            yield log_probability, bool((result.are_likeliest[row] | ~counts[row]).all())

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: FBT001, FBT002  — lm-eval's signature
        """Return what follows each context, up to the first of its stop texts."""
        return [self._continued(*request.args) for request in requests]

    def _continued(self, context: str, settings: dict[str, Any]) -> str:
        stops = settings.get("until") or []
        stops = [stops] if isinstance(stops, str) else [stop for stop in stops if stop]
        count = int(settings.get("max_gen_toks", _MOST_NEW_TOKENS))
        drawn = bool(settings.get("do_sample", False))
        sampling = Sampling(
            temperature=float(settings.get("temperature", 1.0)) if drawn else 0.0,
            top_k=int(settings.get("top_k") or 0),
            top_p=float(settings.get("top_p") or 1.0),
        )
        opening = self.tok_encode(context)[-max(1, self.max_length - count) :]
        ids: list[int] = []
        text = ""
        for (token,) in generate_together(
            self._decoder,
            [opening or [self.prefix_token_id]],
            max_new_tokens=count,
            sampling=sampling,
            ends=self._saved.bounds.ends,
        ):
            if token is None or token in self._saved.bounds.ends:
                break
            ids.append(token)
            text = self._saved.tokenizer.decode(ids, spells_special=False)
            if any(stop in text for stop in stops):
                break
        ends = [text.index(stop) for stop in stops if stop in text]
        return text[: min(ends, default=len(text))]
