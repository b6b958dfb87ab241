"""Plug-ins named `module:Name`, and the error for each way in which one may fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from etude.config import load_plugin
from etude.config.plugin import load_object, plugin_spec
from etude.errors import PluginError
from tests.config.sample_run import Loss, MyLoss


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from which modules can be imported during one test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return tmp_path


def test_a_class_is_imported_by_its_spec() -> None:
    assert load_plugin("tests.config.sample_run:MyLoss", Loss) is MyLoss
    assert load_plugin(plugin_spec(MyLoss), None) is MyLoss
    assert load_plugin("pathlib:Path.home", None) == Path.home


@pytest.mark.parametrize("spec", ["nothing", ":Name", "module:", "a b:C", "a:b:c", "..x:Y"])
def test_a_malformed_spec_is_refused(spec: str) -> None:
    with pytest.raises(
        PluginError, match=r"cannot be read\. Write module:Name, for example my_package\.losses:MyLoss\."
    ):
        load_plugin(spec, None)


def test_a_missing_module_is_reported() -> None:
    with pytest.raises(
        PluginError, match=r"'nowhere_at_all\.losses:X' was requested, and there is no module nowhere_at_all"
    ):
        load_plugin("nowhere_at_all.losses:X", None)
    with pytest.raises(PluginError, match=r"there is no module tests\.config\.nothing\. Check its spelling"):
        load_plugin("tests.config.nothing:X", None)


def test_a_module_that_raises_keeps_its_cause(modules: Path) -> None:
    (modules / "raising_plugin.py").write_text("raise RuntimeError('no licence')")
    with pytest.raises(PluginError, match=r"importing raising_plugin raised RuntimeError: no licence") as caught:
        load_plugin("raising_plugin:X", None)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failed_import_within_a_module_is_reported_as_such(modules: Path) -> None:
    (modules / "needy_plugin.py").write_text("import nowhere_at_all")
    with pytest.raises(PluginError, match=r"importing needy_plugin raised ModuleNotFoundError: .*nowhere_at_all"):
        load_plugin("needy_plugin:X", None)


def test_a_missing_name_is_reported_with_near_ones() -> None:
    with pytest.raises(PluginError, match=r"tests\.config\.sample_run has no MyLos\. Did you mean MyLoss"):
        load_plugin("tests.config.sample_run:MyLos", Loss)
    with pytest.raises(PluginError, match=r"tests\.config\.sample_run has no Zzzz\. Check its spelling\."):
        load_plugin("tests.config.sample_run:Zzzz", Loss)


@pytest.mark.parametrize("name", ["NotAConfig", "LOSSES"])
def test_a_class_of_the_wrong_kind_is_refused(name: str) -> None:
    with pytest.raises(PluginError, match=r"must be a subclass of tests\.config\.sample_run\.Loss, and it is not"):
        load_plugin(f"tests.config.sample_run:{name}", Loss)


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    for text in ("one", "two"):
        file.write_text(f"class Mine:\n    said = {text!r}\n")
        assert load_object(f"{file}:Mine", "class", "x.py:Mine").said == text
