"""The list of events: which are shown, how bad each is, and its words."""

from __future__ import annotations

from typing import Any

import pytest

from bloomery.operate.dashboard.run_events import _TITLES, ShownEvent, plain, shown_event
from bloomery.operate.ledger.operations import finite


def shown(event: dict[str, Any], number: int = 4) -> ShownEvent:
    found = shown_event(event, number=number)
    assert found is not None
    return found


def test_a_person_is_told_of_what_is_bad_and_warned_of_what_may_be() -> None:
    levels = {name: shown({"event": name}).level for name in _TITLES}
    assert {name for name, level in levels.items() if level == "bad"} == {
        "rewind", "rewind_impossible", "checkpoint_failed", "corruption", "diagnosis", "parity", "evicted",
        "loss_not_finite",
    }  # fmt: skip
    assert {name for name, level in levels.items() if level == "info"} == {
        "start", "end", "phase", "compiled", "skip", "setting", "attempt", "attempt_end", "note",
        "request", "job",
    }  # fmt: skip
    kinds = {name: shown({"event": name}).kind for name in _TITLES}
    other = {name: kind for name, kind in kinds.items() if kind != name.replace("_", " ")}
    assert other == {
        "checkpoint_failed": "save failed", "checkpoint_degraded": "save degraded",
        "attempt_end": "attempt ended", "diagnosis": "failure", "left_out": "left out of a round",
        "parity": "differing result",
    }  # fmt: skip


def test_what_the_page_shows_elsewhere_is_no_event_of_the_list() -> None:
    silent = ("step", "checkpoint", "receipt", "evaluation", "epoch", "go")
    assert [shown_event({"event": name}, number=0) for name in silent] == [None] * 6
    assert shown_event({"event": "round"}, number=0) is None
    assert shown({"event": "round", "included": False, "round": 0}).text.startswith("round 0: the state")


def test_an_unknown_event_is_shown_with_its_fields() -> None:
    hidden = {"spent": 1, "recipe": 2, "position": 3, "promise": 4, "versions": 5}
    empty = {"a": None, "b": "", "c": [], "d": {}}
    event = {"event": "tele_port\x1b" + "x" * 60, "time": 5, "step": 7, "incarnation": 2, **hidden, **empty}
    assert shown({**event, "to_where": "mars", "far": 0, "again": False}, number=9) == ShownEvent(
        number=9,
        time=5.0,
        step=7,
        incarnation=2,
        kind=("tele port " + "x" * 60)[:40],
        level="info",
        text="to where mars, far 0, again False",
    )
    assert shown({"event": "x", "": "only this", "time": 1.0}).text == "only this"
    assert shown({"event": "x", "": "this", "and": "that"}).text == "this, and that"
    assert shown({}) == ShownEvent(
        number=4, time=0.0, step=None, incarnation=0, kind="", level="info", text=""
    )


@pytest.mark.parametrize(
    ("fields", "step", "incarnation"),
    [
        ({"step": True, "incarnation": 1}, None, 1),
        ({"step": "7", "incarnation": "1"}, None, 0),
        ({"step": 1}, 1, 0),
        ({"step": -1, "incarnation": 0}, None, 0),
    ],
)
def test_only_a_number_is_a_step(fields: dict[str, Any], step: int | None, incarnation: int) -> None:
    found = shown({"event": "note", **fields})
    assert (found.step, found.incarnation) == (step, incarnation)


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "start"}, "incarnation None on ?: ? × ?"),
        ({"event": "start", "incarnation": 1, "changes": "x", "reason": "start"},
         "incarnation 1 on ?: ? × ?"),
        ({"event": "data", "tokens": 12345, "held_out_tokens": 678, "documents": 9000, "parameters": 10**6,
          "warnings": ["one.", "two."]},
         "9,000 documents, 12,345 tokens to train on, 678 held out, 1,000,000 parameters; one. two."),
        ({"event": "data", "documents": "many", "warnings": "odd"},
         "many documents, None tokens to train on, None held out, None parameters"),
        ({"event": "note"}, "somebody:"),
        ({"event": "guard", "guard": "spike", "reason": "it rose", "action": "rewind"}, "spike: it rose"),
        ({"event": "guard", "guard": "spike", "action": "rewind"}, "spike: action rewind"),
        ({"event": "rewind", "to_step": 3, "skip": [4, 8], "reason": "spike"},
         "went back to step 3 or the checkpoint before it without samples 4–8: spike"),
        ({"event": "slow_ranks", "usual_s": 1, "slow": [[1, "a", 2], [2, "b"], "x", [3, "c", 4]]},
         "others take 1 s, and wait for rank 1 on a (2 s), rank 3 on c (4 s)"),
        ({"event": "slow_ranks", "ranks": 2, "slow": "x"}, "steps are slower; no rank of 2 stands out"),
        ({"event": "diagnosis", "cause": "bad GPU", "culprit": {"host": "n1", "gpu": "", "rank": 0},
          "sure": True},
         "bad GPU at host n1, rank 0: ; started again"),
        ({"event": "diagnosis", "cause": "node lost", "culprit": {"host": "n1", "rank": None, "gpu": ""}},
         "node lost (likely) at host n1: ; started again"),
        ({"event": "diagnosis", "cause": "network", "culprit": {"host": "", "rank": None, "gpu": ""}},
         "network (likely): ; started again"),
        ({"event": "round", "included": False, "round": 5, "members": "x"},
         "round 5: the state that all peers begin with"),
    ],
)  # fmt: skip
def test_each_event_has_its_own_words(event: dict[str, Any], text: str) -> None:
    assert shown(event).text == text


def test_a_text_is_one_line_of_four_hundred_characters() -> None:
    assert shown({"event": "note", "by": "a", "text": "b\n\tc\u202ed\x9be"}).text == "a: b c d e"
    assert shown({"event": "x", "": "y" * 400}).text == "y" * 400
    assert shown({"event": "x", "": "y" * 401}).text == "y" * 399 + "…"
    assert plain("a\x1b\x00b\u2066c") == "a b c"


def test_only_finite_numbers_are_numbers() -> None:
    given = (1, 1.5, True, "1", None, float("inf"), float("nan"), 10**3, 10**400)
    assert [finite(value) for value in given] == [1.0, 1.5, None, None, None, None, None, 1000.0, None]


@pytest.mark.parametrize(("status", "level"), [(0, "info"), (None, "info"), (1, "warning"), (143, "warning")])
def test_an_attempt_that_did_not_end_well_is_a_warning(status: int | None, level: str) -> None:
    assert shown({"event": "attempt_end", "status": status}).level == level


def test_a_step_that_is_no_number_of_any_run_is_not_shown() -> None:
    event = {"event": "note", "time": 5.0, "incarnation": 1, "text": "x"}
    steps = [getattr(shown_event({**event, "step": step}, number=0), "step", 0) for step in (7, 10**400)]
    assert steps == [7, None]
