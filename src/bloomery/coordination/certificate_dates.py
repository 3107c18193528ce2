"""Reads the serial number and the last day of a certificate, without a library for certificates.

Peers have none: only the machine that makes certificates needs `cryptography`.
"""

from __future__ import annotations

import datetime
import ssl
from dataclasses import dataclass
from pathlib import Path

from bloomery.errors import CoordinatorError

WARN_DAYS = 30
"""A certificate that ends within so many days is warned of."""
_SEQUENCE, _VERSION, _UTC_TIME = 0x30, 0xA0, 0x17
_CENTURY = 50


@dataclass(frozen=True, kw_only=True)
class CertificateDates:
    """What identifies a certificate, and when it ends.

    serial: in upper-case hexadecimal digits, as Python's ssl module shows it.
    ends: the last moment at which it is valid, UTC.
    """

    serial: str
    ends: datetime.datetime

    def days_left(self, now: datetime.datetime | None = None) -> float:
        """Return the days until it ends, below 0 if it has ended."""
        return (self.ends - (now or datetime.datetime.now(datetime.UTC))).total_seconds() / 86_400


def read_certificate(path: Path) -> CertificateDates:
    """Return the serial number and the end of a PEM certificate. Raises CoordinatorError."""
    try:
        content = ssl.PEM_cert_to_DER_cert(path.read_text(encoding="ascii"))
        return _parsed(content)
    except (OSError, ValueError, IndexError) as error:
        raise CoordinatorError(
            f"the certificate {path} cannot be read: {error}",
            remedy="`bloomery coordinate --init-certs` makes a bundle for each peer.",
        ) from error


def _parsed(content: bytes) -> CertificateDates:
    """Walk through the fields of a certificate (RFC 5280, section 4.1) up to its validity."""
    tag, certificate, _ = _field(content)
    if tag != _SEQUENCE:
        raise ValueError("it is no certificate")
    _, fields, _ = _field(certificate)
    tag, value, rest = _field(fields)
    if tag == _VERSION:
        _, value, rest = _field(rest)
    serial = int.from_bytes(value, "big")
    for _ in ("signature algorithm", "issuer"):
        _, _, rest = _field(rest)
    _, validity, _ = _field(rest)
    _, _, last = _field(validity)
    tag, text, _ = _field(last)
    digits = text.decode("ascii")
    if tag == _UTC_TIME:  # years of two digits, from 1950 to 2049
        digits = f"{'19' if int(digits[:2]) >= _CENTURY else '20'}{digits}"
    ends = datetime.datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC)
    shown = f"{serial:X}"
    return CertificateDates(serial=shown.zfill(len(shown) + len(shown) % 2), ends=ends)


def _field(content: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and the content of the first DER field, and what follows it."""
    tag, length, start = content[0], content[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(content[2:start], "big")
    if start + length > len(content):
        raise ValueError("it ends too early")
    return tag, content[start : start + length], content[start + length :]
