"""Which tests are left to a run before a release, ``python -m pytest -m slow``, so that each change waits for less.

They repeat on more models and options what others show on a few, or run compilers, several processes and scripts for
long. Of several processes, every run has sharded weights and what they share on disk; tensor parallel models, training
and fits by two processes are tested by slow tests alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

# Types of models that differ in what this package touches.
_MODELS = (
    "bamba|bloom|cohere2|deepseek_v3|falcon|gemma2|gemma3_text|gpt2|gpt_neox|gpt_oss|llama|mamba2|mixtral|opt|phi3|"
    "qwen3_next|zamba2"
)

# Tests (beginning with the file) to the ids of parameters that every run has, as an expression.
_EVERY_RUN = {
    "search/test_searching_calls.py::test_searching_changes_no_token": ".*-3",
    "test_auditing.py::test_the_right_distribution_passes": "options0",
    "test_bench.py::test_methods_that_do_not_fit_are_left_out_with_reasons": "",
    "test_bench_command.py::test_compiled_methods": "",
    "test_budget.py::test_a_given_ratio_is_no_exception": "40-.*",
    "test_budget.py::test_no_call_spends_more_than_its_share": "search1",
    "test_changing_weights.py::test_the_ids_are_those_of_the_weights_of_the_moment": ".*exit|.*skip|.*default",
    "test_command.py::test_the_package_runs_as_the_script_does": "",
    "test_compile.py::test_compiled_forwards_are_exact": "exit",
    "test_compile.py::test_graphs_find_what_the_full_model_chooses": "row",
    "test_compile.py::test_other_numbers_of_threads_are_other_graphs": "",
    "test_compile.py::test_other_parts_of_modules_are_other_graphs": "tensor",
    "test_compile.py::test_threads_make_graphs_in_turn": "",
    "test_compile.py::test_traced_forwards_are_exact": _MODELS,
    "test_entry.py::test_accelerate": "exit-.*",
    "test_entry.py::test_compiled": "exit-.*",
    "test_examples.py::test_processes_answer_their_share_and_draft_from_all_answers": "",
    "test_examples_of_training.py::test_scores_of_lm_eval": "",
    "test_exit_heads.py::test_fits_of_heads": "0.5-8|0.0-None",
    "test_exit_heads.py::test_heads_change_no_token": ".*-0.5",
    "test_export.py::test_logits_on_architectures": _MODELS,
    "test_finetune_task.py::test_two_steps_make_a_model_and_a_table": "True-False",
    "test_fitting.py::test_a_fit_of_a_probe_learns_acceptance": "False",
    "test_fitting.py::test_adapters_change_no_token": "llama|gemma3_text|gpt2|bloom|mixtral",
    "test_fitting.py::test_every_rule_ends_every_draft": ".*-(fixed|confidence)",
    "test_fitting.py::test_two_processes_fit_as_one_does": "",
    "test_free_drafts.py::test_greedy_identity": _MODELS,
    "test_free_drafts.py::test_options": "exit-ragged batch-.*",
    "test_free_drafts.py::test_other_drafts_go_on_after_free_rounds": "one row-.*",
    "test_free_sampling.py::test_a_biased_rule_is_detected": "",
    "test_free_sampling.py::test_joint_distribution_is_that_of_the_full_model": "named-.*",
    "test_free_sampling.py::test_joint_distribution_of_calls_with_one_row": "named",
    "test_free_sampling.py::test_joint_distribution_of_other_mixtures": "drawn tree and named",
    "test_free_store.py::test_what_one_process_forgets_no_other_writes_again": "",
    "test_generate_surface.py::test_chat_goes_on": "llama-.*",
    "test_generate_surface.py::test_mask_with_holes": "llama-.*",
    "test_generate_surface.py::test_processors": "(exit|tree)-ragged batch-.*",
    "test_grammar.py::test_drafts_that_were_drawn_without_the_grammar_are_exact": "",
    "test_grammar.py::test_drawn_tokens_are_exact": "early exit-Automaton",
    "test_grammar.py::test_drawn_tokens_have_the_distribution_of_the_masked_model": "",
    "test_grammar.py::test_expected_tokens_of_a_layer_draft_are_drawn_exactly": "",
    "test_grammar.py::test_ids_are_plain_generates_for_twenty_prompts": "xgrammar-.*",
    "test_images.py::test_all_kinds_of_drafts": "llava-.*",
    "test_images.py::test_tokens_are_those_of_plain_generate": ".*-ragged",
    "test_layerskip.py::test_threads_that_probe_and_threads_that_do_not_share_a_model": "",
    "test_multimodal.py::test_text_alone": ".*-3",
    "test_sampling.py::test_joint_distribution_of_compiled_forwards": "early exit",
    "test_lasting.py::test_a_killed_process_leaves_a_whole_cache": "",
    "test_lasting.py::test_the_memory_of_a_service_stays": "",
    "test_saving.py::test_findings_of_a_search_come_back": ".*-1",
    "test_stateful.py::test_drawn_tokens_are_exact": "exit",
    "test_states.py::test_found_drafts": _MODELS,
    "test_states.py::test_probed_exit": _MODELS,
    "test_tensor_parallel.py::test_drawn_tokens_follow_the_seed": "",
    "test_tensor_parallel.py::test_ids_are_those_of_one_process": "",
    "test_tensor_parallel.py::test_processes_draft_alike": "",
    "test_tensor_parallel.py::test_what_goes_by_other_clocks_or_whole_weights_is_refused": "",
    "test_training_mode.py::test_parts_run_in_the_mixed_precision_of_the_whole": "(exit|search|skip|tree)-.*",
    "test_trees.py::test_greedy_output_is_the_models_own": ".*-3",
    "test_trees.py::test_samples_have_the_models_distribution": "swift-.*",
    "train/test_precision.py::test_torch_compile": "",
    "train/test_training_distributed.py::test_early_exit_loss": "",
    "train/test_training_distributed.py::test_layer_dropout": "",
}


def mark(items: Sequence[pytest.Item], is_whole: bool) -> None:
    """Marks the slow ones.

    Args:
        items: the tests.
        is_whole: whether they are all there are, so that what names none is a mistake.

    Raises:
        pytest.UsageError: a name here is that of no test.
    """
    kept: dict[str, list[bool]] = {name: [] for name in _EVERY_RUN}
    for item in items:
        test, _, rest = item.nodeid.removeprefix("tests/").partition("[")
        if test in kept:
            kept[test].append(re.fullmatch(_EVERY_RUN[test], rest.removesuffix("]")) is not None and bool(rest))
            if not kept[test][-1]:
                item.add_marker("slow")
    wrong = [name for name, found in kept.items() if all(found) or any(found) != bool(_EVERY_RUN[name])]
    if is_whole and wrong:
        raise pytest.UsageError(f"tests/slow.py names tests, or ids of their parameters, that there are not: {wrong}")
