"""`bloomery dashboard`: serves a live page about one run or several."""

from __future__ import annotations

import signal
import socket
import ssl
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from bloomery.cli.arguments import parser
from bloomery.errors import BloomeryError, UsageError, storage_error

if TYPE_CHECKING:
    from bloomery.operate.dashboard.access import AccessRules

EXAMPLES = """\
bloomery dashboard runs/mine                          open the address that it prints
bloomery dashboard runs/a runs/b                      two runs, their curves in the same charts
bloomery dashboard runs/mine --actions                let who has the token save, stop, skip and exclude
bloomery dashboard runs/mine --host 0.0.0.0 --token-file T --tls-cert C.pem --tls-key K.pem
ssh -L 8421:localhost:8421 cluster                    then the page of a dashboard there opens here
"""
_PORT = 8421
_LAST_PORT = 65_535
_GRACE_S = 2
_BACKLOG = 128


def run(arguments: list[str]) -> int:
    """Serve the page until SIGINT or SIGTERM; returns 0."""
    options = _parse(arguments)
    try:
        import starlette
        import uvicorn
    except ImportError as missing:
        raise BloomeryError(
            f"The dashboard needs a package that is not installed: {missing.name}.",
            remedy="pip install 'bloomery[dashboard]'",
        ) from missing
    del starlette
    from bloomery.operate.dashboard.server import DashboardServer, RunPoller
    from bloomery.operate.ledger.figures import read_plan

    _refuse_wrong_certificate(options)
    rules, secret = _rules(options)
    listener = _listener(options)
    plan = read_plan(options.plan) if options.plan is not None else None
    paths = [Path(path) for path in options.runs]
    server = DashboardServer(paths, rules, interval_s=options.interval, plan=plan)
    config = uvicorn.Config(
        server.application,
        log_level="warning",
        access_log=False,
        server_header=False,
        lifespan="off",
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )
    web = uvicorn.Server(config)
    poller = RunPoller(server.runs, poll_s=options.interval / 2).start()
    scheme = "https" if options.tls_cert else "http"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    for run in options.runs:
        if not Path(run).is_dir():
            print(f"note: {run} is not there yet; the page shows it once it is", file=sys.stderr)
    print(f"{scheme}://{shown}:{port}/ shows {', '.join(options.runs)}; Ctrl-C ends it", flush=True)
    if secret:
        print(f"the token for actions: {secret}", flush=True)
    server.is_closing = lambda: web.should_exit
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn puts its own in their place, and these back
        signal.signal(number, lambda number, frame: None)
    try:
        web.run(sockets=[listener])
    finally:
        poller.close()
        listener.close()
    return 0


def _rules(options: Namespace) -> tuple[AccessRules, str]:
    """Return who may do what, and a token to be shown where one was made up."""
    from bloomery.operate.dashboard.access import AccessRules, new_token, read_token
    from bloomery.transport.trust import is_loopback

    token = read_token(options.token_file) if options.token_file else None
    is_private = not is_loopback(options.host)
    if is_private and not (token and options.tls_cert and options.tls_key):
        raise UsageError(
            f"{options.host} can be reached from other machines, so the page needs a token and TLS.",
            remedy="Give --token-file, --tls-cert and --tls-key; or leave --host out and use `ssh -L`.",
        )
    secret = new_token() if options.actions and token is None else ""
    return AccessRules(
        token=token or secret or None,
        is_private=is_private or token is not None,
        has_actions=options.actions,
        hosts=() if is_private else ("localhost", "127.0.0.1", "[::1]", options.host),
    ), secret


def _refuse_wrong_certificate(options: Namespace) -> None:
    """Raise BloomeryError, before anything is served, for files that are no certificate with its key."""
    if options.tls_cert is None:
        return
    try:
        # With a password of its own it asks none of the terminal, where a service would wait for ever.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.tls_cert, options.tls_key, password="")
    except ssl.SSLError as refused:
        raise BloomeryError(
            f"{options.tls_cert} and {options.tls_key} are no certificate with its key: {refused.reason}.",
            remedy="Give both as PEM, the key without a password.",
        ) from refused
    except OSError as refused:
        raise storage_error(refused, path=options.tls_key, doing="Reading the key") from refused


def _listener(options: Namespace) -> socket.socket:
    """Return the bound socket, so that a taken port is refused before anything begins."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
        listener.listen(_BACKLOG)  # who comes before the server is ready waits, and is not refused
    except OSError as refused:
        listener.close()
        raise BloomeryError(
            f"{options.host}:{options.port} cannot be served: {refused.strerror or refused}.",
            remedy="Choose another --port (0 takes a free one).",
        ) from refused
    return listener


def _parse(arguments: list[str]) -> Namespace:
    options = parser(
        "dashboard",
        "Serve a page that shows runs live: health, curves, events, checkpoints, where the time went, ranks\n"
        "and peers. It reads the run directories and asks the training nothing.",
        examples=EXAMPLES,
    )
    options.add_argument("runs", metavar="RUN", nargs="+", help="run directories")
    options.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to serve (127.0.0.1)"
    )
    options.add_argument(
        "--port", type=_port, default=_PORT, metavar="N", help=f"port; 0 takes a free one ({_PORT})"
    )
    options.add_argument(
        "--interval",
        type=_seconds,
        default=2.5,
        metavar="S",
        help="seconds between updates of the page (2.5)",
    )
    options.add_argument(
        "--plan",
        type=Path,
        metavar="FILE",
        help="what `bloomery plan … --json` printed; it stands beside the run",
    )
    options.add_argument("--actions", action="store_true", help="let viewers with the token act on the runs")
    options.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the access token, which viewers must then give too",
    )
    options.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate for https, PEM")
    options.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    chosen = options.parse_intermixed_args(arguments)
    if bool(chosen.tls_cert) != bool(chosen.tls_key):
        options.error("--tls-cert and --tls-key go together")
    for path in (chosen.tls_cert, chosen.tls_key):
        if path is not None and not path.is_file():
            error = FileNotFoundError(2, "No such file or directory")
            raise storage_error(error, path=path, doing="Reading")
    return chosen


def _port(text: str) -> int:
    """Parse a port, for `type=` of an argument."""
    if not text.isdecimal() or int(text) > _LAST_PORT:
        raise ArgumentTypeError(f"{text!r} is no port: 0 to {_LAST_PORT}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600.0:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds
