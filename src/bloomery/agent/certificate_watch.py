"""Warns of a peer's certificate that ends soon, and shows a renewed one without a restart."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bloomery.coordination.certificate_dates import WARN_DAYS, read_certificate
from bloomery.errors import CoordinatorError

log = logging.getLogger(__name__)

_LOOK_S = 60.0
_WARN_EVERY_S = 24 * 3600.0


class CertificateWatch:
    """Looks at a peer's certificate file once a minute, in a thread, until `close`.

    certificate, key: the files in the peer's bundle.
    users: called with both files after they have changed; each shows the new certificate from then on, and
        raises OSError if it cannot be used, as while only one of the two files is the new one.
    """

    def __init__(self, certificate: Path, key: Path, users: Sequence[Callable[[Path, Path], None]]) -> None:
        self._certificate, self._key, self._users = certificate, key, tuple(users)
        self._loaded = self._written()
        self._warned_s = float("-inf")
        self._ended = threading.Event()
        self.look()
        threading.Thread(target=self._run, name="certificate", daemon=True).start()

    def look(self) -> None:
        """Load the certificate if its files have changed, and warn once a day if it ends soon."""
        written = self._written()
        try:
            if written != self._loaded:
                for load in self._users:
                    load(self._certificate, self._key)
                self._loaded, self._warned_s = written, float("-inf")
                ends = read_certificate(self._certificate).ends
                log.info("the certificate was renewed: it is valid until %s", ends.date())
            days = read_certificate(self._certificate).days_left()
        except (OSError, CoordinatorError) as error:
            log.warning("the certificate cannot be loaded, so the one before is shown: %s", error)
            return
        now_s = time.monotonic()
        if days < WARN_DAYS and now_s >= self._warned_s + _WARN_EVERY_S:
            self._warned_s = now_s
            log.warning(
                "this peer's certificate %s: `bloomery coordinate --init-certs DIR --run RUN --peers NAME "
                "--renew` makes a new one; copy its certificate.pem and key.pem here, without a restart",
                f"ends in {days:.0f} days" if days >= 0 else "has ended",
            )

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.look()

    def _written(self) -> tuple[int, ...]:
        """Return when both files were written; zeros for one that is missing."""
        paths = (self._certificate, self._key)
        return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)
