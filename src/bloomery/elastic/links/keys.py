"""Keys of a connection: HKDF with SHA-256 (RFC 5869)."""

from __future__ import annotations

import hashlib
import hmac

KEY_BYTES = 32


def derive_key(secret: bytes, *, salt: bytes, purpose: str) -> bytes:
    """KEY_BYTES that only who knows `secret` can compute; another for each purpose and salt."""
    extracted = hmac.digest(salt, secret, "sha256")
    return hmac.digest(extracted, purpose.encode() + b"\x01", "sha256")


def proof(key: bytes, *words: bytes) -> bytes:
    """A code of `words` that only who knows `key` can compute. The words cannot run into one another."""
    code = hmac.new(key, digestmod=hashlib.sha256)
    for word in words:
        code.update(len(word).to_bytes(4, "big") + word)
    return code.digest()


def is_proof(given: bytes, key: bytes, *words: bytes) -> bool:
    """Whether `given` is the code of `words`, in a time that tells nothing."""
    return hmac.compare_digest(given, proof(key, *words))
