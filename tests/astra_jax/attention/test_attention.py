"""The attention backends against attention written out over one full score matrix."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs_world import as_users
from selection import by_day

import astra_jax.attention
from astra_jax.attention import (
    attention,
    blockwise,
    cached_attention,
    documents,
    extending_attention,
    needs_prefix_flag,
    splash,
    splash_backward,
    triton,
)
from astra_jax.attention.cache import Cache, ChunkedCache, of_tokens
from astra_jax.mesh import make_mesh, unzigzag, zigzag
from astra_jax.planner.hardware import INSTALL_GPU

B, T, N, K, H = 2, 80, 4, 2, 8
ON_GPU = pytest.mark.skipif(
    "cuda" not in os.environ["JAX_PLATFORMS"].split(","),
    reason="needs a GPU, JAX_PLATFORMS=cuda,cpu and JAX_DEFAULT_MATMUL_PRECISION=highest",
)
TRITON = ["triton_interpret", pytest.param("triton", marks=ON_GPU)]


def full_matrix(q, k, v, visible):
    """Return attention over one full matrix of scores; `visible` is a boolean mask that broadcasts to [B, N, T, S]."""
    k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    weights = jnp.where(visible, jnp.exp(scores), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    return jnp.einsum("bnts,bsnh->btnh", weights, v)


def reference(q, k, v, segments, positions):
    same = (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] > 0)
    return full_matrix(q, k, v, (same & (positions[:, :, None] >= positions[:, None]))[:, None])


@pytest.fixture
def packed():
    """Queries, keys, values, and three documents with padding behind them in each row."""
    rng = np.random.default_rng(0)
    q = jnp.array(rng.normal(size=(B, T, N, H)), jnp.float32)
    k, v = (jnp.array(rng.normal(size=(B, T, K, H)), jnp.float32) for _ in range(2))
    lengths = [[30, 1, 40, 9], [16, 16, 16, 32]]
    segments = np.stack([np.repeat([1, 2, 3, 0], row) for row in lengths])
    positions = np.stack([np.concatenate([np.arange(n) for n in row]) for row in lengths])
    return q, k, v, jnp.array(segments), jnp.array(positions)


def run(q, k, v, segments, positions, **options):
    return attention(q, k, v, segments, positions, **options)


@pytest.mark.parametrize("blocks", by_day([[512, 1024], [16, 32], [24, 16], [80, 7]], [16, 32], [80, 7]))
def test_blockwise_equals_the_full_matrix_forward_and_backward(packed, blocks, monkeypatch) -> None:
    monkeypatch.setattr(blockwise, "QUERY_BLOCK", blocks[0])
    monkeypatch.setattr(blockwise, "KEY_BLOCK", blocks[1])
    q, k, v, segments, positions = packed
    weights = jnp.cos(jnp.arange(q.size)).reshape(q.shape)
    np.testing.assert_allclose(run(*packed), reference(*packed), atol=2e-6)
    ours, theirs = (
        jax.grad(lambda *qkv, f=f: (f(*qkv, segments, positions) * weights).sum(), argnums=(0, 1, 2))(q, k, v)
        for f in (run, reference)
    )
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, expected, atol=5e-6)


def test_padding_gets_zeros_and_no_gradient(packed) -> None:
    q, k, v, segments, positions = packed
    padding = np.asarray(segments) == 0
    assert not np.asarray(run(*packed))[padding].any()
    squared = lambda q, k, v: (run(q, k, v, segments, positions) ** 2).sum()  # noqa: E731
    for gradient in jax.grad(squared, argnums=(0, 1, 2))(q, k, v):
        assert np.isfinite(gradient).all()
        assert not np.asarray(gradient)[padding].any()


def test_documents_of_a_row_do_not_see_each_other(packed) -> None:
    q, k, v, segments, positions = packed
    before = np.asarray(run(*packed))
    after = np.asarray(run(q, k.at[:, :16].add(3.0), v.at[:, :16].add(3.0), segments, positions))
    np.testing.assert_array_equal(before[1, 16:], after[1, 16:])
    assert not np.allclose(before[1, 15], after[1, 15])


def going_on_row(lengths: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions, [1, T], of documents: (tokens, number of the one it goes on from, or 0)."""
    of = {number: n for number, (n, _) in enumerate(lengths, start=1)}
    segments = [
        np.full(n, documents.prefix_segment_id(i, other) if other else i) for i, (n, other) in enumerate(lengths, 1)
    ]
    positions = [np.arange(n) + of.get(other, 0) for n, other in lengths]
    return np.concatenate(segments)[None].astype(np.int32), np.concatenate(positions)[None].astype(np.int32)


@pytest.mark.parametrize(
    ("backend", "blocks"),
    [
        ("blockwise", (64, 32)),
        ("triton_interpret", (16, 16)),
        pytest.param("blockwise", (16, 16), marks=pytest.mark.nightly),
        pytest.param("triton_interpret", (64, 32), marks=pytest.mark.nightly),
        pytest.param("triton", (64, 32), marks=ON_GPU),
        pytest.param("splash_interpret", (128, 128), marks=pytest.mark.slow),
    ],
)
def test_what_goes_on_from_a_prompt_sees_what_it_would_behind_it(backend, blocks, monkeypatch) -> None:
    """Two prompts, of which three and two documents go on, one that goes on from none, padding; against one full score
    matrix, forward and backward."""
    monkeypatch.setattr(blockwise, "QUERY_BLOCK", blocks[0])
    monkeypatch.setattr(blockwise, "KEY_BLOCK", blocks[1])
    monkeypatch.setattr(triton, "BLOCKS", (blocks, blocks[::-1]))
    lengths = [(50, 0), (20, 1), (1, 1), (33, 1), (17, 0), (30, 5), (9, 0), (40, 5)]
    segments, positions = going_on_row(lengths)
    t, h = segments.size + 13, 128 if backend.startswith("splash") else 16
    segments, positions = (jnp.pad(jnp.asarray(x), ((0, 0), (0, 13))) for x in (segments, positions))
    rng = np.random.default_rng(5)
    q, k, v, g = (jnp.array(rng.normal(size=(1, t, n, h)), jnp.float32) for n in (N, K, K, N))

    documents_of = np.pad(np.repeat(np.arange(1, len(lengths) + 1), [n for n, _ in lengths]), (0, 13))
    prompts_of = np.pad(np.repeat([other for _, other in lengths], [n for n, _ in lengths]), (0, 13))
    same = documents_of[:, None] == documents_of
    of_prompt = (prompts_of[:, None] == documents_of) & (prompts_of[:, None] > 0)
    visible = (same & np.tri(t, dtype=bool) | of_prompt) & (documents_of[:, None] > 0)

    def expected_total(q, k, v):
        return (full_matrix(q, k, v, visible) * g).sum()

    def total(q, k, v):
        return (run(q, k, v, segments, positions, backend=backend, has_shared_prefix=True) * g).sum()

    ours, theirs = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(q, k, v) for f in (total, expected_total))
    for mine, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize(("platform", "told"), [("cpu", False), ("gpu", False), ("tpu", True)])
def test_the_kernel_that_compares_ids_alone_is_told(platform, told, monkeypatch) -> None:
    monkeypatch.setattr(astra_jax.attention, "platform_of", lambda mesh: platform)
    assert needs_prefix_flag(128, None) is told


def test_document_numbers_have_bounds() -> None:
    assert (
        documents.numbers(documents.prefix_segment_id(7, 3)) == 7
        and documents.before(documents.prefix_segment_id(7, 3)) == 3
    )
    for numbers in ((0, 1), (1, 0), (documents.MOST + 1, 1)):
        with pytest.raises(ValueError, match="numbers are from 1 to 32767"):
            documents.prefix_segment_id(*numbers)
    last = np.int32(documents.prefix_segment_id(documents.MOST, documents.MOST))
    assert documents.numbers(last) == documents.before(last) == documents.MOST


def test_cached_attention_equals_attention_over_one_document(packed) -> None:
    q, k, v, *_ = packed
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    whole = run(q, k, v, jnp.ones((B, T), jnp.int32), positions)
    cache = of_tokens(k, v, k.dtype)
    visible = jnp.arange(T) <= positions[:, -3:, None]
    last = cached_attention(q[:, -3:], (cache, visible))
    np.testing.assert_allclose(last, whole[:, -3:], atol=2e-6)
    parts = [(Cache(cache.k_bkhs[..., a:b], cache.v_bksh[:, :, a:b]), visible[..., a:b]) for a, b in ((0, 7), (7, T))]
    np.testing.assert_allclose(cached_attention(q[:, -3:], *parts), whole[:, -3:], atol=2e-6)
    in_parts = ChunkedCache(tuple(part for part, _ in parts))
    np.testing.assert_array_equal(cached_attention(q[:, -3:], (in_parts, visible)), cached_attention(q[:, -3:], *parts))


def test_unknown_backend_names_the_known_ones(packed) -> None:
    with pytest.raises(ValueError, match="'flash'; use one of auto, blockwise, splash"):
        run(*packed, backend="flash")


# ---------------------------------------------------------------------------------------------------------------------
# Splash, interpreted; and what each backend holds


@pytest.fixture(scope="module")
def packed_wide():
    """As `packed`, with 128 wide heads, which the kernel wants, and a length that it must pad."""
    rng = np.random.default_rng(1)
    t, h = 500, 128
    q = jnp.array(rng.normal(size=(1, t, N, h)), jnp.float32)
    k, v = (jnp.array(rng.normal(size=(1, t, K, h)), jnp.float32) for _ in range(2))
    lengths = [130, 1, 300, 69]
    segments = np.repeat([1, 2, 3, 0], lengths)[None]
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    return q, k, v, jnp.array(segments), jnp.array(positions)


@pytest.fixture(scope="module")
def expected_wide(packed_wide):
    """Output and gradients of `packed_wide` with the blockwise backend."""
    return value_and_gradients(packed_wide, backend="blockwise")


def value_and_gradients(operands, **options):
    q, k, v, segments, positions = operands
    weights = jnp.cos(jnp.arange(q.size)).reshape(q.shape)

    def total(q, k, v):
        o = run(q, k, v, segments, positions, **options)
        return (o * weights).sum(), o

    (_, o), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return o, *gradients


@pytest.mark.nightly
def test_splash_equals_blockwise_forward_and_backward(packed_wide, expected_wide) -> None:
    ours = value_and_gradients(packed_wide, backend="splash_interpret")
    for mine, expected in zip(ours, expected_wide, strict=True):
        np.testing.assert_allclose(mine, expected, atol=2e-5)


def test_blocks_that_share_a_document_are_known_by_their_least_and_greatest() -> None:
    """Against every pair of tokens; a block that shares none may be taken for one that does only where documents are
    in a mixed order, which rows never are."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, 40, 12)
        own = np.repeat(np.arange(1, 13), lengths)
        ids = np.pad(np.where(own > 3, own | 2 << 15, own), (0, 512 - len(own)))  # of one length: compiled once
        for queries in (ids, documents.before(ids)):
            wanted = (queries[:, None] & documents.MOST) == (ids & documents.MOST)
            wanted &= (queries > 0)[:, None] & (ids > 0)
            wanted = wanted.reshape(len(ids) // 16, 16, len(ids) // 32, 32).any(axis=(1, 3))
            found = splash.sharing(jnp.array(queries)[None], jnp.array(ids)[None], (16, 32))
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("has_shared_prefix", by_day([False, True], True))
def test_splash_does_not_visit_the_blocks_of_other_documents(has_shared_prefix, monkeypatch) -> None:
    """What is not visited may be anything: keys and values of another document are no numbers, and a visit would make
    none of whatever sees them."""
    monkeypatch.setattr(splash, "LARGEST_BLOCK", 128)
    lengths = [(128, 0), (128, 0), (128, 2 if has_shared_prefix else 0), (128, 0)]
    segments, positions = map(jnp.asarray, going_on_row(lengths))
    rng = np.random.default_rng(7)
    q, k, v, g = (jnp.array(rng.normal(size=(1, 512, n, 128)), jnp.float32) for n in (N, K, K, N))
    where = jnp.arange(512)[None, :, None, None]

    def of(sick: int, well: list[int]) -> None:
        ends = np.cumsum([0, *(n for n, _ in lengths)])
        bad = (where >= int(ends[sick])) & (where < int(ends[sick + 1]))

        def total(q, k, v):
            o = run(q, k, v, segments, positions, backend="splash_interpret", has_shared_prefix=has_shared_prefix)
            return jnp.where(bad, 0.0, o * g).sum(), o

        given = (q, *(jnp.where(bad, jnp.nan, x) for x in (k, v)))
        (_, o), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*given)
        for one in well:
            for x in (o, *gradients):
                assert np.isfinite(x[:, int(ends[one]) : int(ends[one + 1])]).all(), (sick, one)

    splash.make_kernel.cache_clear()
    try:
        of(0, [1, 2, 3])
        of(3, [0, 1, 2])
        of(1, [0, 3] if has_shared_prefix else [0, 2, 3])
    finally:
        splash.make_kernel.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("memory", by_day([2 * 512 * 512, 128 * 512, 1], 128 * 512))
def test_splashs_gradients_are_the_same_in_any_number_of_parts(packed_wide, expected_wide, memory, monkeypatch) -> None:
    """Both heads of a key head at once, a block of one, and a block where not even that has room."""
    monkeypatch.setattr(splash_backward, "MEMORY", memory)
    monkeypatch.setattr(splash, "LARGEST_BLOCK", 128)
    splash.make_kernel.cache_clear()
    try:
        ours = value_and_gradients(packed_wide, backend="splash_interpret")
    finally:
        splash.make_kernel.cache_clear()
    for mine, one in zip(ours, expected_wide, strict=True):
        np.testing.assert_allclose(mine, one, atol=2e-5)


@pytest.mark.parametrize("backend", TRITON)
@pytest.mark.parametrize(
    ("blocks", "order"),
    [
        (((32, 16), (16, 32)), "any"),
        *by_day([(((32, 16), (16, 32)), "row"), (((128, 64), (64, 64)), "row"), (((128, 64), (64, 64)), "any")]),
    ],
)
def test_triton_equals_blockwise_forward_and_backward(packed_wide, blocks, order, backend, monkeypatch) -> None:
    """Documents that begin and end within blocks, one of a single token, padding; the tokens shuffled too."""
    monkeypatch.setattr(triton, "BLOCKS", blocks)
    operands = packed_wide
    if order == "any":
        shuffled = np.random.default_rng(2).permutation(packed_wide[0].shape[1])
        operands = [x[:, shuffled] for x in packed_wide]
    ours = value_and_gradients(operands, backend=backend)
    for mine, expected in zip(ours, value_and_gradients(operands, backend="blockwise"), strict=True):
        np.testing.assert_allclose(mine, expected, atol=2e-5)


@ON_GPU
@pytest.mark.parametrize("h", [64, 128])
def test_the_gpus_kernels_are_as_near_as_bfloat16_lets_them_be(h: int) -> None:
    """Rows of 4,096 with a prompt from which others go on, in the blocks that training has; by the norm, against
    float32 of the same operands."""
    segments, positions = (
        jnp.tile(jnp.pad(jnp.asarray(x), ((0, 0), (0, 4_096 - x.size))), (2, 1))
        for x in going_on_row([(1_000, 0), (700, 1), (333, 1), (1_500, 0), (1, 4), (400, 4)])
    )
    rng = np.random.default_rng(7)
    qkv = [jnp.array(rng.normal(size=(2, 4_096, n, h)), jnp.bfloat16) for n in (8, 2, 2)]
    wide = (x.astype(jnp.float32) for x in qkv)
    ours = value_and_gradients((*qkv, segments, positions), backend="auto", has_shared_prefix=True)
    theirs = value_and_gradients((*wide, segments, positions), backend="blockwise")
    for mine, expected in zip(ours, theirs, strict=True):
        mine, expected = (np.asarray(x, np.float64) for x in (mine, expected))
        assert np.linalg.norm(mine - expected) < 1e-2 * np.linalg.norm(expected)


def test_triton_visits_no_block_that_is_hidden_whole() -> None:
    """Two documents of 128 over blocks of 64: of 16 pairs the 6 on or below the diagonal within a document."""
    segments = jnp.repeat(jnp.array([[1, 2]]), 128, axis=1)
    positions = jnp.tile(jnp.arange(128), 2)[None]
    sizes = triton._Sizes(64, 64, True)
    of_queries, of_keys = triton._ranges((segments, segments, positions, positions), sizes)
    assert of_queries[0].tolist() == [[0, 1], [0, 2], [2, 3], [2, 4]]
    assert of_keys[0].tolist() == [[0, 2], [1, 2], [2, 4], [3, 4]]
    nothing, _ = triton._ranges((segments * 0, segments, positions, positions), sizes)
    assert (nothing[..., 0] == nothing[..., 1]).all()


@pytest.mark.parametrize("backend", ["blockwise", *TRITON])
def test_next_tokens_see_what_is_cached_of_their_row_and_themselves(backend: str) -> None:
    """More of them than are scored at once: nothing cached, some, all of the window; with padding at a row's end."""
    window, new, n, k, h = 160, 100, 4, 2, 16
    cached, more = np.array([0, 37, 160]), np.array([100, 70, 1])
    rng = np.random.default_rng(3)
    q, keys, values = (jnp.array(rng.normal(size=(3, window + new, heads, h)), jnp.float32) for heads in (n, k, k))
    at = np.arange(window + new)
    # The reference has each row's tokens, cached and new, one after the other.
    real = (at < cached[:, None]) | ((at >= window) & (at < window + more[:, None]))
    positions = jnp.asarray(np.where(at < window, at, at - window + cached[:, None]).astype(np.int32))
    expected = attention(q, keys, values, jnp.asarray(real.astype(np.int32)), positions, backend="blockwise")
    whole = of_tokens(keys, values, jnp.float32)
    past = whole.window(window)
    fresh = Cache(whole.k_bkhs[..., window:], whole.v_bksh[..., window:, :])
    given = jnp.where(jnp.asarray(real), positions, -1)[:, window:]
    found = extending_attention(q[:, window:], past, fresh, given, backend=backend)
    in_parts = ChunkedCache(
        tuple(Cache(past.k_bkhs[..., a:b], past.v_bksh[..., a:b, :]) for a, b in ((0, 100), (100, 160)))
    )
    np.testing.assert_array_equal(extending_attention(q[:, window:], in_parts, fresh, given, backend=backend), found)
    for row, count in enumerate(more):
        np.testing.assert_allclose(found[row, :count], expected[row, window : window + count], atol=2e-5)


def test_triton_refuses_heads_that_its_tiles_cannot_hold(packed) -> None:
    with pytest.raises(ValueError, match="head_dim is 8; .*'triton' needs a power of two from 16; use 'blockwise'"):
        run(*packed, backend="triton")


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason=f"needs {INSTALL_GPU}")
@pytest.mark.parametrize("sizes", ["8_192, 64", "65_536, 128"])
def test_triton_compiles_for_gpus_and_never_holds_a_square(sizes: str) -> None:
    """All three kernels, with what a multiprocessor's memory holds, in a process of its own."""
    code = f"""
from test_attention import gradient_program, make_mesh
from astra_jax.planner.hardware import Slice
mesh = make_mesh(context=4, devices=Slice.parse("h200:4").devices())
t, h = {sizes}
program, arguments = gradient_program(t, 2, h, backend="auto", mesh=mesh)
compiled = program.lower(*arguments).compile()
assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 3
temporaries = compiled.memory_analysis().temp_size_in_bytes
assert temporaries < t * t / 4, (t, temporaries)
"""
    environment = {**as_users(), "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "has_shared_prefix"),
    [
        ("blockwise", False),
        ("splash_interpret", True),
        *by_day([("splash_interpret", False), ("triton_interpret", True)]),
    ],
)
def test_context_parallel_equals_one_device(packed_wide, backend, has_shared_prefix) -> None:
    """Each device has an early and a late chunk of the sequence, and half of the heads; two documents may go on from
    the first."""
    context = 2
    if has_shared_prefix:
        q, k, v, segments, positions = packed_wide
        others = segments > 1
        ids = jnp.where(others, documents.prefix_segment_id(1, 1) - 1 + segments, segments)
        packed_wide = q, k, v, ids, positions + 130 * others
    mesh = make_mesh(data=2, context=context, tensor=2)
    padded = [jnp.pad(x, ((0, 0), (0, 12)) + ((0, 0),) * (x.ndim - 2)) for x in packed_wide]
    twice = [jnp.concatenate([x, x]) for x in padded]
    expected = value_and_gradients(twice, backend="blockwise")
    with_mesh = value_and_gradients_zigzag(
        twice, context, backend=backend, mesh=mesh, has_shared_prefix=has_shared_prefix
    )
    for mine, one in zip(with_mesh, expected, strict=True):
        np.testing.assert_allclose(mine, one, atol=2e-5)


def value_and_gradients_zigzag(operands, context, **options):
    q, k, v, segments, positions = operands
    weights = jnp.cos(jnp.arange(q.size)).reshape(q.shape)

    def total(q, k, v):
        o = run(*(zigzag(x, context) for x in (q, k, v, segments, positions)), **options)
        o = unzigzag(o, context)
        return (o * weights).sum(), o

    (_, o), gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return o, *gradients


def gradient_program(t: int, heads: int, h: int, **options):
    """The gradient of attention over one row of `t`, and its abstract arguments."""
    shape = jax.ShapeDtypeStruct((1, t, heads, h), jnp.bfloat16)
    places = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def total(q, k, v, segments, positions):
        return run(q, k, v, segments, positions, **options).astype(jnp.float32).sum()

    return jax.jit(jax.grad(total, argnums=(0, 1, 2))), (shape, shape, shape, places, places)


@pytest.mark.parametrize("t", [8_192, 32_768])
def test_blockwise_never_holds_a_square(t) -> None:
    program, arguments = gradient_program(t, 2, 16, backend="blockwise")
    assert program.lower(*arguments).compile().memory_analysis().temp_size_in_bytes < t * t


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: pip install '.[tpu]'")
@pytest.mark.parametrize("sizes", ["65_536, False", "8_192, True"])
def test_splash_compiles_for_tpus_and_never_holds_a_square(sizes: str) -> None:
    """In a process of its own: libtpu takes this one's signals."""
    code = f"""
import jax
from test_attention import gradient_program, make_mesh
from astra_jax.planner.hardware import Slice
mesh = make_mesh(context=4, devices=Slice.parse("v5e:2x2").devices())
t, has_shared_prefix = {sizes}
program, arguments = gradient_program(t, 2, 128, backend="auto", mesh=mesh, has_shared_prefix=has_shared_prefix)
compiled = program.lower(*arguments).compile()
assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 2 + has_shared_prefix
temporaries = compiled.memory_analysis().temp_size_in_bytes
assert temporaries < t * t / 4, (t, temporaries)
"""
    environment = {**as_users(), "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=600)


def test_splash_over_context_wants_whole_blocks(packed_wide) -> None:
    with pytest.raises(ValueError, match="rows of 500 tokens over a context axis of 2: .* multiple of 512; use 512"):
        run(*packed_wide, backend="splash", mesh=make_mesh(data=4, context=2))


@pytest.mark.parametrize(("length", "context"), [(1024, 1), (2048, 4), (3072, 2)])
def test_splashs_schedule_is_that_of_the_whole_mask(length: int, context: int) -> None:
    """What is asked of a block, any and all of it, is worked out from its corners."""
    mask = splash._Causal(length, context)
    visible = mask.q_sequence[:, None] >= np.arange(length)
    for rows, columns in ((128, 128), (256, 512), (splash.block_of(length // 2 // context), splash.block_of(length))):
        for i, j in np.ndindex(length // rows, length // columns):
            block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            answer = mask[block]
            assert (answer.any(), answer.all()) == (visible[block].any(), visible[block].all()), (block, answer)


@pytest.mark.parametrize("context", [1, 2, 4, 8, 16, 32])
def test_good_row_lengths_have_large_blocks(context: int) -> None:
    for tokens in (1, 1_000, 4_096, 20_000, 20_480, 32_768, 74_752):
        length = splash.good_length(tokens, context)
        chunk = length // (2 * context if context > 1 else 1)
        assert length >= tokens and chunk % splash.BLOCK == 0
        assert splash.good_length(length, context) == length
        assert splash.block_of(chunk) >= min(chunk, splash.GOOD_BLOCK)
        if tokens >= 20_000 and context <= 16:
            assert length <= 1.1 * tokens
