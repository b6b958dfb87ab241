"""Refuses filters of training whose sets of tokens the run's servers cannot report."""

from __future__ import annotations

from collections.abc import Iterator

from etude.config.together import told_together
from etude.errors import ConfigError
from etude.recipes.run.config import Run
from etude.rollout import ServerConfig, VllmConfig
from etude.rollout.reported_sets import active_filters


@told_together
def check_token_sets(run: Run) -> Iterator[ConfigError]:
    """Refuse filters that servers do not report, or report only with other options."""
    servers = run.rollout
    filters = active_filters(run.sampling.params())
    if not isinstance(servers, ServerConfig) or not filters:
        return
    name = next(iter(filters))
    if run.sampling.top_k == 0:
        yield ConfigError(
            f"{servers.create_backend().package} reports the tokens that `sampling.{name}` keeps only with "
            "`sampling.top_k` above 0. Set `sampling.top_k=512`."
        )
    if not isinstance(servers, VllmConfig):
        return
    scoring = run.evaluate.sampling.fill_from(run.sampling).params()
    if run.data.val and scoring.temperature > 0 and scoring.top_k == 0:
        yield ConfigError(
            "vLLM reports the tokens that `sampling` keeps, and then takes no request without `top_k`, also those of "
            "answers that are scored. Set `evaluate.sampling.top_k=512`, or `evaluate.sampling.temperature=0`."
        )
    if run.compute_device().type == "cpu" and servers.python is None and not servers.url:
        yield ConfigError(
            f"`sampling.{name}` cuts tokens off. vLLM's build for a CPU does not report which: that "
            "takes its model runner V2, which needs a Triton with a CPU backend. Choose `rollout=embedded`, or name "
            "the Python of an environment that has one with `rollout.python`."
        )
