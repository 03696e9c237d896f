"""Checkpoints on disks that are full. Run by test_checkpoints.py, in a process of its own."""

from __future__ import annotations

import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_world import full_disk

from astra_jax.run.checkpoints import Checkpointer, CheckpointError


def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path):
    params = {"w": jax.random.normal(jax.random.key(0), (512, 512))}
    state = {"m": jnp.zeros((512, 512))}
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        checkpointer.save(1, params=params, state=state, extra={})
        checkpointer.wait()
    failing = Checkpointer(tmp_path)
    try:
        with full_disk(100_000):
            with pytest.raises(CheckpointError, match="a checkpoint could not be written .*make room there"):
                failing.save(2, params=params, state=state, extra={})
                failing.wait()
            # The weights' as well as the state's, whichever failed: what still saves as Python ends may hang it.
            assert not [one.name for one in threading.enumerate() if one.name in ("async_save", "save_finalize")]
    finally:
        with contextlib.suppress(CheckpointError):
            failing.close()
    with contextlib.closing(Checkpointer(tmp_path)) as checkpointer:
        step, restored, _, _ = checkpointer.restore_latest((params, state))
        assert step == 1
        np.testing.assert_array_equal(restored["w"], params["w"])
