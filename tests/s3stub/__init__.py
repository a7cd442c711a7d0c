"""An S3 server for tests and benchmarks: its own process, real HTTP/1.1, and faults on demand.

    with S3Stub(tmp_path, latency_ms=30, rate_per_connection=90e6) as s3:
        s3.put_ramp("shard-0", 256 << 20)
        s3.configure(faults=[{"verb": "GET", "first": 2, "reset_after": 1 << 20}])
        ...  # any S3 client at s3.endpoint_url
        assert [r.range for r in s3.log("GET")] == [...]

Reading order: `knobs` (what it can be told to do wrong), `bucket` (what it holds), `service` and `listing` (S3's
rules, pure), `shaping` (how fast), `server` (sockets), `control` and `handle` (how a test speaks to it), `log`. They
use the standard library only. `probe` is what its own tests look at it with. It is not a store: what it holds is gone
when it ends, and signatures are never checked.
"""

from __future__ import annotations

from tests.s3stub.bucket import ramp
from tests.s3stub.handle import S3Stub
from tests.s3stub.log import Record, most_at_once

__all__ = ["Record", "S3Stub", "most_at_once", "ramp"]
