"""The mode of an inode: random opens and closes against a kernel that believes nothing."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from random import Random

import pytest
import trio
import trio.testing

from s3prefetchfs.fuse import open_reply, passthrough
from s3prefetchfs.fuse.passthrough import BackingError, Passthrough
from s3prefetchfs.metrics import KernelFigures

DEVICE_FD = 77


@dataclass(frozen=True, slots=True)
class File:
    """The cache file of an inode; its descriptor is the number of that."""

    ino: int

    def fileno(self) -> int:
        return self.ino


@dataclass(slots=True)
class Kernel:
    """The device and the C library: backing ids, and the replies to OPEN.

    Attributes:
        refuses: the errno that the next file meets. ids: those that are not freed, with their files' descriptors.
        passed: what the library was told since the last reply.
        modes: inode -> its handles that are open, with the backing id of each, None for the daemon.
    """

    refuses: int | None = None
    ids: dict[int, int] = field(default_factory=dict)
    made: int = 0
    passed: tuple[int, int] | None = None
    modes: dict[int, dict[int, int | None]] = field(default_factory=dict)

    def open_backing(self, device_fd: int, fd: int) -> int:
        assert device_fd == DEVICE_FD
        if self.refuses is not None:
            raise BackingError(OSError(self.refuses, "refused"))
        self.made += 1
        self.ids[self.made] = fd
        return self.made

    def close_backing(self, device_fd: int, backing_id: int) -> None:
        assert device_fd == DEVICE_FD
        del self.ids[backing_id]

    def prepare(self, handle_id: int, flags: int, backing_id: int) -> None:
        assert flags == open_reply.PASSTHROUGH | open_reply.NOFLUSH
        self.passed = handle_id, backing_id

    def reply(self, ino: int, handle_id: int) -> int | None:
        """OPEN is answered; what the kernel answers with EIO does not come out. Returns the handle's backing id."""
        backing_id = None
        if self.passed is not None:
            assert self.passed[0] == handle_id
            backing_id = self.passed[1]
            assert self.ids[backing_id] == ino
        self.passed = None
        handles = self.modes.setdefault(ino, {})
        assert set(handles.values()) <= {backing_id}, "two modes of one inode, or two backing files"
        handles[handle_id] = backing_id
        return backing_id


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel()
    monkeypatch.setattr(passthrough, "open_backing", kernel.open_backing)
    monkeypatch.setattr(passthrough, "close_backing", kernel.close_backing)
    monkeypatch.setattr(open_reply, "prepare", kernel.prepare)
    return kernel


def turned_on(kernel: Kernel) -> tuple[Passthrough, KernelFigures]:
    figures = KernelFigures()
    modes = Passthrough(figures)
    modes.turn_on(DEVICE_FD, File(0))
    assert kernel.ids == {}, "the probe's backing id is not freed"
    return modes, figures


@pytest.mark.parametrize("seed", range(20))
def test_random_opens_and_closes(kernel: Kernel, seed: int) -> None:
    """Opens wait and overtake each other; the kernel finds one mode per inode, and no backing id is left."""
    chance = Random(seed)
    modes, figures = turned_on(kernel)
    opened = 0

    async def user(number: int) -> None:
        nonlocal opened
        for turn in range(30):
            ino, handle_id = chance.randrange(3), 1000 * number + turn
            file = chance.choice([None, File(ino)])

            async def whole_file(file: File | None = file) -> File | None:
                await trio.sleep(chance.choice([0, 0, 0.1, 0.2]))
                kernel.refuses = chance.choice([None, None, None, errno.EMFILE])
                return file

            await modes.open(ino, handle_id, whole_file)
            kernel.reply(ino, handle_id)
            opened += 1
            modes.check()
            await trio.sleep(chance.choice([0, 0.05, 0.3]))
            del kernel.modes[ino][handle_id]  # the kernel lets go first
            await trio.sleep(chance.choice([0, 0.05]))
            modes.release(handle_id)
            modes.check()

    async def everybody() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(user, number)

    trio.run(everybody, clock=trio.testing.MockClock(autojump_threshold=0))
    assert kernel.ids == {}
    assert figures.opens_passthrough + figures.opens_normal == opened == 150
    assert figures.opens_passthrough > 0
    assert figures.opens_normal > 0
    assert figures.passthrough


@pytest.mark.parametrize(
    ("number", "reason"),
    [(errno.EPERM, "CAP_SYS_ADMIN"), (errno.ELOOP, "stacked"), (errno.EOPNOTSUPP, "cannot be read by the kernel")],
)
def test_a_refusal_that_will_not_pass_turns_it_off(kernel: Kernel, number: int, reason: str) -> None:
    """What is open in passthrough stays so; the next file is not tried."""
    modes, figures = turned_on(kernel)

    async def steps() -> None:
        async def whole_file(ino: int) -> File:
            return File(ino)

        await modes.open(1, 11, lambda: whole_file(1))
        assert kernel.reply(1, 11) is not None
        kernel.refuses = number
        await modes.open(2, 12, lambda: whole_file(2))
        assert kernel.reply(2, 12) is None
        kernel.refuses = None
        assert not figures.passthrough
        assert reason in figures.reason
        await modes.open(3, 13, lambda: whole_file(3))
        assert kernel.reply(3, 13) is None
        await modes.open(1, 14, lambda: whole_file(1))
        assert kernel.reply(1, 14) is not None
        for handle_id in (11, 12, 13, 14):
            modes.release(handle_id)
            modes.check()

    trio.run(steps)
    assert kernel.ids == {}
    assert (figures.opens_passthrough, figures.opens_normal) == (2, 2)
