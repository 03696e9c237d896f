"""SFT batches from a trajectory dataset: render, tokenise, shuffle, pack, batch; a Grain pipeline that can resume.

    ArrayRecord of Trajectory ─ rounds of its user ─ render + encode ─ drop or cut what is too long
        ─ shuffle (each epoch anew) ─ repeat ─ mix with those of the rehearsal, if there is one
        ─ rows of seq_len, with segment ids and positions ─ batches, each of one epoch (`packing`)

Every stage is a pure function of the record's index and the seed, so the iterator's state is a few integers and a
resumed run sees exactly the batches that it would have seen. On several hosts each makes the whole batch and uses its
part: the batches do not depend on how many hosts there are, and a run may go on with another number of them. Making a
batch is cheap beside training on it.
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

from astra_jax.run.batch import PackedBatch
from astra_jax.sft.packing import Arrays, EpochBatches, steps_in
from astra_jax.sft.rename_entities import rename_entities
from astra_jax.tokenizer import ChatTokenizer
from sandbox.settings import Bound, Length, Seed, Settings, Share
from synthesis.core.chat_format import NotInFormat, Segment
from synthesis.core.datasets import DatasetError, Folder, check_dataset, each_record, reading, records_files
from synthesis.core.records import Message, ToolSpec, Trajectory, decode


@dataclass(frozen=True)
class DataConfig(Settings):
    """How trajectories become batches.

    Attributes:
        seq_len: tokens in a row; static, so that nothing recompiles.
        keep_reasoning: keep the thinking of every turn (see `ChatFormat.render`). Ours: True, because a rollout is
            append-only and so the policy will see its earlier thinking. With rounds `apart`, the thinking of turns
            before the user spoke last follows the chat format: no rollout has such turns.
        rounds: of a conversation whose user speaks several times. `apart`: an example for each time, up to where the
            user speaks again, trained on the turns since; it is what the model's template shows there when the model
            is served, thoughts of earlier rounds left out where the template does. What the assistant says before the
            user speaks at all is an example too. Rounds in which every turn has weight 0 are none. `together`: one
            example of all.
        too_long: what happens to a conversation of more than `seq_len` tokens: `drop` it, or `cut` it after the last
            assistant turn that fits. Both are counted.
        tools: which tool documents the prompt shows: `all` that the trajectory was offered; `some`: those it called and
            a random number of the others, in random order, drawn anew in each epoch; `none`. Less than all is a
            curriculum for tiny models: short rows teach the dialogue first.
        thinking: False leaves all reasoning out.
        rename_entities: share of conversations, drawn anew in each epoch, whose entities get new names
            (`rename_entities`). For tiny models trained from scratch; a pretrained one copies names already.
        rehearsed: share of examples that are of the rehearsal, where a run has one: conversations without tools,
            against unlearning to talk (`rehearsal`). They come evenly between the others (also where some of those are
            dropped), in an order of their own, and again and again if they are few.
        workers: processes that make examples ahead, in turn; 0 makes them in this process, when they are needed. They
            are put in order before they are packed, so that batches do not depend on the number: it may change when a
            run goes on.
        packing_bins: rows that are filled at the same time; more leave less padding (0.97 full with 8, 0.99 with 64 at
            32k tokens).
        seed: of the shuffle.
    """

    seq_len: Length
    keep_reasoning: bool = True
    rounds: Literal["apart", "together"] = "apart"
    too_long: Literal["drop", "cut"] = "cut"
    tools: Literal["all", "some", "none"] = "all"
    thinking: bool = True
    rename_entities: Share = 0.0
    rehearsed: Annotated[float, Bound(above=0, below=1)] = 0.25
    workers: Annotated[int, Bound(least=0, most=1_024)] = 0
    packing_bins: Annotated[int, Bound(least=1, most=65_536)] = 64
    seed: Seed = 0

    @property
    def is_random(self) -> bool:
        """Return whether an example has another length in each epoch."""
        return self.rename_entities > 0 or self.tools == "some"


@dataclass(frozen=True)
class DataStats:
    """What a dataset gives under a config, counted once, before training, and before any renaming.

    Attributes:
        lengths: tokens of each kept example, in the dataset's order; with `tools="some"` at their longest. An example
            is a conversation, or one round of its user (`DataConfig.rounds`).
        trainable: how many of all those tokens are trained on, with whatever weight.
        dropped: conversations left out, by reason (`too_long`, `no_assistant_turn`, `untrained`: every turn of the
            assistant has weight 0; `not_in_format`: what the model's chat format cannot say; `tools_change`: rounds
            `together`, and a tool is there from a later one on).
        cut: conversations that were shortened.
        dropped_at: places of the dropped ones among all, ascending.
        first_dropped: for each reason the first example's id, and what exactly is wrong with it.
    """

    lengths: tuple[int, ...]
    trainable: int
    dropped: dict[str, int]
    cut: int
    dropped_at: tuple[int, ...] = ()
    first_dropped: dict[str, str] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Of all examples, the dropped ones too."""
        return len(self.lengths) + sum(self.dropped.values())

    @property
    def reasons(self) -> str:
        """Why examples were dropped: the number for each reason, with the first example."""
        return "; ".join(
            f"{count} {reason} ({self.first_dropped.get(reason, '')})" for reason, count in sorted(self.dropped.items())
        )

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Example:
    """One tokenised conversation; without tokens when it is dropped.

    Attributes:
        tokens: int32 ids.
        loss_mask: float32, the weight of each token in the loss; 0: it is not trained on.
        context: bool, tokens of the assistant's turns of weight 0.
        dropped: the reason; empty if it is not dropped.
        detail: what exactly is wrong with it.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    context: np.ndarray
    cut: bool = False
    dropped: str = ""
    detail: str = ""


def shown(trajectory: Trajectory, config: DataConfig) -> tuple[list[Message], list[ToolSpec]]:
    """The messages and the tool documents that a config shows of a trajectory."""
    messages = trajectory.messages
    if not config.thinking:
        messages = [msgspec.structs.replace(message, reasoning="") for message in messages]
    return messages, [] if config.tools == "none" else trajectory.tools


def round_ends(roles: Sequence[str]) -> list[int]:
    """How many messages of a conversation each of its examples has with rounds `apart`: up to where the user speaks
    again, if the assistant spoke meanwhile. One that no user opens is one example."""
    ends = [i for i in range(1, len(roles)) if roles[i] == "user" and roles[i - 1] != "user"]
    starts = [roles.index("user", end) for end in ends]
    opened = [0, *starts]
    found = [end for start, end in zip(opened, [*ends, len(roles)], strict=True) if "assistant" in roles[start:end]]
    return found or [len(roles)]


def by_round(trajectory: Trajectory, config: DataConfig) -> list[Trajectory]:
    """The conversations that become an example each: itself, or the beginnings that `round_ends` says, with the tools
    that there were then."""
    if config.rounds == "together":
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


def trained_roles(messages: Sequence[Message]) -> list[str]:
    """The role of each message; `context` for a turn of the assistant that has weight 0."""
    return [one.role if one.role != "assistant" or one.weight else "context" for one in messages]


def tokenise(trajectory: Trajectory, tokenizer: ChatTokenizer, config: DataConfig) -> Example:
    """Render and encode an example (`by_round`); drop or cut it if it has more than `config.seq_len` tokens."""
    messages, tools = shown(trajectory, config)
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    if config.rounds == "together" and trajectory.dialogue and trajectory.dialogue.returned:
        # Chat formats list tools once, before all rounds.
        return _dropped("tools_change", "a tool is there from a later round on; use data.rounds=apart")
    # With rounds `apart`, turns before the user spoke last have examples of their own.
    before = sum(one.role == "assistant" for one in messages[: users[-1]]) if users and config.rounds == "apart" else 0
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
    """How a rehearsal becomes examples beside data of this config: as it was said."""
    return dataclasses.replace(config, rename_entities=0.0, tools="all")


def held_out_data(config: DataConfig) -> DataConfig:
    """How held-out conversations become examples beside data of this config: nothing is renamed."""
    return dataclasses.replace(config, rename_entities=0.0, workers=0)


def scan(path: Folder, tokenizer: ChatTokenizer, config: DataConfig) -> DataStats:
    """Tokenise the whole dataset once and count.

    Raises:
        DatasetError: missing, of another kind, corrupt, or nothing in it can be trained on.
    """
    lengths, trainable, cut, dropped = [], 0, 0, Counter[str]()
    dropped_at: list[int] = []
    first_dropped: dict[str, str] = {}
    every = (one for trajectory in each_record(path, Trajectory) for one in by_round(trajectory, config))
    for place, trajectory in enumerate(every):
        example = tokenise(trajectory, tokenizer, config)
        if example.dropped:
            dropped[example.dropped] += 1
            dropped_at.append(place)
            first_dropped.setdefault(example.dropped, f"first in {trajectory.id}: {example.detail}")
            continue
        lengths.append(len(example.tokens))
        trainable += int(np.count_nonzero(example.loss_mask))
        cut += example.cut
    stats = DataStats(tuple(lengths), trainable, dict(dropped), cut, tuple(dropped_at), first_dropped)
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
    """Count the batches of each of `epochs` passes over the data, rounded up, with what is rehearsed between.

    Conversations of the scanned lengths are packed as `BatchIterator` packs them. Where examples have other lengths in
    each epoch (`DataConfig.is_random`), ask `BatchIterator.steps_for_epochs`.
    """

    def examples(count: int | None) -> grain.MapDataset:
        made = _lengths(stats, config).repeat(count)
        return made if rehearsal is None else _mixed(made, _lengths(rehearsal, config).repeat(), config)

    with EpochBatches(examples, config.seq_len, 1, bins=config.packing_bins, seed=config.seed) as rows:
        return [math.ceil(sum(1 for _ in rows.epoch()) / batch_size) for _ in range(math.ceil(epochs))]


def _lengths(stats: DataStats, config: DataConfig) -> grain.MapDataset:
    """Blank examples of the scanned lengths, in the order of the real ones in an epoch."""
    kept, dropped = iter(stats.lengths), frozenset(stats.dropped_at)
    lengths = [0 if place in dropped else next(kept) for place in range(len(stats.lengths) + len(dropped))]
    return grain.MapDataset.source(lengths).map(_blank).seed(config.seed).shuffle()


def _blank(length: int) -> Arrays | None:
    """An example of a length, made when it is packed: all of a dataset at once would take gigabytes. None: dropped."""
    return {name: np.zeros(length, np.int32) for name in ("tokens", "loss_mask")} if length else None


class BatchIterator(Iterator[PackedBatch]):
    """Endless batches of a dataset, epoch by epoch: each example once an epoch. Use it in a `with` statement, which
    stops its workers.

    The last batch of an epoch may have fewer rows of examples; the others are padding, whose loss mask is 0.

    Args:
        path: a dataset of `Trajectory` records.
        batch_size: rows in a batch, over all hosts.
        rehearsal: another, of which the share `config.rehearsed` of the examples is.

    Raises:
        DatasetError: missing, of another kind, or empty.
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
        """JSON: where the stream is; give it to `set_state` of an iterator over the same dataset and config, but for
        `workers`."""
        return self._batches.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from there. A state of a version whose batches held examples of neighbouring epochs continues that
        way, with a warning.

        Raises:
            DatasetError: an earlier version's with workers, each of which packed a part of the data for itself.
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
        """Stop the workers; the iterator gives nothing more."""
        self._batches.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _shuffled(path: Folder, config: DataConfig) -> grain.MapDataset:
    """A dataset's examples, in the order of the first epoch; in another one in each epoch, when it is repeated.

    Lazy: a record is read, renamed and tokenised when its turn comes. Raises `DatasetError` as `_Source`, or: it is
    empty.
    """
    source = _Source(path, config)
    if len(source) == 0:
        raise DatasetError(f"{path}: the dataset is empty")
    return grain.MapDataset.source(source).map_with_index(source.trajectory).seed(config.seed).shuffle()


def _tokenised(trajectories: grain.MapDataset, tokenizer: ChatTokenizer, config: DataConfig) -> grain.MapDataset:
    return trajectories.random_map(lambda trajectory, rng: _arrays(trajectory, rng, tokenizer, config))


def _mixed(examples: grain.MapDataset, rehearsed: grain.MapDataset, config: DataConfig) -> grain.MapDataset:
    """As long as `examples` are in their share, in an order that no seed changes: what an index gives is known."""
    return grain.MapDataset.mix([examples, rehearsed], [1 - config.rehearsed, config.rehearsed])


class _Source:
    """The records of a dataset by their place, for Grain; those of its reader's errors that a file causes name it.

    Raises:
        DatasetError: missing, of another kind, or of another number of records than its card says.
    """

    def __init__(self, path: Folder, config: DataConfig) -> None:
        card = check_dataset(path, Trajectory)
        count = card["count"]
        self.path, self._config, self._records = path, config, None
        self._places_e2: np.ndarray | None = None  # (record, round) of each example; None: each record is one
        if count:  # an ArrayRecord without any has no footer that the reader accepts
            with reading(path):
                self._records = grain.sources.ArrayRecordDataSource(records_files(path, card))
                found = len(self._records)
            if found != count:
                raise DatasetError(f"{path} is corrupt: {found} records, its card says {count}; synthesise it again")
        if config.rounds == "apart":
            counts = [len(round_ends(trained_roles(record.messages))) for record in each_record(path, Trajectory)]
            if max(counts, default=1) > 1:
                self._places_e2 = np.array([(i, k) for i, n in enumerate(counts) for k in range(n)], np.int64)

    def __len__(self) -> int:
        if self._places_e2 is not None:
            return len(self._places_e2)
        return 0 if self._records is None else len(self._records)

    def _place(self, index: int) -> tuple[int, int]:
        if self._places_e2 is None:
            return index, 0
        record, number = self._places_e2[index % len(self._places_e2)]  # behind the first epoch indices go on
        return int(record), int(number)

    def __getitem__(self, index: int) -> bytes:
        assert self._records is not None
        with reading(self.path):
            return self._records[self._place(index)[0]]

    def trajectory(self, index: int, data: bytes) -> Trajectory:
        """The example of these bytes, a record's. Raises `DatasetError`: they are none."""
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
    """A conversation up to the last words of its last turn, whose end nobody said."""
    last = max(i for i, segment in enumerate(segments) if segment.trainable)
    text = segments[last].text
    return [*segments[:last], Segment(text[: text.rindex(turn_end)], trainable=True)]


def _dropped(reason: str, detail: str) -> Example:
    return Example(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, bool), dropped=reason, detail=detail)
