"""Multipart uploads that were cut short: found at a real S3 API, ended by prune, signed as AWS signs."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace

import pytest
from tests.checkpoint.object_store import ObjectStore

from bloomery.checkpoint.save.direct import save_checkpoint
from bloomery.cli import main
from bloomery.config.environment import OfflineRefused
from bloomery.events.run_directory import RunDirectory
from bloomery.objects import Objects
from bloomery.objects.refusals import AccessDenied, StoreUnreachable
from bloomery.objects.uploads import UnfinishedUploads

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
    with pytest.raises(OfflineRefused):
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
