"""One side of `benchmarks.decode`: builds its model, then answers prompts on commands from stdin.

ready         answer each batch once (compiles); answers {"seconds"}
generate B    B prompts at once, all new tokens sampled; answers {"seconds"}

`transformers` and `vllm` import only the shapes from the project, since vLLM has its own environment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.shapes import dtype_of, hf_class, hf_config, is_llama, our_model

Prompts = list[list[int]]
Generate = Callable[[Prompts], list[int]]
"""Answers prompts; returns how many tokens each got."""


def engine(work: dict[str, Any]) -> Generate:
    """One engine for all batches. XLA takes a thread a core."""
    import asyncio

    import jax

    from astra_jax.rollout.engine.engine import Engine
    from astra_jax.rollout.engine.slots import EngineConfig
    from astra_jax.rollout.sampler import Sampling

    model = our_model(work["shape"])
    length = work["prompt_tokens"] + work["new_tokens"]
    shapes = EngineConfig(slots=max(work["batches"]), max_length=length)
    loop = asyncio.new_event_loop()
    seeds = iter(range(2**31))

    async def make() -> Engine:
        return Engine(model.init(jax.random.key(0)), model, shapes)

    async def answer(prompts: Prompts) -> list[int]:
        samplings = [Sampling(max_tokens=work["new_tokens"], stop_ids=(), seed=next(seeds)) for _ in prompts]
        done = await asyncio.gather(*(serving.generate(*one) for one in zip(prompts, samplings, strict=True)))
        return [len(one.token_ids) for one in done]

    serving = loop.run_until_complete(make())
    return lambda prompts: loop.run_until_complete(answer(prompts))


def transformers(work: dict[str, Any]) -> Generate:
    """A static batch with a KV cache."""
    import torch
    import transformers as library

    torch.set_num_threads(work["threads"])
    config = getattr(library, hf_class(work["shape"]))(**hf_config(work["shape"]))
    model = library.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model = model.to(getattr(torch, dtype_of(work["shape"]))).eval()
    new = work["new_tokens"]

    def answer(prompts: Prompts) -> list[int]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=new,
                eos_token_id=None,
                pad_token_id=0,
            )
        return [len(row) - ids.shape[1] for row in out]

    return answer


def vllm(work: dict[str, Any]) -> Generate:
    """Its offline engine, with dummy weights."""
    from vllm import LLM, SamplingParams

    length = work["prompt_tokens"] + work["new_tokens"]
    folder = Path(tempfile.mkdtemp())
    family = "Llama" if is_llama(work["shape"]) else "Qwen3"
    config = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "max_position_embeddings": 2 * length,
    }
    (folder / "config.json").write_text(json.dumps(config | hf_config(work["shape"])), encoding="utf-8")
    llm = LLM(
        str(folder),
        dtype=dtype_of(work["shape"]),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=length,
        max_num_seqs=max(work["batches"]),
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
    )
    sampling = SamplingParams(
        temperature=1.0, max_tokens=work["new_tokens"], min_tokens=work["new_tokens"], ignore_eos=True, detokenize=False
    )

    def answer(prompts: Prompts) -> list[int]:
        done = llm.generate([{"prompt_token_ids": one} for one in prompts], sampling, use_tqdm=False)
        return [len(one.outputs[0].token_ids) for one in done]

    return answer


def main() -> None:
    # What libraries print goes to stderr; answers alone to stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    name, work = sys.argv[1], json.loads(sys.argv[2])
    import numpy as np

    rng = np.random.default_rng(0)

    def timed(generate: Generate, batch: int) -> float:
        prompts = rng.integers(0, work["shape"]["vocab_size"], (batch, work["prompt_tokens"])).tolist()
        started = time.perf_counter()
        counts = generate(prompts)
        seconds = time.perf_counter() - started
        assert counts == [work["new_tokens"]] * batch, counts
        return seconds

    generate = {"engine": engine, "transformers": transformers, "vllm": vllm}[name](work)
    for line in sys.stdin:
        word, _, number = line.strip().partition(" ")
        batches = [int(number)] if word == "generate" else work["batches"]
        seconds = sum(timed(generate, batch) for batch in batches)
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
