"""How much of what was read is worth keeping until it is read again: Belady's MIN with bypass, for a known future.

Between two consecutive reads of the same bytes lies an *interval* of the plan. Keeping them over the interval saves
fetching them at its end, and costs their size at every moment of it. To save the most bytes in a cache of a given
size, take the intervals in the order of their ends and keep each one for which there is room at every moment
(Belady, IBM Systems Journal 1966; as an occupancy test: Jain and Lin, "Back to the Future" (Hawkeye), ISCA 2016). The
entries of a plan are appended in order, and each ends one interval at most, so this is one pass, made as the plan
is unrolled. Bytes are divisible: where all of a file does not fit, as much of it as fits is kept.

In a plan of epochs this keeps what the next epoch reads first. If the order is the same in every epoch, that
alone would be a trap: the hits of an epoch would all come in its beginning, when the pipe idles for want of space to
fetch into, and the misses all at its end, when it cannot keep up. So room is left, at every moment, for what a pipe
of constant rate must have fetched by then: the *stock*. It follows from where the misses of an epoch lie, and
in the next epoch it makes the pass keep files evenly. An order that is reshuffled has that room anyway.

Positions are those of the plan's entries. Long plans are looked at in buckets of entries, which errs on the side of
keeping less.
"""

from __future__ import annotations

MAX_BUCKETS = 512
"""Per epoch. An interval costs its number of buckets, some 10 us in all; the error is two buckets of an epoch, 0.4 % of
the dataset, at most."""


RESERVE_SHARE = 20
RESERVE_MIN_BYTES = 32 * 1024 * 1024
RESERVE_MIN_SHARE, RESERVE_MAX_SHARE = 32, 4
"""What is never kept for later, for fetches to land in: a twentieth of what an epoch has to fetch at least, so that it
costs a twentieth more bytes at most, whatever the size of the cache. It takes up the latency and the jitter of S3:
without it, the pipe idles for want of space. So it is at least what a fast pipe has in flight, 32 MiB, or of a small
cache a thirty-second; and a quarter of the cache at most."""


def reserve_bytes(capacity_bytes: int, epoch_bytes: int) -> int:
    """What of a cache should not be kept from one reading to the next.

    Args:
        epoch_bytes: what an epoch reads.
    """
    wanted_bytes = (epoch_bytes - capacity_bytes) // RESERVE_SHARE
    least_bytes = min(RESERVE_MIN_BYTES, capacity_bytes // RESERVE_MIN_SHARE)
    return min(max(wanted_bytes, least_bytes), capacity_bytes // RESERVE_MAX_SHARE)


class Retention:
    """See the module's docstring.

    Args:
        capacity_bytes: what may be kept at any moment; a change holds for entries that are yet to be appended.
        epoch_entries: entries of the longest epoch.
    """

    def __init__(self, capacity_bytes: int, epoch_entries: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._bucket_entries = -(-epoch_entries // MAX_BUCKETS)
        self._base = 0  # number of the first bucket of the lists below
        self._room: list[int] = []  # bytes that may still be kept there
        self._read: list[int] = []  # bytes read there
        self._missed: list[int] = []  # of them, bytes that must be fetched

    def append(self, position: int, size_bytes: int, previous: int | None, present_bytes: int = 0) -> int:
        """Take in the next entry of the plan.

        Args:
            position: of the entry; larger than any before. size_bytes: of what it reads.
            previous: position of the last entry that reads the same bytes; None if that is unknown.
            present_bytes: without a previous one: what is in the cache, and stays.

        Returns:
            How many bytes to keep from `previous` on until they are read here.
        """
        bucket = position // self._bucket_entries
        while self._base + len(self._room) <= bucket:
            self._room.append(self.capacity_bytes)
            self._read.append(0)
            self._missed.append(0)
        kept_bytes = 0
        if previous is not None:
            first = max(0, previous // self._bucket_entries - self._base)
            last = max(first, (position - 1) // self._bucket_entries - self._base) + 1
            kept_bytes = max(0, min(size_bytes, *self._room[first:last]))
            if kept_bytes:
                self._room[first:last] = [room - kept_bytes for room in self._room[first:last]]
        self._read[-1] += size_bytes
        self._missed[-1] += size_bytes - max(kept_bytes, present_bytes)
        return kept_bytes

    def end_epoch(self, start: int) -> float:
        """All entries of an epoch, from position `start` on, are appended: leave room for the stock in it.

        Returns:
            The share of its bytes that must be fetched.
        """
        first = max(0, start // self._bucket_entries - self._base)
        read_bytes = sum(self._read[first:])
        share_missed = sum(self._missed[first:]) / read_bytes if read_bytes else 0.0
        stock_bytes = 0.0
        for bucket in range(len(self._room) - 1, first - 1, -1):
            stock_bytes = max(0.0, stock_bytes + self._missed[bucket] - share_missed * self._read[bucket])
            self._room[bucket] -= int(stock_bytes)
        return share_missed

    def forget_before(self, position: int) -> None:
        """No interval will begin before this position any more."""
        gone = position // self._bucket_entries - self._base
        if gone > len(self._room) // 4:
            self._base += gone
            del self._room[:gone], self._read[:gone], self._missed[:gone]
