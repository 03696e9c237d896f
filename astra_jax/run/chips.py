"""Memory and speed of accelerators."""

from __future__ import annotations

import re
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
        description: of a GPU, for the compiler: fields of `stream_executor.GpuDeviceInfoProto`.
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
_FAST_INT8 = (("int8", 4.0), ("fp8", 2.0))


def _gpu(
    name: str,
    kinds: tuple[str, ...],
    memory_mib: int,
    flops: float,
    hbm_bandwidth: float,
    link_bandwidth: float,
    network_bandwidth: float | None,
    narrow: tuple[tuple[str, float], ...],
    capability: tuple[int, int],
    cores: int,
    l2_mib: int,
    clock_ghz: float,
) -> Chip:
    """Return a GPU.

    Args:
        memory_mib: memory that the driver shows, of which JAX may use 95 % (XLA_PYTHON_CLIENT_MEM_FRACTION=0.95).
        capability: CUDA compute capability, which determines shared memory and threads (CUDA C++ Programming Guide,
            table "Technical Specifications per Compute Capability").
        cores: streaming multiprocessors.
    """
    threads, shared, opt_in = _LIMITS[capability]
    major, minor = capability
    description = (
        f"threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 "
        f"shared_memory_per_core: {shared} shared_memory_per_block_optin: {opt_in} threads_per_core_limit: {threads} "
        f"core_count: {cores} fpus_per_core: {64 if capability == (8, 0) else 128} block_dim_limit_x: 2147483647 "
        f"block_dim_limit_y: 65535 block_dim_limit_z: 65535 l2_cache_size: {l2_mib * 2**20} "
        f"clock_rate_ghz: {clock_ghz} registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
        f"cuda_compute_capability {{ major: {major} minor: {minor} }} "
        f"memory_bandwidth: {int(hbm_bandwidth)} device_memory_size: {memory_mib * 2**20}"
    )
    memory = int(0.95 * memory_mib * 2**20)
    slices = _GPU_SLICES if network_bandwidth else _GPU_SLICES[:4]
    return Chip(
        name,
        memory,
        flops,
        hbm_bandwidth,
        link_bandwidth,
        kinds,
        slices,
        network_bandwidth,
        narrow=narrow,
        description=description,
    )


_LIMITS = {
    (8, 0): (2048, 167_936, 166_912),
    (8, 6): (1536, 102_400, 101_376),
    (8, 9): (1536, 102_400, 101_376),
    (9, 0): (2048, 233_472, 232_448),
    (10, 0): (2048, 233_472, 232_448),
    (12, 0): (1536, 102_400, 101_376),
}
"""(threads of a core, bytes of shared memory of a core, and at most of a block) by compute capability."""
# NVIDIA's data sheets: dense bf16 with sums in float32, memory bandwidth, and NVLink or PCIe x16 in one direction.
# RTX 4090: "NVIDIA Ada GPU Architecture", appendix A. RTX 5090: "NVIDIA RTX Blackwell GPU Architecture", appendix A.
# L4, L40S, A10G, A100, H100, H200: the card's "Tensor Core GPU Datasheet". B200: an eighth of the "DGX B200 Datasheet".
# 8-bit factors are peaks over bf16's; GeForce halves bf16 and fp8 with sums in float32, but not int8. Networks: one
# adapter of 400 Gb/s for each H100, H200 and B200, 200 Gb/s for each A100. L4, A10G and L40S: an eighth of Amazon's
# g6.48xlarge, g5.48xlarge and g6e.48xlarge (100, 100 and 400 Gb/s). GeForce cards have no adapters of their own.
_GPUS = (
    _gpu("4090", ("NVIDIA GeForce RTX 4090",), 24_564, 165.2e12, 1008e9, 32e9, None, _FAST_INT8, (8, 9), 128, 72, 2.52),
    _gpu(
        "5090", ("NVIDIA GeForce RTX 5090",), 32_607, 209.5e12, 1792e9, 64e9, None, _FAST_INT8, (12, 0), 170, 96, 2.41
    ),
    _gpu("l4", ("NVIDIA L4",), 23_034, 121e12, 300e9, 32e9, 1.5625e9, _INT8_AND_FP8, (8, 9), 58, 48, 2.04),
    _gpu("a10g", ("NVIDIA A10G",), 23_028, 70e12, 600e9, 32e9, 1.5625e9, _INT8, (8, 6), 80, 6, 1.71),
    _gpu("l40s", ("NVIDIA L40S",), 46_068, 362e12, 864e9, 32e9, 6.25e9, _INT8_AND_FP8, (8, 9), 142, 96, 2.52),
    _gpu(
        "a100-40gb",
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        *(40_960, 312e12, 1555e9, 300e9, 25e9, _INT8, (8, 0), 108, 40, 1.41),
    ),
    _gpu(
        "a100-80gb",
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        *(81_920, 312e12, 2039e9, 300e9, 25e9, _INT8, (8, 0), 108, 40, 1.41),
    ),
    _gpu("h100", ("NVIDIA H100",), 81_559, 989e12, 3350e9, 450e9, 50e9, _INT8_AND_FP8, (9, 0), 132, 50, 1.98),
    _gpu("h200", ("NVIDIA H200",), 143_771, 989e12, 4800e9, 450e9, 50e9, _INT8_AND_FP8, (9, 0), 132, 50, 1.98),
    _gpu("b200", ("NVIDIA B200",), 183_359, 2250e12, 8000e9, 900e9, 50e9, _INT8_AND_FP8, (10, 0), 148, 126, 1.96),
)
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
    **{chip.name: chip for chip in _GPUS},
}


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip with this JAX name, or None for a CPU or an unknown chip."""
    if "Laptop" in device_kind:  # smaller chips under the names of larger ones
        return None
    names = {name: chip for chip in CHIPS.values() for name in chip.kinds}
    fits = [name for name in names if re.match(rf"{re.escape(name)}(?![A-Za-z0-9])", device_kind)]
    return names[max(fits, key=len)] if fits else None
