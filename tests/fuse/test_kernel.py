"""How the daemon waits for requests: awake where they follow one another closely, else asleep. The clock is ours."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import trio

from s3prefetchfs.fuse import kernel
from s3prefetchfs.fuse.kernel import CLOSE_S, YIELD_S, _Patience


class Rig:
    """A device that is readable while `requests` are in it, and a clock that moves on by `tick_s` at each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device_fd, self.requests_fd = os.pipe()
        self.now_s = 1.0
        self.tick_s = CLOSE_S / 10
        self.sleep_s = 0.0
        self.slept = 0
        monkeypatch.setattr(kernel.time, "perf_counter", self._clock)
        self.patience = _Patience(self.device_fd, self._sleep)

    def _clock(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    async def _sleep(self) -> bool:
        self.slept += 1
        self.now_s += self.sleep_s
        return True

    def waits(self, sleep_s: float = 0.0) -> int:
        """Wait once, asleep for so long if at all; how often it has slept so far."""
        self.sleep_s = sleep_s
        assert trio.run(self.patience.wait)
        return self.slept


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(monkeypatch)
    yield made
    os.close(made.device_fd)
    os.close(made.requests_fd)


def test_who_comes_rarely_is_waited_for_asleep(rig: Rig) -> None:
    """Nobody looks for a request awake when the last one took its time, even if one is there."""
    assert rig.waits(sleep_s=1.0) == 1
    os.write(rig.requests_fd, b"!")
    assert rig.waits(sleep_s=1.0) == 2


def test_who_follows_closely_is_waited_for_awake(rig: Rig) -> None:
    """After a short sleep the next request is found without one; if none comes, it sleeps after all."""
    assert rig.waits() == 1
    os.write(rig.requests_fd, b"!")
    assert rig.waits() == 1
    os.read(rig.device_fd, 1)
    assert rig.waits(sleep_s=1.0) == 2
    assert rig.waits(sleep_s=1.0) == 3


def test_others_get_their_turn(rig: Rig) -> None:
    """However many requests there are, it sleeps once in a while, which is when other tasks run."""
    assert rig.waits() == 1
    os.write(rig.requests_fd, b"!")
    began_s = rig.now_s
    while rig.waits() == 1:
        assert rig.now_s < began_s + 2 * YIELD_S
