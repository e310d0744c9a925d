"""The laws of the house that a machine can hold."""

import ast
import inspect
import re
import tomllib
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.sources import EXECUTOR, MODULES, PACKAGE, RULES, SNAKEFILE, name_of
from tokamake import cli, plugins
from tokamake.config.data import TokenizeSettings
from tokamake.config.training import INDEX_SETTINGS, TrainSettings
from tokamake.data.samples.index import index
from tokamake.data.tokenize.tokenize_batch import tokenize_batch
from tokamake.workflow.data import DataRules

COMMANDS = cli.COMMANDS
STAGES, TOOLS = cli.commands(cli.STAGES), cli.commands(cli.TOOLS)

# Rules without a command: targets, and the report, which Snakemake writes.
NO_COMMAND = {"all", "data", "report"}
# Rules whose command has another name.
OTHER_NAME = {
    **{"fetch": "fetch_batch", "tokenize": "tokenize_batch", "merge": "merge_batch"},
    **{"fetch_weights": "fetch", "import_checkpoint": "convert", "export_hf": "convert"},
}


def rules() -> dict[str, str]:
    """Rule name to its text."""
    parts = re.split(
        r"^\s*(?:rule|checkpoint) (\w+):\n", SNAKEFILE + "\n" + RULES, flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands() -> dict[str, str]:
    """Rule name to the stage that it runs."""
    stages = {cli.function_name(stage): stage for stage in STAGES}
    return {name: stages[OTHER_NAME.get(name, name)] for name in set(rules()) - NO_COMMAND}


def test_one_rule_one_subcommand_one_function() -> None:
    assert set(commands().values()) == set(STAGES)
    for name, stage in commands().items():
        assert re.search(rf"\btokamake {stage}\b", rules()[name])


@pytest.mark.parametrize("command", COMMANDS)
def test_one_subcommand_one_function(command: str) -> None:
    module, name = cli.module_name(command), cli.function_name(command)
    assert module.rpartition(".")[2] == name
    assert callable(getattr(import_module(module), name))


def test_tools_are_commands_without_a_rule() -> None:
    # `plan` is one: each reading of the workflow makes the plan, the main process writes it down.
    assert not set(TOOLS) & set(STAGES)
    for tool in TOOLS:
        assert not re.search(rf"\btokamake {tool}(?![-\w])", SNAKEFILE + RULES)


@pytest.mark.parametrize("name", rules())
def test_shape_of_rules(name: str) -> None:
    text = rules()[name]
    sentence = text.strip().splitlines()[0]
    assert re.fullmatch(r'"[A-Z].{20,}\."', sentence), sentence
    if name not in {"all", "data"}:
        for directive in ("output:", "log:", "benchmark:", "shell:"):
            assert directive in text
        assert "run:" not in re.findall(r"^\s+(\w+:)$", text, flags=re.MULTILINE)
        assert "script:" not in text


def test_options_of_a_rule_exist() -> None:
    for name, stage in commands().items():
        function = getattr(import_module(cli.module_name(stage)), cli.function_name(stage))
        known = {
            option
            for each in inspect.signature(function).parameters.values()
            for option in names_of(each)
        }
        shell = rules()[name].partition("shell:")[2].partition("\n\n")[0]
        for option in re.findall(r"--[a-z][a-z-]+", shell):
            assert option in known, f"{stage} has no {option}"


def names_of(parameter: inspect.Parameter) -> list[str]:
    """Options for a parameter on the command line."""
    aliases = [each.name for each in getattr(parameter.annotation, "__metadata__", ())]
    return [f"--{parameter.name.replace('_', '-')}", *(name for group in aliases for name in group)]


def test_options_from_the_config_exist() -> None:
    known = set(inspect.signature(tokenize_batch).parameters)
    text = inspect.getsource(DataRules.corpus_options)
    of_corpora = {option.replace("-", "_") for option in re.findall(r"--([a-z-]+)=", text)}
    assert of_corpora == {"text_key", "template", "format"}
    left_out = re.findall(r"options\(CONFIG.shared.tokenize, leave_out=\(\"(\w+)\",\)\)", RULES)
    assert left_out == ["deduplicate"]
    assert of_corpora | set(TokenizeSettings.model_fields) - set(left_out) <= known


@pytest.mark.parametrize("path", MODULES + EXECUTOR, ids=name_of)
def test_modules_and_longer_functions_have_docstrings(path: Path) -> None:
    tree = ast.parse(path.read_text())
    docstring = ast.get_docstring(tree)
    assert docstring
    assert 1 <= len(docstring.splitlines()) <= 12
    members = [each for node in tree.body if isinstance(node, ast.ClassDef) for each in node.body]
    for node in [*tree.body, *members]:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            # A short function with a good name needs no sentence that repeats the name.
            is_short = (node.end_lineno or 0) - node.lineno < 8
            assert is_short or ast.get_docstring(node), f"{path}:{node.lineno} {node.name}"


@pytest.mark.parametrize("path", MODULES + EXECUTOR, ids=name_of)
def test_functions_stay_small(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            # The docstring does not count: a stage's options are documented there.
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            length = (node.end_lineno or 0) - body[0].lineno
            assert length < 60, f"{path}:{node.lineno} {node.name}"
            keywords, positional = node.args.kwonlyargs, node.args.posonlyargs + node.args.args
            plain = [argument for argument in positional if argument.arg not in ("self", "cls")]
            # A command has an option for each thing a user can say; other functions at most seven.
            if node.name not in map(cli.function_name, COMMANDS):
                assert len(plain) + len(keywords) <= 7, f"{path}:{node.lineno} {node.name}"


def test_settings_of_the_index_exist() -> None:
    known = set(inspect.signature(index).parameters)
    assert set(INDEX_SETTINGS) <= known & set(TrainSettings.model_fields)
    text = inspect.getsource(DataRules.sample_options)
    options = {option.replace("-", "_") for option in re.findall(r"--([a-z-]+)=", text)}
    assert options == {"train_samples", "valid_samples", "epochs"}
    assert options | {"held_out"} <= known


def imports(path: Path) -> set[str]:
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.partition(".")[0])
    return packages


def name_of_module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_modules_import_each_other_in_no_circle() -> None:
    modules = {name_of_module(path): path for path in MODULES}
    graph = {
        name: {
            imported
            for node in ast.walk(ast.parse(path.read_text()))  # imports in functions too
            if isinstance(node, ast.ImportFrom) and node.module
            for alias in node.names
            for imported in [f"{node.module}.{alias.name}", node.module]
            if imported in modules and imported != name
            if imported != node.module or not _is_module(alias, node)
        }
        for name, path in modules.items()
    }
    TopologicalSorter(graph).prepare()  # raises CycleError


def _is_module(alias: ast.alias, node: ast.ImportFrom) -> bool:
    """Whether `from package import name` imports a module of the package."""
    path = PACKAGE.parent / f"{node.module}.{alias.name}".replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


def test_some_packages_are_imported_in_one_place() -> None:
    users = {"deepspeed": set(), "mpi4py": set(), "snakemake": set()}
    for path in MODULES:
        for package in imports(path) & set(users):
            users[package].add(str(path.relative_to(PACKAGE)))
    of_deepspeed = users.pop("deepspeed")
    assert of_deepspeed
    assert all(path.startswith("train/backends/") for path in of_deepspeed)
    assert users == {
        "mpi4py": {"runtime/ranks.py"},
        "snakemake": {"workflow/snakemake_internals.py"},
    }


def test_the_executor_is_a_package_of_its_own() -> None:
    assert EXECUTOR
    for path in EXECUTOR:
        assert not imports(path) & {"tokamake", "snakemake"}, path


def test_the_library_names_no_profile() -> None:
    for path in MODULES:
        for line in path.read_text().splitlines():
            assert "profiles/" not in line or path.name == "cli.py", f"{path}: {line}"


def test_every_plug_in_has_its_functions() -> None:
    for folder, names in {
        "models/*/hf": ["shapes"],
        "checkpoint/**/format": [
            *("find", "list_files", "open_checkpoint", "lay_out", "archives", "warnings")
        ],
        "optim": ["build"],
        "schedules": ["factor"],
        "train/backends/checks": ["check_settings", "check_run"],
        "models/*/model": ["Model"],
        "models/*/megatron": ["fields", "arguments", "inexpressible"],
        "models/*/memory": ["flops_per_token", "saved_activations"],
        "data/readers": ["accepts", "read"],
        "data/tokenizers": ["files", "load"],
    }.items():
        assert plugins.names(folder)
        for name in plugins.names(folder):
            module = plugins.load(folder, name)
            assert all(callable(getattr(module, wanted, None)) for wanted in names), (folder, name)


def test_every_back_end_has_checks() -> None:
    assert plugins.names("train/backends/checks") == plugins.names("train/backends")


@pytest.mark.parametrize("part", ["hf", "megatron", "memory"])
def test_every_family_has_every_part(part: str) -> None:
    assert plugins.names(f"models/*/{part}") == plugins.names("models/*/model")


def test_profiles_have_a_launch_script() -> None:
    profiles = sorted(path for path in (ROOT / "profiles").iterdir() if path.is_dir())
    assert "local" in {path.name for path in profiles}
    for profile in profiles:
        assert (profile / "launch.sh").stat().st_mode & 0o111
        assert f"profiles/{profile.name}/launch.sh" in (profile / "profile.yaml").read_text()
    assert "default" not in {path.name for path in profiles}  # it would override every other


TESTED_THROUGH = {
    # Parts of checkpoint formats: conversions read back what they write, in all layouts.
    "checkpoint/test_convert_grid.py": [
        *("checkpoint/deepspeed/mds_pipeline/format", "checkpoint/deepspeed/pipeline"),
        *("checkpoint/hf/config_json", "checkpoint/hf/safetensors_files"),
        *("checkpoint/megatron_model/args_writer", "checkpoint/megatron_model/module_tree"),
        *("checkpoint/megatron_model/rank_file", "checkpoint/model_tensors"),
        "checkpoint/tensors/checkpoint",
        *("models/common/hf_format", "models/common/megatron_format", "models/gpt/megatron"),
    ],
    "checkpoint/test_convert_optimizer_states.py": [
        *("checkpoint/deepspeed/folder", "checkpoint/megatron_model/optimizer_states"),
        "checkpoint/torch_files/torch_archive",
    ],
    "checkpoint/megatron_model/test_model_arguments.py": ["checkpoint/megatron_model/args_reader"],
    "checkpoint/torch_dist/test_format.py": [
        *("checkpoint/torch_dist/common_state", "checkpoint/torch_dist/optimizer_reader"),
        *("checkpoint/torch_files/dcp_archives", "checkpoint/megatron_model/adam"),
        "checkpoint/torch_files/dcp_metadata_writer",
    ],
    "checkpoint/native/test_format.py": [
        *("checkpoint/native/archive_tensors", "checkpoint/native/dcp_reader"),
        *("checkpoint/native/folder", "checkpoint/native/training_state"),
    ],
    "checkpoint/torch_files/test_archive_writer.py": [
        *("checkpoint/torch_files/pickle_reader", "checkpoint/torch_files/pickle_writer"),
    ],
    # Sections of the config: a mistake in each is one line of the whole config.
    "config/test_root.py": ["config/data", "config/fields", "config/resolved_run"],
    "config/test_runs.py": ["config/model"],
    "config/test_optimization.py": ["config/schedule", "config/training"],
    # Parts of a stage, which its test runs on small files.
    "data/corpus/test_find_duplicates.py": [
        *("data/corpus/document_rows", "data/corpus/hash_documents"),
    ],
    "data/corpus/test_plan.py": ["data/corpus/plan_file", "data/corpus/plan_shards"],
    "data/corpus/test_train_tokenizer.py": ["data/tokenizers/_trainers"],
    "data/indexed/test_describe.py": [
        *("data/indexed/index_reader", "data/indexed/length_histogram"),
    ],
    "data/indexed/test_linked_dataset.py": ["data/indexed/merge_batch"],
    "data/indexed/test_merge.py": [
        *("data/indexed/concatenate", "data/indexed/manifest", "data/indexed/merge_groups"),
        "data/indexed/merged_dataset",
    ],
    "data/indexed/test_trace.py": ["data/indexed/document_sources"],
    "data/mixture/test_lint_weights.py": ["data/indexed/token_counts"],
    "data/tokenize/test_tokenize_batch.py": [
        *("data/corpus/stamps", "data/tokenize/shard_tokenizer"),
    ],
    "data/tokenize/test_tokenize.py": ["data/tokenize/document_batch", "data/tokenize/shard"],
    "doctor/test_communication.py": ["doctor/hosts", "doctor/watch"],
    "evaluate/test_evaluate.py": ["evaluate/held_out", "evaluate/perplexity"],
    "generate/test_generate.py": ["generate/decoding"],
    "report/test_figures.py": [
        *("report/length_figure", "report/metrics_history", "report/mixture", "report/style"),
    ],
    "report/test_plot.py": ["report/html_pages", "report/tables"],
    "status/test_status.py": ["status/training"],
    # Plug-ins of a kind and what they share, compared with packages that others wrote.
    "data/readers/test_readers.py": ["data/readers/_input", "data/readers/_records"],
    "data/readers/test_table.py": ["data/readers/arrow", "data/readers/parquet"],
    "data/tokenizers/test_byte_level.py": [
        *("data/tokenizers/_character_classes", "data/tokenizers/_unicode_differences"),
    ],
    "data/tokenizers/test_gigatoken.py": ["data/tokenizers/_exactness"],
    "data/tokenizers/test_tokenizers.py": ["data/tokenizers/_fast"],
    "optim/test_optim.py": ["optim/_groups", "optim/adopt"],
    "optim/test_optim_packages.py": ["optim/muon"],
    "optim/test_optimizer_base.py": ["optim/adafactor", "optim/lamb", "optim/schedule_free_adamw"],
    # Models and layers, compared with torch and transformers.
    "models/llama/test_model.py": ["models/common/language_model", "models/common/layers"],
    "parallel/test_context.py": [
        *("models/common/recompute", "parallel/attention", "parallel/kernels", "parallel/ring"),
    ],
    "parallel/test_tensor.py": ["parallel/collectives", "parallel/sharding"],
    # Training over ranks, with each back end.
    "train/test_trainer.py": ["train/validation"],
    "train/checkpoints/test_resume.py": [
        "train/checkpoints/resume_state",
        "train/checkpoints/run_digest",
    ],
    "train/test_memory.py": ["models/common/activation_memory", "train/startup_log"],
    "train/trials/test_trial_steps.py": [
        "train/trials/benchmark_train",
        "train/trials/find_learning_rate",
    ],
    "train/backends/test_native_layouts.py": [
        *("parallel/pipeline", "train/backends/_base", "train/backends/native"),
        "train/pipeline_stages",
    ],
    "train/backends/test_deepspeed.py": ["train/backends/_deepspeed_partitions"],
    "train/backends/test_deepspeed_settings.py": [
        *("train/backends/_deepspeed_setup", "train/backends/checks/deepspeed"),
    ],
    "checkpoint/test_format_protocol.py": ["plugins"],
}
"""Modules without a test file of their name, by the test that runs them."""

NO_MODULE = [
    # The repository as a whole.
    *("test_docs.py", "test_fresh.py", "test_house.py", "test_parameters.py"),
    "test_private_names.py",
    # The whole workflow, end to end.
    *(f"workflow/test_{name}.py" for name in ("batches", "launchers", "mistakes", "module")),
    *(f"workflow/test_{name}.py" for name in ("pbs", "profiles", "runs", "slurm")),
    "workflow/test_slurm_training.py",
    # Snakemake with the whole PBS executor.
    *("pbs_executor/test_bundles.py", "pbs_executor/test_groups.py"),
    # All families; two hosts.
    *("models/test_packed_documents.py", "train/test_two_hosts.py"),
]
"""Tests that no module of the library names."""
OTHER_FOLDERS = {
    "pbs_executor": ROOT / "lib/snakemake_executor_plugin_pbs",
    "sbatch_executor": ROOT / "lib/snakemake_executor_plugin_sbatch",
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


def test_pip_knows_the_names_of_extras() -> None:
    """pip installs nothing for an extra whose name has an underscore, and only warns."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in project["optional-dependencies"]:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
