"""Private names of other packages are used in modules called `<package>_internals.py` alone."""

import ast
import re
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from tests.support.paths import EXECUTOR, MODULES, ROOT, RULES, SNAKEFILE, name_of

PACKAGES = {
    *("snakemake", "torch", "deepspeed", "tokenizers", "transformers"),
    *("torchao", "wandb", "mlflow", "trackio"),
}
INTERNALS = [path for path in MODULES + EXECUTOR if path.stem.endswith("_internals")]
STANDARD = {"_replace", "_asdict", "_fields", "_field_defaults", "_exit"}
"""Names of the standard library that begin with an underscore but are public."""
SNAKEMAKE = [
    ROOT / "lib/tokamake/workflow/snakemake_internals.py",
    ROOT / "lib/snakemake_executor_plugin_pbs/base/snakemake_internals.py",
]
"""Modules whose names of Snakemake docs/explanation/workflow.md lists."""
DOCUMENTED = {
    *("workflow", "rules", "rule", "input", "output", "params", "log", "resources"),
    *("ancient", "report", "io"),
}
"""Names of Snakemake that Snakefiles may use, and a module that has some of them."""
NOT_SNAKEMAKE = {
    name
    for each in (str, dict, list, set, Path, BaseModel, ThreadPoolExecutor, Future, cache(str))
    for name in dir(each)
}
"""Attributes of objects that Snakemake does not define."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.endswith("__")


def root_of(node: ast.AST) -> str | None:
    """First name of an expression such as `torch.ops.aten` or `tokenizers.Tokenizer().model`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Names that a module defines."""
    return {
        name
        for node in nodes
        for name in [getattr(node, key, "") for key in ("name", "id", "attr")]
        if not isinstance(node, ast.Attribute | ast.Name) or isinstance(node.ctx, ast.Store)
    }


def private_names(nodes: list[ast.AST]) -> tuple[set[str], set[str]]:
    """Private names of other packages that a module imports or uses, and those of its objects.

    Objects of other packages also come as arguments: a name that we do not define is theirs.
    """
    names, of_objects, imported = set(), set(), set()
    for node in nodes:
        if isinstance(node, ast.Import):
            aliases = [alias for alias in node.names if alias.name.partition(".")[0] in PACKAGES]
            imported |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            names |= {part for alias in aliases for part in alias.name.split(".")}
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            imported |= {alias.asname or alias.name for alias in node.names}
            names |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr not in STANDARD:
            (names if root_of(node.value) in imported else of_objects).add(node.attr)
        if isinstance(node, ast.Call) and root_of(node.func) in ("getattr", "setattr", "hasattr"):
            names |= {each.value for each in node.args[1:2] if isinstance(each, ast.Constant)}
        if isinstance(node, ast.Call) and root_of(node.func) in imported:
            names |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return {*filter(is_private, names)}, {*filter(is_private, of_objects)}


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from torch._utils import _flatten", {"_utils", "_flatten"}),
        ("import torch.distributed._shard as shard", {"_shard"}),
        ("import torch as t\nt.ops.aten._attention(1)", {"_attention"}),
        ("from tokenizers import Tokenizer\nTokenizer().model._inner", {"_inner"}),
        ("def f(optimizer): optimizer._partition_them()", {"_partition_them"}),
        ("getattr(parameter, '_hp_mapping', None)", {"_hp_mapping"}),
        ("from torch import Mesh\nMesh([1], names=(), _rank=0)", {"_rank"}),
        ("from torch import nn\nnn.Linear(1, 1).__class__; row._replace(a=1)", set()),
    ],
)
def test_private_names_are_recognized(code: str, names: set[str]) -> None:
    assert set().union(*private_names([*ast.walk(ast.parse(code))])) == names


def test_private_names_of_other_packages_are_in_internals_modules_alone() -> None:
    found, ours = {}, set[str]()
    for path in sorted({*MODULES, *EXECUTOR}):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        ours |= own_names(nodes)
        if path not in INTERNALS:
            found[name_of(path)] = private_names(nodes)
    assert len(found) > 500
    theirs = {name: names | (own - ours) for name, (names, own) in found.items()}
    assert {name: names for name, names in theirs.items() if names} == {}


def test_rules_touch_snakemake_through_the_internals_module_alone() -> None:
    for line in (SNAKEFILE + RULES).splitlines():
        assert not re.search(r"\bworkflow\.(?!\w+\.?\w* import|rst)", line.partition("#")[0]), line


def test_the_executor_uses_the_interface_of_snakemake_and_its_internals_module() -> None:
    from snakemake_interface_executor_plugins.workflow import WorkflowExecutorInterface

    # `executor_settings` is in the template of executor plug-ins, but not in the interface.
    public = {*dir(WorkflowExecutorInterface), "executor_settings"}
    for path in {*EXECUTOR} - {*INTERNALS}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("workflow"):
                assert node.attr in public, f"{path}:{node.lineno}: workflow.{node.attr}"


@pytest.mark.parametrize("path", INTERNALS, ids=name_of)
def test_internals_modules_have_tests_and_name_the_version_of_their_package(path: Path) -> None:
    name = path.stem.lstrip("_")
    package = name.removesuffix("_internals")
    pinned = re.search(
        rf"^{package}==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )
    assert pinned
    assert pinned[1] in (ast.get_docstring(ast.parse(path.read_text())) or "")
    assert [*(ROOT / "tests").rglob(f"test_{name}.py")]


def names_of_snakemake(tree: ast.AST) -> set[str]:
    """Names of Snakemake that a module imports, uses or overrides, documented ones too."""
    theirs, others, own, holders = set(), set(), set(), {"self"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            is_theirs = isinstance(node, ast.ImportFrom) and "snakemake" in (node.module or "")
            (theirs if is_theirs else others).update(a.asname or a.name for a in node.names)
        if isinstance(node, ast.ClassDef):
            holders.add(node.name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own.add(node.name)
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    used = {*theirs}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and {root_of(base) for base in node.bases} & theirs:
            methods = {each.name for each in node.body if hasattr(each, "name")}
            used |= {name for name in methods if not name.endswith("__")}
        if isinstance(node, ast.Attribute) and root_of(node) not in others:
            is_own = ast.unparse(node.value) in holders and node.attr in own
            used |= set() if is_own else {node.attr}
        if isinstance(node, ast.Constant) and re.fullmatch(r"_[a-z]\w+", str(node.value)):
            used.add(node.value)  # for setattr
    return used - NOT_SNAKEMAKE


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("from snakemake.io import flag\nflag(1)", {"flag"}),
        ("from snakemake import io\nimport os\nio.flag(os.getcwd())", {"io", "flag"}),
        ("class A:\n def f(self, dag): self.a = dag.b.c; self.f(self.a.d)", {"b", "c", "d"}),
        ("from snakemake.x import X\nclass A(X):\n def _f(self): pass", {"X", "_f"}),
        ("def f(workflow): setattr(workflow, '_onstart', 'text'.strip())", {"_onstart"}),
    ],
)
def test_names_of_snakemake_are_recognized(code: str, names: set[str]) -> None:
    assert names_of_snakemake(ast.parse(code)) == names


def test_the_page_about_the_workflow_lists_names_of_snakemake_and_their_tests() -> None:
    page = (ROOT / "docs/explanation/workflow.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    listed = {
        word for row in rows for word in re.findall(r"\w+", " ".join(row[0].split("`")[1::2]))
    }
    used = set().union(*(names_of_snakemake(ast.parse(path.read_text())) for path in SNAKEMAKE))
    assert used - DOCUMENTED - listed == set(), "not in the page"
    assert listed - used - DOCUMENTED == set(), "not used any more"
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_snakemake_inter*.py"))
    for name, _, row_tests in rows:
        named = re.findall(r"`(test_\w+)`", row_tests)
        assert named, name
        assert [test for test in named if f"def {test}(" not in tests] == []
