"""Phrases by language: an admitted failure, a refusal, and talk that no user should see."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_FAILURE: Final[Mapping[str, str]] = {
    "de": r"fehler|fehlgeschlagen|leider|nicht (?:möglich|verfügbar|gefunden|erreichbar)|konnte"
    r"|kann(?: \w+)? nicht|kein",
    "en": r"\b(?:fail|error|unable|unfortunately|sorry|apolog|problem|unavailable|unsuccessful|timed? ?-?out|limit|"
    r"(?:could|can|did|does|do|was|were|is|are|has|have)(?:n[o']t| not)\b|cannot|can't|no \w+|nothing|none|not |"
    r"without|empty|invalid|missing|try again|denied|refused)",
    "es": r"error|fall[oó]|no (?:se )?pud|no (?:puedo|está|hay|he)|lamentable|lo siento|imposible",
    "fr": r"erreur|échou|échec|malheureusement|désolé|impossible|n'(?:ai|a|est) pas|ne (?:peux|peut) pas|aucun",
    "it": r"errore|fallit|purtroppo|mi dispiace|impossibile|non (?:ho|è|posso|sono)|nessun",
    "ja": r"失敗|エラー|できません|できなかった|できず|申し訳|見つかりません|利用できない|タイムアウト|ありません",
    "ko": r"실패|오류|에러|수 없|못했|죄송|찾지 못|시간 초과|없습니다",
    "pt": r"erro|falh|infelizmente|desculp|impossível|não (?:foi|posso|está|há|consegui)|nenhum",
    "ru": r"ошибк|не удалось|не смог|к сожалению|извин|невозможно|недоступ|не найден|нет ",
    "zh": r"失败|错误|出错|异常|无法|不能|未能|没能|没有|超时|抱歉|对不起"
    r"|不可用|遗憾|查不到|找不到|不了|不到|限流|受限|稍后|未找到|为空|问题",
}
_REFUSAL: Final[Mapping[str, str]] = {
    "de": r"ich kann (?:das |dies |ihnen |dir )?(?:leider )?nicht|leider kann|nicht in der lage"
    r"|konnte (?:ich )?(?:leider )?nicht",
    "en": r"\b(?:i (?:can(?:'t|not| not)|could(?:n't| not)|won't|am (?:not able|unable)|was (?:not able|unable))|"
    r"i'm (?:not able|unable|sorry)|i (?:do not|don't) have (?:access|the ability|an answer)|i have no answer|"
    r"unable to|as an ai\b|there is no answer|not possible to)",
    "es": r"no puedo|no pude|no tengo acceso|lo siento|no es posible",
    "fr": r"je ne peux pas|je n'ai pas pu|je n'ai pas accès|je suis désolé|il n'est pas possible",
    "it": r"non posso|non sono riuscit|non ho accesso|mi dispiace",
    "ja": r"できません|できませんでした|申し訳",
    "ko": r"할 수 없|수 없습니다|죄송|못했습니다",
    "pt": r"não posso|não consegui|não tenho acesso|desculp",
    "ru": r"я не могу|не удалось|я не смог|к сожалению|извин",
    "zh": r"我?无法|我不能|未能|没能|抱歉|对不起|做不到|没有权限|没有答案",
}
_SIMULATION: Final[Mapping[str, str]] = {
    "en": r"\b(?:simulat(?:e|es|ed|ing|ion|or)|emulat(?:ed|ing|ion|or)|synthetic|role-?play(?:ing)?|rubric|grader|"
    r"(?:the|a|our|as) judges?|judging|training (?:data|example|sample)s?|test (?:scenario|harness)|"
    r"(?:mock|dummy|fake|fictional|made-up|placeholder) (?:data|response|result|answer|value|user|task|scenario)s?|"
    r"evaluation (?:task|criteria))\b",
    "zh": r"模拟|仿真|评委|评审|裁判|评分(?:标准|者)|合成(?:数据|任务)|虚构|训练(?:数据|样本)|角色扮演|假数据|测试场景",
}


def _compiled(words: Mapping[str, str]) -> dict[str, re.Pattern[str]]:
    return {language: re.compile(pattern, re.IGNORECASE) for language, pattern in words.items()}


FAILURES: Final = _compiled(_FAILURE)
"""Language → pattern of words that admit a failure or an absence. They also occur in other sentences."""
REFUSALS: Final = _compiled(_REFUSAL)
"""Language → pattern of words with which an agent declines or gives up."""
SIMULATIONS: Final = _compiled(_SIMULATION)
"""Language → pattern of talk about judges, simulation or synthetic tasks. English words occur in all languages."""
TEMPLATE: Final = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|</?(?:think|tool_call|tool_calls|tool_response|tools|function_call|bos|eos|pad|unk)>"
    r"|\[/?INST\]|<</?SYS>>"
)
"""Tokens of chat templates, in any text."""
UNFILLED: Final = re.compile(
    r"\{\{\s*[A-Za-z_][\w.]{0,60}\s*\}\}|\{%[^%\n]{1,80}%\}|\[(?:insert|your|placeholder)\b[^\]\n]{0,40}\]"
    r"|<(?:insert|your)[ _-][^<>\n]{1,40}>|lorem ipsum",
    re.IGNORECASE,
)
"""Places of a template that nobody filled, in what a user or an agent says."""


def admits_failure(text: str, language: str) -> bool | None:
    """Return whether a text has words of failure or absence; None: the language has no phrases here."""
    pattern = FAILURES.get(language)
    return None if pattern is None else pattern.search(text) is not None


def simulation_talk(text: str, language: str, allowed: str) -> str:
    """Return the first phrase about judges or simulation that `allowed` does not have too, or "".

    Args:
        allowed: what the user and the documents of the tools say, in lower case.
    """
    for pattern in dict.fromkeys(filter(None, (SIMULATIONS.get(language), SIMULATIONS["en"]))):
        for match in pattern.finditer(text):
            if match[0].lower() not in allowed:
                return match[0]
    return ""
