"""A peer's certificate that ends soon or was renewed, while the peer runs."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import threading
from pathlib import Path

import pytest

from bloomery.coordination.certificates import init_certificates
from bloomery.coordination.credentials import CertificateWatch, read_bundle, read_certificate
from bloomery.transport.trust import PeerRefused, Trust, trust_certificates


def trust_of(bundle: Path) -> Trust:
    files = read_bundle(bundle)
    return trust_certificates(authority=files.authority, certificate=files.certificate, key=files.key)


def shown(listening: Trust, dialling: Trust) -> str:
    """The serial number that the listening end shows; PeerRefused if the dialling end does not trust it."""
    here, there = socket.socketpair()
    assert listening.to_listen is not None and dialling.to_dial is not None
    context = listening.to_listen

    def listen() -> None:
        with context.wrap_socket(there, server_side=True) as accepted:
            accepted.recv(1)

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        with dialling.to_dial.wrap_socket(here) as connection:
            connection.sendall(b"x")
            dialling.check_certificate(connection)
            return str((connection.getpeercert() or {})["serialNumber"])
    finally:
        thread.join(60.0)


def test_a_certificate_is_warned_of_and_a_renewed_one_is_shown_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    init_certificates(tmp_path, run="one", peers=["a", "b"], days=29)
    bundle = tmp_path / "one/a"
    mine, other = trust_of(bundle), trust_of(tmp_path / "one/b")
    loads = [mine.load_certificate]
    watch = CertificateWatch(bundle / "certificate.pem", bundle / "key.pem", loads)
    try:
        assert "this peer's certificate ends in 29 days" in caplog.text
        watch.check()
        assert caplog.text.count("ends in 29 days") == 1  # once a day
        before = shown(mine, other)
        assert before == read_certificate(bundle / "certificate.pem").serial
        key = (bundle / "key.pem").read_bytes()
        init_certificates(tmp_path, run="one", peers=["a"], days=90, renews=True)
        renewed = (bundle / "key.pem").read_bytes()
        (bundle / "key.pem").write_bytes(key)  # only one of the two files is copied so far
        watch.check()
        assert "the one before is shown" in caplog.text and shown(mine, other) == before
        (bundle / "key.pem").write_bytes(renewed)
        os.utime(bundle / "key.pem")
        watch.check()
        after = shown(mine, other)
        assert after == read_certificate(bundle / "certificate.pem").serial != before
    finally:
        watch.close()
    other.revoked.add(after)
    with pytest.raises((PeerRefused, ssl.SSLError), match="was revoked"):
        shown(mine, other)


def test_a_certificate_that_could_not_be_loaded_is_tried_again_though_its_files_stay(tmp_path: Path) -> None:
    init_certificates(tmp_path, run="one", peers=["a"], days=90)
    bundle, loads = tmp_path / "one/a", list[str]()

    def load(certificate: Path, key: Path) -> None:
        loads.append(read_certificate(certificate).serial)
        if len(loads) == 1:
            raise OSError("no descriptor is left")

    watch = CertificateWatch(bundle / "certificate.pem", bundle / "key.pem", [load])
    try:
        init_certificates(tmp_path, run="one", peers=["a"], days=90, renews=True)
        for _ in range(3):
            watch.check()
        assert loads == [read_certificate(bundle / "certificate.pem").serial] * 2
    finally:
        watch.close()
