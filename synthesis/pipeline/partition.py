"""Which entities and which questions belong to the held-out split: decided by a hash, once and for all.

An environment belongs to a split only if *all* its entities and all of its question do; what straddles belongs to
neither. So no entity and no question (or none of its intents) of a held-out environment can occur in a training one,
whatever was generated when.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sandbox.settings import Settings, Share
from synthesis.core.matching import fold

Split = Literal["train", "held_out"]
SplitBy = Literal["intent", "signature", "source"]

_INTENT = re.compile(r"[^>|&()]+")


@dataclass(frozen=True)
class Partition(Settings):
    """A fixed partition of entities and questions into training and held-out ones.

    Attributes:
        salt: name of the partition. Another salt gives another partition.
        entities: share of the entities that is held out, 0 to 1.
        questions: share of the intents, or signatures, that is held out, 0 to 1.
        by: `intent` holds out look-ups: every tool of a held-out question is unseen in training. `signature` holds out
            combinations of look-ups; each look-up may occur in training too. `source` holds out environments by their
            source alone (`split_of_source`); everything made of a held-out source is held out.
    """

    salt: str
    entities: Share
    questions: Share
    by: SplitBy = "signature"

    def split_of_entity(self, entity: str) -> Split:
        """Spellings that differ in case, width or spaces are one entity."""
        return self._split_of("entity", fold(entity), self.entities)

    def split_of_intent(self, intent: str) -> Split | None:
        """The split of one intent; None where intents belong to both. Those of a world, `world.tool`, go together."""
        return self._split_of("intent", intent.partition(".")[0], self.questions) if self.by == "intent" else None

    def split_of_signature(self, signature: str) -> Split | None:
        """The split of a question; None where its intents lie in both."""
        if self.by == "signature":
            return self._split_of("signature", signature, self.questions)
        splits = {self.split_of_intent(intent) for intent in _INTENT.findall(signature)}
        return splits.pop() if len(splits) == 1 else None

    def split(self, entities: Iterable[str], signature: str) -> Split | None:
        """The split in which everything lies, or None when the question straddles."""
        splits = {self.split_of_signature(signature), *map(self.split_of_entity, entities)}
        return splits.pop() if len(splits) == 1 else None

    def split_of_source(self, source: str, share: float) -> Split:
        """The split of a source, of which this share is held out."""
        return self._split_of("source", source, share)

    def _split_of(self, kind: str, name: str, fraction: float) -> Split:
        digest = hashlib.sha256(f"{self.salt}\x1f{kind}\x1f{name}".encode()).digest()
        return "held_out" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"
