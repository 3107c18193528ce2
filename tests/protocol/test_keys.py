"""Where records lie in the coordinator, and what is read back from their keys."""

import pytest

from bloomery.errors import Mistake
from bloomery.protocol.encoding import ProtocolError, decode_epoch
from bloomery.protocol.keys import NUMBER_AT_MOST, RECOVERY, Keys, is_name, name_mistake

KEYS = Keys("r")
OF_PEER = {
    KEYS.member("a"): ("member", "a"),
    KEYS.recovery_record("a"): (RECOVERY, "a"),
    KEYS.rate("a"): ("rates", "a"),
    KEYS.ready(3, "a"): ("ready", "0000000003", "a"),
    KEYS.done(3, 7, "a"): ("done", "0000000003", "0000000007", "a"),
    KEYS.failed(3, 7, "a"): ("failed", "0000000003", "0000000007", "a"),
}
SHARED = {
    KEYS.epoch: ("epoch",),
    KEYS.commit(3): ("commit", "0000000003"),
    KEYS.shares(3): ("shares", "0000000003"),
    KEYS.attempt(3, 7): ("attempt", "0000000003", "0000000007"),
}
OF_OPERATORS = {
    KEYS.adopted: ("adopted",),
    KEYS.token: ("token",),
    KEYS.revoked("12ab"): ("revoked", "12ab"),
}


def test_a_key_says_the_kind_of_its_record_and_its_numbers_and_its_peer():
    for key, parts in (OF_PEER | SHARED | OF_OPERATORS).items():
        assert key.startswith(KEYS.root) and KEYS.parts(key) == parts


def test_a_peer_may_write_its_own_records_and_those_that_all_share_and_no_others():
    for key in (*OF_PEER, KEYS.settings("a")):
        assert key.startswith(KEYS.of_peer("a")) and not key.startswith(KEYS.shared)
    for key in SHARED:
        assert key.startswith(KEYS.shared)
    for key in OF_OPERATORS:
        assert not key.startswith((*KEYS.shared, KEYS.peers))
    assert not KEYS.of_peer("ab").startswith(KEYS.of_peer("a"))
    assert not KEYS.revocations.startswith(KEYS.shared)
    assert len(KEYS.shared) == 4


def test_what_is_listed_together_has_a_prefix_of_its_own():
    assert KEYS.commit(3).startswith(KEYS.commits) and KEYS.attempt(3, 7).startswith(KEYS.attempts(3))
    assert not KEYS.attempt(4, 7).startswith(KEYS.attempts(3))
    assert [key for key in OF_OPERATORS if key.startswith(KEYS.revocations)] == [KEYS.revoked("12ab")]
    assert all(key.startswith(KEYS.peers) for key in OF_PEER)


@pytest.mark.parametrize("place", ["ready/0000000003", "member", "peers/a/commit/0000000003", "peers/a/"])
def test_a_record_in_a_wrong_place_is_of_no_kind(place):
    assert KEYS.parts(f"{KEYS.root}{place}") == ("",)


def test_after_the_highest_number_that_a_message_may_name_there_is_a_key_for_one_more():
    for number in (0, NUMBER_AT_MOST, NUMBER_AT_MOST + 1):
        assert KEYS.number(KEYS.parts(KEYS.commit(number))[1]) == number
    with pytest.raises(ValueError):
        KEYS.commit(NUMBER_AT_MOST + 2)
    assert decode_epoch(str(NUMBER_AT_MOST)) == NUMBER_AT_MOST
    with pytest.raises(ProtocolError):
        decode_epoch(str(NUMBER_AT_MOST + 1))


@pytest.mark.parametrize("text", ["", "3", "-000000003", "0000000003 ", "00000000003", "٣" * 10])
def test_a_number_in_a_key_has_ten_digits(text):
    with pytest.raises(ValueError):
        KEYS.number(text)


def test_records_lie_where_other_versions_look_for_them():
    own = {
        KEYS.settings("a"): "settings",
        KEYS.member("a"): "member",
        KEYS.recovery_record("a"): "testimony",
        KEYS.rate("a"): "rates",
        KEYS.ready(3, "a"): "ready/0000000003",
        KEYS.done(3, 7, "a"): "done/0000000003/0000000007",
        KEYS.failed(3, 7, "a"): "failed/0000000003/0000000007",
    }
    others = {
        KEYS.epoch: "epoch",
        KEYS.adopted: "adopted",
        KEYS.token: "token",
        KEYS.revoked("12ab"): "revoked/12ab",
        KEYS.commit(3): "commit/0000000003",
        KEYS.shares(3): "shares/0000000003",
        KEYS.attempt(3, 7): "attempt/0000000003/0000000007",
    }
    assert list(own) == [f"/bloomery/r/peers/a/{place}" for place in own.values()]
    assert list(others) == [f"/bloomery/r/{place}" for place in others.values()]


def test_a_setting_that_is_no_name_is_told_with_its_place_and_what_names_are():
    assert name_mistake("elastic.peer", "a b", "mine.toml") == Mistake(
        key="elastic.peer",
        value="a b",
        source="mine.toml",
        problem="is no name of a run or a peer",
        remedy="Up to 63 letters, digits, '.', '_' and '-', a letter or digit first.",
    )


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "-a", "a b", "ä", ".a", "_a", "a" * 64, "a\n", None, 3]
)
def test_what_is_no_name_becomes_no_key(name):
    assert not is_name(name)
    with pytest.raises(ValueError):
        Keys("run").member(name)
    with pytest.raises(ValueError):
        Keys(name)


def test_a_name_has_up_to_63_letters_digits_and_marks():
    for name in ("a", "7", "A.b_c-9", "a" * 63):
        assert is_name(name) and Keys(name).run == name


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
