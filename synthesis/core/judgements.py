"""Judgements that an English or a Chinese text starts with: "That is correct.", 该说法不正确。

Other languages have theirs in `language_words`.
"""

from __future__ import annotations

import re

_JUDGED = re.compile(
    r"""\s{0,3}(?:(?:unfortunately|sorry|actually|well),?\ )?
    (?:(?:(?:that|this|it|(?:the|this|that)\ (?:correct\ )?(?:statement|claim|answer|assertion|information))
      (?:\ is|'s|\ was)\ (?:(?:simply|completely|entirely|absolutely|
        indeed|actually|definitely|technically|unfortunately|quite)\ )?:?\ ?)
      (?:(?P<yes>yes|true|correct|accurate)
        |no|false|incorrect|wrong|untrue|inaccurate|not\ (?:true|correct|right|accurate|the\ case))
      (?=\W{0,4}(?:$|\n|[.,;:!]))
    |(?<=[a-z]\ )(?:no|not)(?=[.,;:!]|\ ?—)|(?<=,\ )(?:no|not)(?=[.,;:!]|\ ?—)
    |(?:(?P<sure>yes|yep|yeah|yup|correct|true|absolutely|certainly|definitely|of\ course|that's\ right)
        |nope|nah|incorrect|false|wrong|not\ (?:really|exactly|at\ all)
        |(?:absolutely|certainly|definitely|of\ course)\ not)
      (?=[.,;:!]|\ -\ |\ ?—))""",
    re.IGNORECASE | re.VERBOSE,
)
"""A judgement that an English text starts with."""
_JUDGED_IN_CHINESE = re.compile(
    r"\s{0,3}(?:(?:抱歉|对不起|很遗憾)[,，]\s?)?"
    r"(?:(?:这|那|该|此|上述|以上)(?:个|种|条)?(?:说法|陈述|信息|答案|结论|命题|观点|表述)?|答案|结论|结果)?:?\s?(?:并|其实|显然|完全|是|为){0,2}"
    r"(?:(?P<yes>是|对|正确|没错|属实|真|肯定|可以)|否定|否|不是真|不是这样|不是|不对|不正确|错误|错|不属实|假|没有|不可以|不能|不行)"
    r"的?(?=\s{0,2}(?:$|\n|[。,.;!]))"
)
"""The same of a Chinese text."""


def judgement_at_start(text: str) -> bool | None:
    """Return whether a `plain` text starts with a judgement that something is so, or is not so; None for neither."""
    found = _JUDGED.match(text) or _JUDGED_IN_CHINESE.match(text)
    if found is None:
        return None
    return any(found.groupdict().get(name) is not None for name in ("yes", "sure"))
