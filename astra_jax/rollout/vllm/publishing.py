"""Weights as rollout servers read them, one folder for each version: for our plugin, Orbax checkpoints of the Hugging
Face tensors; for vLLM's own reload, Hugging Face folders.

    dir/<version>/params/    {HF name: [(layers,) (experts,) ...HF's shape]}, the name with a `{}` for each stacked axis
    dir/<version>/           config.json, model*.safetensors

The transposes are done here, on the trainer's devices, where they cost nothing; a server only copies. Chunks are stored
uncompressed (weights do not compress, and a server would wait for it) and are at most `CHUNK_BYTES`, so that a part can
be read without the rest.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from astra_jax.models.hf_checkpoint import save_hf, write_config
from astra_jax.models.model import Model, Params
from astra_jax.run.checkpoints import manager_options
from synthesis.core.datasets import Folder
from synthesis.core.files import in_bucket, location
from synthesis.core.refusals import InputError

ITEM = "params"
_UNFINISHED = ".unfinished"
CHUNK_BYTES = 64 << 20


class Publisher:
    """Publishes a policy's weights under one folder, each version whole or not at all.

    Args:
        dir: made if it is not there; on a disk that the servers share, or in a bucket that they can read.
        model: the policy's config; its `config.json` is written beside the versions, for servers to start from.
        keep: versions, at least 2: one may still be read while the next is written.
        dtype: of the published weights.
    """

    def __init__(self, dir: Folder, model: Model, *, keep: int = 2, dtype: str = "bfloat16") -> None:
        _check_keep(keep)
        self.dir, self.model, self.dtype = location(dir), model, dtype
        options = manager_options("policy", keep)
        handler = ocp.PyTreeCheckpointHandler(use_compression=False)
        self._manager = ocp.CheckpointManager(self.dir, options=options, item_handlers={ITEM: handler})
        write_config(model, self.dir)

    def publish(self, params: Params, version: int) -> epath.Path:
        """Begin to write a version, in the background; `params` may be donated once this returns.

        Args:
            version: replaces one of the same number, and all later ones: those of a run that was killed and resumed.

        Returns:
            The item's path. It is there once `wait` has returned.
        """
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
        """Return when what was published is on disk; raises what went wrong."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, and free the background threads."""
        self._manager.close()


class FolderPublisher:
    """Publishes a policy's weights as Hugging Face folders, each version whole or not at all. One process only.

    Args:
        dir: made if it is not there; the servers are on the same machine.
        model: the policy's config.
        keep: versions, at least 2: one may still be read while the next is written.
        dtype: of the published weights.
    """

    def __init__(
        self, dir: Path | str, model: Model, *, keep: int = 2, dtype: Literal["bfloat16", "float32"] = "bfloat16"
    ) -> None:
        _check_keep(keep)
        if in_bucket(dir):
            raise InputError(
                f"weights are published to {dir}, and vLLM's reload reads them from a disk: give a folder of the "
                "servers' machine, or use Publisher, whose plugin reads buckets"
            )
        if jax.process_count() > 1:
            raise InputError(f"FolderPublisher in a run of {jax.process_count()} processes; publish with Publisher")
        self.dir, self.model, self._keep = Path(location(dir)), model, keep
        self._stored = replace(model, param_dtype=dtype)
        self.dir.mkdir(parents=True, exist_ok=True)
        for left in self.dir.glob(f"*{_UNFINISHED}"):
            shutil.rmtree(left)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._written: Future[None] | None = None

    def publish(self, params: Params, version: int) -> Path:
        """Begin to write a version, in the background; `params` may be donated once this returns.

        Args:
            version: replaces one of the same number, and all later ones: those of a run that was killed and resumed.

        Returns:
            The folder. It is there once `wait` has returned.
        """
        copied = _copied(params, dtype=self._stored.param_dtype)
        self._written = self._writer.submit(self._write, copied, version)
        return self.dir / str(version)

    def _write(self, params: Params, version: int) -> None:
        unfinished = self.dir / f"{version}{_UNFINISHED}"
        save_hf(params, self._stored, unfinished)
        for old in self._versions():
            if old >= version:
                shutil.rmtree(self.dir / str(old))
        unfinished.rename(self.dir / str(version))
        for old in self._versions()[: -self._keep]:
            shutil.rmtree(self.dir / str(old))

    def _versions(self) -> list[int]:
        return sorted(int(path.name) for path in self.dir.iterdir() if path.name.isdecimal())

    def wait(self) -> None:
        """Return when what was published is on disk; raises what went wrong."""
        if self._written is not None:
            self._written.result()

    def close(self) -> None:
        """Wait, and free the background thread."""
        self._writer.shutdown()


def _check_keep(keep: int) -> None:
    if keep < 2:
        raise InputError(f"keep is {keep}; a server may still read the version before: keep at least 2")


@partial(jax.jit, static_argnames="dtype")
def _copied(params: Params, *, dtype: str) -> Params:
    return jax.tree.map(lambda x: jnp.array(x, dtype, copy=True), params)


@partial(jax.jit, static_argnames=("model", "dtype"))
def stacked_hf_tensors(params: Params, *, model: Model, dtype: str) -> dict[str, jax.Array]:
    """The parameters as HF's tensors, stacked over layers (and experts), by HF's name with a `{}` for each."""
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
