"""The texts that `--help` prints after the options of a command, each line at most 80 columns wide."""

from __future__ import annotations

from textwrap import fill

from etude.recipes.presets import PRESETS

ABOUT = """\
Train language models, and agents built on them, by reinforcement learning.
Each step samples rollouts, scores them, estimates advantages, updates the
policy and publishes its weights to the inference engine."""

GETTING_STARTED = """\
start here:
  etude demo               train a small model to sort digits (3 minutes)
  etude init my-run        write data, a reward, options and a test to change
  etude config show grpo   print every option of a preset, with its meaning
  etude train grpo model.path=my-model data.train=[tasks.parquet] reward=gsm8k

`etude COMMAND --help` prints the options of a command, with examples."""

OVERRIDES = """\
run options are written key=value:
  steps=200                         a number, a string or a list [1,2]
  loss=gspo                         a choice by name; a wrong name lists all
  loss.clip_high=0.3                an option of that choice
  loss=my_package.losses:MyLoss     your own class, found on PYTHONPATH
  directory='${oc.env:HOME}/runs'   a value from the environment
"""

TRAIN = f"""\
{OVERRIDES}
presets, each a published recipe (`etude config show NAME` prints its options):
{fill(", ".join(PRESETS), 78, initial_indent="  ", subsequent_indent="  ")}

examples:
  etude train grpo model.path=Qwen3-0.6B reward=gsm8k \\
      data.train=[data/gsm8k/train.parquet] data.val=[data/gsm8k/test.parquet]
  etude train grpo model.path=Qwen3-0.6B data.train=[mine.jsonl] \\
      reward=function reward.path=my_reward.py:score
  etude train dapo --config mine.yaml steps=200
  etude train --resume runs/train-20260101-120000
  etude train grpo --config mine.yaml --multirun seed=0,1,2

Options come from the preset, then from the file, then from the command line;
the last one wins. `etude data prepare gsm8k` writes the files of the example.

Ctrl-C finishes the current step, saves a checkpoint and prints how to resume.
A second Ctrl-C stops at once."""

SUPERVISED_COMMANDS = {
    "sft": ("fine-tune a model on demonstrations (SFT)", "data.train=[chats.jsonl] epochs=2"),
    "dpo": ("train a model on preference pairs (DPO)", "data.train=[pairs.jsonl] loss.beta=0.1"),
    "reward-model": ("train a reward model on preference pairs", "data.train=[pairs.jsonl]"),
    "distill": (
        "train a model on the token distributions of a teacher",
        "data.train=[texts.jsonl] \\\n      teacher.path=Qwen3-4B",
    ),
}
"""The supervised commands: the summary of each, and its options in the first example."""
SUPERVISED_CLASSES = {
    "sft": "etude.recipes.supervised.runs:SFTRun",
    "dpo": "etude.recipes.supervised.runs:DPORun",
    "reward-model": "etude.recipes.supervised.runs:RewardModelRun",
    "distill": "etude.recipes.supervised.runs:DistillRun",
}
"""The class of each supervised command's options, as `module:Name`: the help must not import it."""

SUPERVISED_EPILOG = """\
run options are written key=value:
  steps=200                         a number, a string or a list [1,2]
  train.precision=fp32              a choice by name; a wrong name lists all
  loss=my_package.losses:MyLoss     your own class, found on PYTHONPATH
  directory='${oc.env:HOME}/runs'   a value from the environment

examples:
  etude NAME model.path=Qwen3-0.6B OPTIONS
  etude NAME --config mine.yaml train.learning_rate=1e-5
  etude NAME --resume runs/NAME-20260101-120000
  etude NAME --config mine.yaml --multirun train.learning_rate=1e-5,2e-5

`etude config show NAME` prints every option.

Ctrl-C finishes the current step, saves a checkpoint and prints how to resume."""

EVAL = """\
examples:
  etude eval runs/train-20260101-120000
  etude eval runs/train-20260101-120000 --best evaluate.samples=8
  etude eval runs/train-20260101-120000 data.val=[other.parquet]
  etude eval model.path=Qwen3-0.6B data.val=[data/gsm8k/test.parquet] \\
      reward=gsm8k

With a run, the tasks are its own `data.val` and the model is its newest
checkpoint, unless the command line says otherwise."""

GENERATE = """\
examples:
  etude generate runs/train-20260101-120000 "What is 2 + 2?"
  etude generate Qwen3-0.6B "What is 2 + 2?" sampling.temperature=0
  echo "What is 2 + 2?" | etude generate Qwen3-0.6B -n 4
  etude generate Qwen3-0.6B --raw "Once upon a time"

Where the model has a chat template, the prompt is sent as a user message.
With --raw the model continues the text itself."""

EXPORT = """\
examples:
  etude export runs/train-20260101-120000 my-model
  etude export runs/train-20260101-120000 my-model --best
  etude export runs/train-20260101-120000 my-model --push you/my-model --private
  etude export rollouts --help

Transformers, vLLM and SGLang load the exported model directory."""

DEMO = """\
examples:
  etude demo                     train a small language model (3 minutes)
  etude demo agent               train an agent that uses the OpenAI client
  etude demo vision              train a model to count shapes in pictures
  etude demo algorithms --help   compare losses on a small problem"""

DEMO_AGENT = """\
examples:
  etude demo agent                      runners are separate processes
  etude demo agent agent.strategy=shm   runners are threads of this process
  etude demo agent seed=1 --json        print the result as JSON"""

ALGORITHMS = f"""\
{OVERRIDES}
examples:
  etude demo algorithms                            every loss in turn
  etude demo algorithms loss=dppo mini_batches=4   one loss, off-policy updates
  etude demo algorithms kl=reverse                 with a KL term
  etude demo algorithms advantage=gae              with an exact critic
  etude demo algorithms noise=0.5 correction.weight=truncate loss=ppo
  etude demo algorithms --multirun advantage=grpo,rloo,remax
  etude demo algorithms --config mine.yaml         with options from a file"""

CONFIG_SHOW = f"""\
{OVERRIDES}
examples:
  etude config show                    the defaults of `etude train`
  etude config show dapo               the options of a preset
  etude config show sft                the options of `etude sft`
  etude config show kl=reverse         the options that a choice adds
  etude config show --demo loss=gspo   the options of `etude demo algorithms`
  etude config show grpo loss=gspo --yaml > mine.yaml
  etude config show --config mine.yaml"""

PREPARE = """\
data sets, from the raw files as published:
  gsm8k         openai/gsm8k: Parquet or JSONL with `question` and `answer`
  math          MATH, MATH-500: one JSON file a problem, Parquet or JSONL
  instructions  google/IFEval: JSONL with prompts and their constraints
  preferences   preference pairs: HH-RLHF, UltraFeedback, or TRL's columns
  pictures      CLEVR, GeoQA, Geometry3K: questions with `image` or `images`
data sets that are generated:
  countdown     reach a target number from given numbers
  arithmetic    sums, differences and products

examples:
  etude data prepare gsm8k raw=raw/gsm8k
  etude data prepare math raw=raw/math held_out=0.05 levels=[3,4,5]
  etude data prepare countdown train=50000 test=500 numbers=[3,4] seed=1
  etude data prepare pictures raw=raw/clevr directory=data/clevr
  etude data prepare gsm8k --options   print every option of a data set"""

DATA_SHOW = """\
examples:
  etude data show data/gsm8k/train.parquet
  etude data show data/gsm8k/train.parquet --model Qwen3-0.6B -n 1 \\
      chat.template_kwargs.enable_thinking=false
  etude data show openai/gsm8k/main:test columns.prompt=question
  etude data show mine.jsonl columns.prompt=question columns.answer=result"""

ROLLOUTS = """\
formats:
  --as sft      rows for `etude sft` (.parquet, .jsonl), made of the rollouts
                that succeeded with a reward of at least --min-reward
  --as dpo      pairs for `etude dpo` and `etude reward-model`, made of the best
                and the worst rollout of each task
  --as jsonl    everything recorded, one rollout a line: its task, its attempts,
                and their turns with text, token ids and log-probs
  --as otlp     one OpenTelemetry trace a line (OTLP/JSON), for a collector or
                its otlpjsonfile receiver

sft and dpo rows hold the recorded token ids (--form ids), and need a model with
the same vocabulary. With --form text they hold text, for any model. The run may
still be in progress: the command writes the rollouts recorded so far.

examples:
  etude export rollouts runs/mine good.parquet --as sft --min-reward 1
  etude export rollouts runs/mine pairs.parquet --as dpo --min-gap 0.5
  etude export rollouts runs/mine plans.jsonl --as sft --tags planner
  etude export rollouts runs/mine everything.jsonl --split all
  etude export rollouts runs/mine traces.jsonl --as otlp"""

CHAT = """\
examples:
  etude chat runs/train-20260101-120000
  etude chat runs/train-20260101-120000 --best
  etude chat Qwen3-0.6B sampling.temperature=0.7 sampling.max_tokens=1000
  printf 'Hello.\\nAnd again?\\n' | etude chat Qwen3-0.6B

Each line is a user message. Each answer continues the exact tokens of the
conversation. `/new` starts a new conversation; `/quit`, Ctrl-D or Ctrl-C at the
prompt ends. Ctrl-C during an answer stops that answer.

See `etude generate` for one question, and `etude serve` for programs."""

PLAN = """\
examples:
  etude plan grpo model.path=Qwen3-0.6B
  etude plan grpo model.path=Qwen3-4B gpus=8 gpu_gib=80 sampling.max_tokens=8192
  etude plan grpo model.path=Qwen3-4B gpu_gib=80 train.offload=true --quick
  etude plan grpo model.path=Qwen3-4B gpus=4 gpu_gib=80 rollout=vllm \\
      rollout.replicas=2 rollout.devices=[2,3]
  etude plan dpo model.path=Qwen3-4B gpus=2 gpu_gib=80 data.max_tokens=4096

The first word is a preset of `etude train`, or a supervised recipe: sft, dpo,
reward-model, distill.

The command runs one step on fake tensors, which allocate no memory. It reads
only the model's config.json and tokenizer. The exit code is 1 if the run does
not fit."""

SIMULATE = """\
examples:
  etude simulate gpus=64
  etude simulate gpus=1024 parameters=32 engine_gpus=2 tasks=[256,512]
  etude simulate gpus=64 trainer_gpus=16 max_staleness=4 tokens=8000 max_tokens=32768
  etude simulate gpus=64 turns=8 tokens=400 wait_s=20
  etude simulate runs/train-20260101-120000 max_staleness=[1,4]
  etude simulate runs/train-20260101-120000 --cluster gpus=64

Without RUN, the options describe a cluster and its rollouts. For each staleness
bound the command finds the split of GPUs that trains the most tokens in a second,
and compares it with a run in which all GPUs sample, then all train. At the end it
names the least staleness that is nearly as fast as the fastest.

With RUN, the rollouts of a finished run are replayed on its own machine, as if
`max_staleness` had been another. With --cluster they run on the cluster of the
options.

Times are estimates from rates. The order of rollouts, and so their staleness, is
decided by the scheduler of a real run."""

REPLAY = """\
examples:
  etude replay runs/train-20260101-120000 --step 3
  etude replay runs/train-20260101-120000 --step 3 loss=gspo advantage=rloo
  etude replay runs/train-20260101-120000 --step 3 --to 20 loss=gspo

The rollouts of the step come from the run's journal, and the weights from the
newest checkpoint before it. Steps in between are trained again on their recorded
rollouts. Nothing is sampled.

The table compares both algorithms: gradients, and clipped and masked tokens. The
files have the weight of each token in either loss. Without changed options the
command checks that the replay gives the gradient norm that the run measured.

With --to the changed algorithm trains on, on rollouts of the recorded policy. They
are off-policy for it. The run itself stays as it is."""

PLOT = """\
examples:
  etude plot runs/train-20260101-120000
  etude plot runs/first runs/second --out compared.png"""

REPORT = """\
examples:
  etude report runs/train-20260101-120000
  etude report runs/train-20260101-120000 --out paper/run

The page is report.md, and curves.png beside it is its picture. Secrets in options
and in texts of rollouts are masked."""

ANSWERS = """\
examples:
  etude answers runs/train-20260101-120000
  etude answers runs/train-20260101-120000 --step 40 -n 1 --whole"""

DOCTOR = """\
For a run, each finding names its evidence, and the option that helps. The run may still be in progress.
For this machine, the checks are of packages, torch, devices, memory, disk and limits.
The exit status is 1 if a run has a finding, or if this machine cannot train.

examples:
  etude doctor                              this machine, and this directory
  etude doctor /data/runs                   this machine, and the disk of that directory
  etude doctor runs/train-20260101-120000   the run
  etude doctor RUN --json                   the findings, as one JSON object"""

COMPLETION = """\
add this line to the file that your shell reads when it starts:
  ~/.bashrc                    source <(etude completion bash)
  ~/.zshrc, after compinit     source <(etude completion zsh)
  ~/.config/fish/config.fish   etude completion fish | source

Tab then completes commands, flags, presets, options, their values and files."""

RUNNER = """\
examples:
  ETUDE_STORE_KEY=$(cat runs/mine/runner.key) etude runner my_agent.py:solve --url …
  ETUDE_STORE_KEY=… etude runner shop=my_agent.py:solve game=my_game.py:Game --url …
  ETUDE_STORE_KEY=… etude runner hub --url http://trainer:8700    # the run's env.hub

The key is read from ETUDE_STORE_KEY alone: others can see the command line. The
first Ctrl-C waits for attempts in progress, the second cancels them."""

STORE = """\
examples:
  etude store stores/mine
  etude store postgresql://me@db:5432/rollouts
  ETUDE_STORE_KEY=… etude store stores/mine --listen 0.0.0.0:8700

The command prints how a trainer and runners connect. The first start creates
the admin key, unless ETUDE_STORE_KEY is set. An address that other machines can
reach requires ETUDE_STORE_KEY.

The store uses plain HTTP. Put it behind a TLS proxy on a network that others
can listen to. Ctrl-C or SIGTERM ends it, and loses nothing that it has
acknowledged."""

SERVE = """\
examples:
  etude serve runs/train-20260101-120000
  etude serve runs/train-20260101-120000 --best --listen 127.0.0.1:0
  etude serve Qwen3-0.6B sampling.max_tokens=1000

The server has the same HTTP API as the endpoint of training:
/v1/chat/completions, /v1/completions, /v1/responses and /v1/messages, with
streaming and tools. The model's name is `policy`.

It prints its address and an API key, which is new at each start. Options under
`sampling` are the defaults of a request; a request may set its own. The server
trains nothing and stores no request. Ctrl-C or SIGTERM ends it."""

VIEW = """\
examples:
  etude view
  etude view runs/train-20260101-120000
  etude view sweeps --listen 127.0.0.1:0 --no-browser
  etude view postgresql://me@db:5432/rollouts
  etude view runs/mine --export step.html --step 12
  etude view runs/mine --export answer.html --rollout 345

The address has a key, which is new at each start. Anybody with the address
can read the runs. The server listens on this machine only, reads the files of
the runs, and changes nothing. Ctrl-C or SIGTERM ends it.

For runs on another machine, forward the port:
  ssh -L 8720:127.0.0.1:8720 MACHINE etude view runs --no-browser"""

ENGINE_INSTALL = """\
examples:
  etude engine list
  etude engine install vllm
  etude train grpo model.path=Qwen3-0.6B data.train=[mine.parquet] \\
      reward=gsm8k rollout=vllm"""

ENV = """\
examples:
  etude env install gymnasium
  etude env try env.hub=gymnasium:Blackjack-v1 --answer 1 --answer 0"""
