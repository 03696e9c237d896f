"""Request templates for the real MCP servers (time, git): wordings with slots, and the calls that answer them.

They are for these servers what the grammar is for the fact tools: `fill` writes a request, `match` reads it back.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from synthesis.core.records import Language

# Zones without daylight saving time: what is right in January is right in July.
_ZONES = (
    "UTC", "Asia/Tokyo", "Asia/Seoul", "Asia/Shanghai", "Asia/Singapore", "Asia/Bangkok", "Asia/Kolkata",
    "Asia/Kathmandu", "Asia/Dubai", "Asia/Tashkent", "Africa/Nairobi", "Africa/Lagos", "Africa/Johannesburg",
    "America/Bogota", "America/Lima", "America/Phoenix", "Australia/Brisbane", "Pacific/Honolulu",
)  # fmt: skip
_REVISIONS = (
    "v0.1", "v0.2", "v1.0", "feature/charts", "feature/export", "fix/encoding", "docs/install", "HEAD", "HEAD~1",
    "HEAD~2", "HEAD~3", "HEAD~4",
)  # fmt: skip
_TIMES = tuple(f"{hour:02d}:{minute:02d}" for hour in range(24) for minute in (0, 10, 15, 20, 30, 40, 45, 50))
_SLOTS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "zone": (_ZONES, r"[A-Za-z_]+(?:/[A-Za-z_]+)?"),
    "time": (_TIMES, r"\d\d:\d\d"),
    "revision": (_REVISIONS, r"[\w./~]+"),
}
"""Slot kind → its values, and the pattern that reads one. The slots `zone` and `zone_b` are both of the kind `zone`."""


@dataclass(frozen=True)
class TemplateStep:
    """One call. In `arguments`, `{slot}` is a slot's value and `{0}` the value of step 0; `reads` finds its own."""

    tool: str
    arguments: Mapping[str, str | int]
    reads: str
    phrase: Mapping[Language, str]
    terminal: bool = True

    def needs(self) -> list[int]:
        """The earlier steps whose values the arguments use."""
        return [int(index) for value in self.arguments.values() for index in re.findall(r"\{(\d+)\}", str(value))]


@dataclass(frozen=True)
class Template:
    id: str
    wordings: Mapping[Language, tuple[str, ...]]
    steps: tuple[TemplateStep, ...]

    @property
    def chain(self) -> list[str]:
        """The tools in order."""
        return [step.tool for step in self.steps]

    @property
    def dependent(self) -> bool:
        """True: the steps form a chain, as opposed to independent calls."""
        return all(step.needs() for step in self.steps[1:])

    @property
    def slots(self) -> list[str]:
        return list(dict.fromkeys(re.findall(r"\{([a-z_]+)\}", self.wordings["en"][0])))


# Results of older journals have a space behind each comma and colon.
_TARGET_CLOCK = r'"target": ?\{"timezone": ?"[^"]+", ?"datetime": ?"[^"T]+T(\d\d:\d\d)'


def _convert(target: str, reads: str = _TARGET_CLOCK) -> TemplateStep:
    arguments = {"source_timezone": "{zone}", "time": "{time}", "target_timezone": f"{{{target}}}"}
    phrase: Mapping[Language, str] = {"en": f"the time in {{{target}}}", "zh": f"{{{target}}}的时间"}
    return TemplateStep("convert_time", arguments, reads, phrase)


def _current(reads: str, en: str, zh: str, zone: str = "zone") -> TemplateStep:
    return TemplateStep("get_current_time", {"timezone": f"{{{zone}}}"}, reads, {"en": en, "zh": zh})


def _show(revision: str, reads: str, en: str, zh: str) -> TemplateStep:
    return TemplateStep("git_show", {"repo_path": "project", "revision": revision}, reads, {"en": en, "zh": zh})


def _git(tool: str, reads: str, en: str, zh: str, terminal: bool = True, **more: str | int) -> TemplateStep:
    return TemplateStep(tool, {"repo_path": "project", **more}, reads, {"en": en, "zh": zh}, terminal)


_CLOCK = r'"datetime": ?"[^"T]+T(\d\d:\d\d)'
_AUTHOR, _SUBJECT, _FILE = r"Author: ([^<\n]+?) <", r"\n    (\S[^\n]*)", r"\+\+\+ b/(\S+)"
_HASH = _git("git_log", r"Commit: ([0-9a-f]{40})", "the latest commit", "最新的提交", terminal=False, max_count=1)
_HEAD = _git("git_branch", r"\* (\S+)", "the current branch", "当前分支", terminal=False, branch_type="local")

TEMPLATES: tuple[Template, ...] = (
    Template(
        "time_elsewhere",
        {
            "en": ("What time is it in {zone_b} when it is {time} in {zone}?", "Convert {time} in {zone} to {zone_b}."),
            "zh": ("{zone}的{time}是{zone_b}的几点？", "把{zone}的{time}换算成{zone_b}的时间。"),
        },
        (_convert("zone_b"),),
    ),
    Template(
        "time_difference",
        {
            "en": (
                "At {time}, how far ahead of {zone} is {zone_b}?",
                "Find how far {zone_b} is ahead of {zone} at {time}.",
            ),
            "zh": ("{zone}的{time}时{zone_b}与它的时差是多少？", "查询{zone}的{time}时与{zone_b}的时差。"),
        },
        (_convert("zone_b", r'"time_difference": ?"([^"]+)"'),),
    ),
    Template(
        "time_in_two",
        {
            "en": (
                "When it is {time} in {zone}, what time is it in {zone_b} and in {zone_c}?",
                "Convert {time} in {zone} to {zone_b} and to {zone_c}.",
            ),
            "zh": (
                "{zone}的{time}分别是{zone_b}和{zone_c}的几点？",
                "把{zone}的{time}换算成{zone_b}和{zone_c}的时间。",
            ),
        },
        (_convert("zone_b"), _convert("zone_c")),
    ),
    Template(
        "time_now",
        {
            "en": ("What is the current time in {zone}?", "Tell me what time it is now in {zone}."),
            "zh": ("{zone}现在几点？", "请告诉我{zone}的当前时间。"),
        },
        (_current(_CLOCK, "the current time in {zone}", "{zone}的当前时间"),),
    ),
    Template(
        "weekday_now",
        {
            "en": ("Which weekday is it now in {zone}?", "Tell me the current weekday in {zone}."),
            "zh": ("{zone}今天星期几？", "请告诉我{zone}今天是星期几。"),
        },
        (_current(r'"day_of_week": ?"(\w+)"', "the weekday in {zone}", "{zone}的星期"),),
    ),
    Template(
        "now_and_then",
        {
            "en": (
                "What time is it now in {zone_c}, and what is {time} in {zone} in {zone_b}?",
                "Tell me the current time in {zone_c} and convert {time} in {zone} to {zone_b}.",
            ),
            "zh": (
                "{zone_c}现在几点，{zone}的{time}又是{zone_b}的几点？",
                "请告诉我{zone_c}的当前时间，并把{zone}的{time}换算成{zone_b}的时间。",
            ),
        },
        (_current(_CLOCK, "the current time in {zone_c}", "{zone_c}的当前时间", "zone_c"), _convert("zone_b")),
    ),
    Template(
        "branch",
        {
            "en": ("Which branch is the repository project on?", "Find the branch that the repository project is on."),
            "zh": ("仓库project在哪个分支上？", "查询仓库project所在的分支。"),
        },
        (_git("git_status", r"On branch (\S+)", "the status", "状态"),),
    ),
    Template(
        "local_branch",
        {
            "en": (
                "Which local branch of the repository project is checked out?",
                "Name the checked-out local branch of the repository project.",
            ),
            "zh": ("仓库project检出的是哪个本地分支？", "请说出仓库project当前检出的本地分支。"),
        },
        (_git("git_branch", r"\* (\S+)", "the branches", "分支列表", branch_type="local"),),
    ),
    Template(
        "latest_message",
        {
            "en": (
                "What is the message of the latest commit in the repository project?",
                "Tell me what the latest commit in the repository project says.",
            ),
            "zh": ("仓库project最新提交的说明是什么？", "请告诉我仓库project最新一次提交的说明。"),
        },
        (_git("git_log", r"Message: ([^\n]+)", "the latest commit", "最新的提交", max_count=1),),
    ),
    Template(
        "unstaged_file",
        {
            "en": ("Which file has unstaged changes in the repository project?", "Find the unstaged file in project."),
            "zh": ("仓库project中哪个文件有未暂存的修改？", "找出仓库project中未暂存的文件。"),
        },
        (_git("git_diff_unstaged", _FILE, "the unstaged changes", "未暂存的修改"),),
    ),
    Template(
        "staged_file",
        {
            "en": ("Which file is staged for commit in the repository project?", "Find the staged file in project."),
            "zh": ("仓库project中哪个文件已暂存待提交？", "找出仓库project中已暂存的文件。"),
        },
        (_git("git_diff_staged", _FILE, "the staged changes", "已暂存的修改"),),
    ),
    Template(
        "author",
        {
            "en": (
                "Who wrote the commit {revision} in the repository project?",
                "Find the author of {revision} in project.",
            ),
            "zh": ("仓库project中{revision}这个提交是谁写的？", "查询仓库project中{revision}的作者。"),
        },
        (_show("{revision}", _AUTHOR, "the commit {revision}", "提交{revision}"),),
    ),
    Template(
        "subject",
        {
            "en": (
                "What is the message of the commit {revision} in the repository project?",
                "Tell me what the commit {revision} in project says.",
            ),
            "zh": ("仓库project中{revision}的提交说明是什么？", "请告诉我仓库project中{revision}的提交说明。"),
        },
        (_show("{revision}", _SUBJECT, "the commit {revision}", "提交{revision}"),),
    ),
    Template(
        "two_authors",
        {
            "en": (
                "Who wrote the commits {revision} and {revision_b} in the repository project?",
                "Find the authors of {revision} and {revision_b} in project.",
            ),
            "zh": (
                "仓库project中{revision}和{revision_b}这两个提交分别是谁写的？",
                "查询仓库project中{revision}和{revision_b}的作者。",
            ),
        },
        (
            _show("{revision}", _AUTHOR, "the commit {revision}", "提交{revision}"),
            _show("{revision_b}", _AUTHOR, "the commit {revision_b}", "提交{revision_b}"),
        ),
    ),
    Template(
        "branch_and_message",
        {
            "en": (
                "Which branch is the repository project on, and what does its latest commit say?",
                "Find the branch and the latest commit message of project.",
            ),
            "zh": ("仓库project在哪个分支上，最新提交的说明是什么？", "查询仓库project的分支和最新提交说明。"),
        },
        (
            _git("git_status", r"On branch (\S+)", "the status", "状态"),
            _git("git_log", r"Message: ([^\n]+)", "the latest commit", "最新的提交", max_count=1),
        ),
    ),
    Template(
        "latest_file",
        {
            "en": (
                "Which file did the latest commit in the repository project change?",
                "Find the file that the latest commit in project changed.",
            ),
            "zh": ("仓库project最新的提交修改了哪个文件？", "找出仓库project最新一次提交修改的文件。"),
        },
        (_HASH, _show("{0}", _FILE, "that commit", "这个提交")),
    ),
    Template(
        "branch_author",
        {
            "en": (
                "Who wrote the last commit of the checked-out branch of the repository project?",
                "Find who wrote the last commit of the current branch of project.",
            ),
            "zh": ("仓库project当前分支的最后一个提交是谁写的？", "查询仓库project当前分支最后一次提交的作者。"),
        },
        (_HEAD, _show("{0}", _AUTHOR, "its last commit", "它的最后一个提交")),
    ),
)  # fmt: skip


def usable(tools: Sequence[str]) -> list[Template]:
    """The templates whose tools all belong to a server."""
    return [template for template in TEMPLATES if set(template.chain) <= set(tools)]


def draw_slots(template: Template, rng: random.Random, keep: Callable[[str], bool]) -> dict[str, str]:
    """Different values for the template's slots.

    Raises:
        ValueError: `keep` leaves too few values.
    """
    values: dict[str, str] = {}
    for slot in template.slots:
        every, _ = _SLOTS[slot.partition("_")[0]]
        free = [value for value in every if value not in values.values() and keep(value)]
        if not free:
            raise ValueError(f"template {template.id}: no value is left for {slot}")
        values[slot] = rng.choice(free)
    return values


def fill(template: Template, slots: Mapping[str, str], rng: random.Random, language: Language) -> str:
    """Return a request; `rng` chooses the wording."""
    return rng.choice(template.wordings[language]).format_map(slots)


def match(text: str, language: Language) -> tuple[Template, dict[str, str]] | None:
    """The template and the slots of a request: the inverse of `fill`. None when no template has these words."""
    for pattern, template in _patterns(language):
        if found := pattern.fullmatch(text):
            return template, found.groupdict()
    return None


@functools.cache
def _patterns(language: Language) -> list[tuple[re.Pattern[str], Template]]:
    patterns = []
    for template in TEMPLATES:
        for wording in template.wordings[language]:
            parts = re.split(r"\{([a-z_]+)\}", wording)
            texts = [
                f"(?P<{part}>{_SLOTS[part.partition('_')[0]][1]})" if index % 2 else re.escape(part)
                for index, part in enumerate(parts)
            ]
            patterns.append((re.compile("".join(texts), re.ASCII), template))
    return patterns
