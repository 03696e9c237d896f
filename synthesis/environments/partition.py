"""Which entities and which question structures belong to the held-out split: decided by a hash, once and for all.

An environment belongs to a side only if *all* its entities and its signature do; what straddles belongs to neither. So
no entity and no signature of a held-out question can occur in a training question, whatever was generated when.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from synthesis.matching import fold

Side = Literal["train", "held_out"]


@dataclass(frozen=True)
class Partition:
    """A fixed partition of entities and of signatures.

    Attributes:
        salt: another salt is another partition.
        entities: share of the entities that is held out, 0 to 1.
        signatures: share of the signatures that is held out, 0 to 1.
    """

    salt: str
    entities: float
    signatures: float

    def side_of_entity(self, entity: str) -> Side:
        """Spellings that differ in case, width or spaces are one entity."""
        return self._side("entity", fold(entity), self.entities)

    def side_of_signature(self, signature: str) -> Side:
        return self._side("signature", signature, self.signatures)

    def side(self, entities: Iterable[str], signature: str) -> Side | None:
        """The side on which everything lies, or None when the question straddles."""
        sides = {self.side_of_signature(signature), *map(self.side_of_entity, entities)}
        return sides.pop() if len(sides) == 1 else None

    def _side(self, kind: str, name: str, fraction: float) -> Side:
        digest = hashlib.sha256(f"{self.salt}\x1f{kind}\x1f{name}".encode()).digest()
        return "held_out" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"
