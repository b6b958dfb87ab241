"""Errors before anything is loaded, and the columns that the model must compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.algorithms import ADVANTAGES, LOSSES
from etude.errors import ConfigError
from etude.recipes.run.builders.lengths import check_context_length
from etude.recipes.run.builders.policy import load_policy
from etude.recipes.run.roles import ENVIRONMENT_COLUMNS, MODEL_COLUMNS, ROLLOUT_COLUMNS
from etude.recipes.run.rules.checks import check_run
from etude.rollout.kv_cache import block_bytes
from tests.recipes.runs import run_of


def test_every_required_column_is_collected_computed_or_refused(world: Path) -> None:
    """Each advantage and each loss either runs or names the column it misses; none fails in a step."""
    known = ROLLOUT_COLUMNS | MODEL_COLUMNS | ENVIRONMENT_COLUMNS
    more = {"opo": {"loss.reduction": "seq-mean-token-sum"}, "distillation": {"teacher.path": world / "model"}}
    plain, of_turns = run_of(world), run_of(world, **{"env.path": "tests.recipes.partners:Echo"})
    for name, kind in ADVANTAGES.items():
        base = of_turns if name in OF_TURNS and name != "gigpo" else plain
        run = (
            run_of(world, advantage=name, **more[name])
            if name in more
            else base.model_copy(update={"advantage": kind()})
        )
        assert run.required_columns() <= known, (name, run.required_columns() - known)
        missing = sorted(run.required_columns() & ENVIRONMENT_COLUMNS)
        if missing:
            with pytest.raises(ConfigError, match=missing[0]):
                check_run(run)
        else:
            check_run(run)
    for loss in LOSSES.values():
        assert plain.model_copy(update={"loss": loss()}).required_columns() <= known


@pytest.mark.parametrize(
    ("name", "precision", "idle"), [("prepack", "bf16", "fp32"), ("deterministic", "fp32", "bf16")]
)
def test_an_engine_option_without_effect_in_a_precision_is_refused(
    name: str, precision: str, idle: str, world: Path
) -> None:
    check_run(run_of(world, **{f"rollout.{name}": False, "train.precision": precision}))
    with pytest.raises(ConfigError, match=rf"`rollout\.{name}=false` changes nothing in `train\.precision={idle}`"):
        check_run(run_of(world, **{f"rollout.{name}": False, "train.precision": idle}))


def test_all_refusals_of_a_run_are_told_in_one_error(world: Path) -> None:
    """Stale rollouts need several options at once, and each was told only after the one before was mended."""
    with pytest.raises(ConfigError, match=r"There are 4 problems\.") as refused:
        check_run(run_of(world, **{"data.train": "[]", "model.path": None, "max_staleness": 1}))
    message = str(refused.value)
    for remedy in ("`model.path=…`", "`data.train=[", "`placement.layout=split`", "`correction.weight=truncate`"):
        assert remedy in message
    assert len(refused.value.problems) == 4
    remedies = {"max_staleness": 1, "placement.layout": "split", "correction.weight": "truncate"}
    check_run(run_of(world, **remedies))


def test_a_single_refusal_is_told_alone(world: Path) -> None:
    with pytest.raises(ConfigError, match=r"^`collect\.metric=right` says"):
        check_run(run_of(world, **{"collect.metric": "right"}))


def test_the_columns_of_the_model_follow_from_the_options(world: Path) -> None:
    assert run_of(world).model_columns() == frozenset(), "the step's only update computes it"
    assert run_of(world, mini_batches=2).model_columns() == run_of(world, ppo_epochs=2).model_columns() == {"old_logp"}
    assert run_of(world, mini_batches=2, **{"correction.policies": "two"}).model_columns() == frozenset()
    assert run_of(world, **{"entropy.top_share": 0.2}).model_columns() == {"old_logp", "entropy"}
    assert run_of(world, advantage="gae").model_columns() == {"value"}
    assert run_of(world, kl="full").model_columns() == {"old_logp", "ref_logp"}


def test_a_metric_that_no_refill_compares_is_refused(world: Path) -> None:
    parts = {
        "reward": "combined",
        "reward.path": None,
        "reward.parts.right": "exact_match",
        "reward.parts.form": "format",
    }
    named = parts | {"reward.parts.form.tags": "[a]", "collect.metric": "right"}
    with pytest.raises(ConfigError, match=r"`collect\.refill=0` replaces none"):
        check_run(run_of(world, **named))
    with pytest.raises(
        ConfigError, match=r"`collect\.metric=left` names no part of this reward, which has right, form"
    ):
        check_run(run_of(world, **named | {"collect.refill": 2, "collect.metric": "left"}))
    check_run(run_of(world, **named | {"collect.refill": 2}))


OF_TURNS: dict[str, tuple[dict[str, object], str]] = {
    "echo": ({"echo": 0.5}, "`echo=0.5` learns to predict"),
    "unit": ({"loss.reduction": "seq-mean-token-mean", "loss.unit": "turn"}, "`loss.unit=turn` takes each turn"),
    **{
        name: ({"advantage": name}, "This advantage compares the turns")
        for name in ("step_rewards", "turn_baseline", "turn_baseline_biased", "mt_grpo", "gigpo")
    },
}


@pytest.mark.parametrize(("change", "named"), [({}, "neither `env` nor"), ({"env.max_turns": 1}, "`env.max_turns=1`")])
def test_options_about_turns_are_refused_for_single_answers(world: Path, change: dict[str, int], named: str) -> None:
    env = {"env.path": "tests.recipes.partners:Echo"}
    for options, message in OF_TURNS.values():
        with pytest.raises(ConfigError, match=f"{message}.* single answer.*{named}"):
            check_run(run_of(world, **options, **(env | change if change else {})))
        check_run(run_of(world, **options, **env))
        check_run(run_of(world, **options, **{"agent.path": "tests.recipes.players:talker"}))


def test_the_context_must_hold_the_longest_prompt_and_answer(world: Path) -> None:
    model, _ = load_policy(run_of(world))
    check_context_length(run_of(world, **{"data.max_prompt_length": 122}), model)
    with pytest.raises(ConfigError, match=r"= 129 tokens \(123 and 6\) do not fit"):
        check_context_length(run_of(world, **{"data.max_prompt_length": 123}), model)


def test_a_server_that_hangs_does_not_make_its_rank_seem_lost(world: Path) -> None:
    """While one rank sends weights to it, the other ranks wait for that rank."""
    options = {"rollout": "vllm", "rollout.weight_transport": "shm", "ranks": 2, "crew.timeout": 120}
    with pytest.raises(ConfigError, match=r"`rollout\.update_timeout=300`.*`crew\.timeout=120` s.*twice as long"):
        check_run(run_of(world, **options))
    check_run(run_of(world, **options, **{"rollout.update_timeout": 60}))
    waits = {"rollout.running": "finish", "ranks": 2, "crew.timeout": 120}
    stale = {"max_staleness": 1, "placement.layout": "split", "correction.weight": "truncate"}
    with pytest.raises(ConfigError, match="waits so long for answers that finish"):
        check_run(run_of(world, **waits, **stale))
    check_run(run_of(world, **options | {"ranks": 1}))
    check_run(run_of(world, **options | {"rollout.weight_transport": "files"}))


@pytest.mark.parametrize("advantage", ["grpo", "rloo"])
def test_an_advantage_of_groups_is_warned_of_a_group_of_one(
    advantage: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from etude.observe import configure_logging

    configure_logging("info")
    check_run(run_of(world, advantage=advantage, collect__group_size=1))
    assert "its bare reward is its advantage" in capsys.readouterr().err
    check_run(run_of(world, advantage=advantage, collect__group_size=2))
    assert capsys.readouterr().err == ""


def test_training_on_truncated_answers_needs_an_engine_that_reports_the_tokens_left(world: Path) -> None:
    check_run(run_of(world, **{"sampling.top_p": 0.9}))
    served = {"rollout": "vllm", "rollout.url": "http://127.0.0.1:9"}
    for kind, package in (("vllm", "vLLM"), ("sglang", "SGLang")):
        with pytest.raises(ConfigError, match=rf"{package} reports the tokens that `sampling\.top_p` keeps only with"):
            check_run(run_of(world, **served | {"rollout": kind}, **{"sampling.top_p": 0.9}))
    cut = {"sampling.top_p": 0.9, "sampling.top_k": 512}
    check_run(run_of(world, **served, **cut))
    with pytest.raises(ConfigError, match=r"vLLM's build for a CPU does not report which.*`rollout\.python`"):
        check_run(run_of(world, rollout="vllm", device="cpu", **cut))
    check_run(run_of(world, rollout="vllm", device="cpu", **cut, **{"sampling.temperature": 0}))
    held_out = {"data.val": f"[{world / 'held_out.jsonl'}]"}
    with pytest.raises(ConfigError, match=r"takes no request without `top_k`.*Set `evaluate\.sampling\.top_k=512`"):
        check_run(run_of(world, **served, **cut, **held_out))
    check_run(run_of(world, **served, **cut, **held_out, **{"evaluate.sampling.temperature": 0}))
    scored = {"evaluate.sampling.top_p": 0.9, "data.val": f"[{world / 'held_out.jsonl'}]"}
    check_run(run_of(world, rollout="vllm", **scored))


def test_answers_for_scoring_must_fit_too(world: Path) -> None:
    options = {"data.val": f"[{world / 'held_out.jsonl'}]"}
    model, _ = load_policy(run_of(world))
    check_context_length(run_of(world, **options, **{"evaluate.sampling.max_tokens": 112}), model)
    with pytest.raises(ConfigError, match=r"`evaluate\.sampling\.max_tokens` = 129 tokens.*context of 128"):
        check_context_length(run_of(world, **options, **{"evaluate.sampling.max_tokens": 113}), model)
    small = {"rollout.kv_gib": 32 * block_bytes(model, 1) / 2**30}
    check_context_length(run_of(world, **options, **small, **{"evaluate.sampling.max_tokens": 16}), model)
    with pytest.raises(ConfigError, match=r"`evaluate\.sampling\.max_tokens` = 33 tokens.*holds 32 tokens"):
        check_context_length(run_of(world, **options, **small, **{"evaluate.sampling.max_tokens": 17}), model)
