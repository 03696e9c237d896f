"""Settings of earlier versions: refused with today's name, and known in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from astra_jax.base.former_settings import FORMER_SETTINGS, todays_name
from astra_jax.grpo.config import GRPOConfig
from astra_jax.grpo.losses import ObjectiveConfig
from astra_jax.models.lora import LoRA
from astra_jax.models.qwen3.presets import Qwen3Config
from astra_jax.run import frozen
from astra_jax.run.identity import check_same_run, differences, run_identity, settings_of
from astra_jax.sft.config import SFTConfig
from astra_jax.sft.data import DataConfig
from configs.training import GRPORun
from launch.flags import cli

MODEL = Qwen3Config(
    vocab_size=64, d_model=16, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=16, d_ff=32, tie_embeddings=True
)
FORMER = {
    "grpo.async_steps": "grpo.max_off_policy_steps",
    "grpo.surplus_max_age": "grpo.max_off_policy_steps",
    "grpo.stored": "grpo.weight_quantization",
    "grpo.lora.stored": "grpo.lora.weight_quantization",
    "grpo.matmul": "grpo.matmul_quantization",
    "grpo.moments": "grpo.optimizer_state_dtype",
    "grpo.optimizer_memory": "grpo.optimizer_offload",
    "grpo.objective.advantage": "grpo.objective.scale_by_std",
    "grpo.delta": "grpo.min_reward_std",
}


@pytest.mark.parametrize(("former", "today"), FORMER.items())
def test_a_former_setting_is_refused_with_todays_name(former: str, today: str) -> None:
    with pytest.raises(cli.UsageError, match=f"--config.{former}: this setting is called --config.{today} now"):
        cli.overridden(GRPORun(MODEL, GRPOConfig()), [(former, "1")])


def test_a_keyword_of_a_configuration_file_has_todays_name() -> None:
    assert {todays_name(name.rpartition(".")[2]) for name in FORMER_SETTINGS} >= {
        "split_at_user_turns",
        "scale_by_std",
    }
    assert todays_name("steps") == "steps" and todays_name("grpo.group_size") == "grpo.group_size"


def former_identity(config: GRPOConfig | SFTConfig, loop: str, **values: object) -> dict[str, object]:
    """The identity that an earlier version saved for this configuration."""
    saved = run_identity(**{loop: settings_of(config)})
    for name, value in values.items():
        saved[f"{loop}.{name.replace('__', '.')}"] = value
    return saved


@pytest.mark.parametrize("k", [0, 3])
def test_a_grpo_checkpoint_of_an_earlier_version_is_of_the_same_run(k: int) -> None:
    objective = ObjectiveConfig(scale_by_std=False)
    ahead = {"async_rollouts": True, "max_off_policy_steps": k} if k else {"max_off_policy_steps": 2}
    config = GRPOConfig(objective=objective, weight_quantization="int8", **ahead)
    saved = former_identity(
        config, "grpo", async_steps=k, surplus_max_age=2, objective__advantage="mean", stored="int8", moments="float32"
    )
    for name in ("async_rollouts", "max_off_policy_steps", "objective.scale_by_std", "weight_quantization"):
        del saved[f"grpo.{name}"]
    del saved["grpo.optimizer_state_dtype"]
    ours = run_identity(grpo=settings_of(config))
    check_same_run(saved, ours, "DIR")
    assert "max_off_policy_steps is" in differences(saved | {"grpo.async_steps": 5}, ours)
    assert "objective.scale_by_std is True there" in differences(
        saved | {"grpo.objective.advantage": "deviation"}, ours
    )


@pytest.mark.parametrize("is_split", [True, False])
def test_an_sft_checkpoint_of_an_earlier_version_is_of_the_same_run(is_split: bool) -> None:
    data = DataConfig(seq_len=64, split_at_user_turns=is_split, self_generated_ratio=0.5)
    config = SFTConfig(data=data, lora=LoRA(rank=4, weight_quantization="int8"))
    rounds = "apart" if is_split else "together"
    saved = former_identity(config, "sft", data__rounds=rounds, data__rehearsed=0.5, lora__stored="int8")
    for name in ("data.split_at_user_turns", "data.self_generated_ratio", "lora.weight_quantization"):
        del saved[f"sft.{name}"]
    ours = run_identity(sft=settings_of(config))
    check_same_run(saved, ours, "DIR")
    assert "weight_quantization is 'none' there" in differences(saved | {"sft.lora.stored": "none"}, ours)


def test_the_file_beside_adapters_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 8.0, "targets": ["q_proj"], "tokens": [], "rank_stabilized": False, "stored": "int8"}
    origin = {"folder": "base", "step": None, "rows": 60, "spelled": {"62": [1, 2]}, "adapter": None}
    content = {"lora": lora, "origin": origin, "param_dtype": "float32", "digests": {"a": "b"}}
    (tmp_path / frozen.FILE).write_text(json.dumps(content))
    found = frozen.read(tmp_path)
    assert found is not None and found.lora == LoRA(4, 8.0, ("q_proj",), weight_quantization="int8")
    assert found.origin == frozen.WeightsSource("base", rows=60, new_token_pieces={62: (1, 2)})
    frozen.write(found, tmp_path)
    assert frozen.read(tmp_path) == found and "stored" not in (tmp_path / frozen.FILE).read_text()
