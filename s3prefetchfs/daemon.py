"""The composition root: builds the parts of one mount, nests their lifetimes, and takes them down again.

Lifetimes, outermost first: the cache directory, the worker processes, the catalog and the engine, the mount. The
order is the promise made to the user: whatever cannot work (no such bucket, a cache in use, no /dev/fuse) is found
before anything is mounted, and the mount is gone before what serves it.
"""

from __future__ import annotations

import gc
import logging
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from s3prefetchfs import notify
from s3prefetchfs.catalog import Catalog
from s3prefetchfs.config import Config
from s3prefetchfs.control import Control, Status
from s3prefetchfs.core.extent import CHUNK_BYTES
from s3prefetchfs.core.namespace import Namespace
from s3prefetchfs.core.opens import OpensRecord
from s3prefetchfs.core.scheduler import Scheduler
from s3prefetchfs.engine import Engine
from s3prefetchfs.errors import FailureKind, RequestError, UserError, only
from s3prefetchfs.fuse import kernel
from s3prefetchfs.fuse.adapter import Adapter
from s3prefetchfs.fuse.directories import Directories
from s3prefetchfs.fuse.holders import find_holders
from s3prefetchfs.fuse.mounts import unmount
from s3prefetchfs.fuse.passthrough import Passthrough
from s3prefetchfs.metrics import Metrics
from s3prefetchfs.plans import Plans
from s3prefetchfs.s3.client import ClientSettings
from s3prefetchfs.s3.pool import Pool
from s3prefetchfs.store.store import Store
from s3prefetchfs.units import format_size

log = logging.getLogger(__name__)

FREE_SHARE_KEPT = 10
"""Without --cache-size, one part in ten of the free space is left to others."""

INDEX_BYTES = 8 * 1024 * 1024
INDEX_SHARE = 1024
INDEX_MAX_SHARE = 16
"""Set aside for the index and its journal, so that all that is in the directory keeps to --cache-size: 8 MiB and a
thousandth, but a sixteenth at most. A terabyte takes 45 MB in files of 1 GB, and 400 MB in files of 1 MB."""

STATUS_INTERVAL_S = 10.0
"""How often systemd's one-line status is renewed."""

STOP_TIMEOUT_S = 5.0
"""What the workers and the index get to finish; then the daemon ends without them."""


def run(config: Config, on_ready: Callable[..., None]) -> int:
    """Mount, serve until unmounted, clean up.

    Args:
        config: of the mount; its mountpoint was checked.
        on_ready: called once the mount is usable, with what its user should know, each a line of text.

    Returns:
        The exit code of the process.

    Raises:
        UserError: the mount cannot work; nothing is mounted then.
    """
    _raise_file_limit()
    # The namespace holds millions of objects that no cycle leads to: look for garbage rarely.
    gc.set_threshold(100_000, 20, 50)
    try:
        return trio.run(_serve, config, on_ready)
    except BaseExceptionGroup as group:
        error = only(UserError, group)
        if error is None:
            raise
    raise error


async def _serve(config: Config, on_ready: Callable[..., None]) -> int:
    metrics = Metrics()
    engine: Engine
    pool = Pool(
        _client_settings(config),
        processes=config.worker_processes,
        connections=config.max_connections,
        on_message=lambda message: engine.receive(message),
    )
    async with trio.open_nursery() as workers:
        await workers.start(pool.run)
        namespace = Namespace(config.prefix.encode(), config.metadata_ttl_s)
        catalog = Catalog(namespace, pool, config.retry_timeout_s, metrics, kernel.forget_name)
        warnings = await _check_bucket(config, catalog)
        # Not every endpoint is in the configuration: a profile may name one. Two must not share a cache.
        directory = config.cache_dir / replace(config, endpoint_url=pool.endpoint_url).identity
        store = await trio.to_thread.run_sync(Store, directory)
        with closing(store):
            warnings += _check_cache_size(config, store)
            scheduler = Scheduler(
                capacity_bytes=_capacity_bytes(config, store),
                max_connections=config.max_connections,
                max_throughput_bytes_per_s=config.max_throughput_bytes_per_s,
                retry_timeout_s=config.retry_timeout_s,
            )
            engine = Engine(store, scheduler, pool.get, catalog.version_gone, metrics)
            async with trio.open_nursery() as services:
                await services.start(engine.run)
                await services.start(catalog.run)
                plans = Plans(config, directory, catalog, engine)
                await services.start(plans.run)
                await plans.restore()
                await plans.submit_files(config.plans)
                status = Status(config, metrics, engine, catalog, pool)
                opens = OpensRecord()

                async def opens_json() -> bytes:
                    return await trio.to_thread.run_sync(opens.freeze().to_json)

                control = Control({b"status.json": status.json, b"opens": opens_json}, plans)
                directories = Directories(catalog)
                services.start_soon(directories.run)
                passthrough = Passthrough(metrics.kernel)
                adapter = Adapter(config, engine, catalog, control, directories, passthrough, metrics, opens)
                connection = kernel.Connection(adapter, config, passthrough, metrics.kernel)
                try:
                    await _session(config, connection, status, partial(on_ready, *warnings))
                finally:
                    connection.close()
                    services.cancel_scope.cancel()
        workers.cancel_scope.cancel()
    return 0


async def _session(config: Config, connection: kernel.Connection, status: Status, on_ready: Callable[[], None]) -> None:
    """Serve FUSE requests until the filesystem is unmounted."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_watch_signals, config, nursery.cancel_scope)
        nursery.start_soon(_tell_systemd, status)

        async def announce() -> None:
            # Not ready before the kernel got an answer from us: this asks for the root, so never in this thread.
            await trio.to_thread.run_sync(connection.tune, abandon_on_cancel=True)
            log.info("mounted s3://%s/%s on %s", config.bucket, config.prefix, config.mountpoint)
            notify.notify("READY=1", f"STATUS=serving s3://{config.bucket}/{config.prefix}")
            on_ready()

        nursery.start_soon(announce)
        await connection.serve()
        nursery.cancel_scope.cancel()
    notify.notify("STOPPING=1")
    log.info("unmounted %s", config.mountpoint)


async def _watch_signals(config: Config, session: trio.CancelScope) -> None:
    """Signals that end a process unmount. While the mount is in use they say by whom; the second one detaches it."""
    for stray in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(stray, signal.SIG_IGN)  # meant for somebody else: a dead mountpoint is no answer
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT) as signals:
        asked = 0
        async for number in signals:
            asked += 1
            log.info("%s: unmounting %s", signal.Signals(number).name, config.mountpoint)
            try:
                await trio.to_thread.run_sync(_unmount, config.mountpoint, asked > 1, abandon_on_cancel=True)
            except OSError as error:
                log.warning("cannot unmount %s: %s", config.mountpoint, error.strerror)
                for holder in await trio.to_thread.run_sync(find_holders, config.mountpoint, abandon_on_cancel=True):
                    log.warning("held by %s", holder)
                log.warning("stop what holds it, or send the signal again to detach the mount from under it")
                continue
            if asked > 1:
                await trio.sleep(STOP_TIMEOUT_S)
                session.cancel()


def _unmount(mountpoint: Path, lazy: bool) -> None:
    unmount(mountpoint, lazy=lazy)


async def _tell_systemd(status: Status) -> None:
    while True:
        await trio.sleep(STATUS_INTERVAL_S)
        document = status.document()
        served, fetched = document["reads"]["bytes_served"], document["fetch"]["bytes"]
        notify.notify(f"STATUS=served {served / 1e9:.1f} GB, fetched {fetched / 1e9:.1f} GB from S3")


async def _check_bucket(config: Config, catalog: Catalog) -> list[str]:
    """Ask S3 for one key of the prefix; nothing is mounted on a bucket that does not answer. Returns warnings.

    Raises:
        UserError: it does not, and why.
    """
    where = f"s3://{config.bucket}/{config.prefix}"
    try:
        found = await catalog.check(config.prefix, config.mount_timeout_s)
    except RequestError as error:
        raise UserError(f"cannot read {where}: {error}", _HINTS.get(error.kind, "")) from None
    if found:
        return []
    log.warning("%s has no keys yet", where)
    advice = "; check its name: a prefix is a directory, not an object" if config.prefix else ""
    return [f"{where} has no keys yet{advice}"]


_HINTS = {
    FailureKind.NOT_FOUND: "check the bucket's name, and --endpoint-url or --region",
    FailureKind.DENIED: "these credentials may not list it: choose a --profile, or mount a prefix they may list",
    FailureKind.CREDENTIALS: "set AWS_PROFILE or --profile, log in, or pass --no-sign-request for a public bucket",
    FailureKind.CONNECTION: "check --endpoint-url, the network, and HTTPS_PROXY / NO_PROXY",
    FailureKind.TIMEOUT: "check --endpoint-url, the network, and HTTPS_PROXY / NO_PROXY",
}


def _client_settings(config: Config) -> ClientSettings:
    return ClientSettings(
        bucket=config.bucket,
        endpoint_url=config.endpoint_url,
        region=config.region,
        profile=config.profile,
        sign_requests=config.sign_requests,
        requester_pays=config.requester_pays,
        addressing_style=config.addressing_style,
        connect_timeout_s=min(config.stall_timeout_s, 5.0),
        stall_timeout_s=config.stall_timeout_s,
    )


def _check_cache_size(config: Config, store: Store) -> list[str]:
    """Warnings of a cache that its disk cannot hold."""
    asked_bytes = config.cache_size_bytes
    if asked_bytes is None or asked_bytes <= shutil.disk_usage(config.cache_dir).free:
        return []
    fits_bytes = _fitting_bytes(config, store)
    if asked_bytes <= fits_bytes:
        return []
    asked, fits = format_size(asked_bytes), format_size(fits_bytes)
    warning = f"--cache-size is {asked}, but the disk of {config.cache_dir} has room for {fits}"
    log.warning(warning)
    return [warning]


def _fitting_bytes(config: Config, store: Store) -> int:
    """What is free on the disk, or already ours."""
    ours_bytes = CHUNK_BYTES * sum(found.resident.count(1) for found in store.recovered())
    return shutil.disk_usage(config.cache_dir).free + ours_bytes


def _capacity_bytes(config: Config, store: Store) -> int:
    """What the cache may hold: what was asked for, or nine tenths of what fits; less the index."""
    size_bytes = config.cache_size_bytes
    if size_bytes is None:
        fits_bytes = _fitting_bytes(config, store)
        size_bytes = fits_bytes - fits_bytes // FREE_SHARE_KEPT
    return size_bytes - min(size_bytes // INDEX_MAX_SHARE, INDEX_BYTES + size_bytes // INDEX_SHARE)


def _raise_file_limit() -> None:
    """One descriptor for each cached file that is being read: take all the hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
