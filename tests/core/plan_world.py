"""A simulated world around a scheduler that has a plan, in which the invariants are checked after every event."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from s3prefetchfs.core.plan import Epoch, Order, Plan, PlannedFile
from s3prefetchfs.simulation.network import FIRST_BYTE_S, Network
from s3prefetchfs.simulation.world import World

MIB = 1024 * 1024
FAST_BYTES_PER_S = 1e9


def plan_of(
    orders: Sequence[Sequence[int]],
    *,
    interleave: int = 4,
    order: Order = Order.STRICT,
    ranges: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """A plan over files 0, 1, ...; `ranges` gives offset and length of each entry, flat, for each epoch."""
    epochs = tuple(
        Epoch(memoryview(array("I", entries)), None if ranges is None else memoryview(array("Q", ranges[number])))
        for number, entries in enumerate(orders)
    )
    files = [PlannedFile(str(number)) for number in range(1 + max(max(entries) for entries in orders))]
    return Plan("plan", order, interleave, files, epochs)


class PlanWorld(World):
    """See the module's docstring.

    Args:
        bytes_per_s: of the network, and of each connection. first_byte_s: of each request.
    """

    def __init__(
        self,
        capacity_bytes: int,
        sizes: Sequence[int],
        *,
        bytes_per_s: float = FAST_BYTES_PER_S,
        first_byte_s: float = FIRST_BYTE_S,
        connections: int = 16,
        passthrough: bool = False,
    ) -> None:
        network = Network(bytes_per_s, lambda: first_byte_s, bytes_per_s)
        super().__init__(capacity_bytes, sizes, network, connections=connections, passthrough=passthrough)

    def told(self) -> None:
        self.scheduler.check()

    def read_epoch(self, order: Sequence[int], *, interleave: int, bytes_per_s: float) -> float:
        """Read whole files; returns the share of the time in which nobody waited."""
        began_s, waited_s = self.now, self.waited_s
        self.train([(number, 0, 0) for number in order], interleave=interleave, bytes_per_s=bytes_per_s)
        return 1 - (self.waited_s - waited_s) / (self.now - began_s)
