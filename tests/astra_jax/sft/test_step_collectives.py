"""What a step sends between chips: which collectives, of which types, how many bytes; compiled for a TPU slice."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import jax
import pytest
from tpu_world import QUICKER, needs_libtpu

from astra_jax.mesh import make_mesh
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.planner.collectives import collective_of, collectives
from astra_jax.planner.hardware import Slice
from astra_jax.planner.hlo import Module
from astra_jax.planner.programs import Compiling, sft_programs
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig

pytestmark = [
    pytest.mark.slow,
    needs_libtpu,
]
ROWS, LENGTH, CHIPS = 2, 512, 4
MODEL = Qwen3Config(
    vocab_size=8192,
    d_model=256,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=128,
    d_ff=256,
    tie_embeddings=False,
    dtype="bfloat16",
    param_dtype="float32",
)
HIDDEN = ROWS * LENGTH * (CHIPS - 1) / CHIPS * MODEL.d_model
"""Numbers of the hidden states of other chips' tokens."""


@pytest.fixture(scope="module")
def step() -> Module:
    return compiled_step(MODEL, ROWS, fsdp=2, context=2)


@pytest.fixture(scope="module")
def received(step) -> dict[tuple[str, str], float]:
    return received_by(step)


def compiled_step(model: Qwen3Config, rows: int, **axes: int) -> Module:
    mesh = make_mesh(**axes, devices=Slice.parse("v6e:2x2").devices())
    config = SFTConfig(data=DataConfig(seq_len=LENGTH), batch_size=rows, remat="full", compiler_options=QUICKER)
    (compiled,) = sft_programs(model, config, mesh, Compiling())
    assert compiled.module is not None
    return compiled.module


def received_by(step: Module) -> dict[tuple[str, str], float]:
    """Bytes that a chip receives in a step, by (kind, type)."""
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for one, runs in collectives(step):
        sums[one.kind, "+".join(one.dtypes)] += one.received * runs
    return dict(sums)


def of(received: dict[tuple[str, str], float], kinds: str, dtype: str) -> float:
    return sum(size for (kind, of_type), size in received.items() if kind in kinds.split() and of_type == dtype)


def matrices() -> int:
    """Numbers in the layers' matrices."""
    leaves = jax.tree.leaves(MODEL.abstract_params()["layers"])
    return sum(math.prod(leaf.shape) for leaf in leaves if len(leaf.shape) > 2)


def test_weights_are_gathered_in_bfloat16(received) -> None:
    """The layers' forward and backward; keys and values. The head's are not: of its tokens each chip sees all."""
    small = 4 * ROWS * LENGTH * 16  # some numbers a token
    assert of(received, "all-gather", "f32") < small
    layers = 2 * matrices() * (CHIPS - 1) / CHIPS
    heads = 2 * 2 * 2 * MODEL.n_layers * ROWS / 2 * LENGTH / 2 * MODEL.n_kv_heads * MODEL.head_dim
    whole = of(received, "all-gather", "bf16")
    assert 2 * layers + 2 * HIDDEN <= whole <= 3 * layers + heads + 2 * HIDDEN + small


def test_gradients_are_summed_in_float32(received) -> None:
    """Scattered, or whole where the compiler makes that of it; those of the head's tokens too. In bfloat16 only those
    of keys and values, over context."""
    own = 4 * matrices() * (CHIPS - 1) / CHIPS
    whole = of(received, "all-reduce reduce-scatter", "f32")
    assert own + 4 * HIDDEN <= whole <= 2 * own + 2 * 4 * HIDDEN + 100_000
    keys = 2 * 2 * MODEL.n_layers * ROWS / 2 * LENGTH / 2 * MODEL.n_kv_heads * MODEL.head_dim
    assert of(received, "all-reduce reduce-scatter", "bf16") <= 2 * keys


def test_embeddings_are_exchanged_and_not_gathered(received) -> None:
    """A chip's own tokens, there and, as gradients, back; of the head's matrix and its gradient a chip's own words."""
    tokens = 2 * 2 * ROWS / 2 * LENGTH / 2 * MODEL.d_model * (CHIPS - 1) / CHIPS
    head = MODEL.d_model * MODEL.vocab_size / CHIPS * (CHIPS - 1) / CHIPS
    assert of(received, "all-to-all", "bf16") <= tokens + 2 * head
    norm = 4 * MODEL.d_model  # of one norm the gradient goes that way too
    assert of(received, "all-to-all", "f32") <= 4 * head + norm
    kinds = {kind for kind, _ in received}
    assert kinds <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
    permuted = sum(size for (kind, _), size in received.items() if kind == "collective-permute")
    numbers = 4 * ROWS * LENGTH * 8  # the batch's, into zig-zag order
    # Late chunks of keys and values, to where they are in turn: forward, again, and as gradients back.
    late = 3 * 2 * 2 * MODEL.n_layers * ROWS / 2 * LENGTH / 4 * MODEL.n_kv_heads * MODEL.head_dim
    assert permuted <= numbers + late


def test_the_heads_gradient_is_sent_before_the_layers_backward_pass(step) -> None:
    """And not after it: until then a chip holds it for all tokens, beside all else of that pass."""
    entry = step.computations[step.entry].instructions
    loops = [place for place, one in enumerate(entry) if one.opcode == "while"]
    words = str(MODEL.vocab_size // CHIPS)
    sent = [
        place
        for place, one in enumerate(entry)
        if one.opcode == "all-to-all" and one.result.startswith("f32") and words in one.result
    ]
    assert sent and max(sent) < loops[-1]


def test_a_head_of_few_words_is_gathered_and_its_gradient_scattered() -> None:
    """Fewer than tokens are in a micro-batch: then these would be more to send."""
    few = dataclasses.replace(MODEL, vocab_size=512)
    sent = received_by(compiled_step(few, 2 * CHIPS, fsdp=4))
    head = MODEL.d_model * 512 * (CHIPS - 1) / CHIPS
    layers = matrices() * (CHIPS - 1) / CHIPS
    assert 2 * (2 * layers + head) <= of(sent, "all-gather", "bf16") <= 2 * (3 * layers + head) + 100_000
    assert 4 * (layers + head) <= of(sent, "all-reduce reduce-scatter", "f32") <= 2 * 4 * (layers + head) + 100_000


def test_on_v6e_the_sparse_cores_gather_and_scatter(step) -> None:
    """Weights, keys and values, and all gradients: the matmuls' core waits for none that starts early enough."""
    beside = {
        called
        for computation in step.computations.values()
        for one in computation.instructions
        if one.opcode == "call-start"
        for called in one.called
    }
    kinds = {"all-gather": 0, "reduce-scatter": 0}
    for name, computation in step.computations.items():
        for one in computation.instructions:
            if (moved := collective_of(one, name)) is not None and moved.kind in kinds and moved.received > 2**16:
                assert name in beside, one.name
                kinds[moved.kind] += 1
    assert min(kinds.values()) >= 7  # at least a layer's matrices


def test_experts_are_gathered_in_bfloat16_and_their_gradients_summed_in_float32() -> None:
    """Routers and biases too: in bfloat16 only activations are summed, the experts' outputs and their gradients."""
    model = dataclasses.replace(MODEL, n_experts=16, experts_per_token=2, d_ff=128, attention_bias=True)
    received = received_by(compiled_step(model, CHIPS, fsdp=2, expert=2))
    experts = model.n_layers * model.n_experts * 3 * model.d_model * model.d_ff
    tokens = CHIPS * LENGTH / CHIPS * model.d_model
    small = 4 * CHIPS * LENGTH * 16
    assert of(received, "all-gather", "f32") < small
    assert of(received, "all-gather", "bf16") >= 2 * 2 * experts / 2 / 2
    own = 4 * experts / 2 / 2  # of half of the experts the other half of the width
    assert own <= of(received, "all-reduce reduce-scatter", "f32")
    assert of(received, "all-reduce reduce-scatter", "bf16") <= 2 * 3 * model.n_layers * 2 * tokens
