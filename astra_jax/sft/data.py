"""Resumable Grain pipeline from a trajectory dataset to SFT batches: render, tokenise, shuffle, pack, batch.

    ArrayRecord of Trajectory ─ rounds of its user ─ render + encode ─ drop or cut what is too long
        ─ shuffle (each epoch) ─ repeat ─ mix with those of the rehearsal, if there is one
        ─ rows of seq_len, with segment ids and positions ─ batches, each of one epoch (`packing`)

Every stage is a pure function of the record's index and the seed. So the iterator's state is a few integers, and a
resumed run sees exactly the same batches. Each host makes the whole batch and uses its part. So batches do not depend
on the number of hosts, and a run may resume with another number. Making a batch is cheap compared with training on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import grain
import msgspec
import numpy as np
from absl import logging

from astra_jax.base.settings import Bound, Length, Seed, Settings, Share
from astra_jax.run.batch import PackedBatch
from astra_jax.sft.packing import Arrays, EpochBatches, steps_in
from astra_jax.sft.rename_entities import rename_entities
from astra_jax.tokenizer import ChatTokenizer
from synthesis.core.chat_format import NotInFormat, Segment
from synthesis.core.datasets import DatasetError, Folder, check_dataset, each_record, reading, records_files
from synthesis.core.records import Message, ToolSpec, Trajectory, decode

_REFUSED = ("unknown_tool", "invalid_arguments")
"""Kinds of `CallError` of a call that no tool executed."""


@dataclass(frozen=True)
class DataConfig(Settings):
    """Settings that turn trajectories into batches.

    Attributes:
        seq_len: tokens in a row. All rows have this length, so that nothing is compiled twice.
        keep_reasoning: keep the reasoning of every turn (see `ChatFormat.render`). Ours: True, because a rollout only
            appends, so the policy will see its earlier reasoning. With `split_at_user_turns`, reasoning before the last
            user message follows the chat template, since rollouts have no such turns.
        split_at_user_turns: make an example for each user message of a conversation: the conversation up to the next
            one, trained on the turns since that message. It matches what the chat template shows when the model is
            served, with earlier reasoning removed where the template does so. Assistant turns before the first user
            message are an example too; a round in which every turn has weight 0 is not. False: one example of the
            whole conversation.
        too_long: what to do with a conversation of more than `seq_len` tokens: `drop` it, or `cut` it after the last
            assistant turn that fits. Both are counted.
        tools: tool documents in the prompt: `all` that the trajectory was offered; `some`: the called ones and a random
            number of the others, in random order, sampled in each epoch; or `none`. Use less than `all` as a curriculum
            for tiny models only.
        thinking: train on the reasoning. False removes all reasoning from the conversations.
        rename_entities: share of conversations, sampled in each epoch, in which entities get new names
            (`rename_entities`). Use it for tiny models trained from scratch; a pretrained model can copy names already.
            0: none.
        self_generated_ratio: share of examples from the rehearsal dataset, if the run has one: conversations without
            tools that the model wrote itself, which preserve general chat ability (`rehearsal`). They are spread evenly
            among the others, in their own order, and repeat if there are too few.
        workers: processes that prepare examples ahead of training. 0 prepares them in the training process, when
            needed. Use some if training waits for data. Batches do not depend on the number, so it may change when a
            run resumes.
        packing_bins: rows that are packed at the same time. More leave less padding: at 32k tokens rows are 97 % full
            with 8, and 99 % with 64.
        seed: random seed of the shuffle.
    """

    seq_len: Length
    keep_reasoning: bool = True
    split_at_user_turns: bool = True
    too_long: Literal["drop", "cut"] = "cut"
    tools: Literal["all", "some", "none"] = "all"
    thinking: bool = True
    rename_entities: Share = 0.0
    self_generated_ratio: Annotated[float, Bound(above=0, below=1)] = 0.25
    workers: Annotated[int, Bound(least=0, most=1_024)] = 0
    packing_bins: Annotated[int, Bound(least=1, most=65_536)] = 64
    seed: Seed = 0

    @property
    def is_random(self) -> bool:
        """Return whether an example has another length in each epoch."""
        return self.rename_entities > 0 or self.tools == "some"


@dataclass(frozen=True)
class DataStats:
    """Statistics of a dataset under a config, counted once before training and renaming.

    Attributes:
        lengths: tokens of each kept example, in the dataset's order; the maximum with `tools="some"`. An example is a
            conversation, or one round of its user (`DataConfig.split_at_user_turns`).
        trainable: number of those tokens that are trained on, with any weight.
        dropped: examples excluded, by reason. `too_long`; `no_assistant_turn`; `untrained`: every assistant turn
            has weight 0; `not_in_format`: the chat format cannot express it; `tools_change`: conversations are not
            split, and a tool is added in a later round.
        cut: number of examples that were shortened.
        dropped_at: indices of the dropped ones among all, ascending.
        first_dropped: for each reason the first example's id and its exact problem.
        refused: number of assistant turns that are context because the tools' schema refused a call of theirs.
    """

    lengths: tuple[int, ...]
    trainable: int
    dropped: dict[str, int]
    cut: int
    dropped_at: tuple[int, ...] = ()
    first_dropped: dict[str, str] = field(default_factory=dict)
    refused: int = 0

    @property
    def count(self) -> int:
        """Number of all examples, including dropped ones."""
        return len(self.lengths) + sum(self.dropped.values())

    @property
    def reasons(self) -> str:
        """Reasons for dropping examples: the number for each, with the first example."""
        return "; ".join(
            f"{count} {reason} ({self.first_dropped.get(reason, '')})" for reason, count in sorted(self.dropped.items())
        )

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Example:
    """A tokenised example; has no tokens if it is dropped.

    Attributes:
        tokens: int32 ids.
        loss_mask: float32, the weight of each token in the loss; 0 for no training.
        context: bool, true for tokens of assistant turns with weight 0.
        dropped: the reason, or "".
        detail: the exact problem.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    context: np.ndarray
    cut: bool = False
    dropped: str = ""
    detail: str = ""


def shown(trajectory: Trajectory, config: DataConfig) -> tuple[list[Message], list[ToolSpec]]:
    """Return the messages and tool documents of a trajectory that a config shows."""
    messages = trajectory.messages
    if not config.thinking:
        messages = [msgspec.structs.replace(message, reasoning="") for message in messages]
    return messages, [] if config.tools == "none" else trajectory.tools


def round_ends(roles: Sequence[str]) -> list[int]:
    """Return the message count of each example with `split_at_user_turns`. An example ends where the user speaks again,
    if the assistant spoke meanwhile. A conversation that no user opens is one example."""
    ends = [i for i in range(1, len(roles)) if roles[i] == "user" and roles[i - 1] != "user"]
    starts = [roles.index("user", end) for end in ends]
    opened = [0, *starts]
    found = [end for start, end in zip(opened, [*ends, len(roles)], strict=True) if "assistant" in roles[start:end]]
    return found or [len(roles)]


def by_round(trajectory: Trajectory, config: DataConfig) -> list[Trajectory]:
    """Return the conversations that each become an example: the whole one, or the prefixes from `round_ends` with the
    tools available then. Turns with refused calls are context (`with_refused_as_context`)."""
    trajectory = with_refused_as_context(trajectory)
    if not config.split_at_user_turns:
        return [trajectory]
    roles = trained_roles(trajectory.messages)
    return [
        msgspec.structs.replace(
            trajectory,
            messages=trajectory.messages[:end],
            tools=trajectory.tools_once(roles[:end].count("user")),
            unfinished=trajectory.unfinished if end == len(roles) else msgspec.UNSET,
        )
        for end in round_ends(roles)
    ]


def refused_turns(trajectory: Trajectory) -> list[int]:
    """Return the positions of the trained assistant turns with a call that the tools' schema refused."""
    refused = {error.call_id for error in trajectory.errors if error.kind in _REFUSED}
    if not refused:
        return []
    return [
        place
        for place, message in enumerate(trajectory.messages)
        if message.weight and any(call.id in refused for call in message.tool_calls)
    ]


def with_refused_as_context(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory in which the turns of `refused_turns` have weight 0.

    The model should see such a call and its error, and learn the turns after it, but not to make it.
    """
    places = refused_turns(trajectory)
    if not places:
        return trajectory
    messages = [one.weighed(0) if place in places else one for place, one in enumerate(trajectory.messages)]
    return msgspec.structs.replace(trajectory, messages=messages)


def trained_roles(messages: Sequence[Message]) -> list[str]:
    """Return the role of each message; `context` for an assistant turn with weight 0.

    Marks of files (`weight`, `train`, `masked`) become weights in `synthesis/astra_format/keys.py`.
    """
    return [one.role if one.role != "assistant" or one.weight else "context" for one in messages]


def tokenise(trajectory: Trajectory, tokenizer: ChatTokenizer, config: DataConfig) -> Example:
    """Render and encode an example (`by_round`); drop or cut it if it has more than `config.seq_len` tokens."""
    messages, tools = shown(trajectory, config)
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if not config.split_at_user_turns and trajectory.dialogue and trajectory.dialogue.restored_at_turn:
        # Chat formats list tools once, before all rounds.
        return _dropped("tools_change", "a tool is there from a later round on; use data.split_at_user_turns=true")
    # If split, turns before the last user turn have their own examples.
    is_split = users and config.split_at_user_turns
    before = sum(one.role == "assistant" for one in messages[: users[-1]]) if is_split else 0
    keep_reasoning = config.keep_reasoning and not before
    try:
        segments = tokenizer.format.render(messages, tools, keep_reasoning=keep_reasoning)
    except NotInFormat as error:
        return _dropped("not_in_format", str(error))
    if trajectory.unfinished and messages[-1].role == "assistant":
        segments = _without_end(segments, tokenizer.format.turn_end)
    ids, mask = tokenizer.encode_segments(segments)
    # Each turn of the assistant is one run of trainable tokens.
    trainable = np.asarray(mask, bool)
    turn_of = np.cumsum(np.diff(trainable, prepend=False) & trainable) - 1
    weights = np.array([one.weight for one in messages if one.role == "assistant"] or [0.0], np.float32)
    context = trainable & (weights[turn_of] == 0)
    weights[:before] = 0
    loss_mask = np.where(trainable, weights[turn_of], np.float32(0))
    if not loss_mask.any():
        if context.any():
            return _dropped("untrained", "every turn of the assistant has weight 0")
        return _dropped("no_assistant_turn", "no token of it is trained on")
    cut, end = len(ids) > config.seq_len, len(ids)
    if cut:
        too_long = f"{len(ids):,} tokens, data.seq_len is {config.seq_len:,}"
        if config.too_long == "drop":
            return _dropped("too_long", too_long)
        # Every assistant turn ends with a trainable token; the last trained one that fits ends the conversation.
        ends = np.flatnonzero((loss_mask > 0) & ~np.append(trainable[1:], False))
        ends = ends[ends < config.seq_len]
        if not len(ends):
            return _dropped("too_long", f"{too_long}, and no trained turn of the assistant ends before that")
        end = int(ends[-1]) + 1
    return Example(np.asarray(ids[:end], np.int32), loss_mask[:end], context[:end], cut=cut)


def of_rehearsal(config: DataConfig) -> DataConfig:
    """Return the config of a rehearsal mixed with data of this config: nothing is renamed and all tools are shown."""
    return dataclasses.replace(config, rename_entities=0.0, tools="all")


def held_out_data(config: DataConfig) -> DataConfig:
    """Return the config of held-out data for this config: nothing is renamed and no workers are used."""
    return dataclasses.replace(config, rename_entities=0.0, workers=0)


def scan(path: Folder, tokenizer: ChatTokenizer, config: DataConfig) -> DataStats:
    """Tokenise the whole dataset once and count.

    Raises:
        DatasetError: the dataset is missing, of another kind or corrupt, or has nothing to train on.
    """
    lengths, trainable, cut, dropped = [], 0, 0, Counter[str]()
    dropped_at: list[int] = []
    first_dropped: dict[str, str] = {}
    refused = 0

    def examples() -> Iterator[Trajectory]:
        nonlocal refused
        for record in each_record(path, Trajectory):
            refused += len(refused_turns(record))
            yield from by_round(record, config)

    for place, trajectory in enumerate(examples()):
        example = tokenise(trajectory, tokenizer, config)
        if example.dropped:
            dropped[example.dropped] += 1
            dropped_at.append(place)
            first_dropped.setdefault(example.dropped, f"first in {trajectory.id}: {example.detail}")
            continue
        lengths.append(len(example.tokens))
        trainable += int(np.count_nonzero(example.loss_mask))
        cut += example.cut
    stats = DataStats(tuple(lengths), trainable, dict(dropped), cut, tuple(dropped_at), first_dropped, refused)
    if not lengths:
        longer = f"; raise data.seq_len ({config.seq_len})" if "too_long" in dropped else ""
        raise DatasetError(f"{path}: no conversation can be trained on: {stats.reasons or 'it is empty'}{longer}")
    return stats


def steps_for_epochs(
    stats: DataStats, config: DataConfig, batch_size: int, epochs: float, *, rehearsal: DataStats | None = None
) -> int:
    """Count the batches of `epochs` passes over the data, as `batches_of_epochs` does."""
    return steps_in(batches_of_epochs(stats, config, batch_size, epochs, rehearsal=rehearsal), epochs)


def batches_of_epochs(
    stats: DataStats, config: DataConfig, batch_size: int, epochs: float, *, rehearsal: DataStats | None = None
) -> list[int]:
    """Count the batches of each of `epochs` passes over the data, rounded up, including the rehearsal mixed in.

    Conversations of the scanned lengths are packed as in `BatchIterator`. If lengths change between epochs
    (`DataConfig.is_random`), use `BatchIterator.steps_for_epochs`.
    """

    def examples(count: int | None) -> grain.MapDataset:
        made = _lengths(stats, config).repeat(count)
        return made if rehearsal is None else _mixed(made, _lengths(rehearsal, config).repeat(), config)

    with EpochBatches(examples, config.seq_len, 1, bins=config.packing_bins, seed=config.seed) as rows:
        return [math.ceil(sum(1 for _ in rows.epoch()) / batch_size) for _ in range(math.ceil(epochs))]


def _lengths(stats: DataStats, config: DataConfig) -> grain.MapDataset:
    """Return blank examples of the scanned lengths, in the order of an epoch's real ones."""
    kept, dropped = iter(stats.lengths), frozenset(stats.dropped_at)
    lengths = [0 if place in dropped else next(kept) for place in range(len(stats.lengths) + len(dropped))]
    return grain.MapDataset.source(lengths).map(_blank).seed(config.seed).shuffle()


def _blank(length: int) -> Arrays | None:
    """Return a blank example, created during packing since a whole dataset would take gigabytes. None if dropped."""
    return {name: np.zeros(length, np.int32) for name in ("tokens", "loss_mask")} if length else None


class BatchIterator(Iterator[PackedBatch]):
    """Endless batches of a dataset, epoch by epoch, with each example once an epoch. Use it in a `with` statement,
    which stops its workers.

    The last batch of an epoch may have fewer rows of examples. The rest is padding with loss mask 0.

    Args:
        path: a dataset of `Trajectory` records.
        batch_size: rows in a batch, over all hosts.
        rehearsal: another dataset, mixed in with the share `config.self_generated_ratio` of the examples.

    Raises:
        DatasetError: a dataset is missing, of another kind, or empty.
    """

    def __init__(
        self,
        path: Folder,
        tokenizer: ChatTokenizer,
        config: DataConfig,
        batch_size: int,
        *,
        rehearsal: Folder | None = None,
    ) -> None:
        data = _shuffled(path, config)
        said = None if rehearsal is None else _shuffled(rehearsal, of_rehearsal(config))

        def examples(epochs: int | None) -> grain.MapDataset:
            made = _tokenised(data.repeat(epochs), tokenizer, config)
            if said is None:
                return made
            return _mixed(made, _tokenised(said.repeat(), tokenizer, of_rehearsal(config)), config)

        self._path = path
        how = {"bins": config.packing_bins, "seed": config.seed, "workers": config.workers}
        self._batches = EpochBatches(examples, config.seq_len, batch_size, **how)

    def __next__(self) -> PackedBatch:
        try:
            return _to_batch(next(self._batches))
        except StopIteration:
            raise DatasetError(f"{self._path}: each example of an epoch was dropped; raise data.seq_len") from None

    def epoch(self) -> Iterator[PackedBatch]:
        """Iterate over the remaining batches of the current epoch."""
        return map(_to_batch, self._batches.epoch())

    def steps_for_epochs(self, epochs: float) -> int:
        """Count the batches of the next `epochs` passes over the data by making them."""
        return steps_in([sum(1 for _ in self.epoch()) for _ in range(math.ceil(epochs))], epochs)

    def get_state(self) -> dict[str, Any]:
        """Return the position in the stream as JSON, for `set_state` of an iterator over the same dataset and config;
        `workers` may differ."""
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state. For states of earlier versions, whose batches mix neighbouring epochs, it continues
        that way, with a warning.

        Raises:
            DatasetError: the state is of an earlier version with workers that packed their own parts of the data.
        """
        if "next_row" not in state:
            raise DatasetError(
                f"{self._path}: an earlier version made these batches with data.workers, in an order that no longer "
                "exists; train from the checkpoint's weights in another workdir"
            )
        if "epoch" not in state:
            logging.warning(
                "%s: an earlier version started this run. Its batches mix neighbouring epochs, so at the end some "
                "examples were seen once more than others; a new run sees each equally often",
                self._path,
            )
        self._batches.set_state(state)

    def close(self) -> None:
        """Stop the workers; the iterator yields nothing more."""
        self._batches.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shuffled(path: Folder, config: DataConfig) -> grain.MapDataset:
    """Return a dataset's examples in the first epoch's order. When repeated, each epoch has another order.

    Records are read, renamed and tokenised lazily. Raises `DatasetError` as `_Source`, and if it is empty.
    """
    source = _Source(path, config)
    if len(source) == 0:
        raise DatasetError(f"{path}: the dataset is empty")
    return grain.MapDataset.source(source).map_with_index(source.trajectory).seed(config.seed).shuffle()


def _tokenised(trajectories: grain.MapDataset, tokenizer: ChatTokenizer, config: DataConfig) -> grain.MapDataset:
    return trajectories.random_map(lambda trajectory, rng: _arrays(trajectory, rng, tokenizer, config))


def _mixed(examples: grain.MapDataset, rehearsed: grain.MapDataset, config: DataConfig) -> grain.MapDataset:
    """Mix the rehearsal into `examples` by share, in an order that does not depend on the seed."""
    return grain.MapDataset.mix([examples, rehearsed], [1 - config.self_generated_ratio, config.self_generated_ratio])


class _Source:
    """Random access to a dataset's records for Grain. Reader errors caused by a file name that file.

    Raises:
        DatasetError: the dataset is missing, of another kind, or its record count differs from its card.
    """

    def __init__(self, path: Folder, config: DataConfig) -> None:
        card = check_dataset(path, Trajectory)
        count = card["count"]
        self.path, self._config, self._records = path, config, None
        self._places_e2: np.ndarray | None = None  # (record, round) of each example; None: each record is one
        if count:  # the reader rejects an ArrayRecord without records
            with reading(path):
                self._records = grain.sources.ArrayRecordDataSource(records_files(path, card))
                found = len(self._records)
            if found != count:
                raise DatasetError(f"{path} is corrupt: {found} records, its card says {count}; synthesise it again")
        if config.split_at_user_turns:
            records = map(with_refused_as_context, each_record(path, Trajectory))
            counts = [len(round_ends(trained_roles(record.messages))) for record in records]
            if max(counts, default=1) > 1:
                self._places_e2 = np.array([(i, k) for i, n in enumerate(counts) for k in range(n)], np.int64)

    def __len__(self) -> int:
        if self._places_e2 is not None:
            return len(self._places_e2)
        return 0 if self._records is None else len(self._records)

    def _place(self, index: int) -> tuple[int, int]:
        if self._places_e2 is None:
            return index, 0
        record, number = self._places_e2[index % len(self._places_e2)]  # indices continue beyond the first epoch
        return int(record), int(number)

    def __getitem__(self, index: int) -> bytes:
        assert self._records is not None
        with reading(self.path):
            return self._records[self._place(index)[0]]

    def trajectory(self, index: int, data: bytes) -> Trajectory:
        """Return the example in a record's bytes. Raises `DatasetError` if they are invalid."""
        try:
            return by_round(decode(data, Trajectory), self._config)[self._place(index)[1]]
        except msgspec.MsgspecError as error:
            raise DatasetError(f"{self.path}: record {index} is corrupt ({error}); synthesise it again") from None


def _to_batch(packed: dict[str, np.ndarray]) -> PackedBatch:
    return PackedBatch(
        tokens_bt=packed["tokens"],
        loss_mask_bt=packed["loss_mask"],
        segment_ids_bt=packed["tokens_segment_ids"],
        positions_bt=packed["tokens_positions"],
    )


def _arrays(
    trajectory: Trajectory, rng: np.random.Generator, tokenizer: ChatTokenizer, config: DataConfig
) -> dict[str, np.ndarray] | None:
    if config.rename_entities and rng.random() < config.rename_entities:
        trajectory = rename_entities(trajectory, rng)
    if config.tools == "some":
        trajectory = _with_some_tools(trajectory, rng)
    made = tokenise(trajectory, tokenizer, config)
    return None if made.dropped else {"tokens": made.tokens, "loss_mask": made.loss_mask}


def _with_some_tools(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    called = {call.name for message in trajectory.messages for call in message.tool_calls}
    others = [tool for tool in trajectory.tools if tool.name not in called]
    kept = rng.permutation(len(others))[: rng.integers(len(others) + 1)]
    tools = [tool for tool in trajectory.tools if tool.name in called] + [others[i] for i in kept]
    return msgspec.structs.replace(trajectory, tools=[tools[i] for i in rng.permutation(len(tools))])


def _without_end(segments: Sequence[Segment], turn_end: str) -> list[Segment]:
    """Return the segments without the end marker of the last turn, which was never sampled."""
    last = max(i for i, segment in enumerate(segments) if segment.trainable)
    text = segments[last].text
    return [*segments[:last], Segment(text[: text.rindex(turn_end)], trainable=True)]


def _dropped(reason: str, detail: str) -> Example:
    return Example(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, bool), dropped=reason, detail=detail)
