"""The offline teacher's rules for environment synthesis: questions are plans over real relations, verdicts computed.

The judges here do not trust the decomposition that this module made: they parse its texts back into plans and compare.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from synthesis.core.matching import contains, same
from synthesis.core.records import Answer, Decomposition, Language, SubQuestion, ToolSpec
from synthesis.environments.teacher_answers import (
    Atomicity,
    AtomicityAnswer,
    Cluster,
    CompletenessAnswer,
    DecompositionAnswer,
    DependencyConsistencyAnswer,
    HarderToolDocumentAnswer,
    IntentClustersAnswer,
    MergedToolAnswer,
    Necessity,
    Parameter,
    ReferenceCallAnswer,
    SequentialRationalityAnswer,
    SubQuestionAnswer,
    ToolCodeAnswer,
    ToolDocumentAnswer,
    ToolNecessityAnswer,
    argument_list,
    to_parameters,
)
from synthesis.offline import grammar, plans, sampling
from synthesis.offline.facts import tools as fact_tools
from synthesis.offline.facts.relations import Relation, all_relations
from synthesis.offline.facts.servers import tool_spec
from synthesis.pipeline.partition import Partition

Variables = Mapping[str, Any]

_DRAWS = 400
"""Plans that are sampled before a split of the partition counts as too small for the request."""


# ---------------------------------------------------------------------------------------------------------------------
# Decompose


def _decomposition(variables: Variables, language: Language, rng: random.Random) -> DecompositionAnswer:
    """A question over any relations; or the given one, where it is of the grammar."""
    given = variables["question"]
    plan = grammar.parse(given, language) if given else _plan_on_side(variables, rng)
    steps = _steps(plan, language, rng)
    final, domain = _final(plan, steps)
    return DecompositionAnswer(given or grammar.question(plan, rng, language), final, domain, steps)


def _steps(plan: plans.Plan, language: Language, rng: random.Random) -> list[SubQuestionAnswer]:
    values = plans.evaluate(plan)
    steps: list[SubQuestionAnswer] = []
    for index, step in enumerate(plan):
        relation = all_relations()[step.relation]
        before = step.argument if isinstance(step.argument, int) else None
        subject = str(step.argument) if before is None else str(values[before])
        steps.append(
            SubQuestionAnswer(
                id=index + 1,
                question=grammar.sub_question(plan, index, rng, language),
                answer=fact_tools.answer_of(relation, subject),
                depends_on=[] if before is None else [before + 1],
                hop=1 if before is None else steps[before].hop + 1,
                intent=relation.id,
                domain=relation.domain,
                subjects=[subject],
            )
        )
    return steps


def _final(plan: plans.Plan, steps: Sequence[SubQuestionAnswer]) -> tuple[Answer, str]:
    """The final answer, and the domain of the question."""
    ends = [steps[index] for index in plans.terminals(plan)]
    final = ends[0].answer if len(ends) == 1 else Answer([str(end.answer.value) for end in ends])
    return final, ends[0].domain


def _plan_on_side(variables: Variables, rng: random.Random) -> plans.Plan:
    """A plan whose entities and signature all lie in the wanted split."""
    partition: Partition = variables["partition"]
    split, structure = variables["split"], variables["structure"]
    relations = [
        relation
        for relation in all_relations().values()
        if (not variables["relations"] or relation.id in variables["relations"])
        and (not variables["domain"] or relation.domain == variables["domain"])
        # No need to draw what would be thrown away: a single hop's signature is its relation.
        and partition.split_of_intent(relation.id) in (split, None)
        and (structure != "single_hop" or partition.split_of_signature(relation.id) == split)
    ]
    for _ in range(_DRAWS):
        plan = sampling.random_plan(
            rng,
            structure,
            relations,
            variables["max_hops"],
            branches=(variables["min_branches"], variables["max_branches"]),
            keep=lambda entity: partition.split_of_entity(entity) == split,
        )
        longest = max(len(relations) for _, relations in plans.chains(plan))
        deep_enough = longest >= variables["min_hops"] or not structure.endswith("multi_hop")
        if variables.get("informative_joins") and not sampling.informative(plan):
            continue
        if deep_enough and partition.split_of_signature(plans.signature(plan)) == split:
            return plan
    raise ValueError(f"no {structure} plan in the split {split} in {_DRAWS} draws; allow more relations")


# ---------------------------------------------------------------------------------------------------------------------
# Validate


def _one_step(step: SubQuestion, language: Language) -> tuple[Relation, str]:
    """The relation and the subject that a sub-question asks for.

    Raises:
        ValueError: it is not one question about one known fact.
    """
    plan = grammar.parse(step.question, language)
    if len(plan) != 1:
        raise ValueError(f"sub-question {step.id} asks for {len(plan)} facts: {step.question!r}")
    return all_relations()[plan[0].relation], str(plan[0].argument)


def _necessity(variables: Variables, language: Language, rng: random.Random) -> ToolNecessityAnswer:
    decomposition: Decomposition = variables["decomposition"]

    def judge(step: SubQuestion) -> Necessity:
        try:
            relation, _ = _one_step(step, language)
        except ValueError as error:
            return Necessity(step.id, f"no reference data answers it: {error}", False)
        return Necessity(step.id, f"the value is a row of {relation.server}, which the question does not give", True)

    return ToolNecessityAnswer([judge(step) for step in decomposition.sub_questions])


def _dependency_consistency(
    variables: Variables, language: Language, rng: random.Random
) -> DependencyConsistencyAnswer:
    step: SubQuestion = variables["step"]
    dependencies: Sequence[SubQuestion] = variables["dependencies"]
    try:
        _, subject = _one_step(step, language)
    except ValueError as error:
        return DependencyConsistencyAnswer(str(error), "missing")
    useless = [one.id for one in dependencies if not contains(subject, one.answer)]
    if not useless:
        return DependencyConsistencyAnswer(f"{subject!r} is the answer of every dependency it lists", "matched")
    # With the subject in the main question the step has all it needs, and the dependency is one too many.
    known = subject.casefold() in variables["question"].casefold()
    return DependencyConsistencyAnswer(f"{subject!r} does not come from {useless}", "redundant" if known else "missing")


def _atomicity(variables: Variables, language: Language, rng: random.Random) -> AtomicityAnswer:
    decomposition: Decomposition = variables["decomposition"]

    def judge(step: SubQuestion) -> Atomicity:
        try:
            relation, subject = _one_step(step, language)
        except ValueError as error:
            return Atomicity(step.id, str(error), False)
        return Atomicity(step.id, f"one lookup: {relation.id} of {subject}", True)

    return AtomicityAnswer([judge(step) for step in decomposition.sub_questions])


def _sequential_rationality(
    variables: Variables, language: Language, rng: random.Random
) -> SequentialRationalityAnswer:
    """A step may wait only for what its own text uses."""
    decomposition: Decomposition = variables["decomposition"]
    by_id = {step.id: step for step in decomposition.sub_questions}
    needless: list[int] = []
    for step in decomposition.sub_questions:
        try:
            _, subject = _one_step(step, language)
        except ValueError:
            subject = ""
        if any(not contains(subject, by_id[dependency].answer) for dependency in step.depends_on):
            needless.append(step.id)
    return SequentialRationalityAnswer("steps do not use the answer they wait for", needless)


def _completeness(variables: Variables, language: Language, rng: random.Random) -> CompletenessAnswer:
    """The main question's plan, evaluated, must ask for exactly the sub-questions and come to the stated answers."""
    decomposition: Decomposition = variables["decomposition"]
    plan = grammar.parse(decomposition.question, language)
    values = plans.evaluate(plan)
    required: dict[tuple[str, str], Answer] = {}
    for step in plan:
        subject = str(values[step.argument]) if isinstance(step.argument, int) else step.argument
        required[step.relation, subject] = fact_tools.answer_of(all_relations()[step.relation], subject)
    missing = [f"{relation} of {subject}" for relation, subject in required]
    for sub in decomposition.sub_questions:
        try:
            relation, subject = _one_step(sub, language)
        except ValueError as error:
            missing.append(f"instead of: {error}")
            continue
        name = f"{relation.id} of {subject}"
        if name in missing and same(sub.answer, required[relation.id, subject]):
            missing.remove(name)
        else:
            missing.append(f"a right answer instead of {sub.answer.value!r} for {name}")
    ends = [values[index] for index in plans.terminals(plan)]
    final = Answer([str(value) for value in ends]) if len(ends) > 1 else Answer(ends[0])
    final = msgspec.structs.replace(final, tolerance=decomposition.answer.tolerance)
    if not contains(decomposition.answer.value, final):
        missing.append(f"the final answer {final.value!r}")
    return CompletenessAnswer([f"{relation} of {subject}" for relation, subject in required], missing, not missing)


# ---------------------------------------------------------------------------------------------------------------------
# Implement and merge

_OPTION_TEXT: Mapping[Language, str] = {"en": "Form of the result.", "zh": "结果的形式。"}
# Examples and ranges that can hold an answer by chance: ", for example NO.", ", 0 to 255.", "（0 到 255）".
_EXAMPLE = re.compile(
    r", for example .*(?=\.$)|, \d+ to \d+|^English (?=name)"
    r"|，例如[^。]*|（\d+ 到 \d+）|英文(?=名称)"
)


def _document(variables: Variables, language: Language, rng: random.Random) -> ToolDocumentAnswer:
    relation, _ = _one_step(variables["step"], language)
    spec = tool_spec(relation, language)
    parameters = to_parameters(spec)
    description = spec.description
    if variables["feedback"]:
        description = _EXAMPLE.sub("", description)
        parameters = [msgspec.structs.replace(one, description=_EXAMPLE.sub("", one.description)) for one in parameters]
    return ToolDocumentAnswer(spec.name, description, parameters)


def _harder_document(variables: Variables, language: Language, rng: random.Random) -> HarderToolDocumentAnswer:
    spec: ToolSpec = variables["document"]
    option = Parameter(fact_tools.OPTION, "string", _OPTION_TEXT[language], False, list(fact_tools.OPTION_VALUES))
    return HarderToolDocumentAnswer(spec.name, spec.description, [*to_parameters(spec), option])


def _reference_call(variables: Variables, language: Language, rng: random.Random) -> ReferenceCallAnswer:
    relation, subject = _one_step(variables["step"], language)
    other = fact_tools.other_subject(relation, subject, _table(variables, relation, subject), variables["seed"])
    return ReferenceCallAnswer(
        argument_list({relation.parameter: relation.argument(subject)}),
        argument_list({relation.parameter: relation.argument(other)}),
    )


def _code(variables: Variables, language: Language, rng: random.Random) -> ToolCodeAnswer:
    relation, subject = _one_step(variables["step"], language)
    rows = _table(variables, relation, subject)
    return ToolCodeAnswer(fact_tools.fact_tool(relation, rows, language, spec=variables["document"]).code)


def _table(variables: Variables, relation: Relation, subject: str) -> list[str]:
    return fact_tools.table_subjects(relation, subject, variables["table_rows"], variables["seed"])


def _clusters(variables: Variables, language: Language, rng: random.Random) -> IntentClustersAnswer:
    clusters: dict[str, list[int]] = {}
    for step in variables["steps"]:
        clusters.setdefault(_one_step(step, language)[0].id, []).append(step.id)
    return IntentClustersAnswer([Cluster(intent, ids) for intent, ids in clusters.items()])


def _merged_tool(variables: Variables, language: Language, rng: random.Random) -> MergedToolAnswer:
    asked = [_one_step(step, language) for step in variables["steps"]]
    relation = asked[0][0]
    union = {row for _, subject in asked for row in _table(variables, relation, subject)}
    tool = fact_tools.fact_tool(relation, sorted(union), language, spec=variables["document"])
    calls = [argument_list({relation.parameter: relation.argument(subject)}) for _, subject in asked]
    return MergedToolAnswer(tool.code, calls)


HANDLERS = {
    "DecompositionAnswer": _decomposition,
    "ToolNecessityAnswer": _necessity,
    "DependencyConsistencyAnswer": _dependency_consistency,
    "AtomicityAnswer": _atomicity,
    "SequentialRationalityAnswer": _sequential_rationality,
    "CompletenessAnswer": _completeness,
    "ToolDocumentAnswer": _document,
    "HarderToolDocumentAnswer": _harder_document,
    "ReferenceCallAnswer": _reference_call,
    "ToolCodeAnswer": _code,
    "IntentClustersAnswer": _clusters,
    "MergedToolAnswer": _merged_tool,
}
"""Rules by answer type, for `synthesis.offline.teacher.OfflineTeacher`."""
