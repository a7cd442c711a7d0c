"""s3prefetchfs: an S3 bucket as local files, cached on disk and read ahead of the training job.

This page is the map of the house. One synchronous state machine decides; everything else obeys.

    cli/            what a person types. One file per verb. Loads nothing heavy: `--help` is instant.
    daemon.py       puts the parts together, nests their lifetimes, handles signals.
    control.py      the files under .s3prefetchfs/ inside the mount.
    fuse/           what the kernel sees: adapter.py translates, kernel.py mounts; mounts.py and holders.py
                    read /proc, for the commands too.
    catalog.py      directories and attributes, filled from S3 listings.
    engine.py       trio: feeds events to the scheduler and carries out its instructions.
    s3/             pool.py owns the worker processes; worker.py and client.py run in them.
    store/          the cache directory: sparse files, their index, recovery.
    core/           pure decisions: no clock, no file, no await.
    config.py       every option, once; sources.py reads them from flags, environment and files.
    errors.py, wire.py, metrics.py, log.py, notify.py, units.py

Imports only go down this list; `tests/test_layers.py` reads them and checks. A byte travels: S3, a worker, a
cache file, the kernel's page cache, the reader. It never crosses a pipe between our processes, and no Python
of ours runs in the reader.

To learn the code, read `core/extent.py` (the words), the scheduler in `core/` (the rules), `engine.py` (who obeys),
`s3/worker.py` and `store/` (where bytes go), `fuse/adapter.py` (what the kernel sees), and this `cli/`.
"""

__version__ = "0.1.0"
