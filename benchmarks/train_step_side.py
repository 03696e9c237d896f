"""One side of `benchmarks.train_step`: builds its model, then trains when a line on stdin tells it to.

ready      take the first step (compiles); answers {"seconds"}
train N    N steps, each waited for; answers {"seconds": [...], "processor_seconds"}, the latter a mean
matmul     a matmul a few times; answers {"gflops"}, what the side's library reaches
end        answers {"peak_rss_bytes", "parameters", "loss"}
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from benchmarks.shapes import dtype_of, hf_class, hf_config, our_model

Step = Callable[[], float]
Multiply = Callable[[], None]

OPTIMIZER = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
LEARNING_RATE = 1e-3
MATMUL = 1024
"""Rows and columns of the matmul's operands: too small to matter for the peak memory of a step."""


def tokens(case: dict[str, int]) -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, case["vocab_size"], (case["rows"], case["tokens"])).astype(np.int32)


def jax_side(case: dict[str, int], threads: int) -> tuple[Step, Multiply, int]:
    import jax
    import numpy as np

    from astra_jax.cpu.programs import trained_dtype
    from astra_jax.run.batch import PackedBatch, to_device
    from astra_jax.run.optimizers import initial_state
    from astra_jax.sft.config import SFTConfig
    from astra_jax.sft.data import DataConfig
    from astra_jax.sft.step import sft_optimizer, train_step

    del threads  # XLA takes a thread a core
    model = our_model(case)
    data = DataConfig(seq_len=case["tokens"])
    rows = {"batch_size": case["rows"], "micro_batch_size": case["rows"] // case["micro_batches"]}
    config = SFTConfig(data=data, **rows, learning_rate=LEARNING_RATE, remat=case["remat"], **OPTIMIZER)
    ids = tokens(case)
    ones = np.ones_like(ids)
    places = np.broadcast_to(np.arange(case["tokens"], dtype=np.int32), ids.shape)
    batch = PackedBatch(tokens_bt=ids, loss_mask_bt=ones, segment_ids_bt=ones, positions_bt=places)
    params, opt_state = initial_state(model.init(jax.random.key(0)), sft_optimizer(config, 1000))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    state = [params, opt_state]

    def step() -> float:
        on_device = to_device(batch, None, micro_batches=config.micro_batches)
        state[0], state[1], metrics = train_step(*state, on_device, model=model, config=config, steps=1000)
        return float(metrics["train/loss"])

    square = jax.random.normal(jax.random.key(0), (MATMUL, MATMUL), trained_dtype(model.dtype, None))  # as the step
    product = jax.jit(jax.numpy.matmul, static_argnames="preferred_element_type")
    return step, lambda: product(square, square, preferred_element_type="float32").block_until_ready(), count


def torch_side(case: dict[str, int], threads: int, *, compiled: bool) -> tuple[Step, Multiply, int]:
    """In bfloat16 as `case["torch_narrow"]` says: under autocast, with float32 weights and statistics as ours have, all
    of it, which needs less memory and loses small updates, or nothing."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = getattr(transformers, hf_class(case))(**hf_config(case), use_cache=False)
    narrow = dtype_of(case) == "bfloat16" and case["torch_narrow"] != "nothing"
    autocast = narrow and case["torch_narrow"] == "autocast"
    kept, computed = (torch.bfloat16 if one else torch.float32 for one in (narrow and not autocast, narrow))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(kept).train()
    forward = torch.compile(model) if compiled else model
    betas = (OPTIMIZER["b1"], OPTIMIZER["b2"])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=betas, eps=OPTIMIZER["eps"], weight_decay=0, fused=True
    )
    ids = torch.tensor(tokens(case), dtype=torch.long)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    square = torch.randn(MATMUL, MATMUL, dtype=computed)
    return step, lambda: torch.matmul(square, square), sum(p.numel() for p in model.parameters())


def matmul_gflops(multiply: Multiply) -> float:
    multiply()
    return 2 * MATMUL**3 / statistics.median(seconds_of(multiply) for _ in range(9)) / 1e9


def seconds_of(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def own_stdout() -> TextIO:
    """Return a stream for answers. Output of libraries goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(step: Step, multiply: Multiply, parameters: int, answers: TextIO = sys.stdout) -> None:
    """Answer the lines of stdin until one says `end`."""
    loss = float("nan")

    def train() -> None:
        nonlocal loss
        loss = step()

    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        figures: dict[str, Any]
        if word == "end":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            figures = {"peak_rss_bytes": peak, "parameters": parameters, "loss": loss}
        elif word == "matmul":
            figures = {"gflops": matmul_gflops(multiply)}
        else:
            processor = time.process_time()
            seconds = [seconds_of(train) for _ in range(int(number or 1))]
            processor = (time.process_time() - processor) / len(seconds)
            figures = {"seconds": seconds if word == "train" else seconds[0], "processor_seconds": processor}
        print(json.dumps(figures), file=answers, flush=True)
        if word == "end":
            return


def main() -> None:
    name, case, threads = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    build = {
        "jax": jax_side,
        "torch_eager": lambda *a: torch_side(*a, compiled=False),
        "torch_compile": lambda *a: torch_side(*a, compiled=True),
    }[name]
    serve(*build(case, threads))


if __name__ == "__main__":
    main()
