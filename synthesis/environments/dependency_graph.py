"""The dependency graph of a decomposition, checked as a graph before any judge is asked."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import networkx as nx

from synthesis.core.matching import contains, fold
from synthesis.core.records import Answer, Difficulty, Structure, SubQuestion
from synthesis.core.stages import Rejected
from synthesis.environments.teacher_answers import SubQuestionAnswer

Node = SubQuestion | SubQuestionAnswer


def graph_of(nodes: Sequence[Node]) -> nx.DiGraph:
    """Edges run from a dependency to what depends on it.

    Raises:
        Rejected: `bad_ids` for repeated ids or a dependency that does not exist.
    """
    ids = [node.id for node in nodes]
    if len(set(ids)) != len(ids):
        raise Rejected("bad_ids", f"two sub-questions have the same id: {ids}")
    graph = nx.DiGraph()
    graph.add_nodes_from(ids)
    for node in nodes:
        for dependency in node.depends_on:
            if dependency not in graph or dependency == node.id:
                raise Rejected("bad_ids", f"sub-question {node.id} depends on {dependency}, which is no other one")
            graph.add_edge(dependency, node.id)
    return graph


def structure_of(graph: nx.DiGraph) -> Structure:
    """Return which of the paper's four structures a graph has; steps of one hop level can run in parallel."""
    parallel = any(n > 1 for n in Counter(hops(graph).values()).values())
    if graph.number_of_edges() == 0:
        return "parallel_single_hop" if parallel else "single_hop"
    return "parallel_multi_hop" if parallel else "multi_hop"


def hops(graph: nx.DiGraph) -> dict[int, int]:
    """Return the hop level of every node: 1 + the longest path that leads to it."""
    return {node: level + 1 for level, layer in enumerate(nx.topological_generations(graph)) for node in layer}


def signature_of(nodes: Sequence[Node]) -> str:
    """Return the structure without entities: `capital_of_country>population_of_city`; independent answers: sorted, `|`.

    A step with several dependencies is written `(a&b)>c`.
    """
    by_id = {node.id: node for node in nodes}
    consumed = {dependency for node in nodes for dependency in node.depends_on}

    def path(node: Node) -> str:
        before = sorted(path(by_id[dependency]) for dependency in node.depends_on)
        if not before:
            return node.intent
        return f"{before[0] if len(before) == 1 else '(' + '&'.join(before) + ')'}>{node.intent}"

    return "|".join(sorted(path(node) for node in nodes if node.id not in consumed))


def check(
    nodes: Sequence[Node],
    answer: Answer,
    structure: Structure | None,
    *,
    min_hops: int,
    max_hops: int,
    question: str = "",
    language: str = "en",
) -> Structure:
    """Check that a decomposition is well formed, and return its structure.

    Args:
        nodes: the sub-questions.
        answer: of the main question.
        structure: the requested one; None takes any, with any number of hops.
        min_hops: least hops of a multi-hop structure.
        max_hops: most hops.
        question: the main question; "" leaves out the check that it is not empty text.
        language: of the answers; see `matching.match`.

    Raises:
        Rejected: `no_sub_questions`, `bad_ids`, `cyclic`, `wrong_hop`, `wrong_structure`, `hop_budget`,
            `repeated_question`, `empty_answer`, `sentence_answer`, `orphan_sub_question`, `unconnected_answer`; the
            detail names the node.
    """
    if not nodes:
        raise Rejected("no_sub_questions", f"no sub-questions for {question!r}")
    graph = graph_of(nodes)
    if not nx.is_directed_acyclic_graph(graph):
        raise Rejected("cyclic", f"sub-questions depend on each other in a circle: {nx.find_cycle(graph)}")
    levels = hops(graph)
    for node in nodes:
        if node.hop != levels[node.id]:
            raise Rejected(
                "wrong_hop", f"sub-question {node.id} has hop {node.hop}, its longest path {levels[node.id]}"
            )
        if not contains(node.answer.value, node.answer, language):
            raise Rejected("empty_answer", f"sub-question {node.id} has no checkable answer: {node.answer.value!r}")
        _check_short(node.answer, f"sub-question {node.id}")
    _check_short(answer, "the main question")
    found = structure_of(graph)
    if structure and found != structure:
        raise Rejected("wrong_structure", f"the graph is {found}, asked for {structure}")
    if structure and found.endswith("multi_hop") and not min_hops <= max(levels.values()) <= max_hops:
        raise Rejected("hop_budget", f"{max(levels.values())} hops; asked for {min_hops} to {max_hops}")
    texts = Counter(fold(node.question) for node in nodes)
    if repeated := next((text for text, n in texts.items() if n > 1 or not text), None):
        raise Rejected("repeated_question", f"two sub-questions ask {repeated!r}")
    for node in nodes:
        # What nothing else uses has to be in the final answer, or it was asked for nothing.
        if graph.out_degree(node.id) == 0 and not contains(answer.value, node.answer, language):
            raise Rejected("orphan_sub_question", f"nothing uses the answer of sub-question {node.id}: {node.question}")
    ends = [node.answer.value for node in nodes if graph.out_degree(node.id) == 0]
    if not contains(ends, answer, language):
        raise Rejected(
            "unconnected_answer", f"the answer {answer.value!r} is in none of the last steps' answers {ends}"
        )
    return found


def difficulty_of(steps: Sequence[Node], closeness: float = 0.0) -> Difficulty:
    """Return the difficulty of an environment as far as its graph determines it.

    Args:
        closeness: of its irrelevant tools, see `Difficulty.distractor_closeness`.
    """
    levels = Counter(step.hop for step in steps)
    parallel = sum(n for n in levels.values() if n > 1)
    return Difficulty(max(levels), round(parallel / len(steps), 4), round(closeness, 4))


_SENTENCE_WORDS, _SENTENCE_CHARACTERS = 12, 30
_SENTENCE_END = re.compile(r"[^.]{3}[.!?]$")  # not the full stop of "Washington D.C."
_CHINESE_SENTENCE = re.compile(r"[。！？；]")


def is_sentence(text: str) -> bool:
    """Return whether an answer is more than a name, a number or a date, by its length or its punctuation."""
    text = text.strip()
    words = text.split()
    chinese = sum("\u4e00" <= character <= "\u9fff" for character in text)
    if chinese:
        return chinese > _SENTENCE_CHARACTERS or bool(_CHINESE_SENTENCE.search(text))
    return len(words) > _SENTENCE_WORDS or (len(words) >= 4 and bool(_SENTENCE_END.search(text)))


def _check_short(answer: Answer, of: str) -> None:
    values = answer.value if isinstance(answer.value, list) else [answer.value]
    if long := next((value for value in values if isinstance(value, str) and is_sentence(value)), None):
        raise Rejected("sentence_answer", f"the answer of {of} is a sentence: {long!r}; give only the result")
