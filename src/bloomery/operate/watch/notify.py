"""Sends alerts through Apprise, in a process of its own, so that no slow server blocks the watcher.

Each address that does not take an alert is tried again by itself, and the others do not get it twice. The
addresses go through the process's standard input, for they hold passwords and a command line is public.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace

from bloomery.errors import BloomeryError
from bloomery.operate.watch.alerts import Alert

log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 15.0, 900.0
_AT_ONCE = 8
_SENT, _REFUSED, _NOT_SENT = 0, 3, 4


def refuse_bad_addresses(addresses: Sequence[str]) -> None:
    """Raise BloomeryError where apprise is missing, or does not know one of the addresses."""
    if not addresses:
        return
    if importlib.util.find_spec("apprise") is None:
        raise BloomeryError(
            "Alerts are sent by apprise, which is not installed here.",
            remedy="pip install 'bloomery[watch]', or leave out --to and --to-file.",
        )
    if _ask({"addresses": list(addresses)})[0] == _REFUSED:
        for number, address in enumerate(addresses, 1):
            if _ask({"addresses": [address]})[0] == _REFUSED:
                scheme = address.partition("://")[0][:20]
                raise BloomeryError(
                    f"Address {number} ({scheme}://…) is none that apprise knows.",
                    remedy="For instance mailto://user:password@example.org or json://host/path; see "
                    "https://appriseit.com/services/",
                )


class AlertSender:
    """Sends alerts to addresses, and again to each address that has not taken one.

    An address that fails is left alone for 15 s, and for twice as long after each further failure, at most
    15 minutes, so that one that is gone does not hold up the alerts of other runs.

    addresses: as apprise writes them. clock: seconds, from any moment.
    """

    def __init__(self, addresses: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._addresses, self._clock = tuple(addresses), clock
        self._waits_s: dict[int, float] = {}
        self._due_s: dict[int, float] = {}

    def send(self, alert: Alert) -> Alert | None:
        """Send an alert to the addresses that it is owed to; return None, or what is still owed, and to whom.

        It takes 30 s at most.
        """
        numbers = range(len(self._addresses))
        owed = [number for number in numbers if alert.owed is None or number in alert.owed]
        due = [number for number in owed if self._clock() >= self._due_s.get(number, 0.0)]
        taken = set(self._sent(alert, due)) if due else set()
        for number in due:
            if number in taken:
                self._waits_s.pop(number, None)
            else:
                wait_s = min(2 * self._waits_s.get(number, _FIRST_WAIT_S / 2), _LONGEST_WAIT_S)
                self._waits_s[number], self._due_s[number] = wait_s, self._clock() + wait_s
        left = tuple(number for number in owed if number not in taken)
        return replace(alert, owed=left) if left else None

    def _sent(self, alert: Alert, numbers: Sequence[int]) -> list[int]:
        addresses = [self._addresses[number] for number in numbers]
        return [numbers[place] for place in send(addresses, title=alert.title, body=alert.body)]


def send(addresses: Sequence[str], *, title: str, body: str) -> list[int]:
    """Send a message to all addresses; return the places in `addresses` of those that took it within 30 s."""
    _, said = _ask({"addresses": list(addresses), "title": title, "body": body})
    return sorted({int(line) for line in said.split() if line.isdecimal() and int(line) < len(addresses)})


def _ask(request: dict[str, object]) -> tuple[int, str]:
    """Have a process of its own carry out a request; return its status and what it printed until then."""
    command = [sys.executable, "-m", "bloomery.operate.watch.notify"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as failed:
        log.warning("an alert was not sent to every address within %.0f s", _TIMEOUT_S)
        return _NOT_SENT, (failed.stdout or b"").decode(errors="replace")
    except OSError as failed:
        log.warning("an alert was not sent: %s", type(failed).__name__)
        return _NOT_SENT, ""
    if done.returncode not in (_SENT, _REFUSED):
        lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        log.warning("an alert was not sent: %s", lines[-1] if lines else f"status {done.returncode}")
    return done.returncode, done.stdout.decode(errors="replace")


def _main() -> int:
    import apprise

    request = json.load(sys.stdin)
    services = [apprise.Apprise() for _ in request["addresses"]]
    known = [service.add(address) for service, address in zip(services, request["addresses"], strict=True)]
    if not all(known):
        return _REFUSED
    if "body" not in request:
        return _SENT

    def taken(service: apprise.Apprise) -> bool:
        text = apprise.NotifyFormat.TEXT
        return bool(service.notify(title=request["title"], body=request["body"], body_format=text))

    all_taken = True
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        places = {pool.submit(taken, service): place for place, service in enumerate(services)}
        for sent in as_completed(places):
            all_taken &= sent.result()
            if sent.result():
                # At once, because this process may be ended while others wait.
                sys.stdout.write(f"{places[sent]}\n")
                sys.stdout.flush()
    return _SENT if all_taken else _NOT_SENT


if __name__ == "__main__":
    sys.exit(_main())
