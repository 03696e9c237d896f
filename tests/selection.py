"""Which tests `--quick` runs, which files start first, and which files only `--nightly` runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

QUICK: dict[str, tuple[str, ...]] = {
    # What catches most: the layers, the records, and each contract once.
    "test_architecture.py": (),
    "test_names.py": (),
    "test_paths.py": (),
    "test_selection.py": (),
    "test_settings.py": (),
    "synthesis/core/test_chat_format.py": (),
    "synthesis/core/test_chat_formats.py": (
        "test_rendered_text_is_byte_equal_to_the_models_template",
        "test_no_text_opens_or_closes_anything",
    ),
    "synthesis/core/test_datasets.py": (),
    "synthesis/core/test_matching.py": (),
    "synthesis/core/test_reward.py": (),
    "synthesis/core/test_rewards.py": (),
    "astra_jax/grpo/test_own_environments.py": ("test_an_episode_of_an_object",),
    "synthesis/core/test_stages.py": (),
    "synthesis/astra_format/test_astra_records.py": (),
    "synthesis/astra_format/test_astra_sft.py": (),
    "synthesis/offline/test_grammar.py": (),
    "synthesis/pipeline/test_prompts.py": (),
    "synthesis/core/test_schemas.py": (),
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
    "astra_jax/base/test_http_service.py": (
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
    "astra_jax/models/test_parity.py": (
        "test_logits_and_gradients_equal_hugging_face[qwen3, untied]",
        "test_logits_and_gradients_equal_hugging_face[llama]",
        "test_logits_and_gradients_equal_hugging_face[qwen2]",
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
    "astra_jax/grpo/test_journal.py": (
        "test_episodes_come_back_as_they_were",
        "test_what_others_drew_is_dropped_and_counted",
    ),
    "astra_jax/run/test_preemption.py": (),
    "astra_jax/grpo/test_losses.py": (),
    "astra_jax/grpo/test_async_rollouts.py": (),
    "astra_jax/grpo/test_grpo.py": ("test_bad_configs_are_refused",),
    "astra_jax/grpo/test_packing.py": (),
    "astra_jax/rollout/test_engine.py": (
        "test_sampler_logprobs_equal_trainer_logprobs",
        "test_a_request_does_not_depend_on_its_neighbours",
        "test_an_update_swaps_the_weights_of_what_is_under_way",
    ),
    "astra_jax/rollout/test_stream.py": (),
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

SECONDS: dict[str, float] = {
    "drill/test_drill.py": 138,
    "launch/test_quickstart.py": 105,
    "astra_jax/rollout/test_vllm.py": 99,
    "launch/test_pretrained.py": 88,
    "astra_jax/grpo/test_grpo.py": 80,
    "launch/test_local_recipe.py": 73,
    "launch/test_sft_program.py": 70,
    "jobs/test_job_serving.py": 60,
    "astra_jax/run/test_moments.py": 60,
    "astra_jax/rollout/test_engine_on_accelerators.py": 53,
    "astra_jax/sft/test_sft.py": 53,
    "astra_jax/run/test_hosts.py": 49,
    "astra_jax/models/test_quantized.py": 47,
    "astra_jax/run/test_trainer.py": 47,
    "astra_jax/base/test_leases.py": 44,
    "astra_jax/run/test_live_bytes.py": 43,
    "astra_jax/models/test_adapters.py": 41,
    "astra_jax/sft/test_step_collectives.py": 41,
    "synthesis/pipeline/test_ray_machines.py": 40,
    "astra_jax/rollout/test_vllm_plain.py": 37,
    "astra_jax/evaluation/test_evaluation_bfcl.py": 34,
    "astra_jax/models/test_parity.py": 34,
    "astra_jax/sft/test_epochs.py": 34,
    "launch/test_grpo_program.py": 34,
    "astra_jax/rollout/test_engine.py": 32,
    "astra_jax/run/test_hosts_asked.py": 32,
    "astra_jax/attention/test_attention.py": 31,
    "astra_jax/serving/test_serving_fuzzed.py": 31,
    "astra_jax/sft/test_row_buckets.py": 31,
    "astra_jax/sft/test_rehearsal.py": 30,
    "astra_jax/test_mesh.py": 30,
    "launch/test_inspect.py": 28,
    "astra_jax/sft/test_sft_lora.py": 27,
    "launch/test_failing_starts.py": 27,
    "sandbox/test_sandbox_service.py": 27,
    "astra_jax/run/test_checkpoints.py": 26,
    "launch/test_watched_buckets.py": 26,
    "astra_jax/models/test_grouped.py": 25,
    "astra_jax/models/test_hf_checkpoint.py": 25,
    "astra_jax/planner/test_slices.py": 25,
    "launch/test_cli.py": 25,
    "test_packages.py": 25,
    "astra_jax/grpo/test_held_out.py": 24,
    "synthesis/offline/test_worlds_offline.py": 24,
    "synthesis/servers/test_mcp_servers.py": 24,
    "astra_jax/evaluation/test_evaluation_aime.py": 23,
    "launch/test_difficulty.py": 23,
    "launch/test_endings.py": 23,
    "launch/test_rehearse.py": 23,
    "astra_jax/run/test_moving.py": 22,
    "astra_jax/grpo/test_grpo_lora.py": 21,
    "astra_jax/grpo/test_journal.py": 21,
    "astra_jax/grpo/test_replay.py": 21,
    "sandbox/test_sandbox_pool.py": 21,
    "astra_jax/grpo/test_own_environments.py": 20,
    "astra_jax/models/test_gguf.py": 20,
    "astra_jax/rollout/test_vllm_families.py": 20,
    "launch/test_lora_program.py": 20,
    "launch/test_pages.py": 20,
    "synthesis/core/test_hostile_text.py": 20,
    "synthesis/trajectories/test_on_an_endpoint.py": 20,
    "launch/test_exports.py": 19,
    "astra_jax/serving/test_serving.py": 18,
    "astra_jax/sft/test_data.py": 18,
    "test_patterns.py": 17,
    "synthesis/core/test_final_answers.py": 16,
    "test_scheduling.py": 15,
    "astra_jax/serving/test_serving_program.py": 13,
    "astra_jax/run/test_host_watch.py": 12,
    "synthesis/offline/test_informative.py": 12,
    "test_selection.py": 12,
    "astra_jax/models/test_peft_merge.py": 11,
    "astra_jax/test_added_tokens.py": 11,
    "launch/test_auto.py": 11,
    "synthesis/core/test_endpoint_dialects.py": 11,
    "astra_jax/run/test_optimizers.py": 10,
    "launch/test_evaluate.py": 10,
}
"""Seconds that the longest files take of one worker by day; the longest is begun first. All others follow as they are
collected. A whole run says which are missing here, or wrong."""

LONG = 10.0
"""Seconds from which a file belongs there."""
BUDGET = 1_600.0
"""Seconds that the tests of a day may take of all workers together: three on two cores end after ten minutes then, of
which collecting takes one."""

NIGHTLY: frozenset[str] = frozenset(
    {
        # Synthesis over machines, and over hours.
        "launch/test_ray_program.py",
        "synthesis/pipeline/test_ray_machines.py",
        "synthesis/pipeline/test_chaos.py",
        "synthesis/pipeline/test_noise.py",
        "astra_jax/base/test_leases.py",
        "synthesis/servers/test_popular_servers.py",
        "sandbox/test_sandbox_repeats.py",
        "sandbox/test_sandbox_soak.py",
        # Whole topologies and their faults.
        "drill/test_drill.py",
        "launch/test_local_recipe.py",
        "launch/test_watched_buckets.py",
        "launch/test_failing_starts.py",
        "astra_jax/run/test_hosts.py",
        "astra_jax/run/test_hosts_asked.py",
        "astra_jax/run/test_moving.py",
        # What compilers for TPUs and GPUs make of our programs, and what they hold.
        "astra_jax/attention/test_cache.py",
        "astra_jax/attention/test_gathered_rows.py",
        "astra_jax/planner/test_search.py",
        "astra_jax/planner/test_slices.py",
        "astra_jax/rollout/test_decode_floor.py",
        "astra_jax/rollout/test_engine_on_accelerators.py",
        "astra_jax/run/test_live_bytes.py",
        "astra_jax/sft/test_row_buckets.py",
        "astra_jax/sft/test_step_collectives.py",
        "launch/test_auto_on_slices.py",
        # Options beside the defaults, and programs that most runs do without.
        "astra_jax/grpo/test_grpo_lora.py",
        "astra_jax/models/test_bfloat16_on_cpus.py",
        "astra_jax/models/test_grouped.py",
        "astra_jax/models/test_quantized.py",
        "astra_jax/rollout/test_engine_families.py",
        "astra_jax/rollout/test_engine_options.py",
        "astra_jax/rollout/test_engine_stored.py",
        "astra_jax/rollout/test_vllm.py",
        "astra_jax/rollout/test_vllm_families.py",
        "astra_jax/rollout/test_vllm_plain.py",
        "astra_jax/rollout/test_vllm_tpu.py",
        "astra_jax/run/test_moments.py",
        "astra_jax/serving/test_serving_fuzzed.py",
        "astra_jax/sft/test_rehearsal.py",
        "astra_jax/sft/test_sft_lora.py",
        "launch/test_difficulty.py",
        "launch/test_exports_vllm.py",
        "launch/test_lora_program.py",
        "launch/test_own_data.py",
        "launch/test_peft_programs.py",
        "launch/test_plain_chat_program.py",
        "launch/test_pretrained.py",
        "launch/test_rehearse.py",
        # Benchmarks, and their own harnesses.
        "astra_jax/evaluation/test_evaluation_acebench.py",
        "astra_jax/evaluation/test_evaluation_aime.py",
        "astra_jax/evaluation/test_evaluation_bfcl.py",
        "astra_jax/evaluation/test_evaluation_equality.py",
        "astra_jax/evaluation/test_evaluation_tau2.py",
        "benchmarks/test_async_arms.py",
        "benchmarks/test_growth.py",
        "benchmarks/test_imperfect_endpoint.py",
        "benchmarks/test_peers.py",
        "benchmarks/test_processes.py",
        "benchmarks/test_rl_simulation.py",
    }
)
"""Files below `tests/` that cost much, find little and test what few changes touch. Further cases of tests in other
files have the mark `nightly`; see `by_day`."""


def by_day(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return the cases of a test as parameters, all but the chosen ones marked `nightly`.

    Args:
        cases: each the value of one parameter, or a tuple with those of several.
        chosen: the cases that are run by day: each contract once.
    """
    cases = list(cases)
    assert all(one in cases for one in chosen), "a case that is chosen is not among them"
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in chosen else pytest.mark.nightly)
        for one in cases
    ]


def unlisted(seconds: Mapping[str, float]) -> list[str]:
    """Return what is to be written into `SECONDS`: a file that is as long and lacks there, or takes twice what it says.

    Args:
        seconds: what files took.
    """
    wrong = {file: took for file, took in seconds.items() if took >= max(LONG, 2 * SECONDS.get(file, 0))}
    return [f'"{file}": {took:.0f}' for file, took in sorted(wrong.items(), key=lambda one: -one[1])]


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
