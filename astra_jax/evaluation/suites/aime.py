"""AIME 2024 and 2025: 60 questions whose answers are integers, compared by math-verify.

The paper uses it to check that training for tools keeps the ability in mathematics: 32 samples of each question, from
the 20 most likely tokens and from all of them. The questions are in no package registry. The user downloads two files,
whose content is pinned, but not their format.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astra_jax.evaluation.endpoint_agent import EndpointAgent, spoken
from astra_jax.evaluation.harness import HarnessEnvironment, WorkerProgram
from astra_jax.evaluation.results import ItemResult
from astra_jax.evaluation.suite import Category, Decoding, EvalItem, EvaluationError, SuiteContext, SuiteInfo

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
"""Instruction that Qwen3's model card recommends for mathematics."""

_ENVIRONMENT = HarnessEnvironment(
    name="math-verify",
    requirements=(
        "math-verify==0.9.0",
        "latex2sympy2_extended==1.11.0",
        "antlr4-python3-runtime==4.13.2",
        "sympy==1.14.0",
        "mpmath==1.3.0",
    ),
)
_ANSWER = re.compile(r"(\d{1,3})(?:\.0|\^\\circ)?")


@dataclass(frozen=True)
class Problem:
    """A question.

    Attributes:
        id: digest of its text without white space.
        text: text in its file.
        answer: from 0 to 999, without leading zeros.
    """

    id: str
    text: str
    answer: str


@dataclass(frozen=True)
class ProblemSet:
    """The questions of a year.

    Attributes:
        year: year of the competition.
        file: name in the user's folder: JSON lines with `problem` or `question`, and `answer`.
        source: where to download such a file.
        sha256: digest of the sorted questions and answers (`digest_of`).
    """

    year: int
    file: str
    source: str
    sha256: str

    def read(self, folder: Path) -> list[Problem]:
        """Return the questions, in a fixed order. Raises `EvaluationError`."""
        file = folder / self.file
        get = f"get it by: curl -L -o {file} {self.source}"
        if not file.is_file():
            raise EvaluationError(f"{file} is missing, the questions of AIME {self.year}; {get}")
        problems = []
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
                text = (fields.get("problem") or fields["question"]).strip()
                answer = _ANSWER.fullmatch(str(fields["answer"]).strip())
            except (ValueError, KeyError, AttributeError, TypeError):
                raise EvaluationError(
                    f"{file}, line {number}: not a JSON object with problem (or question) and answer; {get}"
                ) from None
            if answer is None:
                raise EvaluationError(
                    f"{file}, line {number}: the answer {fields['answer']!r} is not an integer from 0 to 999; {get}"
                )
            digest = hashlib.sha256(_words(text).encode()).hexdigest()
            problems.append(Problem(digest[:8], text, str(int(answer[1]))))
        problems.sort(key=lambda problem: problem.id)
        if (found := digest_of(problems)) != self.sha256:
            raise EvaluationError(
                f"{file} has {len(problems)} questions with digest {found[:16]}, not the pinned {self.sha256[:16]}; "
                f"{get}"
            )
        return problems


def digest_of(problems: Sequence[Problem]) -> str:
    """Return the SHA-256 of questions and answers, independent of the file's format, order and white space."""
    pairs = sorted((_words(problem.text), problem.answer) for problem in problems)
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _words(text: str) -> str:
    return " ".join(text.split())


SETS = (
    ProblemSet(
        2024,
        "aime24.jsonl",
        "https://raw.githubusercontent.com/QwenLM/Qwen2.5-Math/a45202bd16f1ec06f433442dc1152d0074773465/"
        "evaluation/data/aime24/test.jsonl",
        "714565810a95b18bf697e4dee4ed6198735d7431784404fb4b648d74cd719db3",
    ),
    ProblemSet(
        2025,
        "aime25.jsonl",
        "https://raw.githubusercontent.com/zwRuan/gift/277d059aae6a61e0d08b6287d2e6c1ca042b0f60/data/aime25/test.jsonl",
        "6c8397002eb852286e4f93bfd8c44485b87be12058a541a3573111c8e88dfbbd",
    ),
)

_NOTES = (
    "AIME 2025 is in circulation in several wordings. Pinned is one whose formulas are whole: in another common one "
    "JSON escapes have broken `\\frac` and `\\triangle` in three questions. The questions are the MAA's; nothing of "
    "them is distributed with this project.",
    "An answer is what math-verify finds in the reply's last box, or in its last formula where it has no box; a number "
    "in plain words is not looked for. Boxes close to each other are a set, which is wrong.",
    "What stands before `</think>` is not looked at; of a thought that was never closed, that is all.",
    "A reply cut off by the token limit scores 0 and ends with `token_limit`. The paper gives no limit; by default the "
    "endpoint's holds.",
    "An answer that sympy cannot compare in 5 s of processor time or 4 GiB scores 0 and says so in `problem`.",
)


class Aime:
    """AIME as a suite. Implements `Suite`. Needs `sources["aime"]`, a folder with the files of `sets`."""

    def __init__(self, context: SuiteContext, sets: Sequence[ProblemSet] = SETS) -> None:
        self._context, self._sets = context, sets
        self._problems: dict[str, dict[str, Problem]] = {}
        self._workers: WorkerProgram | None = None

    @property
    def info(self) -> SuiteInfo:
        """Return its declaration; decoding as in the paper's §3.3."""
        years = [one.year for one in self._sets]
        kinds = {"k20": (20, "k=20"), "all": (-1, "k=-1")}
        return SuiteInfo(
            name="aime",
            title="AIME",
            harness="math-verify 0.9.0",
            license="Apache-2.0",
            data_sha256={one.file: one.sha256 for one in self._sets},
            categories=tuple(
                Category(
                    name=f"aime_{year}_{kind}",
                    title=f"AIME {year}, {title}",
                    decoding=Decoding(temperature=0.6, top_p=0.95, top_k=top_k, trials=32),
                )
                for kind, (top_k, title) in kinds.items()
                for year in years
            ),
            headline={title: tuple(f"aime_{year}_{kind}" for year in years) for kind, (_, title) in kinds.items()},
            notes=_NOTES,
        )

    async def prepare(self) -> None:
        folder = self._context.sources.get("aime")
        if folder is None:
            files = " and ".join(f"curl -L -o DIR/{one.file} {one.source}" for one in self._sets)
            raise EvaluationError(
                f"aime needs a folder with its questions, which no registry has; get them by: {files}"
            )
        for one in self._sets:
            problems = {problem.id: problem for problem in one.read(folder)}
            for category in self.info.categories:
                if category.name.startswith(f"aime_{one.year}_"):
                    self._problems[category.name] = problems
        interpreter = await _ENVIRONMENT.make(self._context.harnesses)
        self._workers = WorkerProgram(interpreter, "aime.py", log=self._context.logs / "aime.log")
        await self._workers.start()

    def ids(self, category: str) -> Sequence[str]:
        return list(self._problems[category])

    async def run(self, item: EvalItem, decoding: Decoding) -> ItemResult:
        assert self._workers is not None, "prepare() comes first"
        problem = self._problems[item.category][item.id]
        agent = EndpointAgent(self._context.endpoint, self._context.policy, decoding, seed=item.seed)
        agent.ask(f"{problem.text}\n{INSTRUCTION}")
        whole = await agent.act() is not None
        graded: dict[str, Any] = {"right": False, "problem": "the reply was cut off"}
        if whole:
            async with self._workers.open() as worker:
                graded = await worker.call("grade", text=spoken(agent), answer=problem.answer)
        return ItemResult(
            suite="aime",
            category=item.category,
            item=item.id,
            trial=item.trial,
            score=float(graded["right"]),
            finish="answered" if whole else "token_limit",
            problem=graded["problem"],
            sub_tasks=1,
            steps=agent.steps,
            calls=agent.calls,
            prompt_tokens=agent.prompt_tokens,
            completion_tokens=agent.completion_tokens,
            messages=agent.messages,
        )

    async def close(self) -> None:
        if self._workers is not None:
            await self._workers.close()
