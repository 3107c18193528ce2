"""Multipart uploads that were cut short: found at a real S3 API, ended by prune, signed as AWS signs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import urllib3
from tests.checkpoint.object_store import ObjectStore

from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import main
from bloomery.config.environment import OfflineRefused
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.objects.refusals import AccessDenied, PermanentStoreError, StoreUnreachable
from bloomery.objects.uploads import (
    ABANDONED_AFTER,
    UnfinishedUpload,
    UnfinishedUploads,
    _begun_before,
    _parsed,
)

SMALL = """
[model]
layers = 1
hidden = 8
heads = 1
[data]
sources = ["x"]
sequence_length = 8
[train]
global_batch = 1
steps = 1
[optim]
learning_rate = 0.1
"""


@pytest.fixture
def client(object_store: ObjectStore):
    boto3 = pytest.importorskip("boto3")
    return boto3.client("s3", endpoint_url=object_store.endpoint)


def begin(client, bucket: str, key: str) -> None:
    """Begin an upload and send a part, as a process does that is killed then."""
    number = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
    client.upload_part(Bucket=bucket, Key=key, UploadId=number, PartNumber=1, Body=b"x" * 100)


def unfinished(client, bucket: str) -> list[str]:
    return [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]


def test_prune_ends_the_uploads_of_the_run_and_no_others(client, object_store, rundir: RunDirectory, capsys):
    url = object_store.new_bucket()
    bucket = url.removeprefix("s3://")
    save_checkpoint(rundir.checkpoints, [], step=1, incarnation=1)
    recipe = f"[run]\nname = 'demo'\n{SMALL}\n[backup]\nurl = '{url}/runs'\n"
    rundir.recipe.write_text(recipe)
    cut, others = "runs/demo/checkpoints/step-000001.i001/a b+c.safetensors", ["runs/demo-2/a", "runs/d"]
    for key in (cut, *others):
        begin(client, bucket, key)
    Objects(url).put("runs/demo/whole", b"kept")

    assert main(["ckpt", "prune", str(rundir.path), "--dry-run"]) == 0
    assert f"{cut}  an upload cut short" in capsys.readouterr().out
    assert sorted(unfinished(client, bucket)) == sorted([cut, *others])
    assert main(["ckpt", "prune", str(rundir.path), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["upload"], row["removed"]) for row in rows if "upload" in row] == [(cut, True)]
    assert sorted(unfinished(client, bucket)) == others[::-1]
    assert Objects(url).content("runs/demo/whole") == b"kept"


def test_prune_ends_uploads_to_gs_by_its_interoperable_requests(
    client, object_store, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys
):
    # S3's API stands for Google's, which takes the same requests: no emulator of Google's has them
    bucket = object_store.new_bucket().removeprefix("s3://")
    save_checkpoint(rundir.checkpoints, [], step=1, incarnation=1)
    rundir.recipe.write_text(f"[run]\nname = 'demo'\n{SMALL}\n[backup]\nurl = 'gs://{bucket}/runs'\n")
    for key in ("runs/demo/a", "runs/other/a"):
        begin(client, bucket, key)
    monkeypatch.setenv("GOOGLE_BASE_URL", object_store.endpoint)
    assert main(["ckpt", "prune", str(rundir.path)]) == 0
    assert "GS_ACCESS_KEY_ID and GS_SECRET_ACCESS_KEY" in capsys.readouterr().err
    monkeypatch.setenv("GS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("GS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of another store")
    assert "x-amz-security-token" not in UnfinishedUploads(f"gs://{bucket}")._signed("GET", "/", "uploads=")
    assert main(["ckpt", "prune", str(rundir.path)]) == 0
    assert "runs/demo/a  an upload cut short" in capsys.readouterr().out
    assert unfinished(client, bucket) == ["runs/other/a"]


def test_an_upload_that_may_be_under_way_is_left(client, object_store):
    url = object_store.new_bucket()
    begin(client, url.removeprefix("s3://"), "run/a")
    uploads = UnfinishedUploads(f"{url}/run")
    assert uploads.list(begun_before=timedelta(days=100 * 365)) == []
    (found,) = uploads.list()
    uploads.end(found)
    uploads.end(found)  # gone already
    assert uploads.list() == []


def test_requests_are_signed_as_aws_signs_them(monkeypatch, object_store):
    auth = pytest.importorskip("botocore.auth")
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    monkeypatch.setenv("AWS_SESSION_TOKEN", "a/token=")
    path, query = "/bucket/a%20b", "key-marker=a%2Fb&prefix=run%2F&uploads="
    ours = UnfinishedUploads("s3://bucket/run")._signed("GET", path, query)
    headers = {name: value for name, value in ours.items() if name != "authorization"}
    request = AWSRequest("GET", f"{object_store.endpoint}{path}?{query}", headers=headers)
    request.context["timestamp"] = ours["x-amz-date"]
    signer = auth.S3SigV4Auth(Credentials("test-access-key", "test-secret-access-key"), "s3", "us-east-1")
    text = signer.string_to_sign(request, signer.canonical_request(request))
    assert ours["authorization"].endswith(f"Signature={signer.signature(text, request)}")


def test_missing_keys_and_missing_buckets_are_told(object_store, monkeypatch):
    with pytest.raises(StoreUnreachable, match="NoSuchBucket"):
        UnfinishedUploads("s3://there-is-none/run").list()
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(AccessDenied, match="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        UnfinishedUploads("s3://bucket/run").list()
    monkeypatch.setenv("BLOOMERY_OFFLINE", "1")
    with pytest.raises(OfflineRefused, match=r"(?s)reach s3://bucket/run.*nothing else needs it"):
        UnfinishedUploads("s3://bucket/run")


DATE, BEGUN = "Thu, 26 Nov 2026 04:00:00 GMT", "<Initiated>2026-01-01T00:00:00Z</Initiated>"


@pytest.mark.parametrize(
    ("date", "begun", "told"),
    [
        (DATE, "", "isoformat"),
        (DATE, "<Initiated>2026-01-01T00:00:00</Initiated>", "offset-naive"),
        ("one day", BEGUN, "one day"),
        ("Thu, 26 Nov 2026 04:00:00 -0000", BEGUN, "offset-naive"),
    ],
)
def test_times_that_cannot_be_read_end_prune_with_a_line(
    date: str, begun: str, told: str, rundir: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    answer = f"<Uploads><Upload><Key>demo/a</Key><UploadId>1</UploadId>{begun}</Upload></Uploads>".encode()
    response = SimpleNamespace(
        read=lambda most: answer, release_conn=lambda: None, status=200, headers={"date": date}
    )
    monkeypatch.setattr("urllib3.request", lambda *args, **more: response)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    rundir.recipe.write_text(f"[run]\nname = 'demo'\n{SMALL}\n[backup]\nurl = 's3://bucket'\n")
    assert main(["ckpt", "prune", str(rundir.path)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("uploads that were cut short were not looked for: s3://bucket/demo (")
    assert told in line


class Asked:
    """What `urllib3.request` was asked, and its answers, one after the other."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self._answers = list(answers)
        self.requests: list[tuple[str, str]] = []
        self.more: list[dict[str, Any]] = []
        self.released = 0

    def __call__(self, method: str, address: str, **more: Any) -> SimpleNamespace:
        self.requests.append((method, address))
        self.more.append(more)
        status, content = self._answers.pop(0)
        if not status:
            raise urllib3.exceptions.ProtocolError(content)

        def release() -> None:
            self.released += 1

        return SimpleNamespace(
            read=lambda most: content.encode()[:most], release_conn=release, status=status, headers={}
        )


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT", "AWS_ENDPOINT_URL", "GOOGLE_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS", "GS"):
        monkeypatch.setenv(f"{name}_ACCESS_KEY_ID", f"{name}-key")
        monkeypatch.setenv(f"{name}_SECRET_ACCESS_KEY", f"{name}-secret")
    return monkeypatch


def page(*uploads: tuple[str, str], following: tuple[str, str] | None = None) -> str:
    listed = "".join(
        f"<Upload><Key>{key}</Key><UploadId>{number}</UploadId>"
        "<Initiated>2026-01-01T00:00:00Z</Initiated></Upload>"
        for key, number in uploads
    )
    end = "<IsTruncated>false</IsTruncated>"
    if following is not None:
        end = (
            f"<IsTruncated>true</IsTruncated><NextKeyMarker>{following[0]}</NextKeyMarker>"
            f"<NextUploadIdMarker>{following[1]}</NextUploadIdMarker>"
        )
    return f'<L xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{listed}{end}</L>'


def test_a_list_of_several_pages_is_read_to_its_end_and_each_request_is_bounded(keys: pytest.MonkeyPatch):
    asked = Asked((200, page(("r/a", "1"), following=("r/a", "1"))), (200, page(("r/b c", "2"))), (204, ""))
    keys.setattr("urllib3.request", asked)
    uploads = UnfinishedUploads("s3://bucket/r/")
    found = uploads.list(begun_before=timedelta(0))
    assert [(one.key, one.upload) for one in found] == [("r/a", "1"), ("r/b c", "2")]
    uploads.end(found[1])
    root = "https://s3.us-east-1.amazonaws.com/bucket"
    assert asked.requests == [
        ("GET", f"{root}?prefix=r%2F&uploads="),
        ("GET", f"{root}?key-marker=r%2Fa&prefix=r%2F&upload-id-marker=1&uploads="),
        ("DELETE", f"{root}/r/b%20c?uploadId=2"),
    ]
    assert asked.released == 3
    for more in asked.more:
        assert more["timeout"] == 60 and more["preload_content"] is False
        assert more["headers"]["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AWS-key/")
        retries = more["retries"]
        assert (retries.total, retries.backoff_factor) == (3, 0.5)
        assert set(retries.status_forcelist) == {500, 502, 503, 504}


def test_a_store_that_gives_the_same_page_for_ever_is_not_asked_for_ever(keys: pytest.MonkeyPatch):
    asked = Asked(*[(200, page(("a", "1"), following=("a", "1")))] * 2)
    keys.setattr("urllib3.request", asked)
    assert len(UnfinishedUploads("s3://bucket").list(begun_before=timedelta(0))) == 2
    assert "prefix=&" in asked.requests[0][1], "a bucket as a whole has no prefix"


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (401, "who?", AccessDenied),
        (403, "<Code>AccessDenied</Code>", AccessDenied),
        (404, "<Code>NoSuchBucket</Code>", PermanentStoreError),
        (301, "elsewhere", PermanentStoreError),
        (0, "cut", StoreUnreachable),
        (200, "no xml", StoreUnreachable),
        (200, "<?xml version='1.0' encoding='none'?><a/>", StoreUnreachable),
    ],
)
def test_each_answer_of_a_store_that_is_no_list_is_told(
    keys: pytest.MonkeyPatch, status: int, content: str, kind: type[OSError]
):
    keys.setattr("urllib3.request", Asked((status, content)))
    with pytest.raises(StoreUnreachable) as told:
        UnfinishedUploads("s3://bucket/run").list()
    assert type(told.value) is kind


def test_an_upload_that_is_gone_is_ended_and_one_that_may_not_be_is_told(keys: pytest.MonkeyPatch):
    gone = UnfinishedUpload(key="a", upload="1", begun=datetime(2026, 1, 1, tzinfo=UTC))
    keys.setattr("urllib3.request", Asked((404, "<Code>NoSuchUpload</Code>"), (400, "no"), (403, "no")))
    uploads = UnfinishedUploads("gs://bucket")
    uploads.end(gone)
    with pytest.raises(PermanentStoreError, match="400 no"):
        uploads.end(gone)
    with pytest.raises(AccessDenied):
        uploads.end(gone)


@pytest.mark.parametrize(
    ("url", "environment", "begins", "signed_for"),
    [
        ("s3://b", {}, "https://s3.us-east-1.amazonaws.com/b?", "AWS-key/*/us-east-1/"),
        ("s3://b", {"AWS_DEFAULT_REGION": "eu-1"}, "https://s3.eu-1.amazonaws.com/b?", "AWS-key/*/eu-1/"),
        (
            "s3://b",
            {"AWS_DEFAULT_REGION": "eu-1", "AWS_REGION": "eu-2"},
            "https://s3.eu-2.",
            "AWS-key/*/eu-2/",
        ),
        ("s3://b", {"AWS_ENDPOINT": "http://one/"}, "http://one/b?", "AWS-key/*/us-east-1/"),
        (
            "s3://b",
            {"AWS_ENDPOINT": "http://one", "AWS_ENDPOINT_URL": "http://two"},
            "http://two/b?",
            "AWS-key/",
        ),
        ("gs://b", {"AWS_ENDPOINT": "http://one"}, "https://storage.googleapis.com/b?", "GS-key/*/auto/"),
        ("gs://b", {"GOOGLE_BASE_URL": "http://g"}, "http://g/b?", "GS-key/*/auto/"),
    ],
)
def test_each_store_is_asked_where_it_is_with_its_own_keys(
    keys: pytest.MonkeyPatch, url: str, environment: dict[str, str], begins: str, signed_for: str
):
    for name, value in environment.items():
        keys.setenv(name, value)
    asked = Asked((200, page()))
    keys.setattr("urllib3.request", asked)
    assert UnfinishedUploads(url).list() == []
    assert asked.requests[0][1].startswith(begins)
    credential = asked.more[0]["headers"]["authorization"].partition("Credential=")[2]
    before, _, after = signed_for.partition("*")
    assert credential.startswith(before) and after in credential


@pytest.mark.parametrize(("url", "token"), [("s3://b", "a-session"), ("gs://b", None)])
def test_the_token_of_a_session_goes_to_aws_alone(keys: pytest.MonkeyPatch, url: str, token: str | None):
    keys.setenv("AWS_SESSION_TOKEN", "a-session")
    asked = Asked((200, page()))
    keys.setattr("urllib3.request", asked)
    UnfinishedUploads(url).list()
    headers = asked.more[0]["headers"]
    assert headers.get("x-amz-security-token") == token
    assert (";x-amz-security-token," in headers["authorization"]) is (token is not None)


@pytest.mark.parametrize("missing", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_half_a_pair_of_keys_signs_nothing(keys: pytest.MonkeyPatch, missing: str):
    keys.delenv(missing)
    with pytest.raises(AccessDenied, match="only with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        UnfinishedUploads("s3://bucket/run").list()


def test_an_upload_counts_as_abandoned_from_the_very_second_on_by_the_stores_clock():
    tree = _parsed(page(("a", "1")).encode())
    for date, count in (
        ("Fri, 02 Jan 2026 00:00:00 GMT", 1),
        ("Thu, 01 Jan 2026 23:59:59 GMT", 0),
        (None, 1),
    ):
        found = _begun_before(tree, date, ABANDONED_AFTER)
        assert [(one.key, one.upload, one.begun.isoformat()) for one in found] == [
            ("a", "1", "2026-01-01T00:00:00+00:00")
        ] * count
