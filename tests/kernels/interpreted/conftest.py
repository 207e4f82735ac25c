"""Kernels run by Triton's interpreter on a CPU. Its mode is chosen when a kernel is defined, so these tests need a
process of their own with TRITON_INTERPRET=1 (tests/kernels/test_interpreted.py starts it); elsewhere they are not
collected."""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
NARROW = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
NAMES = ("bf16", "bfloat16", "fp8", "float8", "e4m3", "e5m2")


def _is_narrow(item: pytest.Item) -> bool:
    """A test of bfloat16 or an 8-bit float, by its parameters or by its name."""
    callspec = getattr(item, "callspec", None)
    given = [] if callspec is None else list(callspec.params.values())
    return any(value in NARROW for value in given if isinstance(value, torch.dtype)) or any(
        name in item.name for name in NAMES
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INTERPRETED:
        return
    from tests.kernels.interpreted import bf16_patch

    reason = bf16_patch.unsupported()
    if reason is None:
        bf16_patch.install()
        return
    for item in filter(_is_narrow, items):
        item.add_marker(pytest.mark.skip(reason=reason))
