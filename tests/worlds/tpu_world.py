"""What tests share that compile for TPUs which are not there."""

from __future__ import annotations

import importlib.util

import pytest

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs needs libtpu: pip install '.[tpu]'"
)
QUICKER = ("xla_tpu_enable_async_collective_fusion=",)
"""Options with which a program is sooner compiled; what it sends and holds is the same."""
