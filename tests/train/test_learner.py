"""The learner: updates do not depend on micro-batches and packs, and every option has its effect."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from etude.algorithms import AlgorithmConfig, Denominators, LossValue, Outputs
from etude.algorithms import logits as logit_functions
from etude.algorithms.advantages.group import GRPO
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.losses.clip import PPO
from etude.algorithms.losses.distill import TopKDistillation
from etude.algorithms.losses.supervised import SFT, ValueLoss
from etude.batch import Batch, Pack
from etude.checkpoint import CheckpointManager
from etude.data.pack import pack_prefix_tree
from etude.errors import BatchError, ConfigError, TrainingError
from etude.models import PackedAttention, load, save
from etude.train import Learner, TrainConfig, load_weights
from etude.train.local import compile_if_possible
from tests.autograd import kept_for_backward
from tests.packs import separate_rows
from tests.train.tasks import (
    VOCABULARY,
    Imitate,
    Improve,
    gradient,
    learner,
    model,
    ready,
    rollouts,
    state_tensors,
    weights,
)

EVERYTHING = AlgorithmConfig(
    loss=PPO(reduction="seq-mean-token-mean"), advantage=GRPO(), entropy=EntropyConfig(coefficient=0.1), echo=0.3
)


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-9) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=0, atol=tolerance) for name in a)


def update(
    batch: Batch, algorithm: AlgorithmConfig, pack: Callable[[Batch], Pack] = pack_prefix_tree, **options: Any
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradient of one update of a new learner."""
    settings = {"learning_rate": 0.0, "max_grad_norm": None, **options}
    trainer = Learner(model("fp64"), TrainConfig(precision="fp64", **settings), pack=pack)
    metrics = trainer.update(ready(trainer, algorithm, batch), Improve(algorithm)).reduce()
    return metrics["loss"], gradient(trainer)


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), EVERYTHING], ids=["grpo", "everything"])
def test_an_update_does_not_depend_on_micro_batches_or_packs(algorithm: AlgorithmConfig) -> None:
    """The micro-batch law, in float64."""
    batch = rollouts()
    loss, gradients = update(batch, algorithm)
    assert max(float(value.abs().max()) for value in gradients.values()) > 1e-3
    for options in (
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 40},
        {"pack": separate_rows},
        {"pack": separate_rows, "max_tokens_per_micro_batch": 40},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
    ):
        other_loss, other_gradients = update(batch, algorithm, **options)
        assert other_loss == pytest.approx(loss, abs=1e-9)
        assert close(other_gradients, gradients), options


def test_an_update_does_not_depend_on_the_order_of_its_groups() -> None:
    batch = rollouts()
    trainers = [learner(max_grad_norm=None) for _ in range(2)]
    estimated = ready(trainers[0], EVERYTHING, batch)
    reordered = estimated.select(torch.arange(batch.num_rollouts).roll(4))
    losses = [
        one_trainer.update(its_batch, Improve(EVERYTHING)).reduce()["loss"]
        for one_trainer, its_batch in zip(trainers, (estimated, reordered), strict=True)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert close(gradient(trainers[0]), gradient(trainers[1]))


def test_columns_do_not_depend_on_micro_batches() -> None:
    batch = rollouts()
    columns = frozenset({"old_logp", "entropy", "sum_pi_squared"})
    annotated = learner().annotate(batch, columns)
    split = learner(max_tokens_per_micro_batch=1).annotate(batch, columns)
    for name in columns:
        one, other = annotated.require(name), split.require(name)
        assert bool(torch.isfinite(one[batch.action]).all())
        assert torch.allclose(one, other, rtol=0, atol=1e-9, equal_nan=True)
    alone = learner().annotate(batch, frozenset({"old_logp"}))
    assert torch.allclose(alone.require("old_logp"), annotated.require("old_logp"), rtol=0, atol=1e-9, equal_nan=True)
    assert learner().annotate(batch, frozenset()).require("ids") is batch.ids


def test_log_probs_use_the_temperature() -> None:
    """Each column equals the function of `algorithms.logits`, row by row."""
    batch, policy = rollouts(), model()
    trainer = Learner(policy, TrainConfig(precision="fp64"), temperature=0.7)
    annotated = trainer.annotate(batch, frozenset({"old_logp", "entropy", "sum_pi_squared"}))
    pack = separate_rows(batch)
    with torch.no_grad():
        logits = policy.logits(policy.hidden(pack.ids, pack.positions, PackedAttention(pack)))
    at = batch.action.nonzero()[:, 0]
    rows, ids = logits[pack.source[at]], batch.ids[at]
    for name, expected in (
        ("old_logp", logit_functions.token_logp(rows, ids, 0.7)),
        ("entropy", logit_functions.entropy(rows, 0.7)),
        ("sum_pi_squared", logit_functions.sum_pi_squared(rows, 0.7)),
    ):
        assert torch.allclose(annotated.require(name)[at], expected, rtol=0, atol=1e-9)


def test_a_group_loss_sees_whole_groups() -> None:
    batch = rollouts(groups=4, size=3)
    objective = Imitate(SFT(), split_unit="group")
    metrics = learner(max_tokens_per_micro_batch=1).update(batch, objective).reduce()
    assert metrics["micro_batches"] == len(objective.seen) == 4
    assert all(micro.num_rollouts == 3 and micro.num_groups == 1 for micro in objective.seen)


def test_distillation_learns_from_the_teachers_likeliest_tokens() -> None:
    """The case of every output without a hand-written backward pass."""
    batch = rollouts()
    generator = torch.Generator().manual_seed(3)
    teacher = torch.randn(batch.num_tokens, VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(1)
    top = teacher.topk(5)
    batch = batch.replace(
        teacher_topk_ids=top.indices, teacher_topk_logp=top.values, old_logp=torch.zeros(batch.num_tokens).double()
    )
    trainer = learner()
    losses = [trainer.update(batch, Imitate(TopKDistillation())).reduce()["loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    split = learner(max_tokens_per_micro_batch=30)
    assert split.update(batch, Imitate(TopKDistillation())).reduce()["loss"] == pytest.approx(losses[0], abs=1e-9)


def test_updates_lower_the_loss() -> None:
    batch, trainer = rollouts(), learner("fp32")
    losses = [trainer.update(batch, Imitate(SFT())).reduce()["loss"] for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]
    assert trainer.version == 20


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_updates_lower_the_loss_in_every_precision(precision: str) -> None:
    batch = rollouts()
    exact_losses = [learner("fp64").update(batch, Imitate(SFT())).reduce()["loss"]]
    trainer = learner(precision)
    metrics = trainer.update(batch, Imitate(SFT())).reduce()
    assert metrics["loss"] == pytest.approx(exact_losses[0], rel=2e-2)
    assert ("loss_scale" in metrics) == (precision == "fp16")
    for _ in range(12):
        metrics = trainer.update(batch, Imitate(SFT())).reduce()
    assert metrics["loss"] < 0.5 * exact_losses[0]


def test_half_precision_weights_are_always_the_masters_rounded() -> None:
    batch, trainer = rollouts(), learner("bf16")
    for _ in range(3):
        trainer.update(batch, Imitate(SFT()))
    masters = state_tensors(trainer, "weights")
    for name, weight in trainer.weights():
        assert weight.dtype == torch.bfloat16 and masters[name].dtype == torch.float32
        assert torch.equal(weight, masters[name].bfloat16())


def test_masters_start_from_the_float32_weights_of_the_file(tmp_path: Path) -> None:
    save(model("fp32"), tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    policy = load(tmp_path, dtype=torch.bfloat16, keep_float32=True)
    trainer = Learner(policy, TrainConfig(precision="bf16"))
    masters = state_tensors(trainer, "weights")
    assert all(torch.equal(masters[name], file[name]) for name, _ in trainer.weights())
    assert not policy.take_float32_weights()
    assert any(not torch.equal(masters[name], weight.float()) for name, weight in trainer.weights())


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_an_update_without_action_tokens_changes_nothing(precision: str) -> None:
    batch, trainer = rollouts(), learner(precision)
    before = weights(trainer)
    metrics = trainer.update(batch.replace(action=torch.zeros_like(batch.action)), Imitate(SFT())).reduce()
    assert metrics["grad_norm"] == 0 and metrics["action_tokens"] == 0 and trainer.version == 1
    assert all(torch.equal(weight, before[name]) for name, weight in trainer.weights())


def test_updates_too_small_for_half_precision_are_kept() -> None:
    """One step of 1e-5 moves almost no bf16 weight; thirty of them do."""
    batch, trainer = rollouts(), learner("bf16", learning_rate=1e-5)
    before = weights(trainer)
    name = max(before, key=lambda name: float(before[name].float().abs().mean()))
    trainer.update(batch, Imitate(SFT()))
    assert torch.equal(weights(trainer)[name], before[name])
    for _ in range(29):
        trainer.update(batch, Imitate(SFT()))
    moved = (state_tensors(trainer, "weights")[name] - before[name].float()).abs()
    assert float(moved.max()) > 1e-4
    half_adam = torch.optim.AdamW([torch.nn.Parameter(before[name].clone())], lr=1e-5, weight_decay=0.0)
    (half_weight,) = half_adam.param_groups[0]["params"]
    for _ in range(30):
        half_weight.grad = torch.ones_like(half_weight)
        half_adam.step()
    assert torch.equal(half_weight, before[name])


def test_a_model_may_have_one_learner_after_another() -> None:
    policy, batch = model("bf16"), rollouts()
    losses = []
    for _ in range(2):
        trainer = Learner(policy, TrainConfig(precision="bf16", learning_rate=3e-3))
        losses += [trainer.update(batch, Imitate(SFT())).reduce()["loss"] for _ in range(10)]
        del trainer
    assert losses[-1] < losses[10] < losses[0]


def test_an_update_keeps_the_storage_of_the_weights() -> None:
    """An engine that shares the weights keeps reading the same storage."""
    trainer = learner("bf16")
    addresses = {name: weight.data_ptr() for name, weight in trainer.weights()}
    before = weights(trainer)
    trainer.update(rollouts(), Imitate(SFT()))
    assert {name: weight.data_ptr() for name, weight in trainer.weights()} == addresses
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.weights())


def saved_bytes(trainer: Learner, batch: Batch) -> int:
    """Return the bytes that autograd keeps for the backward pass of an update."""
    return kept_for_backward(lambda: trainer.update(batch, Imitate(SFT())))


def test_every_option_has_an_effect() -> None:
    batch = rollouts()

    def train(**options: Any) -> tuple[dict[str, float], dict[str, Tensor]]:
        trainer = learner("fp32", steps=4, **options)
        metrics = [trainer.update(batch, Imitate(SFT())) for _ in range(3)][-1]
        return metrics.reduce(), weights(trainer)

    metrics, default = train()
    for options in (
        {"learning_rate": 2e-2},
        {"lr_scheduler": "linear"},
        {"lr_scheduler": "cosine"},
        {"warmup_steps": 2},
        {"weight_decay": 0.1},
        {"betas": (0.8, 0.999)},
        {"betas": (0.9, 0.9)},
        {"max_grad_norm": 0.1},
    ):
        _, changed = train(**options)
        assert not close(changed, default, 1e-6), options
    assert train(max_tokens_per_micro_batch=20)[0]["micro_batches"] > metrics["micro_batches"] == 1
    assert dict(learner("bf16").weights())["model.norm.weight"].dtype == torch.bfloat16
    assert saved_bytes(learner(activation_checkpointing="full"), batch) < 0.6 * saved_bytes(learner(), batch)


def test_mfu_is_reported_if_the_peak_is_known() -> None:
    batch = rollouts()
    assert "mfu" not in learner("fp32").update(batch, Imitate(SFT())).reduce()
    metrics = Learner(model("fp32"), TrainConfig(precision="fp32"), peak=1e12).update(batch, Imitate(SFT())).reduce()
    assert 0 < metrics["mfu"] < 1
    assert metrics["trained_tokens"] == batch.num_tokens
    assert metrics["action_tokens"] == int(batch.action.sum())
    assert metrics["trained_tokens_per_second"] == pytest.approx(batch.num_tokens / metrics["update_seconds"])


# -- failures --------------------------------------------------------------------------------------------------------


def with_infinite_advantage(batch: Batch) -> Batch:
    """Return the batch with an infinite advantage: `AlgorithmConfig.estimate` refuses it, a plug-in might not."""
    advantage = torch.ones(batch.num_tokens)
    advantage[batch.action.nonzero()[0]] = torch.inf
    return batch.replace(advantage=advantage, old_logp=batch.behavior_logp)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_is_refused(precision: str) -> None:
    trainer, batch = learner(precision), rollouts()
    trainer.update(batch, Imitate(SFT()))
    before = weights(trainer)
    with pytest.raises(TrainingError, match=r"not finite in \d+ weights, `model.*the weights are unchanged"):
        trainer.update(with_infinite_advantage(batch), Improve(AlgorithmConfig()))
    assert close(weights(trainer), before, 0) and trainer.version == 1
    trainer.update(batch, Imitate(SFT()))
    assert not close(weights(trainer), before, 0)


def test_errors_name_the_configuration_of_the_learner() -> None:
    trainer = Learner(model(), TrainConfig(precision="fp64"), option="critic.train")
    with pytest.raises(TrainingError, match=r"or lower `critic\.train\.learning_rate`"):
        trainer.update(with_infinite_advantage(rollouts()), Improve(AlgorithmConfig()))
    with pytest.raises(
        TrainingError, match=r"`critic\.train\.max_tokens_per_micro_batch`.* `critic\.train\.activation_check"
    ):
        trainer.update(rollouts(), OutOfMemory(SFT()))


class OutOfMemory(Imitate):
    """An objective that runs out of memory."""

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        raise MemoryError("no more")


def test_fp16_lowers_its_scale_and_skips() -> None:
    trainer, batch = learner("fp16"), rollouts()
    before = weights(trainer)
    metrics = trainer.update(with_infinite_advantage(batch), Improve(AlgorithmConfig())).reduce()
    assert metrics["skipped_updates"] == 1 and metrics["loss_scale"] == 2**16 and "grad_norm" not in metrics
    assert close(weights(trainer), before, 0)
    metrics = trainer.update(batch, Imitate(SFT())).reduce()
    assert metrics["skipped_updates"] == 0 and metrics["loss_scale"] == 2**15
    with pytest.raises(TrainingError, match="not finite"):  # the scale is not the cause
        for _ in range(20):
            trainer.update(with_infinite_advantage(batch), Improve(AlgorithmConfig()))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: Learner(model("fp32"), TrainConfig(precision="bf16")),
            "computes in torch.bfloat16, and the model was",
        ),
        (lambda: learner(lr_scheduler="cosine", warmup_steps=10, steps=10), "leaves nothing of the 10 updates"),
        (lambda: Learner(model(), TrainConfig(precision="fp64"), temperature=0.0), "greedy answers have no log-prob"),
        (lambda: TrainConfig(betas=(0.9, 1.0)), "shares of what is remembered"),
        (
            lambda: learner().annotate(rollouts(), frozenset({"ref_logp"})),
            "cannot compute the column `ref_logp`",
        ),
        (lambda: learner().update(rollouts(), Imitate(ValueLoss(clip=None))), "needs the model's `value`"),
    ],
)
def test_invalid_options_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_first_token_that_nothing_predicts_is_refused() -> None:
    batch = rollouts()
    action = batch.action.clone()
    action[batch.offsets[2]] = True
    with pytest.raises(BatchError, match="Row 2 begins with a token to learn"):
        learner().update(batch.replace(action=action), Imitate(SFT()))


def test_a_batch_without_an_action_changes_nothing() -> None:
    batch, trainer = rollouts(), learner()
    before = weights(trainer)
    metrics = trainer.update(batch.replace(action=torch.zeros_like(batch.action)), Imitate(SFT())).reduce()
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0
    assert close(weights(trainer), before, 0)


MEMORY = """
import resource, torch
from etude.algorithms.losses.supervised import SFT
from etude.errors import TrainingError
from tests.train.tasks import Imitate, learner, rollouts

by, batch = learner("fp32"), rollouts(groups=40, size=8, longest=60)
before = {name: weight.clone() for name, weight in by.weights()}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 10_000_000,) * 2)
try:
    by.update(batch, Imitate(SFT()))
except TrainingError as error:
    print(error)
assert by.version == 0
assert all(torch.equal(weight, before[name]) for name, weight in by.weights())
"""


def test_running_out_of_memory_names_the_options() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=Path.cwd(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        "Lower `train.max_tokens_per_micro_batch`, now 16384, or set `train.activation_checkpointing=full`"
        in done.stdout
    )


# -- checkpoints -----------------------------------------------------------------------------------------------------

PRECISIONS = ("fp32", "bf16", "fp16")
PLAN: dict[str, Any] = {"lr_scheduler": "cosine", "warmup_steps": 2, "weight_decay": 0.1}


def resume(trainer: Learner, directory: Path) -> None:
    """Restore a learner from the newest checkpoint."""
    checkpoints = CheckpointManager(directory)
    newest, state = checkpoints.newest(), trainer.state()
    assert newest is not None
    checkpoints.load(newest, state)
    trainer.restore(state)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_resumed_learner_continues_bit_for_bit(precision: str, tmp_path: Path) -> None:
    """The resumed model started from other weights."""
    uninterrupted = learner(precision, **PLAN)
    for update in range(4):
        if update == 3:
            CheckpointManager(tmp_path).save(3, uninterrupted.state(), {})
        uninterrupted.update(rollouts(update), Imitate(SFT()))
    resumed = learner(precision, seed=7, **PLAN)
    resume(resumed, tmp_path)
    assert resumed.version == 3 and not close(weights(resumed), weights(uninterrupted), 0)
    resumed.update(rollouts(3), Imitate(SFT()))
    assert resumed.version == 4
    assert close(weights(resumed), weights(uninterrupted), 0)
    for kind in ("weights", "exp_avg", "exp_avg_sq", "step", "scaling"):
        assert close(state_tensors(resumed, kind), state_tensors(uninterrupted, kind), 0), kind


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_loads_the_weights_of_a_checkpoint(precision: str, tmp_path: Path) -> None:
    trainer, checkpoints = learner(precision), CheckpointManager(tmp_path)
    trainer.update(rollouts(), Imitate(SFT()))
    saved = checkpoints.save(1, trainer.state(), {})
    other = model(precision, seed=8)
    load_weights(other, checkpoints, saved)
    assert close(dict(other.named_weights()), weights(trainer), 0)


def test_a_decaying_schedule_needs_the_number_of_updates() -> None:
    trainer = Learner(model(), TrainConfig(precision="fp64", lr_scheduler="cosine", warmup_steps=1))
    trainer.annotate(rollouts(), frozenset({"old_logp"}))
    trainer.update(rollouts(), Imitate(SFT()))
    with pytest.raises(AssertionError, match="needs the number of updates"):
        trainer.update(rollouts(), Imitate(SFT()))


def test_the_state_of_another_learner_is_restored_or_refused() -> None:
    one, other = learner("bf16"), learner("bf16", seed=3)
    one.update(rollouts(), Imitate(SFT()))
    other.restore(one.state())
    assert other.version == 1 and close(weights(other), weights(one), 0)
    assert not any(a.data_ptr() == b.data_ptr() for (_, a), (_, b) in zip(one.weights(), other.weights(), strict=True))
    with pytest.raises(ConfigError, match="of another model or precision: only one of them has"):
        other.restore(learner("bf16", family="gpt2").state())


def test_automatic_compilation_never_refuses_a_run(caplog: pytest.LogCaptureFixture) -> None:
    """The steps of GPT-2 cannot be compiled: `true` refuses it, `auto` goes on, and says why where it tries."""
    assert TrainConfig().compile == "auto"
    with pytest.raises(ConfigError, match="a gpt2 model"):
        learner("fp32", family="gpt2", compile=True)
    with caplog.at_level("INFO", "etude.train"):
        gpt2 = learner("fp32", family="gpt2")  # on a CPU nothing is tried
        assert not caplog.messages
        assert not compile_if_possible(gpt2.model, "critic.train")
    (line,) = caplog.messages
    assert line.startswith("`critic.train.compile=auto` compiles nothing here. On the engine `local`")
