"""Presets of the synthesis programs: `--config=trajectories:paper`, `--config=environments:paper`.

Each value has its source in a comment: a section of the paper (arXiv 2601.21558), or the authors' released code if the
paper does not state it. All other values are our defaults; docs/trajectories.md and docs/environments.md list them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from synthesis.environments.config import EnvironmentsConfig
from synthesis.trajectories.config import TrajectoriesConfig
from synthesis.trajectories.execution import Failures

PLAN = "Think about what the request needs, and plan your calls before you make them. Answer in the user's language."
"""System prompt of the released agent, in our words."""


def paper_trajectories() -> TrajectoriesConfig:
    """Return the paper's SFT track, plus tasks over several servers, which it does not have (section 2.1.1)."""
    return TrajectoriesConfig(
        trajectories=54_885,  # A.1.1
        min_tools=3,  # 2.1.1
        min_length=2,  # released code: chains of 2 to 5
        max_length=5,
        tool_counts=(2, 3),  # released code: tasks of a single server need 2 or 3 tools
        several_servers=0.2,  # ours
        group_sizes=(2, 3),
        augmentations=("diverse", "complicate", "persona"),  # 2.1.3
        augmented=1.0,  # released code: every task
        behaviours={},  # one message of the user; the paper names conversations of several as future work
        failures=Failures(rate=0.2),  # 2.1.4
        max_turns=20,  # released code
        max_tokens=58_000,  # released code
        system_prompt=PLAN,  # A.1.1: one system message per conversation
    )


def paper_environments() -> EnvironmentsConfig:
    """Return the paper's RL track."""
    return EnvironmentsConfig(
        count=6_596,  # A.1.2
        languages={"en": 0.712, "zh": 0.288},  # A.1.2
        structures={  # A.1.2
            "single_hop": 0.068,
            "parallel_single_hop": 0.106,
            "multi_hop": 0.348,
            "parallel_multi_hop": 0.478,
        },
        informative_joins=True,  # ours
        min_hops=3,  # released code: 3 to 5
        max_hops=5,
        max_branches=2,  # ours: near the paper's 4.37 sub-questions per sample (A.1.2)
        hardened_share=1.0,  # 2.2.3: every tool's complexity is scaled
        high_cut=0.85,  # 3
        low_cut=0.4,
    )


PAPER: Mapping[str, Mapping[str, str]] = {
    "trajectories:paper": {
        "conversations": "54,885",
        "messages": "580,983; a conversation 10.59",
        "tool calls a conversation": "4.42; 72.2% have 1 to 5, 100.0% at least one",
        "tool / assistant / user+system": "41.8% / 39.3% / 18.9%",
        "unique functions called": "6,765",
        "servers / domains": "1,585 / 41 (of the pool)",
        "over 1 / 2 / 3 … servers": "100.0%",
    },
    "environments:paper": {
        "samples": "6,596",
        "languages": "en 71.2%, zh 28.8%",
        "scenarios": "parallel_multi_hop 47.8%, multi_hop 34.8%, parallel_single_hop 10.6%, single_hop 6.8%",
        "top domains": "real estate 15.6%, e-commerce 10.6%, healthcare 8.1%",
        "sub-questions": "28,794; a sample 4.37, median 4, 1 to 20",
        "sub-questions needing tools": "91.3%",
        "tool calls a sample": "3.98",
        "steps parallel / serial": "44.2% / 55.8%",
    },
}
"""Values of the paper's tables A.1.1 and A.1.2, by the rows that programs print next to a run's own."""
DIFFERS: Mapping[str, tuple[str, ...]] = {
    "trajectories:paper": (
        "over several servers are a fifth of the tasks (several_servers); the paper has none (2.1.1)",
        "share of failures: 20% of all calls (2.1.4); the released code has no such number",
        "offline, chains of the packaged facts are short: three calls a conversation",
        "an axis that has nothing to judge has no score, where the paper's is 1; answers that cannot be read are none",
        "the paper states no thresholds (thresholds, reward_threshold) and no share of tasks without a chain",
    ),
    "environments:paper": (
        "offline, every sub-question is a look-up: all need tools, and domains are those of the packaged facts",
        "the paper cuts by quality without saying where (its code's README: quality_percentile=0.9)",
        "a part is held out (held_out_fraction=0 for none); the paper measures on benchmarks alone",
    ),
}
"""Differences between a preset's run and the paper's."""
KINDS: Mapping[str, type[TrajectoriesConfig] | type[EnvironmentsConfig]] = {
    "trajectories": TrajectoriesConfig,
    "environments": EnvironmentsConfig,
}
"""Configuration classes, by the part of a preset's name before the colon."""
PRESETS: Mapping[str, Callable[[], TrajectoriesConfig | EnvironmentsConfig]] = {
    "trajectories:paper": paper_trajectories,
    "environments:paper": paper_environments,
}
