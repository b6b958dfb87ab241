"""The data of the house rules: which package may import which, and where each kind of code may stand.

Paths are relative to `etude/`. A room is the first part of a path: `config` for `config/env.py`, `records` for
`records.py`, and `__init__` for the package's own `__init__.py`. A list of files may also hold whole rooms.
"""

from __future__ import annotations

from dataclasses import dataclass

# Blank lines, comments and docstrings do not count, nor how often a statement is wrapped: packing earns nothing.
MAX_CODE_LINES = 330
MAX_STATEMENTS = 40
MAX_CODE_LINES_OF = {
    "recipes/collect/collector.py": 340,
    "recipes/run/loop.py": 60,
    "store/queue/queue_state.py": 370,
}
MAX_STATEMENTS_OF: dict[str, int] = {}


@dataclass(frozen=True)
class Room:
    """One room: its layer, and the other rooms it may import."""

    floor: int
    rooms: frozenset[str]


def _room(floor: int, *rooms: frozenset[str] | str) -> Room:
    return Room(floor, frozenset().union(*({part} if isinstance(part, str) else part for part in rooms)))


WORDS = frozenset(
    {
        "call_task",
        "child_process",
        "lazy",
        "records",
        "errors",
        "integrity",
        "batch",
        "protocols",
        "config",
        "observe",
        "running_time",
        "support",
        "token_routes",
        "images",
    }
)
INSTRUMENTS = frozenset({"algorithms", "models", "chat", "data", "rewards", "store", "checkpoint", "dispatch"})
MACHINES = frozenset({"train", "rollout", "sync", "agents"})
SCORES = frozenset({"recipes", "envs"})
DOORS = frozenset({"trainer", "launch", "ppo_trainer", "clusters", "prompts", "demo", "tools", "view"})
COMMANDS = frozenset({"commands", "run_commands", "service_commands"})
NO_BATCH = WORDS - {"batch"}

ROOMS: dict[str, Room] = {
    # floor 0: basics
    "errors": _room(0),
    "child_process": _room(0),
    "lazy": _room(0),
    "running_time": _room(0),
    "frozen_arrays": _room(0),
    "support": _room(0, "frozen_arrays"),
    "token_routes": _room(0, "errors", "frozen_arrays"),
    "images": _room(0, "lazy", "errors"),
    "records": _room(0, "frozen_arrays", "images", "support", "token_routes"),
    "integrity": _room(0, "errors"),
    "batch": _room(0, "images", "records", "support", "token_routes", "errors"),
    "protocols": _room(0, "images", "records"),
    "config": _room(0, "lazy", "records", "errors"),
    "observe": _room(0, "lazy", "records", "errors", "integrity"),
    "call_task": _room(0, "observe"),
    # floor 1: tools
    "algorithms": _room(1, WORDS),
    "models": _room(1, WORDS),
    "chat": _room(1, NO_BATCH),
    "data": _room(1, WORDS, "chat"),
    "rewards": _room(1, NO_BATCH),
    "store": _room(1, NO_BATCH),
    "checkpoint": _room(1, WORDS),
    "dispatch": _room(1, WORDS),
    # floor 2: engines
    "train": _room(2, WORDS, "algorithms", "data", "models", "checkpoint"),
    "rollout": _room(2, WORDS, "data", "chat", "models"),
    "sync": _room(2, WORDS),
    "agents": _room(2, NO_BATCH, "chat", "store"),
    # floor 3: recipes
    "recipes": _room(3, WORDS, INSTRUMENTS, MACHINES),
    "envs": _room(3, WORDS, INSTRUMENTS, MACHINES),
    # floor 4: entry points; the two front doors import the others
    "launch": _room(4, WORDS, INSTRUMENTS, MACHINES, SCORES),
    "trainer": _room(4, WORDS, INSTRUMENTS, MACHINES, SCORES, "launch"),
    "ppo_trainer": _room(4, WORDS, INSTRUMENTS, MACHINES, SCORES, "launch"),
    "clusters": _room(4, WORDS, INSTRUMENTS, MACHINES, SCORES),
    "prompts": _room(4, WORDS, INSTRUMENTS, MACHINES, SCORES, "launch", "trainer"),
    "demo": _room(4, WORDS, INSTRUMENTS, MACHINES, SCORES, "tools"),
    "tools": _room(4, WORDS, INSTRUMENTS, MACHINES, SCORES),
    "view": _room(4, WORDS, INSTRUMENTS, MACHINES, SCORES, "tools"),
    "help_texts": _room(5, "recipes"),
    "commands": _room(5, WORDS, INSTRUMENTS, MACHINES, SCORES, DOORS, "help_texts", "__init__"),
    "run_commands": _room(5, WORDS, INSTRUMENTS, MACHINES, SCORES, DOORS, "help_texts", "commands", "__init__"),
    "service_commands": _room(5, WORDS, INSTRUMENTS, MACHINES, SCORES, DOORS, "help_texts", "commands", "__init__"),
    "cli": _room(5, WORDS, INSTRUMENTS, MACHINES, SCORES, DOORS, COMMANDS, "help_texts", "__init__"),
    "__main__": _room(5, "cli"),
    "__init__": _room(5, WORDS, INSTRUMENTS, MACHINES, SCORES, DOORS),
}

# Within a room that may import another, the files that do.
ROOM_ONLY_IN: dict[tuple[str, str], tuple[str, ...]] = {
    ("rollout", "models"): (
        "rollout/torch_engine.py",
        "rollout/engine_steps.py",
        "rollout/kv_cache.py",
        "rollout/step_batch.py",
        "rollout/step_graphs.py",
        "rollout/step_pipeline.py",
        "rollout/slot_state.py",
        "rollout/state_trial.py",
        "rollout/static_step.py",
        "rollout/step_kernels.py",
        "rollout/batch_invariance.py",
        "rollout/prompt_scores.py",
        "rollout/features.py",
        "rollout/image_reader.py",
    ),
}

# The layers inside three rooms, from the lowest. A file imports files of lower layers, or of its own folder. An entry
# is a file or a folder.
LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "recipes": (
        ("option_names", "interrupt", "diagnosis", "presets", "hub_datasets", "run/machine", "run/roles"),
        ("event_loop", "recipe"),
        ("collect", "workers"),
        ("evaluate",),
        ("run/config",),
        ("run/directory", "run/rules"),
        ("run/resume", "run/steps"),
        ("hub", "run/session", "servers", "agents"),
        ("run/builders",),
        ("run/loop", "supervised"),
        ("registry",),
        ("run_argument", "sweep_summary"),
        ("inference", "sweep"),
        ("served_model",),
    ),
    "rollout": (
        (
            "attention_groups",
            "block_pool",
            "prompt_scores",
            "python_environments",
            "reported_sets",
            "sampling",
            "served_images",
            "server_load",
            "server_process",
            "work_list",
        ),
        ("device_sampling", "engine_thread", "gpu_share", "held_adapters", "kv_budget", "request", "router"),
        ("image_reader", "prompt_pixels", "scheduler", "server_backend", "slot_state"),
        ("features", "partial_completion", "server_client", "state_trial"),
        ("grammar_trial",),
        ("batch_invariance", "server_engine", "sglang_images", "sglang_weights", "vllm_images", "vllm_weights"),
        ("health_check", "kv_cache", "sglang", "vllm"),
        ("config", "failover_router", "replica", "static_step", "step_batch", "step_kernels"),
        ("server_pool", "step_graphs"),
        ("step_pipeline",),
        ("engine_steps",),
        ("torch_engine",),
        ("launch",),
    ),
    "store": (("queue/bounds",), ("queue/rollout_limits",), ("journal",), ("queue",), ("http",)),
}

# The libraries with a rule, and the files that may import them. Any other library is free.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "torch": (
        "batch",
        "algorithms",
        "models",
        "data/pack.py",
        "checkpoint",
        "dispatch/rank.py",
        "train",
        "rollout/torch_engine.py",
        "rollout/engine_steps.py",
        "rollout/kv_cache.py",
        "rollout/step_batch.py",
        "rollout/step_graphs.py",
        "rollout/step_pipeline.py",
        "rollout/slot_state.py",
        "rollout/state_trial.py",
        "rollout/static_step.py",
        "rollout/step_kernels.py",
        "rollout/batch_invariance.py",
        "rollout/prompt_scores.py",
        "rollout/features.py",
        "rollout/sampling.py",
        "rollout/device_sampling.py",
        "rollout/engine_thread.py",
        "sync",
        "recipes",
        "envs",
        "trainer",
        "ppo_trainer",
        "demo",
        "tools",
        "cli",
    ),
    "transformers": ("models",),
    "triton": ("models/kernels/paged_attention.py", "models/kernels/decode_ops.py"),
    "peft": ("models/lora.py",),
    "PIL": ("images", "data", "demo"),
    "ray": tuple(f"dispatch/ray_{name}.py" for name in ("crew", "rank", "cluster", "reservation")),
    "sqlalchemy": ("store/journal/sql.py", "store/journal/tables.py"),
    "fastapi": ("store/http/server.py", "store/http/openapi.py", "agents/proxy/app.py", "view/server.py"),
    "tensorboardX": ("observe/tensorboard.py",),
    "wandb": ("observe/wandb.py",),
    "mlflow": ("observe/mlflow.py",),
    # Server engines are installed in separate environments and called over HTTP.
    "vllm": (),
    "sglang": (),
}

# The rooms that use only the standard library, and the libraries that they may use beside it.
ONLY_LIBRARIES: dict[str, tuple[str, ...]] = {"errors": (), "records": ("numpy",)}

# The libraries that a file must not load, not even through the files of `etude/` that it imports.
# A file that takes torch from `etude.lazy` uses it by the same rule, and does not load it.
LAZY = "etude.lazy."

NEVER_LOADED: dict[str, tuple[str, ...]] = {
    "__init__": ("torch", "transformers", "ray"),
    "cli": ("torch", "transformers", "ray"),
    "commands": ("torch", "transformers", "ray"),
    "run_commands": ("torch", "transformers", "ray"),
    "service_commands": ("torch", "transformers", "ray"),
    "records": ("torch", "PIL"),
    "images": ("torch", "transformers", "PIL"),
    "protocols": ("torch",),
    "config": ("torch",),
    "observe": ("torch",),
    "chat": ("torch", "transformers"),
    "rewards": ("torch",),
    "store": ("torch", "PIL"),
    "agents": ("torch", "transformers"),
    "agents/runner.py": ("fastapi", "pydantic", "sqlalchemy"),
    "store/http/remote_queue.py": ("fastapi", "pydantic", "sqlalchemy"),
    "view": ("torch", "transformers"),
    "tools/replay/options.py": ("torch",),
    "recipes/run/loop.py": ("torch",),
    "recipes/collect/scheduler.py": ("torch",),
    "recipes/collect/collector.py": ("torch",),
    "recipes/evaluate.py": ("torch",),
}

# The scheduler is a pure function of events: it has no clock, no randomness, no input and no output.
NEVER_NAMED: dict[str, tuple[str, ...]] = {
    "recipes/collect/scheduler.py": (
        *("time", "datetime", "random", "secrets", "asyncio", "threading", "multiprocessing", "subprocess"),
        *("os", "io", "pathlib", "shutil", "socket", "open", "input"),
    ),
}

# Beside it a guest, which is a program of its own: its hub reads the key of the model from a variable.
ENVIRONMENT_IN = ("config/env.py", "agents/hubs/guest/verifiers_guest.py")
PRINT_IN = ("cli", "commands", "run_commands", "service_commands", "observe/console.py")
STREAMS_IN = (*PRINT_IN, "observe/log.py", "rewards/sandbox/guest/program_under_test.py")
# Beside these, a room's `__init__.py`: the chooser that imports one implementation.
LATE_IMPORTS_IN = (
    "__init__",
    "cli",
    "commands",
    "run_commands",
    "service_commands",
    "recipes/run/builders/assemble.py",
    "recipes/run/builders/collection.py",
)
NO_RANKS_IN = (
    "recipes/run/loop.py",
    "recipes/collect/scheduler.py",
    "recipes/collect/collector.py",
    "recipes/evaluate.py",
)

# How long a sentence may be, in words; a value that is put into it is one word.
MAX_SENTENCE_WORDS = 30
MAX_HELP_WORDS = 20

# The rooms whose prose still has findings: the number that each may have. Numbers only go down.
QUESTIONS_LEFT: dict[str, int] = {}
LONG_SENTENCES_LEFT: dict[str, int] = {}
