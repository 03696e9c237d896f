"""Names that users of other trainers type: each gets the flag or setting here, as it is typed."""

from __future__ import annotations

import pytest
from programs_world import ended

from configs.training import PRESETS
from launch.flags import known_names
from launch.flags.cli import UsageError, overridden, setting_names

SETTINGS = {kind: list(setting_names(PRESETS[f"{kind}:4b"]())) for kind in ("sft", "grpo")}
FLAGS = {
    "sft": {"weights", "data", "held_out", "workdir", "mesh", "tokenizer", "hosts", "rehearsal", "multihost"},
    "grpo": {"weights", "environments", "held_out", "workdir", "mesh", "rollout_url", "reward", "hosts"},
}
TYPED = [
    # transformers' TrainingArguments
    ("sft", "learning_rate=2e-5", "--config.sft.learning_rate=2e-5"),
    ("sft", "num_train_epochs=3", "--config.sft.epochs=3"),
    ("sft", "per_device_train_batch_size=8", "--config.sft.micro_batch_size=1"),
    ("sft", "gradient_accumulation_steps=4", "--config.sft.micro_batch_size=1"),
    ("sft", "warmup_ratio=0.03", "--config.sft.warmup_fraction=0.05"),
    ("sft", "lr_scheduler_type=linear", "--config.sft.schedule=cosine"),
    ("sft", "output_dir=out", "--workdir=out"),
    ("sft", "save_steps=50", "--config.sft.checkpoint_every=50"),
    ("sft", "save_total_limit=2", "--config.sft.keep_states=2"),
    ("sft", "eval_steps=50", "--config.sft.eval_every=50"),
    ("sft", "logging_steps=5", "--config.sft.log_every=5"),
    ("sft", "max_steps=100", "--config.sft.steps=100"),
    ("sft", "max_grad_norm=0.5", "--config.sft.max_grad_norm=0.5"),
    ("sft", "report_to=tensorboard", "--config.sft.log_to=wandb"),
    ("sft", "gradient_checkpointing=true", "--config.sft.remat=full"),
    ("sft", "bf16=true", "--config.model.dtype=bfloat16"),
    ("sft", "seed=7", "--config.sft.data.seed=7"),
    ("sft", "adam-beta2=0.95", "--config.sft.b2=0.95"),
    ("sft", "dataloader_num_workers=4", "--config.sft.data.workers=4"),
    ("sft", "deepspeed=zero3.json", "--mesh=fsdp=8"),
    # TRL
    ("sft", "lr=1e-4", "--config.sft.learning_rate=1e-4"),
    ("sft", "epochs=3", "--config.sft.epochs=3"),
    ("sft", "max_length=4096", "--config.sft.data.seq_len=4096"),
    ("sft", "max-seq-length=4096", "--config.sft.data.seq_len=4096"),
    ("sft", "model_name_or_path=Qwen/Qwen3-4B", "--weights=Qwen/Qwen3-4B"),
    ("sft", "dataset_name=my.jsonl", "--data=my.jsonl"),
    ("sft", "lora_r=16", "--config.sft.lora.rank=16"),
    ("sft", "lora_alpha=32", "--config.sft.lora.alpha=32"),
    ("sft", "lora_target_modules=all", "--config.sft.lora.targets=all"),
    ("grpo", "num_generations=8", "--config.grpo.group_size=8"),
    ("grpo", "beta=0.04", "--config.grpo.objective.kl_coef=0.04"),
    ("grpo", "epsilon=0.2", "--config.grpo.objective.clip_low=0.2"),
    ("grpo", "epsilon_high=0.28", "--config.grpo.objective.clip_high=0.28"),
    ("grpo", "max_completion_length=2048", "--config.grpo.episode.max_response_tokens=2048"),
    ("grpo", "max_prompt_length=1024", "--config.grpo.episode.max_prompt_tokens=1024"),
    ("grpo", "temperature=0.9", "--config.grpo.episode.temperature=0.9"),
    ("grpo", "use_vllm=true", "--rollout_url=http://HOST:8000"),
    ("grpo", "reward_funcs=f1", "--reward=f1:0.9,format:0.1"),
    ("grpo", "scale_rewards=false", "--config.grpo.objective.scale_by_std=false"),
    # axolotl
    ("sft", "base_model=Qwen/Qwen3-4B", "--weights=Qwen/Qwen3-4B"),
    ("sft", "sequence_len=4096", "--config.sft.data.seq_len=4096"),
    ("sft", "micro_batch_size=2", "--config.sft.micro_batch_size=2"),
    ("sft", "num_epochs=3", "--config.sft.epochs=3"),
    ("sft", "val_set_size=0.05", "--held_out=5%"),
    ("sft", "load_in_8bit=true", "--config.sft.lora.weight_quantization=int8"),
    # LLaMA-Factory
    ("sft", "cutoff_len=4096", "--config.sft.data.seq_len=4096"),
    ("sft", "val_size=0.1", "--held_out=5%"),
    ("sft", "lora_rank=8", "--config.sft.lora.rank=8"),
    ("sft", "lora_target=all", "--config.sft.lora.targets=all"),
    # torchtune
    ("sft", "optimizer.lr=2e-5", "--config.sft.learning_rate=2e-5"),
    ("sft", "tokenizer.max_seq_len=4096", "--config.sft.data.seq_len=4096"),
    ("sft", "enable_activation_checkpointing=true", "--config.sft.remat=full"),
    ("sft", "batch_size=4", "--config.sft.batch_size=4"),
    ("sft", "clip_grad_norm=1.0", "--config.sft.max_grad_norm=1.0"),
    # verl
    ("grpo", "actor_rollout_ref.actor.optim.lr=1e-6", "--config.grpo.learning_rate=1e-6"),
    ("grpo", "data.train_batch_size=256", "--config.grpo.batch_size=256"),
    ("grpo", "data.max_response_length=4096", "--config.grpo.episode.max_response_tokens=4096"),
    ("grpo", "actor_rollout_ref.actor.kl_loss_coef=0.001", "--config.grpo.objective.kl_coef=0.001"),
    ("grpo", "actor_rollout_ref.actor.entropy_coeff=0", "--config.grpo.objective.entropy_coef=0"),
    ("grpo", "actor_rollout_ref.model.path=m", None),
    ("grpo", "trainer.n_gpus_per_node=8", "--mesh=fsdp=8"),
    ("grpo", "trainer.nnodes=2", "--hosts=2"),
    ("grpo", "trainer.save_freq=20", "--config.grpo.checkpoint_every=20"),
    ("grpo", "trainer.test_freq=5", "--config.grpo.eval_every=5"),
    # with the part of the configuration, mistyped, or of the other kind
    ("sft", "sft.lr=1e-4", "--config.sft.learning_rate=1e-4"),
    ("sft", "training.steps=10", "--config.sft.steps=10"),
    ("sft", "workdir=runs/sft", "--workdir=runs/sft"),
    ("sft", "learnig_rate=1", "the nearest is --config.sft.learning_rate"),
    ("sft", "held_ot=5%", "the nearest is --held_out"),
    ("sft", "packing=true", "rows are always packed"),
    ("sft", "resume_from_checkpoint=true", "the same command with the same --workdir resumes from its last checkpoint"),
    # nothing is close: no suggestion
    ("sft", "beta=0.1", None),
    ("sft", "num_generations=8", None),
    ("sft", "neftune_noise_alpha=5", None),
    ("grpo", "colour=red", None),
    ("grpo", "x=1", None),
]
"""Kind of program, what is typed behind the dashes, and what is to be typed; or the end of the message; or nothing."""


def test_a_known_name_is_answered_with_the_whole_form_to_type() -> None:
    wrong = []
    for kind, typed, wanted in TYPED:
        name, _, value = typed.partition("=")
        found = known_names.suggest(name, value, SETTINGS[kind], FLAGS[kind])
        said = None if found is None else found.removeprefix("write ")
        if said != wanted:
            wrong.append(f"{kind} {typed}: {said}, not {wanted}")
    assert not wrong, "\n".join(wrong)
    assert len(TYPED) > 30


def test_the_table_names_existing_flags_and_settings_and_no_name_twice() -> None:
    from configs.synthesis import PRESETS as SYNTHESIS

    settings = {setting for names in SETTINGS.values() for setting in names}
    settings |= {name for preset in SYNTHESIS.values() for name in setting_names(preset())}
    names = {*settings} | {".".join(one.split(".")[at:]) for one in settings for at in (1, 2)}
    ours = {one for one in known_names.ELSEWHERE if not one.startswith("--")}
    assert ours <= names
    every = [name for line in known_names.ELSEWHERE.values() for name in line.split()]
    assert sorted(every) == sorted(set(every))


def test_programs_say_it() -> None:
    for typed, wanted in [
        ("--epochs=3", "error: --epochs is not a flag of this program; write --config.sft.epochs=3"),
        ("--config.lr=1e-5", "error: --config.lr: there is no such setting; write --config.sft.learning_rate=1e-5"),
        ("--colour=red", "error: --colour is not a flag of this program; --help lists the flags and settings"),
        ("lr=1e-5", "error: unexpected argument 'lr=1e-5'; write --config.sft.learning_rate=1e-5"),
    ]:
        result = ended("launch.sft", "--config=sft:0.6b", "--weights=w", "--data=d", "--workdir=r", typed)
        assert result.code == 2 and result.line == wanted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("wandb", ("wandb",)),
        ("wandb, trackio", ("wandb", "trackio")),
        ('["wandb"]', ("wandb",)),
        ("my_module:MyTracker", ("my_module:MyTracker",)),
    ],
)
def test_a_list_of_names_needs_no_quotes(text: str, value: tuple[str, ...]) -> None:
    assert overridden(PRESETS["sft:0.6b"](), [("sft.log_to", text)]).sft.log_to == value


def test_other_lists_without_brackets() -> None:
    from launch.flags.cli import load_config

    grpo = PRESETS["grpo:0.6b"]()
    assert overridden(grpo, [("grpo.row_buckets", "2048,90000")]).grpo.row_buckets == (2048, 90_000)
    assert overridden(grpo, [("grpo.solve_rates", "0.2,0.8")]).grpo.solve_rates == (0.2, 0.8)
    assert overridden(load_config("trajectories:paper", "trajectories"), [("tools", "mcp.json")]).tools == ("mcp.json",)
    with pytest.raises(UsageError, match="log_to=wandbb is not allowed|log_to.*'wandbb'; use .*nearest is wandb"):
        overridden(grpo, [("grpo.log_to", "wandbb")])
    with pytest.raises(UsageError, match="--config.grpo.steps=1,2 is not allowed; use a whole number"):
        overridden(grpo, [("grpo.steps", "1,2")])
