"""sd_notify: telling systemd, or any supervisor that speaks its protocol, how this process is.

One datagram to the socket named by NOTIFY_SOCKET; see sd_notify(3). The daemon calls it from its main task.
"""

from __future__ import annotations

import logging
import os
import socket

_SEND_TIMEOUT_S = 1.0
"""The supervisor's queue may be full for a moment; a hung supervisor must not hang the filesystem."""

_logger = logging.getLogger(__name__)


def notify(*assignments: str) -> bool:
    """Send assignments such as `READY=1` or `STATUS=text` to the supervisor.

    Returns:
        Whether they were sent. Without a NOTIFY_SOCKET nothing is; a failure is logged, never raised.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):  # the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(_SEND_TIMEOUT_S)
            sender.sendto("\n".join(assignments).encode(), address)
    except OSError as error:
        _logger.warning("cannot notify the supervisor: %s", error)
        return False
    return True
