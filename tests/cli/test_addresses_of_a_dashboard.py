"""Where a dashboard can be asked, under which names, and by whom."""

from __future__ import annotations

import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bloomery.cli import dashboard
from bloomery.errors import BloomeryError

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def test_a_page_of_this_machine_is_known_by_its_loopback_names_and_the_one_it_was_given() -> None:
    rules, shown = dashboard._rules(dashboard._parse(["run", "--host", "127.0.0.5"]))
    assert rules.hosts == (*LOOPBACK, "127.0.0.5") and shown == ""
    assert (rules.token, rules.is_private, rules.has_actions) == (None, False, False)


def test_a_token_that_was_made_up_for_actions_is_shown_and_asked_of_no_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bloomery.operate.dashboard.access.new_token", lambda: "made up")
    rules, shown = dashboard._rules(dashboard._parse(["run", "--actions"]))
    assert (rules.token, shown, rules.is_private, rules.has_actions) == ("made up", "made up", False, True)


def test_a_token_of_a_file_is_asked_of_every_reader_and_not_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef")
    words = ["run", "--actions", "--token-file", str(token)]
    rules, shown = dashboard._rules(dashboard._parse(words))
    assert (rules.token, shown, rules.is_private) == ("0123456789abcdef", "", True)
    assert set(LOOPBACK) <= set(rules.hosts)
    for path in ("certificate", "key"):
        (tmp_path / path).touch()
    papers = ["--tls-cert", str(tmp_path / "certificate"), "--tls-key", str(tmp_path / "key")]
    rules, _ = dashboard._rules(dashboard._parse([*words, "--host", "0.0.0.0", *papers]))
    assert rules.hosts == () and rules.is_private, "others may name it as they like"


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6), ("here", socket.AF_INET)]
)
def test_an_address_with_colons_is_served_as_one_of_ipv6(
    host: str, family: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Listener:
        def __init__(self, *kind: int) -> None:
            made.append(kind)

        def setsockopt(self, *option: int) -> None:
            made.append(option)

        def bind(self, address: tuple[str, int]) -> None:
            made.append(address)
            if host == "here":
                raise OSError(99, "Cannot assign requested address")

        def listen(self, waiting: int) -> None:
            made.append(waiting)

        def close(self) -> None:
            made.append("closed")

    monkeypatch.setattr("socket.socket", Listener)
    begun = [
        (family, socket.SOCK_STREAM), (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1), (host, 8499)
    ]  # fmt: skip
    options = Namespace(host=host, port=8499)
    if host != "here":
        assert isinstance(dashboard._listener(options), Listener) and made == [*begun, 128]
        return
    with pytest.raises(BloomeryError, match="here:8499 cannot be served: Cannot assign requested address"):
        dashboard._listener(options)
    assert made == [*begun, "closed"]
