"""Requests of lm-eval to our model, and what becomes of its results; lm-eval itself need not be there."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.evaluate.lm_eval_stand_in import OURS, StandIn, TaskManager, put_in_place
from tests.evaluate.test_scoring import nats_of, small

from bloomery.errors import BloomeryError
from bloomery.evaluate import harness
from bloomery.evaluate.task_texts import _shown
from bloomery.model.decoder import Decoder

LONGEST, PREFIX, END = 8, 27, 29


class Numbers:
    """Texts of numbers between blanks are their own ids."""

    eod = END

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int], *, spells_special: bool) -> str:
        assert not spells_special
        return "".join(f" {token}" for token in ids)


@pytest.fixture
def package() -> Iterator[StandIn]:
    stand_in, before = put_in_place()
    yield stand_in
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def model_of(
    package: StandIn,
    decoder: Decoder,
    *,
    begins: tuple[int, ...] = (),
    batch: int = 2,
    imported: bool = False,
) -> Any:
    saved = SimpleNamespace(
        checkpoint=Path("/no/run/checkpoints/step-000001.i001"),
        tokenizer=Numbers(),
        tokenizer_path=Path("/no/run/data/tokenizer.json"),
        model=SimpleNamespace(max_positions=LONGEST),
        bounds=SimpleNamespace(begins=begins, empty=PREFIX, ends={END, 28}),
    )
    module = importlib.import_module(OURS)
    there = SimpleNamespace(path=None) if imported else None
    module.generation_files_of = lambda rundir: there
    return module.SavedModel(saved, decoder, batch=batch)


def test_a_continuation_is_scored_after_its_context_whatever_stands_beside_it(package: StandIn) -> None:
    decoder = small()
    pairs = [([3, 4], [5]), ([1], [2, 6, 7, 8]), ([9, 8, 7, 6, 5], [4, 3]), ([2], [11])]
    model = model_of(package, decoder)
    scores = model._loglikelihood_tokens([(None, *pair) for pair in pairs])
    for (context, continuation), (score, is_greedy) in zip(pairs, scores, strict=True):
        whole = context + continuation
        rest = nats_of(decoder, whole[:-1], whole[1:]) - nats_of(
            decoder, whole[: len(context)], whole[1 : len(context)]
        )
        assert score == pytest.approx(-rest, rel=1e-4)
        likeliest = decoder.logits(decoder(torch.tensor([whole[:-1]])))[0].argmax(-1).tolist()
        assert is_greedy is (likeliest[len(context) - 1 :] == continuation)
    greedy = int(decoder.logits(decoder(torch.tensor([[3, 4]])))[0, -1].argmax())
    others = [token for token in (1, 2) if token != greedy]
    told = model._loglikelihood_tokens([(None, [3, 4], [token]) for token in (greedy, *others)])
    assert [is_greedy for _, is_greedy in told] == [True, *[False] * len(others)]


def test_a_context_that_is_too_long_loses_its_beginning(package: StandIn) -> None:
    decoder = small()
    model = model_of(package, decoder)
    context = list(range(1, 12))
    ((score, _),) = model._loglikelihood_tokens([(None, context, [20, 21])])
    seen = context[-7:]  # eight positions, of which the last sees token 20
    wanted = nats_of(decoder, [*seen, 20], [*seen[1:], 20, 21]) - nats_of(decoder, seen, seen[1:])
    assert score == pytest.approx(-wanted, rel=1e-4)
    ((score, _),) = model._loglikelihood_tokens([(None, [1], context)])
    assert score == pytest.approx(-nats_of(decoder, context[-9:-1], context[-8:]), rel=1e-4)


def test_a_rolling_text_is_scored_once_token_by_token_with_one_before_it(package: StandIn) -> None:
    decoder = small()
    tokens = [number % 25 for number in range(3, 22)]
    requests = [SimpleNamespace(args=(" ".join(map(str, some)),)) for some in (tokens, [5, 6])]
    whole, short = model_of(package, decoder).loglikelihood_rolling(requests)
    nats = nats_of(decoder, [PREFIX, *tokens[:7]], tokens[:8])
    nats += nats_of(decoder, tokens[7:15], tokens[8:16])
    inputs, targets = tokens[10:18], tokens[11:19]  # the last three see what the window has room for
    nats += nats_of(decoder, inputs, targets) - nats_of(decoder, inputs[:5], targets[:5])
    assert whole == pytest.approx(-nats, rel=1e-4)
    assert short == pytest.approx(-nats_of(decoder, [PREFIX, 5], [5, 6]), rel=1e-4)


def greedy_after(decoder: Decoder, tokens: list[int], count: int) -> list[int]:
    seen = list(tokens)
    for _ in range(count):
        seen.append(int(decoder.logits(decoder(torch.tensor([seen])))[0, -1].argmax()))
    return seen[len(tokens) :]


def continued(model: Any, context: str, **settings: object) -> str:
    (text,) = model.generate_until([SimpleNamespace(args=(context, settings))])
    return text


def test_a_text_goes_on_greedily_until_its_stop_or_as_many_tokens_as_asked(package: StandIn) -> None:
    decoder = small(seed=2)
    model = model_of(package, decoder)
    drawn = greedy_after(decoder, [3, 4], 5)
    assert len({*drawn[:4], END, 28}) == 6, "each is another, and none is an end"
    spelt = "".join(f" {token}" for token in drawn)
    assert continued(model, "3 4", max_gen_toks=5) == spelt
    assert continued(model, "3 4", max_gen_toks=2) == "".join(f" {token}" for token in drawn[:2])
    stop = f" {drawn[2]}"
    cut = spelt[: spelt.index(stop)]
    for until in (stop, [stop], ["never", stop], [f" {drawn[3]}", stop], ["", stop]):
        assert continued(model, "3 4", max_gen_toks=5, until=until) == cut
    hot = {"do_sample": True, "temperature": 50.0, "max_gen_toks": 5}
    assert continued(model, "3 4", **hot) != spelt == continued(model, "3 4", **hot, top_k=1)
    sampled = {"do_sample": True, "temperature": 1.0, "top_k": 1, "max_gen_toks": 5}
    assert continued(model, "3 4", **sampled) == spelt
    long = "1 " * 20 + "3 4"
    assert continued(model, long, max_gen_toks=6) == "".join(
        f" {token}" for token in greedy_after(decoder, [3, 4], 6)
    ), "the prompt leaves room for what is asked"
    for asked in (7, 8):  # one token is left of a prompt at least
        assert continued(model, "3 4", max_gen_toks=asked) == "".join(
            f" {token}" for token in greedy_after(decoder, [4], asked)
        )
    assert continued(model, "", max_gen_toks=2) == "".join(
        f" {token}" for token in greedy_after(decoder, [PREFIX], 2)
    )


def test_nothing_is_drawn_behind_a_stop_and_the_first_of_several_ends_the_text(package: StandIn) -> None:
    model, drawn = model_of(package, small()), list[int]()

    def tokens() -> Iterator[tuple[int]]:
        for token in (11, 12, 13, 14):
            drawn.append(token)
            yield (token,)

    importlib.import_module(OURS).generate_together = lambda *told, **more: tokens()  # type: ignore[attr-defined]
    assert continued(model, "3 4", until=[" 12", "1 12", "3"]) == " 1"
    assert drawn == [11, 12]


def test_the_longest_requests_come_first_so_that_memory_that_is_short_shows_at_once(
    package: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sizes = model_of(package, small()), list[list[int]]()
    monkeypatch.setattr(
        model,
        "_scored",
        lambda some: sizes.append([len(one[2]) for one in some]) or [(0.0, True)] * len(some),
    )
    model._loglikelihood_tokens([(None, [1], [2] * size) for size in (1, 5, 3, 2)])
    assert sizes == [[5, 3], [2, 1]]


def test_a_text_ends_before_the_token_that_ends_it(package: StandIn) -> None:
    decoder = small(seed=2)
    drawn = greedy_after(decoder, [3, 4], 4)
    model = model_of(package, decoder)
    model._saved.bounds.ends = {drawn[2]}
    first = drawn.index(drawn[2])
    assert continued(model, "3 4", max_gen_toks=4) == "".join(f" {token}" for token in drawn[:first])


def test_what_opens_a_text_is_that_of_imported_models_and_is_put_there_once(package: StandIn) -> None:
    plain = model_of(package, small(), begins=(7,))
    assert plain.tok_encode("3 4") == [3, 4], "an export of our runs puts nothing before a text"
    model = model_of(package, small(), begins=(7,), imported=True)
    assert model.tok_encode("3 4") == [7, 3, 4] == model.tok_encode("7 3 4")
    assert model.tok_encode("3 4", add_special_tokens=False) == [3, 4]
    assert model.tok_encode("3 4", add_special_tokens=True) == [7, 3, 4]
    assert (model.eot_token_id, model.prefix_token_id, model.max_length) == (END, PREFIX, LONGEST)
    assert model.tokenizer_name == "/no/run/data/tokenizer.json"
    assert importlib.import_module(OURS).SavedModel(model._saved, small(), window=64).max_length == 64


def test_scores_have_the_names_of_their_metrics_and_the_samples_that_counted(package: StandIn) -> None:
    package.outcome = {
        "results": {
            "arc": {
                "acc,none": 0.5,
                "acc_stderr,none": "N/A",
                "alias": "arc",
                "sample_len": 9,
                "f1,strict": 1,
            },
            "boolq": {"acc,none": 0.25},
        },
        "n-samples": {"arc": {"effective": 5, "original": 9}},
    }
    model = object()
    scores = harness.score_with(
        model, ["arc", "local_pairs"], arguments={"a": 1}, limit=5, shots=3, include=Path("/more")
    )
    assert [score.to_json() for score in scores] == [
        {"task": "arc", "samples": 5, "acc": 0.5, "f1": 1.0},
        {"task": "boolq", "samples": 0, "acc": 0.25},
    ]
    asked = package.asked
    assert asked["model"] is model and asked["model_args"] == {"a": 1}
    assert (asked["num_fewshot"], asked["limit"], asked["bootstrap_iters"]) == (3, 5, 0)
    assert asked["log_samples"] is False, "which would keep each request in memory"
    assert asked["tasks"][0] == "arc" and asked["tasks"][1]["task"] == "local_pairs"
    assert TaskManager.asked == {"include_path": "/more", "include_defaults": True}
    harness.score_with(model, ["arc"], shots=0)
    assert package.asked["num_fewshot"] == 0, "and not the task's own number"
    harness.score_with(model, ["arc"])
    assert package.asked["num_fewshot"] is package.asked["limit"] is package.asked["model_args"] is None


@pytest.mark.parametrize(("before", "after"), [(None, "false"), ("true", "true")])
def test_tokenizers_have_one_thread_unless_somebody_chose_otherwise(
    before: str | None, after: str, package: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", before or "")
    if before is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    package.outcome = {"results": {}}
    assert harness.score_with("hf", ["local_pairs"]) == [] and package.asked["model_args"] is None
    assert os.environ["TOKENIZERS_PARALLELISM"] == after


def test_tasks_that_nobody_knows_are_named_and_ours_alone_need_no_list_of_theirs(package: StandIn) -> None:
    with pytest.raises(BloomeryError, match="There is no task arq, bulk") as refused:
        harness.known_tasks(["arc", "arq", "bulk"], None)
    assert refused.value.remedy == (
        "Ours are local_pairs, local_last_word, local_texts; `lm-eval ls tasks` lists theirs."
    )
    harness.known_tasks([], None)
    assert TaskManager.asked == {"include_path": None, "include_defaults": False}


CHOICES = ["green", "blue"]


@pytest.mark.parametrize(
    ("question", "answer", "choices", "texts"),
    [
        ("The sky is", 1, CHOICES, ["The sky is blue"]),
        ("The sky is", "grey", None, ["The sky is grey"]),
        (1, "is the sky", CHOICES, ["blue is the sky"]),
        ("The sky is", [0, "azure"], CHOICES, ["The sky is green", "The sky is azure"]),
        ("Two and two are", 4, None, ["Two and two are 4"]),
    ],
)
def test_a_question_is_shown_with_each_right_answer(
    question: object, answer: object, choices: list[str] | None, texts: list[str]
) -> None:
    task = SimpleNamespace(
        doc_to_text=lambda document: question,
        doc_to_target=lambda document: answer,
        doc_to_choice=lambda document: choices,
        config=SimpleNamespace(doc_to_choice=choices, target_delimiter=" "),
    )
    assert list(_shown(task, {})) == texts
