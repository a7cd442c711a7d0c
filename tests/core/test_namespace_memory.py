"""What a million keys cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAX_BYTES_PER_KEY = 400
MAX_BYTES_PER_FORGOTTEN_KEY = 100  # the table of the dict of inodes, which Python shrinks only when it is used again

PROGRAM = """
import gc
import sys
from s3prefetchfs.core.namespace import ROOT_INO, Namespace

KEYS, DIRECTORIES = 1_000_000, int(sys.argv[1])

def rss_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

def list_and_remember(ino, objects, prefixes):
    position = 0
    listing, _ = namespace.begin_listing(ino, 0.0)
    for start in range(0, max(len(objects), 1), 1000):
        page = [
            (key, 100_000_000 + number, 1_700_000_000_000 + number, f"{hash(key) % 2**64:032x}", "STANDARD")
            for number, key in enumerate(objects[start : start + 1000])
        ]
        namespace.add_page(listing, page, prefixes, 0.0)
        for position, entry, _ in namespace.entries(listing, position):
            namespace.remember(entry)
    namespace.finish_listing(listing, 0.0)
    for _, entry, _ in namespace.entries(listing, position):
        namespace.remember(entry)
    return listing

class Keys:
    '''The keys of a directory, made when asked for, so that they take no memory of their own.'''
    def __init__(self, prefix, count):
        self.prefix, self.count = prefix, count
    def __len__(self):
        return self.count
    def __getitem__(self, part):
        return [self.prefix + b"shard-%07d-of-1000000.tfrecord" % n for n in range(self.count)[part]]

namespace = Namespace(b"", 60.0)
list_and_remember(ROOT_INO, Keys(b"", 0), [])
before = rss_bytes()
if DIRECTORIES == 1:
    list_and_remember(ROOT_INO, Keys(b"", KEYS), [])
else:
    root = list_and_remember(ROOT_INO, Keys(b"", 0), [b"part-%06d/" % n for n in range(DIRECTORIES)])
    for _, entry, _ in namespace.entries(root):
        list_and_remember(entry.ino, Keys(entry.key, KEYS // DIRECTORIES), [])
counts = namespace.counts()
assert (counts.objects, len(namespace._inodes) >= KEYS) == (KEYS, True)
print((rss_bytes() - before) / KEYS)

root = None
for ino in list(namespace._inodes):
    namespace.forget(ino, namespace._inodes[ino].lookups)
namespace.sweep(60.0)
namespace.check()
gc.collect()  # else the interpreter's free lists, of a few KiB, keep most of its arenas
print((rss_bytes() - before) / KEYS)
"""


@pytest.mark.parametrize("directories", [1, 1_000])
def test_bytes_per_key(directories: int) -> None:
    """A million keys, each listed and remembered by the kernel, keep the promised size; forgotten, they go."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directories)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    bytes_per_key, bytes_per_key_left = map(float, done.stdout.split())
    print(f"{directories} directories: {bytes_per_key:.0f} bytes per key, {bytes_per_key_left:.0f} when forgotten")
    assert 100 < bytes_per_key < MAX_BYTES_PER_KEY
    assert bytes_per_key_left < MAX_BYTES_PER_FORGOTTEN_KEY
