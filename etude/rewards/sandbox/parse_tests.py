"""The parser of test code: it splits the code into statements, marks the tests, and finds the names of the program.

A test is a statement that can fail: it has an `assert`, a `raise` or a call such as `assert_allclose`. A statement that
names a function with one of these is a test too. The parser adds the calls that a test runner would make:

    def test_add(): …                      test_add()
    class TestAdd: def test_one(self): …   TestAdd().test_one()
    class TestAdd(unittest.TestCase): …    each of its test methods, with its setUp
    def check(candidate): …                check(add), if the task names its entry point

Code without a test is refused, because every program would pass it.

A module that tests use without importing it (`math.isclose(f(2), 0.5)`) is Python's, or a well-known package's. It is
never an object of the program with the same name.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

PROGRAM = "solution"
"""The module name under which tests import the program."""
PACKAGES = {"np": "numpy", "pd": "pandas", **{name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy")}}
"""The packages that tests may use without an import, by the names that tests use."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class ParsedTests(NamedTuple):
    """The parts of test code."""

    statements: tuple[tuple[str, bool], ...]
    """The statements, each with True if it is a test."""
    names: tuple[tuple[str, str], ...]
    """The names that the statements use and do not define, each with the program's name for it."""
    modules: Mapping[str, tuple[str, tuple[str, ...]]]
    """The names of modules among them: each with the module's path and its used attributes."""


def parse_tests(code: str, entry: str) -> ParsedTests:
    """Parse test code. Raises `ValueError` if it tests nothing; the message is the end of a sentence.

    entry: the function that the task asks for, if it names one.
    """
    try:
        body = list(_unwrap_main_guard(ast.parse(code).body))
        imported = {alias.asname or alias.name: alias.name for node in body for alias in _program_imports(node)}
        body = [node for node in body if not _program_imports(node)]
        body += [node for call in _make_calls(body, entry) for node in ast.parse(call).body]
        names = _free_names(ast.unparse(ast.Module(body, [])), {entry, *imported})
    except (SyntaxError, ValueError) as error:
        raise ValueError(str(error) if type(error) is ValueError else f"they are not Python: {error}") from error
    if not names:
        raise ValueError("they use no name that a program could define")
    testing = _find_testing_names(body)
    statements = tuple((ast.unparse(node), _is_test(node, testing)) for node in body)
    if not any(is_test for _, is_test in statements):
        raise ValueError(
            "they test nothing, so that every program would pass: they have no `assert`, and call no function with one"
            + ("; `check` needs a function that a column `entry_point` names" if "check" in testing else "")
        )
    known = {"candidate": entry} if entry else {}
    modules = _find_modules(body, [name for name in names if name not in imported and name != entry])
    return ParsedTests(
        statements, tuple((name, imported.get(name) or known.get(name, name)) for name in names), modules
    )


def _unwrap_main_guard(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements with those under `if __name__ == "__main__"`, and without calls of a test runner's main."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'":
            yield from _unwrap_main_guard(node.body)
        elif not (isinstance(node, ast.Expr) and ast.unparse(node).startswith(("unittest.main(", "pytest.main("))):
            yield node


def _program_imports(node: ast.stmt) -> list[ast.alias]:
    """Return the names that a statement imports from the program."""
    return node.names if isinstance(node, ast.ImportFrom) and node.module == PROGRAM else []


# -- calls ------------------------------------------------------------------------------------------------------------


def _make_calls(body: Sequence[ast.stmt], entry: str) -> Iterator[str]:
    """Yield the calls that a test runner would make."""
    used = {name for node in body for part in _executed_nodes(node) for name in _loaded_names(ast.walk(part))}
    cases: set[str] = set()
    for node in body:
        if not isinstance(node, _Definition) or node.name in used:
            continue
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base) for base in node.bases}
            if bases & cases or any(base.endswith("TestCase") for base in bases):
                cases.add(node.name)
            yield from _make_class_calls(node, case=node.name in cases)
        elif node.name == "check" and entry:
            yield f"check({entry})"
        elif node.name.startswith("test"):
            _refuse_uncallable(node, 0)
            yield f"{node.name}()"


def _executed_nodes(node: ast.stmt) -> Sequence[ast.AST]:
    """Return the executed parts of a statement: for a class its body, without its bases, which it does not call."""
    return node.body if isinstance(node, ast.ClassDef) else [node]


def _make_class_calls(node: ast.ClassDef, *, case: bool) -> Iterator[str]:
    functions = [function for function in node.body if isinstance(function, _Function)]
    tests = (
        [function for function in functions if function.name.startswith("test")]
        if case or node.name.startswith("Test")
        else []
    )
    for test in tests:
        _refuse_uncallable(test, 1)
        if case:
            yield f"__import__('unittest').TestSuite([{node.name}({test.name!r})]).debug()"
        elif any(function.name.startswith(("setup", "teardown")) for function in functions):
            raise ValueError(f"`{node.name}` has a setup for pytest, which does not run; use a `unittest.TestCase`")
        else:
            yield f"{node.name}().{test.name}()"


def _refuse_uncallable(test: _Function, num_arguments: int) -> None:
    """Refuse a test that cannot be called without pytest."""
    needed = len(test.args.posonlyargs) + len(test.args.args) - len(test.args.defaults)
    needed += sum(default is None for default in test.args.kw_defaults)
    if isinstance(test, ast.AsyncFunctionDef):
        raise ValueError(f"`{test.name}` is a coroutine function, and tests run without an event loop")
    if needed > num_arguments:
        raise ValueError(f"`{test.name}` takes arguments, which only pytest would pass; call it with them")


# -- tests ------------------------------------------------------------------------------------------------------------


def _find_testing_names(body: Sequence[ast.stmt]) -> set[str]:
    """Return the functions and classes that test something, directly or through another of them."""
    defined = {node.name: node for node in body if isinstance(node, _Definition)}
    testing = {name for name, node in defined.items() if any(map(_can_fail, ast.walk(node)))}
    while added := {name for name, node in defined.items() if _loaded_names(ast.walk(node)) & testing} - testing:
        testing |= added
    return testing


def _is_test(node: ast.stmt, testing: set[str]) -> bool:
    if isinstance(node, _Definition):
        return False
    parts = list(_walk_executed(node))
    return any(map(_can_fail, parts)) or bool(_loaded_names(parts) & testing)


def _walk_executed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement, without the bodies of functions that it only defines."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Definition):
            yield from _walk_executed(child)


def _can_fail(node: ast.AST) -> bool:
    """Return True for an `assert`, a `raise`, or a call of a method whose name starts with `assert`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr.startswith("assert")
    return isinstance(node, ast.Assert | ast.Raise)


def _loaded_names(nodes: Sequence[ast.AST] | Iterator[ast.AST]) -> set[str]:
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


# -- names of the program ---------------------------------------------------------------------------------------------


def _free_names(code: str, intended: Collection[str]) -> list[str]:
    """Return the names that code uses and does not define.

    Python's builtins are among them only if they are `intended`, or if there are no other names. So tests of a function
    called `sum` mean the program's, and tests that use `abs` besides mean Python's.
    """
    tables = [symtable.symtable(code, "tests", "exec")]
    defined = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used: set[str] = set()
    for table in tables:
        tables += table.get_children()
        used |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced() and symbol.is_global()}
        if table is tables[0]:
            used |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    free = used - defined
    if candidates := {name for name in free if name in intended or not hasattr(builtins, name)}:
        return sorted(candidates)
    functions = sorted(name for name in free if not _is_exception(name))
    if len(functions) > 1:
        raise ValueError(
            f"they use only Python's builtins ({', '.join(functions)}), and do not say which of them a program "
            "defines; name it in a column `entry_point`"
        )
    return functions


def _is_exception(name: str) -> bool:
    value = getattr(builtins, name)
    return isinstance(value, type) and issubclass(value, BaseException)


def _find_modules(body: Sequence[ast.stmt], names: Collection[str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the modules among these names: names of known modules with used attributes, which are not called."""
    parts = [part for node in body for part in ast.walk(node)]
    attributes = [part for part in parts if isinstance(part, ast.Attribute)]
    called = {part.func.id for part in parts if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)}
    modules: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name in names:
        path = PACKAGES.get(name) or (name if name in sys.stdlib_module_names else "")
        used = {part.attr for part in attributes if isinstance(part.value, ast.Name) and part.value.id == name}
        if path and used and name not in called:
            modules[name] = path, tuple(sorted(used))
    return modules
