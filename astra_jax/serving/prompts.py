"""Prompts of a request as token ids that fit the policy. Requests that do not fit are refused as early as possible.

Texts may be as long as a body, 16 MiB. Too many characters for the context are refused before any work, too many tokens
before all are computed. The rest runs in a thread beside the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from astra_jax.rollout.sampler import PolicyLimits
from astra_jax.serving.messages import conversation_of
from astra_jax.serving.protocol import ChatRequest, CompletionRequest, InvalidRequest
from astra_jax.tokenizer import ChatTokenizer, TooManyTokens
from synthesis.core.chat_format import ChatFormat, NotInFormat, Segment
from synthesis.core.records import Message


def prompts_of(
    asked: CompletionRequest | ChatRequest, tokenizer: ChatTokenizer, limits: PolicyLimits
) -> list[list[int]]:
    """Return token ids of each prompt. A conversation is one prompt, whose last turn is the assistant's, and open.

    Raises:
        InvalidRequest: there is no room for an answer, nothing to answer, or an id without a row in the model; or a
            message or a tool is not in OpenAI's form, or has something other than text.
    """
    if isinstance(asked, CompletionRequest):
        prompts = []
        for one in asked.prompts:
            if isinstance(one, str):
                _check_characters([one], tokenizer, limits, "prompt")
                one = _encoded([Segment(one, trainable=False)], tokenizer, limits, "prompt")
            prompts.append(one)
            _check_ids(one, limits, "prompt")
        return prompts
    messages, tools = conversation_of(asked, tokenizer.format)
    if asked.continue_final_message:
        _check_continued(messages[-1], tokenizer.format)
    # The assistant's thoughts of earlier turns are not shown again; all other messages are shown whole.
    others = [message.content for message in messages if message.role != "assistant"]
    _check_characters(others, tokenizer, limits, "messages")
    opens = not asked.continue_final_message
    try:
        segments = tokenizer.format.render(messages, tools, add_generation_prompt=opens, thinking=asked.thinking)
    except NotInFormat as error:
        raise InvalidRequest(str(error), param="messages") from None
    if asked.continue_final_message:
        segments = _left_open(segments, tokenizer.format)
    _check_characters([segment.text for segment in segments], tokenizer, limits, "messages")
    prompt = _encoded(segments, tokenizer, limits, "messages")
    _check_ids(prompt, limits, "messages")
    return [prompt]


def _check_continued(last: Message, chat_format: ChatFormat) -> None:
    """Check that the last message can be continued exactly as it is. Raises `InvalidRequest`."""
    where = "continue_final_message is true, but the last message"
    if last.role != "assistant":
        raise InvalidRequest(f"{where} has the role {last.role}; end messages with the assistant's", param="messages")
    if last.tool_calls:
        raise InvalidRequest(f"{where} has tool_calls, which end a turn; leave them out", param="messages")
    text = last.content.rpartition(chat_format.thought_end)[2] if chat_format.thought_end else last.content
    if chat_format.escape(text) != text:
        raise InvalidRequest(
            f"{where} has a tag of the chat format, which would be escaped; leave the tag out", param="messages"
        )


def _left_open(segments: list[Segment], chat_format: ChatFormat) -> list[Segment]:
    """Return a rendered conversation without the end of its last turn, which is the assistant's."""
    last = max(i for i, segment in enumerate(segments) if segment.trainable)
    return [*segments[:last], Segment(segments[last].text.removesuffix(chat_format.turn_end), trainable=True)]


def _check_characters(texts: Sequence[str], tokenizer: ChatTokenizer, limits: PolicyLimits, param: str) -> None:
    count, most = sum(map(len, texts)), tokenizer.most_characters(limits.max_length - 1)
    if count > most:
        raise _too_long(f"{count} characters", limits, param)


def _encoded(segments: Sequence[Segment], tokenizer: ChatTokenizer, limits: PolicyLimits, param: str) -> list[int]:
    try:
        return tokenizer.encode_segments(segments, most=limits.max_length - 1)[0]
    except TooManyTokens as error:
        raise _too_long(str(error), limits, param) from None


def _check_ids(prompt: Sequence[int], limits: PolicyLimits, param: str) -> None:
    if not prompt:
        raise InvalidRequest(f"{param} has no tokens; send at least one", param=param)
    if len(prompt) >= limits.max_length:
        raise _too_long(f"{len(prompt)} tokens", limits, param)
    for wrong in (min(prompt), max(prompt)):
        if not 0 <= wrong < limits.vocab_size:
            raise InvalidRequest(
                f"{param} has token id {wrong}; ids are from 0 to {limits.vocab_size - 1}", param=param
            )


def _too_long(size: str, limits: PolicyLimits, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} has {size}; prompt and completion have room for {limits.max_length} tokens here, so at most "
        f"{limits.max_length - 1} are taken",
        param=param,
        code="context_length_exceeded",
    )
