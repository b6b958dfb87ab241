"""Read a package's source as the house rules see it: files, what they import at run time, and where."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Import:
    """One import that happens at run time."""

    target: str
    """The dotted module: `etude.config.env`, `torch.nn`."""
    line: int
    late: bool
    """True inside a function: it happens when the function runs, not when the file is loaded."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    path: str
    """Relative to the package's folder: `config/env.py`."""
    name: str
    """Dotted: `etude.config.env`; a folder's `__init__.py` has the folder's name."""
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    """All nodes of the tree, walked once for all rules."""
    names: Mapping[str, str]
    """The names that the file's imports define: `o` for `os` after `import os as o`."""
    imports: tuple[Import, ...]

    @property
    def room(self) -> str:
        """The first part of the path: `config` for `config/env.py`, `records` for `records.py`."""
        return self.path.split("/")[0].removesuffix(".py")

    @cached_property
    def used_later(self) -> tuple[Import, ...]:
        """The modules that load when they are first used: `checks = LazyModule("etude.…")`."""
        calls = (node for node in self.nodes if isinstance(node, ast.Call) and dotted_name(node.func) == "LazyModule")
        named = ((node.args[0], node.lineno) for node in calls if node.args)
        return tuple(
            Import(first.value, line, late=True)
            for first, line in named
            if isinstance(first, ast.Constant) and isinstance(first.value, str)
        )

    @cached_property
    def used(self) -> tuple[tuple[str, int], ...]:
        """Every name that the file uses, with its line: `os.environ` for `o.environ` after `import os as o`."""
        named = (node for node in self.nodes if isinstance(node, ast.Name | ast.Attribute))
        return tuple((name, node.lineno) for node in named if (name := true_name(node, self.names)))


def read_package(folder: Path) -> dict[str, Module]:
    """Read every module of the package in `folder`, by dotted name."""
    files = {_dotted(folder, path): path for path in sorted(folder.rglob("*.py"))}
    modules = {}
    trees = {name: ast.parse(path.read_text(), filename=str(path)) for name, path in files.items()}
    known = {name: (name,) for name in files} | {
        f"{name}.{lazy_name}": (name, place) for name, tree in trees.items() for lazy_name, place in _lazy(name, tree)
    }
    for name, path in files.items():
        text, tree = path.read_text(), trees[name]
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        nodes = tuple(ast.walk(tree))
        names = _names(nodes)
        imports = tuple(_imports(tree, package, known, names))
        modules[name] = Module(path.relative_to(folder).as_posix(), name, text, tree, nodes, names, imports)
    return modules


def dotted_name(node: ast.AST) -> str:
    """Return `a.b.c` for such an expression, and the empty string for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def true_name(node: ast.AST, names: Mapping[str, str]) -> str:
    """Return `os.environ` for `o.environ` after `import os as o`, and `print` for `builtins.print`."""
    first, dot, rest = dotted_name(node).partition(".")
    return (names.get(first, first) + dot + rest).removeprefix("builtins.")


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes that run when a file is loaded: not the bodies of functions, but their decorators."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FunctionNode):
            for decorator in child.decorator_list:
                yield from at_import(ast.Expr(decorator))
        elif not isinstance(child, ast.Lambda):
            yield child
            yield from at_import(child)


def _names(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Return the full names behind imports, and behind other names given to imported things."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
            names |= {first: first for alias in node.names if not alias.asname for first in [alias.name.split(".")[0]]}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Assign) and dotted_name(node.value).split(".")[0] in names:
            imported = true_name(node.value, names)
            names |= {to.id: imported for to in node.targets if isinstance(to, ast.Name) and to.id not in names}
    return names


def _dotted(folder: Path, path: Path) -> str:
    parts = (folder.name, *path.relative_to(folder).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(
    tree: ast.AST, package: str, known: Mapping[str, tuple[str, ...]], names: Mapping[str, str], late: bool = False
) -> Iterator[Import]:
    """Yield the run-time imports below `tree`; imports under `if TYPE_CHECKING:` are for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and dotted_name(node.test).split(".")[-1] == "TYPE_CHECKING":
            for other in node.orelse:
                yield from _imports(ast.Module([other], []), package, known, names, late)
            continue
        if isinstance(node, ast.stmt | ast.expr):
            for target in _targets(node, package, known, names):
                yield Import(target, node.lineno, late)
        yield from _imports(node, package, known, names, late or isinstance(node, FunctionNode | ast.Lambda))


def _lazy(package: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a package loads at first use, `__getattr__ = lazy_getattr(…)`, each with its file."""
    for node in tree.body:
        call = node.value if isinstance(node, ast.Assign) else None
        if isinstance(call, ast.Call) and dotted_name(call.func) == "lazy_getattr":
            for file, names in ast.literal_eval(call.args[1]).items():
                yield from ((name, f"{package}.{file}") for name in names)


def _targets(node: ast.AST, package: str, known: Mapping[str, tuple[str, ...]], names: Mapping[str, str]) -> list[str]:
    """Yield the modules that this node imports: an import statement, or `import_module("…")` with a literal name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = package.split(".")
            anchor = ".".join(parents[: len(parents) - node.level + 1])
            base = f"{anchor}.{base}".rstrip(".")
        members = [f"{base}.{alias.name}" for alias in node.names]
        return sorted({place for member in members for place in known.get(member, (base,))})
    if isinstance(node, ast.Call) and true_name(node.func, names).split(".")[-1] in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
    return []
