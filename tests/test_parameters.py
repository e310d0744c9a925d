"""Parameters of functions: at most two are given by position, so that calls name the others."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.paths import EXECUTOR, MODULES, name_of

SOURCES = [*MODULES, *EXECUTOR]

# torch calls them by position.
CALLED_BY_TORCH = {"forward", "backward"}
# Shape suffixes: tensors of a formula, such as q_BHLK, k_BGLK and v_BGLK, have a known order.
TENSOR = re.compile(r"_[A-Z]+$")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


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


@cache
def callbacks() -> frozenset[str]:
    """Names that are passed as values: others call these functions, by position."""
    names = set[str]()
    for path in SOURCES:
        nodes = nodes_of(path)
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        loaded = (
            node
            for node in nodes
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        )
        names |= {
            node.id if isinstance(node, ast.Name) else node.attr
            for node in loaded
            if id(node) not in called
        }
    return frozenset(names)


def is_free(function: ast.FunctionDef) -> bool:
    """Whether the law does not hold for a function."""
    name, parameters = function.name, function.args
    if parameters.vararg:  # what follows *inputs cannot be given by position
        return True
    is_special = name.startswith("__") and name not in ("__init__", "__new__")
    has_tensors = any(TENSOR.search(each.arg) for each in parameters.args)
    return is_special or has_tensors or name in CALLED_BY_TORCH or name in callbacks()


def test_parameters_after_the_second_are_named() -> None:
    positional = [
        f"{name_of(path)}:{function.lineno} {function.name}"
        for path in SOURCES
        for function, is_method in functions(nodes_of(path))
        if len(function.args.args) - is_method > 2 and not is_free(function)
    ]
    assert not positional, "write *, before the third parameter"
