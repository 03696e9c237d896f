"""The to-do server: the lists of a user, with tools that change them. Conversations about a write use it.

It runs in the sandbox and keeps no state: a call only returns what it did. So an agent can learn to ask before a change
without a server that may be changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from synthesis.core.records import CodeExecution, Language
from synthesis.pipeline.languages import PACKAGED_LANGUAGES
from synthesis.servers.collect import ServerDocument

WRITES = ("add_entry", "remove_entry", "move_entry")
"""All tools of the to-do server."""
_CODE = '''"""Entries on the lists of one user."""


def _text(name, value):
    value = " ".join(value.split())
    if not value:
        raise ValueError(f"{name} must not be empty")
    return value


def add_entry(list, entry):
    """Put an entry on a list."""
    return {"added": _text("entry", entry), "list": _text("list", list)}


def remove_entry(list, entry):
    """Take an entry off a list."""
    return {"removed": _text("entry", entry), "list": _text("list", list)}


def move_entry(list, entry):
    """Move an entry to a list."""
    return {"moved": _text("entry", entry), "list": _text("list", list)}
'''
_SAYS: Mapping[Language, Mapping[str, str]] = {
    "en": {
        "title": "Desk", "description": "The user's lists of things to do.",
        "add_entry": "Put an entry on one of the user's lists.",
        "remove_entry": "Take an entry off one of the user's lists.",
        "move_entry": "Move an entry from the list it is on to another one.",
        "list": "Name of the list.", "entry": "The entry, as the user words it.",
    },
    "zh": {
        "title": "书桌", "description": "用户的待办清单。",
        "add_entry": "把一个条目加到用户的某个清单里。",
        "remove_entry": "从用户的某个清单里删除一个条目。",
        "move_entry": "把一个条目从原来的清单移到另一个清单。",
        "list": "清单的名称。", "entry": "条目，用户的原话。",
    },
}  # fmt: skip


def todo_server_id(language: Language) -> str:
    """Return the id of the to-do server for users of a language: in their own, else in English."""
    return "desk" if language == "en" or language not in _SAYS else f"desk_{language}"


def is_todo_server(server_id: str) -> bool:
    return server_id in {todo_server_id(language) for language in _SAYS}


def todo_documents(languages: Iterable[Language]) -> list[ServerDocument]:
    """Return the to-do server in each of the languages that it is documented in."""
    documents = []
    for language in (one for one in PACKAGED_LANGUAGES if one in languages):
        says = _SAYS[language]
        properties = {name: {"type": "string", "description": says[name]} for name in ("list", "entry")}
        schema = {
            "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
        }  # fmt: skip
        tools: list[Any] = [
            {"type": "function", "function": {"name": name, "description": says[name], "parameters": schema}}
            for name in WRITES
        ]
        documents.append(
            ServerDocument(
                todo_server_id(language),
                says["title"],
                says["description"],
                "office",
                language,
                tools,
                CodeExecution(_CODE),
                license="Apache-2.0",
            )  # fmt: skip
        )
    return documents
