"""A Qwen3 behind OpenAI's API, on the embedded engine.

    python -m launch.serve --weights=DIR --port=8000
    python -m launch.serve --weights=RUN/checkpoints --tokenizer=DIR --host=0.0.0.0 --api_key_file=FILE

/v1/completions, /v1/chat/completions (tools, streaming), /v1/models, /health, /metrics; see docs/serving.md. On SIGTERM
(and Ctrl-C) it takes no more requests, lets those in flight end, and exits with 0; with 3 when some had to be cut off.
"""

from __future__ import annotations

from absl import flags

from launch import cli, services

_WEIGHTS = flags.DEFINE_string(
    "weights", None, "A Hugging Face folder, or one of Orbax checkpoints such as a run's checkpoints/.", required=True
)
_STEP = flags.DEFINE_integer("step", None, "Step of Orbax checkpoints; by default the newest.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Folder of the tokenizer; by default that of --weights.")
_NAME = flags.DEFINE_string("served_model_name", None, "What clients call it; by default the folder's name.")
_HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; beyond loopback a key is needed.")
_PORT = flags.DEFINE_integer("port", 8000, "0 takes a free one.", lower_bound=0, upper_bound=65_535)
_KEY_FILE = flags.DEFINE_string("api_key_file", None, "File whose first line is the key that callers must show.")
_SLOTS = flags.DEFINE_integer("slots", 16, "Completions that decode together.", lower_bound=1)
_LENGTH = flags.DEFINE_integer(
    "max_length", None, "Prompt and completion; by default the model's max_positions, 32,768 at most.", lower_bound=2
)
_WAITING = flags.DEFINE_integer("max_waiting", 1024, "Completions that may wait; more are answered 429.", lower_bound=0)
_DRAIN = flags.DEFINE_float("drain_seconds", 60.0, "For requests in flight when it is told to stop.", lower_bound=0)
_DTYPE = flags.DEFINE_enum("dtype", None, ["bfloat16", "float32"], "Of the weights and the arithmetic; as stored.")


def main() -> int:
    import asyncio

    return asyncio.run(_serve())


async def _serve() -> int:
    from pathlib import Path

    from astra_jax.models.qwen3 import weights
    from astra_jax.rollout.engine import Engine
    from astra_jax.rollout.slots import EngineConfig
    from astra_jax.serving.service import Service, ServingConfig
    from astra_jax.tokenizer import ChatTokenizer

    source = Path(_WEIGHTS.value).absolute()
    name = _NAME.value or source.name
    serving = ServingConfig(
        model=name,
        host=_HOST.value,
        port=_PORT.value,
        api_key=cli.token_of(_KEY_FILE),
        max_waiting=_WAITING.value,
        drain_seconds=_DRAIN.value,
    )
    dtype = _DTYPE.value or weights.stored_dtype(source)
    model = weights.read_config(source, dtype=dtype, param_dtype=dtype)
    length = _LENGTH.value or min(model.max_positions, 32_768)
    model.check_length(length, "--max_length")
    tokenizer = ChatTokenizer.load(_TOKENIZER.value or source)
    if tokenizer.vocab_size > model.vocab_size:
        raise cli.UsageError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {model.vocab_size}; give the model's own with "
            "--tokenizer"
        )
    params = weights.load(source, model, step=_STEP.value)
    told = services.told_to_stop()
    async with Engine(params, model, EngineConfig(slots=_SLOTS.value, max_length=length)) as engine:
        service = Service(engine, tokenizer, serving)
        await services.listen(service, _HOST.value, _PORT.value)
        print(f"{name} on http://{_HOST.value}:{service.port}/v1, {length} tokens, {_SLOTS.value} slots", flush=True)
        await told.wait()
        cut = await service.stop()
    return services.ended(cut, "requests")


def _mends() -> tuple[type[Exception], ...]:
    from astra_jax.checkpoints import CheckpointError
    from astra_jax.models.qwen3.weights import WeightsError
    from astra_jax.tokenizer import TokenizerError

    return (CheckpointError, TokenizerError, ValueError, WeightsError)


if __name__ == "__main__":
    cli.with_cpu_environment("launch.serve")
    cli.run(main, mends=_mends)
