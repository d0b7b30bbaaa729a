"""moto's S3 on loopback, in a thread; the process's environment says where it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import boto3
import pytest
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

BUCKET = "bucket"


class S3(NamedTuple):
    """`url`: of a bucket that was empty."""

    url: str
    server: ThreadedMotoServer


@contextmanager
def s3_server() -> Iterator[S3]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_REGION", "us-east-1")
        client().create_bucket(Bucket=BUCKET)
        try:
            yield S3(f"s3://{BUCKET}/headrace", server)
        finally:
            # What it holds is the process's, not the server's.
            s3_backends.reset()
            server.stop()


def client() -> "boto3.client":
    return boto3.client("s3", region_name="us-east-1")


def unfinished_uploads() -> list[str]:
    """Names of objects whose parts are kept and not yet one."""
    return [upload["Key"] for upload in client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])]
