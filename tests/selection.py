"""Which tests `--quick` runs, and which files are begun first."""

from __future__ import annotations

QUICK: dict[str, tuple[str, ...]] = {
    # What catches most: the floors, the records, and each contract once.
    "test_floors.py": (),
    "test_names.py": (),
    "test_paths.py": (),
    "test_selection.py": (),
    "test_settings.py": (),
    "synthesis/core/test_chat_format.py": (),
    "synthesis/core/test_datasets.py": (),
    "synthesis/core/test_matching.py": (),
    "synthesis/core/test_reward.py": (),
    "synthesis/core/test_stages.py": (),
    "synthesis/astra_format/test_astra_records.py": (),
    "synthesis/astra_format/test_astra_sft.py": (),
    "synthesis/offline/test_grammar.py": (),
    "synthesis/pipeline/test_prompts.py": (),
    "synthesis/servers/test_schemas.py": (),
    "synthesis/trajectories/test_judge.py": (),
    "synthesis/trajectories/test_trajectories.py": (
        "test_a_run_makes_all_datasets_and_its_resumption_the_same_bytes",
        "test_results_and_errors_as_the_agent_sees_them",
        "test_runs_that_end_nowhere_are_rejected",
    ),
    "synthesis/environments/test_environments.py": (),
    "synthesis/environments/test_proof.py": (
        "test_proofs",
        "test_one_call_that_finds_everything_is_not_rewarded",
    ),
    "synthesis/environments/test_environments_pipeline.py": (
        "test_nearly_all_questions_become_environments",
        "test_every_reference_call_replays",
        "test_a_changed_output_fails_the_replay",
        "test_nothing_leaks_between_the_splits",
        "test_wrong_policies_get_what_the_formula_says",
    ),
    "sandbox/test_http_service.py": (
        "test_what_other_sites_can_send_is_refused",
        "test_bodies_are_bounded_before_they_are_read",
        "test_certificates_that_do_not_fit_are_refused_by_name",
    ),
    "sandbox/test_sandbox_attacks.py": (
        "test_attack_is_stopped_and_harms_nobody_else",
        "test_foreign_system_call_interface_kills_the_call",
        "test_hostile_module_is_stopped_before_any_call",
    ),
    "sandbox/test_sandbox_pool.py": (
        "test_a_call_returns_its_value_and_what_it_printed",
        "test_arguments_and_results_keep_every_character",
        "test_mistakes_are_tool_errors_that_a_model_can_read",
        "test_the_seed_changes_randomness_and_nothing_else",
        "test_a_call_does_not_see_an_earlier_one",
        "test_killed_slots_and_zygotes_lose_no_call",
    ),
    "sandbox/test_sandbox_seccomp.py": (),
    "sandbox/test_sandbox_validation.py": (),
    "astra_jax/test_head.py": (),
    "astra_jax/test_tokenizer.py": (),
    "astra_jax/models/test_qwen3_parity.py": (
        "test_logits_equal_hugging_face[untied]",
        "test_gradients_equal_hugging_face[tied]",
        "test_decoding_with_the_cache_equals_the_whole_sequence",
        "test_presets_have_the_released_number_of_parameters",
        "test_configs_that_the_port_does_not_compute_are_refused",
    ),
    "astra_jax/attention/test_attention.py": ("test_documents_of_a_row_do_not_see_each_other",),
    "astra_jax/sft/test_data.py": (),
    "astra_jax/sft/test_samples.py": (),
    "astra_jax/sft/test_sft.py": (
        "test_accumulation_one_equals_n",
        "test_interrupted_and_resumed_equals_uninterrupted_to_the_bit",
        "test_the_loss_falls_and_every_step_has_its_row_of_metrics",
        "test_the_mask_belongs_to_the_target_and_stops_at_documents_ends",
        "test_the_packed_loss_is_the_sum_of_the_documents_losses",
    ),
    "astra_jax/grpo/test_batch_filling.py": (),
    "astra_jax/grpo/test_losses.py": (),
    "astra_jax/grpo/test_grpo.py": (
        "test_packed_equals_padded_and_one_micro_batch_equals_many",
        "test_packing_keeps_every_token_once",
        "test_bad_configs_are_refused",
    ),
    "astra_jax/rollout/test_engine.py": (
        "test_sampler_logprobs_equal_trainer_logprobs",
        "test_a_request_does_not_depend_on_its_neighbours",
        "test_update_swaps_weights_and_drops_the_cache",
    ),
    "astra_jax/rollout/test_episode.py": (
        "test_solved_episode",
        "test_wrong_calls_become_observations_and_count",
        "test_ends",
        "test_infrastructure_failures_are_never_scored",
    ),
    "astra_jax/rollout/test_tool_calls.py": ("test_hostile_results_too_and_rendered",),
    "astra_jax/rollout/test_vllm_access.py": (
        "test_a_bucket_is_a_root_by_its_whole_name",
        "test_a_server_that_anybody_could_sync_does_not_start",
        "test_who_may_sample_may_ask_for_the_version_and_not_sync",
    ),
    "astra_jax/run/test_checkpoints.py": (
        "test_params_state_and_extra_come_back_exactly",
        "test_a_half_written_step_is_ignored_and_can_be_saved_again",
        "test_a_checkpoint_of_another_model_is_refused",
    ),
    "astra_jax/run/test_optimizers.py": (),
    "astra_jax/serving/test_serving_hostile.py": (),
    "astra_jax/serving/test_serving_strict.py": (),
    "astra_jax/serving/test_serving_text.py": (),
    "astra_jax/evaluation/test_evaluation.py": (
        "test_every_item_runs_as_often_as_its_decoding_says",
        "test_our_environments_are_scored_as_in_training",
    ),
    "astra_jax/planner/test_planner.py": (
        "test_collectives_count_by_axis_and_as_often_as_their_loop_runs",
        "test_flops_are_those_of_the_formula",
        "test_presets_are_the_papers",
        "test_slices_are_checked",
    ),
    "launch/test_cli.py": (),
    "launch/test_environments_program.py": ("test_environments_are_written_once_and_described",),
}
"""Files below `tests/`, and their tests by function or by function and parameters; () is all that are not `slow`."""

LONGEST_FIRST = (
    "astra_jax/rollout/test_vllm.py",
    "launch/test_sft_program.py",
    "launch/test_quickstart.py",
    "astra_jax/grpo/test_grpo.py",
    "synthesis/pipeline/test_ray_executor.py",
    "astra_jax/planner/test_planner.py",
    "launch/test_grpo_program.py",
    "launch/test_failing_starts.py",
    "astra_jax/attention/test_attention.py",
    "astra_jax/models/test_qwen3_parity.py",
    "astra_jax/test_mesh.py",
    "astra_jax/run/test_shell.py",
    "astra_jax/rollout/test_vllm_plain.py",
    "launch/test_trajectories_program.py",
    "astra_jax/run/test_hosts.py",
    "astra_jax/sft/test_sft.py",
    "launch/test_difficulty.py",
    "sandbox/test_sandbox_repeats.py",
    "astra_jax/serving/test_serving_fuzzed.py",
    "astra_jax/models/test_hf_checkpoint.py",
    "sandbox/test_sandbox_service.py",
    "sandbox/test_sandbox_soak.py",
    "launch/test_inspect_trajectories.py",
    "synthesis/servers/test_mcp_servers.py",
    "astra_jax/rollout/test_engine.py",
    "astra_jax/serving/test_serving.py",
    "astra_jax/evaluation/test_evaluation_equality.py",
    "launch/test_endings.py",
    "synthesis/trajectories/test_interaction.py",
    "astra_jax/evaluation/test_evaluation_aime.py",
)
"""As measured, whole files. All others follow as they are collected."""


def is_quick(name: str, slow: bool) -> bool:
    """Whether `--quick` runs a test.

    Args:
        name: `FILE::FUNCTION[PARAMETERS]`, the file below `tests/`.
        slow: it has the marker.
    """
    file, _, test = name.partition("::")
    if file not in QUICK:
        return False
    chosen = QUICK[file]
    return test in chosen or test.partition("[")[0] in chosen if chosen else not slow
