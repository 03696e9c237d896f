"""Arithmetic and traffic of programs whose compiler estimates nothing, against figures derived by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from astra_jax.planner.hlo import read_hlo
from astra_jax.planner.roofline import Rates, roofline

EVEN = Rates(flops=1.0, bandwidth=1.0)
M, D, F, LAYERS = 64, 128, 512, 5


def test_loops_of_matmuls_take_their_arithmetic_times_the_trips() -> None:
    def forward(weights_ldf, x_md):
        return jax.lax.scan(lambda x_md, w_df: (jnp.tanh(x_md @ w_df) @ w_df.T, None), x_md, weights_ldf)[0]

    shapes = (jax.ShapeDtypeStruct((LAYERS, D, F), jnp.float32), jax.ShapeDtypeStruct((M, D), jnp.float32))
    module = read_hlo(jax.jit(forward).lower(*shapes).compile().as_text())
    found = roofline(module, EVEN)
    assert found["matmul"] == pytest.approx(LAYERS * 2 * (2 * M * D * F))
    # Of the stack of weights each trip reads its own part: all of it once, and the hidden values there and back.
    once = 4 * (LAYERS * D * F + LAYERS * 2 * M * F)
    assert 0 < found["memory"] < 4 * once
    assert roofline(module, Rates(2.0, 4.0)) == pytest.approx(
        {"matmul": found["matmul"] / 2, "memory": found["memory"] / 4}
    )  # fmt: skip


BRANCHES = """HloModule jit_f

%fused (p.0: f32[8,16], p.1: s32[], p.2: f32[1,16]) -> f32[8,16] {
  %p.0 = f32[8,16]{1,0} parameter(0)
  %p.2 = f32[1,16]{1,0} parameter(2)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %put = f32[8,16]{1,0} dynamic-update-slice(%p.0, %p.2, %p.1, %zero)
}

%short (a: f32[8,16]) -> f32[8,16] {
  ROOT %a = f32[8,16]{1,0} parameter(0)
}

%long (b: f32[8,16]) -> f32[8,16] {
  %b = f32[8,16]{1,0} parameter(0)
  %add = f32[8,16]{1,0} add(%b, %b)
  ROOT %sub = f32[8,16]{1,0} subtract(%add, %b)
}

ENTRY %main (x: f32[8,16], i: s32[], row: f32[1,16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %row = f32[1,16]{1,0} parameter(2)
  %put.1 = f32[8,16]{1,0} fusion(%x, %i, %row), kind=kLoop, calls=%fused
  ROOT %either = f32[8,16]{1,0} conditional(%i, %put.1, %put.1), branch_computations={%short, %long}
}
"""


def test_slices_count_by_themselves_and_of_branches_the_longest_does() -> None:
    put = 4 * 16 + 4 + 4 * 16  # the row and its place are read, the row is written: the rest stays where it is
    longest = 2 * 3 * 4 * 8 * 16
    assert roofline(read_hlo(BRANCHES), EVEN) == {"memory": put + longest}
