"""The tests mirror the library: which module each test file tests."""

from pathlib import Path

from tests.support.paths import MODULES, PACKAGE, ROOT

TESTED_THROUGH = {
    # Damaged manifests and data files of embeddings.
    "retrieval/test_embeddings.py": ["retrieval/products"],
    "retrieval/test_evaluate_retrieval.py": [
        *("retrieval/evidence", "retrieval/recall", "retrieval/questions", "retrieval/rows"),
    ],
    "retrieval/test_search_bm25.py": ["retrieval/word_index"],
    "retrieval/test_index_blocks.py": ["retrieval/faiss_index"],
    "retrieval/test_search.py": ["retrieval/searched"],
    # Data, runs and text of an estimate, against a workflow that is built.
    "estimate/test_layouts.py": ["runtime/accelerators"],
    "workflow/test_estimate.py": [
        *("estimate/data", "estimate/run", "estimate/text"),
    ],
    "run/test_run.py": ["run/snakemake_process"],
    "status/test_status.py": ["status/overview"],
    "project/test_new.py": ["project/corpora", "project/sizes", "project/texts"],
    # Parts of checkpoint formats: conversions read back what they write, in all layouts.
    "checkpoint/test_convert_grid.py": [
        "checkpoint/deepspeed/mds_pipeline/format",
        *("checkpoint/hf/config_json", "checkpoint/hf/safetensors_files"),
        *("checkpoint/megatron_model/args_writer", "checkpoint/megatron_model/module_tree"),
        *("checkpoint/megatron_model/rank_file", "checkpoint/model_tensors"),
        "checkpoint/tensors/checkpoint",
        *("models/common/hf_rope", "models/common/hf_windows", "models/common/megatron_format"),
        *("models/bert/megatron", "models/common/encoder_format"),
        "models/t5/megatron",
    ],
    "checkpoint/test_convert_optimizer_states.py": [
        *("checkpoint/deepspeed/folder", "checkpoint/megatron_model/optimizer_states"),
        "checkpoint/torch_files/torch_archive",
    ],
    "checkpoint/torch_dist/test_format.py": [
        "checkpoint/torch_dist/optimizer_reader",
        "checkpoint/torch_dist/extra_states",
        "checkpoint/megatron_model/core_names",
        *("checkpoint/torch_files/dcp_archives", "checkpoint/megatron_model/adam"),
        "checkpoint/torch_files/dcp_metadata_writer",
    ],
    "checkpoint/native/test_format.py": [
        *("checkpoint/native/dcp_storage", "checkpoint/native/folder"),
        "checkpoint/native/training_state",
    ],
    "checkpoint/torch_files/test_archive_writer.py": [
        *("checkpoint/torch_files/pickle_reader", "checkpoint/torch_files/pickle_writer"),
    ],
    # Sections of the config: a mistake in each is one line of the whole config.
    "config/test_root.py": [
        "config/data",
        "config/detoxify",
        "config/fields",
        "config/resolved_run",
    ],
    "config/test_filters.py": ["config/external_plugins"],
    "config/test_runs.py": ["config/model"],
    "config/test_objective.py": [
        *("train/objectives/_sentences", "train/objectives/span_corruption/data"),
    ],
    "config/test_optimization.py": [
        *("config/schedule", "config/train_fields", "config/training"),
    ],
    "test_csrc_text_statistics.py": ["data/filters/_characters"],
    # Parts of a stage, which its test runs on small files.
    "data/corpus/test_find_duplicates.py": [
        *("data/corpus/document_rows", "data/corpus/hash_documents"),
    ],
    "data/corpus/test_find_near_duplicates.py": [
        *("data/corpus/near_duplicate_keys", "data/corpus/near_duplicate_table"),
        *("data/corpus/sign_documents", "data/corpus/filtered_documents"),
    ],
    "data/corpus/test_find_repeats.py": [
        *("data/corpus/hash_passages", "data/tokenize/repeat_cuts"),
    ],
    "data/corpus/test_minhash.py": ["config/near_duplicates"],
    "data/corpus/test_plan.py": ["data/corpus/plan_file", "data/corpus/plan_shards"],
    "data/corpus/test_train_tokenizer.py": [
        *("data/tokenizers/trained/__init__", "data/tokenizers/trained/unigram"),
        "data/tokenizers/trained/wordpiece",
    ],
    "data/corpus/test_extend_tokenizer.py": ["data/tokenizers/_sentinels"],
    "data/indexed/test_describe.py": [
        *("data/indexed/index_reader", "data/indexed/length_histogram"),
    ],
    "data/samples/test_loader.py": ["data/samples/document_samples"],
    "data/filters/test_decontaminate.py": ["data/filters/_evaluation_sets"],
    "data/filters/test_run_and_count.py": ["data/filters/__init__"],
    "data/indexed/test_merge.py": [
        *("data/indexed/concatenate", "data/indexed/manifest", "data/indexed/merged_dataset"),
    ],
    "data/readers/test_extractor.py": ["data/readers/_extractor_process"],
    "data/readers/test_warc.py": ["data/readers/_warc_records"],
    "data/readers/test_wikipedia.py": ["data/readers/_page_cuts", "data/readers/_page_xml"],
    "data/readers/test_wikitext.py": ["data/readers/_wikitext_nesting"],
    "data/indexed/test_trace.py": ["data/indexed/document_sources"],
    "data/tokenize/test_tokenize_batch.py": [
        "data/tokenize/shard_tokenizer",
    ],
    "data/tokenize/test_tokenize.py": [
        *("data/tokenize/shard", "data/tokenize/shard_options"),
    ],
    "detoxify/test_score_texts.py": ["detoxify/scorers/column"],
    "doctor/test_communication.py": ["doctor/hosts"],
    "evaluate/test_evaluate.py": ["evaluate/perplexity"],
    "finetune/test_finetune.py": [
        *("finetune/finetune_run", "finetune/prepare_finetune"),
        "train/objectives/_epochs",
    ],
    "finetune/test_evaluate_finetuned.py": ["finetune/predictions"],
    "generate/test_generate.py": ["generate/continuations"],
    "inference/test_model.py": ["inference/layout"],
    "checkpoint/test_init_model.py": ["checkpoint/random_source"],
    "train/hooks/test_trackers.py": ["train/trackers/mlflow"],
    "report/test_try_filters.py": ["report/filter_samples", "report/filter_trial"],
    "results/test_results.py": [
        *("results/corpora", "results/finished_runs", "results/metrics_file", "results/scores"),
    ],
    "report/test_report.py": [
        *("report/corpus_tables", "report/describe_run", "report/html_pages"),
        *("report/page/assemble", "report/page/contents", "report/page/figures"),
        *(f"report/page/sections/{name}" for name in ("comparison", "evaluation", "overview")),
        *(f"report/page/sections/{name}" for name in ("provenance", "workflow")),
    ],
    "report/page/sections/test_corpora.py": ["report/page/sections/mixture"],
    "report/page/sections/test_finetuning.py": [
        *("report/page/sections/detoxification", "report/page/sections/retrieval"),
    ],
    # Plug-ins of a kind and what they share, compared with packages that others wrote.
    "data/readers/test_archive.py": ["data/readers/_tar"],
    "data/readers/test_readers.py": ["data/readers/_input", "data/readers/_records"],
    "data/readers/test_table.py": ["data/readers/arrow", "data/readers/parquet"],
    "data/tokenizers/test_fast.py": ["data/tokenizers/sentencepiece"],
    "data/tokenizers/test_byte_level.py": [
        "data/tokenizers/_exactness",
        "data/tokenizers/_fast_encoder",
        "data/tokenizers/_patterns",
    ],
    "optim/test_optim.py": ["optim/_groups"],
    "optim/test_optim_packages.py": ["optim/_schedule_free", "optim/muon"],
    "optim/test_optimizer_base.py": ["optim/adafactor"],
    # Models and layers, compared with torch and transformers.
    "models/test_family_formats.py": [
        *("models/deepseek_v2/hf", "models/deepseek_v3/hf", "models/gpt_oss/hf"),
        "models/glm4_moe/hf",
        "models/common/hf_experts",
    ],
    "models/common/test_positions.py": ["config/rope_scaling"],
    "models/llama/test_model.py": [
        *("models/common/decoder", "models/common/language_model", "models/common/layers"),
    ],
    "models/qwen3/test_model.py": ["models/common/head_norms"],
    "models/retro/test_megatron.py": ["models/retro/hf"],
    "models/retro/test_model.py": ["models/retro/chunks", "models/retro/memory"],
    "models/t5/test_model.py": ["models/common/encoder_decoder"],
    "parallel/test_context.py": [
        *("models/common/recompute", "parallel/document_mask", "parallel/score_rules"),
        *("parallel/ring_kernels", "parallel/ring"),
    ],
    "parallel/test_tensor.py": ["parallel/collectives", "parallel/sharding"],
    # Training over ranks, with each back end.
    "schedules/test_schedules.py": ["schedules/_schedule"],
    "train/checkpoints/test_resume.py": [
        "train/checkpoints/commit",
        "checkpoint/native/resume_state",
        "preflight/run_record",
    ],
    "preflight/test_initial_checkpoint.py": ["train/checkpoints/first_weights"],
    "preflight/test_run.py": ["preflight/data", "preflight/model"],
    "workflow/test_config.py": ["preflight/planned"],
    "workflow/test_detoxify.py": ["preflight/detoxify"],
    "preflight/test_initial_experts.py": [
        *("preflight/other_family", "train/backends/_initial_experts"),
    ],
    "train/test_trainer_hooks.py": ["train/hooks/__init__"],
    "train/test_trainer.py": ["train/index_sampler", "train/sampler"],
    "prove/test_comparison.py": [
        *("prove/engine_tensors", "prove/plain_training", "prove/random_samples"),
        "prove/rank_training",
    ],
    "train/test_memory.py": ["models/common/costs", "train/startup_log"],
    "train/trials/test_trial_steps.py": [
        "train/trials/benchmark_train",
    ],
    "train/backends/test_native_layouts.py": [
        *("parallel/pipeline", "train/backends/_base", "train/backends/_initial_weights"),
        *("train/backends/_checkpoints", "train/backends/native", "train/pipeline_stages"),
    ],
    "train/backends/test_deepspeed.py": ["train/backends/_deepspeed_partitions"],
    "train/backends/test_deepspeed_settings.py": [
        *("train/backends/_deepspeed_setup", "train/backends/checks/deepspeed"),
    ],
    # What is in a micro batch shows in the training on it.
    "train/objectives/masked/test_objective.py": ["train/objectives/masked/rows"],
    "train/objectives/span_corruption/test_objective.py": ["train/objectives/span_corruption/rows"],
    "test_cli.py": ["commands"],
    "test_files.py": ["temporary_names"],
    "checkpoint/test_format_protocol.py": ["plugins"],
    "serve/test_model_server.py": ["serve/engine_loop"],
    "serve/test_openai_api.py": [
        "serve/openai_replies",
        "serve/openai_requests",
        "serve/served_model",
    ],
    "serve/test_gate.py": ["serve/server_metrics"],
    "inference/test_sampling.py": ["inference/sampling_settings"],
    "evaluate/tasks/test_lm_eval.py": ["evaluate/harness_model"],
    "evaluate/tasks/test_text.py": ["evaluate/evaluate_task", "evaluate/scorer"],
    "train/objectives/ict/test_objective.py": ["train/objectives/_in_batch"],
    "train/objectives/classification/test_scoring.py": ["train/objectives/_tasks"],
    "train/objectives/ict/test_samples.py": [
        *(
            "train/objectives/ict/blocks",
            "train/objectives/ict/data",
            "train/objectives/ict/titles",
        ),
    ],
    "train/objectives/retro/test_objective.py": ["train/objectives/retro/data"],
    "train/objectives/retro/test_samples.py": ["train/objectives/retro/chunks"],
    "retrieval/test_find_neighbors.py": [
        *("retrieval/chunk_tables", "retrieval/chunk_vectors"),
        *("retrieval/chunk_texts", "retrieval/index_chunks", "retrieval/neighbors"),
    ],
    "retrieval/test_embed_blocks.py": ["retrieval/dataset_blocks", "retrieval/text_vectors"],
}
"""Modules without a test file of their name, by the test that runs them."""

NO_MODULE = [
    # The repository as a whole.
    *("test_docs.py", "test_fresh.py", "test_house.py", "test_mirror.py"),
    *("test_parameters.py", "test_private_names.py"),
    # The page, which is no module.
    "serve/test_page.py",
    # The whole workflow, end to end.
    *(f"workflow/test_{name}.py" for name in ("batches", "launchers", "mistakes", "module")),
    *(f"workflow/test_{name}.py" for name in ("pbs", "profiles", "runs", "slurm", "slurm_plugin")),
    *("workflow/test_slurm_training.py", "workflow/test_encoders.py", "workflow/test_images.py"),
    # Snakemake with the whole PBS executor.
    *("pbs_executor/test_bundles.py", "pbs_executor/test_groups.py"),
    "pbs_executor/test_packages.py",
    # All families; two hosts.
    *("models/test_family_formats.py", "models/test_packed_documents.py"),
    *("models/test_families.py", "models/test_new_family.py", "models/test_family_refusals.py"),
    "models/test_published_sizes.py",
    "train/test_two_hosts.py",
    # Each layout, with both back ends.
    "train/backends/test_traffic.py",
]
"""Tests that no module of the library names."""
OTHER_FOLDERS = {
    "pbs_executor": ROOT / "lib/snakemake_executor_plugin_pbs",
    "pbs_executor/base": ROOT / "lib/snakemake_executor_plugin_pbs/base",
    "sbatch_executor": ROOT / "lib/snakemake_executor_plugin_sbatch",
    "benchmarks": ROOT / "benchmarks",
    "support": ROOT / "tests/support",
}
"""Folders of tests that mirror another folder than their own name says."""
TESTS = ROOT / "tests"


def test_each_module_of_60_lines_has_a_test_file_of_its_name() -> None:
    exceptions = [PACKAGE / f"{name}.py" for names in TESTED_THROUGH.values() for name in names]
    assert all((TESTS / path).exists() for path in TESTED_THROUGH)
    long = {path for path in MODULES if len(path.read_text().splitlines()) >= 60}
    assert {path for path in long if not mirror(path).exists()} == set(exceptions)
    assert len(exceptions) == len(set(exceptions))


def mirror(path: Path) -> Path:
    """The test file of a module; that of a package has the name of its folder."""
    name = path.parent.name if path.stem == "__init__" else path.stem.removeprefix("_")
    return TESTS / path.parent.relative_to(PACKAGE) / f"test_{name}.py"


def test_each_test_file_names_a_module_or_a_folder() -> None:
    paths = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}
    assert {path for path in paths if not names_a_module(Path(path))} == set(NO_MODULE)


def names_a_module(test: Path) -> bool:
    """Whether a test is called test_<module>.py or test_<module>_<subject>.py."""
    folder = OTHER_FOLDERS.get(str(test.parent), PACKAGE / test.parent)
    names = {path.stem.removeprefix("_") for path in [*folder.glob("*.py"), *folder.glob("*/")]}
    names |= {folder.name, "csrc"}  # lib/csrc
    subject = test.stem.removeprefix("test_")
    return any(f"{subject}_".startswith(f"{name}_") for name in names if name)
