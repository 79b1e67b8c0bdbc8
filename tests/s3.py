"""An S3 server with a bucket, and a proxy before it."""

import pytest

from recycle_pp.testing.s3_server import Proxy, S3Server


@pytest.fixture(scope="module")
def server():
    with S3Server() as server:
        server.url("bucket")
        yield server


@pytest.fixture
def proxy(server):
    with Proxy(server) as proxy:
        yield proxy
