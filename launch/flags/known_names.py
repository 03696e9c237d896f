"""Names of other trainers for our flags and settings, and suggestions for a name that is not there.

A suggestion is made only when a name is known, or close to an existing one: a wrong "did you mean" is worse than none.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from astra_jax.base.former_settings import FORMER_SETTINGS
from launch.flags.shared import RENAMED

CLOSE = 0.8
"""Least similarity (`difflib`'s ratio) of a suggestion."""

ELSEWHERE: Mapping[str, str] = {
    "--data": "dataset_name dataset_path dataset_dir datasets data_path data_files train_data train_dataset train_file "
    "train_files training_file",
    "--environments": "env env_name envs environment prompt_data",
    "--held_out": "eval_data eval_dataset eval_file eval_split test_size val_dataset val_file val_files val_set_size "
    "val_size validation_file validation_split",
    "--hosts": "nnodes num_machines num_nodes",
    "--mesh": "context_parallel_size data_parallel_size deepspeed dp_size fsdp fsdp_config fsdp_size gpus n_gpus "
    "n_gpus_per_node nproc_per_node num_gpus num_processes tensor_parallel_size tp_size ulysses_sequence_parallel_size",
    "--repository": "hub_model_id repo repo_id",
    "--reward": "reward_fn reward_func reward_funcs reward_function reward_model",
    "--rollout_url": "use_vllm vllm_server_base_url vllm_server_host vllm_server_url",
    "--tokenizer": "tokenizer_name tokenizer_name_or_path tokenizer_path",
    "--weights": "base_model base_model_name_or_path checkpoint ckpt hf_model_path model model_id model_name "
    "model_name_or_path model_path pretrain pretrained",
    "--workdir": "ckpt_dir default_local_dir log_dir logging_dir out_dir output output_dir run_dir save_dir save_path",
    "b1": "adam_beta1 beta1",
    "b2": "adam_beta2 beta2",
    "batch_size": "global_batch_size rollout_batch_size total_batch_size train_batch_size",
    "checkpoint_every": "checkpoint_interval ckpt_interval save_every save_freq save_interval save_steps",
    "count": "max_samples n_samples num_environments num_samples samples",
    "data.seed": "data_seed shuffle_seed",
    "data.seq_len": "block_size context_length cutoff_len max_len max_length max_seq_len max_seq_length "
    "maximum_sequence_length model_max_length seq_length sequence_len sequence_length",
    "data.workers": "dataloader_num_workers dataset_num_proc num_workers preprocessing_num_workers",
    "epochs": "max_epochs n_epochs num_epochs num_train_epochs total_epochs",
    "episode.max_prompt_tokens": "max_prompt_len max_prompt_length prompt_max_len",
    "episode.max_response_tokens": "generate_max_len max_completion_length max_gen_len max_new_tokens "
    "max_response_length max_tokens response_length",
    "episode.max_turns": "max_assistant_turns max_steps_per_episode max_tool_calling_iterations num_turns",
    "episode.temperature": "rollout_temperature sampling_temperature",
    "eps": "adam_eps adam_epsilon",
    "eval_every": "eval_freq eval_interval eval_steps evaluation_steps test_freq val_check_interval",
    "final_fraction": "cosine_min_lr_ratio lr_min_ratio min_lr_ratio min_lr_rate",
    "group_size": "group_n n_samples_per_prompt num_generations num_return_sequences num_rollouts rollout_n",
    "keep_states": "max_ckpt_to_keep save_total_limit",
    "learning_rate": "actor_learning_rate lr max_lr peak_lr",
    "log_every": "log_every_n_steps log_interval logging_steps",
    "log_to": "log_with logger report_to trackers use_mlflow use_swanlab use_wandb wandb wandb_project",
    "lora.alpha": "lora_alpha",
    "lora.rank": "lora_dim lora_r lora_rank peft r",
    "lora.rank_stabilized": "peft_use_rslora use_rslora",
    "lora.targets": "lora_attn_modules lora_target lora_target_modules lora_targets target_modules",
    "lora.weight_quantization": "load_in_4bit load_in_8bit quantization_bit quantize_base",
    "max_grad_norm": "clip_grad clip_grad_norm grad_clip gradient_clip_val gradient_clipping max_norm",
    "micro_batch_size": "accumulate_grad_batches grad_accum gradient_accumulation gradient_accumulation_steps "
    "micro_train_batch_size per_device_batch_size per_device_train_batch_size ppo_micro_batch_size_per_gpu",
    "mini_batches": "num_iterations ppo_mini_batch_size steps_per_generation",
    "model.dtype": "bf16 compute_dtype dtype fp16 mixed_precision torch_dtype",
    "objective.clip_high": "clip_ratio_high epsilon_high eps_clip_high",
    "objective.clip_low": "clip_eps clip_range clip_ratio clip_ratio_low cliprange epsilon eps_clip",
    "objective.entropy_coef": "ent_coef entropy_coeff entropy_loss_coef",
    "objective.kl_coef": "beta init_kl_coef kl_beta kl_coeff kl_ctrl kl_loss_coef kl_penalty",
    "objective.loss_agg_mode": "loss_type",
    "objective.scale_by_std": "norm_adv_by_std_in_grpo scale_rewards",
    "optimizer": "optim optimizer_name optimizer_type",
    "remat": "activation_checkpointing enable_activation_checkpointing enable_gradient_checkpointing "
    "gradient_checkpointing",
    "schedule": "lr_scheduler lr_scheduler_type",
    "steps": "max_steps max_train_steps num_steps num_training_steps num_updates total_steps total_training_steps "
    "train_steps",
    "trajectories": "num_conversations num_trajectories",
    "warmup_fraction": "lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps warmup_ratio warmup_steps",
    "weight_decay": "adam_weight_decay wd",
}
"""Ours → names of TRL, transformers, axolotl, LLaMA-Factory, torchtune, verl, OpenRLHF and Lightning (November 2026).
Ours is a flag with dashes, or a setting without the part of the configuration that has it."""

_EXAMPLES: Mapping[str, str] = {
    "--held_out": "5%",
    "--mesh": "fsdp=8",
    "--reward": "f1:0.9,format:0.1",
    "--rollout_url": "http://HOST:8000",
    "log_to": "wandb",
    "lora.weight_quantization": "int8",
    "micro_batch_size": "1",
    "model.dtype": "bfloat16",
    "objective.loss_agg_mode": "episode",
    "objective.scale_by_std": "false",
    "optimizer": "adamw",
    "remat": "full",
    "schedule": "cosine",
    "warmup_fraction": "0.05",
}
"""Values to show for ours instead of the typed ones, which have another unit or other words elsewhere."""

_ANSWERS: Mapping[str, str] = {
    name: answer
    for names, answer in (
        ("packing sample_packing eval_packing pack", "rows are always packed"),
        (
            "assistant_only_loss completion_only_loss train_on_inputs train_on_prompt mask_prompt",
            "the loss is always on the assistant's tokens alone; docs/sft.md says how to leave turns out",
        ),
        (
            "resume resume_from resume_from_checkpoint resume_mode auto_resume",
            "the same command with the same --workdir resumes from its last checkpoint",
        ),
        ("push_to_hub", "push the trained model with astra push"),
    )
    for name in names.split()
}
"""Answers to names of things that no flag or setting here decides."""

_OURS: Mapping[str, tuple[str, ...]] = {
    name: tuple(ours for ours, names in ELSEWHERE.items() if name in names.split())
    for every in ELSEWHERE.values()
    for name in every.split()
}


def suggest(
    typed: str, value: str, settings: Collection[str], flag_names: Collection[str], *, as_flag: bool = True
) -> str | None:
    """Return a phrase with what to type for a name that is not there; None if nothing is close.

    Args:
        typed: the name, without dashes in front and without `config.`; of any trainer.
        value: value that was typed with it, to be repeated.
        settings: dotted names of the program's settings.
        flag_names: names of the program's flags.
        as_flag: it was typed as a flag, so that the nearest flag comes before the nearest setting.
    """
    name = typed.replace("-", "_").lower()
    section, _, _ = name.partition(".")
    last = name.rpartition(".")[2]

    def known(one: str) -> tuple[str, str] | None:
        """Return our name for a name, and how it is typed; None if there is no such flag or setting."""
        for ours in (one, f"--{one}", *_OURS.get(one, ()), FORMER_SETTINGS.get(one), f"--{RENAMED.get(one)}"):
            if ours and (written := _existing(ours, settings, flag_names, section)):
                return ours, written
        return None

    for one in (name, last):
        if (found := known(one)) is not None:
            ours, written = found
            shown = (_EXAMPLES.get(ours) if ours in _OURS.get(one, ()) else None) or value
            return f"write {written}={shown}" if shown else f"write {written}"
        if one in _ANSWERS:
            return _ANSWERS[one]
        if one in _OURS:
            return None  # of something that this program does not have
    own_settings: dict[str, str] = {}
    for setting in settings:
        parts = setting.split(".")
        for at in range(len(parts)):
            own_settings.setdefault(".".join(parts[at:]), f"--config.{setting}")
    own_flags = {flag: f"--{flag}" for flag in flag_names}
    others = {one: found[1] for one in (*FORMER_SETTINGS, *_OURS) if (found := known(one))}
    for vocabulary in (own_flags, own_settings, others) if as_flag else (own_settings, own_flags, others):
        for one in (name, last):
            if near := difflib.get_close_matches(one, vocabulary, n=3, cutoff=CLOSE):
                swapped = [found for found in near if sorted(found) == sorted(one)]  # letters in another order
                return f"the nearest is {vocabulary[(swapped or near)[0]]}"
    return None


def _existing(ours: str, settings: Collection[str], flag_names: Collection[str], section: str) -> str | None:
    """Return a flag, or the setting of this name in the typed section or with the fewest parts, as it is typed; None if
    there is none."""
    if ours.startswith("--"):
        return ours if ours[2:] in flag_names else None
    having = [one for one in settings if one == ours or one.endswith(f".{ours}")]
    if not having:
        return None
    return f"--config.{min(having, key=lambda one: (one.partition('.')[0] != section, one.count('.')))}"


def preset_meant(name: str, presets: Collection[str]) -> str | None:
    """Return the preset that a name means, such as sft:4b for sft:qwen3-4b or sft:Qwen/Qwen3-4B; None if none is close.

    Args:
        presets: names that the program takes, each KIND:NAME.
    """
    kind, _, size = name.lower().rpartition(":")
    size = size.rpartition("/")[2].replace("_", "-")
    kinds = [kind] if kind else list(dict.fromkeys(one.partition(":")[0] for one in presets))
    for form in (size, size.removeprefix("qwen3-"), size.replace("llama-", "llama"), f"qwen3-{size}"):
        for short in (form, form.removesuffix("-instruct"), form.removesuffix("-base"), form.removesuffix("-chat")):
            for one in kinds:
                if f"{one}:{short}" in presets:
                    return f"{one}:{short}"
    near = difflib.get_close_matches(name, presets, n=1, cutoff=CLOSE)
    return near[0] if near else None
