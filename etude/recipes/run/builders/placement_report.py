"""Describes the device of each model of a run, for the log."""

from __future__ import annotations

from collections.abc import Sequence

from etude.recipes.run.config import Run
from etude.recipes.run.machine.placement import ROLES, gpus_of_servers, role_device
from etude.rollout import ServerConfig


def describe_placement(run: Run, roles: frozenset[str]) -> list[str]:
    """Return a line for each device of this process with the models on it. roles: the roles that have a model."""
    policy = run.compute_device()
    engine = run.engine_device()
    split, sharded = run.placement.layout == "split", run.train.choose_engine(run.ranks) == "fsdp"
    served = isinstance(run.rollout, ServerConfig)
    weights = "a copy of all weights" if sharded else "the same weights"
    models_by_device = {
        str(policy): ["the policy" if split or served else f"the policy and its engine, with {weights}"]
    }
    if split:
        models_by_device.setdefault(str(engine), []).append("the engine, with its own weights")
    for role in (role for role in ROLES if role in roles):
        where = role_device(run.placement, role, policy=policy, engine=engine)
        count = len(set(run.teacher.paths.values())) if role == "teacher" else 0
        models_by_device.setdefault(str(where), []).append(f"{count} teachers" if count > 1 else ROLES[role])
    ranks = f" On each of {run.ranks} ranks; these are the devices of rank 0." if run.ranks > 1 else ""
    turns = " Engine and optimizer take turns." if run.train.offload else ""
    lines = [f"On {device}: {', '.join(models)}.{turns}{ranks}" for device, models in models_by_device.items()]
    if not isinstance(run.rollout, ServerConfig):
        return lines
    server_gpus = gpus_of_servers(run.rollout, run.own_gpus) if policy.type == "cuda" else ()
    return [*lines, _describe_sampling(server_gpus)]


def _describe_sampling(server_gpus: Sequence[int]) -> str:
    gpu_names = f" on {', '.join(f'cuda:{gpu}' for gpu in server_gpus)}" if server_gpus else ""
    return f"Servers sample{gpu_names}, in separate processes."
