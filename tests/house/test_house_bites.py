"""Each house rule finds a small package that breaks it, and accepts one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from tests.house import packing, prose, rules
from tests.house.source import read_package

Rule = Callable[[rules.Modules], Iterator[str]]


def findings(folder: Path, rule: Rule, files: dict[str, str]) -> list[str]:
    """Return the findings of one rule in a package `etude` with these files."""
    package = folder / "etude"
    for path, text in {"__init__.py": "", **files}.items():
        target = package / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(dedent(text))
    return list(rule(read_package(package)))


LATE = "def f():\n    import json\n    return json\n"
LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 41

BREAKS: list[tuple[str, Rule, dict[str, str], str]] = [
    (
        "up",
        rules.room_imports,
        {"records.py": "import etude.batch", "batch.py": ""},
        "records.py:1 imports etude.batch",
    ),
    (
        "beside",
        rules.room_imports,
        {"chat/a.py": "from etude import data", "data/__init__.py": ""},
        "imports etude.data",
    ),
    ("relative", rules.room_imports, {"store/a.py": "from ..batch import B", "batch.py": ""}, "imports etude.batch"),
    ("late", rules.room_imports, {"sync/a.py": "def f():\n  import etude.train", "train/__init__.py": ""}, "a.py:2"),
    ("by name", rules.room_imports, {"sync/a.py": "m = import_module('etude.cli')", "cli.py": ""}, "etude.cli"),
    ("door", rules.room_imports, {"demo/a.py": "from etude.cli import main", "cli.py": ""}, "imports etude.cli"),
    ("unknown", rules.room_imports, {"attic/a.py": ""}, "'attic' is not in the table"),
    (
        "engine alone",
        rules.room_imports,
        {"rollout/router.py": "import etude.models", "models/__init__.py": ""},
        "router.py:1 imports etude.models",
    ),
    (
        "up inside a room",
        rules.layers,
        {"recipes/recipe.py": "def f():\n  import etude.recipes.hub", "recipes/hub.py": ""},
        "recipes/recipe.py:2 imports etude.recipes.hub, which is not in a layer below.",
    ),
    (
        "up when first used",
        rules.layers,
        {"recipes/run/config.py": "c = LazyModule('etude.recipes.run.rules.a')", "recipes/run/rules/a.py": ""},
        "config.py:1 imports etude.recipes.run.rules.a",
    ),
    ("no layer", rules.layers, {"recipes/attic.py": ""}, "recipes/attic.py is in no layer of the room 'recipes'."),
    (
        "a late circle",
        rules.circles,
        {"recipes/collect/a.py": "from . import b", "recipes/collect/b.py": "def f():\n  from . import a"},
        "An import cycle",
    ),
    ("torch", rules.library_imports, {"config/a.py": "import torch.nn"}, "config/a.py:1 imports torch"),
    ("torch in data", rules.library_imports, {"data/dataset.py": "from torch import Tensor"}, "imports torch"),
    ("torch in the loop", rules.loads, {"recipes/run/loop.py": "import torch"}, "recipes/run/loop.py loads torch"),
    ("transformers", rules.library_imports, {"chat/template.py": "import transformers"}, "imports transformers"),
    (
        "ray",
        rules.library_imports,
        {"dispatch/resource_pool.py": "import ray"},
        "dispatch/ray_crew.py, dispatch/ray_rank.py, dispatch/ray_cluster.py, dispatch/ray_reservation.py.",
    ),
    ("the library of vLLM", rules.library_imports, {"rollout/vllm.py": "import vllm"}, "whose place is: nowhere."),
    (
        "sqlalchemy",
        rules.library_imports,
        {"store/journal/memory.py": "import sqlalchemy.orm"},
        "whose place is: store/journal/sql.py, store/journal/tables.py.",
    ),
    ("fastapi", rules.library_imports, {"agents/runner.py": "import fastapi"}, "imports fastapi"),
    ("wandb", rules.library_imports, {"observe/log.py": "import wandb"}, "imports wandb"),
    ("standard only", rules.library_imports, {"errors.py": "import numpy"}, "keeps to the standard library."),
    ("numpy only", rules.library_imports, {"records.py": "import pydantic"}, "standard library and numpy."),
    (
        "through another",
        rules.loads,
        {"store/a.py": "import etude.data.b", "data/b.py": "import etude.data.c", "data/c.py": "import torch"},
        "store/a.py loads torch: store/a.py → data/b.py → data/c.py → torch.",
    ),
    (
        "through the folder",
        rules.loads,
        {"cli.py": "import etude.data.b", "data/__init__.py": "import torch", "data/b.py": ""},
        "cli.py → data/__init__.py → torch.",
    ),
    (
        "through its own folder",
        rules.loads,
        {"agents/runner.py": "", "agents/__init__.py": "from . import b", "agents/b.py": "import fastapi"},
        "agents/__init__.py → agents/b.py → fastapi.",
    ),
    (
        "runner",
        rules.loads,
        {"agents/runner.py": "import etude.store.journal.sql", "store/journal/sql.py": "import sqlalchemy"},
        "agents/runner.py loads sqlalchemy",
    ),
    ("cycle", rules.cycles, {"data/a.py": "import etude.data.b", "data/b.py": "from . import a"}, "An import cycle"),
    ("late import", rules.late_imports, {"config/show.py": LATE}, "config/show.py:2 imports json inside a function"),
    ("late in a method", rules.late_imports, {"batch.py": "class A:\n  def f(self):\n    import json"}, "batch.py:3"),
    ("deep chooser", rules.late_imports, {"agents/proxy/__init__.py": LATE}, "imports json inside a function"),
    ("long file", rules.budgets, {"batch.py": "x = 1\n" * 331}, "has 331 lines of code; 330 are allowed."),
    ("long loop", rules.budgets, {"recipes/run/loop.py": "x = 1\n" * 61}, "60 are allowed"),
    ("long function", rules.budgets, {"batch.py": LONG_FUNCTION}, "batch.py:1 f has 41 statements; 40 are allowed."),
    ("long async method", rules.budgets, {"batch.py": "async " + LONG_FUNCTION}, "f has 41 statements"),
    (
        "environ",
        rules.environment,
        {"observe/log.py": "import os\nx = os.environ['A']"},
        "observe/log.py uses os.environ",
    ),
    ("getenv", rules.environment, {"cli.py": "import os\nos.getenv('A')"}, "uses os.getenv"),
    ("environ by name", rules.environment, {"cli.py": "from os import environ"}, "uses os.environ"),
    ("print", rules.prints, {"observe/log.py": "print('a')"}, "observe/log.py:1 calls print"),
    ("decorator", rules.registries, {"batch.py": "@register('a')\ndef f(): ..."}, "f registers itself"),
    ("method decorator", rules.registries, {"batch.py": "@LOSSES.register\nclass A: ..."}, "A registers itself"),
    ("late entry", rules.registries, {"batch.py": "T = {}\nT['a'] = 1"}, "batch.py:2 adds an entry"),
    *(
        (f"environment: {text}", rules.environment, {"observe/log.py": text}, f"observe/log.py uses os.{name}")
        for name, text in (
            ("environ", "import os as o\no.environ"),
            ("environ", "import os\nsystem = os\nsystem.environ"),
            ("environ", "from os import environ as e"),
            ("*", "from os import *"),
            ("path.expandvars", "import os.path\nos.path.expandvars('$A')"),
            ("path.expandvars", "from os.path import expandvars"),
        )
    ),
    *(
        (f"terminal: {text}", rules.prints, {"batch.py": text}, says)
        for says, text in (
            ("batch.py:2 calls print", "import builtins\nbuiltins.print('a')"),
            ("batch.py:1 calls print", "say = print"),
            ("batch.py:2 uses sys.stdout", "import sys\nsys.stdout.write('a')"),
            ("batch.py:2 uses sys.stderr", "from sys import stderr as e\ne.write('a')"),
        )
    ),
    *(
        (f"registry: {text}", rules.registries, {"batch.py": text}, "batch.py:2 adds an entry")
        for text in (
            "T = {}\nT.update(a=1)",
            "T = {}\nT.setdefault('a', 1)",
            "T = {}\nif True: T['a'] = 1",
            "T = {}\nT['a']: int = 1",
            "T = {}\nT |= {'a': 1}",
            "T = []\nT += [1]",
            "T = []\nT.append(1)",
            "from etude.losses import T\nT.update(a=1)",
            "T = {}\nclass A: T['a'] = 1",
        )
    ),
    ("subclasses", rules.registries, {"batch.py": "class A:\n  def __init_subclass__(cls): ..."}, "batch.py:2"),
    (
        "by another name",
        rules.library_imports,
        {"config/a.py": "from importlib import import_module as im\nim('torch')"},
        "config/a.py:2 imports torch",
    ),
    ("bare file", rules.docstrings, {"batch.py": "x = 1"}, "batch.py has no docstring."),
    ("bare function", rules.docstrings, {"batch.py": '"""B."""\ndef f(): ...'}, "batch.py:2 f has no docstring."),
    (
        "bare method",
        rules.docstrings,
        {"batch.py": '"""B."""\nclass A:\n  """A."""\n  async def f(self): ...'},
        "batch.py:4 A.f has no docstring.",
    ),
    (
        "bare override",
        rules.docstrings,
        {"batch.py": '"""B."""\nclass A:\n  """A."""\nclass B(A):\n  """B."""\n  def f(self): ...'},
        "batch.py:6 B.f has no docstring.",
    ),
    ("rank", rules.ranks, {"recipes/run/loop.py": "def f(local_rank): ..."}, "names a rank (local_rank)"),
    ("rank read", rules.ranks, {"recipes/collect/collector.py": "x = crew.rank"}, "names a rank (rank)"),
    (
        "clock",
        rules.named,
        {"recipes/collect/scheduler.py": "import time"},
        "recipes/collect/scheduler.py:1 imports time.",
    ),
    ("file", rules.named, {"recipes/collect/scheduler.py": "open('a')"}, "calls open."),
    (
        "a question",
        prose.openings,
        {"a.py": '"""Whether it rains."""'},
        "a.py:1: the docstring opens with a question word",
    ),
    (
        "of a field",
        prose.openings,
        {"a.py": 'A = 1\n"""How many."""'},
        "a.py:2: the docstring opens with a question word",
    ),
    ("of help", prose.openings, {"a.py": 'f(help="which step")'}, "a.py:1: the help line opens with a question word"),
    (
        "of an error",
        prose.openings,
        {"a.py": 'raise E(f"What is {x}")'},
        "a.py:1: the error opens with a question word",
    ),
    ("star", packing.packed_lines, {"a.py": "f(*(a, b))"}, "a.py:1 passes arguments as a starred literal"),
    ("splat", packing.packed_lines, {"a.py": "x = (a, *[b, c])"}, "a.py:1 puts a literal into a literal"),
    ("three at once", packing.packed_lines, {"a.py": "a, b, c = 1, 2, 3"}, "a.py:1 assigns several values"),
    ("two attributes", packing.packed_lines, {"a.py": "self.a, b = 1, 2"}, "a.py:1 assigns several values"),
    ("long", prose.sentences, {"a.py": '"""A word. ' + 31 * "and " + '"""'}, "has 31 words, not 30: and and"),
    ("long help", prose.sentences, {"a.py": 'f(help="' + 21 * "and " + '")'}, "the help line has 21 words, not 20"),
    ("long error", prose.sentences, {"a.py": 'raise E(f"{x} ' + 30 * "and " + '")'}, "the error has 31 words, not 30"),
]

ALLOWS: list[tuple[str, Rule, dict[str, str]]] = [
    ("down", rules.room_imports, {"batch.py": "from etude.records import R", "records.py": ""}),
    ("same room", rules.room_imports, {"data/a.py": "from . import b", "data/b.py": ""}),
    (
        "for the type checker",
        rules.room_imports,
        {"records.py": "if TYPE_CHECKING:\n  from etude.batch import Batch\n", "batch.py": ""},
    ),
    ("door to doors", rules.room_imports, {"cli.py": "def f():\n  from etude.demo import a", "demo/a.py": ""}),
    (
        "embedded engine",
        rules.room_imports,
        {"rollout/torch_engine.py": "import etude.models.a", "models/a.py": ""},
    ),
    (
        "down inside a room",
        rules.layers,
        {"recipes/hub.py": "import etude.recipes.recipe", "recipes/recipe.py": "", "recipes/__init__.py": ""},
    ),
    ("in one folder", rules.layers, {"recipes/collect/a.py": "from . import b", "recipes/collect/b.py": ""}),
    ("a circle elsewhere", rules.circles, {"data/a.py": "def f():\n  from . import b", "data/b.py": "from . import a"}),
    ("torch at home", rules.library_imports, {"algorithms/a.py": "import torch", "data/pack.py": "import torch"}),
    ("torch for types", rules.library_imports, {"protocols.py": "if t.TYPE_CHECKING:\n  import torch\n"}),
    ("a free library", rules.library_imports, {"rewards/maths.py": "import sympy"}),
    ("late torch", rules.loads, {"cli.py": "def f():\n  import torch"}),
    (
        "late way round",
        rules.cycles,
        {"data/__init__.py": "def f():\n  import etude.data.a", "data/a.py": "import etude.data"},
    ),
    (
        "chooser",
        rules.late_imports,
        {"observe/__init__.py": LATE, "cli.py": LATE, "recipes/run/builders/assemble.py": LATE},
    ),
    ("full length", rules.budgets, {"batch.py": LONG_FUNCTION.removesuffix("    x = 1\n") + "\n" * 390}),
    ("one reader", rules.environment, {"config/env.py": "import os\nx = os.environ"}),
    ("another os", rules.environment, {"batch.py": "import os\nx = os.cpu_count()"}),
    ("console", rules.prints, {"cli.py": "print(1)", "observe/console.py": "print(1)"}),
    ("the log", rules.prints, {"observe/log.py": "import sys\nsys.stderr.write('a')"}),
    (
        "tables used",
        rules.registries,
        {"batch.py": "T = {'a': 1}\nx = T['a']\nn = 1\nn += 1\ndef f(t):\n  t['a'] = 1\n  t.update(b=2)"},
    ),
    ("other decorators", rules.registries, {"batch.py": "@dataclass(frozen=True)\nclass A: ...\nx.y = 1"}),
    (
        "private",
        rules.docstrings,
        {"__init__.py": '"""E."""', "batch.py": '"""B."""\ndef _f(): ...\nclass _A:\n  def f(self): ...'},
    ),
    (
        "override",
        rules.docstrings,
        {
            "__init__.py": '"""E."""\nclass A:\n  """A."""\n  def f(self):\n    """F."""\n',
            "batch.py": '"""B."""\nclass B(etude.A[int]):\n  """B."""\nclass C(B):\n  """C."""\n  def f(self): ...\n',
        },
    ),
    ("no rank", rules.ranks, {"recipes/run/loop.py": "frank = 1", "train/learner.py": "rank = 1"}),
    (
        "pure",
        rules.named,
        {"recipes/collect/scheduler.py": "import heapq", "recipes/run/builders/assemble.py": "import time"},
    ),
    ("an unpacked call", packing.packed_lines, {"a.py": "a, b, c = f(*x)\na, b = b, a\ny = (*x, *f(z))"}),
    ("a noun", prose.openings, {"a.py": '"""The rain. If it rains, what then?"""\nraise E(what)'}),
    (
        "short",
        prose.sentences,
        {"a.py": '"""' + 20 * "and " + ". " + 20 * "and " + '"""\nf(help="' + 9 * "a; b " + '")'},
    ),
]


@pytest.mark.parametrize(("rule", "files", "says"), [case[1:] for case in BREAKS], ids=[case[0] for case in BREAKS])
def test_the_rule_finds_each_violation(tmp_path: Path, rule: Rule, files: dict[str, str], says: str) -> None:
    sentences = findings(tmp_path, rule, files)
    assert any(says in sentence for sentence in sentences), sentences


@pytest.mark.parametrize(("rule", "files"), [case[1:] for case in ALLOWS], ids=[case[0] for case in ALLOWS])
def test_the_rule_accepts_allowed_code(tmp_path: Path, rule: Rule, files: dict[str, str]) -> None:
    assert findings(tmp_path, rule, files) == []


@pytest.mark.parametrize(
    ("files", "says"), [case[2:] for case in BREAKS if case[1] is prose.openings], ids=lambda value: str(value)[:20]
)
def test_the_quick_search_finds_the_same_openings(tmp_path: Path, files: dict[str, str], says: str) -> None:
    assert any(says in sentence for sentence in findings(tmp_path, prose.openings, files))
    assert list(prose.quick_openings(tmp_path / "etude")) == list(prose.openings(read_package(tmp_path / "etude")))


def test_every_rule_has_a_violation_and_an_allowed_case() -> None:
    assert {case[1] for case in BREAKS} == {case[1] for case in ALLOWS} == {*rules.RULES, *packing.RULES, *prose.RULES}
