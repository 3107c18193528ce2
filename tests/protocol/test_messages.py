"""What another process writes is exactly a message of the protocol, or is refused with one error."""

import json
import math
from pathlib import Path
from types import UnionType
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol import example

from bloomery.data.position import Position
from bloomery.protocol import hello, rank_messages, records
from bloomery.protocol.encoding import (
    PEERS_AT_MOST,
    RANGES_AT_MOST,
    TEXT_AT_MOST,
    Message,
    ProtocolError,
    decode,
    decode_epoch,
    decode_rates,
    decode_settings,
    encode,
    encode_settings,
    encode_text,
)
from bloomery.protocol.hello import Answer, Confirmation, Welcome, hashed_text
from bloomery.protocol.rank_messages import (
    Abort,
    AbortAck,
    AgentMessage,
    CatchUp,
    Committed,
    CopyState,
    DataIdentity,
    FlushRound,
    Hello,
    HopConnections,
    KeepAverage,
    Moving,
    RankLeaves,
    RankMessage,
    RankReady,
    RankRingDone,
    RankRingFailed,
    Reduce,
    ReplaceState,
    StartRound,
    StateCopied,
    StateRefused,
    StopTraining,
    decode_agent_message,
    decode_rank_message,
)
from bloomery.protocol.records import Done, KnownRun, ProposedAttempt, RoundShares

POSITION = Position(consumed=10, skips=(range(20, 25),), holes=(range(3, 5),))
ATTEMPT = example.attempt(
    round=2, epoch=5, members=("b", "a"), weights=(0.1 + 0.2, 0.7), left_out={"c": "it is late"}
)
COMMIT = example.commit(round=2, members=("a", "b"), position=POSITION, rewind_to=1, save=True, why="spike")
SHARES = RoundShares(round=3, position=POSITION, shares={"a": (range(4), range(9, 12)), "b": ()}, live=2)
READY = example.ready(norm=None, finite=False, rewind_to=0, kept=(range(8, 9),), skip=(range(2),), step_s=0.5)
HOP = HopConnections(
    rank=1, next_fds=(3,), previous_fds=(4,), send_keys=(bytes(range(32)),), receive_keys=(bytes(32),)
)
KNOWN = example.recovery_record(epoch=5, commit=COMMIT, shares=SHARES, held=COMMIT)
RECORDS = [
    example.member(addresses=("[::1]:5",), serves=("http://h",), backed_up=3, saves=(0, 4)),
    READY,
    example.ready(norm=1.5),
    ATTEMPT,
    ProposedAttempt(attempt=ATTEMPT, lives=(7, 9), offers=(8, 10)),
    Done(peer="a", round=1, epoch=2, digest="ff"),
    example.failed(culprit="b", why="two words"),
    COMMIT,
    SHARES,
    KNOWN,
    example.recovery_record(),
    KnownRun(run="r", epoch=5, commit=COMMIT, shares=None, held=None),
]
HANDSHAKE = [
    example.connection_hello(),
    Answer(peer="b", incarnation="1", encrypt=False, nonce="0a" * 32, proof="22" * 32),
    Confirmation(proof="22" * 32),
    Welcome(refused="not you"),
]
FROM_RANKS = [
    Hello(rank=1, world=2, process=77),
    Moving(activity="step", step=3),
    DataIdentity(identity={"data": "x"}),
    example.state_held(position=POSITION, saves=(3,)),
    StateCopied(round=3, digest="ab12", directory=Path("/dev/shm/x")),
    example.state_held(round=-1, digest=""),
    StateRefused(why="another digest"),
    RankReady(ready=READY, number=0),
    RankRingDone(epoch=9, digest="d1"),
    RankRingFailed(epoch=9, kind="stall", culprit="next", why="no byte for 5 s"),
    AbortAck(epoch=9),
    RankLeaves(why="SIGTERM"),
]
FROM_AGENTS = [
    StartRound(round=3, position=POSITION, live=2, samples=(range(8, 16),), number=0),
    CatchUp(round=2, digest="ab12", position=POSITION, file=Path("/tmp/average-0")),
    CopyState(keep=("ab12",), makes="cd34"),
    KeepAverage(epoch=7, digest="ab12", file=Path("/tmp/ab12.0")),
    ReplaceState(round=2, digest="ab12", position=POSITION, directory=Path("/tmp/state"), why="it differs"),
    FlushRound(round=3),
    Reduce(attempt=ATTEMPT, index=1, hops=(HOP,), stall_s=5.0, deadline_s=60.0, norm_limit=None),
    Abort(epoch=9, why="b is gone"),
    Committed(commit=COMMIT, included=True),
    StopTraining(why="the samples are done", failed=False),
]
EVERY = [*RECORDS, *HANDSHAKE, *FROM_RANKS, *FROM_AGENTS]
WRONG = [
    None,
    True,
    -2,
    1.5,
    math.inf,
    1 << 63,
    10**400,
    "",
    "a\nb",
    "\x1b[31m",
    "\u202eabc",
    "/",
    "x" * 5000,
    [],
    [1],
    [[2, 1]],
    [[0, 10**400]],
    [[0, 1, 2]],
    [0] * (RANGES_AT_MOST + 1),
    {},
    {"a b": 1},
    {"a": {"a": {"a": []}}},
    {f"p{number}": "" for number in range(PEERS_AT_MOST + 1)},
]


def read_again(message, text):
    """Decode as whoever receives this kind of message does."""
    if isinstance(message, RankMessage):
        return decode_rank_message(text.encode())
    if isinstance(message, AgentMessage):
        fds = [3, 4] if isinstance(message, Reduce) else []
        return decode_agent_message(text.encode(), fds)
    return decode(text, type(message))


def named(message):
    return type(message).__name__


def test_every_message_of_the_protocol_is_among_the_examples():
    modules = {module.__name__ for module in (records, rank_messages, hello)}
    kinds, unseen = set(), [Message]
    while unseen:
        unseen += (below := unseen.pop().__subclasses__())
        kinds |= {kind for kind in below if kind.__module__ in modules and not kind.__name__.startswith("_")}
    assert kinds - {type(message) for message in [*EVERY, HOP]} == {hello.HandshakeMessage}
    assert isinstance(RankMessage, UnionType) and {type(message) for message in FROM_RANKS} == {
        *get_args(RankMessage)
    }
    assert {type(message) for message in FROM_AGENTS} == {*get_args(AgentMessage)}


@pytest.mark.parametrize("message", EVERY, ids=named)
def test_a_message_is_read_as_it_was_written(message):
    assert read_again(message, encode_text(message)) == message


def places(plain, before=()):
    """Where the objects of a message lie in its JSON: the way to each."""
    if isinstance(plain, dict):
        yield before
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        if isinstance(value, dict | list):
            yield from places(value, (*before, key))


def structs_in(message):
    """The objects in a message's JSON whose fields are fixed: tables by name have any."""
    plain = json.loads(encode_text(message))
    return [
        way
        for way in places(plain)
        if not {"left_out", "shares", "identity"} & {*way[-1:]} or way == ("shares",)
    ]


def at(plain, way):
    for key in way:
        plain = plain[key]
    return plain


@pytest.mark.parametrize("message", EVERY, ids=named)
def test_a_field_that_is_missing_or_unknown_is_refused_however_deep(message):
    for way in structs_in(message):
        plain = json.loads(encode_text(message))
        if way == ("shares",) and not isinstance(message, records.RecoveryRecord):
            continue  # a table by name
        for name in list(at(plain, way)):
            lacking = json.loads(encode_text(message))
            del at(lacking, way)[name]
            with pytest.raises(ProtocolError):
                read_again(message, json.dumps(lacking))
        at(plain, way)["more"] = 1
        with pytest.raises(ProtocolError):
            read_again(message, json.dumps(plain))


@pytest.mark.parametrize("message", EVERY, ids=named)
def test_a_wrong_value_is_refused_with_one_error_or_means_what_it_says(message):
    for way in structs_in(message):
        for name in at(json.loads(encode_text(message)), way):
            if name in ("next_fds", "previous_fds"):
                continue  # whatever is sent, the receiver puts its own there
            for wrong in WRONG:
                plain = json.loads(encode_text(message))
                at(plain, way)[name] = wrong
                try:
                    again = read_again(message, json.dumps(plain))
                except ProtocolError as error:
                    assert len(error.message) < 1000 and error.message.isprintable()
                    continue
                written = at(json.loads(encode_text(again)), way)[name]
                assert written == wrong and type(written) in (type(wrong), float), (way, name, wrong)


@pytest.mark.parametrize("message", EVERY, ids=named)
@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, "1" + "0" * 5_000])
def test_deep_nesting_and_endless_numbers_are_refused_wherever_they_stand(message, deep):
    for name, value in json.loads(encode_text(message)).items():
        text = encode_text(message)
        field = f'"{name}":{json.dumps(value, separators=(",", ":"), ensure_ascii=False)}'
        assert field in text
        with pytest.raises(ProtocolError):
            read_again(message, text.replace(field, f'"{name}":{deep}'))
    with pytest.raises(ProtocolError):
        read_again(message, deep)


@settings(max_examples=30, deadline=None)
@given(content=st.one_of(st.text(), st.binary().map(lambda raw: raw.decode("latin-1"))))
def test_no_text_is_more_than_refused(content):
    for message in RECORDS + HANDSHAKE:
        with pytest.raises(ProtocolError):
            decode(content, type(message))
    for raw in (content.encode(errors="replace"), content.encode("utf-16", errors="surrogatepass")):
        for read in (decode_rank_message, decode_agent_message):
            with pytest.raises(ProtocolError):
                read(raw)
    for read in (decode_epoch, decode_rates, decode_settings):
        try:
            read(content)
        except ProtocolError:
            continue


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_message_of_which_one_byte_was_changed_is_refused_or_can_be_written_again(data):
    message = data.draw(st.sampled_from([*FROM_RANKS, *FROM_AGENTS]))
    content = bytearray(encode(message))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    read = decode_rank_message if message in FROM_RANKS else decode_agent_message
    fds = [3, 4] if isinstance(message, Reduce) else []
    try:
        again = read(bytes(content), fds)
    except ProtocolError:
        return
    assert read(encode(again), fds) == again


def test_a_reason_of_several_lines_is_written_as_one():
    failed = example.failed(why="one\ntwo\x00" + "x" * 5000)
    assert len(failed.why) == TEXT_AT_MOST and failed.why.startswith("one two xxx")
    assert decode(encode_text(failed), records.Failed) == failed
    assert example.commit(left_out={"b": "one\ntwo"}).left_out == {"b": "one two"}
    assert decode_settings(encode_settings({"a": "one\ntwo"})) == {"a": "one two"}


@pytest.mark.parametrize("path", ["", "/tmp/a\0b", "x" * 4097, 3])
def test_what_no_file_can_be_called_is_no_path(path):
    plain = json.loads(encode_text(StateCopied(round=3, digest="ab12", directory=Path("/tmp/a"))))
    with pytest.raises(ProtocolError):
        decode_rank_message(json.dumps(plain | {"directory": path}).encode())


def test_a_peer_is_not_named_twice_and_a_finite_part_has_a_norm():
    for kind, text in (
        (records.Commit, encode_text(COMMIT).replace('["a","b"]', '["a","a"]')),
        (records.Commit, encode_text(COMMIT).replace('"sources":["a"]', '"sources":["a","a"]')),
        (records.Attempt, encode_text(ATTEMPT).replace('["b","a"]', '["a","a"]')),
        (records.Ready, encode_text(READY).replace('"finite":false', '"finite":true')),
    ):
        with pytest.raises(ProtocolError):
            decode(text, kind)


def test_records_of_the_version_before_are_read_and_written_in_their_form():
    texts = json.loads((Path(__file__).parent / "records_before_msgspec.json").read_text())
    assert set(texts) == {
        "Member",
        "Ready",
        "ProposedAttempt",
        "Done",
        "Failed",
        "Commit",
        "RoundShares",
        "KnownRun",
    }
    for kind, text in texts.items():
        record = decode(text, getattr(records, kind))
        assert json.loads(encode_text(record)) == json.loads(text)
        assert kind not in ("Ready", "Commit") or "rung" in text or record.rung == 0  # no remedy is asked for


def test_a_part_spans_and_weighs_the_rounds_own_steps_unless_it_names_more():
    own = example.ready(steps=3, tokens=24)
    assert (own.spanned_steps, own.weight_tokens) == (3, 24)
    since_averaged = example.ready(steps=3, tokens=24, drift_steps=9, drift_tokens=72)
    assert (since_averaged.spanned_steps, since_averaged.weight_tokens) == (9, 72)


def test_the_states_that_a_peer_serves_and_wants_are_told_and_bounded():
    member = example.member(copies=("ab12", "cd34"), wants="ef56")
    plain = json.loads(encode_text(member))
    assert decode(json.dumps(plain), records.Member) == member
    for wrong in ({"copies": ["x"] * 9}, {"copies": "ab12"}, {"wants": None}, {"wants": "x" * 2001}):
        with pytest.raises(ProtocolError):
            decode(json.dumps(plain | wrong), records.Member)


def pieces(count):
    return [[2 * number, 2 * number + 1] for number in range(count)]


@pytest.mark.parametrize(
    ("message", "name", "largest", "beyond"),
    [
        (example.member(), "saves", list(range(64)), list(range(65))),
        (example.member(), "copies", ["x"] * 8, ["x"] * 9),
        (example.member(), "addresses", ["x"] * 4_096, ["x"] * 4_097),
        (example.member(), "samples", 10**9, 10**9 + 1),
        (example.member(), "round", -1, -2),
        (example.member(), "recipe", "x" * 2_000, "x" * 2_001),
        (example.ready(), "norm", 0.0, -0.5),
        (example.ready(), "feedback", 0.0, -0.5),
        (example.ready(), "step_s", 3_600.0, 3_600.5),
        (example.ready(), "past", [[1, 2.0]] * 8, [[1, 2.0]] * 9),
        (example.ready(), "past", [[1, 0.0]], [[1, -0.5]]),
        (example.ready(), "skip", pieces(256), pieces(257)),
        (example.ready(), "kept", pieces(3), pieces(65_537)),
        (example.ready(), "kept", [[7, 7]], [[7, 6]]),
        (example.ready(), "kept", [[0, 7]], [[-1, 7]]),
        (example.ready(), "kept", [[0, 1 << 62]], [[0, (1 << 62) + 1]]),
        (example.ready(), "kept", [[0, 1]], [[False, True]]),
        (example.attempt(), "weights", [1.0], [1.0001]),
        (example.attempt(), "members", ["a"], ["a" * 64]),
        (example.commit(), "members", [f"p{n}" for n in range(4_096)], [f"p{n}" for n in range(4_097)]),
        (example.connection_hello(), "lane", 4_095, 4_096),
        (example.connection_hello(), "stream", 255, 256),
        (example.connection_hello(), "circuit", "x" * 256, "x" * 257),
        (example.connection_hello(), "nonce", "0a" * 32, "0a" * 33),
        (example.connection_hello(), "nonce", "0a" * 32, "0A" * 32),
    ],
)
def test_what_a_record_may_hold_is_bounded_and_the_bound_itself_is_held(message, name, largest, beyond):
    plain = json.loads(encode_text(message))
    held = decode(json.dumps(plain | {name: largest}), type(message))
    assert json.loads(encode_text(held)).get(name, largest) == largest
    with pytest.raises(ProtocolError):
        decode(json.dumps(plain | {name: beyond}), type(message))


def test_a_rate_is_at_most_a_million_gigabits_a_second():
    assert decode_rates('{"a": 1e9}') == {"a": 1e9}
    with pytest.raises(ProtocolError):
        decode_rates('{"a": 1.1e9}')


@pytest.mark.parametrize("sign", ["\u061c", "\u200b", "\u2028", "\u2066", "\u2069", "\ufeff", "\x7f", "\x9f"])
def test_no_text_hides_or_turns_what_stands_beside_it(sign):
    plain = json.loads(encode_text(example.member()))
    with pytest.raises(ProtocolError):
        decode(json.dumps(plain | {"recipe": f"a{sign}b"}), records.Member)


def test_a_path_is_as_long_as_the_kernel_takes_it():
    plain = json.loads(encode_text(StateCopied(round=3, digest="ab12", directory=None)))
    longest = decode_rank_message(json.dumps(plain | {"directory": "x" * 4096}).encode())
    assert longest.directory == Path("x" * 4096)


@pytest.mark.parametrize("sign", ["x", "\n"])
def test_a_reason_that_is_too_long_is_cut_to_what_others_accept(sign: str):
    sent = StateRefused(why=sign * 2_001)
    assert sent.why == sign.replace("\n", " ") * 2_000
    assert decode(encode(sent), StateRefused) == sent


def test_what_an_attempt_says_of_those_it_left_out_is_printable_too():
    assert example.attempt(left_out={"b": "one\ntwo"}).left_out == {"b": "one two"}


def test_the_round_that_a_peer_knows_is_the_later_one_of_what_it_read_and_what_it_holds():
    newest, held = example.commit(round=7), example.commit(round=5)
    for known in (
        example.recovery_record(commit=newest, held=held),
        example.recovery_record(commit=held, held=newest),
        example.recovery_record(held=newest),
    ):
        assert known.round == 7
    assert example.recovery_record().round == -1


def test_what_peers_hash_of_a_greeting_is_what_the_version_before_hashed():
    answer = Answer(peer="b", incarnation="1", encrypt=False, nonce="0a" * 32, proof="")
    assert hashed_text(answer) == (
        f"Answer(peer='b', incarnation='1', encrypt=False, nonce='{'0a' * 32}', proof='')"
    )
    assert hashed_text(example.connection_hello(circuit="it's")) == (
        "Greeting(run='r', peer='a', incarnation='a1', target='b', target_incarnation='b1', purpose='ring', "
        f"lane=0, stream=0, sends=False, encrypt=False, circuit=\"it's\", nonce='{'11' * 32}')"
    )


def test_messages_cannot_be_changed():
    with pytest.raises(AttributeError):
        COMMIT.round = 3
    assert msgspec.structs.replace(COMMIT, round=3).round == 3
