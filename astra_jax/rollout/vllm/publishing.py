"""Publishing of weights for rollout servers, one folder for each version: Orbax checkpoints of the Hugging Face tensors
for our plugin, or Hugging Face folders for vLLM's own reload.

    dir/<version>/params/    {HF name: [(layers,) (experts,) ...HF's shape]}, the name with a `{}` for each stacked axis
    dir/<version>/           config.json, model*.safetensors

Transposes run on the trainer's devices, where they cost nothing, and a server only copies. Chunks are uncompressed,
since weights do not compress and decompression would delay servers. They are at most `CHUNK_BYTES`, so that parts can
be read separately.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from astra_jax.base.errors import InputError, UserError
from astra_jax.base.files import check_held, first_line, in_bucket, location, may_be_storage
from astra_jax.models.adapters import without_adapters
from astra_jax.models.hf_checkpoint import WeightsError, save_hf
from astra_jax.models.model import Model, Params
from astra_jax.run.checkpoints import CheckpointManager
from synthesis.core.datasets import Folder

ITEM = "params"
_UNFINISHED = ".unfinished"
_ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"
_STRAGGLING_SECONDS = 5.0
"""Seconds during which leftovers of a failed save are removed."""
CHUNK_BYTES = 64 << 20


class PublishError(UserError):
    """Weights could not be written where servers read them. The message names the folder and the version."""

    away = True


class Publisher:
    """Publishes a policy's weights under one folder, each version completely or not at all.

    Args:
        dir: created if missing; on a disk that the servers share, or in a bucket that they can read.
        model: the policy's config.
        keep: number of versions, at least 2: one may still be read while the next is written.
        dtype: of the published weights.
    """

    def __init__(self, dir: Folder, model: Model, *, keep: int = 2, dtype: str = "bfloat16") -> None:
        _check_keep(keep)
        self.dir, self.model, self.dtype = location(dir), model, dtype
        self._manager = CheckpointManager(
            self.dir, "policy", keep, {ITEM: ocp.PyTreeCheckpointHandler(use_compression=False)}
        )
        self._version, self._failed = 0, False

    def publish(self, params: Params, version: int) -> epath.Path:
        """Start writing a version in the background; `params` may be donated once this returns.

        Args:
            version: replaces this version and all later ones, left by a run that was killed and resumed.

        Returns:
            The item's path. It exists once `wait` has returned.

        Raises:
            PublishError: it cannot be written; the caller may retry.
        """
        check_held(self.dir)
        self._version = version
        with self._writing():
            for step in self._manager.all_steps():
                if step >= version:
                    self._manager.wait_until_finished()
                    self._manager.delete(step)
            tree = stacked_hf_tensors(params, model=self.model, dtype=self.dtype)
            save_args = jax.tree.map(lambda x: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
            items = ocp.args.Composite(**{ITEM: ocp.args.PyTreeSave(tree, save_args=save_args)})
            self._manager.save(version, args=items, force=True)
        return self.dir / str(version) / ITEM

    def wait(self) -> None:
        """Wait until the published version is complete. Raises `PublishError` if it could not be written."""
        with self._writing():
            self._manager.wait_until_finished()
        if self._failed:  # also of an earlier version, whose remaining writes may take longer on a busy machine
            self._clear_begun()

    def close(self) -> None:
        """Wait, and free the background threads. Raises as `wait` does."""
        with self._writing():
            self._manager.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Name folder and version in storage errors, and remove what they left."""
        try:
            yield
        except Exception as error:
            if not may_be_storage(error, self.dir):
                raise
            self._failed = True
            self._clear_begun()
            raise _unpublished(self.dir, self._version, error) from error

    def _clear_begun(self) -> None:
        """Remove leftovers of a failed save. Its remaining writes may recreate the folder, so this repeats until
        nothing new appears, and again with each later version."""
        if in_bucket(self.dir) or jax.process_index():
            return
        quiet, until = 0, time.monotonic() + _STRAGGLING_SECONDS
        while quiet < 4 and time.monotonic() < until:
            quiet = 0 if _clear(Path(self.dir), _ORBAX_UNFINISHED) else quiet + 1
            time.sleep(0.05)


class FolderPublisher:
    """Publishes a policy's weights as Hugging Face folders, each version completely or not at all. One process only.

    Args:
        dir: created if missing; the servers are on the same machine.
        model: the policy's config.
        keep: number of versions, at least 2: one may still be read while the next is written.
        dtype: of the published weights.
    """

    def __init__(self, dir: Path | str, model: Model, *, keep: int = 2, dtype: str = "bfloat16") -> None:
        _check_keep(keep)
        folder = location(dir)
        if in_bucket(folder):
            raise InputError(
                f"weights are published to {dir}, and vLLM's reload reads them from a disk: give a folder of the "
                "servers' machine, or use Publisher, whose plugin reads buckets"
            )
        if jax.process_count() > 1:
            raise InputError(f"FolderPublisher in a run of {jax.process_count()} processes; publish with Publisher")
        self.dir, self.model, self._keep = Path(folder), model, keep
        self._stored = replace(model, param_dtype=dtype)
        self.dir.mkdir(parents=True, exist_ok=True)
        _clear(self.dir, _UNFINISHED)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._written: Future[None] | None = None

    def publish(self, params: Params, version: int) -> Path:
        """Start writing a version in the background; `params` may be donated once this returns.

        Args:
            version: replaces this version and all later ones, left by a run that was killed and resumed.

        Returns:
            The folder. It exists once `wait` has returned.
        """
        check_held(self.dir)
        copied = _copied(params, dtype=self._stored.param_dtype)
        self._written = self._writer.submit(self._write, copied, version)
        return self.dir / str(version)

    def _write(self, params: Params, version: int) -> None:
        unfinished = self.dir / f"{version}{_UNFINISHED}"
        try:
            save_hf(params, self._stored, unfinished)
            for old in self._versions():
                if old >= version:
                    shutil.rmtree(self.dir / str(old))
            unfinished.rename(self.dir / str(version))
            for old in self._versions()[: -self._keep]:
                shutil.rmtree(self.dir / str(old))
        except (OSError, WeightsError) as error:
            _clear(self.dir, _UNFINISHED)
            raise _unpublished(self.dir, version, error) from error

    def _versions(self) -> list[int]:
        return sorted(int(path.name) for path in self.dir.iterdir() if path.name.isdecimal())

    def wait(self) -> None:
        """Wait until the published version is complete. Raises `PublishError` if it could not be written."""
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        """Wait, and free the background thread."""
        self._writer.shutdown()


def _unpublished(folder: Folder, version: int, error: BaseException) -> PublishError:
    remedy = "check the bucket" if in_bucket(folder) else "make room there, or check the disk"
    return PublishError(
        f"{folder}: the weights of version {version} could not be published ({first_line(error)}); {remedy}"
    )


def _clear(folder: Path, ending: str) -> bool:
    """Remove unfinished folders where possible. Return whether there were any."""
    begun = list(folder.glob(f"*{ending}"))
    for left in begun:
        shutil.rmtree(left, ignore_errors=True)
    return bool(begun)


def _check_keep(keep: int) -> None:
    if keep < 2:
        raise InputError(f"keep is {keep}; a server may still read the version before: keep at least 2")


@partial(jax.jit, static_argnames="dtype")
def _copied(params: Params, *, dtype: str) -> Params:
    return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), without_adapters(params, dtype))


@partial(jax.jit, static_argnames=("model", "dtype"))
def stacked_hf_tensors(params: Params, *, model: Model, dtype: str) -> dict[str, jax.Array]:
    """Return the parameters as Hugging Face tensors, stacked over layers (and experts), by name with a `{}` for each.
    Adapters are merged, so servers need not know of them."""
    params = without_adapters(params, dtype)
    tensors = {}
    for entry in model.names():
        x: Any = params
        for key in entry.path:
            x = x[key]
        n = entry.stacked
        order = [*range(n), *(n + axis for group in entry.axes for axis in group)]
        shape = x.shape[:n] + entry.hf_shape(x.shape[n:])
        tensors[entry.hf_name] = jnp.transpose(x, order).reshape(shape).astype(dtype)
    return tensors
