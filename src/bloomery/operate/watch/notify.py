"""Sends a message through Apprise, in a process of its own, so that no slow server blocks the watcher.

The addresses go through the process's standard input, for they hold passwords and a command line is public.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Sequence

from bloomery.errors import BloomeryError

log = logging.getLogger(__name__)

_TIMEOUT_S = 30.0
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
    if _ask({"addresses": list(addresses)}) == _REFUSED:
        for number, address in enumerate(addresses, 1):
            if _ask({"addresses": [address]}) == _REFUSED:
                scheme = address.partition("://")[0][:20]
                raise BloomeryError(
                    f"Address {number} ({scheme}://…) is none that apprise knows.",
                    remedy="For instance mailto://user:password@example.org or json://host/path; see "
                    "https://appriseit.com/services/",
                )


def send(addresses: Sequence[str], *, title: str, body: str) -> bool:
    """Send a message to all addresses and return whether all have taken it, within 30 s."""
    return _ask({"addresses": list(addresses), "title": title, "body": body}) == _SENT


def _ask(request: dict[str, object]) -> int:
    command = [sys.executable, "-m", "bloomery.operate.watch.notify"]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            text=True,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failed:
        log.warning("an alert was not sent: %s", type(failed).__name__)
        return _NOT_SENT
    if done.returncode not in (_SENT, _REFUSED):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        log.warning("an alert was not sent: %s", lines[-1] if lines else f"status {done.returncode}")
    return done.returncode


def _main() -> int:
    import apprise

    request = json.load(sys.stdin)
    service = apprise.Apprise()
    if not all([service.add(address) for address in request["addresses"]]):
        return _REFUSED
    if "body" not in request:
        return _SENT
    taken = service.notify(
        title=request["title"], body=request["body"], body_format=apprise.NotifyFormat.TEXT
    )
    return _SENT if taken else _NOT_SENT


if __name__ == "__main__":
    sys.exit(_main())
