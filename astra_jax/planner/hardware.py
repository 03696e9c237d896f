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


_ACCELERATOR_TYPE = re.compile(r"(?:tpu-)?(v4|v5p|v5litepod|v5lite|v5e|v6e)-(\d{1,6})")
"""Google Cloud's names of slices. SkyPilot writes `tpu-` before them."""
_TENSOR_CORES = {"v4": 2, "v5p": 2}
"""TensorCores of a chip, by kind, where the number in an accelerator type counts those; else it counts chips."""


def _topology_of(kind: str, number: int, name: str) -> str:
    """Return `KIND:AxBxC` for an accelerator type. Raises `PlanError`: there is no such slice."""
    kind = "v5e" if kind.startswith("v5l") else kind
    cores = _TENSOR_CORES.get(kind, 1)
    sizes = {math.prod(map(int, shape.split("x"))) * cores: shape for shape in CHIPS[kind].slices}
    if number not in sizes:
        counts = "TensorCores, two for each chip" if cores > 1 else "chips"
        written = "v5litepod" if kind == "v5e" else kind
        raise PlanError(
            f"topology {name!r}: there is no such slice. The number counts {counts}; use one of "
            f"{', '.join(f'{written}-{size}' for size in sizes)}, or write the shape, for example "
            f"{kind}:{CHIPS[kind].slices[1]}"
        )
    return f"{kind}:{sizes[number]}"


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
        """Parse `KIND:AxBxC` or `COUNTxKIND:AxBxC`; for GPUs `KIND`, `KIND:GPUS` or `KIND:HOSTSxGPUS`. An accelerator
        type of TPUs, such as `v6e-16`, is also read instead of `KIND:AxBxC`.

        Raises:
            PlanError: an unknown kind, or no shape; several slices of GPUs; hosts without a known network.
        """
        several = re.match(r"(\d{1,9})x", name)
        count = int(several.group(1)) if several else 1
        one = name[several.end() if several else 0 :].lower()
        if typed := _ACCELERATOR_TYPE.fullmatch(one):
            one = _topology_of(typed[1], int(typed[2]), name)
        kind, _, shape = one.partition(":")
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
            slices: dict[str, Any] = {"num_slices": self.count} if self.count > 1 else {}
            if self.chip.name == "v4":  # else each of a chip's two cores is a device
                slices["chip_config_name"] = "megacore"
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


def context_size(chips: int, tokens: int) -> int:
    """Return the number of chips that share a row: until a chip has at most `TOKENS_PER_CHIP` of it."""
    context = 1
    while tokens / context > TOKENS_PER_CHIP and chips % (2 * context) == 0:
        context *= 2
    return context


def mesh_sizes(slice_: Slice, tokens: int) -> dict[str, int]:
    """Return mesh sizes by axis, for rows of this many tokens.

    `context` is `context_size`, the rest of a slice is `fsdp`, and slices are `data`.
    """
    chips = slice_.chips // slice_.count
    context = context_size(chips, tokens)
    return {"data": slice_.count, "fsdp": chips // context, "context": context}
