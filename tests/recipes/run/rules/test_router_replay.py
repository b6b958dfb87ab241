"""Router replay that would replay nothing is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.errors import ConfigError
from etude.recipes.run.config import Run
from etude.recipes.run.rules.checks import check_run
from etude.recipes.supervised.runs import SFTRun
from tests.option_lists import list_options
from tests.recipes.runs import run_of


def test_replay_of_a_pass_that_is_not_made_is_refused(world: Path) -> None:
    replayed = {"train.router_replay": "r2"}
    with pytest.raises(ConfigError, match=r"`train.router_replay=r2` .* one update, .* Leave it out, raise `mini_"):
        check_run(run_of(world, **replayed))
    several = run_of(world, **replayed, mini_batches=2)
    check_run(several)
    assert {"old_logp", "routes"} <= several.model_columns()
    without_old = run_of(world, **replayed, ppo_epochs=2, **{"correction.policies": "two", "correction.weight": "none"})
    assert "routes" in without_old.model_columns()


def test_a_balance_loss_reads_a_pass_before_a_single_update(world: Path) -> None:
    balanced = {"train.balance": "loss"}
    with pytest.raises(ConfigError, match=r"`train.balance=loss` needs .* before its first pass. Set `train.router_"):
        check_run(run_of(world, **balanced))
    with pytest.raises(ConfigError, match=r"`balance_rate=0.1` is the coefficient of a loss, and `balance=none` has"):
        run_of(world, **{"train.balance_rate": 0.1})
    single = run_of(world, **balanced, **{"train.router_replay": "r2"})
    check_run(single)
    assert "routes" in single.model_columns()
    assert "old_logp" not in single.model_columns(), "the update computes it"


def test_a_build_of_vllm_that_reports_no_experts_is_refused(world: Path) -> None:
    replayed = {"train.router_replay": "r3"}
    check_run(run_of(world, **replayed))
    check_run(run_of(world, rollout="vllm", **replayed, **{"rollout.python": "/usr/bin/python"}))
    with pytest.raises(ConfigError, match=r"build for a CPU does not report them: .* Set `train.router_replay=r2`"):
        check_run(run_of(world, rollout="vllm", **replayed))


def test_only_a_policy_replays_routes(world: Path) -> None:
    with pytest.raises(ConfigError, match=r"critic\.train\.router_replay is not an option"):
        run_of(world, advantage="gae", **{"critic.train.router_replay": "r2"})
    options, supervised = ({option.path for option in list_options(root)} for root in (Run, SFTRun))
    replayed = {"train.router_replay", "train.balance", "train.balance_rate"}
    assert replayed <= options and not replayed & supervised
