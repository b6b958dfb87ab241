"""What a command line is checked by loads nothing heavy: a mistyped option is told before torch is there."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import etude
from etude.lazy import loading
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
    "sft": ["sft", "learning_rte=3"],
    "dpo": ["dpo", "data.trian=[x.jsonl]"],
    "eval": ["eval", "model.path=nowhere", "learning_rte=3"],
    "eval of a model": ["eval", "nowhere", "data.val=[tasks.parquet]"],
    "generate": ["generate", "nowhere", "What is 2 + 2?", "sampling.temprature=0"],
    "chat": ["chat", "nowhere", "sampling.temprature=0"],
    "serve": ["serve", "nowhere", "sampling.temprature=0"],
    "plan": ["plan", "grpo", "model.pth=nowhere"],
    "demo": ["demo", "learning_rte=3"],
    "demo agent": ["demo", "agent", "learning_rte=3"],
    "show": ["config", "show", "grpo", "loss.clp_high=0.3"],
}
LATER = {"a preset": ("hydra", "pydantic", "numpy"), "train": ("etude.recipes.loop", "etude.recipes.build")}
"""What a command loads after that, though it is not heavy."""
RUN = "import sys\nfrom etude.cli import main\ncode = main(sys.argv[1:])\n"
TELL = "import json\nprint(json.dumps([code, sorted(sys.modules)]))"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistyped_option_is_told_before_anything_heavy_is_loaded(command: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", RUN + TELL, *COMMANDS[command]]
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    code, loaded = json.loads(done.stdout.splitlines()[-1])
    assert (code, done.stderr.startswith("etude: ")) == (2, True), done.stderr
    assert not set(loaded) & {*HEAVY, *LATER.get(command, ())}


def test_what_a_file_must_not_load_is_not_there_when_it_is_loaded() -> None:
    """By running it: the rule over the source does not see what a library of ours loads by other ways."""
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


def test_every_name_that_a_package_loads_late_is_public_and_there() -> None:
    for file in sorted(Path(etude.__file__).parent.glob("*/__init__.py")):
        if "names_of(" in file.read_text(encoding="utf-8"):
            package = importlib.import_module(f"etude.{file.parent.name}")
            for name in package.__all__:
                assert getattr(package, name) is not None
                assert not (file.parent / f"{name}.py").exists(), f"{name} is a file too, which would take its place"


def test_the_garbage_collector_is_as_it_was_after_modules_have_loaded() -> None:
    import gc

    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        with pytest.raises(ValueError, match="broken"), loading():
            assert not gc.isenabled()
            raise ValueError("broken")
        assert gc.isenabled() is was_on
    gc.enable()
