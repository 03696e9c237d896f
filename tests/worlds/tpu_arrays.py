"""A program for an environment with tpu-inference: a worker that has served takes other weights over, on CPU devices.

    python tpu_arrays.py OLD NEW CHIPS

OLD and NEW are Hugging Face folders of one model. The arrays that an engine of OLD serves after it took NEW over must
be, to the bit, those of an engine that loaded NEW at its start. Ends with a line of JSON.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from astra_vllm.digest import digest
from astra_vllm.memory import SharedMemory, tensors
from safetensors.torch import load_file
from vllm import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": list(range(5, 25))}, {"prompt_token_ids": [5, 17, 300, 42]}]
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, detokenize=False)


class Engine:
    """vLLM in this process, with its one worker in reach."""

    def __init__(self, folder: str, chips: int) -> None:
        self.llm = LLM(
            folder, tensor_parallel_size=chips, worker_extension_cls="astra_vllm.tpu.PolicyWorker", enforce_eager=True,
            skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64,
        )  # fmt: skip
        self.runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    def rpc(self, method: str, *args):
        (answer,) = self.llm.collective_rpc(method, args=args)
        return answer

    def draw(self) -> None:
        self.llm.generate(PROMPTS, SAMPLING, use_tqdm=False)

    def kinds(self):
        return jax.tree.structure(self.runner.state_leaves), [
            (leaf.shape, leaf.dtype, leaf.sharding) for leaf in self.runner.state_leaves
        ]


def read(folder: str):
    """The tensors in shared memory, and where."""
    arrays = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        arrays |= load_file(file)
    places, start = [], 0
    for name, tensor in arrays.items():
        places.append([name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."), start])
        start += tensor.nbytes
    memory = SharedMemory(start)
    for (_, target), tensor in zip(tensors(memory.view, places), arrays.values(), strict=True):
        target.copy_(tensor)
    return memory, places


@contextmanager
def compilations():
    """Names of what is compiled meanwhile."""
    found: list[str] = []

    def listen(event: str, seconds: float, **more) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(more.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def main(old: str, new: str, chips: int) -> None:
    fresh = Engine(new, chips)
    wanted = [np.asarray(leaf) for leaf in fresh.runner.state_leaves]
    del fresh

    engine = Engine(old, chips)
    engine.draw()
    kinds = engine.kinds()
    before = [np.asarray(leaf) for leaf in engine.runner.state_leaves]
    served = engine.rpc("policy_parameters")
    assert sum(np.array_equal(a, b) for a, b in zip(before, wanted, strict=True)) < len(wanted) // 2
    memory, places = read(new)
    with compilations() as compiled:
        digests = engine.rpc("load_policy", memory.path, places)
        syncing, compiled[:] = compiled[:], []
        engine.draw()
    assert kinds == engine.kinds()
    for leaf, want in zip(engine.runner.state_leaves, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), want.view(np.uint8))
    assert digests == {name: digest(tensor) for name, tensor in tensors(memory.view, places) if name in served}

    # A load that fails half-way leaves nothing that could be taken for whole, and the next one mends it.
    broken = [place for place in places if "layers.1.mlp" not in place[0]]
    try:
        engine.rpc("load_policy", memory.path, broken)
        raise AssertionError("a load that left parameters out went through")
    except ValueError as error:
        assert "model.layers.1.mlp.down_proj.weight was not loaded" in str(error), error
    short = [place if "layers.2.mlp" not in place[0] else [*place[:1], [3, 5], *place[2:]] for place in places]
    try:
        engine.rpc("load_policy", memory.path, short)
        raise AssertionError("a load of another shape went through")
    except ValueError as error:
        assert "layers.2.mlp" in str(error), error
    memory, places = read(old)
    engine.rpc("load_policy", memory.path, places)
    for leaf, want in zip(engine.runner.state_leaves, before, strict=True):
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint8), want.view(np.uint8))
    assert kinds == engine.kinds()
    print(
        json.dumps(
            {"parameters": len(served), "compiled_by_loading": sorted(set(syncing)), "compiled_by_drawing": compiled}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
