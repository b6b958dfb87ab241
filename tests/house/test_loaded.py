"""Checking a command line loads no heavy library: a mistyped option is reported before torch is loaded."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import etude
from etude.lazy import pause_gc
from tests.house import table

HEAVY = (
    *("torch", "transformers", "sympy", "mpmath", "math_verify", "matplotlib", "pyarrow", "pandas", "scipy"),
    *("accelerate", "peft", "ray", "sqlalchemy", "huggingface_hub.file_download"),
)
COMMANDS = {
    "train": ["train", "grpo", "learning_rte=3"],
    "a choice": ["train", "loss=pppo"],
    "a preset": ["train", "gpro"],
    "a model": ["train", "grpo", "model.path=nowhere", "data.train=[tasks.parquet]"],
    "train without a model": ["train", "grpo", "directory=x"],
    "sft": ["sft", "learning_rte=3"],
    "sft without a model": ["sft"],
    "dpo": ["dpo", "data.trian=[x.jsonl]"],
    "eval": ["eval", "model.path=nowhere", "learning_rte=3"],
    "eval without tasks": ["eval"],
    "eval of a model": ["eval", "nowhere", "data.val=[tasks.parquet]"],
    "generate": ["generate", "nowhere", "What is 2 + 2?", "sampling.temprature=0"],
    "chat": ["chat", "nowhere", "sampling.temprature=0"],
    "serve": ["serve", "nowhere", "sampling.temprature=0"],
    "plan": ["plan", "grpo", "model.pth=nowhere"],
    "replay": ["replay", "nowhere", "--step", "3"],
    "simulate": ["simulate", "gpsu=64"],
    "demo": ["demo", "learning_rte=3"],
    "demo agent": ["demo", "agent", "learning_rte=3"],
    "demo vision": ["demo", "vision", "learning_rte=3"],
    "show": ["config", "show", "grpo", "loss.clp_high=0.3"],
}
LATER = {
    "a preset": ("hydra", "pydantic", "numpy"),
    "train": ("etude.recipes.run.loop", "etude.recipes.run.builders.assemble"),
}
"""Libraries that a command loads after that, which are not heavy."""
IN_TURN = """
import contextlib, io, json, sys
from etude.cli import main

for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(words)
    print(json.dumps([code, errors.getvalue(), sorted(sys.modules)]))
"""


def refused_in_turn(folder: Path, names: list[str]) -> dict[str, set[str]]:
    """Return the modules loaded after each command, in one interpreter; each command must be refused."""
    program = [sys.executable, "-c", IN_TURN, json.dumps([COMMANDS[name] for name in names])]
    done = subprocess.run(program, capture_output=True, text=True, cwd=folder, timeout=120)
    outcomes = dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))
    for name, (code, message, _) in outcomes.items():
        assert (code, message.startswith("etude: ")) == (2, True), f"{name}: {message}{done.stderr}"
    return {name: set(loaded) for name, (_, _, loaded) in outcomes.items()}


@pytest.mark.parametrize("command", ["a preset", pytest.param("train", marks=pytest.mark.kept)])
def test_a_mistyped_option_is_reported_before_heavy_libraries_are_loaded(command: str, tmp_path: Path) -> None:
    loaded = refused_in_turn(tmp_path, [command])
    assert not loaded[command] & {*HEAVY, *LATER[command]}


def test_no_command_loads_heavy_libraries_for_a_mistyped_option(tmp_path: Path) -> None:
    loaded = refused_in_turn(tmp_path, [name for name in COMMANDS if name not in LATER])
    wrong = {name: sorted(libraries & set(HEAVY)) for name, libraries in loaded.items() if libraries & set(HEAVY)}
    assert not wrong, f"The first of these has loaded it: {wrong}"


def test_a_file_does_not_load_its_forbidden_libraries() -> None:
    """The files are run, because the rule over the source does not see imports within libraries."""
    without = [place for place, banned in table.NEVER_LOADED.items() if "torch" in banned]
    names = [
        "etude" + ("" if place == "__init__" else "." + place.removesuffix(".py").replace("/", "."))
        for place in without
    ]
    program = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_every_lazily_loaded_name_is_public_and_exists() -> None:
    for file in sorted(Path(etude.__file__).parent.glob("*/__init__.py")):
        if "names_of(" in file.read_text(encoding="utf-8"):
            package = importlib.import_module(f"etude.{file.parent.name}")
            for name in package.__all__:
                assert getattr(package, name) is not None
                assert not (file.parent / f"{name}.py").exists(), f"{name} is a file too, which would take its place"


def test_loading_modules_restores_the_garbage_collector() -> None:
    import gc

    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ValueError, match="broken"), pause_gc():
            assert not gc.isenabled()
            raise ValueError("broken")
        assert gc.isenabled() is was_on
    gc.enable()
