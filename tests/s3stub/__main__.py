"""Start the stand-in: python -m tests.s3stub --root DIR [--port N] [KNOB=VALUE ...]

Values are JSON, or else taken as text: page_size=2 latency=lognormal:27:0.6 'faults=[{"status":503,"first":2}]'.
One JSON line with port and pid says that it listens. It ends when its stdin closes or with SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.s3stub.server import Server


def _knob(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is not KNOB=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


async def _serve(root: Path, port: int, knobs: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = Server(root, port)
    server.configure(knobs)
    print(json.dumps({"port": server.port, "pid": os.getpid()}), flush=True)

    def stdin_is_readable() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            stopped.set()

    loop.add_reader(sys.stdin, stdin_is_readable)
    await stopped.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.s3stub", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory for stored bytes")
    parser.add_argument("--port", type=int, default=0, help="0 chooses one")
    parser.add_argument("knobs", type=_knob, nargs="*", metavar="KNOB=VALUE", help="see tests/s3stub/knobs.py")
    arguments = parser.parse_args()
    try:
        asyncio.run(_serve(arguments.root, arguments.port, dict(arguments.knobs)))
    except (ValueError, OSError) as error:
        sys.exit(f"s3stub: {error}")


if __name__ == "__main__":
    main()
