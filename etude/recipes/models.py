"""The models beside the policy: what it is held to, whom it imitates, who foresees what it will earn; who trains."""

from __future__ import annotations

from pathlib import Path

import torch

from etude.chat import Tokenizer
from etude.errors import ConfigError
from etude.models import Model, adapt, load
from etude.recipes import checks
from etude.recipes.folder import check_model
from etude.recipes.meter import peak_of
from etude.recipes.placement import engine_device, placed
from etude.recipes.recipe import Recipe
from etude.recipes.run import Run
from etude.recipes.supervised import Supervised
from etude.recipes.workers import Beside, Minimise, PolicyWorker
from etude.rollout import TorchEngine
from etude.train import Frozen, Learner, Mesh
from etude.train.optim import PRECISIONS

__all__ = ["critic", "frozen", "mesh_of", "reference", "worker_of"]


def mesh_of(run: Recipe) -> Mesh:
    """How this rank shares the work with the others. All ranks ask it together, once."""
    return Mesh(run.mesh, timeout=run.crew.timeout)


def reference(
    run: Recipe, policy: Model, path: Path | None, temperature: float = 1.0, *, mesh: Mesh | None = None
) -> Frozen:
    """What the policy is held to: by default the model that the run began with, whatever it has learned since.

    A new adapter begins as nothing, so that this is the policy without it. One that goes on is read once more. Where
    whole distributions are compared, it is asked in the midst of each update, and stays where that is made.
    """
    if path is None and run.lora.rank:
        return Frozen(policy, run.train.micro_tokens, temperature=temperature, unadapted=True, mesh=mesh)
    whole = isinstance(run, Run) and "full_kl" in run.outputs()
    return frozen(run, policy, "reference", path, temperature, mesh=mesh, stays=whole)


def critic(run: Run, policy: Model) -> Model:
    """Who foresees what will be earned, before it has learned anything."""
    where = _checked(run, "critic", run.critic.path)
    precision = PRECISIONS[run.critic.train.precision]
    model = load(where, dtype=precision, device=_place(run, policy, "critic"), exact=True, head="value")
    _refuse_other_tokens(run, policy, "critic", where, model)
    _refuse_short_context(run, policy, "critic", where, model)
    return model


def worker_of(
    run: Run,
    policy: Model,
    engine: TorchEngine | None,
    *,
    mesh: Mesh | None = None,
    reference: Frozen | None = None,
    teacher: Frozen | None = None,
    critic: Model | None = None,
) -> PolicyWorker:
    """Whoever trains, of models that are there: the policy and the critic learn, each by its own options."""
    alone, updates = run.critic.warmup if critic is not None else 0, run.updates * run.epochs
    learner = Learner(
        policy,
        run.train,
        temperature=run.sampling.temperature,
        steps=(run.steps - alone) * updates,
        peak=peak_of(policy),
        reference=reference if "full_kl" in run.outputs() else None,
        mesh=mesh,
    )
    foresees = None
    if critic is not None:
        foresees = Learner(critic, run.critic.train, steps=run.steps * updates, mesh=mesh, option="critic.train")
    asked = {"ref_logp": reference, "teacher_logp": teacher}
    held = {column: model for column, model in asked.items() if model is not None}
    beside = Beside(held, foresees, Minimise(run.critic.loss), alone)
    longest = checks.longest(run, policy)
    return PolicyWorker(run, learner, seed=run.seed, epochs=run.epochs, beside=beside, engine=engine, longest=longest)


def frozen(
    run: Recipe,
    policy: Model,
    role: str,
    path: Path | None,
    temperature: float = 1.0,
    *,
    mesh: Mesh | None = None,
    stays: bool = False,
) -> Frozen:
    """A model beside the policy that never learns: the policy's own as it was at first, unless another is named. Under
    `train.offload` it rests in the processor's memory, unless it `stays`, or is placed elsewhere than the policy."""
    where, place = _checked(run, role, path), _place(run, policy, role)
    rests = run.train.offload and not stays and place == policy.device
    model = load(where, dtype=policy.dtype, device="cpu" if rests else place)
    _refuse_other_tokens(run, policy, role, where, model)
    _refuse_short_context(run, policy, role, where, model)
    if path is None and run.lora.path is not None:
        model = adapt(model, run.lora, seed=run.seed)
    home = policy.device if rests else None
    return Frozen(model, run.train.micro_tokens, temperature=temperature, home=home, mesh=mesh)


def _place(run: Recipe, policy: Model, role: str) -> torch.device:
    """Where a role's model is: beside the policy, unless the run places it."""
    if not isinstance(run, Run) or getattr(run.placement, role) == "policy":
        return policy.device
    return placed(run.placement, role, policy=policy.device, engine=engine_device(run))


def _checked(run: Recipe, role: str, path: Path | None) -> Path:
    """The directory of a role's model: the policy's own, unless another is named."""
    where = path or run.model.path
    assert where is not None, "a run has a model"
    check_model(where, f"{role}.path")
    return where


def _refuse_other_tokens(run: Recipe, policy: Model, role: str, where: Path, model: Model) -> None:
    """Refuse a model that reads the policy's ids as other words than the policy does."""
    assert run.model.path is not None, "a run has a model"
    ours = Tokenizer.load(run.model.tokenizer or run.model.path)
    theirs = Tokenizer.load(where) if (where / "tokenizer.json").is_file() else None
    # a larger model often has more rows than its tokenizer has tokens: to imitate it, the words are what counts
    padded = role == "teacher" and theirs is not None and theirs.size == ours.size
    if model.vocabulary != policy.vocabulary and not padded:
        raise ConfigError(
            f"The {role} in {where} knows {model.vocabulary} tokens, and the model in {run.model.path} knows "
            f"{policy.vocabulary}: it would read other words. Give a `{role}.path` of the same tokenizer."
        )
    if theirs is None or where == run.model.path:
        return
    differ = next((id for id in range(max(ours.size, theirs.size)) if ours.token(id) != theirs.token(id)), None)
    if differ is not None:
        raise ConfigError(
            f"The {role} in {where} has another tokenizer than the policy: id {differ} is {theirs.token(differ)!r} "
            f"there and {ours.token(differ)!r} here. Give a `{role}.path` of the same tokenizer."
        )


def _refuse_short_context(run: Recipe, policy: Model, role: str, where: Path, model: Model) -> None:
    """Refuse a model that was made for shorter rows than the policy learns from."""
    longest, lower = _longest_row(run, policy)
    if model.context < longest:
        raise ConfigError(
            f"The {role} in {where} has a context of {model.context} tokens, and a row of this run may have {longest}: "
            f"what it says of tokens beyond its context means nothing. Set {lower}, or give a `{role}.path` of a "
            f"longer context."
        )


def _longest_row(run: Recipe, policy: Model) -> tuple[int, str]:
    """How many tokens a row may have that is learned from, and what bounds it."""
    if isinstance(run, Supervised):
        return run.data.max_tokens or policy.context, "a lower `data.max_tokens`"
    assert isinstance(run, Run), "every recipe is one or the other"
    if run.env.asked:
        return run.env.max_tokens or checks.longest(run, policy), "a lower `env.max_tokens`"
    return run.data.max_prompt + run.sampling.max_tokens, "a lower `data.max_prompt` or `sampling.max_tokens`"
