"""The house rule about packed lines: one argument, one assignment, one idea in a line."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from tests.house.source import Module

Modules = Mapping[str, Module]
Literal = ast.Tuple | ast.List


def packed_lines(modules: Modules) -> Iterator[str]:
    """No call has a star before a literal, no literal a splat of another, and no line three assignments of values."""
    for module in modules.values():
        for node in module.nodes:
            problem = _problem(node)
            if problem:
                yield f"{module.path}:{getattr(node, 'lineno', 0)} {problem}"


def _problem(node: ast.AST) -> str:
    if isinstance(node, ast.Call) and any(map(_is_splat, node.args)):
        return "passes arguments as a starred literal; write them one by one."
    if isinstance(node, Literal) and any(map(_is_splat, node.elts)):
        return "puts a literal into a literal by a star; write the values."
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
        targets = node.targets[0].elts
        if len(targets) > 2 or any(isinstance(target, ast.Attribute) for target in targets):
            return "assigns several values at once; give each a line."
    return ""


def _is_splat(node: ast.expr) -> bool:
    return isinstance(node, ast.Starred) and isinstance(node.value, Literal)


RULES = (packed_lines,)
