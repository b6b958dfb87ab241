"""The house rules: each takes the modules of a package and returns a sentence for every place that breaks it."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping

from tests.house import table
from tests.house.source import FunctionNode, Module, at_import, dotted_name

Modules = Mapping[str, Module]
Definition = FunctionNode | ast.ClassDef
MUTATORS = frozenset(
    {
        *("update", "setdefault", "pop", "popitem", "clear", "append", "extend", "insert", "remove", "add", "discard"),
        *("register", "__setitem__", "__delitem__", "appendleft", "setitem"),
    }
)


def listed(module: Module, files: Iterable[str]) -> bool:
    """Return whether a list of paths and whole packages contains this file."""
    return module.path in files or module.room in files


def room_imports(modules: Modules) -> Iterator[str]:
    """A package imports only the packages that the table gives it."""
    for module in modules.values():
        if module.room not in table.ROOMS:
            yield f"{module.path}: the room {module.room!r} is not in the table of rooms."
            continue
        for imported in module.imports:
            target = imported.target
            room = modules[target].room if target in modules else module.room
            if room != module.room:
                files = table.ROOM_ONLY_IN.get((module.room, room), (module.room,))
                if room not in table.ROOMS[module.room].rooms or not listed(module, files):
                    yield f"{module.path}:{imported.line} imports {target}, which the room {module.room!r} may not."


def layers(modules: Modules) -> Iterator[str]:
    """Inside three rooms too, imports go down only, also those in functions and those that load at first use."""
    for module in modules.values():
        place = _layer(module)
        if place is None:
            if module.room in table.LAYERS and not module.path.endswith("__init__.py"):
                yield f"{module.path} is in no layer of the room {module.room!r}."
            continue
        for imported in (*module.imports, *module.used_later):
            target = modules.get(imported.target)
            lower = _layer(target) if target is not None and target.room == module.room else None
            if lower is not None and lower[1] != place[1] and lower[0] >= place[0]:
                yield f"{module.path}:{imported.line} imports {imported.target}, which is not in a layer below."


def circles(modules: Modules) -> Iterator[str]:
    """Inside these rooms no file imports itself through others, not even by imports in functions."""
    for room in table.LAYERS:
        inside = {
            name: [one.target for one in (*module.imports, *module.used_later)]
            for name, module in modules.items()
            if module.room == room
        }
        done: set[str] = set()
        for name in inside:
            yield from _circles_from(inside, name, [], done)


def library_imports(modules: Modules) -> Iterator[str]:
    """A listed library is imported only in its own files; a package with a list of libraries imports no other."""
    for module in modules.values():
        only = table.ONLY_LIBRARIES.get(module.room)
        for imported in module.imports:
            library = imported.target.split(".")[0]
            if library in table.LIBRARIES and not listed(module, table.LIBRARIES[library]):
                allowed = ", ".join(table.LIBRARIES[library]) or "nowhere"
                yield f"{module.path}:{imported.line} imports {library}, whose place is: {allowed}."
            elif only is not None and library not in {*only, *sys.stdlib_module_names, module.name.split(".")[0]}:
                allowed = " and ".join(("the standard library", *only))
                yield f"{module.path}:{imported.line} imports {library}; {module.room!r} keeps to {allowed}."
        for name in (true for true in module.names.values() if true.startswith(table.LAZY)):
            library = name.removeprefix(table.LAZY)
            if library in table.LIBRARIES and not listed(module, table.LIBRARIES[library]):
                yield f"{module.path} takes {library} from etude.lazy, and may not use it."


def loads(modules: Modules) -> Iterator[str]:
    """A file that must not load a library does not reach it through other files of Etude either."""
    for module in modules.values():
        banned = _banned(module, table.NEVER_LOADED)
        if banned:
            yield from _reaches(modules, module, banned)


def cycles(modules: Modules) -> Iterator[str]:
    """No file imports itself, directly or through others."""
    at_load = {name: [one.target for one in module.imports if not one.late] for name, module in modules.items()}
    done: set[str] = set()
    for name in at_load:
        yield from _circles_from(at_load, name, [], done)


def late_imports(modules: Modules) -> Iterator[str]:
    """Imports stand at the top of a file, except in the named entry points and in a package's `__init__.py`."""
    for module in modules.values():
        chooser = re.fullmatch(r"\w+/__init__\.py", module.path)
        if not chooser and not listed(module, table.LATE_IMPORTS_IN):
            for imported in module.imports:
                if imported.late:
                    place = f"{module.path}:{imported.line}"
                    yield f"{place} imports {imported.target} inside a function; move it to the top."


def budgets(modules: Modules) -> Iterator[str]:
    """Files stay within their lines of code, and functions within their statements."""
    for module in modules.values():
        lines = len(_code_lines(module))
        limit = table.MAX_CODE_LINES_OF.get(module.path, table.MAX_CODE_LINES)
        if lines > limit:
            yield f"{module.path} has {lines} lines of code; {limit} are allowed."
        for function in (node for node in module.nodes if isinstance(node, FunctionNode)):
            statements = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
            limit = table.MAX_STATEMENTS_OF.get(f"{module.path} {function.name}", table.MAX_STATEMENTS)
            if statements > limit:
                where = f"{module.path}:{function.lineno} {function.name}"
                yield f"{where} has {statements} statements; {limit} are allowed."


def _code_lines(module: Module) -> set[int]:
    """Return the numbers of the lines with code: no blank ones, no comments, no docstrings."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in module.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def environment(modules: Modules) -> Iterator[str]:
    """The environment is read in one file."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv", "path.expandvars", "*"}
    for module in modules.values():
        if listed(module, table.ENVIRONMENT_IN):
            continue
        used = {name for name, _ in module.used} | set(module.names.values())
        for name in sorted(used & {f"os.{name}" for name in names}):
            yield f"{module.path} uses {name}; the environment is read in config/env.py alone."


def prints(modules: Modules) -> Iterator[str]:
    """Only the command line, the console and the log's own handler print."""
    streams = {"sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__"}
    for module in modules.values():
        for name, line in module.used:
            if name == "print" and not listed(module, table.PRINT_IN):
                yield f"{module.path}:{line} calls print; use the log, or return what is to be shown."
            elif name in streams and not listed(module, table.STREAMS_IN):
                yield f"{module.path}:{line} uses {name}; use the log, or return what is to be shown."


def registries(modules: Modules) -> Iterator[str]:
    """Nothing registers itself: a registry is a literal dict, and nothing that runs at import adds to one."""
    for module in modules.values():
        for node in module.nodes:
            if isinstance(node, Definition):
                for decorator in node.decorator_list:
                    called = decorator.func if isinstance(decorator, ast.Call) else decorator
                    if re.match(r"_?register", dotted_name(called).split(".")[-1]):
                        yield f"{module.path}:{node.lineno} {node.name} registers itself by a decorator."
                if node.name == "__init_subclass__":
                    yield f"{module.path}:{node.lineno} {node.name} lets classes register themselves."
        for node in at_import(module.tree):
            if _mutates(node):
                yield f"{module.path}:{getattr(node, 'lineno', 0)} adds an entry to a table after it was written."


def docstrings(modules: Modules) -> Iterator[str]:
    """Every file, public class, public function and public method has a docstring; an override need not repeat it."""
    classes = _classes(modules)
    for module in modules.values():
        if not ast.get_docstring(module.tree):
            yield f"{module.path} has no docstring."
        for name, node in _public(module.tree.body, ""):
            owner = name.rpartition(".")[0].rpartition(".")[2]
            if not ast.get_docstring(node) and not (owner and _inherits(classes, owner, node.name)):
                yield f"{module.path}:{node.lineno} {name} has no docstring."


def ranks(modules: Modules) -> Iterator[str]:
    """The controller calls a crew, never a single rank."""
    for module in modules.values():
        if listed(module, table.NO_RANKS_IN):
            for node in module.nodes:
                name = _identifier(node)
                if {"rank", "ranks"} & set(name.lower().split("_")):
                    yield f"{module.path}:{getattr(node, 'lineno', 0)} names a rank ({name})."


def named(modules: Modules) -> Iterator[str]:
    """A file neither imports nor calls the names that it must not use."""
    for module in modules.values():
        banned = _banned(module, table.NEVER_NAMED)
        for imported in module.imports:
            if imported.target.split(".")[0] in banned:
                yield f"{module.path}:{imported.line} imports {imported.target}."
        for node in module.nodes:
            if isinstance(node, ast.Call) and dotted_name(node.func) in banned:
                yield f"{module.path}:{node.lineno} calls {dotted_name(node.func)}."


RULES = (
    *(room_imports, layers, circles, library_imports, loads, cycles, late_imports, budgets),
    *(environment, prints, registries, docstrings, ranks, named),
)


def _mutates(node: ast.AST) -> bool:
    """Return whether a node changes a named dict, list or set: `T["a"] = 1`, `T |= …`, `T.update(…)`."""
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign):
        return not isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS


def _banned(module: Module, bans: Mapping[str, tuple[str, ...]]) -> set[str]:
    return {name for file, names in bans.items() if listed(module, (file,)) for name in names}


def _layer(module: Module) -> tuple[int, str] | None:
    """Return the layer of a file inside its room, and the entry of the table that contains it."""
    inner = module.path.partition("/")[2].removesuffix(".py")
    found = [
        (number, entry)
        for number, layer in enumerate(table.LAYERS.get(module.room, ()))
        for entry in layer
        if inner == entry or inner.startswith(f"{entry}/")
    ]
    return max(found, key=lambda pair: len(pair[1]), default=None)


def _circles_from(targets: Mapping[str, list[str]], name: str, way: list[str], done: set[str]) -> Iterator[str]:
    """Search depth first below `name`; `way` is the path to it, and `done` has the names that are searched
    completely."""
    if name in way:
        yield "An import cycle: " + " → ".join([*way[way.index(name) :], name]) + "."
    elif name not in done:
        for target in targets[name]:
            if target in targets:
                yield from _circles_from(targets, target, [*way, name], done)
        done.add(name)


def _reaches(modules: Modules, start: Module, banned: set[str]) -> Iterator[str]:
    """Walk the imports that loading `start` causes, its packages' `__init__.py` included."""
    ways: dict[str, tuple[str, ...]]
    ways = {name: (modules[name].path,) for name in _with_parents(start.name) if name in modules}
    queue = list(ways)
    for name in queue:
        for imported in modules[name].imports:
            library = imported.target.split(".")[0]
            if imported.late:
                continue
            if library in banned:
                yield f"{start.path} loads {library}: " + " → ".join((*ways[name], library)) + "."
            for target in _with_parents(imported.target):
                if target in modules and target not in ways:
                    ways[target] = (*ways[name], modules[target].path)
                    queue.append(target)


def _with_parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def _public(body: Iterable[ast.stmt], owner: str) -> Iterator[tuple[str, Definition]]:
    """Yield public definitions, also within public classes, each with its qualified name."""
    for node in body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            if not any(dotted_name(decorator).endswith("overload") for decorator in node.decorator_list):
                yield owner + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{owner}{node.name}.")


def _classes(modules: Modules) -> dict[str, tuple[set[str], set[str]]]:
    """Return every class of Etude by its bare name: the bare names of its bases, and the methods with docstrings."""
    classes = {}
    for module in modules.values():
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                plain = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                bases = {dotted_name(base).split(".")[-1] for base in plain}
                methods = [member for member in node.body if isinstance(member, FunctionNode)]
                classes[node.name] = (bases, {method.name for method in methods if ast.get_docstring(method)})
    return classes


def _inherits(classes: Mapping[str, tuple[set[str], set[str]]], owner: str, method: str) -> bool:
    """Return whether a base class of `owner` documents this method."""
    for base in classes[owner][0] & classes.keys() - {owner}:
        if method in classes[base][1] or _inherits(classes, base, method):
            return True
    return False


def _identifier(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            return name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
    return ""
