"""`bloomery watch`: watches runs and sends alerts, as a service or once for cron."""

from __future__ import annotations

import logging
import os
import time
from argparse import Namespace
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.argument_values import amount, positive
from bloomery.cli.arguments import parser
from bloomery.cli.end_signal import EndSignal
from bloomery.cli.json_output import json_text
from bloomery.cli.run_inputs import existing_run
from bloomery.errors import BloomeryError

if TYPE_CHECKING:
    from bloomery.operate.watch.alerts import Alert
    from bloomery.operate.watch.watcher import RunWatcher

log = logging.getLogger(__name__)

EXAMPLES = """\
bloomery watch runs/mine                                         print alerts as they come
bloomery watch runs/mine --to-file ~/.config/alerts              send them to Apprise URLs, one per line
bloomery watch runs/a runs/b --to ntfys://ntfy.sh/TOPIC          as arguments: other users see them in `ps`
bloomery watch runs/mine --once --to-file …                      check once, for cron; status 1: an alert
bloomery watch runs/mine --ping https://hc-ping.com/UUID         a server that alerts when these pings stop
bloomery watch runs/mine --ack                                   acknowledge: do not repeat the open alerts
"""
_ADDRESSES = "BLOOMERY_WATCH_TO"
_PING_S = 10.0
_TIME = "a number of at least 0"


def run(arguments: list[str]) -> int:
    """Watch runs until SIGINT or SIGTERM, or check once.

    Returns 1 if that check leaves an alert open, or a run cannot be read.
    """
    options = _parse(arguments)
    from bloomery.operate.watch.alerts import AlertRules
    from bloomery.operate.watch.conditions import WatchLimits
    from bloomery.operate.watch.notify import AlertSender, refuse_bad_addresses
    from bloomery.operate.watch.watcher import RunWatcher, acknowledge

    if options.ack is not None:
        kinds = [kind for path in options.runs for kind in acknowledge(existing_run(path), options.ack)]
        print(f"acknowledged: {', '.join(kinds)}" if kinds else "nothing is open")
        return 0
    addresses = _addresses(options)
    refuse_bad_addresses(addresses)
    limits = WatchLimits(
        pending_s=options.pending_h * 3600.0,
        idle_s=None if options.idle_h is None else options.idle_h * 3600.0,
        disk_s=options.disk_h * 3600.0,
    )

    sender = AlertSender(addresses)

    def deliver(alert: Alert) -> Alert | None:
        if not options.json and alert.owed is None:
            with suppress(OSError, ValueError):  # a full disk behind a log must not keep alerts from people
                print(
                    f"{time.strftime('%H:%M:%S')} {alert.title}: {' | '.join(alert.body.splitlines())}",
                    flush=True,
                )
        return sender.send(alert)

    with ExitStack() as stack:
        watchers = []
        for path in options.runs:
            rules = AlertRules(escalate_s=options.escalate_min * 60.0)
            watcher = RunWatcher(existing_run(path), deliver, limits=limits, rules=rules)
            stack.callback(watcher.close)
            watchers.append(watcher)
        if options.once:
            return _once(watchers, options)
        _watch(watchers, options)
    return 0


def _once(watchers: list[RunWatcher], options: Namespace) -> int:
    are_read = True
    for watcher in watchers:
        if not _is_checked(watcher):
            are_read = False
            continue
        opened = [incident.condition for incident in watcher.incidents.values()]
        if options.json:
            shown = {condition.kind: condition.line for condition in opened}
            print(json_text({"run": str(watcher.rundir.path), "state": watcher.state, "open": shown}))
        else:
            print(
                f"{watcher.rundir.path}: {watcher.state}"
                + (f"; {', '.join(condition.kind for condition in opened)}" if opened else "")
            )
    _ping(options.ping)
    return 1 if not are_read or any(watcher.incidents for watcher in watchers) else 0


def _is_checked(watcher: RunWatcher) -> bool:
    """Look at a run; returns whether it could be read. One that could not must not end the watch of all."""
    try:
        watcher.check()
    except (BloomeryError, OSError) as refused:
        log.warning("%s: %s", watcher.rundir.path, refused)
        return False
    except Exception:
        # The edge of a service: a damaged record may raise anything.
        log.exception("%s could not be checked", watcher.rundir.path)
        return False
    return True


def _watch(watchers: list[RunWatcher], options: Namespace) -> None:
    """Look at each run every few seconds until a signal comes; a run that cannot be read is no end."""
    ended = EndSignal()
    while True:
        for watcher in watchers:
            _is_checked(watcher)
        _ping(options.ping)
        if ended.wait(options.interval):
            return


def _ping(url: str | None) -> None:
    if not url:
        return
    from http.client import HTTPException
    from urllib.request import urlopen

    try:
        with urlopen(url, timeout=_PING_S) as answer:
            answer.read(1)
    except (OSError, ValueError, HTTPException) as refused:
        log.warning("the dead-man's switch was not reached: %s", refused)


def _addresses(options: Namespace) -> list[str]:
    addresses = list(options.to)
    if options.to_file is not None:
        try:
            text = options.to_file.read_text()
        except (OSError, UnicodeDecodeError) as refused:
            why = refused.strerror if isinstance(refused, OSError) else "it is not UTF-8"
            raise BloomeryError(
                f"{options.to_file} cannot be read: {why}.", remedy="Write one address a line."
            ) from refused
        lines = [line.strip() for line in text.splitlines()]
        addresses += [line for line in lines if line and not line.startswith("#")]
    return addresses + os.environ.get(_ADDRESSES, "").split()


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "watch",
        "Watch runs, and tell people when one hangs, fails, is gone or waits too long, when a guard finds\n"
        "something, when saves fail, or the disk will be full: one alert for each incident, again when it\n"
        "is ignored, and one when it is over. It only reads files, on any machine that has them.",
        examples=EXAMPLES,
    )
    options.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
    options.add_argument("--once", action="store_true", help="check once, for cron")
    options.add_argument(
        "--interval", type=positive, default=15, metavar="S", help="seconds between checks (15)"
    )
    options.add_argument(
        "--to",
        action="append",
        default=[],
        metavar="URL",
        help="notification URL in Apprise's syntax (may be repeated)",
    )
    options.add_argument(
        "--to-file", type=Path, metavar="FILE", help=f"such URLs, one per line; also ${_ADDRESSES}"
    )
    options.add_argument(
        "--ping",
        metavar="URL",
        help="URL to GET after each check (dead-man's switch such as healthchecks.io)",
    )
    options.add_argument(
        "--escalate-min",
        type=amount(_TIME, least=0),
        default=30.0,
        metavar="MIN",
        help="minutes until an unacknowledged alert is sent again (30)",
    )
    options.add_argument(
        "--pending-h",
        type=amount(_TIME, least=0),
        default=1.0,
        metavar="H",
        help="alert when a job has been queued for more than H hours (1)",
    )
    options.add_argument(
        "--idle-h",
        type=amount(_TIME, least=0),
        metavar="H",
        help="alert after H hours without training, also when stopped on purpose (default: off)",
    )
    options.add_argument(
        "--disk-h",
        type=amount(_TIME, least=0),
        default=24.0,
        metavar="H",
        help="alert H hours before the disk is full (24)",
    )
    options.add_argument(
        "--ack", nargs="?", const="", metavar="KIND", help="acknowledge what is open, or one kind of it"
    )
    options.add_argument("--json", action="store_true", help="with --once: print JSON")
    chosen = options.parse_intermixed_args(arguments)
    if chosen.ping and not chosen.ping.startswith(("http://", "https://")):
        options.error(f"--ping {chosen.ping} is no URL: write https://host/path")
    if chosen.json and not chosen.once:
        options.error("--json goes with --once")
    return chosen
