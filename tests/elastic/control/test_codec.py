"""Records come from other machines: what is not exactly one is refused."""

import json
import math
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloomery.data.position import Position
from bloomery.elastic.control import codec
from bloomery.elastic.control.codec import GarbledRecord, Tried
from bloomery.elastic.control.keys import Keys, is_name
from bloomery.elastic.records import Attempt, Commit, Done, Failed, Member, Ready, Shares

POSITION = Position(consumed=10, skips=(range(20, 25),), holes=(range(3, 5),))
ATTEMPT = Attempt(
    round=2, epoch=5, members=("b", "a"), weights=(0.1 + 0.2, 0.7), left_out={"c": "it is late"}
)
COMMIT = Commit(
    round=2,
    epoch=5,
    members=("a", "b"),
    digest="0f",
    position=POSITION,
    sources=("a",),
    rewind_to=1,
    save=True,
)
SHARES = Shares(round=3, position=POSITION, shares={"a": (range(4), range(9, 12)), "b": ()}, live=2)
RECORDS = [
    (
        codec.MEMBER,
        Member(
            peer="a",
            incarnation="x",
            addresses=("[::1]:5",),
            serves=(),
            round=-1,
            digest="",
            lanes=2,
            recipe="f",
            samples=3,
            relays=True,
        ),
    ),
    (
        codec.READY,
        Ready(
            peer="a", round=1, steps=2, tokens=3, spent=(range(2),), norm=math.inf, finite=False, rewind_to=0
        ),
    ),
    (codec.DONE, Done(peer="a", round=1, epoch=2, digest="ff")),
    (codec.FAILED, Failed(peer="a", round=1, epoch=2, kind="stalled", culprit="b", why="two words")),
    (codec.COMMIT, COMMIT),
    (codec.SHARES, SHARES),
    (codec.TRIED, Tried(attempt=ATTEMPT, lives=(7, 9))),
    (codec.TESTIMONY, codec.Testimony(epoch=5, commit=COMMIT, shares=SHARES)),
    (codec.TESTIMONY, codec.Testimony(epoch=5, commit=COMMIT, shares=None)),
]
NAMES = [type(record).__name__ for _, record in RECORDS]
WRONG = [
    None,
    True,
    -2,
    1.5,
    "",
    "a\nb",
    "x" * 5000,
    [],
    {},
    [1],
    [[2, 1]],
    {"a b": 1},
    math.inf,
    1 << 70,
    "/",
]


@pytest.mark.parametrize("kind, record", RECORDS, ids=NAMES)
def test_a_record_is_read_as_it_was_written(kind, record):
    assert kind.record(kind.text(record)) == record


@pytest.mark.parametrize("kind, record", RECORDS, ids=NAMES)
def test_every_field_of_a_record_is_written(kind, record):
    assert set(kind.plain(record)) == {field.name for field in fields(record)}


@pytest.mark.parametrize("kind, record", RECORDS, ids=NAMES)
def test_a_record_with_a_field_missing_or_unknown_is_refused(kind, record):
    plain = kind.plain(record)
    for name in plain:
        with pytest.raises(GarbledRecord):
            kind.record(json.dumps({key: value for key, value in plain.items() if key != name}))
    with pytest.raises(GarbledRecord):
        kind.record(json.dumps(plain | {"more": 1}))


@pytest.mark.parametrize("kind, record", RECORDS, ids=NAMES)
def test_a_field_of_another_kind_is_refused_or_read_as_what_it_says(kind, record):
    plain = kind.plain(record)
    for name, right in plain.items():
        for wrong in WRONG:
            text = json.dumps(plain | {name: wrong})
            try:
                found = kind.record(text)
            except GarbledRecord:
                continue
            # What passes is of the right kind: written again it is the same.
            again = kind.plain(found)[name]
            assert again == wrong and type(again) in (type(wrong), float), (name, right, wrong)


@settings(max_examples=30)
@given(text=st.one_of(st.text(), st.binary().map(lambda raw: raw.decode("latin-1")), st.just("[" * 100_000)))
def test_no_text_is_more_than_refused(text):
    for kind, _ in RECORDS:
        with pytest.raises(GarbledRecord):
            kind.record(text)
    for read in (codec.epoch_of, codec.rates_of):
        try:
            read(text)
        except GarbledRecord:
            continue


def test_a_message_of_several_lines_is_written_as_one():
    failed = Failed(peer="a", round=1, epoch=2, kind="stalled", why="one\ntwo\x00" + "x" * 5000)
    assert codec.FAILED.record(codec.FAILED.text(failed)).why.startswith("one two xxx")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "-a", "a b", "ä", "a" * 64, "a\n", None, 3])
def test_what_is_no_name_becomes_no_key(name):
    assert not is_name(name)
    with pytest.raises(ValueError):
        Keys("run").member(name)
    with pytest.raises(ValueError):
        Keys(name)


def test_keys_sort_as_rounds_do_and_stay_within_their_run():
    keys = Keys("a")
    assert sorted([keys.commit(10), keys.commit(9), keys.commit(100)]) == [
        keys.commit(9),
        keys.commit(10),
        keys.commit(100),
    ]
    assert not Keys("ab").root.startswith(keys.root)
    for round in (-1, 10**10):
        with pytest.raises(ValueError):
            keys.commit(round)
