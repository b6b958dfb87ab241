"""What every train engine promises: several ranks learn what one learns, whatever each of them holds of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3MoeConfig

from etude.algorithms import AlgorithmConfig
from etude.algorithms.advantages import ADVANTAGES
from etude.algorithms.entropy import EntropyConfig
from etude.algorithms.kl import KLS
from etude.algorithms.losses import LOSSES
from etude.algorithms.losses.clip import PPO
from etude.algorithms.losses.preference import RewardModelLoss
from etude.algorithms.losses.supervised import ValueLoss
from etude.checkpoint import CheckpointManager, export
from etude.dispatch import LocalCrew
from etude.dispatch.process_crew import ProcessCrew
from etude.errors import ConfigError, TrainingError
from etude.models import Head, LoraAdapterConfig, Model, adapt, create, load, save, tiny_config
from etude.protocols import Crew
from etude.train import FrozenModel, MeshConfig, load_weights
from etude.train.fsdp import ShardedModel
from tests.recipes.ranked import RankPolicy, adapted, crew_of, frozen, judge, unfused, with_unused
from tests.train.tasks import VOCABULARY, answered, model, rollouts
from tests.train.test_scoring import pairs

pytestmark = pytest.mark.xdist_group("ranks")  # what its tests share takes long to make

EVERYTHING = AlgorithmConfig(
    loss=PPO(reduction="seq-mean-token-mean"),
    advantage=ADVANTAGES["reinforce++"](),
    entropy=EntropyConfig(coefficient=0.1, top_share=0.8),
    correction={"weight": "truncate", "high": 2.0, "normalize": "tokens"},
    echo=0.3,
)
WHOLE = AlgorithmConfig(kl=KLS["full"](coefficient=0.3))
COVARIANCE = AlgorithmConfig(loss=LOSSES["clip_cov"](share=0.2), advantage=ADVANTAGES["gpg"]())
TOLERANCE = {"fp64": 1e-12, "fp32": 2e-5}
"""The largest difference of a weight after five steps of four updates, each of which moves it by up to 1e-2."""
TIMES = {"update_seconds", "trained_tokens_per_second", "peak_memory_gb", "mfu", "micro_batches"}
"""Metrics of the computation, not of the learning."""


@dataclass(frozen=True)
class Engine:
    """The ranks that hold an engine, and how one rank is made that computes the same."""

    crew: ProcessCrew
    name: Literal["local", "fsdp"]
    mesh: MeshConfig | None = None

    def begin(self, *args: Any, policy: Callable[[str], Model] = model, **options: Any) -> Crew:
        """Start anew on every rank."""
        layers = self._layers(policy)
        self.crew.call(RankPolicy.begin, *args, engine=self.name, policy=layers, mesh=self.mesh, **options)
        return self.crew

    def alone(self, *args: Any, policy: Callable[[str], Model] = model, **options: Any) -> Crew:
        """Start one rank of the local engine, in this process."""
        crew = LocalCrew(RankPolicy())
        crew.call(RankPolicy.begin, *args, policy=self._layers(policy), **options)
        return crew

    def _layers(self, policy: Callable[[str], Model]) -> Callable[[str], Model]:
        return policy if self.name == "local" else partial(unfused, policy=policy)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    with closing(crew_of(2, tmp_path_factory.mktemp("two"))) as made:
        yield made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCrew]:
    with closing(crew_of(3, tmp_path_factory.mktemp("three"))) as made:
        yield made


@pytest.fixture(params=["fsdp", "local"])
def engine(request: pytest.FixtureRequest) -> Engine:
    crew = request.getfixturevalue("two") if request.param == "fsdp" else LocalCrew(RankPolicy())
    return Engine(crew, request.param)


@pytest.fixture
def fsdp(two: ProcessCrew) -> Engine:
    return Engine(two, "fsdp")


def practised(
    crew: Crew, steps: int = 5, *, updates: int = 2, groups: int = 3, first: int = 0
) -> list[dict[str, float]]:
    """What some steps measure, on batches of unequal groups."""
    measured = []
    for step in range(first, first + steps):
        batch = crew.call(RankPolicy.ready, rollouts(seed=step, groups=groups))
        measured.append(crew.call(RankPolicy.update, batch.split(updates, by="rollout")).reduce())
    return measured


def difference(one: Crew, other: Crew) -> float:
    """The largest difference of two weights; every rank has the same ones."""
    mine, theirs = one.call(RankPolicy.weights), other.call(RankPolicy.weights)
    for weights in (mine, theirs):
        assert all(same(weights[0], each) for each in weights)
    return max(float((weight - theirs[0][name]).abs().max()) for name, weight in mine[0].items())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("precision", sorted(TOLERANCE))
@pytest.mark.parametrize(
    "algorithm", [AlgorithmConfig(), EVERYTHING, COVARIANCE], ids=["grpo", "everything", "covariance"]
)
def test_five_steps_are_those_of_one_rank(fsdp: Engine, algorithm: AlgorithmConfig, precision: str) -> None:
    """In loss, gradient norm and weights; and every other number that is measured of the learning is the same too."""
    options: dict[str, Any] = {
        "precision": precision,
        "algorithm": algorithm,
        "epochs": 2,
        "max_tokens_per_micro_batch": 60,
    }
    one, many = fsdp.alone(**options), fsdp.begin(**options)
    before = one.call(RankPolicy.weights)[0]
    wanted, found = practised(one), practised(many)
    tolerance = TOLERANCE[precision]
    assert difference(one, many) <= tolerance
    assert max(float((w - before[name]).abs().max()) for name, w in one.call(RankPolicy.weights)[0].items()) > 0.05
    for mine, theirs in zip(wanted, found, strict=True):
        assert mine.keys() | {"imbalance"} == theirs.keys()
        assert 0 <= theirs["imbalance"] <= fsdp.crew.ranks - 1
        for name in ("loss", "grad_norm", "policy_loss"):
            assert theirs[name] == pytest.approx(mine[name], rel=50 * tolerance, abs=tolerance), name
        for name in mine.keys() - TIMES:  # what the sampler said is in float32 always
            assert theirs[name] == pytest.approx(mine[name], rel=1e-3, abs=1e-6), name


def test_ranks_without_a_rollout_take_part(fsdp: Engine) -> None:
    """Fewer groups than ranks, and update batches with nothing for some of them."""
    one, many = fsdp.alone(algorithm=EVERYTHING), fsdp.begin(algorithm=EVERYTHING)
    practised(one, 2, groups=1, updates=3), practised(many, 2, groups=1, updates=3)
    assert difference(one, many) <= 1e-12


def test_ranks_with_more_micro_batches_than_others_do_not_wait_in_vain(fsdp: Engine) -> None:
    options = {"algorithm": AlgorithmConfig(), "max_tokens_per_micro_batch": 1}
    one, many = fsdp.alone(**options), fsdp.begin(**options)
    lengths = torch.tensor([0, 1, 2, 3, 4, 5, 8])  # groups of four, of two and of one
    batch = rollouts(groups=3).select(lengths)
    for crew in (one, many):
        crew.call(RankPolicy.update, [crew.call(RankPolicy.ready, batch)])
    assert difference(one, many) <= 1e-12


def test_a_weight_that_nothing_pulls_at_stays(engine: Engine) -> None:
    """Where no rank has a gradient, weight decay and AdamW's memory do not act either."""
    two = engine.begin(weight_decay=0.5)
    two.call(RankPolicy.imitate, rollouts())
    before = two.call(RankPolicy.weights)[0]
    told = two.call(RankPolicy.imitate, rollouts(), seen=0).reduce()
    assert told["grad_norm"] == 0 and told["action_tokens"] == 0
    assert same(two.call(RankPolicy.weights)[0], before)


def test_a_gradient_that_is_not_finite_is_refused_by_all_and_named(engine: Engine) -> None:
    two = engine.begin()
    batch = two.call(RankPolicy.ready, rollouts())
    before = two.call(RankPolicy.weights)[0]
    broken = batch.replace(advantage=torch.where(batch.action, torch.tensor(1e308).double(), 0.0))
    with pytest.raises(TrainingError, match=r"not finite in \d+ weights, `model\.embed_tokens\.weight` first"):
        two.call(RankPolicy.update, [broken])
    assert same(two.call(RankPolicy.weights)[0], before)
    two.call(RankPolicy.update, [batch])


@pytest.mark.parametrize("readers", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_a_checkpoint_of_two_ranks_is_one_of_any_number(
    fsdp: Engine, readers: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Others go on from it as the two do; and a model is read from it alone."""
    two = fsdp.begin(algorithm=EVERYTHING)
    practised(two, 2)
    two.call(RankPolicy.save, CheckpointManager(tmp_path), 2)
    if readers == 1:
        other = fsdp.alone(algorithm=EVERYTHING)
    else:
        other = replace(fsdp, crew=request.getfixturevalue("three")).begin(algorithm=EVERYTHING)
    assert difference(two, other) > 0.01
    other.call(RankPolicy.resume, tmp_path)
    assert difference(two, other) == 0
    policy, checkpoints = model(seed=5), CheckpointManager(tmp_path)
    newest = checkpoints.newest()
    assert newest is not None
    load_weights(policy, checkpoints, newest)
    assert same({name: w.detach() for name, w in policy.named_weights()}, two.call(RankPolicy.weights)[0])
    practised(two, 2, first=2), practised(other, 2, first=2)
    assert 0 < difference(two, other) <= 1e-12


def test_a_checkpoint_of_one_rank_is_read_by_two(fsdp: Engine, tmp_path: Path) -> None:
    one = fsdp.alone()
    practised(one, 2)
    one.call(RankPolicy.save, CheckpointManager(tmp_path), 2)
    two = fsdp.begin()
    two.call(RankPolicy.resume, tmp_path)
    assert difference(one, two) == 0
    practised(one, 2, first=2), practised(two, 2, first=2)
    assert difference(one, two) <= 1e-12


def test_the_same_ranks_find_the_same_bits(engine: Engine) -> None:
    weights = []
    for _ in range(2):
        many = engine.begin("fp32")
        practised(many, 3)
        weights.append(many.call(RankPolicy.weights)[0])
    assert same(*weights)


def test_half_precision_is_the_float32_weights_rounded_on_every_rank(engine: Engine, tmp_path: Path) -> None:
    many = engine.begin("bf16")
    practised(many, 2)
    weights, kept = many.call(RankPolicy.weights), many.call(RankPolicy.kept)
    assert all(same(weights[0], each) for each in weights)
    assert sum(kept) == sum(weight.numel() for weight in weights[0].values()) and max(kept) <= 1.2 * min(kept)
    many.call(RankPolicy.save, CheckpointManager(tmp_path), 1)
    one = engine.alone("bf16")
    one.call(RankPolicy.resume, tmp_path)
    assert same(one.call(RankPolicy.weights)[0], weights[0])


def test_a_scale_that_overflows_is_lowered_on_every_rank_at_once(engine: Engine) -> None:
    for crew in (engine.alone("fp16"), engine.begin("fp16")):
        batch = crew.call(RankPolicy.ready, rollouts())
        large = batch.replace(advantage=batch.require("advantage") * 1e6)
        before = crew.call(RankPolicy.weights)[0]
        steps = [crew.call(RankPolicy.update, [each]).reduce() for each in (large, batch)]
        assert [step["skipped_updates"] for step in steps] == [1, 0]
        assert steps[1]["loss_scale"] == steps[0]["loss_scale"] / 2
        assert not same(crew.call(RankPolicy.weights)[0], before)


def test_an_update_that_runs_out_of_memory_changes_nothing(engine: Engine) -> None:
    """Neither the weights, nor what the model says of a batch, nor the next update."""
    batch, results = rollouts(groups=4), []
    for fails in (False, True):
        crew = engine.begin(max_tokens_per_micro_batch=20)
        if fails:
            crew.call(RankPolicy.fail_twice, batch)
            crew.call(RankPolicy.fail_in_first_layer, batch)
        logp = crew.call(RankPolicy.tell, batch, frozenset({"old_logp"})).require("old_logp").nan_to_num()
        crew.call(RankPolicy.imitate, batch)
        results.append({"old_logp": logp, **crew.call(RankPolicy.weights)[0]})
    assert same(*results)


@pytest.mark.parametrize("policy", [model, adapted])
def test_a_comparison_that_runs_out_of_memory_changes_nothing(fsdp: Engine, policy: Callable[[str], Model]) -> None:
    """Neither with another model in shards nor with the policy's own, without its adapters."""
    batch, results = rollouts(groups=4), []
    for fails in (False, True):
        crew = fsdp.begin(algorithm=WHOLE, policy=policy, max_tokens_per_micro_batch=20)
        ready = crew.call(RankPolicy.ready, batch)
        if fails:
            crew.call(RankPolicy.fail_comparing, ready)
            assert all(crew.call(RankPolicy.released))
        logp = crew.call(RankPolicy.teach, batch).require("ref_logp").nan_to_num()
        crew.call(RankPolicy.update, [ready])
        assert all(crew.call(RankPolicy.released))
        results.append({"ref_logp": logp, **crew.call(RankPolicy.weights)[0]})
    assert same(*results)


def test_a_weight_that_no_pass_reads_does_not_decay(engine: Engine) -> None:
    crew = engine.begin(policy=with_unused, weight_decay=0.5)
    practised(crew, 1)
    assert torch.equal(crew.call(RankPolicy.weights)[0]["model.unused"], torch.ones(6, 3, dtype=torch.float64))


LEARNERS: dict[str, dict[str, Any]] = {
    "whole distributions": {"algorithm": WHOLE},
    "adapters, held to what they adapt": {
        "policy": adapted,
        "algorithm": AlgorithmConfig(kl=KLS["reverse"](coefficient=0.3)),
    },
    "adapters, whole distributions": {"policy": adapted, "algorithm": WHOLE},
    "adapters, activations made twice": {"policy": adapted, "activation_checkpointing": "full"},
    "adapters, activations but products made twice": {"policy": adapted, "activation_checkpointing": "selective"},
    "a layer and the embedding frozen": {"policy": partial(frozen, parts=["embed_tokens", "layers.0", "k_proj"])},
    "all but the head frozen": {"policy": partial(frozen, parts=["embed_tokens", "layers", "model.norm"])},
}


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_is_that_of_one_rank(fsdp: Engine, learner: str) -> None:
    """Also where ranks have unequally many micro-batches, or no rollout at all."""
    options = {"max_tokens_per_micro_batch": 40, **LEARNERS[learner]}
    one, many = fsdp.alone(**options), fsdp.begin(**options)
    before = one.call(RankPolicy.weights)[0]
    for crew in (one, many):
        practised(crew, 1)
        practised(crew, 1, groups=1, updates=3, first=1)
    assert difference(one, many) <= 1e-12
    assert max(float((w - before[name]).abs().max()) for name, w in one.call(RankPolicy.weights)[0].items()) > 0.02


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_activations_that_are_computed_again_change_nothing(engine: Engine, kind: str) -> None:
    options: dict[str, Any] = {"algorithm": EVERYTHING, "max_tokens_per_micro_batch": 40}
    gradients = []
    for checkpointing in ("none", kind):
        crew = engine.begin(activation_checkpointing=checkpointing, **options)
        practised(crew, 1, updates=1)
        gradients.append(crew.call(RankPolicy.gradient))
    assert max(float((gradients[1][name] - wanted).abs().max()) for name, wanted in gradients[0].items()) <= 1e-12
    assert max(float(wanted.abs().max()) for wanted in gradients[0].values()) > 1e-3


def test_scores_and_values_are_those_of_one_rank(fsdp: Engine) -> None:
    one, many = fsdp.alone(policy=judge), fsdp.begin(policy=judge)
    batches = [crew.call(RankPolicy.tell, rollouts(), frozenset({"value", "final_value"})) for crew in (one, many)]
    for name in ("value", "final_value"):
        mine, theirs = (each.require(name) for each in batches)
        torch.testing.assert_close(theirs, mine, rtol=0, atol=1e-12, equal_nan=True)
    for crew in (one, many):
        batch = crew.call(RankPolicy.tell, rollouts(), frozenset({"value"}))
        returns = torch.where(batch.action, 1.0, torch.nan).to(batch.value)
        crew.call(RankPolicy.imitate, batch.replace(returns=returns), loss=ValueLoss())
        crew.call(RankPolicy.imitate, pairs(), loss=RewardModelLoss())
    assert difference(one, many) <= 1e-12


@pytest.mark.parametrize("groups", [3, 1])
def test_a_frozen_model_says_what_it_says_on_one_rank(fsdp: Engine, groups: int) -> None:
    """Of batches that give ranks unequally many micro-batches, or nothing to one of them."""
    batch = rollouts(groups=groups, longest=30)
    for policy in (model, adapted):
        one, many = (
            crew.call(RankPolicy.teach, batch) for crew in (fsdp.alone(policy=policy), fsdp.begin(policy=policy))
        )
        assert torch.equal(one.require("teacher_topk_ids"), many.require("teacher_topk_ids"))
        for name in ("ref_logp", "teacher_topk_logp"):
            torch.testing.assert_close(one.require(name), many.require(name), rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_adapters_are_written_and_resumed_as_by_one_rank(fsdp: Engine, precision: str, tmp_path: Path) -> None:
    """Merged into the model, which lies in files without them too, and on their own; from one rank to two, and back."""
    two, one = (begin(precision, policy=adapted) for begin in (fsdp.begin, fsdp.alone))
    practised(two, 1)
    two.call(RankPolicy.save, CheckpointManager(tmp_path / "two"), 1)
    one.call(RankPolicy.resume, tmp_path / "two")
    for crew, where in ((one, tmp_path / "by one"), (two, tmp_path / "by two")):
        where.mkdir()
        (where / "tokenizer.json").write_text("{}")
        assert crew.call(RankPolicy.write, where) == 4
    for part in ("merged/model", "bare/model", "adapter/adapter_model"):
        assert same(*(load_file(tmp_path / by / f"{part}.safetensors") for by in ("by one", "by two")))
    for part in ("merged/config", "bare/config", "adapter/adapter_config"):
        assert len({(tmp_path / by / f"{part}.json").read_text() for by in ("by one", "by two")}) == 1
    if precision == "fp64":
        practised(one, 1, first=1), practised(two, 1, first=1)
        assert difference(one, two) <= 1e-12
        one.call(RankPolicy.save, CheckpointManager(tmp_path / "one"), 2)
        fsdp.begin(policy=adapted).call(RankPolicy.resume, tmp_path / "one")
        assert difference(one, two) == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_frozen_model_in_shards_rests_in_the_processors_memory(device: str) -> None:
    batch, where = rollouts(), torch.device(device)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shards = ShardedModel(unfused("fp32"), init_device_mesh(device, (1,)))
        resting = FrozenModel(shards, 50, compute_device=where)
        for _ in range(2):
            assert {weight.device.type for weight in resting.model.parameters()} == {"cpu"}
            logp = resting.logp(batch)
            torch.testing.assert_close(logp, FrozenModel(unfused("fp32"), 50).logp(batch), equal_nan=True)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("layers", [2, 8])
def test_collective_calls_depend_on_layers_and_micro_batches_alone(fsdp: Engine, layers: int) -> None:
    """A micro-batch gathers each layer twice and the root once, and reduces each gradient once; an update adds ten
    small calls."""
    policy = partial(model, layers=layers)
    for tokens, micro_batches in ((10_000, 1), (120, 2)):
        crew = fsdp.begin(policy=policy, max_tokens_per_micro_batch=tokens)
        for counts in crew.call(RankPolicy.collectives, rollouts(groups=4)):
            assert counts == calls_of_update(layers, micro_batches), counts


@pytest.mark.parametrize("policy", [model, adapted])
@pytest.mark.parametrize("groups", [4, 1])
def test_a_frozen_model_is_asked_in_the_middle_of_a_measurement(
    fsdp: Engine, policy: Callable[[str], Model], groups: int
) -> None:
    """By ranks with unequally many micro-batches; it may be the measured model itself, without its adapters."""
    batch = pairs() if groups == 4 else pairs().select([0, 1])
    one, many = (
        begin(policy=policy, max_tokens_per_micro_batch=1).call(RankPolicy.measure, batch).reduce()
        for begin in (fsdp.alone, fsdp.begin)
    )
    assert one.keys() == many.keys()
    for name, wanted in one.items():
        assert many[name] == pytest.approx(wanted, rel=1e-12, abs=1e-12), name


def test_frozen_weights_in_shards_are_held_as_they_are_computed_with(fsdp: Engine) -> None:
    held = fsdp.begin("bf16", policy=adapted).call(RankPolicy.held)
    for dtypes in held:
        assert {dtypes[name] for name in dtypes if ".lora_" in name} == {torch.float32}
        assert {dtypes[name] for name in dtypes if ".lora_" not in name} == {torch.bfloat16}


def test_moments_in_shards_rest_in_other_memory(fsdp: Engine) -> None:
    crew = fsdp.begin()
    practised(crew, 1)
    assert crew.call(RankPolicy.rested) == [True, True]


def test_weights_in_shards_are_published_to_an_engine_beside_them(fsdp: Engine) -> None:
    assert fsdp.begin("fp32", policy=adapted).call(RankPolicy.published, adapted) == [True, True]


@pytest.mark.parametrize(
    ("family", "tied", "files", "head", "lora"),
    [
        ("qwen3", True, 1, "language", 4),
        ("llama", False, 3, "value", 0),
        ("gpt2", True, 1, "language", 0),
    ],
)
def test_a_model_is_loaded_in_shards(
    two: ProcessCrew, tmp_path: Path, family: str, tied: bool, files: int, head: Head, lora: int
) -> None:
    """Of one file or many, with new adapters or a new head: the weights are those of a model loaded whole."""
    where = tmp_path / "model"
    made = create(tiny_config(VOCABULARY, family=family, tied=tied), seed=1)
    size = sum(weight.nbytes for weight in made.parameters())
    export(made.named_weights(), made.config_dict(), where, max_shard_bytes=size // files + 1)
    assert len(list(where.glob("*.safetensors"))) >= files
    whole = load(where, dtype=torch.float32, head=head)
    whole = adapt(whole, LoraAdapterConfig(rank=lora), seed=3) if lora else whole
    expected = {name: weight.detach() for name, weight in whole.named_weights()}
    assert all(same(expected, found) for found in two.call(RankPolicy.loaded, where, head, lora))


def test_weights_that_files_store_in_another_form_are_read_whole(two: ProcessCrew, tmp_path: Path) -> None:
    """Experts, one by one in the files, which the model fuses."""
    config = Qwen3MoeConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "moe_intermediate_size": 16},
        **{"num_experts": 4, "num_experts_per_tok": 2},
    )
    save(create(config, seed=1), tmp_path)
    expected = {name: weight.detach() for name, weight in load(tmp_path, dtype=torch.float32).named_weights()}
    assert all(same(expected, found) for found in two.call(RankPolicy.loaded, tmp_path))


def test_a_head_besides_a_tied_one_is_refused(two: ProcessCrew, tmp_path: Path) -> None:
    made = create(tiny_config(VOCABULARY), seed=1)
    head = ("lm_head.weight", made.head_weight.detach() + 1)
    export([*made.named_weights(), head], made.config_dict(), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"ties the head to the embedding. Set `tie_word_embeddings` to false"):
        two.call(RankPolicy.loaded, tmp_path / "model")


def test_no_rank_holds_a_whole_model_while_it_loads(two: ProcessCrew, tmp_path: Path) -> None:
    save(create(tiny_config(4096, hidden=256, layers=4), seed=1), tmp_path)
    for rank in two.call(RankPolicy.loading, tmp_path):
        assert rank["peak"] <= rank["shards"] + rank["largest"] + 2**18, rank


def test_files_without_all_weights_are_refused_on_every_rank(two: ProcessCrew, tmp_path: Path) -> None:
    made = create(tiny_config(VOCABULARY), seed=1)
    weights = {name: weight for name, weight in made.named_weights() if "layers.1.mlp" not in name}
    export(weights.items(), made.config_dict(), tmp_path / "model")
    with pytest.raises(ConfigError, match=r"lacks 3 of its weights, model\.layers\.1\.mlp\.down_proj\.weight"):
        two.call(RankPolicy.loaded, tmp_path / "model")


def test_imbalance_is_what_the_busiest_rank_has_beyond_the_mean(fsdp: Engine) -> None:
    even, asked, short_answers = (5, [4, 4]), (40, [2] * 4), (2, [40] * 4)
    long, short = work(*short_answers), work(*asked)
    assert 3.4 * short < long < 20 * short, "both have as many tokens"
    expected = [
        ([even], 1.0),
        ([even] * 2, 0.0),
        ([even] * 3, 1 / 3),
        ([asked, short_answers], 2 * long / (long + short) - 1),
    ]
    for groups, imbalance in expected:
        two = fsdp.begin()
        metrics = two.call(RankPolicy.update, [two.call(RankPolicy.ready, answered(*groups))]).reduce()
        assert metrics["imbalance"] == pytest.approx(imbalance, abs=1e-9), groups


def calls_of_update(layers: int, micro_batches: int) -> dict[str, int]:
    """The collective calls of a rank in an update of the `fsdp` engine, data parallel alone."""
    return {
        "gathers": micro_batches * (2 * layers + 1),
        "reduces": micro_batches * (layers + 1),
        "tensor_gathers": 0,
        "tensor_reduces": 0,
        "small_gathers": 9,
        "sums": 1,
        "micro_batches": micro_batches,
    }


def work(prompt: int, answers: list[int]) -> float:
    """What a pass over a group costs, in products: of weights with each token, of logits with each action token, and of
    each token with those that it attends to."""
    policy = model()
    head = policy.head_weight.numel()
    layers = sum(weight.numel() for _, weight in policy.named_weights() if weight.ndim == 2) - head
    pairs = prompt * (prompt + 1) / 2 + sum(answer * prompt + answer * (answer + 1) / 2 for answer in answers)
    attended = 2 * policy.num_layers * policy.query_heads * policy.head_dim * pairs
    return layers * (prompt + sum(answers)) + head * sum(answers) + attended
