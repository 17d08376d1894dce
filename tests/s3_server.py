"""A real S3 protocol on loopback, for as long as a context is open: moto's server in a process of its own."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "pictures"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment that leads obstore to a server with one empty bucket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _make_bucket(f"{address}/{BUCKET}", server)
        keys = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret-0451"}
        yield keys | {"AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": address}
    finally:
        server.kill()
        server.wait()


def _make_bucket(url: str, server: "subprocess.Popen[bytes]") -> None:
    until = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10).close()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < until, "the S3 server does not start"
            time.sleep(0.05)


def without_proxies() -> dict[str, str]:
    """The environment of a process that must reach loopback itself."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
