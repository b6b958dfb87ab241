"""The texts that `--help` prints of the commands in `cli.py`."""

from __future__ import annotations

__all__ = [
    "ABOUT",
    "ALGORITHMS",
    "CONFIG_SHOW",
    "DEMO",
    "DEMO_AGENT",
    "EVAL",
    "EXPORT",
    "GENERATE",
    "GETTING_STARTED",
    "OVERRIDES",
    "SUPERVISED_CLASSES",
    "SUPERVISED_COMMANDS",
    "SUPERVISED_EPILOG",
    "TRAIN",
]

ABOUT = """\
Etude trains language models, and agents built on them, by reinforcement learning.
Again and again: collect, score, estimate, update, publish."""

GETTING_STARTED = """\
start here:
  etude demo                                  a language model learns to sort digits, in about two minutes
  etude train grpo model.path=my-model data.train=[tasks.parquet] reward=gsm8k
  etude config show                           every option of a run, with its meaning

`etude COMMAND --help` tells more of each."""

OVERRIDES = """\
options of the run are written key=value:
  steps=200                                   a number, a text, a list [1,2]
  loss=gspo                                   a choice, by its name; a wrong name lists the right ones
  loss.clip_high=0.3                          an option of what was chosen
  loss=my_package.losses:MyLoss               a class of your own, from anywhere on PYTHONPATH
  directory='${oc.env:HOME}/runs'             a value from the environment
"""

TRAIN = f"""\
{OVERRIDES}
presets, each a published recipe (`etude config show NAME` tells what it sets):
  cispo, clip_cov, dapo, decoupled_ppo, distillation, dppo, dr_grpo, gdpo, gmpo, gpg,
  grpo, gspo, high_entropy, kl_cov, lite_ppo, m2po, maxrl, opo, pass_at_k, ppo,
  reinforce_pp, reinforce_pp_baseline, remax, rloo, sapo, scalerl, vespo

examples:
  etude train grpo model.path=Qwen3-0.6B data.train=[gsm8k/train.parquet] data.val=[gsm8k/test.parquet] reward=gsm8k
  etude train dapo --config mine.yaml         a preset, then a file over it, then the command line over both
  etude train --resume runs/train-20260101-120000
  etude train grpo … reward=function reward.path=my_reward.py:score
  etude train grpo … --multirun seed=0,1,2    one run for each

Ctrl-C finishes the step, saves, and says how to go on; pressed twice, it stops at once."""

SUPERVISED_COMMANDS = {
    "sft": ("teach a model by demonstrations: supervised fine-tuning", "data.train=[chats.jsonl] epochs=2"),
    "dpo": ("teach a model what people prefer, by pairs of answers", "data.train=[pairs.jsonl] loss.beta=0.1"),
    "reward-model": ("train a model that scores answers, from what people prefer", "data.train=[pairs.jsonl]"),
    "distill": ("teach a model what a larger one thinks", "teacher.path=Qwen3-4B data.train=[texts.jsonl]"),
}
"""The commands that learn from examples: what each does, and what its options look like."""
SUPERVISED_CLASSES = {
    "sft": "etude.recipes.supervised.sft:SFTRun",
    "dpo": "etude.recipes.supervised.dpo:DPORun",
    "reward-model": "etude.recipes.supervised.reward_model:RewardModelRun",
    "distill": "etude.recipes.supervised.distill:DistillRun",
}
"""The classes whose fields are their options, without importing them."""

SUPERVISED_EPILOG = f"""\
{OVERRIDES}
examples:
  etude NAME model.path=Qwen3-0.6B OPTIONS
  etude NAME --config mine.yaml               a file, then the command line over it
  etude NAME --resume runs/NAME-20260101-120000
  etude NAME … --multirun train.learning_rate=1e-5,2e-5

`etude config show NAME` prints every option. Ctrl-C finishes the step, saves, and says how to go on."""

EVAL = """\
examples:
  etude eval runs/train-20260101-120000                       the run's own data.val, by its newest checkpoint
  etude eval runs/train-20260101-120000 --best evaluate.samples=8 data.val=[other.parquet]
  etude eval model.path=Qwen3-0.6B data.val=[gsm8k/test.parquet] reward=gsm8k"""

GENERATE = """\
examples:
  etude generate runs/train-20260101-120000 "What is 2 + 2?"
  etude generate Qwen3-0.6B "What is 2 + 2?" sampling.temperature=0 sampling.max_tokens=200
  echo "What is 2 + 2?" | etude generate Qwen3-0.6B -n 4
  etude generate Qwen3-0.6B --raw "Once upon a time"

The prompt is a user's message where the model has a chat template, unless --raw has it continued as it stands."""

EXPORT = """\
examples:
  etude export runs/train-20260101-120000 my-model          the newest checkpoint, to load anywhere
  etude export runs/train-20260101-120000 my-model --best
  etude export runs/train-20260101-120000 my-model --push you/my-model --private
  etude export rollouts --help                              what a run has collected, for others to learn from"""

DEMO = """\
examples:
  etude demo                                  a language model from nothing to good, in about two minutes
  etude demo seed=1 --json                    the outcome as one JSON object on the last line
  etude demo agent                            an agent written for OpenAI's client learns to use its tools
  etude demo algorithms --help                every loss on a problem that can be solved exactly"""

DEMO_AGENT = """\
examples:
  etude demo agent                            runners are processes of their own
  etude demo agent agent.strategy=shm         runners are threads of this process
  etude demo agent seed=1 --json              the outcome as one JSON object on the last line"""

ALGORITHMS = f"""\
{OVERRIDES}
examples:
  etude demo algorithms                       every loss in turn
  etude demo algorithms loss=dppo updates=4   one loss, further off its data
  etude demo algorithms kl=reverse            every loss, held to the reference
  etude demo algorithms advantage=gae         with values that are exact
  etude demo algorithms noise=0.5 correction.weight=truncate loss=ppo
  etude demo algorithms --multirun advantage=grpo,rloo,remax
  etude demo algorithms --config mine.yaml    a file of `key: value` lines; the command line goes over it"""

CONFIG_SHOW = f"""\
{OVERRIDES}
examples:
  etude config show                           the defaults of `etude train`
  etude config show dapo                      a preset
  etude config show sft                       the options of `etude sft`
  etude config show kl=reverse                what changes, and which options it brings
  etude config show --demo loss=gspo          the options of `etude demo algorithms`
  etude config show grpo loss=gspo --yaml > mine.yaml
  etude config show --config mine.yaml"""
