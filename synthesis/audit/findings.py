"""Rules of the audit by name, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        about: fault that it finds, as a noun phrase.
        limit: largest share of checked records that may have the fault, 0 to 1.
    """

    about: str
    limit: float


RULES: Final[dict[str, Rule]] = {
    # Calls
    "call_not_reproduced": Rule("A successful call whose stored result the stored code does not give", 0.0),
    "unknown_tool": Rule("A call of a tool that is not offered, without a recorded error", 0.0),
    "invalid_arguments": Rule("Arguments that do not fit the tool's schema, without a recorded error", 0.0),
    "bad_schema": Rule("A tool whose parameters are not a JSON Schema of an object", 0.0),
    "missing_result": Rule("A call without a result, or a result without a call", 0.0),
    "argument_from_nowhere": Rule("An argument that no user message, earlier result or schema has", 0.02),
    "repeated_call": Rule("A successful call that is made again with the same arguments", 0.01),
    "contradictory_results": Rule("One call with two different results", 0.0),
    # Final answers
    "unsupported_claim": Rule("A number or name that no result and no user message has", 0.02),
    "success_after_failure": Rule("An answer that does not mention that its calls failed", 0.01),
    "refusal_after_success": Rule("An answer that declines although all calls succeeded", 0.01),
    # Texts
    "template_tokens": Rule("Tokens of a chat template, or unfilled places of one", 0.0),
    "talk_of_simulation": Rule("Talk of judges, simulation or synthetic tasks", 0.0),
    "wrong_language": Rule("A question or answer in another language than the record's", 0.01),
    "foreign_words": Rule("English words in a question or answer of another script", 0.02),
    # Environments
    "missing_reference": Rule("A sub-question that needs a tool and has no reference call", 0.0),
    "bad_graph": Rule("Sub-questions whose dependencies have a circle, an unknown id or a wrong hop", 0.0),
    "answer_not_in_result": Rule("A sub-question's answer that its reference call's result does not have", 0.0),
    "unsupported_answer": Rule("A final answer that no sub-question's answer and no result has", 0.0),
    "question_has_answer": Rule("A question or sub-question that states its own answer", 0.02),
    "answer_for_nonsense": Rule("A tool that gives the answer for nonsense arguments", 0.0),
    "state_not_reached": Rule("A check of the state that fails after the reference calls, or holds before them", 0.0),
    "unlisted_change": Rule("State changes of the reference calls that differ from the listed ones", 0.0),
    # Sets
    "exact_duplicate": Rule("The same user messages as an earlier record", 0.01),
    "near_duplicate": Rule("A question with a similarity of 0.5 or more to an earlier one", 0.03),
    "duplicate_id": Rule("An id that an earlier record of the dataset has", 0.0),
    "wrong_split": Rule("A split that differs from the folder's name", 0.0),
    "leaked_call": Rule("A held-out reference call that training data make", 0.0),
    "leaked_question": Rule("A held-out question that training data ask", 0.0),
    "leaked_entity": Rule("A held-out entity that is an argument in training data", 0.0),
    "unreadable_row": Rule("A row that SFT does not read", 0.0),
}


@dataclass(frozen=True)
class AuditFinding:
    """A fault of one record.

    Attributes:
        rule: name in `RULES`.
        dataset: name of the record's dataset.
        record: id of the record.
        detail: what is wrong there, with the words that are.
    """

    rule: str
    dataset: str
    record: str
    detail: str


@dataclass
class AuditLedger:
    """All findings, and how many records each rule has checked or had to leave out."""

    findings: list[AuditFinding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """Rule → reason → records that it could not check."""

    def check(
        self, dataset: str, record: str, rules: Sequence[str], found: Callable[[], Iterator[tuple[str, str]]]
    ) -> None:
        """Count a record as checked by some rules, and add what they find there, once per rule.

        Args:
            found: yields rule and detail.
        """
        for rule in rules:
            self.checked[rule] = self.checked.get(rule, 0) + 1
        seen: set[str] = set()
        for rule, detail in found():
            if rule not in seen:
                seen.add(rule)
                self.findings.append(AuditFinding(rule, dataset, record, detail))

    def leave_out(self, rule: str, reason: str, count: int = 1) -> None:
        """Count records that a rule could not check."""
        reasons = self.left_out.setdefault(rule, {})
        reasons[reason] = reasons.get(reason, 0) + count
