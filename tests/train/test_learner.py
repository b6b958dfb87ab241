"""The learner: what an update is does not depend on how it was cut, and every option does what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from etude.algorithms import AlgorithmConfig, Denominators, LossValue, Outputs
from etude.algorithms import logits as of_logits
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
from tests.autograd import kept_for_backward
from tests.train.tasks import VOCABULARY, Imitate, Improve, gradient, learner, model, ready, rollouts, weights

EVERYTHING = AlgorithmConfig(
    loss=PPO(reduction="seq-mean-token-mean"), advantage=GRPO(), entropy=EntropyConfig(coefficient=0.1), echo=0.3
)


def close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-9) -> bool:
    return all(torch.allclose(a[name], b[name], rtol=0, atol=tolerance) for name in a)


def update(
    batch: Batch, algorithm: AlgorithmConfig, pack: object = pack_prefix_tree, **options: object
) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradient of one update of a fresh learner."""
    given = {"learning_rate": 0.0, "max_grad_norm": None, **options}
    by = Learner(model("fp64"), TrainConfig(precision="fp64", **given), pack=pack)
    metrics = by.update(ready(by, algorithm, batch), Improve(algorithm)).reduce()
    return metrics["loss"], gradient(by)


@pytest.mark.parametrize("algorithm", [AlgorithmConfig(), EVERYTHING], ids=["grpo", "everything"])
def test_an_update_does_not_depend_on_how_it_is_cut(algorithm: AlgorithmConfig) -> None:
    """The micro-batch law, in float64."""
    batch = rollouts()
    loss, found = update(batch, algorithm)
    assert max(float(value.abs().max()) for value in found.values()) > 1e-3
    for options in (
        {"max_tokens_per_micro_batch": 1},
        {"max_tokens_per_micro_batch": 40},
        {"pack": Pack.from_batch},
        {"pack": Pack.from_batch, "max_tokens_per_micro_batch": 40},
        {"activation_checkpointing": True},
    ):
        other, again = update(batch, algorithm, **options)
        assert other == pytest.approx(loss, abs=1e-9)
        assert close(again, found), options


def test_an_update_does_not_depend_on_the_order_of_its_groups() -> None:
    batch = rollouts()
    by = [learner(max_grad_norm=None) for _ in range(2)]
    estimated = ready(by[0], EVERYTHING, batch)
    turned = estimated.select(torch.arange(batch.num_rollouts).roll(4))
    losses = [
        each.update(b, Improve(EVERYTHING)).reduce()["loss"] for each, b in zip(by, (estimated, turned), strict=True)
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    assert close(gradient(by[0]), gradient(by[1]))


def test_columns_do_not_depend_on_how_they_are_computed() -> None:
    batch = rollouts()
    columns = frozenset({"old_logp", "entropy", "sum_pi_squared"})
    found = learner().annotate(batch, columns)
    again = learner(max_tokens_per_micro_batch=1).annotate(batch, columns)
    for name in columns:
        one, other = found.require(name), again.require(name)
        assert bool(torch.isfinite(one[batch.action]).all())
        assert torch.allclose(one, other, rtol=0, atol=1e-9, equal_nan=True)
    alone = learner().annotate(batch, frozenset({"old_logp"}))
    assert torch.allclose(alone.require("old_logp"), found.require("old_logp"), rtol=0, atol=1e-9, equal_nan=True)
    assert learner().annotate(batch, frozenset()).require("ids") is batch.ids


def test_the_log_probs_are_those_of_the_temperature() -> None:
    """And the same as the functions of `algorithms.logits` say, row by row."""
    batch, policy = rollouts(), model()
    by = Learner(policy, TrainConfig(precision="fp64"), temperature=0.7)
    found = by.annotate(batch, frozenset({"old_logp", "entropy", "sum_pi_squared"}))
    pack = Pack.from_batch(batch)
    with torch.no_grad():
        logits = policy.logits(policy.hidden(pack.ids, pack.positions, PackedAttention(pack)))
    at = batch.action.nonzero()[:, 0]
    rows, ids = logits[pack.source[at]], batch.ids[at]
    for name, wanted in (
        ("old_logp", of_logits.token_logp(rows, ids, 0.7)),
        ("entropy", of_logits.entropy(rows, 0.7)),
        ("sum_pi_squared", of_logits.sum_pi_squared(rows, 0.7)),
    ):
        assert torch.allclose(found.require(name)[at], wanted, rtol=0, atol=1e-9)


def test_a_group_loss_sees_whole_groups() -> None:
    batch = rollouts(groups=4, size=3)
    objective = Imitate(SFT(), split_unit="group")
    metrics = learner(max_tokens_per_micro_batch=1).update(batch, objective).reduce()
    assert metrics["micro_batches"] == len(objective.seen) == 4
    assert all(micro.num_rollouts == 3 and micro.num_groups == 1 for micro in objective.seen)


def test_distillation_learns_from_the_teachers_likeliest_tokens() -> None:
    """The way of every output that has no backward pass of its own."""
    batch = rollouts()
    generator = torch.Generator().manual_seed(3)
    teacher = torch.randn(batch.num_tokens, VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(1)
    top = teacher.topk(5)
    batch = batch.replace(
        teacher_topk_ids=top.indices, teacher_topk_logp=top.values, old_logp=torch.zeros(batch.num_tokens).double()
    )
    by = learner()
    losses = [by.update(batch, Imitate(TopKDistillation())).reduce()["loss"] for _ in range(12)]
    assert losses[-1] < 0.7 * losses[0]
    cut = learner(max_tokens_per_micro_batch=30)
    assert cut.update(batch, Imitate(TopKDistillation())).reduce()["loss"] == pytest.approx(losses[0], abs=1e-9)


def test_it_learns_what_it_is_shown() -> None:
    batch, by = rollouts(), learner("fp32")
    losses = [by.update(batch, Imitate(SFT())).reduce()["loss"] for _ in range(20)]
    assert losses[-1] < 0.3 * losses[0]
    assert by.version == 20


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_precision_learns_alike(precision: str) -> None:
    batch = rollouts()
    exact = [learner("fp64").update(batch, Imitate(SFT())).reduce()["loss"]]
    by = learner(precision)
    told = by.update(batch, Imitate(SFT())).reduce()
    assert told["loss"] == pytest.approx(exact[0], rel=2e-2)
    assert ("loss_scale" in told) == (precision == "fp16")
    for _ in range(12):
        told = by.update(batch, Imitate(SFT())).reduce()
    assert told["loss"] < 0.5 * exact[0]


def test_half_precision_weights_are_always_the_masters_rounded() -> None:
    batch, by = rollouts(), learner("bf16")
    for _ in range(3):
        by.update(batch, Imitate(SFT()))
    masters = by.state()["weights"]
    for name, weight in by.weights():
        assert weight.dtype == torch.bfloat16 and masters[name].dtype == torch.float32
        assert torch.equal(weight, masters[name].bfloat16())


def test_masters_begin_as_the_file_has_them_and_are_held_once(tmp_path: Path) -> None:
    save(model("fp32"), tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    policy = load(tmp_path, dtype=torch.bfloat16, keep_float32=True)
    by = Learner(policy, TrainConfig(precision="bf16"))
    masters = by.state()["weights"]
    assert all(torch.equal(masters[name], file[name]) for name, _ in by.weights())
    assert not policy.take_float32_weights()
    assert any(not torch.equal(masters[name], weight.float()) for name, weight in by.weights())


@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
def test_an_update_without_action_tokens_changes_nothing(precision: str) -> None:
    batch, by = rollouts(), learner(precision)
    before = weights(by)
    told = by.update(batch.replace(action=torch.zeros_like(batch.action)), Imitate(SFT())).reduce()
    assert told["grad_norm"] == 0 and told["action_tokens"] == 0 and by.version == 1
    assert all(torch.equal(weight, before[name]) for name, weight in by.weights())


def test_updates_too_small_for_half_precision_are_kept() -> None:
    """One step of 1e-5 moves almost no bf16 weight; thirty of them do."""
    batch, by = rollouts(), learner("bf16", learning_rate=1e-5)
    before = weights(by)
    name = max(before, key=lambda name: float(before[name].float().abs().mean()))
    by.update(batch, Imitate(SFT()))
    assert torch.equal(weights(by)[name], before[name])
    for _ in range(29):
        by.update(batch, Imitate(SFT()))
    moved = (by.state()["weights"][name] - before[name].float()).abs()
    assert float(moved.max()) > 1e-4
    lost = torch.optim.AdamW([torch.nn.Parameter(before[name].clone())], lr=1e-5, weight_decay=0.0)
    (pure,) = lost.param_groups[0]["params"]
    for _ in range(30):
        pure.grad = torch.ones_like(pure)
        lost.step()
    assert torch.equal(pure, before[name])


def test_a_model_may_have_one_learner_after_another() -> None:
    policy, batch = model("bf16"), rollouts()
    losses = []
    for _ in range(2):
        by = Learner(policy, TrainConfig(precision="bf16", learning_rate=3e-3))
        losses += [by.update(batch, Imitate(SFT())).reduce()["loss"] for _ in range(10)]
        del by
    assert losses[-1] < losses[10] < losses[0]


def test_memory_stays_where_it_is() -> None:
    """An engine that shares the weights goes on looking at the same storage."""
    by = learner("bf16")
    places = {name: weight.data_ptr() for name, weight in by.weights()}
    before = weights(by)
    by.update(rollouts(), Imitate(SFT()))
    assert {name: weight.data_ptr() for name, weight in by.weights()} == places
    assert any(not torch.equal(weight, before[name]) for name, weight in by.weights())


def saved_bytes(by: Learner, batch: Batch) -> int:
    """What autograd keeps for the backward pass of an update."""
    return kept_for_backward(lambda: by.update(batch, Imitate(SFT())))


def test_every_option_has_an_effect() -> None:
    batch = rollouts()

    def after(**options: object) -> tuple[dict[str, float], dict[str, Tensor]]:
        by = learner("fp32", steps=4, **options)
        told = [by.update(batch, Imitate(SFT())) for _ in range(3)][-1]
        return told.reduce(), weights(by)

    told, plain = after()
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
        _, other = after(**options)
        assert not close(other, plain, 1e-6), options
    assert after(max_tokens_per_micro_batch=20)[0]["micro_batches"] > told["micro_batches"] == 1
    assert dict(learner("bf16").weights())["model.norm.weight"].dtype == torch.bfloat16
    assert saved_bytes(learner(activation_checkpointing=True), batch) < 0.6 * saved_bytes(learner(), batch)


def test_the_utilisation_is_told_where_the_peak_is_known() -> None:
    batch = rollouts()
    assert "mfu" not in learner("fp32").update(batch, Imitate(SFT())).reduce()
    told = Learner(model("fp32"), TrainConfig(precision="fp32"), peak=1e12).update(batch, Imitate(SFT())).reduce()
    assert 0 < told["mfu"] < 1
    assert told["trained_tokens"] == batch.num_tokens
    assert told["action_tokens"] == int(batch.action.sum())
    assert told["trained_tokens_per_second"] == pytest.approx(batch.num_tokens / told["update_seconds"])


# -- what goes wrong -------------------------------------------------------------------------------------------------


def poisoned(batch: Batch) -> Batch:
    """An advantage that no estimator returns: `AlgorithmConfig.estimate` refuses it, a plug-in's own loop might not."""
    advantage = torch.ones(batch.num_tokens)
    advantage[batch.action.nonzero()[0]] = torch.inf
    return batch.replace(advantage=advantage, old_logp=batch.behavior_logp)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_is_refused(precision: str) -> None:
    by, batch = learner(precision), rollouts()
    by.update(batch, Imitate(SFT()))
    before = weights(by)
    with pytest.raises(TrainingError, match=r"not finite in \d+ weights, `model.*the weights are unchanged"):
        by.update(poisoned(batch), Improve(AlgorithmConfig()))
    assert close(weights(by), before, 0) and by.version == 1
    by.update(batch, Imitate(SFT()))
    assert not close(weights(by), before, 0)


def test_errors_name_the_options_that_a_learner_was_given_by() -> None:
    by = Learner(model(), TrainConfig(precision="fp64"), option="critic.train")
    with pytest.raises(TrainingError, match=r"or lower `critic\.train\.learning_rate`"):
        by.update(poisoned(rollouts()), Improve(AlgorithmConfig()))
    with pytest.raises(
        TrainingError, match=r"`critic\.train\.max_tokens_per_micro_batch`.* `critic\.train\.activation_check"
    ):
        by.update(rollouts(), OutOfMemory(SFT()))


class OutOfMemory(Imitate):
    """An objective that the memory does not suffice for."""

    def loss(self, batch: Batch, outputs: Outputs, whole: Denominators) -> LossValue:
        raise MemoryError("no more")


def test_fp16_lowers_its_scale_and_skips() -> None:
    by, batch = learner("fp16"), rollouts()
    before = weights(by)
    told = by.update(poisoned(batch), Improve(AlgorithmConfig())).reduce()
    assert told["skipped_updates"] == 1 and told["loss_scale"] == 2**16 and "grad_norm" not in told
    assert close(weights(by), before, 0)
    told = by.update(batch, Imitate(SFT())).reduce()
    assert told["skipped_updates"] == 0 and told["loss_scale"] == 2**15
    with pytest.raises(TrainingError, match="not finite"):  # it is no matter of the scale
        for _ in range(20):
            by.update(poisoned(batch), Improve(AlgorithmConfig()))


@pytest.mark.parametrize(
    ("make", "complaint"),
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
def test_what_cannot_be_run_is_refused(make: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()


def test_a_first_token_that_nothing_predicts_is_refused() -> None:
    batch = rollouts()
    action = batch.action.clone()
    action[batch.offsets[2]] = True
    with pytest.raises(BatchError, match="Row 2 begins with a token to learn"):
        learner().update(batch.replace(action=action), Imitate(SFT()))


def test_a_batch_without_an_action_changes_nothing() -> None:
    batch, by = rollouts(), learner()
    before = weights(by)
    told = by.update(batch.replace(action=torch.zeros_like(batch.action)), Imitate(SFT())).reduce()
    assert told["loss"] == 0 and told["grad_norm"] == 0
    assert close(weights(by), before, 0)


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


def test_running_out_of_memory_names_the_knobs() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, cwd=Path.cwd(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        "Lower `train.max_tokens_per_micro_batch`, now 16384, or set `train.activation_checkpointing=true`"
        in done.stdout
    )


# -- stopping and going on -------------------------------------------------------------------------------------------

PRECISIONS = ("fp32", "bf16", "fp16")
PLAN = {"lr_scheduler": "cosine", "warmup_steps": 2, "weight_decay": 0.1}


def resume(by: Learner, directory: Path) -> None:
    """Bring a learner to the newest checkpoint."""
    checkpoints = CheckpointManager(directory)
    newest, state = checkpoints.newest(), by.state()
    assert newest is not None
    checkpoints.load(newest, state)
    by.restore(state)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_three_updates_saved_and_one_more_are_four(precision: str, tmp_path: Path) -> None:
    """Bit for bit, of a model that began from other weights."""
    whole = learner(precision, **PLAN)
    for update in range(4):
        if update == 3:
            CheckpointManager(tmp_path).save(3, whole.state(), {})
        whole.update(rollouts(update), Imitate(SFT()))
    resumed = learner(precision, seed=7, **PLAN)
    resume(resumed, tmp_path)
    assert resumed.version == 3 and not close(weights(resumed), weights(whole), 0)
    resumed.update(rollouts(3), Imitate(SFT()))
    assert resumed.version == 4
    assert close(weights(resumed), weights(whole), 0)
    for kind in ("weights", "exp_avg", "exp_avg_sq", "step", "scaling"):
        assert close(resumed.state()[kind], whole.state()[kind], 0), kind


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_takes_the_weights_of_a_checkpoint(precision: str, tmp_path: Path) -> None:
    by, checkpoints = learner(precision), CheckpointManager(tmp_path)
    by.update(rollouts(), Imitate(SFT()))
    saved = checkpoints.save(1, by.state(), {})
    other = model(precision, seed=8)
    load_weights(other, checkpoints, saved)
    assert close(dict(other.named_weights()), weights(by), 0)


def test_a_learner_without_an_end_follows_no_schedule() -> None:
    by = Learner(model(), TrainConfig(precision="fp64", lr_scheduler="cosine", warmup_steps=1))
    by.annotate(rollouts(), frozenset({"old_logp"}))
    by.update(rollouts(), Imitate(SFT()))
    with pytest.raises(AssertionError, match="needs the number of updates"):
        by.update(rollouts(), Imitate(SFT()))


def test_a_state_of_another_learner_is_taken_whole_or_refused() -> None:
    one, other = learner("bf16"), learner("bf16", seed=3)
    one.update(rollouts(), Imitate(SFT()))
    other.restore(one.state())
    assert other.version == 1 and close(weights(other), weights(one), 0)
    assert not any(a.data_ptr() == b.data_ptr() for (_, a), (_, b) in zip(one.weights(), other.weights(), strict=True))
    with pytest.raises(ConfigError, match="of another model or precision: only one of them has"):
        other.restore(learner("bf16", family="gpt2").state())
