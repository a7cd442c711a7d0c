"""The files under `.s3prefetchfs/` in the mount: what the daemon says of itself.

The directory is at the root of the mount, is not listed there, and is reachable by name. So everything that can
read a file can ask, from any container that sees the mount, and there is no socket, port or protocol to secure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

from s3prefetchfs import __version__
from s3prefetchfs.catalog import Catalog
from s3prefetchfs.config import Config
from s3prefetchfs.engine import Engine
from s3prefetchfs.metrics import Metrics
from s3prefetchfs.s3.pool import Pool

DIRECTORY_NAME = b".s3prefetchfs"
DIRECTORY_INO = 2
FIRST_FILE_INO = 3
"""Inodes of the tree are hashes with the top bit set; small numbers are the root's (1) and ours."""


class Control:
    """The control directory: names, inodes and contents of its files.

    Args:
        files: name to a function that makes the content at the moment of opening.
    """

    def __init__(self, files: dict[bytes, Callable[[], bytes]]) -> None:
        self._contents = list(files.values())
        self.inodes = {name: FIRST_FILE_INO + number for number, name in enumerate(files)}

    def is_file(self, ino: int) -> bool:
        """Whether the inode is one of the control files."""
        return FIRST_FILE_INO <= ino < FIRST_FILE_INO + len(self._contents)

    def content(self, ino: int) -> bytes:
        """What the file says now."""
        return self._contents[ino - FIRST_FILE_INO]()


class Status:
    """Builds the status document from those who know.

    Args:
        config, metrics, engine, catalog, pool: of this mount.
    """

    def __init__(self, config: Config, metrics: Metrics, engine: Engine, catalog: Catalog, pool: Pool) -> None:
        self._config = config
        self._metrics = metrics
        self._engine = engine
        self._catalog = catalog
        self._pool = pool
        self._started_s = time.monotonic()

    def document(self) -> dict[str, Any]:
        """The figures of this moment; docs/status.md names each. Sizes in bytes, times as the names say."""
        config, metrics = self._config, self._metrics
        scheduler = self._engine.snapshot()
        workers = self._pool.statistics()
        counts = self._catalog.counts()
        return {
            "version": __version__,
            "bucket": config.bucket,
            "prefix": config.prefix,
            "mountpoint": str(config.mountpoint),
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "cache": {
                "capacity_bytes": scheduler.capacity_bytes,
                "used_bytes": scheduler.used_bytes,
                "objects": scheduler.objects,
                "complete_objects": scheduler.complete_objects,
                "evictions": scheduler.evictions,
                "corrupt_chunks": scheduler.corrupt_chunks,
            },
            "fetch": {
                "requests": metrics.requests,
                "bytes": metrics.fetched_bytes,
                "in_flight": scheduler.fetches_in_flight,
                "backing_off": scheduler.fetches_backing_off,
                "to_memory": scheduler.memory_fetches,
                "retries": scheduler.retries,
                "errors": metrics.errors,
                "first_byte_ms_p50": metrics.first_byte_ms(0.5),
                "first_byte_ms_p99": metrics.first_byte_ms(0.99),
            },
            "reads": {
                "opens": metrics.opens,
                "open": scheduler.open_handles,
                "bytes_served": metrics.bytes_served,
                "bytes_waited_for": metrics.bytes_waited_for,
                "wait_s": round(metrics.wait_s, 6),
                "waiting": scheduler.reads_waiting,
                "failed": scheduler.failed_reads,
                "handler_errors": metrics.handler_errors,
            },
            "kernel": {
                "passthrough": "on" if metrics.kernel.passthrough else "off",
                "reason": metrics.kernel.reason,
                "opens_passthrough": metrics.kernel.opens_passthrough,
                "opens_normal": metrics.kernel.opens_normal,
                "read_ahead_kb": metrics.kernel.read_ahead_kb,
                "max_background": metrics.kernel.max_background,
            },
            "namespace": {
                "objects": counts.objects,
                "directories": counts.directories,
                "hidden_keys": counts.hidden_keys,
                "shadowed_keys": counts.shadowed_keys,
                "inodes": self._catalog.inodes,
                "lists": metrics.lists,
                "heads": metrics.heads,
            },
            "workers": {
                "processes": workers.processes,
                "connections_in_use": workers.connections_in_use,
                "connections_limit": workers.connections_limit,
                "restarts": workers.restarts,
            },
        }

    def json(self) -> bytes:
        """The document as a file."""
        return json.dumps(self.document(), indent=2).encode() + b"\n"
