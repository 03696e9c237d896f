"""SFT batches from a trajectory dataset: render, tokenise, shuffle, pack, batch; a Grain pipeline that can resume.

    ArrayRecord of Trajectory ─ rounds of its user ─ render + encode ─ drop or cut what is too long
        ─ shuffle (each epoch anew) ─ repeat ─ mix with those of the rehearsal, if there is one
        ─ first-fit packing into rows of seq_len, with segment ids and positions ─ batches

Every stage is a pure function of the record's index and the seed, so the iterator's state is a few integers and a
resumed run sees exactly the batches that it would have seen. On several hosts each makes the whole batch and uses its
part: the batches do not depend on how many hosts there are, and a run may go on with another number of them. Making a
batch is cheap beside training on it.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import grain
import msgspec
import numpy as np
from absl import logging
from grain.experimental import FirstFitPackIterDataset

from astra_jax.run.batch import PackedBatch
from astra_jax.sft.rename_entities import rename_entities
from astra_jax.tokenizer import ChatTokenizer
from sandbox.settings import Bound, Length, Seed, Settings, Share
from synthesis.core.chat_format import NotInFormat, Segment
from synthesis.core.datasets import DatasetError, Folder, check_dataset, each_record, reading, records_files
from synthesis.core.records import Message, ToolSpec, Trajectory, decode

_AHEAD = 256
"""Examples that a worker has ready: packing takes as many as its open rows hold at once."""
_WORKER_DIED = "terminated unexpectedly"
"""What Grain says when a worker is gone: of a signal, as when it runs out of memory."""
_REPLACED = 3
"""So many times in a row, before one example, workers that died are replaced; what is wrong then is the example, or the
machine."""


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
            32k tokens) and mix neighbouring epochs a little.
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
    """

    lengths: tuple[int, ...]
    trainable: int
    dropped: dict[str, int]
    cut: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Example:
    """One tokenised conversation; without tokens when it is dropped, and then `dropped` says why.

    Attributes:
        tokens: int32 ids.
        loss_mask: float32, the weight of each token in the loss; 0: it is not trained on.
        context: bool, tokens of the assistant's turns of weight 0.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    context: np.ndarray
    cut: bool = False
    dropped: str = ""


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
        return _dropped("tools_change")  # chat formats list tools once, before all rounds
    # With rounds `apart`, turns before the user spoke last have examples of their own.
    before = sum(one.role == "assistant" for one in messages[: users[-1]]) if users and config.rounds == "apart" else 0
    keep_reasoning = config.keep_reasoning and not before
    try:
        segments = tokenizer.format.render(messages, tools, keep_reasoning=keep_reasoning)
    except NotInFormat:
        return _dropped("not_in_format")
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
        return _dropped("untrained" if context.any() else "no_assistant_turn")
    cut, end = len(ids) > config.seq_len, len(ids)
    if cut:
        # Every assistant turn ends with a trainable token; the last trained one that fits ends the conversation.
        ends = np.flatnonzero((loss_mask > 0) & ~np.append(trainable[1:], False))
        ends = ends[ends < config.seq_len]
        if config.too_long == "drop" or not len(ends):
            return _dropped("too_long")
        end = int(ends[-1]) + 1
    return Example(np.asarray(ids[:end], np.int32), loss_mask[:end], context[:end], cut=cut)


def of_rehearsal(config: DataConfig) -> DataConfig:
    """How a rehearsal becomes examples beside data of this config: as it was said."""
    return dataclasses.replace(config, rename_entities=0.0, tools="all")


def scan(path: Folder, tokenizer: ChatTokenizer, config: DataConfig) -> DataStats:
    """Tokenise the whole dataset once and count.

    Raises:
        DatasetError: missing, of another kind, corrupt, or nothing in it can be trained on.
    """
    lengths, trainable, cut, dropped = [], 0, 0, Counter[str]()
    every = (one for trajectory in each_record(path, Trajectory) for one in by_round(trajectory, config))
    for trajectory in every:
        example = tokenise(trajectory, tokenizer, config)
        if example.dropped:
            dropped[example.dropped] += 1
            continue
        lengths.append(len(example.tokens))
        trainable += int(np.count_nonzero(example.loss_mask))
        cut += example.cut
    if not lengths:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(dropped.items())) or "it is empty"
        raise DatasetError(
            f"{path}: no conversation can be trained on ({why}); raise seq_len ({config.seq_len}) or add data"
        )
    return DataStats(tuple(lengths), trainable, dict(dropped), cut)


def steps_for_epochs(
    stats: DataStats, config: DataConfig, batch_size: int, epochs: float, *, rehearsal: DataStats | None = None
) -> int:
    """How many batches `epochs` passes over the data fill, with what is rehearsed between; found by packing
    conversations of the scanned lengths."""
    whole = math.ceil(epochs)

    def lengths(stats: DataStats) -> grain.MapDataset:
        return grain.MapDataset.source(stats.lengths).map(_blank).seed(config.seed).shuffle()

    examples = lengths(stats).repeat(whole)
    if rehearsal is not None:
        examples = _mixed(examples, lengths(rehearsal).repeat(), config)
    packed = _pack(examples, dataclasses.replace(config, workers=0))
    rows = sum(1 for _ in packed)
    return max(1, math.ceil(rows * epochs / whole / batch_size))


def _blank(length: int) -> dict[str, np.ndarray]:
    """An example of a length, made when it is packed: all of a dataset at once would take gigabytes."""
    return {name: np.zeros(length, np.int32) for name in ("tokens", "loss_mask")}


class BatchIterator(Iterator[PackedBatch]):
    """Endless batches of a dataset; `with` it ends its workers.

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
        examples = _examples(path, tokenizer, config)
        if rehearsal is not None:
            examples = _mixed(examples, _examples(rehearsal, tokenizer, of_rehearsal(config)), config)
        self._path = path
        self._iterator = iter(_pack(examples, config).batch(batch_size, drop_remainder=True).map(_to_batch))

    def __next__(self) -> PackedBatch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """JSON: where the stream is; give it to `set_state` of an iterator over the same dataset and config, but for
        `workers`."""
        return self._iterator.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            DatasetError: an earlier version's with workers, each of which packed a part of the data for itself.
        """
        if "next_row" not in state:
            raise DatasetError(
                f"{self._path}: an earlier version made these batches with data.workers, in an order that no longer "
                "exists; train from the checkpoint's weights in another workdir"
            )
        self._iterator.set_state(state)

    def close(self) -> None:
        """End the workers; the iterator gives nothing more."""
        self._iterator.close()

    def __enter__(self) -> BatchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _examples(path: Folder, tokenizer: ChatTokenizer, config: DataConfig) -> grain.MapDataset:
    """Those of a dataset, again and again. Lazy: a record is read, renamed and tokenised when its shuffled turn comes.
    Raises `DatasetError` as `_Source`, or: it is empty."""
    source = _Source(path, config)
    if len(source) == 0:
        raise DatasetError(f"{path}: the dataset is empty")
    return (
        grain.MapDataset.source(source)
        .map_with_index(source.trajectory)
        .seed(config.seed)
        .shuffle()
        .repeat()
        .random_map(lambda trajectory, rng: _arrays(trajectory, rng, tokenizer, config))
    )


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


class _InOrder(grain.IterDataset):
    """What there is of a sparse dataset, in its order, for any number of workers that make it ahead."""

    def __init__(self, examples: grain.MapDataset, workers: int) -> None:
        super().__init__(examples)
        self._examples, self._workers = examples, workers

    def __iter__(self) -> grain.DatasetIterator:
        return _InOrderIterator(self._examples, self._workers)


class _InOrderIterator(grain.DatasetIterator):
    """Its state is the next example's index, which says nothing of workers. Workers take every n-th example, also those
    that are none: else what comes in turn would not be in order."""

    def __init__(self, examples: grain.MapDataset, workers: int) -> None:
        super().__init__()
        self._examples, self._workers = examples, workers
        self._index = 0
        self._ahead: grain.DatasetIterator | None = None

    def __next__(self) -> dict[str, np.ndarray]:
        died = 0
        while True:
            try:
                example = next(self._begun())
            except RuntimeError as error:
                if _WORKER_DIED not in str(error) or (died := died + 1) > _REPLACED:
                    raise
                logging.warning("a data worker died (%s); others go on from example %d", error, self._index)
                self._stop()
                continue
            self._index += 1
            if example is not None:
                return example

    def _begun(self) -> grain.DatasetIterator:
        if self._ahead is None:
            # Few reader threads: the pipeline outruns any training step by far, and the host has other work.
            reading = grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)
            examples = self._examples.slice(slice(self._index, None)).to_iter_dataset(reading, allow_nones=True)
            options = grain.MultiprocessingOptions(num_workers=self._workers, per_worker_buffer_size=_AHEAD)
            self._ahead = iter(examples.mp_prefetch(options, worker_init_fn=_without_interrupts))
        return self._ahead

    def get_state(self) -> dict[str, int]:
        return {"next_index": self._index}

    def set_state(self, state: dict[str, int]) -> None:
        self._stop()
        self._index = state["next_index"]

    def close(self) -> None:
        self._stop()
        super().close()

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None


def _pack(examples: grain.MapDataset, config: DataConfig) -> grain.IterDataset:
    rows = _InOrder(examples, config.workers)
    lengths = {"tokens": config.seq_len, "loss_mask": config.seq_len}
    return FirstFitPackIterDataset(rows, length_struct=lengths, num_packing_bins=config.packing_bins, seed=config.seed)


def _without_interrupts(worker: int, count: int) -> None:
    """Ctrl-C reaches all processes at a terminal; whom it is meant for ends the others."""
    del worker, count
    signal.signal(signal.SIGINT, signal.SIG_IGN)


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


def _dropped(reason: str) -> Example:
    return Example(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, bool), dropped=reason)
