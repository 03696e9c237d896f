"""Sentences of conversations that are more than a request and its answer: of their user, their agent, their policy.

They are data, as `wording` is: each is written by `say` and read back by `heard`, and none may be taken for another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Literal

from synthesis.core.records import Language

Said = Literal[
    # by the user
    "value", "changed", "follow_up", "correct", "add_entry", "remove_entry", "move_entry", "yes", "instead", "leave",
    "thanks", "again",
    # by the agent
    "which", "shall", "missing", "read_only", "not_allowed", "untouched", "welcome", "done", "unknown",
    # by the policy
    "forbids", "confirms",
]  # fmt: skip
"""The act of a sentence."""

SENTENCES: Mapping[Language, Mapping[Said, tuple[str, ...]]] = {
    "en": {
        "value": ("I mean {}.", "It is {}."),
        "changed": ("Sorry, I meant {}.", "No, I wanted it for {}."),
        "follow_up": ("And what is {}?", "Thanks. Now tell me {}."),
        "correct": ("Please correct {} in the records to {}.", "Set {} to {}, please."),
        "add_entry": ("Put “{}” on my list “{}”.", "Please add “{}” to the list “{}”."),
        "remove_entry": ("Take “{}” off my list “{}”.", "Please delete “{}” from the list “{}”."),
        "move_entry": ("Move “{}” to my list “{}”.", "Please shift “{}” over to the list “{}”."),
        "yes": ("Yes, please.", "Yes, do that.", "That is right, go ahead."),
        "instead": ("No, I mean the list “{}”.", "Make that the list “{}”."),
        "leave": ("No, leave it as it is.", "I have changed my mind, do nothing."),
        "thanks": ("Thank you, that is all.", "That was everything, thanks."),
        "again": ("You have more tools now. Please try it again.", "I have added what you lacked, so try once more."),
        "which": ("Which {} do you mean?", "For which {}?"),
        "shall": ("I would {}. Shall I?", "That means: I {}. Is that right?"),
        "missing": ("I cannot answer that: I have no tool that finds {}.",
                    "None of my tools finds {}, so I cannot say."),
        "read_only": ("I cannot do that: my tools look things up and change nothing.",
                      "That is not possible here: I can look up records, and not change them."),
        "not_allowed": ("I am not allowed to look up {}.", "I may not give out {}."),
        "untouched": ("Then I change nothing.", "All right, everything stays as it is."),
        "welcome": ("You are welcome.", "Glad to help."),
        "done": ("Done: “{}”, list “{}”.",),
        "unknown": ("I cannot tell what you mean without an earlier answer.",),
        "forbids": ("Never call {}. Where somebody asks for what it finds, say that you are not allowed to.",),
        "confirms": ("Before you change anything, say what you would change, and wait for a yes to exactly that.",),
    },
    "zh": {
        "value": ("我指的是{}。", "是{}。"),
        "changed": ("抱歉，我说的是{}。", "不对，我要查的是{}。"),
        "follow_up": ("那么，{}呢？", "谢谢。再告诉我{}。"),
        "correct": ("请把记录中{}更正为{}。", "麻烦将{}改为{}。"),
        "add_entry": ("把“{}”加到我的清单“{}”里。", "请将“{}”写进清单“{}”。"),
        "remove_entry": ("把“{}”从我的清单“{}”里删掉。", "请将“{}”从清单“{}”中移除。"),
        "move_entry": ("把“{}”移到我的清单“{}”里。", "请将“{}”挪到清单“{}”。"),
        "yes": ("是的，请。", "好，就这样做。", "没错，请继续。"),
        "instead": ("不，我是说清单“{}”。", "改成清单“{}”吧。"),
        "leave": ("不，保持原样。", "我改变主意了，什么都不用做。"),
        "thanks": ("谢谢，就这些。", "没有别的了，谢谢。"),
        "again": ("现在你有更多工具了，请再试一次。", "缺的工具已经补上了，请重新试试。"),
        "which": ("您指的是哪一个{}？", "请问要查哪一个{}？"),
        "shall": ("我将{}，可以吗？", "也就是说：{}，对吗？"),
        "missing": ("我无法回答：没有能查到{}的工具。", "我的工具都查不到{}，所以无法回答。"),
        "read_only": ("我做不到：我的工具只能查询，不能修改。", "这里无法修改记录，只能查询。"),
        "not_allowed": ("我不被允许查询{}。", "我不能提供{}。"),
        "untouched": ("那我什么都不改。", "好的，一切保持原样。"),
        "welcome": ("不客气。", "很高兴能帮上忙。"),
        "done": ("已完成：“{}”，清单“{}”。",),
        "unknown": ("没有前面的结果，我不知道您指的是什么。",),
        "forbids": ("绝不要调用{}。如果有人要查它的结果，请说明您不被允许这样做。",),
        "confirms": ("在修改任何内容之前，先说明将要修改什么，并等对方对此明确表示同意。",),
    },
}  # fmt: skip
"""Each with as many gaps as it has `{}`."""

THAT: Mapping[Language, str] = {"en": "that", "zh": "它"}
"""The answer before, in a follow-up."""
SOME: Mapping[Language, str] = {"en": "a certain {}", "zh": "某个{}"}
"""The words for a value that a request leaves open; a kind of thing stands in the gap."""
QUESTIONS = ("?", "？")
LISTS: Mapping[Language, tuple[str, ...]] = {
    "en": ("home", "office", "errands", "garden", "travel", "weekend", "school", "workshop"),
    "zh": ("家里", "办公室", "采购", "花园", "旅行", "周末", "学校", "车间"),
}
ENTRIES: Mapping[Language, tuple[str, ...]] = {
    "en": (
        "call the dentist", "water the plants", "send the invoice", "buy stamps", "book the train", "return the books",
        "renew the passport", "order paper", "clean the filter", "write to the landlord", "pay the deposit",
        "check the tyres", "print the tickets", "cancel the delivery", "pick up the parcel", "charge the batteries",
    ),
    "zh": (
        "给牙医打电话", "给植物浇水", "寄出发票", "买邮票", "订火车票", "还书", "续办护照", "订购纸张",
        "清洗滤网", "给房东写信", "支付押金", "检查轮胎", "打印门票", "取消送货", "取包裹", "给电池充电",
    ),
}  # fmt: skip
ACTS: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "add_entry": "put “{}” on the list “{}”", "remove_entry": "take “{}” off the list “{}”",
        "move_entry": "move “{}” to the list “{}”",
    },
    "zh": {
        "add_entry": "把“{}”加到清单“{}”", "remove_entry": "把“{}”从清单“{}”删除", "move_entry": "把“{}”移到清单“{}”",
    },
}  # fmt: skip
"""A write in words."""


def say(what: Said, rng: random.Random, language: Language, *gaps: str) -> str:
    """One of the sentences that do this."""
    return rng.choice(SENTENCES[language][what]).format(*gaps)


def ways(what: Said, language: Language, *gaps: str) -> tuple[str, ...]:
    """All of them."""
    return tuple(sentence.format(*gaps) for sentence in SENTENCES[language][what])


def heard(what: Said, text: str, language: Language) -> tuple[str, ...] | None:
    """Return the contents of the gaps of a text that does this, else None: the inverse of `say`."""
    for sentence in SENTENCES[language][what]:
        parts = sentence.split("{}")
        if (found := _between(text.strip(), parts)) is not None:
            return found
    return None


def _between(text: str, parts: Sequence[str]) -> tuple[str, ...] | None:
    first, *rest = parts
    if not text.startswith(first):
        return None
    if not rest:
        return () if text == first else None
    text, gaps = text[len(first) :], []
    for number, part in enumerate(rest, start=1):
        # The last one ends the text; so a gap may hold what looks like it.
        place = (len(text) - len(part) if text.endswith(part) else -1) if number == len(rest) else text.find(part)
        if place <= 0:
            return None
        gaps.append(text[:place])
        text = text[place + len(part) :]
    return tuple(gaps)
