"""The client behind TLS: the same bytes, and a server that is not to be trusted."""

from __future__ import annotations

import asyncio
import queue
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from s3prefetchfs.errors import FailureKind, RequestError
from s3prefetchfs.s3.client import Client
from tests.s3.conftest import read_until_it_breaks
from tests.s3stub import S3Stub, ramp

MIB = 1 << 20


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1 and its key, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    path = tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=s3 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [*command.split(), "-keyout", path, "-out", tmp_path / "public.pem"], check=True, capture_output=True
    )
    path.write_bytes(path.read_bytes() + (tmp_path / "public.pem").read_bytes())
    return path


@pytest.fixture
def tls_url(s3: S3Stub, certificate: Path) -> Iterator[str]:
    """The stand-in behind a TLS relay."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    upstream = urlsplit(s3.endpoint_url)
    addresses: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_s3, to_s3 = await asyncio.open_connection(upstream.hostname, upstream.port)
        await asyncio.gather(pump(reader, to_s3), pump(from_s3, writer))

    async def serve() -> None:
        async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context) as server:
            addresses.put(server.sockets[0].getsockname()[1])
            await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    yield f"https://127.0.0.1:{addresses.get(timeout=20)}"
    loop.call_soon_threadsafe(stopped.set)
    thread.join()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


def test_bytes_over_tls(
    s3: S3Stub,
    make_client: Callable[..., Client],
    tls_url: str,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With AWS_CA_BUNDLE the certificate is good; every byte before a stall is there."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    client = make_client(endpoint_url=tls_url)
    etag = s3.put_ramp("tls", 4 * MIB)
    body = client.open_range("tls", etag, 4 * MIB, MIB, 4 * MIB)
    buffer = memoryview(bytearray(3 * MIB))
    at = 0
    while at < 3 * MIB:
        at += body.readinto(buffer[at:])
    body.close()
    assert buffer == ramp(MIB, 4 * MIB)
    s3.configure(faults=[{"stall_after": 100_000}])
    data, error = read_until_it_breaks(client.open_range("tls", etag, 4 * MIB, 0, MIB))
    assert error.kind is FailureKind.TIMEOUT
    assert data == ramp(0, 100_000)


def test_a_certificate_that_nobody_vouches_for(make_client: Callable[..., Client], tls_url: str) -> None:
    """The text says so."""
    with pytest.raises(RequestError, match="CERTIFICATE_VERIFY_FAILED") as caught:
        make_client(endpoint_url=tls_url).list_page("", None, None, 1)
    assert caught.value.kind is FailureKind.CONNECTION
