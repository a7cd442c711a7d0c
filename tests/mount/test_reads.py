"""x"""

from __future__ import annotations

import pytest


def test_x(any_bucket, module_mount):
    """x"""
    any_bucket.put("a/b", b"hello")
    m = module_mount(any_bucket)
    assert (m / "a/b").read_bytes() == b"hello"
    print(m.status())
