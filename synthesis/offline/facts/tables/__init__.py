"""The tables: each module reads its data packages and builds the relations of a few servers."""

from __future__ import annotations

from collections.abc import Mapping

from synthesis.offline.facts.catalog import KINDS, SERVERS
from synthesis.offline.facts.relations import Relation

__all__ = ["relation"]


def relation(
    id: str,
    server: str,
    kinds: tuple[str, str],
    rows: Mapping[str, str | int | float],
    en: tuple[str, ...],
    zh: tuple[str, ...],
    *,
    about: tuple[str, str],
    unit: str = "",
) -> Relation:
    """Build one relation.

    Args:
        kinds: (subject kind, object kind).
        en: English noun phrases without their argument: `"the capital of"`.
        zh: Chinese nouns that follow `的`: `"首都"`.
        about: one sentence in English and one in Chinese.
    """
    subject, object_ = kinds
    return Relation(
        id=id,
        server=server,
        domain=SERVERS[server].domain,
        subject=subject,
        object=object_,
        parameter=KINDS[subject].parameter,
        description={"en": about[0], "zh": about[1]},
        phrases={"en": tuple(f"{p} {{x}}" for p in en), "zh": tuple(f"{{x}}的{p}" for p in zh)},
        rows=dict(rows),
        unit=unit,
    )
