"""The laws of the house that a machine can hold."""

import ast
import gc
import inspect
import io
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path
from string import Formatter
from types import SimpleNamespace

import pytest
from snakemake.parser import parse

from tests.support.paths import EXECUTOR, MODULES, PACKAGE, ROOT, RULES, SNAKEFILE
from tokamake import commands as subcommands
from tokamake import plugins
from tokamake.config.data import TokenizeSettings
from tokamake.config.near_duplicates import NearDuplicateSettings
from tokamake.config.repeats import RepeatSettings
from tokamake.config.training import INDEX_SETTINGS, TrainSettings
from tokamake.data.corpus.hash_passages import hash_passages
from tokamake.data.corpus.sign_documents import sign_documents
from tokamake.data.samples.index import index
from tokamake.data.tokenize.tokenize_batch import tokenize_batch
from tokamake.workflow.data import DataRules
from tokamake.workflow.samples import SampleRules

COMMANDS = subcommands.COMMANDS
STAGES, TOOLS = subcommands.commands(subcommands.STAGES), subcommands.commands(subcommands.TOOLS)

# Rules without a command: targets.
TARGETS = {"all", "data", "detoxify", "retrieval"}
NO_COMMAND = {*TARGETS}
# Rules whose command has another name.
OTHER_NAME = {
    **{"fetch": "fetch_batch", "tokenize": "tokenize_batch", "merge": "merge_batch"},
    **{"fetch_weights": "fetch", "import_checkpoint": "convert", "export_hf": "convert"},
    "export_finetuned": "convert",
}


def rules() -> dict[str, str]:
    """Rule name to its text."""
    parts = re.split(
        r"^\s*(?:rule|checkpoint) (\w+):\n", SNAKEFILE + "\n" + RULES, flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def commands() -> dict[str, str]:
    """Rule name to the stage that it runs."""
    stages = {subcommands.function_name(stage): stage for stage in STAGES}
    return {name: stages[OTHER_NAME.get(name, name)] for name in set(rules()) - NO_COMMAND}


def test_one_rule_one_subcommand_one_function() -> None:
    assert set(commands().values()) == set(STAGES)
    for name, stage in commands().items():
        assert re.search(rf"\btokamake {stage}\b", rules()[name])


@pytest.mark.parametrize("command", COMMANDS)
def test_one_subcommand_one_function(command: str) -> None:
    module, name = subcommands.module_name(command), subcommands.function_name(command)
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
    if name not in TARGETS:
        for directive in ("output:", "log:", "benchmark:", "shell:"):
            assert directive in text
        assert "run:" not in re.findall(r"^\s+(\w+:)$", text, flags=re.MULTILINE)
        assert "script:" not in text


def shells(text: str) -> dict[str, str]:
    """Shell command of each rule of a Snakefile, as Snakemake's own parser reads it."""
    source = SimpleNamespace(get_path_or_uri=lambda **_: "Snakefile")
    workflow = SimpleNamespace(sourcecache=SimpleNamespace(open=lambda _: io.StringIO(text)))
    code, _ = parse(source, workflow, {})
    return {
        function.name.removeprefix("__rule_"): ast.literal_eval(call.args[0])
        for function in ast.walk(ast.parse(code))
        if isinstance(function, ast.FunctionDef)
        for call in function.decorator_list
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "workflow.shellcmd"
    }


def unquoted(shell: str) -> list[str]:
    """Fields of a shell command that Snakemake does not quote."""
    fields = [(name, spec) for _, name, spec, _ in Formatter().parse(shell) if name]
    return [name for name, spec in fields if spec != "q"]


def test_shell_commands_quote_every_value() -> None:
    # Names come from repositories, archives and tables of strangers. Shell words of a profile
    # and numbers are the only values that the shell may read.
    known = {"threads", *(f"resources.{name}" for name in ("launch", "nodes", "tasks", "restarts"))}
    commands = {
        name: shell
        for path in sorted((ROOT / "workflow").rglob("*.smk"))
        for name, shell in shells(path.read_text()).items()
    }
    assert set(commands) == set(rules()) - TARGETS
    for name, shell in commands.items():
        assert set(unquoted(shell)) <= known, f"rule {name}"


def test_the_package_names_no_page_that_does_not_exist() -> None:
    # A page is named once the package is published.
    assert "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_options_of_a_rule_exist() -> None:
    for name, stage in commands().items():
        function = getattr(
            import_module(subcommands.module_name(stage)), subcommands.function_name(stage)
        )
        known = {
            option
            for each in inspect.signature(function).parameters.values()
            for option in names_of(each)
        }
        shell = rules()[name].partition("shell:")[2].partition("\n\n")[0]
        for option in re.findall(r"--[a-z][a-z-]+", shell):
            assert option in known, f"{stage} has no {option}"


def names_of(parameter: inspect.Parameter) -> list[str]:
    """Options for a parameter on the command line; a dataclass has one for each field."""
    if is_dataclass(parameter.annotation):
        return [f"--{each.name.replace('_', '-')}" for each in fields(parameter.annotation)]
    aliases = [each.name for each in getattr(parameter.annotation, "__metadata__", ())]
    return [f"--{parameter.name.replace('_', '-')}", *(name for group in aliases for name in group)]


def test_options_from_the_config_exist() -> None:
    known = set(inspect.signature(tokenize_batch).parameters)
    text = inspect.getsource(DataRules.corpus_options)
    of_corpora = {option.replace("-", "_") for option in re.findall(r"--([a-z-]+)=", text)}
    assert of_corpora == {"text_key", "template", "format"}
    (names,) = re.findall(r"options\(\s*CONFIG.shared.tokenize,\s*leave_out=\((.*?)\)", RULES)
    left_out = re.findall(r'"(\w+)"', names)
    assert left_out == ["deduplicate", "near_duplicates", "repeats", "filters", "filter_seconds"]
    assert of_corpora | set(TokenizeSettings.model_fields) - set(left_out) <= known
    known = set(inspect.signature(sign_documents).parameters)
    assert set(NearDuplicateSettings.model_fields) - {"scope", "against"} <= known
    known = set(inspect.signature(hash_passages).parameters)
    assert set(RepeatSettings.model_fields) - {"scope"} <= known


Nodes = dict[Path, list[ast.AST]]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Nodes of the syntax tree of each module; the first one is the module."""
    gc.disable()  # to look through the trees would take as long as to make them
    yield {path: [*ast.walk(ast.parse(path.read_text()))] for path in MODULES + EXECUTOR}
    gc.enable()


def test_modules_and_longer_functions_have_docstrings(nodes: Nodes) -> None:
    for path in MODULES + EXECUTOR:
        tree = nodes[path][0]
        assert isinstance(tree, ast.Module)
        docstring = ast.get_docstring(tree)
        assert docstring, path
        assert 1 <= len(docstring.splitlines()) <= 12, path
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in [*tree.body, *(each for owner in classes for each in owner.body)]:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                # A short function with a good name needs no sentence that repeats the name.
                is_short = (node.end_lineno or 0) - node.lineno < 8
                assert is_short or ast.get_docstring(node), f"{path}:{node.lineno} {node.name}"


def test_docstrings_begin_with_a_noun_or_a_verb(nodes: Nodes) -> None:
    """Also those of attributes and constants. "What" and "Of" hide the noun."""
    for path in MODULES + EXECUTOR:
        for node in nodes[path]:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = str(node.value.value)
                assert not text.startswith(("What ", "Of ")), f"{path}:{node.lineno} {text}"


def test_functions_stay_small(nodes: Nodes) -> None:
    for path in MODULES + EXECUTOR:
        for node in nodes[path]:
            if isinstance(node, ast.FunctionDef):
                assert_small(node, f"{path}:{node.lineno} {node.name}")


def assert_small(node: ast.FunctionDef, place: str) -> None:
    """Check the length of a function's body and the number of its parameters."""
    # The docstring does not count: a stage's options are documented there.
    body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
    assert (node.end_lineno or 0) - body[0].lineno < 60, place
    positional = node.args.posonlyargs + node.args.args
    plain = [argument for argument in positional if argument.arg not in ("self", "cls")]
    # A command has an option for each thing a user can say; other functions at most seven.
    if node.name not in map(subcommands.function_name, COMMANDS):
        assert len(plain) + len(node.args.kwonlyargs) <= 7, place


def test_settings_of_the_index_exist() -> None:
    known = set(inspect.signature(index).parameters)
    assert set(INDEX_SETTINGS) <= known & set(TrainSettings.model_fields)
    text = inspect.getsource(SampleRules.sample_options)
    options = {option.replace("-", "_") for option in re.findall(r"--([a-z-]+)=", text)}
    assert options == {"train_samples", "valid_samples", "epochs"}
    assert options | {"held_out"} <= known


def imports(nodes: list[ast.AST]) -> set[str]:
    packages = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            packages |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            packages.add(node.module.partition(".")[0])
    return packages


def name_of_module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_modules_import_each_other_in_no_circle(nodes: Nodes) -> None:
    modules = {name_of_module(path): path for path in MODULES}
    graph = {
        name: {
            imported
            for node in nodes[path]  # imports in functions too
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


def test_some_packages_are_imported_in_one_place(nodes: Nodes) -> None:
    users: dict[str, set] = {
        "deepspeed": set(),
        "mpi4py": set(),
        "pandas": set(),
        "snakemake": set(),
    }
    for path in MODULES:
        for package in imports(nodes[path]) & set(users):
            users[package].add(str(path.relative_to(PACKAGE)))
    assert all(path.startswith(("report/", "results/")) for path in users.pop("pandas"))
    of_deepspeed = users.pop("deepspeed")
    assert of_deepspeed
    assert all(path.startswith("train/backends/") for path in of_deepspeed)
    assert users == {
        "mpi4py": {"runtime/ranks.py"},
        "snakemake": {"workflow/snakemake_internals.py"},
    }


def test_the_executor_is_a_package_of_its_own(nodes: Nodes) -> None:
    assert EXECUTOR
    for path in EXECUTOR:
        assert not imports(nodes[path]) & {"tokamake", "snakemake"}, path


def test_the_library_names_no_profile() -> None:
    for path in MODULES:
        for line in path.read_text().splitlines():
            assert "profiles/" not in line or path.name == "commands.py", f"{path}: {line}"


def test_every_plug_in_has_its_functions() -> None:
    for folder, names in {
        "models/*/hf": ["shapes"],
        "checkpoint/**/format": ["find", "open_checkpoint", "lay_out", "archives", "warnings"],
        "optim": ["build"],
        "schedules": ["factor"],
        "train/backends/checks": ["check_settings", "check_precision"],
        "models/*/model": ["Model"],
        "models/*/megatron": ["fields", "arguments", "inexpressible"],
        "models/*/memory": ["flops_per_token", "saved_activations"],
        "data/readers": ["accepts", "read"],
        "data/tokenizers": ["files", "load"],
        "data/filters": ["Filter"],
    }.items():
        assert plugins.names(folder)
        for name in plugins.names(folder):
            module = plugins.load(folder, name)
            assert all(callable(getattr(module, wanted, None)) for wanted in names), (folder, name)


def test_every_back_end_has_checks() -> None:
    assert plugins.names("train/backends/checks") == plugins.names("train/backends")


@pytest.mark.parametrize("part", ["hf", "megatron", "memory"])
def test_every_family_has_every_part(part: str) -> None:
    # Megatron has no such models.
    others = {"gemma2", "gemma3", "gpt_neox", "hf_t5", "olmo2", "olmo3", "olmoe"}
    lacking = others if part == "megatron" else set()
    assert {*plugins.names(f"models/*/{part}")} == {*plugins.names("models/*/model")} - lacking


def test_profiles_have_a_launch_script() -> None:
    profiles = sorted(path for path in (ROOT / "profiles").iterdir() if path.is_dir())
    assert "local" in {path.name for path in profiles}
    for profile in profiles:
        assert (profile / "launch.sh").stat().st_mode & 0o111
        assert f"profiles/{profile.name}/launch.sh" in (profile / "profile.yaml").read_text()
    assert "default" not in {path.name for path in profiles}  # it would override every other


def test_pip_knows_the_names_of_extras() -> None:
    """pip installs nothing for an extra whose name has an underscore, and only warns."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in project["optional-dependencies"]:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)


def test_each_class_name_means_one_thing(nodes: Nodes) -> None:
    """Except in plug-ins of the same kind, whose classes share the name of the kind."""
    modules_of: dict[str, set[Path]] = {}
    for path in MODULES:
        for node in nodes[path]:
            if isinstance(node, ast.ClassDef):
                modules_of.setdefault(node.name.removeprefix("_"), set()).add(path)
    for name, paths in modules_of.items():
        kinds = {plug_in_kind(path) for path in paths}
        assert len(paths) == 1 or (len(kinds) == 1 and kinds != {None}), f"{name}: {paths}"


def plug_in_kind(path: Path) -> str | None:
    """Pattern of the plug-ins that a module belongs to."""
    kinds = (
        *("models/*/model.py", "train/backends/*.py", "train/trackers/*.py"),
        *("train/objectives/*/data.py", "train/objectives/*/objective.py", "data/filters/*.py"),
        *("detoxify/scorers/*.py", "train/objectives/*/settings.py"),
    )
    return next((kind for kind in kinds if path.match(f"tokamake/{kind}")), None)
