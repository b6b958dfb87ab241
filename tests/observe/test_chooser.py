"""The sinks that a configuration selects, and the libraries that they load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import etude.observe
from etude.errors import MissingPackageError
from etude.observe import Mean, ObserveConfig, RunInfo, choose_sinks, open_run_log


def test_metrics_are_always_written_and_the_console_may_be_off() -> None:
    assert [sink.name for sink in choose_sinks(ObserveConfig())] == ["jsonl", "console"]
    assert [sink.name for sink in choose_sinks(ObserveConfig(console="off"))] == ["jsonl"]


@pytest.mark.parametrize(
    ("options", "package", "key"),
    [
        ({"tensorboard": True}, "tensorboardX", "observe.tensorboard=true"),
        ({"wandb": {"mode": "offline"}}, "wandb", "observe.wandb.mode=offline"),
        ({"mlflow": {"enabled": True}}, "mlflow", "observe.mlflow.enabled=true"),
    ],
)
def test_a_missing_package_is_a_sentence_with_the_remedy(
    options: dict[str, object], package: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"etude.observe.{package.lower().removesuffix('x')}", raising=False)
    with pytest.raises(MissingPackageError) as caught:
        choose_sinks(ObserveConfig.model_validate(options))
    assert str(caught.value).startswith(f"{key} needs the package {package}, which cannot be imported here (")
    assert str(caught.value).endswith("Install it with: pip install 'etude[trackers]'")


def test_no_tracker_and_no_torch_is_loaded_by_default() -> None:
    check = (
        "import sys, etude.observe as o; o.choose_sinks(o.ObserveConfig()); "
        "print([m for m in ('torch', 'wandb', 'mlflow', 'tensorboardX') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_whole_run_from_its_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunInfo(name="demo", directory=tmp_path, steps=4)
    with open_run_log(ObserveConfig(console="plain", every=2), run, headline=["reward"]) as log:
        for step in range(1, 5):
            with log.step(step) as at:
                at.add({"reward": Mean.of(step)})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["reward"]) for line in lines] == [(2, 1.5), (4, 3.5)]
    assert "step 4/4  reward   3.500" in capsys.readouterr().out


def test_the_public_names_are_sorted_and_exist() -> None:
    assert sorted(etude.observe.__all__) == etude.observe.__all__
    assert all(hasattr(etude.observe, name) for name in etude.observe.__all__)
