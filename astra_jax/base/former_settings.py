"""Former names of settings. A setting with a former name is refused with today's name; old checkpoints resume."""

from __future__ import annotations

from collections.abc import Mapping

FORMER_SYNTHESIS_SETTINGS: Mapping[str, str] = {
    "surplus": "oversample_ratio",
    "conducts": "behaviours",
    "licence": "license",
    "answer_form": "structured_output",
    "outage_seconds": "max_unavailable_seconds",
}
"""Former name of a setting of synthesis, or of its endpoints → today's."""
FORMER_SETTINGS: Mapping[str, str] = {
    "data.rows": "batch_size",
    "accumulation": "micro_batch_size",
    "updates": "steps",
    "groups_per_batch": "batch_size",
    "micro_batch_rows": "micro_batch_size",
    "max_groups_per_update": "max_groups_per_step",
    "delta": "min_reward_std",
    "objective.normalisation": "objective.loss_agg_mode",
    "objective.proximal": "objective.ratio_reference",
    "max_faults": "max_failed_restarts",
    "objective.advantage": "objective.scale_by_std",
    "surplus_max_age": "max_off_policy_steps",
    "async_steps": "max_off_policy_steps",
    "stored": "weight_quantization",
    "matmul": "matmul_quantization",
    "moments": "optimizer_state_dtype",
    "optimizer_memory": "optimizer_offload",
    "data.rehearsed": "data.self_generated_ratio",
    "data.rounds": "data.split_at_user_turns",
    "servers": "tools",
    "registries": "tools",
    **FORMER_SYNTHESIS_SETTINGS,
}
"""Former name of any setting → today's. Mapped once: when a setting is renamed again, change its values here too.
Changed values are in `astra_jax/run/identity.py`, settings of `lora` also in `astra_jax/run/frozen.py`."""


def todays_name(setting: str) -> str:
    """Return the current dotted name of a setting, whose given name may be a former one."""
    for former, name in FORMER_SETTINGS.items():
        if setting == former or setting.endswith(f".{former}"):
            return setting.removesuffix(former) + name
        if former.endswith(f".{setting}"):  # a keyword in a configuration file
            return name.rpartition(".")[2]
    return setting
