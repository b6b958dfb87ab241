"""The training loop as a short program: the one of the introduction, and the errors that users make in it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import etude
from etude import PPOTrainer, RLConfig
from etude.envs import LanguageModelEnv
from etude.errors import ConfigError, DataError, RewardError
from etude.models import create, save, tiny_config
from etude.recipes.presets import PRESETS
from etude.rewards import REWARDS
from tests.worlds import make_tokenizer

SKETCH = """
from etude import PPOTrainer, RLConfig
from etude.envs import LanguageModelEnv
from transformers import AutoTokenizer, AutoModelForCausalLM

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")

config = RLConfig(
    algorithm="ppo",
    batch_size=32,
    learning_rate=5e-5,
    clip_epsilon=0.2
)

env = LanguageModelEnv(tokenizer, model, REWARD)

trainer = PPOTrainer(config=config, env=env)

for epoch in range(EPOCHS):
    trajectories = trainer.collect_rollouts()
    rewards = trainer.compute_rewards(trajectories)
    trainer.optimize(trajectories, rewards)
    print(f"Epoch {epoch}: reward avg = {rewards.mean()}")
"""
"""The program of the introduction that the interface was modelled on."""

FORKED = """
import os, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from etude.ppo_trainer import PPOTrainer
from etude.envs import LanguageModelEnv

codes, folder = [], Path(sys.argv[1])
for number, program in enumerate(sys.argv[2:]):
    if (child := os.fork()) == 0:
        for stream in (1, 2):
            os.dup2(os.open(folder / f"{number}{stream}", os.O_WRONLY | os.O_CREAT), stream)
        exec(compile(program, "program", "exec"), {"__name__": "__main__"})
        sys.exit()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
(folder / "codes").write_text(" ".join(map(str, codes)))
"""
"""Programs, each in its own process; their output is in files."""


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random GPT-2 model with a tokenizer."""
    directory = tmp_path_factory.mktemp("gpt2")
    size = make_tokenizer(directory)
    save(create(tiny_config(size, family="gpt2", layers=1, hidden=16, heads=2, context=128), seed=0), directory)
    return directory


def digits(answer: str) -> float:
    """Return the share of digits in each answer."""
    return sum(letter.isdigit() for letter in answer) / max(len(answer), 1)


def env(directory: Path, **more: Any) -> LanguageModelEnv:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return LanguageModelEnv(AutoTokenizer.from_pretrained(directory), model, **more)


@pytest.fixture
def trainers() -> Iterator[list[PPOTrainer]]:
    made: list[PPOTrainer] = []
    yield made
    for one in made:
        one.close()


def trainer(made: list[PPOTrainer], config: RLConfig, env: LanguageModelEnv) -> PPOTrainer:
    made.append(PPOTrainer(config=config, env=env))
    return made[-1]


def small(**more: Any) -> RLConfig:
    given = {"algorithm": "grpo", "batch_size": 4, "group_size": 4, "max_tokens": 6, "learning_rate": 0.01, **more}
    return RLConfig(**given)


def test_the_introductions_program_runs_as_it_is_written_and_has_one_clear_error(gpt2: Path, tmp_path: Path) -> None:
    """Two programs, one with a reward and one without, forked from a process that has loaded the large libraries."""
    reward = "reward=lambda answer: sum(letter.isdigit() for letter in answer) / max(len(answer), 1)"
    written = SKETCH.replace("PATH", str(gpt2)).replace("EPOCHS", "1")
    programs = [written.replace("REWARD", reward), written.replace(", REWARD", "")]
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path), *programs], check=True, timeout=120)
    codes = [int(code) for code in (tmp_path / "codes").read_text().split()]
    (output, error), (_, refused) = (
        [(tmp_path / f"{number}{stream}").read_text() for stream in (1, 2)] for number in range(2)
    )
    assert codes == [0, 1], error
    lines = [line for line in output.splitlines() if line.startswith("Epoch")]
    assert len(lines) == 1 and all(0 <= float(line.rpartition("= ")[2]) <= 1 for line in lines)
    assert refused.count("Traceback") == 1
    assert "compute_rewards" in refused and "LanguageModelEnv(tokenizer, model, reward=f)" in refused


def test_the_given_model_learns(gpt2: Path, trainers: list[PPOTrainer]) -> None:
    world = env(gpt2, prompts=["1+1=", "2+2=", "3+1=", "5+3="], reward=lambda prompt, answer: digits(answer))
    generate: Any = world.model.generate
    first = generate(torch.tensor([[5, 6]]), do_sample=False, max_new_tokens=5)
    before = {name: weight.clone() for name, weight in world.model.named_parameters()}
    practice = trainer(trainers, small(), world)
    means = []
    for _ in range(25):
        trajectories = practice.collect_rollouts()
        rewards = practice.compute_rewards(trajectories)
        metrics = practice.optimize(trajectories, rewards)
        means.append(float(rewards.mean()))
    assert np.mean(means[-5:]) > np.mean(means[:5]) + 0.2, means
    assert metrics["grad_norm"] > 0 and len(trajectories) == 16 and len(set(trajectories.prompts)) == 4
    changed = {name for name, weight in world.model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == before.keys()
    again = generate(torch.tensor([[5, 6]]), do_sample=False, max_new_tokens=5)
    assert again.shape == first.shape, "it still works by itself"
    ours = practice._engine.model
    ids = torch.tensor([[5, 6, 7]])
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), world.model.parameters(), strict=True))
    assert torch.isfinite(world.model(ids).logits).all()


@pytest.mark.parametrize("algorithm", ["ppo", "rloo", "reinforce_pp", "gspo"])
def test_any_preset_can_be_used(algorithm: str, gpt2: Path, trainers: list[PPOTrainer]) -> None:
    config = small(algorithm=algorithm, group_size=None if algorithm in ("ppo", "reinforce_pp") else 4)
    practice = trainer(trainers, config, env(gpt2, reward=digits))
    for _ in range(2):
        trajectories = practice.collect_rollouts()
        metrics = practice.optimize(trajectories, practice.compute_rewards(trajectories))
    assert metrics["optimizer_steps"] == practice.run.mini_batches
    assert ("critic/loss" in metrics) == (algorithm == "ppo") and ("kl" in metrics) == (algorithm == "reinforce_pp")


def test_a_schedule_ends_with_the_steps_in_which_the_policy_learns(gpt2: Path, trainers: list[PPOTrainer]) -> None:
    options = {"steps": 3, "critic.warmup": 1, "train.lr_scheduler": "linear"}
    practice = trainer(trainers, small(algorithm="ppo", learning_rate=0.01, options=options), env(gpt2, reward=digits))
    metrics = []
    for _ in range(3):
        trajectories = practice.collect_rollouts()
        metrics.append(practice.optimize(trajectories, practice.compute_rewards(trajectories)))
    updates = practice.run.mini_batches * practice.run.ppo_epochs
    rates = [step.get("learning_rate") for step in metrics]
    assert rates == [None, *(pytest.approx(0.01 * (1 - (n * updates - 1) / (2 * updates))) for n in (1, 2))]


def test_each_field_stands_for_an_option() -> None:
    config = RLConfig(
        algorithm="grpo",
        batch_size=3,
        group_size=5,
        learning_rate=0.5,
        clip_epsilon=0.25,
        mini_batches=2,
        ppo_epochs=4,
        max_tokens=9,
        temperature=0.75,
        seed=11,
        options={"kl": "reverse", "kl.coefficient": 0.125},
    )
    run = config.compose_run()
    assert (run.collect.tasks, run.collect.group_size, run.mini_batches, run.ppo_epochs, run.seed) == (3, 5, 2, 4, 11)
    assert run.train.learning_rate == 0.5 and run.sampling.max_tokens == 9 and run.sampling.temperature == 0.75
    assert run.kl is not None and run.kl.coefficient == 0.125
    assert (run.loss.clip_low, run.loss.clip_high) == (0.25, 0.25)  # type: ignore[attr-defined]
    named = {name for name in RLConfig.__dataclass_fields__ if name != "RUN_OPTIONS"}
    assert named == set(RLConfig.RUN_OPTIONS) | {"algorithm", "options"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "RLConfig.batch_size must be at least 1; 0 was given."),
        ({"batch_size": "many"}, "RLConfig.batch_size expects a whole number; 'many' was given."),
        ({"learning_rate": -1.0}, "RLConfig.learning_rate must be at least 0; -1.0 was given."),
        ({"temperature": -1}, "RLConfig.temperature must be"),
        ({"max_tokens": 0}, "RLConfig.max_tokens must be at least 1; 0 was given."),
        ({"options": {"collect.tasks": 0}}, "collect.tasks must be at least 1; 0 was given."),
    ],
)
def test_an_invalid_field_is_refused_by_its_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RLConfig(**given)
    assert str(caught.value).startswith(message)


def test_wrong_arguments_are_reported(gpt2: Path, trainers: list[PPOTrainer]) -> None:
    with pytest.raises(ConfigError, match=r"no algorithm 'ppp'.*ppo"):
        RLConfig(algorithm="ppp")
    with pytest.raises(ConfigError, match="Did you mean"):
        RLConfig(options={"kll": "reverse"})
    with pytest.raises(ConfigError, match=r"`collect\.tasks` is in `options`, and is given as `batch_size=…` too"):
        RLConfig(batch_size=4, options={"collect.tasks": 8})
    with pytest.raises(ConfigError, match=r"`train\.precision` follows from the model"):
        PPOTrainer(config=small(options={"train.precision": "bf16"}), env=env(gpt2))
    for prompts, message in (("1 to:", "put it into a list"), ([], "The list of prompts is empty")):
        with pytest.raises(ConfigError, match=message):
            PPOTrainer(config=small(), env=env(gpt2, prompts=prompts))
    with pytest.raises(ConfigError, match=r"^RLConfig\.clip_epsilon is not an option"):
        RLConfig(algorithm="rloo", clip_epsilon=0.2)
    with pytest.raises(ConfigError, match=r"`lora\.rank` has no effect in a PPOTrainer"):
        RLConfig(options={"lora.rank": 8})
    with pytest.raises(ConfigError, match="`etude train distillation`"):
        PPOTrainer(config=small(algorithm="distillation"), env=env(gpt2))
    for beyond in ("gdpo", "remax"):
        with pytest.raises(ConfigError, match=f"`{beyond}` needs more than answers and one reward for each"):
            PPOTrainer(config=small(algorithm=beyond, group_size=None), env=env(gpt2))
    with pytest.raises(ConfigError, match="context of 128"):
        PPOTrainer(config=small(max_tokens=500), env=env(gpt2))
    practice = trainer(trainers, small(), env(gpt2, reward=digits))
    drawn = practice.collect_rollouts()
    for wrong in ([1.0], np.full(len(drawn), np.nan)):
        with pytest.raises(DataError, match="one finite reward for each of the 16"):
            practice.optimize(drawn, wrong)
    practice.optimize(drawn, np.arange(16) % 3)
    with pytest.raises(DataError, match="sampled by version 0 of the policy, which is at version 1"):
        practice.optimize(drawn, np.arange(16) % 3)


def test_rewards_of_every_kind(gpt2: Path, trainers: list[PPOTrainer]) -> None:
    async def slowly(answer: str) -> float:
        await asyncio.sleep(0.001)
        return digits(answer)

    def broken(answer: str) -> float:
        raise ValueError(f"no {answer[:0]}")

    rows = [{"prompt": "1+1=", "answer": "2"}]
    first, *others = (
        trainer(trainers, small(batch_size=1), env(gpt2, prompts=rows, reward=reward))
        for reward in (digits, slowly, REWARDS["exact_match"](), broken)
    )
    drawn = first.collect_rollouts()
    assert first.compute_rewards(drawn).tolist() == [digits(answer) for answer in drawn.answers]
    assert others[0].compute_rewards(drawn).tolist() == first.compute_rewards(drawn).tolist()
    assert others[1].compute_rewards(drawn).tolist() == [float(answer == "2") for answer in drawn.answers]
    with pytest.raises(RewardError, match="ValueError"):
        others[2].compute_rewards(drawn)


def test_a_reward_is_given_what_it_takes(gpt2: Path, trainers: list[PPOTrainer]) -> None:
    def as_in_verl(solution_str: str, ground_truth: str, **others: object) -> float:
        assert ground_truth == "2" and others["data_source"] == ""
        return digits(solution_str)

    def scaled(answer: str, scale: float = 1.0) -> float:
        return digits(answer) * scale

    def of_two(prompt: str, answer: str, *, scale: float = 1.0) -> float:
        assert prompt == "1+1="
        return scaled(answer, scale)

    rows = [{"prompt": "1+1=", "answer": "2"}]
    drawn = trainer(trainers, small(batch_size=1), env(gpt2, prompts=rows)).collect_rollouts()
    for reward in (as_in_verl, scaled, of_two):
        practice = trainer(trainers, small(batch_size=1), env(gpt2, prompts=rows, reward=reward))
        assert practice.compute_rewards(drawn).tolist() == [digits(answer) for answer in drawn.answers]
    for wrong in (lambda a, b, c: 0.0, lambda a, *, b: 0.0):
        practice = trainer(trainers, small(batch_size=1), env(gpt2, prompts=rows, reward=wrong))
        with pytest.raises(ConfigError, match=r"it is called as f\(prompt, answer\), or f\(answer\)"):
            practice.compute_rewards(drawn)


def test_it_works_in_a_running_event_loop(gpt2: Path, trainers: list[PPOTrainer]) -> None:
    async def notebook() -> float:
        practice = trainer(trainers, small(), env(gpt2, reward=digits))
        drawn = practice.collect_rollouts()
        return practice.optimize(drawn, practice.compute_rewards(drawn))["grad_norm"]

    assert asyncio.run(notebook()) > 0


def test_the_package_exports_its_public_names() -> None:
    assert etude.PPOTrainer is PPOTrainer and set(etude.__all__) >= {"PPOTrainer", "RLConfig"}
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = etude.Nothing
    done = subprocess.run(
        [sys.executable, "-c", "import sys, etude; assert 'torch' not in sys.modules"], check=False, timeout=60
    )
    assert done.returncode == 0 and "ppo" in PRESETS
