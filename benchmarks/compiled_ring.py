"""Compare gathered keys and values, as in our attention, with a ring: a layer's forward pass, compiled for a TPU slice.

python -m benchmarks.compiled_ring --topology=v6e:4x4 --tokens=81920 --save

In the ring, keys and values move from device to device, and partial results are merged by their log-sum-exp. The row is
in zig-zag order, so that the work is balanced. At every step off the diagonal each device has two whole blocks of
pairs: its late queries with the visiting early keys, and either its early queries with those or its late queries with
the visiting late keys. The kernels' arithmetic is the same both ways. The differences are counted: all other work,
collectives waited for, and memory.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from absl import flags

from astra_jax.base.settings import Length
from benchmarks import rows
from launch.flags import cli
from launch.flags.numbers import number_flag

_TOPOLOGY = flags.DEFINE_string("topology", "v6e:4x4", "Slice; all of it is context.")
_TOKENS = number_flag("tokens", 81_920, Length, "Of the row.")
_SAVE = flags.DEFINE_bool("save", False, "Append the row to the kept ones.")


def ring(kernels: Any, devices: int, q: Any, k: Any, v: Any, segments: Any) -> Any:
    """One device's part of [1, T, heads, H] → [1, T, N, H]."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    local, whole = kernels
    here, half = jax.lax.axis_index("context"), q.shape[1] // 2
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q * q.shape[3] ** -0.5, k, v))

    def attend(kernel: Any, *of: Any) -> tuple[Any, Any]:
        q, k, v, q_segments, k_segments = of
        out, (logsumexp,) = jax.vmap(kernel)(q, k, v, splash.SegmentIds(q=q_segments, kv=k_segments))
        return out.astype(jnp.float32), logsumexp

    def merged(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
        both = jnp.logaddexp(one[1], other[1])
        weighted = (out * jnp.exp(logsumexp - both)[..., None] for out, logsumexp in (one, other))
        return sum(weighted), both

    def halves(x: Any, axis: int) -> tuple[Any, Any]:
        return jax.lax.slice_in_dim(x, 0, half, axis=axis), jax.lax.slice_in_dim(x, half, 2 * half, axis=axis)

    def step(carry: Any, index: Any) -> tuple[Any, None]:
        (k, v, k_segments), early, late = carry
        coming = jax.lax.ppermute((k, v, k_segments), "context", [(i, (i + 1) % devices) for i in range(devices)])
        from_before = index <= here  # its keys are of a device before this one
        (q_early, q_late), (s_early, s_late) = halves(q, 2), halves(segments, 1)
        (k_early, k_late), (v_early, v_late), (ks_early, ks_late) = halves(k, 2), halves(v, 2), halves(k_segments, 1)
        choose = partial(jnp.where, from_before)
        second = (choose(q_early, q_late), choose(k_early, k_late), choose(v_early, v_late))
        first = (q_late, k_early, v_early, s_late, ks_early)
        second = (*second, choose(s_early, s_late), choose(ks_early, ks_late))
        pairs = zip(first, second, strict=True)
        out, logsumexp = attend(whole, *(jnp.concatenate(pair) for pair in pairs))
        late = merged(late, (out[:1], logsumexp[:1]))
        target = jax.tree.map(choose, early, late)
        new = merged(target, (out[1:], logsumexp[1:]))
        return (coming, jax.tree.map(choose, new, early), jax.tree.map(choose, late, new)), None

    out, logsumexp = attend(local, q, k, v, segments, segments)
    first = jax.lax.ppermute((k, v, segments), "context", [(i, (i + 1) % devices) for i in range(devices)])
    early, late = (tuple(pair) for pair in zip(halves(out, 2), halves(logsumexp, 2), strict=True))
    (_, early, late), _ = jax.lax.scan(step, (first, early, late), jnp.arange(1, devices))
    return jnp.moveaxis(jnp.concatenate([early[0], late[0]], axis=2), 1, 2).astype(v.dtype)


def main() -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from astra_jax.attention import attention
    from astra_jax.attention.splash import block_of
    from astra_jax.mesh import make_mesh, on_each_device
    from astra_jax.models.qwen3.presets import PRESETS
    from astra_jax.planner.hardware import Slice
    from astra_jax.planner.hlo import read_hlo
    from astra_jax.planner.kernels import ATTENTION
    from astra_jax.planner.network import Torus
    from astra_jax.planner.schedule import schedule_of

    slice_, model, tokens = Slice.parse(_TOPOLOGY.value), PRESETS["4b"], _TOKENS.value
    assert tokens is not None
    chip, mesh = slice_.chip, make_mesh(context=slice_.chips, devices=slice_.devices())
    network = Torus.of(list(mesh.devices.flat), slice_.shape, chip.link_bandwidth, chip.network_bandwidth)
    heads, places = P(None, "context", None, None), P(None, "context")

    def of(shape: tuple[int, ...], spec: P, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))

    q, k = (of((1, tokens, n, model.head_dim), heads) for n in (model.n_heads, model.n_kv_heads))
    ids = of((1, tokens), places, "int32")

    def kernel(length: int, causal: bool) -> Any:
        mask = (splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask)((length, length))
        block = block_of(length)
        return splash_attention_kernel.make_splash_mha(
            splash_attention_mask.MultiHeadMask([mask] * model.n_heads),
            block_sizes=splash_attention_kernel.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block),
            head_shards=1,
            q_seq_shards=1,
            save_residuals=True,
        )

    own = tokens // slice_.chips
    part = partial(ring, (kernel(own, True), kernel(own // 2, False)), slice_.chips)
    ways = {
        "gathered": lambda q, k, v, ids: attention(q, k, v, ids, ids, mesh=mesh),
        "ring": on_each_device(part, mesh, (heads, heads, heads, places), heads),
    }
    found: dict[str, Any] = {}
    for name, way in ways.items():
        compiled = jax.jit(way).lower(q, k, k, ids).compile(dict(chip.compiler_options))
        spent = schedule_of(read_hlo(compiled.as_text()), chip, network, dict(mesh.shape))
        found[name] = {
            "beside_kernels_ms": 1e3 * sum(time for part, time in spent.work.items() if part != ATTENTION),
            "exposed_ms": 1e3 * sum(spent.exposed.values()),
            "hidden_ms": 1e3 * sum(spent.hidden.values()),
            "temporaries_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        }
    rows.report("compiled_ring", {"topology": slice_.name, "tokens": tokens} | found, save=_SAVE.value)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"  # the programs are only compiled
    cli.run(main)
