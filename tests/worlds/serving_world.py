"""Servers for tests: on the real engine with tiny models, one of which knows a conversation by heart; or on a policy
that drips tokens for as long as somebody listens."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
import optax
from sft_world import TOOL

from astra_jax.head import token_logprobs
from astra_jax.models.decoder import Decoder
from astra_jax.models.model import Params
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.engine.engine import Engine
from astra_jax.rollout.engine.slots import EngineConfig
from astra_jax.rollout.sampler import Completion, PolicyLimits, Sampling, TokenChunk
from astra_jax.serving.service import OpenAIService, ServingConfig
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chat_format import Segment
from synthesis.core.chatml import QWEN3
from synthesis.core.records import Message, ToolCall

LENGTH = 512
SHAPES = EngineConfig(slots=2, max_length=LENGTH, prefill_chunk=32, decode_chunk=4, min_window=LENGTH)
KEY = "open sesame"

CONVERSATION = [
    Message("user", "What are the capitals of Peru and Kenya?"),
    Message(
        "assistant",
        "Let me see.",
        reasoning="I look them up.",
        tool_calls=[ToolCall("", "capital_of", {"country": "Peru"}), ToolCall("", "capital_of", {"country": "Kenya"})],
    ),
    Message("tool", '{"result": "Lima"}'),
    Message("tool", '{"result": "Nairobi"}'),
    Message("assistant", "Lima and Nairobi, 北京 is not."),
]


def model(vocab_size: int, *, tie: bool = True) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocab_size,
        d_model=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=16,
        d_ff=96,
        tie_embeddings=tie,
        max_positions=LENGTH,
    )


def rendered() -> list[Segment]:
    """`CONVERSATION` with its tool."""
    return QWEN3.render(CONVERSATION, [TOOL])


def by_heart(config: Decoder, tokenizer: ChatTokenizer, conversations: Sequence[Sequence[Segment]]) -> Params:
    """Trained until it says the assistant's turns of all the conversations, rendered."""
    encoded = [tokenizer.encode_segments(list(segments)) for segments in conversations]
    longest = max(len(tokens) for tokens, _ in encoded)

    def padded(rows: Sequence[Sequence[int]], dtype: Any = jnp.int32) -> jax.Array:
        return jnp.asarray([[*row, *[0] * (longest - len(row))] for row in rows], dtype)

    tokens_bt = padded([tokens for tokens, _ in encoded])
    mask_bt = padded([mask for _, mask in encoded], jnp.float32)
    ones_bt = padded([[1] * len(tokens) for tokens, _ in encoded])
    places_bt = jnp.broadcast_to(jnp.arange(longest), tokens_bt.shape)
    optimizer = optax.adam(5e-3)

    def loss(params: Params) -> jax.Array:
        x_btd, _ = config.forward(params, tokens_bt, places_bt, ones_bt)
        logits = (x_btd @ config.head_kernel(params))[:, :-1]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens_bt[:, 1:])
        return (losses * mask_bt[:, 1:]).sum() / mask_bt.sum()

    # Run a hundred times: compiled as fast as all else is (`tests/conftest.py`) it takes three times as long.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 1})
    def step(params: Params, state: Any) -> tuple[Params, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, value

    params = config.init(jax.random.key(0))
    state = optimizer.init(params)
    for _ in range(300):
        params, state, value = step(params, state)
        if value < 0.005:
            return params
    raise AssertionError(f"the conversations were not learned: loss {value}")


class Drip:
    """A policy that draws the tokens of `text`, over and over, one a few milliseconds, until `max_tokens`."""

    limits = PolicyLimits(slots=2, max_length=10_000, max_stops=4, vocab_size=10_000)

    def __init__(self, tokenizer: ChatTokenizer, text: str = "drip ", *, seconds: float = 0.005) -> None:
        self._tokens = tokenizer.encode(text)
        self._seconds = seconds
        self.running = 0
        self.waiting = 0
        self.failure: BaseException | None = None

    async def stream(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str = ""
    ) -> AsyncGenerator[TokenChunk, None]:
        self.running += 1
        try:
            for i in range(sampling.max_tokens):
                await asyncio.sleep(self._seconds)
                if self.failure is not None:
                    raise RuntimeError("the policy broke") from self.failure
                last = i + 1 == sampling.max_tokens
                yield TokenChunk([self._tokens[i % len(self._tokens)]], [-1.0], [0], "length" if last else None)
        finally:
            self.running -= 1

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        raise NotImplementedError

    def release(self, session: str) -> None: ...


class Scripted(Drip):
    """A policy that says what a function makes of the prompt's text, and ends its turn. Where a request has a
    constraint, each token is looked up in what may follow."""

    def __init__(self, tokenizer: ChatTokenizer, says: Callable[[str], str]) -> None:
        super().__init__(tokenizer)
        self.limits = PolicyLimits(slots=2, max_length=10_000, max_stops=4, vocab_size=tokenizer.vocab_size)
        self.samplings: list[Sampling] = []
        self._tokenizer, self._says = tokenizer, says

    async def stream(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str = ""
    ) -> AsyncGenerator[TokenChunk, None]:
        self.samplings.append(sampling)
        wanted = [*self._tokenizer.encode(self._says(self._tokenizer.decode(token_ids))), self._tokenizer.eos_id]
        for i, token in enumerate(wanted):
            if sampling.constraint is not None:
                words = np.zeros(-(-self.limits.vocab_size // 32), np.int32)
                sampling.constraint.allow(wanted[:i], words)
                so_far = self._tokenizer.decode(wanted[:i])
                assert words[token // 32] >> token % 32 & 1, (so_far, self._tokenizer.decode([token]))
            last = i + 1 == len(wanted)
            best = [((token, -1.0),)] if sampling.alternatives else []
            yield TokenChunk([token], [-1.0], [0], "stop" if last else None, best)


class Server:
    """A service on an event loop in a thread of its own, so that tests may use the blocking client."""

    def __init__(self, policy: Callable[[], Any], tokenizer: ChatTokenizer, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.policy = policy()
        self.service = OpenAIService(self.policy, tokenizer, ServingConfig("tiny", port=0, **options))
        self.run(self.service.start())
        self.url = f"http://127.0.0.1:{self.service.port}"

    def run(self, work: Awaitable[Any], seconds: float = 60) -> Any:
        async def wait_with_heartbeat() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(wait_with_heartbeat(), self._loop).result(seconds)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300)

    def close(self) -> None:
        self.run(self.service.stop())
        if isinstance(self.policy, Engine):
            self.run(self.policy.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextlib.contextmanager
def serving(policy: Callable[[], Any], tokenizer: ChatTokenizer, **options: Any) -> Iterator[Server]:
    server = Server(policy, tokenizer, **options)
    try:
        yield server
    finally:
        server.close()


def on_engine(params: Params, config: Decoder) -> Callable[[], Engine]:
    return lambda: Engine(params, config, SHAPES)


def trainer_logps(
    params: Params, config: Decoder, prompt: Sequence[int], new: Sequence[int], temperature: float
) -> np.ndarray:
    ids = [*prompt, *new]
    logps = _logps(params, config, jnp.asarray([ids + [0] * (128 - len(ids))]), len(ids), temperature)
    return np.asarray(logps)[len(prompt) - 1 : len(ids) - 1]


@functools.partial(jax.jit, static_argnames=("config", "temperature"))
def _logps(params: Params, config: Decoder, tokens_bt: jax.Array, length: int, temperature: float) -> jax.Array:
    places_bt = jnp.arange(tokens_bt.shape[1])[None]
    x_btd, _ = config.forward(params, tokens_bt, places_bt, (places_bt < length).astype(jnp.int32))
    targets_bt = jnp.roll(tokens_bt, -1, axis=1)
    return token_logprobs(x_btd, config.head_kernel(params), targets_bt, temperature=temperature)[0][0]


def without_ids(message: dict) -> dict:
    """A message without its calls' ids, which are new each time, and without what is empty."""
    for call in message.get("tool_calls") or []:
        assert call.pop("id").startswith("call_")
    return {name: value for name, value in message.items() if value}
