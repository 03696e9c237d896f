"""Chips, slices and meshes on them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from astra_jax.base.errors import UserError
from astra_jax.run.chips import CHIPS, Chip

_TARGET = """
gpu_device_info { %s }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "%s"
"""
TOKENS_PER_CHIP = 8_192
"""Most tokens of one row on a chip; longer rows are spread over `context`.

The saved layer inputs of 14B are then 3.4 GB per chip.
"""


_MOST_CHIPS = 131_072

INSTALL_GPU = "pip install --no-deps jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION, in JAX's own version"


class PlanError(UserError):
    """Error: the plan cannot be made. The message says what to change."""


@dataclass(frozen=True)
class Slice:
    """Named slice, for example `v5p:2x2x4`; several, for example `4xv6e:4x4`; or GPUs, for example `h200:2x8`.

    Attributes:
        shape: shape of each slice, in chips.
        count: number of slices.
    """

    chip: Chip
    shape: str
    count: int = 1

    @classmethod
    def parse(cls, name: str) -> Slice:
        """Parse `KIND:AxBxC` or `COUNTxKIND:AxBxC`; for GPUs `KIND`, `KIND:GPUS` or `KIND:HOSTSxGPUS`.

        Raises:
            PlanError: an unknown kind, or no shape; several slices of GPUs; hosts without a known network.
        """
        several = re.match(r"(\d{1,9})x", name)
        count = int(several.group(1)) if several else 1
        kind, _, shape = name[several.end() if several else 0 :].lower().partition(":")
        if kind not in CHIPS:
            close = [one for one in CHIPS if kind and (one in kind or one.startswith(kind))]
            near = f" (did you mean {' or '.join(close)}?)" if close else ""
            raise PlanError(f"topology {name!r}: there is no chip {kind!r}{near}; use one of {', '.join(CHIPS)}")
        if not shape and CHIPS[kind].description is not None:
            shape = "1"
        parts = shape.split("x")
        known = len(parts) <= (3 if CHIPS[kind].description is None else 2)
        if not known or not all(part.isdecimal() and int(part) > 0 for part in parts):
            example = CHIPS[kind].slices[1]
            raise PlanError(f"topology {name!r}: {shape!r} is not a shape; write for example {kind}:{example}")
        if several and (count < 2 or CHIPS[kind].description is not None):
            raise PlanError(
                f"topology {name!r}: write for example 2xv5p:2x2x2 for two slices of TPUs, v5p:2x2x2 for one, and "
                "h200:2x8 for two hosts of GPUs"
            )
        if len(parts) == 2 and CHIPS[kind].description is not None and CHIPS[kind].network_bandwidth is None:
            raise PlanError(
                f"topology {name!r}: hosts of {kind} have no network of a known speed; plan one host, for example "
                f"{kind}:{parts[1]}"
            )
        if count * math.prod(map(int, parts)) > _MOST_CHIPS:
            raise PlanError(f"topology {name!r}: there are no slices of more than {_MOST_CHIPS:,} chips; write fewer")
        return cls(CHIPS[kind], shape, count)

    @property
    def name(self) -> str:
        return f"{f'{self.count}x' * (self.count > 1)}{self.chip.name}:{self.shape}"

    @property
    def chips(self) -> int:
        """Number of chips of all slices."""
        return self.count * math.prod(int(part) for part in self.shape.split("x"))

    @property
    def hosts(self) -> int:
        """Number of GPU hosts, which a network connects; 1 for TPUs, whose links do not end at a host."""
        hosts, _, _ = self.shape.rpartition("x") if self.chip.description is not None else ("", "", "")
        return int(hosts or 1)

    def devices(self) -> list[Any]:
        """Return descriptions of the slice's devices to compile for.

        Raises:
            PlanError: the compiler for them is not installed, or knows no such slice.
        """
        # Set before JAX looks for a local TPU. None is used, so other processes may plan or train at the same time.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        from jax.experimental import topologies

        gpu = self.chip.description
        try:
            with _silent_stderr():
                return self._described_devices(topologies)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            first = str(error).splitlines()[0]
            install = "libtpu with pip install '.[tpu]'" if gpu is None else f"JAX's CUDA compiler with {INSTALL_GPU}"
            raise PlanError(
                f"topology {self.name!r}: {first}; install {install}, or use another shape, for example "
                f"{', '.join(self.chip.slices)}"
            ) from None

    def _described_devices(self, topologies: Any) -> list[Any]:
        gpu = self.chip.description
        if gpu is None:
            # Devices of several slices are other objects, which need a network between them when they compile.
            slices = {"num_slices": self.count} if self.count > 1 else {}
            name = f"{self.chip.name}:{self.shape}"
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name, **slices).devices)
        hosts, _, each = self.shape.rpartition("x")
        return list(
            topologies.get_topology_desc(
                platform="cuda",
                topology_name="",
                topology=f"{hosts or 1}x1x{each}",
                target_config=_TARGET % (gpu, self.chip.kinds[0]),
            ).devices
        )


@contextlib.contextmanager
def _silent_stderr() -> Iterator[None]:
    """Discard what native code writes to stderr: libtpu warns about the absent TPU host before it reads log levels."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def larger(one: Slice) -> list[Slice]:
    """Return all known slices of the same chip, with the same count, ascending."""
    return [Slice(one.chip, shape, one.count) for shape in one.chip.slices]


def mesh_sizes(slice_: Slice, tokens: int) -> dict[str, int]:
    """Return mesh sizes by axis, for rows of this many tokens.

    Rows are spread over `context` until a chip has at most `TOKENS_PER_CHIP` of one. The rest of a slice is `fsdp`, and
    slices are `data`.
    """
    context, chips = 1, slice_.chips // slice_.count
    while tokens / context > TOKENS_PER_CHIP and chips % (2 * context) == 0:
        context *= 2
    return {"data": slice_.count, "fsdp": chips // context, "context": context}
