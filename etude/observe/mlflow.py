"""The MLflow sink: a tracking server, a database, or by default the folder `mlruns` of the run directory.

MLflow's small client (`mlflow-skinny`) is enough for a folder or a server; a database also needs SQLAlchemy and
alembic. MLflow writes to a folder only with an explicit setting; a `file:` URI is taken as that setting.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, fields

from mlflow.entities import Metric, Param
from mlflow.environment_variables import MLFLOW_ALLOW_FILE_STORE
from mlflow.tracking import MlflowClient
from mlflow.utils.mlflow_tags import MLFLOW_LOGGED_ARTIFACTS

from etude.observe.config import MlflowConfig
from etude.observe.sinks import RunInfo, SampledRollout, Sink

_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 1000
_PARAM_LENGTH = 6000
_FILE_STORE_LOCK = threading.Lock()


class MlflowSink(Sink):
    """A sink with one MLflow run; the configuration becomes its parameters."""

    name = "mlflow"

    def __init__(self, config: MlflowConfig, now: Callable[[], float] = time.time) -> None:
        self._config = config
        self._now = now

    def open(self, run: RunInfo) -> None:
        """Create the MLflow run, and its experiment if it does not exist."""
        uri = self._config.uri or (run.directory / "mlruns").absolute().as_uri()
        with _allow_file_store() if uri.startswith("file:") else nullcontext():
            self._client = MlflowClient(tracking_uri=uri)
        experiment = self._client.get_experiment_by_name(self._config.experiment)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(self._config.experiment)
        )
        self._run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        params = [Param(_sanitize_name(key), str(value)[:_PARAM_LENGTH]) for key, value in _iter_leaves(run.config)]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_PER_CALL])

    def log(self, step: int, values: Mapping[str, float], *, late: bool = False) -> None:  # noqa: ARG002
        timestamp = int(self._now() * 1000)
        metrics = [Metric(_sanitize_name(name), value, timestamp, step) for name, value in values.items()]
        for start in range(0, len(metrics), _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + _METRICS_PER_CALL])

    def log_rollouts(self, step: int, rollouts: Sequence[SampledRollout]) -> None:
        """Log the rollouts as a table, which MLflow shows for the latest step."""
        columns = [field.name for field in fields(SampledRollout)]
        file = f"rollouts/step-{step:08d}.json"
        self._client.log_dict(self._run_id, {"columns": columns, "data": [astuple(row) for row in rollouts]}, file)
        self._client.set_tag(self._run_id, MLFLOW_LOGGED_ARTIFACTS, json.dumps([{"path": file, "type": "table"}]))

    def close(self) -> None:
        """Mark the MLflow run as finished."""
        self._client.set_terminated(self._run_id)


@contextmanager
def _allow_file_store() -> Iterator[None]:
    """Set MLflow's environment variable inside the block, and restore its earlier value."""
    with _FILE_STORE_LOCK:
        before = MLFLOW_ALLOW_FILE_STORE.get_raw()
        MLFLOW_ALLOW_FILE_STORE.set(True)
        try:
            yield
        finally:
            if before is None:
                MLFLOW_ALLOW_FILE_STORE.unset()
            else:
                MLFLOW_ALLOW_FILE_STORE.set(before)


def _sanitize_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name)


def _iter_leaves(tree: Mapping[str, object], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _iter_leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value
