"""What the compiler is told: each chip's options, a run's own over them, and what it does not take is refused."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tpu_world import needs_libtpu

from astra_jax.base.errors import InputError
from astra_jax.grpo.config import GRPOConfig
from astra_jax.mesh import make_mesh
from astra_jax.planner.hardware import Slice
from astra_jax.run.chips import CHIPS
from astra_jax.run.compiler import CompiledAhead, Program, check_options, compiler_options
from astra_jax.run.config import host_only_fields
from astra_jax.sft.config import SFTConfig
from configs.training import PRESETS
from launch.flags.cli import overridden

WINDOWED = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
TPUS = [chip for chip in CHIPS.values() if chip.name.startswith("v")]


def test_a_run_replaces_what_the_chip_has_and_can_leave_it_to_the_compiler() -> None:
    kind = CHIPS["v6e"].kinds[0]
    chips_own = dict(CHIPS["v6e"].compiler_options)
    assert dict(compiler_options(kind)) == chips_own
    assert WINDOWED in chips_own
    assert dict(compiler_options(kind, [f"{WINDOWED}=7", "xla_new=true"])) == chips_own | {
        WINDOWED: "7",
        "xla_new": "true",
    }
    assert WINDOWED not in dict(compiler_options(kind, [f"{WINDOWED}="]))
    assert compiler_options("cpu") == () == compiler_options("a chip of tomorrow")


@pytest.mark.parametrize(
    "wrong", ["", "=", "=3", "xla_a", "XLA_A=1", "xla a=1", "xla_a=1 2", "xla_a=\n", "a" * 200 + "=1"]
)
def test_what_is_no_name_and_value_is_refused(wrong: str) -> None:
    with pytest.raises(InputError, match="NAME=VALUE"):
        compiler_options("cpu", [wrong])


def test_they_are_a_setting() -> None:
    run = overridden(PRESETS["sft:4b"](), [("sft.compiler_options", '["xla_a=1", "xla_b=2"]')])
    assert run.sft.compiler_options == ("xla_a=1", "xla_b=2")


def test_an_option_that_this_compiler_does_not_take_is_refused_by_name() -> None:
    check_options(["xla_cpu_enable_fast_math=True"], None)
    check_options([f"{WINDOWED}="], make_mesh(data=8))  # nothing is asked of the compiler
    with pytest.raises(InputError, match=f"{WINDOWED}.*No such compile option"):
        check_options([f"{WINDOWED}=1"], None)
    with pytest.raises(InputError, match="xla_cpu_enable_fast_math=perhaps"):
        check_options(["xla_cpu_enable_fast_math=perhaps"], make_mesh(data=8))


@needs_libtpu
@pytest.mark.parametrize("chip", TPUS, ids=[chip.name for chip in TPUS])
def test_the_table_is_what_the_compiler_of_each_chip_takes(chip) -> None:
    """Some options are refused for a program that gathers weights, others for any."""
    mesh = make_mesh(fsdp=-1, devices=Slice(chip, chip.slices[0]).devices())
    check_options(["=".join(option) for option in chip.compiler_options], mesh)
    weights = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    rows = jax.ShapeDtypeStruct((1_024, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    loss = jax.value_and_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w).astype(jnp.float32)))
    jax.jit(loss).lower(weights, rows).compile(dict(chip.compiler_options))


def test_a_program_has_the_options_of_its_arguments_devices_and_of_its_config() -> None:
    def double(x, *, config):
        return 2 * x

    program = Program(double, settings="config", static_argnames=("config",))
    config = SFTConfig()
    own = dataclasses.replace(config, compiler_options=("xla_cpu_enable_fast_math=True",))
    for one in (config, own, own):
        assert program(jnp.ones(3), config=one).sum() == 6
    assert program.cache_size() == 2
    wrong = dataclasses.replace(config, compiler_options=("xla_nonsense=1",))
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_nonsense"):  # so they reach the compiler
        program(jnp.ones(3), config=wrong)


def test_runs_that_differ_in_what_the_host_does_share_their_programs() -> None:
    """And a program cannot depend on such a setting: it would be compiled for one run and used by another."""

    def scaled(x, *, config):
        return config.max_grad_norm * x

    program, config = Program(scaled, settings="config", static_argnames=("config",)), GRPOConfig(max_grad_norm=0.5)
    host_only: list[dict[str, Any]] = [{}, {"steps": 3, "checkpoint_every": 7}, {"seed": 1, "min_reward_std": 0.2}]
    for changes in (*host_only, {"learning_rate": 0.25}, {"dump_batches": True}, {"max_grad_norm": 0.25}):
        most = changes.get("max_grad_norm", 0.5)
        assert program(jnp.ones(2), config=dataclasses.replace(config, **changes)).sum() == 2 * most
    assert program.cache_size() == 2
    for read in (lambda x, config: x * config.seed, lambda x, config: x if config.mini_batches > 1 else -x):
        with pytest.raises(AttributeError, match="annotated with `HostOnly`"):
            Program(read, settings="config", static_argnames=("config",))(jnp.ones(2), config=config)


@pytest.mark.parametrize("config", [GRPOConfig(), SFTConfig()], ids=["grpo", "sft"])
def test_a_jit_key_is_a_plain_value_of_the_fields_that_a_program_may_read(config: GRPOConfig | SFTConfig) -> None:
    """It compares by value with itself and any other, as Python 3.13 compares dataclasses: field by field."""
    key, hidden = config.as_jit_key(), host_only_fields(type(config))
    fields = {field.name for field in dataclasses.fields(config)}
    assert {*vars(key)} == fields - hidden and hidden < fields and {"steps", "batch_size"} <= hidden
    assert key == key == dataclasses.replace(config, steps=3).as_jit_key()
    assert hash(key) == hash(dataclasses.replace(config, steps=3).as_jit_key())
    other = dataclasses.replace(config, max_grad_norm=0.25).as_jit_key()
    assert key != other and [getattr(key, name) for name in vars(key)] == [getattr(config, name) for name in vars(key)]
    assert GRPOConfig().as_jit_key() != SFTConfig().as_jit_key()
    for name in hidden:
        assert not hasattr(key, name)
    assert pickle.loads(pickle.dumps(copy.deepcopy(config))) == config


@needs_libtpu
def test_for_a_chip_that_is_not_here_it_has_the_chips(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh(fsdp=-1, devices=Slice.parse("v6e:2x2").devices())
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=rows)
    Program(jnp.sin).lower(x).compile()
    unknown = dataclasses.replace(CHIPS["v6e"], compiler_options=(("xla_nonsense", "1"),))
    monkeypatch.setitem(CHIPS, "v6e", unknown)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_nonsense"):
        Program(jnp.sin).lower(x).compile()


def test_who_needs_a_program_waits_for_its_turn_only_while_it_has_one() -> None:
    begun, may_end, done = threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        may_end.wait(60)
        done.append("first")

    def broken() -> None:
        raise RuntimeError("no room for it")

    with CompiledAhead({"first": first, "second": lambda: done.append("second"), "third": broken}) as ahead:
        assert begun.wait(60)
        ahead.wait("second")  # would otherwise never return: who needs it compiles it at once
        ahead.wait("unknown")
        assert not done
        may_end.set()
        ahead.wait("first")
        assert done == ["first"]
        ahead.wait("third")  # the call that follows will say what is wrong
    assert done == ["first"]


def test_a_program_that_is_compiled_ahead_is_not_compiled_by_its_call() -> None:
    traced = []

    @Program
    def double(x):
        traced.append(x.shape)
        return 2 * x

    double.compile(jax.ShapeDtypeStruct((3,), jnp.float32))
    assert float(double(jnp.ones(3, jnp.float32))[0]) == 2.0
    assert traced == [(3,)]
