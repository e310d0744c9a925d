"""Parameters of functions: at most two are given by position, so that calls name the others."""

import ast
import re
from collections.abc import Iterator

from tests.support.paths import EXECUTOR, MODULES, name_of

SOURCES = [*MODULES, *EXECUTOR]

# torch calls them by position.
CALLED_BY_TORCH = {"forward", "backward"}
# Shape suffixes: tensors of a formula, such as q_BHLK, k_BGLK and v_BGLK, have a known order.
TENSOR = re.compile(r"_[A-Z]+$")


def functions(nodes: list[ast.AST]) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Each function, and whether its first parameter is the object or class."""
    methods = {
        id(node)
        for owner in nodes
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
        and not any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
    }
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            # Python passes the class to __new__, although it is a static method.
            yield node, id(node) in methods or node.name == "__new__"


def callbacks(nodes: list[ast.AST]) -> set[str]:
    """Names that a module passes as values: others call these functions, by position."""
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in nodes
        if isinstance(node, ast.Name | ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and id(node) not in called
    }


def is_free(name: str, parameters: ast.arguments) -> bool:
    """Whether the law does not hold for a function, wherever it is used."""
    if parameters.vararg:  # what follows *inputs cannot be given by position
        return True
    is_special = name.startswith("__") and name not in ("__init__", "__new__")
    has_tensors = any(TENSOR.search(each.arg) for each in parameters.args)
    return is_special or has_tensors or name in CALLED_BY_TORCH


def test_parameters_after_the_second_are_named() -> None:
    positional, passed, number = [], set[str](), 0
    for path in SOURCES:
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        passed |= callbacks(nodes)
        for function, is_method in functions(nodes):
            number += 1
            has_many = len(function.args.args) - is_method > 2
            if has_many and not is_free(function.name, function.args):
                positional.append((f"{name_of(path)}:{function.lineno}", function.name))
    assert number > 1000
    remaining = [f"{place} {name}" for place, name in positional if name not in passed]
    assert not remaining, "write *, before the third parameter"
