"""The real trackers write real files, which are read back with their own tools."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from etude.observe import ObserveConfig, RunInfo, SampledRollout, Sink, choose_sinks
from etude.observe.config import MlflowConfig, WandbConfig
from etude.observe.sinks import BackgroundSink, SafeSink
from tests.components import require
from tests.observe.terminal import in_terminal

SAMPLED = [
    SampledRollout(7, 1.0, 0.5, "2 + 2 =", "```\n<b>4</b> | four"),
    SampledRollout(8, 0.0, None, "2 + 2 =", ""),
]
COLUMNS = ["rollout", "reward", "advantage", "prompt", "text"]
STEPS: dict[int, dict[str, float]] = {1: {"reward": 0.25, "time/step": 2.0}, 2: {"reward": 0.5, "kl": math.nan}}


def record(directory: Path, config: ObserveConfig) -> None:
    """Record a two-step run with the one sink that `config` adds to the sinks of every run."""
    sink: Sink = choose_sinks(config)[-1]
    sink.open(RunInfo(name="demo", directory=directory, steps=2, config={"loss": {"clip": 0.2}, "seed": 7}))
    for step, values in STEPS.items():
        sink.log_rollouts(step, SAMPLED[:step])
        if step == 2:
            sink.log(1, {"late": 1.0}, late=True)
        sink.log(step, values)
    sink.close()


def test_tensorboard_events_hold_every_number(tmp_path: Path) -> None:
    require("tensorboard")
    from tensorboardX.proto.event_pb2 import Event

    record(tmp_path, ObserveConfig(console="off", tensorboard=True))
    (file,) = (tmp_path / "tensorboard").iterdir()
    scalars: dict[tuple[int, str], float] = {}
    texts: list[bytes] = []
    for payload in framed(file.read_bytes()):
        event = Event.FromString(payload)
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars[event.step, value.tag] = value.simple_value
            texts.extend(value.tensor.string_val)
    assert math.isnan(scalars.pop((2, "kl")))
    assert scalars == {(1, "reward"): 0.25, (1, "time/step"): 2.0, (1, "late"): 1.0, (2, "reward"): 0.5}
    assert any(b'"clip": 0.2' in text for text in texts)
    shown = b"**rollout 7: reward 1, advantage 0.5**\n\n    2 + 2 =\n\nanswer:\n\n    ```\n    <b>4</b> | four"
    assert texts[-2:] == [shown, shown + b"\n\n**rollout 8: reward 0**\n\n    2 + 2 =\n\nanswer:\n\n"]


def framed(data: bytes) -> Iterator[bytes]:
    """Yield the payloads of a TFRecord file: length, its checksum, payload, its checksum."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield data[at + 12 : at + 12 + length]
        at += length + 16


def finished(file: Path, parse: Callable[[bytes], Any]) -> list[Any]:
    """Return the records of a W&B file once W&B's process has written the last of them, which is after the run's
    end."""
    for _ in range(300):
        with suppress(Exception):  # a record that was cut off has arbitrary bytes
            entries = [parse(payload) for payload in leveldb_log(file.read_bytes())]
            if any(entry.HasField("exit") for entry in entries):
                return entries
        time.sleep(0.1)
    raise AssertionError(f"W&B did not finish {file} within half a minute")


def test_an_offline_wandb_run_keeps_its_history(tmp_path: Path) -> None:
    require("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    record(tmp_path, ObserveConfig(console="off", wandb=WandbConfig(mode="offline", project="p")))
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    history: list[dict[str, float]] = []
    config: dict[str, object] = {}
    names: set[str] = set()
    for entry in finished(file, Record.FromString):
        if entry.HasField("history"):
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in entry.history.item}
            history.append(
                {name: value for name, value in row.items() if name in {"reward", "time/step", "kl", "late", "_step"}}
            )
        if entry.HasField("run"):
            names.add(f"{entry.run.project}/{entry.run.display_name}")
            config |= {item.key: json.loads(item.value_json) for item in entry.run.config.update}
    tables = [
        json.loads(file.read_text())
        for file in sorted(tmp_path.glob("wandb/offline-run-*/files/media/table/*.table.json"))
    ]
    assert [(table["columns"], table["data"]) for table in tables] == [
        (COLUMNS, [list(astuple(sampled)) for sampled in SAMPLED[:count]]) for count in (1, 2)
    ]
    assert names == {"p/demo"}
    assert (config["seed"], config["loss"]) == (7, {"clip": 0.2})
    assert history[0] == {"_step": 1, "reward": 0.25, "time/step": 2.0}
    assert math.isnan(float(history[1].pop("kl")))
    assert history[1] == {"_step": 2, "reward": 0.5, "late": 1.0}


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """Yield the payloads of a W&B file: after 7 bytes, LevelDB's log of 32 KiB blocks with records cut to fit."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


ASK = """
import sys
from pathlib import Path
from etude.observe import ObserveConfig, RunInfo, RunLog, choose_sinks, configure_logging
configure_logging("info")
config = ObserveConfig.model_validate({"console": "off", "wandb": {"mode": "online"}})
with RunLog(choose_sinks(config), RunInfo(name="demo", directory=Path(sys.argv[1]))) as log, log.step(1):
    pass
print("finished")
"""


def test_online_wandb_without_a_key_asks_nothing_and_stops_nothing(tmp_path: Path) -> None:
    require("wandb")
    status, text = in_terminal(
        ASK, tmp_path, {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "COLUMNS": "400"}
    )
    assert status == 0, text
    assert "finished" in text
    assert text.count("WARNING") == 1
    assert "Set WANDB_API_KEY, run `wandb login` first, or choose observe.wandb.mode=offline" in text


def test_mlflow_gives_back_metrics_and_parameters(tmp_path: Path) -> None:
    require("mlflow")
    from mlflow.tracking import MlflowClient

    record(tmp_path, ObserveConfig(console="off", mlflow=MlflowConfig(enabled=True, experiment="études")))
    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("études")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "demo"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"loss.clip": "0.2", "seed": "7"}
    rewards = client.get_metric_history(run.info.run_id, "reward")
    assert {(metric.step, metric.value) for metric in rewards} == {(1, 0.25), (2, 0.5)}
    (shown,) = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    assert shown == {"path": "rollouts/step-00000002.json", "type": "table"}
    table = json.loads(Path(client.download_artifacts(run.info.run_id, shown["path"])).read_text())
    assert (table["columns"], table["data"][0]) == (COLUMNS, list(astuple(SAMPLED[0])))
    assert len(client.list_artifacts(run.info.run_id, "rollouts")) == 2
    (kl,) = client.get_metric_history(run.info.run_id, "kl")
    assert math.isnan(kl.value)


@pytest.mark.parametrize("before", [None, "false", "true"])
def test_mlflow_leaves_the_environment_as_it_was(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("mlflow")
    name = "MLFLOW_ALLOW_FILE_STORE"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    record(tmp_path, ObserveConfig(console="off", mlflow=MlflowConfig(enabled=True)))
    assert os.environ.get(name) == before
    (status,) = (tmp_path / "mlruns").glob("*/*/meta.yaml")
    assert "status: 3" in status.read_text()


def test_mlflow_runs_share_an_experiment_and_odd_names_are_made_fit(tmp_path: Path) -> None:
    require("mlflow")
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "shared").as_uri()
    config = ObserveConfig(console="off", mlflow=MlflowConfig(enabled=True, uri=uri))
    for name in ("one", "two"):
        sink = choose_sinks(config)[-1]
        sink.open(RunInfo(name=name, directory=tmp_path / name, config={f"k{i}": i for i in range(150)}))
        sink.log(1, {"pass@8": 0.5, **{f"m{i}": float(i) for i in range(1100)}})
        sink.close()
    client = MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("etude").experiment_id])
    assert {run.info.run_name for run in runs} == {"one", "two"}
    for run in runs:
        assert run.data.metrics["pass_8"] == 0.5
        assert (len(run.data.metrics), len(run.data.params)) == (1101, 150)


def test_an_mlflow_uri_that_leads_nowhere_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require("mlflow")
    config = ObserveConfig(console="off", mlflow=MlflowConfig(enabled=True, uri="nowhere://else"))
    sink = SafeSink(choose_sinks(config)[-1])
    sink.open(RunInfo(name="demo", directory=tmp_path))
    sink.close()
    assert not sink.alive
    assert capsys.readouterr().err.count("The mlflow sink failed") == 1


def test_trackers_that_may_wait_for_a_network_work_in_the_background() -> None:
    require("wandb")
    require("mlflow")
    config = ObserveConfig(console="off", wandb=WandbConfig(mode="offline"), mlflow=MlflowConfig(enabled=True))
    kinds = {sink.name: type(sink) for sink in choose_sinks(config)}
    assert kinds["wandb"] is kinds["mlflow"] is BackgroundSink
    assert kinds["jsonl"] is not BackgroundSink
