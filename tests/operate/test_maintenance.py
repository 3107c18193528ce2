"""What clouds, files and reservations of SLURM tell of maintenance, and what is no notice."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bloomery.cli.watch import _ping as ping
from bloomery.config.checkpoint import ControlSection
from bloomery.events.run_directory import RunDirectory
from bloomery.operate import maintenance
from bloomery.operate.departure import (
    maintenance_files,
)
from bloomery.operate.maintenance import (
    MaintenanceNotice,
    _get,
    _iso,
    cloud_here,
    earliest,
    notices_of_cloud,
    notices_of_files,
    notices_of_slurm,
)


@contextmanager
def metadata(answers: dict[str, str], *, asked: list[str]) -> Iterator[str]:
    """A metadata service: answers by path, 404 for all else; notes method, path and headers that count."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys = ("Metadata-Flavor", "Metadata", "X-aws-ec2-metadata-token")
            sent = [self.headers[key] for key in keys if self.headers[key]]
            asked.append(f"{self.command} {self.path} {sent}")
            body = answers.get(self.path)
            self.send_response(200 if body is not None else 404)
            self.end_headers()
            self.wfile.write((body or "").encode())

        do_PUT = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


WHEN = datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC)
MAIL, ISO = format_datetime(WHEN, usegmt=True), WHEN.isoformat().replace("+00:00", "Z")
GCE, AWS = "/computeMetadata/v1/instance", "/latest/meta-data"


@pytest.mark.parametrize(
    ("cloud", "answers", "expected"),
    [
        ("gce", {f"{GCE}/maintenance-event": "NONE", f"{GCE}/preempted": "FALSE"}, []),
        ("gce", {f"{GCE}/maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE\n"}, []),
        ("gce", {f"{GCE}/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}, [0.0]),
        ("gce", {f"{GCE}/preempted": "TRUE\n"}, [0.0]),
        (
            "gce",
            {f"{GCE}/upcoming-maintenance?alt=json": json.dumps({"window_start_time": ISO})},
            [WHEN.timestamp()],
        ),
        ("aws", {"/latest/api/token": "secret"}, []),
        (
            "aws",
            {
                "/latest/api/token": "secret",
                f"{AWS}/spot/instance-action": json.dumps({"action": "terminate", "time": ISO}),
                f"{AWS}/events/maintenance/scheduled": json.dumps(
                    [{"Code": "system-reboot", "State": "active", "NotBefore": MAIL}, {"State": "completed"}]
                ),
            },
            [WHEN.timestamp()] * 2,
        ),
        ("azure", {"/metadata/scheduledevents?api-version=2020-07-01": '{"Events": []}'}, []),
        (
            "azure",
            {
                "/metadata/scheduledevents?api-version=2020-07-01": json.dumps(
                    {"Events": [{"EventType": "Redeploy", "NotBefore": MAIL, "Resources": ["vm1"]}]}
                )
            },
            [WHEN.timestamp()],
        ),
        (
            "azure",
            {
                "/metadata/instance/compute/name?api-version=2021-02-01&format=text": "vm2",
                "/metadata/scheduledevents?api-version=2020-07-01": json.dumps(
                    {
                        "Events": [
                            {"EventType": "Redeploy", "NotBefore": MAIL, "Resources": ["vm1"]},
                            {"EventType": "Freeze", "Resources": ["vm2"], "DurationInSeconds": 5},
                            {"EventType": "Freeze", "NotBefore": MAIL, "Resources": ["vm2"]},
                        ]
                    }
                ),
            },
            [WHEN.timestamp()],
        ),
    ],
)
def test_notices_of_the_clouds(cloud: str, answers: dict[str, str], expected: list[float]) -> None:
    asked: list[str] = []
    with metadata(answers, asked=asked) as url:
        notices = notices_of_cloud(ControlSection(metadata=cloud, metadata_url=url))()
    assert [notice.at for notice in notices] == expected
    wanted = {"gce": "['Google']", "azure": "['true']", "aws": "['secret']"}[cloud]
    assert asked[-1].endswith(wanted)


def test_the_cloud_is_told_by_the_firmware_and_none_is_asked_elsewhere(tmp_path: Path) -> None:
    assert cloud_here(tmp_path) == ""
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert cloud_here(tmp_path) == "gce"
    assert notices_of_cloud(ControlSection(metadata="none"))() == []


def test_a_service_that_is_silent_or_talks_nonsense_gives_no_notice() -> None:
    asked: list[str] = []
    with metadata({f"{AWS}/spot/instance-action": "<html>"}, asked=asked) as url:
        assert notices_of_cloud(ControlSection(metadata="aws", metadata_url=url))() == []
    assert notices_of_cloud(ControlSection(metadata="gce", metadata_url=url))() == []


def test_a_service_is_asked_past_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)  # which keeps the proxy of its first request
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with metadata({"/own": "of this machine"}, asked=[]) as url, metadata({}, asked=[]) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        assert _get(f"{url}/own", {}) == "of this machine"


def test_an_address_without_a_scheme_gives_no_notice_and_hides_none_of_other_sources(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert notices_of_cloud(ControlSection(metadata="gce", metadata_url="169.254.169.254"))() == []
    assert "169.254.169.254/computeMetadata/v1/instance/preempted does not answer: unknown url" in caplog.text


def test_an_answer_that_is_no_http_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"garbage\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert notices_of_cloud(ControlSection(metadata="gce", metadata_url=url))() == []
        ping(url)
        assert "the dead-man's switch was not reached" in caplog.text
        server.shutdown(socket.SHUT_RDWR)


def test_files_of_maintenance_lie_beside_the_switches(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert maintenance_files(run, "") == [run.control_dir / "maintenance"]
    assert maintenance_files(run, "/else") == [run.control_dir / "maintenance", Path("/else/maintenance")]


def test_what_comes_first_is_told_and_what_is_over_is_now() -> None:
    now = time.time()
    later, soon, at_once = (MaintenanceNotice(at=at, what=str(at)) for at in (now + 900.0, now + 60.0, 0.0))
    past = MaintenanceNotice(at=now - 60.0, what="past")
    assert earliest([later, soon]) == soon and earliest([later, at_once, soon]) == at_once
    assert earliest([at_once, past]) == past and earliest([]) is None


@pytest.mark.parametrize(
    ("file", "text", "cloud"),
    [
        ("sys_vendor", "Amazon EC2", "aws"),
        ("product_name", "Amazon EC2", "aws"),
        ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
        ("chassis_asset_tag", "7783", ""),
    ],
)
def test_each_cloud_is_told_by_its_own_word(tmp_path: Path, file: str, text: str, cloud: str) -> None:
    (tmp_path / file).write_text(f"{text}\n")
    assert cloud_here(tmp_path) == cloud


EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"


NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"


@pytest.mark.parametrize(
    ("cloud", "answers", "told"),
    [
        ("gce", {f"{GCE}/upcoming-maintenance?alt=json": json.dumps({"windowStartTime": ISO})},
            [(WHEN.timestamp(), f"Google Cloud: maintenance from {ISO}")]),
        ("gce", {f"{GCE}/upcoming-maintenance?alt=json": "{}"}, []),
        ("aws",
            {f"{AWS}/spot/instance-action": json.dumps({"action": "stop", "time": "2031-05-06T07:08:09"})},
            [(WHEN.timestamp(), "AWS: stop")]),
        ("aws",
            {f"{AWS}/events/maintenance/scheduled": json.dumps([{"Code": "reboot", "NotBefore": "soon"}])},
            [(0.0, "AWS: reboot")]),
        ("azure",
            {EVENTS: json.dumps({"Events": [{"EventType": "Reboot", "Resources": ["vm1"]}]}), NAME: "\n"},
            [(0.0, "Azure: Reboot of vm1")]),
        ("azure", {EVENTS: json.dumps({"Events": [{"EventType": "Reboot"}]}), NAME: "vm2"},
            [(0.0, "Azure: Reboot of this machine")]),
        ("azure", {NAME: "vm1\n", EVENTS: json.dumps({"Events": [
                {"EventType": "Reboot", "Resources": ["vm1"], "DurationInSeconds": 9},
                {"EventType": "Freeze", "Resources": ["vm1"], "DurationInSeconds": -1},
                {"EventType": "Freeze", "Resources": ["vm1"], "DurationInSeconds": 30},
                {"EventType": "Freeze", "Resources": ["vm1"], "DurationInSeconds": 31},
            ]})},
            [(0.0, "Azure: Reboot of vm1"), (0.0, "Azure: Freeze of vm1"), (0.0, "Azure: Freeze of vm1")]),
    ],
)  # fmt: skip
def test_what_a_cloud_tells_is_told_with_its_time(
    cloud: str, answers: dict[str, str], told: list[tuple[float, str]]
) -> None:
    with metadata(answers, asked=[]) as url:
        notices = notices_of_cloud(ControlSection(metadata=cloud, metadata_url=f"{url}/"))()
    assert [(notice.at, notice.what) for notice in notices] == told


@pytest.mark.parametrize("cloud", ["gce", "aws", "azure"])
def test_a_slash_at_the_end_of_a_services_address_is_not_asked_for_twice(
    monkeypatch: pytest.MonkeyPatch, cloud: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(maintenance, "_get", lambda url, headers, **more: asked.append(url) or "")
    assert notices_of_cloud(ControlSection(metadata=cloud, metadata_url="http://a/"))() == []
    assert asked and all(url.startswith("http://a/") and "//" not in url[7:] for url in asked)


def test_maintenance_that_a_cloud_tells_in_another_shape_is_none() -> None:
    answers = {f"{AWS}/events/maintenance/scheduled": '{"Code": "reboot"}'}
    with metadata(answers, asked=[]) as url:
        assert notices_of_cloud(ControlSection(metadata="aws", metadata_url=url))() == []


def test_a_directory_in_place_of_a_file_of_maintenance_announces_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(notices_of_files([tmp_path, tmp_path / "file"])) == 1


def test_the_token_of_a_cloud_is_asked_for_and_sent_as_one_word() -> None:
    asked: list[str] = []
    with metadata({"/latest/api/token": "secret\n"}, asked=asked) as url:
        assert notices_of_cloud(ControlSection(metadata="aws", metadata_url=url))() == []
    assert [line.split()[0] for line in asked] == ["PUT", "GET", "GET"]
    assert [line.partition(" [")[2] for line in asked] == ["]", "'secret']", "'secret']"]


def test_only_an_answer_that_means_no_notice_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    statuses = [404, 405, 503, 500, 500, 404, 500, 200, 500]

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0))
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    for expected in (0, 0, 0, 1, 1, 1, 2, 2, 3):  # again only after an answer
        assert _get(url, {}) == ""
        assert caplog.text.count("answers") == expected
    server.shutdown()
    server.server_close()


def test_a_time_without_a_zone_is_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert _iso("2031-05-06T07:08:09") == WHEN.timestamp() == _iso("2031-05-06T16:08:09+09:00")
    finally:
        monkeypatch.undo()
        time.tzset()


def test_an_answer_is_waited_for_and_read_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def opened(request: object, *, timeout: float) -> io.BytesIO:
        limits.append(timeout)
        return io.BytesIO(b"x" * (3 << 20))

    monkeypatch.setattr(maintenance._DIRECT, "open", opened)
    assert len(_get("http://any", {})) == 1 << 20 and limits == [5.0]


def test_a_reservation_counts_for_the_nodes_of_the_job_from_its_start() -> None:
    reserved = [("repair", 500.0, ("n2", "n3")), ("other", 100.0, ("n9",)), ("cooling", 400.0, ("n1", "n9"))]
    slurm: Any = SimpleNamespace(reservations=lambda: reserved)
    assert notices_of_slurm(slurm, ["n1", "n2", "n3"]) == [
        MaintenanceNotice(at=500.0, what="reservation repair of n2, n3"),
        MaintenanceNotice(at=400.0, what="reservation cooling of n1"),
    ]
    assert [notice.at for notice in notices_of_slurm(slurm, ["n1", "n2"], own="cooling")] == [500.0]


@pytest.mark.parametrize(
    ("cloud", "address"),
    [
        ("gce", "http://metadata.google.internal/computeMetadata/v1/"),
        ("aws", "http://169.254.169.254/latest/"),
        ("azure", "http://169.254.169.254/metadata/"),
        ("", ""),
    ],
)
def test_the_cloud_that_is_here_is_asked_at_its_usual_address(
    monkeypatch: pytest.MonkeyPatch, cloud: str, address: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(maintenance, "cloud_here", lambda: cloud)
    monkeypatch.setattr(maintenance, "_get", lambda url, headers, **more: asked.append(url) or "")
    assert notices_of_cloud(ControlSection(metadata="auto"))() == []
    assert all(url.startswith(address) for url in asked) and bool(asked) is bool(cloud)
