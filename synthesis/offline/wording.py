"""The words around a question's noun phrases: frames, personas, what is said behind a request.

They are data of the grammar (`synthesis.offline.grammar`), which parses every one of them back; they are not prompts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from synthesis.core.records import Language
from synthesis.trajectories.personas import Persona


@dataclass(frozen=True)
class Frame:
    """`before` + noun phrases + `after`. `number` says whether it fits one phrase, several, or either."""

    before: str
    after: str
    number: Literal["one", "many", "any"] = "any"

    def accepts(self, phrases: int) -> bool:
        return self.number == "any" or (self.number == "one") == (phrases == 1)


FRAMES: Mapping[Language, Mapping[str, tuple[Frame, ...]]] = {
    "en": {
        "plain": (
            Frame("What is ", "?", "one"),
            Frame("What are ", "?", "many"),
            Frame("Tell me ", "."),
            Frame("Find ", "."),
            Frame("I need ", "."),
            Frame("Look up ", "."),
        ),
        "diverse": (
            Frame("Could you look up ", "?"),
            Frame("Please check ", " for me."),
            Frame("I would like to know ", "."),
            Frame("Can you find out ", "?"),
            Frame("Help me find ", "."),
        ),
    },
    "zh": {
        "plain": (
            Frame("", "是什么？", "one"),
            Frame("", "分别是什么？", "many"),
            Frame("请告诉我", "。"),
            Frame("查询", "。"),
            Frame("我需要", "。"),
            Frame("查一下", "。"),
        ),
        "diverse": (
            Frame("能帮我查一下", "吗？"),
            Frame("麻烦你确认", "。"),
            Frame("我想知道", "。"),
            Frame("可以找出", "吗？"),
            Frame("帮我查找", "。"),
        ),
    },
}

PERSONAS: Mapping[Language, tuple[str, ...]] = {
    "en": (
        "I am a travel agent.",
        "I am preparing a quiz.",
        "I am a teacher planning a lesson.",
        "I am writing a report for work.",
        "I am a student doing homework.",
        "I am a software developer fixing our records.",
        "I am a journalist checking an article.",
        "I work at a help desk.",
    ),
    "zh": (
        "我是一名旅行社职员。",
        "我正在准备一场知识竞赛。",
        "我是一名正在备课的老师。",
        "我正在写一份工作报告。",
        "我是一名正在做作业的学生。",
        "我是一名正在核对数据的开发人员。",
        "我是一名正在核实文章的记者。",
        "我在客服中心工作。",
    ),
}

_INTRODUCTIONS = {
    "en": ("I work as {}.", "I work as {} and am {} years old."),
    "zh": ("我的职业是{}。", "我的职业是{}，今年{}岁。"),
}
_INTRODUCTION = {"en": re.compile(r"I work as [^.]+\. "), "zh": re.compile(r"我的职业是[^。]+。")}


def introduction(persona: Persona, language: Language) -> str:
    """A sentence in which a person of a file says who he is."""
    alone, with_age = _INTRODUCTIONS[language]
    # Its end must be found again.
    occupation = persona.occupation.replace(".", "").replace("。", "")
    return alone.format(occupation) if persona.age is None else with_age.format(occupation, persona.age)


def without_persona(text: str, language: Language) -> str:
    """The text without the sentence in front that says who asks."""
    for persona in PERSONAS[language]:
        text = text.removeprefix(persona)
    found = _INTRODUCTION[language].match(text)
    return text[found.end() :] if found else text


BESIDES: Mapping[Language, str] = {"en": " Besides that: ", "zh": "除此之外："}
"""Between two requests of one message: what different servers are asked for together."""

COMPLICATIONS: Mapping[Language, tuple[str, ...]] = {
    "en": (
        "I need it for a form that I have to hand in today.",
        "A colleague asked me, and I would rather be sure.",
        "My notes contradict each other here.",
        "It goes on a slide, so one line is enough.",
        "I have a meeting in ten minutes.",
        "I tried to find it myself and got lost.",
    ),
    "zh": (
        "我今天要交一份表格，里面要用。",
        "同事问我，我想确认一下。",
        "我的笔记里说法不一。",
        "要放进幻灯片，一行就够了。",
        "我十分钟后有个会。",
        "我自己找了一会儿没找到。",
    ),
}
"""Sentences behind a request that change nothing of what is asked for."""
_FORMER: Mapping[Language, tuple[str, ...]] = {
    "en": (
        "Give the result exactly as the tool reports it.", "Use the tools and do not guess.",
        "Answer in one short sentence.", "Do not add any explanation.", "If a lookup fails, try it once more.",
        "Check every step with a tool.",
    ),
    "zh": (
        "请按工具返回的原样给出结果。", "请使用工具，不要猜测。", "请用一句话回答。", "不需要任何解释。",
        "如果查询失败，请再试一次。", "每一步都要用工具核实。",
    ),
}  # fmt: skip
"""Sentences of the same kind in data and journals of 0.1.0, which are still read."""


def without_complication(text: str, language: Language) -> str:
    """The text without the sentence behind it that changes nothing."""
    for sentence in (*COMPLICATIONS[language], *_FORMER[language]):
        text = text.removesuffix(sentence)
    return text


def listed(words: Sequence[str], language: Language) -> str:
    """`a, b and c`."""
    *first, last = words
    if not first:
        return last
    return f"{', '.join(first)} and {last}" if language == "en" else f"{'、'.join(first)}和{last}"
