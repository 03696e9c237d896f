"""Memory and speed of accelerators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chip:
    """An accelerator as JAX sees it.

    Attributes:
        hbm_bytes: memory available to a program; slightly below the data sheet's.
        flops: bf16 peak, a second.
        hbm_bandwidth: bytes a second.
        link_bandwidth: bytes a second that a chip can receive over all its links.
        kinds: prefixes of JAX's name for it (`device_kind`).
        slices: topology names, ascending in size; of GPUs, `GPUS` in one host or `HOSTSxGPUS`.
        network_bandwidth: bytes a second that a GPU can receive from other hosts, a TPU from other slices.
        description: of a GPU, for the compiler: `stream_executor.GpuDeviceInfoProto` fields that differ between kinds.
        clock: of a TPU, cycles a second, used in the compiler's estimates.
        matrix_side: of a TPU's matrix units: a matmul over a smaller dimension leaves part of them unused.
        narrow: (name of `matmuls.MATMUL_QUANTIZATIONS`, factor over the bf16 peak) of types that its matrix units
            support; the compiler converts other types to bfloat16 first.
        compiler_options: (name, value) each, for every training program on it; see `compiler`.
    """

    name: str
    hbm_bytes: int
    flops: float
    hbm_bandwidth: float
    link_bandwidth: float
    kinds: tuple[str, ...]
    slices: tuple[str, ...]
    network_bandwidth: float | None = None
    description: str | None = None
    clock: float | None = None
    matrix_side: int = 128
    narrow: tuple[tuple[str, float], ...] = ()
    compiler_options: tuple[tuple[str, str], ...] = ()


GIB = 2**30
# Gains of each option, in compiled cycles: docs/scale.md.
_TPU_OPTIONS = (
    # XLA splits a matmul with gathered weights into a loop over parts: smaller matmuls, whose sums are rounded to
    # bfloat16 after each. Disabled below a million MiB.
    ("xla_jf_spmd_threshold_for_windowed_einsum_mib", "1000000"),
    # Collectives start and end at different points; the options below decide what executes them in between.
    ("xla_enable_async_all_gather", "true"),
    ("xla_enable_async_all_reduce", "true"),
    ("xla_tpu_enable_async_collective_fusion", "true"),
    ("xla_tpu_enable_async_collective_fusion_multiple_steps", "true"),
    ("xla_tpu_overlap_compute_collective_tc", "true"),
)
# A layer's weights are gathered, and its gradients summed, in pieces of the adjacent matmuls. Without these options
# the chip waits for each.
_BY_THE_MATMULS = (
    ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true"),
    ("xla_tpu_enable_async_collective_fusion_fuse_all_reduce", "true"),
)
# Matmuls wait for collectives. JAX 0.12's compiler refuses collectives fused with matmuls on every chip but v5e: it
# reports that results may be wrong, and hangs.
_BETWEEN_MATMULS = (
    ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "false"),
    ("xla_tpu_enable_async_collective_fusion_fuse_all_reduce", "false"),
)
# Run on the sparse cores, including scattered sums, which matmuls cannot include. A v5p has sparse cores too, but its
# compiler leaves nearly all collectives of a cube to the other cores, and the chip then waits for them.
_BY_SPARSE_CORES = (
    ("xla_tpu_enable_sparse_core_collective_offload_all_gather", "true"),
    ("xla_tpu_enable_sparse_core_collective_offload_all_reduce", "true"),
    ("xla_tpu_enable_sparse_core_collective_offload_reduce_scatter", "true"),
    # Over two mesh axes that are each a side of the slice; otherwise the chip waits for them.
    ("xla_tpu_enable_sparse_core_collective_offload_2d_all_gather", "true"),
    # Otherwise a scattered sum over both sides of a slice (v6e:4x4) would be a full sum, with twice the bytes.
    ("xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter", "true"),
    ("xla_tpu_enable_sparse_core_reduce_scatter_v2", "true"),
)
# Half of vector memory as the working set of one operation: larger matmul blocks and more fusion. (v5p's compiler has
# rejected whole steps with it.)
_LARGE_WINDOWS = (("xla_tpu_scoped_vmem_limit_kib", "65536"),)
_GPU_SLICES = ("1", "2", "4", "8", "2x8", "4x8", "8x8", "16x8", "32x8")
# The data sheets' 8-bit peaks over their bf16 peaks. These TPUs have no e4m3 units: such a matmul takes as many
# compiler cycles as bfloat16 (4,096 x 4,096 x 4,096 on v5p: 547,213 and 544,403; int8 275,123).
_INT8 = (("int8", 2.0),)
_INT8_AND_FP8 = (("int8", 2.0), ("fp8", 2.0))
# HBM: "available" in the compiler's out-of-memory message. The rest: Google's system architecture pages, with 4 links
# of 45 GB/s one way (v5e), 6 (v4), 6 of 90 (v5p), 4 of 90 (v6e), and between slices 6.4 Tb/s for 256 chips (v5e), 50
# Gb/s a chip (v5p), 25.6 Tb/s for 256 (v6e); v4's is not published, so v5e's is assumed. The clock is the peak over the
# work of the matrix units in a cycle: 4 of 128 x 128 (v5e), 8 (v4, v5p), 4 of 256 x 256 (v6e).
CHIPS = {
    "v4": Chip(
        "v4",
        int(30.75 * GIB),
        275e12,
        1228e9,
        270e9,
        ("TPU v4",),
        ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
        3.125e9,
        clock=1.05e9,
        compiler_options=_TPU_OPTIONS + _BETWEEN_MATMULS,
    ),
    "v5e": Chip(
        "v5e",
        int(15.75 * GIB),
        197e12,
        819e9,
        180e9,
        ("TPU v5 lite", "TPU v5e"),
        ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
        3.125e9,
        clock=1.5e9,
        narrow=_INT8,
        compiler_options=_TPU_OPTIONS + _BY_THE_MATMULS,
    ),
    "v5p": Chip(
        "v5p",
        int(95.74 * GIB),
        459e12,
        2765e9,
        540e9,
        ("TPU v5p", "TPU v5"),
        ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"),
        6.25e9,
        clock=1.75e9,
        narrow=_INT8,
        compiler_options=_TPU_OPTIONS + _BETWEEN_MATMULS,
    ),
    "v6e": Chip(
        "v6e",
        int(31.25 * GIB),
        918e12,
        1640e9,
        360e9,
        ("TPU v6 lite", "TPU v6e"),
        ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"),
        12.5e9,
        clock=1.75e9,
        narrow=_INT8,
        matrix_side=256,
        compiler_options=_TPU_OPTIONS + _BETWEEN_MATMULS + _BY_SPARSE_CORES + _LARGE_WINDOWS,
    ),
    # GPUs: NVIDIA's data sheets (dense bf16; NVLink one way; one 400 Gb/s adapter a GPU). The memory is 95 % of what
    # the driver shows, as with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.
    "h100": Chip(
        "h100",
        int(0.95 * 81_559 * 2**20),
        989e12,
        3350e9,
        450e9,
        ("NVIDIA H100",),
        _GPU_SLICES,
        50e9,
        narrow=_INT8_AND_FP8,
        description=f"memory_bandwidth: 3350000000000 device_memory_size: {81_559 * 2**20}",
    ),
    "h200": Chip(
        "h200",
        int(0.95 * 143_771 * 2**20),
        989e12,
        4800e9,
        450e9,
        ("NVIDIA H200",),
        _GPU_SLICES,
        50e9,
        narrow=_INT8_AND_FP8,
        description=f"memory_bandwidth: 4800000000000 device_memory_size: {143_771 * 2**20}",
    ),
}


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip with this JAX name, or None for a CPU or an unknown chip."""
    names = {name: chip for chip in CHIPS.values() for name in chip.kinds}
    longest = max((name for name in names if device_kind.startswith(name)), key=len, default=None)
    return None if longest is None else names[longest]
