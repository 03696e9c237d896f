"""Assignment of entities and questions to the training or held-out split, by a hash.

An environment belongs to a split only if *all* its entities and all of its question do; a mixed one belongs to neither.
So no entity and no question (or none of its intents) of a held-out environment can occur in a training environment,
whenever each was generated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from astra_jax.base.settings import Settings, Share
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
        """Return the split of an entity. Spellings that differ in case, width or spaces are one entity."""
        return self._split_of("entity", fold(entity), self.entities)

    def split_of_intent(self, intent: str) -> Split | None:
        """Return the split of one intent, or None if intents belong to both. All intents of a world, `world.tool`, have
        one split."""
        return self._split_of("intent", intent.partition(".")[0], self.questions) if self.by == "intent" else None

    def split_of_signature(self, signature: str) -> Split | None:
        """Return the split of a question, or None if its intents are in both."""
        if self.by == "signature":
            return self._split_of("signature", signature, self.questions)
        splits = {self.split_of_intent(intent) for intent in _INTENT.findall(signature)}
        return splits.pop() if len(splits) == 1 else None

    def split(self, entities: Iterable[str], signature: str) -> Split | None:
        """Return the split of a question and its entities, or None if they are in both."""
        splits = {self.split_of_signature(signature), *map(self.split_of_entity, entities)}
        return splits.pop() if len(splits) == 1 else None

    def split_of_source(self, source: str, share: float) -> Split:
        """Return the split of a source, if this share of sources is held out."""
        return self._split_of("source", source, share)

    def _split_of(self, kind: str, name: str, fraction: float) -> Split:
        digest = hashlib.sha256(f"{self.salt}\x1f{kind}\x1f{name}".encode()).digest()
        return "held_out" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"


WORKSPACE = Partition("astra", 0.35, 0.3, "intent")
"""The default of both pipelines. With one partition no trajectory has what an environment of another run holds out."""
