"""Checkpoints by the paper's rule: weights often, and the full training state only for the last one or two.

Each of the two folders belongs to an Orbax checkpoint manager:

    dir/params/<step>/    the weights; all kept unless `keep_params` says otherwise
    dir/states/<step>/    the optimizer's state and a JSON `extra` (data iterator, configs, …); the newest `keep_states`

Each step also has a digest of every array, which is compared on reading.

A run can resume from a step that is in both folders. Orbax writes into a temporary folder and renames it, or marks it
when complete in a bucket, so a step is complete or absent. Saving is asynchronous after the copy to host memory. Either
folder may be the slower one, so older steps are removed only when the new step is complete in both. A run killed at any
time therefore has its previous or its next step.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from astra_jax.base.errors import UserError
from astra_jax.base.files import check_held, first_line, in_bucket, location, may_be_storage
from astra_jax.base.settings import SettingError
from astra_jax.run.digests import digest_of_json, digests_of
from astra_jax.run.hosts import allgather_exception, barrier_unless_failed, broadcast_from_host0
from synthesis.core.datasets import Folder

PyTree = Any
T = TypeVar("T")

SAVED = "_CHECKPOINT_METADATA"
"""File in each step with the time of saving."""

_DIGESTS, _EXTRA = "digests", "(extra)"
"""The item with a step's digests, and the entry for `extra` in it, a name that no array has."""


class CheckpointError(UserError):
    """The checkpoint does not exist or does not fit the requested structure. The message says why."""


class DamagedError(CheckpointError):
    """A checkpoint cannot be read, or its contents differ from what was saved. The message names the step and the
    array."""


class BucketError(CheckpointError):
    """The bucket cannot be written or read now; the checkpoints in it are intact."""

    away = True


class Checkpointer:
    """Saves and restores a training run's weights and state under one folder.

    Args:
        dir: created if missing; left-overs of interrupted saves in it are removed.
        reading: write, create and remove nothing, since a run may be saving there.
        keep_states: number of newest full states to keep, at least 1.
        keep_params: number of newest weights to keep; None keeps all. Weights of kept states stay too.
    """

    def __init__(
        self, dir: Folder, *, reading: bool = False, keep_states: int = 2, keep_params: int | None = None
    ) -> None:
        if keep_states < 1:
            raise SettingError(f"keep_states is {keep_states}; a run that can resume keeps at least 1")
        self.dir = location(dir)
        self._keep_states, self._keep_params = keep_states, keep_params
        arrays, json = ocp.StandardCheckpointHandler, ocp.JsonCheckpointHandler
        for_params = {"params": arrays(), _DIGESTS: json()}
        for_states = {"state": arrays(), "extra": json(), _DIGESTS: json()}
        self._params = CheckpointManager(self.dir / "params", "params", None, for_params, reading=reading)
        self._states = CheckpointManager(self.dir / "states", "states", None, for_states, reading=reading)
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="older checkpoints")
        self._removed: Future[None] | None = None

    def save(
        self, step: int, *, params: PyTree, state: PyTree | None = None, extra: dict[str, Any] | None = None
    ) -> float:
        """Save a step in the background, replacing an existing one. The arrays may be donated once this returns.

        Args:
            step: ascending over a run.
            params: the weights, a pytree of arrays.
            state: the rest of the training state, e.g. the optimizer's; None saves only the weights.
            extra: JSON, saved with `state`; only with it.

        Returns:
            Seconds that the caller waited.

        Raises:
            ValueError: `extra` without `state`.
            CheckpointError: this save or the previous one could not be written; earlier checkpoints are intact. In a
                bucket it is a `BucketError`.
            LeaseError: another process has taken over the run's folder in a bucket.
            RemovedError: the run's folder on disk was removed or replaced.
        """
        if extra is not None and state is None:
            raise ValueError("extra is part of the full state: pass state with it, or neither")
        started = time.perf_counter()
        check_held(self.dir)
        with self._writing():
            self._save(step, params, state, extra)
        return time.perf_counter() - started

    def _save(self, step: int, params: PyTree, state: PyTree | None, extra: dict[str, Any] | None) -> None:
        self._wait()
        for manager in (self._states, self._params):
            if step in manager.all_steps():  # left by a run that died before its next full state
                manager.wait_until_finished()
                manager.delete(step)
        digests = ocp.args.JsonSave(digests_of(named(params)))
        items = {"params": ocp.args.StandardSave(params), _DIGESTS: digests}
        self._params.save(step, args=ocp.args.Composite(**items), force=True)
        if state is not None:
            extra = extra or {}
            digests = ocp.args.JsonSave(digests_of(named(state)) | {_EXTRA: digest_of_json(extra)})
            items = {"state": ocp.args.StandardSave(state), "extra": ocp.args.JsonSave(extra), _DIGESTS: digests}
            self._states.save(step, args=ocp.args.Composite(**items), force=True)
        saved = [self._params] if state is None else [self._params, self._states]
        self._removed = self._remover.submit(_remove, saved, self._outdated())

    def _outdated(self) -> list[tuple[CheckpointManager, list[int]]]:
        """Return the steps to remove once the newest is complete. Steps are in the order of saving."""
        params, states = self._params.all_steps(), self._states.all_steps()
        kept = [step for step in states if step in params][-self._keep_states :]
        weights = params if self._keep_params is None else [*params[-self._keep_params :], *kept]
        old = (self._params, params, weights), (self._states, states, kept)
        return [(manager, [step for step in steps if step not in keep]) for manager, steps, keep in old]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Name the folder in errors of the file system, such as a full disk. Orbax may raise them one save later."""
        try:
            yield
        except Exception as error:
            if not may_be_storage(error, self.dir):
                raise
            far = in_bucket(self.dir)
            remedy = "check the bucket" if far else "make room there"
            raise (BucketError if far else CheckpointError)(
                f"{self.dir}: a checkpoint could not be written ({first_line(error)}); {remedy} and run the same "
                "command again: it goes on from the last whole one"
            ) from error

    def latest(self) -> int | None:
        """Return the newest step that a run can resume from, or None. Waits for saves in progress."""
        self.wait()
        return max(set(self._params.all_steps()) & set(self._states.all_steps()), default=None)

    def params_steps(self) -> list[int]:
        """Return the steps with weights, ascending. Waits for saves in progress."""
        self.wait()
        return sorted(self._params.all_steps())

    def restore(self, step: int, like: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree, dict[str, Any]]:
        """Return the full state of a step.

        Args:
            step: from `latest()`.
            like: `(params, state)`: arrays or `jax.ShapeDtypeStruct`s with the wanted structure, shapes, types and
                shardings.

        Returns:
            `(params, state, extra)`.

        Each host reads its part, and all must call it. A failure on one host is raised on all.

        Raises:
            CheckpointError: the step does not exist, or differs from `like` in structure, shape or type.
            DamagedError: it cannot be read, or differs from what was saved.
            BucketError: its bucket does not answer.
        """
        params_like, state_like = like
        params = self.restore_params(step, params_like)
        return params, self._arrays(self._states, step, "state", state_like), self.read_extra(step)

    def restore_latest(
        self, like: tuple[PyTree, PyTree], check: Callable[[dict[str, Any]], None] = lambda extra: None
    ) -> tuple[int, PyTree, PyTree, dict[str, Any]] | None:
        """Return the newest full state that every host can read. Unreadable ones are skipped with a warning.

        Args:
            like: as in `restore`.
            check: called with `extra` before anything else is read; its errors are raised.

        Returns:
            (step, params, state, extra), or None if there is no checkpoint.

        Raises:
            CheckpointError: a state differs from `like` in structure, shape or type; no state can be read; or weights
                and states have no common step.
        """
        self.wait()
        there = [sorted(one.all_steps()) for one in (self._params, self._states)]
        weights, states = json.loads(broadcast_from_host0(json.dumps(there).encode()))
        steps = sorted({*weights} & {*states})
        if weights and states and not steps:
            raise CheckpointError(
                f"{self.dir}: there are weights of steps {_listed(weights)} and full states of steps "
                f"{_listed(states)}, and none of the same step, so the run cannot resume. Copy the missing ones there, "
                "or use another workdir, with these weights as --weights"
            )
        for step in reversed(steps):
            try:
                extra = self.read_extra(step)
            except DamagedError as error:
                logging.warning("%s; it is left out", error)
                continue
            check(extra)
            try:
                return step, *self.restore(step, like)
            except DamagedError as error:
                logging.warning("%s; it is left out", error)
        if steps:
            raise CheckpointError(f"{self.dir}: none of the checkpoints there can be read: {_listed(steps[::-1])}")
        return None

    def read_extra(self, step: int) -> dict[str, Any]:
        """Return the `extra` of a step's full state, without its arrays.

        Raises:
            CheckpointError: the step has no full state.
            DamagedError: it cannot be read, or differs from what was saved.
        """

        def read() -> dict[str, Any]:
            self._require(self._states, step, "full state")
            extra = self._states.read(step, extra=ocp.args.JsonRestore())
            saved = self._digests(self._states, step)
            self._compare(self._states, step, {_EXTRA: digest_of_json(extra)}, saved and {_EXTRA: saved[_EXTRA]})
            return extra

        return self._on_all(step, read)

    def params_dtypes(self, step: int) -> dict[str, str]:
        """Return the saved dtypes of a step's weights, by name.

        Raises:
            CheckpointError: the step does not exist.
            DamagedError: it cannot be read.
        """

        def read() -> dict[str, str]:
            self._require(self._params, step, "weights")
            leaves = _leaves(self._params.item_metadata(step)["params"].tree)
            return {name: dtype for name, (_, dtype) in leaves.items()}

        return self._on_all(step, read)

    def params_digest(self, step: int) -> str | None:
        """Return a sha256 over the saved digests of a step's weights; None for checkpoints of earlier versions. Errors
        as in `params_dtypes`."""

        def read() -> str | None:
            self._require(self._params, step, "weights")
            saved = self._digests(self._params, step)
            return digest_of_json(saved) if saved else None

        return self._on_all(step, read)

    def restore_params(self, step: int, like: PyTree) -> PyTree:
        """Return the weights of a step; `like` and errors as in `restore`."""
        return self._arrays(self._params, step, "params", like)

    def _arrays(self, manager: CheckpointManager, step: int, item: str, like: PyTree) -> PyTree:
        """Return the arrays of a step's item, with their saved values checked."""

        def read() -> tuple[PyTree, dict[str, str]]:
            self._require(manager, step, "weights" if manager is self._params else "full state")
            self._check(manager, step, item, like)
            return manager.read(step, **{item: ocp.args.StandardRestore(_abstract(like))}), self._digests(manager, step)

        restored, saved = self._on_all(step, read)
        self._compare(manager, step, digests_of(named(restored)), {k: v for k, v in saved.items() if k != _EXTRA})
        return restored

    def _digests(self, manager: CheckpointManager, step: int) -> dict[str, str]:
        """Return the saved digests of a step; empty for checkpoints of earlier versions."""
        if not (epath.Path(manager.directory) / str(step) / _DIGESTS).exists():
            return {}
        return manager.read(step, **{_DIGESTS: ocp.args.JsonRestore()})

    def _compare(self, manager: CheckpointManager, step: int, found: dict[str, str], saved: dict[str, str]) -> None:
        if wrong := [name for name in found.keys() | saved.keys() if saved and found.get(name) != saved.get(name)]:
            raise DamagedError(
                f"{manager.directory}: step {step} cannot be read: {min(wrong)!r} is not what was saved, its files are "
                "damaged. Copy it again from an intact copy, or use an older step"
            )

    def _on_all(self, step: int, read: Callable[[], T]) -> T:
        """Return each host's own result of `read`. A failure on one host becomes the same kind of failure on all, so
        that all hosts try the same next step."""
        failure: CheckpointError | None = None
        try:
            with self._reading(step):
                found = read()
        except CheckpointError as error:
            failure = error
        damaged = isinstance(failure, DamagedError)
        if (failed_anywhere := allgather_exception(None if damaged else failure)) is not None:
            raise failed_anywhere
        if (failed_anywhere := allgather_exception(failure)) is not None:
            raise failure or DamagedError(f"{self.dir}: step {step} cannot be read: {failed_anywhere}")
        return found

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turn Orbax's errors of any type into checkpoint errors."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            if in_bucket(self.dir) and _is_away(error):
                raise BucketError(
                    f"{self.dir}: step {step} could not be read ({first_line(error)}); check the bucket and run the "
                    "same command again"
                ) from error
            raise DamagedError(
                f"{self.dir}: step {step} cannot be read: {type(error).__name__}: {first_line(error)}. Copy it again "
                "from where it is whole, or take an older step"
            ) from error

    def wait(self) -> None:
        """Wait until no save is in progress. Raises `CheckpointError` if one could not be written."""
        with self._writing():
            self._wait()

    def close(self) -> None:
        """Wait, and free the background threads. Raises as `wait` does."""
        try:
            with self._writing():
                self._both(ocp.CheckpointManager.close)
        finally:
            self._remover.shutdown()

    def _wait(self) -> None:
        self._both(ocp.CheckpointManager.wait_until_finished)

    def _both(self, end: Callable[[ocp.CheckpointManager], None]) -> None:
        """Call `end` on both managers, even if the first call fails. Threads still saving at exit would print
        tracebacks or deadlock."""
        with contextlib.ExitStack() as stack:
            for manager in (self._states, self._params):  # the last one is called first
                stack.callback(end, manager)
            if (removed := self._removed) is not None:
                self._removed = None
                stack.callback(removed.result)

    def _require(self, manager: CheckpointManager, step: int, what: str) -> None:
        self.wait()
        if step not in manager.all_steps():
            there = ", ".join(map(str, sorted(manager.all_steps()))) or "none"
            raise CheckpointError(f"{manager.directory}: there is no {what} of step {step}; steps there: {there}")

    def _check(self, manager: CheckpointManager, step: int, item: str, like: PyTree) -> None:
        saved, wanted = _leaves(manager.item_metadata(step)[item].tree), _leaves(like)
        where = f"{manager.directory}, step {step}"
        remedy = "it is of another model or optimizer config: use that config, or another workdir"
        if saved.keys() != wanted.keys():
            name = sorted(saved.keys() ^ wanted.keys())[0]
            side = "the checkpoint has" if name in saved else "the checkpoint lacks"
            raise CheckpointError(f"{where}: {side} {name!r}; {remedy}")
        for name, wanted_leaf in wanted.items():
            if saved[name] != wanted_leaf:
                raise CheckpointError(
                    f"{where}: {name!r} is {_show(saved[name])} in the checkpoint, {_show(wanted_leaf)} is asked for; "
                    f"{remedy}"
                )


class CheckpointManager(ocp.CheckpointManager):
    """Orbax's manager, extended to continue from what an earlier process left.

    Args:
        dir: created if missing.
        name: unique for each manager of a process. On several hosts saves synchronise by name, so two managers saving
            the same step would share a barrier.
        keep: number of newest steps to keep; None keeps all.
        handlers: by item; without them a new process could not read the metadata of earlier saves.
        reading: do not create the folder or remove left-overs of an interrupted save.
    """

    def __init__(
        self,
        dir: epath.Path,
        name: str,
        keep: int | None,
        handlers: dict[str, ocp.CheckpointHandler],
        *,
        reading: bool = False,
    ) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=not reading,
            cleanup_tmp_directories=not reading,
            multiprocessing_options=ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name),
            async_options=ocp.AsyncOptions(barrier_sync_fn=partial(_meet, name)),
        )
        super().__init__(dir, options=options, item_handlers=handlers)
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
        self._reader = ocp.Checkpointer(ocp.CompositeCheckpointHandler(**handlers), multiprocessing_options=alone)

    def read(self, step: int, **item: ocp.args.CheckpointArgs) -> Any:
        """Return an item of a step as this host sees it; other hosts read their own parts of sharded arrays.

        Unlike `restore` it does not synchronise hosts: after a read that failed on one host, that host would never
        arrive.
        """
        (name,) = item
        return self._reader.restore(self.directory / str(step), args=ocp.args.Composite(**item))[name]

    def remove(self, steps: Sequence[int]) -> None:
        """Delete steps without Orbax's synchronisation of hosts. That is a collective, which only the training thread
        may run. Each host calls this; the first one deletes."""
        self._checkpoints.delete_if(lambda info: info.step in steps)
        self._checkpoint_deleter.delete_steps(steps)

    def reached_preemption(self, step: int) -> bool:
        """Return False: the run uses its own count (`Preemption`), and JAX's service has one count for all callers.

        Orbax asks with the step of each save, also from its threads. A preemption notice at that moment would be for
        that step, which the run's count might never reach.
        """
        del step
        return False


def _remove(saved: Sequence[CheckpointManager], outdated: Sequence[tuple[CheckpointManager, list[int]]]) -> None:
    """Remove outdated steps once all saves are complete. If a save failed, nothing is removed, and its error reaches
    the waiting caller. If another run owns the folder by then, nothing is removed, and the next save reports it."""
    try:
        for manager in saved:
            manager.wait_until_finished()
            check_held(manager.directory)
    except Exception:
        return
    for manager, steps in outdated:
        manager.remove(steps)


_AWAY = re.compile(
    r"(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|UNAVAILABLE"
    r"|UNKNOWN): "
)
"""Starts of tensorstore's messages when the bucket itself fails."""


def _is_away(error: Exception) -> bool:
    """Return whether the bucket fails, rather than the data of an object. In doubt it returns True. A run that ends can
    be restarted, but a run that skips an intact checkpoint later deletes it at the same step."""
    if isinstance(error, ValueError):  # from tensorstore, or from JSON
        return _AWAY.match(str(error)) is not None
    return not isinstance(error, (FileNotFoundError, LookupError, TypeError))


def _meet(name: str, *, key: str, timeout_ms: int) -> None:
    """Wait for the other hosts as Orbax does, but stop when a save of this manager failed on one of them."""
    if jax.process_count() > 1:
        every = ocp.multihost.get_barrier_sync_fn()
        barrier_unless_failed(f"saves/{name}", lambda: every(key=key, timeout_ms=timeout_ms))


def _abstract(tree: PyTree) -> PyTree:
    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(leaf, tree)


def _leaves(tree: PyTree) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return (shape, dtype) by path."""
    return {name: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for name, leaf in named(tree).items()}


def named(tree: PyTree) -> dict[str, Any]:
    """Return the leaves by path as plain names: Orbax restores namedtuples as dicts, and tuples as lists."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {".".join(_key(k) for k in path): leaf for path, leaf in leaves}


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


def _show(leaf: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = leaf
    return f"{dtype}[{','.join(map(str, shape))}]"
