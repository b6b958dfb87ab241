"""`etude replay`: a recorded step is computed again exactly, or under another algorithm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, Outputs
from etude.algorithms.corrections import CorrectionConfig, opsm_mask
from etude.algorithms.view import View
from etude.batch import Batch
from etude.cli import main
from etude.recipes.run.builders.assemble import build
from etude.recipes.run.loop import run_loop
from etude.recipes.workers.policy_worker import PolicyWorker
from etude.tools.replay.command import replay
from etude.tools.replay.files import STATES, read_tokens
from etude.tools.replay.observer import CLIPPED, LEVEL, MASKED, TRAINED, StepObserver
from etude.tools.replay.options import read_options
from etude.tools.replay.report import conclusions
from etude.tools.replay.trainer import open_trainer, read_steps
from etude.tools.rollout_reader import open_journal
from tests.algorithms.losses import off_policy
from tests.recipes.runs import Captured, refused, run_of, same, step_metrics, weights


class Gradients:
    """Keeps the gradient of every update, before it is clipped."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def see_loss(self, batch: Batch, outputs: Outputs, whole: Denominators, state: AlgorithmState) -> None:
        """Keep nothing of a micro-batch."""

    def see_gradient(self, gradient: Mapping[str, Tensor], factor: float) -> None:
        """Keep a copy."""
        self.seen.append({name: value.detach() * factor for name, value in gradient.items()})


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the bytes of every file of a run but for its replays, and for what SQLite leaves beside a journal that was
    read: an index and an empty log."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and "replays" not in path.parts)
    contents = {str(path): path.read_bytes() for path in files if not path.name.endswith("-shm")}
    return {path: content for path, content in contents.items() if content or not path.endswith("-wal")}


def replayed(directory: Path, out: Path, *overrides: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the result of a replay, and its token columns."""
    result = replay(read_options(directory, overrides), 3, out=out, silent=True, **options)
    assert json.loads(Path(result["file"]).read_text())["rollouts"] == result["rollouts"]
    with np.load(result["tokens"]) as columns:
        return result, dict(columns)


@pytest.mark.slow
def test_a_replayed_step_has_the_gradients_of_the_run(world: Path, tmp_path: Path) -> None:
    """All updates of a step are equal bit for bit. Only the last checkpoint is kept, so two steps are trained again."""
    algorithm = {"mini_batches": 2, "ppo_epochs": 2, "kl": "reverse", "kl.controller": "adaptive"}
    run = run_of(world, directory=tmp_path / "run", steps=3, checkpoint__keep=1, **algorithm)
    gradients = Gradients()
    with build(run) as parts:
        parts.learners.crew.call(PolicyWorker.observe, gradients)
        run_loop(parts)
    options = read_options(tmp_path / "run", [])
    with open_journal(tmp_path / "run") as store:
        steps = read_steps(options.recorded, store)
        with open_trainer(options.recorded, steps) as trainer:
            replays = [StepObserver(options.recorded) for _ in steps.steps]
            for step, observer in zip(steps.steps, replays, strict=True):
                trainer.train(step, observer)
    for step, observer in enumerate(replays):
        first = gradients.seen[4 * step]
        assert observer.updates == 4 and observer.gradient.keys() == first.keys()
        assert same(observer.gradient, first)
    result, _ = replayed(tmp_path / "run", tmp_path / "out")
    assert (result["checkpoint"], result["replayed"], result["exact"]) == (0, 2, True)


@pytest.mark.slow
@pytest.mark.parametrize("made_by", ["whole", "talked"])
def test_training_on_without_changes_ends_in_the_weights_of_the_run(
    made_by: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The rollouts of an engine, and those of an agent. The run's own files stay as they are."""
    directory: Path = request.getfixturevalue(made_by)
    before, last = files_of(directory), len(step_metrics(directory))
    result = replay(read_options(directory, ()), 2 if last > 2 else 1, to=last, out=tmp_path / "on", silent=True)
    assert result["exact"] and result["sides"]["changed"] is None
    assert same(weights(tmp_path / "on"), weights(directory))
    assert files_of(directory) == before
    assert [step["step"] for step in step_metrics(tmp_path / "on")] == list(range(result["step"], last + 1))


@pytest.mark.slow
def test_the_weight_of_a_token_is_its_part_in_the_loss(whole: Path, tmp_path: Path) -> None:
    """With one update, PPO gives each token its advantage, divided by the number of tokens."""
    result, tokens = replayed(whole, tmp_path, "loss.reduction=seq-mean-token-sum")
    assert result["changed"] == {"loss.reduction": ["token-mean", "seq-mean-token-sum"]}
    advantage = {each["rollout"]: each["recorded"]["advantage"] for each in result["rollouts"]}
    expected = np.array([advantage[rollout] for rollout in tokens["rollout"]])
    np.testing.assert_allclose(tokens["weight_recorded"], expected / len(expected), rtol=1e-5)
    np.testing.assert_allclose(tokens["weight_changed"], expected / len(result["rollouts"]), rtol=1e-5)
    gradient = result["difference"]["gradient"]
    assert gradient["cosine"] == pytest.approx(1)
    assert gradient["norm_ratio"] == pytest.approx(len(expected) / len(result["rollouts"]), rel=1e-4)
    assert set(tokens["state_recorded"]) <= {TRAINED, LEVEL}
    np.testing.assert_allclose(tokens["advantage_changed"], expected, rtol=1e-5)
    assert (tokens["entropy"] > 0).all() and "ref_logp" not in tokens
    np.testing.assert_allclose(tokens["logp_recorded"], tokens["start_logp"], atol=1e-6)
    rollout = result["rollouts"][1]["rollout"]
    for name, column in read_tokens(Path(result["file"]), rollout).items():
        np.testing.assert_array_equal(column, tokens[name][tokens["rollout"] == rollout])
    assert tokens["index"].max() < 6 and (tokens["index"][tokens["turn"] == 0] == 0).any()


@pytest.mark.slow
def test_an_other_algorithm_is_compared_with_that_of_the_run(whole: Path, tmp_path: Path) -> None:
    """Clipped and masked tokens are counted, and the gradient differs."""
    changes = ("loss.clip_low=1e-6", "loss.clip_high=1e-6", "ppo_epochs=3", "mask_truncated=true")
    result, tokens = replayed(whole, tmp_path, *changes)
    recorded, changed = (result["sides"][name] for name in ("recorded", "changed"))
    assert (recorded["updates"], changed["updates"]) == (1, 3)
    assert recorded["clipped"] == recorded["masked"] == 0
    for name, code in zip(STATES, (TRAINED, CLIPPED, MASKED, LEVEL), strict=True):
        assert changed[name] == int((tokens["state_changed"] == code).sum())
    assert changed["clipped"] and changed["masked"] and changed["dropped_rollouts"]
    assert result["difference"]["states"]["masked"] == {"left": 0, "came": changed["masked"]}
    assert not result["difference"]["gradient"]["identical"]
    assert -1 <= result["difference"]["gradient"]["cosine"] < 1
    same_loss = replayed(whole, tmp_path, "loss=gmpo")[0]
    assert "Both losses agree" in conclusions(same_loss)[-1] and not same_loss["difference"]["movers"]
    movers = result["difference"]["movers"]
    differences = [abs(mover["changed"] - mover["recorded"]) for mover in movers]
    assert differences == sorted(differences, reverse=True)
    assert differences[0] == pytest.approx(np.abs(tokens["weight_changed"] - tokens["weight_recorded"]).max())


def test_a_token_that_the_sequence_mask_drops_counts_as_masked() -> None:
    """OPSM reads the policy of the update, so the batch of the step does not have its mask."""
    batch = off_policy()
    view = View(batch)
    outputs = Outputs(logp=batch.require("old_logp") - 0.2)
    algorithm = AlgorithmConfig(correction=CorrectionConfig(opsm_delta=0.05))
    observer, whole, state = StepObserver(algorithm), Denominators.from_view(view), AlgorithmState()
    batch = observer.begin(batch.replace(keep=batch.action, weight=None), batch)
    dropped = ~opsm_mask(View(batch, outputs), 0.05, "rollout")
    assert dropped.any() and not dropped.all()
    for logp in (outputs.logp, batch.behavior_logp):  # the second update trains on all
        observer.see_loss(batch, Outputs(logp=logp), whole, state)
        assert ((observer.state == MASKED) == dropped).all()


@pytest.mark.slow
def test_the_command_shows_both_algorithms_and_trains_on(whole: Path, tmp_path: Path, capsys: Captured) -> None:
    """The directory of the new weights is no run to resume, and its model can be exported."""
    on = tmp_path / "on"
    assert (
        main(["replay", str(whole), "--step", "3", "--to", "4", "--out", str(on), "loss=gspo", "advantage=rloo"]) == 0
    )
    shown = capsys.readouterr()
    for word in ("advantage", "gradient norm", "Change of the weights", "recorded", "changed", str(on)):
        assert word in shown.out
    assert "off-policy" in shown.err and "grad_norm" not in shown.out
    assert not same(weights(on), weights(whole))
    assert "etude replay" in refused(capsys, "train", "--resume", str(on))
    assert main(["export", str(on), str(tmp_path / "model")]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--step", "3", "sampling.temperature=0.5"], "does not read `sampling.temperature`"),
        (["--step", "9"], "recorded the steps 1 to 4"),
        (["--step", "3", "--to", "2"], "is before --step 3"),
        (["--step", "3", "advantage=gae"], "has trained none"),
        (["--step", "3", "advantage=remax"], "has sampled none"),
        (["--step", "3", "--to", "4", "--out", "."], "is not empty"),
    ],
)
def test_a_replay_that_cannot_be_made_is_refused(words: list[str], message: str, whole: Path, capsys: Captured) -> None:
    """Each refusal names the flag or the option."""
    assert message in refused(capsys, "replay", str(whole), *words)
