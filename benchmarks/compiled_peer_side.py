"""Compile a training step of another library for a TPU slice without the chips: `python -m … PEER WORK HLO`.

WORK is JSON: `size` (`4b`), `layers`, `topology`, `chips`, `rows` and `tokens` of a step. Parameters and optimizer
state are float32 and sharded over all chips (the axis `fsdp`), each of which has its part of the rows. Writes the
compiled text to the file HLO. Prints JSON: `mesh` (sizes by axis), `devices` (ids in its order), `versions`, `seconds`
of compiling, and the memory of a chip in bytes. Or `refused`, the compiler's message about a program that does not fit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.train_step_side import own_stdout

Work = dict[str, Any]


def tunix(work: Work) -> tuple[Any, Any]:
    """Tunix's SFT step, as its trainer jits it: AdamW, flash attention, of a decoder layer its input kept.

    Returns:
        (the lowered step, the mesh).
    """
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.experimental import topologies
    from jax.interpreters import pxla
    from jax.sharding import NamedSharding, PartitionSpec
    from tunix.models.qwen3 import model as qwen3
    from tunix.sft import peft_trainer, utils

    topology = topologies.get_topology_desc(platform="tpu", topology_name=work["topology"])
    mesh = topologies.make_mesh(topology, (work["chips"], 1), ("fsdp", "tp"))

    def shard(x: Any, spec: Any) -> Any:
        # Its own leaves arrays alone where the default device is a CPU, which is only the compiler's host here.
        physical = pxla.thread_resources.env.physical_mesh
        return jax.lax.with_sharding_constraint(x, NamedSharding(physical, PartitionSpec(*spec)))

    qwen3.shard = shard
    config = dataclasses.replace(
        getattr(qwen3.ModelConfig, f"qwen3_{work['size'].replace('.', 'p')}")(),
        num_layers=work["layers"],
        use_flash_attention=True,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        remat_config=qwen3.RematConfig.DECODER,
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, weight_decay=0.0))
    with mesh:
        abstract = nnx.eval_shape(lambda: qwen3.Qwen3(config, rngs=nnx.Rngs(0)))
        state = nnx.state(abstract, nnx.Param)
        placed = jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)),
            nnx.to_pure_dict(state),
            nnx.to_pure_dict(nnx.get_partition_spec(state)),
        )
        graph, _ = nnx.split(abstract)
        by_path = {
            jax.tree_util.keystr(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(placed)
        }

        def beside(path: Any, leaf: Any) -> Any:
            """The optimizer's arrays lie as the parameters do."""
            own = [name for name in by_path if jax.tree_util.keystr(path).endswith(name)]
            where = by_path[max(own, key=len)] if own and leaf.ndim else NamedSharding(mesh, PartitionSpec())
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        opt_state = jax.tree_util.tree_map_with_path(beside, jax.eval_shape(optimizer.init, placed))

        def loss_of(params: Any, tokens: Any, mask: Any) -> Any:
            full = jax.tree.map(lambda x: x, state)
            nnx.replace_by_pure_dict(full, params)
            positions = utils.build_positions_from_mask(mask != 0)
            return peft_trainer._default_loss_fn(nnx.merge(graph, full), tokens, mask, positions, None)

        def step(params: Any, opt_state: Any, tokens: Any, mask: Any) -> Any:
            loss, gradients = jax.value_and_grad(loss_of)(params, tokens, mask)
            norm = optax.global_norm(gradients)
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss, norm

        one = jax.ShapeDtypeStruct(
            (work["rows"], work["tokens"]), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
        )
        # Its own `nnx.jit` donates the optimizer's state alone; with the weights too a chip holds less.
        return jax.jit(step, donate_argnums=(0, 1)).lower(placed, opt_state, one, one), mesh


def maxtext(work: Work) -> tuple[Any, Any]:
    """MaxText's pre-training step, as its `train_compile` compiles it: AdamW, scanned layers, full rematerialisation.

    Returns:
        (the lowered step, the mesh).
    """
    import jax
    from maxtext import configs
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    base = Path(configs.__file__).parent / "base.yml"
    settings = {
        "model_name": f"qwen3-{work['size']}",
        "override_model_config": True,
        "base_num_decoder_layers": work["layers"],
        "internal_compile": True,
        "compile_topology": work["topology"],
        "compile_topology_num_slices": 1,
        "internal_compile_num_devices": work["chips"],
        "per_device_batch_size": work["rows"] // work["chips"],
        "max_target_length": work["tokens"],
        "remat_policy": "full",
        "attention": "flash",
        "weight_dtype": "float32",
        "dtype": "bfloat16",
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "run_name": "compiled",
        "base_output_directory": tempfile.gettempdir(),
    }
    config = pyconfig.initialize(["", str(base), *(f"{name}={value}" for name, value in settings.items())])
    mesh = train_compile.get_topology_mesh(config)
    arguments, named, state_shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    params_shardings, state_shardings = sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
    step, into, out, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step,
        sharding.get_input_data_sharding(config, mesh),
        sharding.build_zero1_input_state_mesh_shardings(config, state_shardings, params_shardings),
        model,
        config,
        params_shardings,
    )
    with jax.set_mesh(mesh), train_compile.axis_rules(config.logical_axis_rules):
        jitted = jax.jit(step, in_shardings=into, out_shardings=out, static_argnums=static, donate_argnums=donated)
        return jitted.lower(*arguments, **named), mesh


PEERS = {"tunix": ("google-tunix", tunix), "maxtext": ("maxtext", maxtext)}
"""By name, the distribution, and what lowers its step."""


def main() -> None:
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_STDERR_LOG_LEVEL": "3"}
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    answers = own_stdout()
    name, work, file = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    lowered, mesh = PEERS[name][1](work)
    answer: Work = {"mesh": dict(mesh.shape), "devices": [device.id for device in mesh.devices.flat]}
    answer["versions"] = {one: metadata.version(one) for one in (PEERS[name][0], "jax", "libtpu")}
    started = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        answer |= {"seconds": time.perf_counter() - started, "refused": str(error)}
    else:
        answer["seconds"] = time.perf_counter() - started
        memory = compiled.memory_analysis()
        answer["peak"] = max(memory.peak_memory_in_bytes, memory.argument_size_in_bytes)
        file.write_text(compiled.as_text(), encoding="utf-8")
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
