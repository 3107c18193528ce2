"""A real S3 API on loopback for tests: moto's server, in this process, on a port that the system chose."""

import os
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test-access-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret-access-key",
    "AWS_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_UNLIMITED = 10**9


class ObjectStore:
    """A server with buckets."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"

    def new_bucket(self) -> str:
        """Return the URL of an empty bucket."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self._ask(f"/{name}", method="PUT")
        return f"s3://{name}"

    def put(self, path: str, data: bytes | None = None) -> None:
        """Make a bucket (/BUCKET) or an object (/BUCKET/KEY)."""
        self._ask(path, method="PUT", data=data)

    @contextmanager
    def checking_credentials(self) -> Iterator[None]:
        """Refuse whatever is not signed by a known user; there is none."""
        self._ask("/moto-api/reset-auth", method="POST", data=b"0")
        try:
            yield
        finally:
            self._ask("/moto-api/reset-auth", method="POST", data=str(_UNLIMITED).encode())

    def _ask(self, path: str, *, method: str, data: bytes | None = None) -> None:
        headers = {"Content-Type": "application/octet-stream"}
        request = urllib.request.Request(self.endpoint + path, method=method, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()


@contextmanager
def serving() -> Iterator[ObjectStore]:
    """Run a server; its address and credentials are in the environment meanwhile."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    store = ObjectStore(server.get_host_and_port()[1])
    before = dict(os.environ)
    os.environ |= ENVIRONMENT | {"AWS_ENDPOINT_URL": store.endpoint}
    try:
        yield store
    finally:
        os.environ.clear()
        os.environ |= before
        server.stop()
