"""All answers of a small model whose sampler cuts tokens off, with the sets that it recorded.

The model is a transformer of one layer, in float64. Its answers have three of six tokens, so there are 216 of them and
43 states in which a token is chosen. A sampler leaves some tokens out in each state. The answers that it can still draw
are one batch, with a set for each token, as a run records it. So an expectation over the sampler is a sum over them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from etude.algorithms import AlgorithmConfig, AlgorithmState, Denominators, Outputs, View
from etude.batch import Batch, SupportSets
from etude.data.pack import pack_prefix_tree
from etude.models import Model, PackedAttention, create, tiny_config
from etude.rollout.sampling import _filter_logits
from etude.support import Support, encode_set
from etude.train.forward import ForwardPass
from etude.train.frozen_model import FrozenModel
from tests.conformance.mdp import draw

TOKENS, LENGTH = 6, 3
WIDTH = 1 + LENGTH
"""The tokens of a row: a prompt of one token, and the answer."""
PATHS = list(itertools.product(range(TOKENS), repeat=LENGTH))
PREFIXES = sorted({path[:t] for path in PATHS for t in range(LENGTH)})
STATES = torch.tensor([[PREFIXES.index(path[:t]) for t in range(LENGTH)] for path in PATHS])
"""[216, 3]: the state in which each token of an answer is chosen."""
IDS = torch.tensor(PATHS)
REWARD = draw(11, len(PATHS))
MANY = 10_000

Cut = Callable[[Tensor], Tensor]
"""A function from logits [S, V] to the tokens that are left [S, V]."""


def make_model(change: float = 0.0) -> Model:
    """Return a model whose probabilities are unequal, and whose weights differ from the first one's by this much."""
    model = create(
        tiny_config(TOKENS, layers=1, hidden=8, heads=2, kv_heads=1, tied=False), seed=0, dtype=torch.float64
    )
    with torch.no_grad():
        model.head_weight.copy_(draw(12, *model.head_weight.shape, scale=0.6))
        for seed, weight in enumerate(model.parameters()):
            weight.add_(draw(100 + seed, *weight.shape, scale=change))
    return model


# -- the samplers -----------------------------------------------------------------------------------------------------


def by_filters(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Cut:
    """Return the engine's own filters."""
    log_min_p = math.log(min_p) if min_p else -math.inf
    limits = [float(top_k), top_p, log_min_p]

    def cut(logits: Tensor) -> Tensor:
        columns = [torch.full((len(logits),), limit, dtype=logits.dtype) for limit in limits]
        return _filter_logits(logits.clone(), columns[0], columns[1], columns[2]) > -torch.inf

    return cut


def grammar(_: Tensor) -> Tensor:
    """Return a mask that the logits do not decide. It forces the token in three states of ten."""
    allowed = draw(13, len(PREFIXES), TOKENS) < 0.3
    forced = draw(14, len(PREFIXES)) < -0.5
    one = torch.arange(TOKENS) == torch.arange(len(PREFIXES))[:, None] % TOKENS
    return torch.where(forced[:, None], one, allowed | one)


def bans_then_top_p(logits: Tensor) -> Tensor:
    """Return what top-p leaves of the tokens that are not banned."""
    allowed = torch.arange(TOKENS) != (torch.arange(len(PREFIXES)) % TOKENS)[:, None]
    return by_filters(top_p=0.8)(logits.masked_fill(~allowed, -torch.inf)) & allowed


CUTS: dict[str, Cut] = {
    "top_k": by_filters(top_k=3),
    "top_p": by_filters(top_p=0.8),
    "min_p": by_filters(min_p=0.3),
    "all three": by_filters(top_k=4, top_p=0.85, min_p=0.1),
    "grammar": grammar,
    "bans, then top_p": bans_then_top_p,
}


# -- the answers ------------------------------------------------------------------------------------------------------


def answers(possible: Tensor) -> Batch:
    """Return a batch of these answers, given as a mask [216], in one group."""
    ids = torch.cat([torch.zeros(len(PATHS), 1, dtype=torch.int64), IDS], 1)[possible]
    count = len(ids)
    return Batch(
        offsets=WIDTH * torch.arange(count + 1),
        unit=torch.arange(count),
        group=torch.zeros(count, dtype=torch.int64),
        ids=ids.flatten().int(),
        action=(torch.arange(WIDTH) > 0).repeat(count),
        reward=REWARD[possible],
    )


def logits_of(model: Model, batch: Batch) -> Tensor:
    """[U, 3, V]: return the model's logits for each token of each answer, without the head that is tested."""
    pack = pack_prefix_tree(batch)
    hidden = model.hidden(pack.ids, pack.positions, PackedAttention(pack))
    return model.logits(hidden[pack.source[batch.action]]).view(batch.num_rollouts, LENGTH, TOKENS)


def state_logits(model: Model) -> Tensor:
    """[S, V]: return the model's logits in each state."""
    table = torch.zeros(len(PREFIXES), TOKENS, dtype=torch.float64)
    with torch.no_grad():
        table[STATES] = logits_of(model, answers(torch.ones(len(PATHS), dtype=torch.bool)))
    return table


def at_actions(values: Tensor) -> Tensor:
    """[U, 3] → [T]: return a column that is NaN in the context."""
    return torch.cat([values.new_full((len(values), 1), torch.nan), values], 1).flatten()


@dataclass(frozen=True)
class SampledAnswers:
    """The answers that a sampler can draw, and the models that learn from them."""

    model: Model
    """The policy that is trained."""
    allowed: Tensor
    """[S, V] bool: the tokens that the sampler could draw in each state."""
    possible: Tensor
    """[216] bool: the answers that it could draw."""
    batch: Batch
    """These answers once each, with their sets and the sampler's log-probs."""
    probability: Tensor
    """[U]: of each, by the sampler."""
    reference: FrozenModel

    @cached_property
    def allowed_tokens(self) -> Tensor:
        """[U, 3, V] bool."""
        return self.allowed[STATES[self.possible]]

    @cached_property
    def weights(self) -> list[Tensor]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

    def distribution(self, model: Model) -> Tensor:
        """[U, 3, V]: return a model's log-probs over the sets, by plain torch."""
        return logits_of(model, self.batch).masked_fill(~self.allowed_tokens, -torch.inf).log_softmax(-1)

    def drawn(self, table: Tensor) -> Tensor:
        """[U, 3, V] → [U, 3]: return the entries of the drawn tokens."""
        return table.gather(2, IDS[self.possible][..., None])[..., 0]

    def forward(self, batch: Batch, wanted: frozenset[str]) -> dict[str, Tensor]:
        """Return the outputs of the trainer's own forward pass."""
        return ForwardPass(self.model, pack_prefix_tree, 1.0, self.reference)(batch, wanted).columns

    def gradient(self, objective: Tensor) -> Tensor:
        """Return the gradient by all weights, as one vector."""
        grads = torch.autograd.grad(objective, self.weights, retain_graph=True, materialize_grads=True)
        return torch.cat([grad.flatten() for grad in grads])

    @cached_property
    def true_gradient(self) -> Tensor:
        """∇E[reward] of the policy over the sets."""
        probability = self.drawn(self.distribution(self.model)).sum(1).exp()
        return self.gradient((probability * self.batch.require("reward")).sum())

    def over_states(self, per_token: Tensor) -> Tensor:
        """[U, 3] → []: return the sum over an answer's tokens, in expectation. Which states are visited is constant."""
        return (self.probability * per_token.sum(1)).sum()

    def pairs(self) -> tuple[Batch, Tensor, Tensor]:
        """Return all groups of two answers as one batch, the answers of each [C, 2], and each one's probability."""
        members = torch.combinations(torch.arange(self.batch.num_rollouts), 2, with_replacement=True)
        batch = self.batch.select(members.flatten())
        count = len(members)
        batch = batch.replace(group=torch.arange(count).repeat_interleave(2), rollout_id=torch.arange(2 * count))
        orders = torch.where(members[:, 0] == members[:, 1], 1.0, 2.0)
        return batch, members, orders * self.probability[members].prod(1)

    def expected_loss(self, algorithm: AlgorithmConfig, outputs: dict[str, Tensor]) -> Tensor:
        """Return the expectation of the algorithm's loss over groups of two.

        outputs: the forward pass's columns for the batch.
        """
        batch, members, probability = self.pairs()
        estimated = algorithm.estimate(batch, AlgorithmState())
        share = (probability * len(probability)).repeat_interleave(2 * WIDTH)
        weight = estimated.batch.weight
        ready = estimated.batch.replace(weight=share if weight is None else weight * share)
        of_pairs = {name: values.view(-1, WIDTH)[members.flatten()].flatten() for name, values in outputs.items()}
        denominators = Denominators.from_view(View(ready))
        return algorithm.compute_loss(ready, Outputs(**of_pairs), denominators, estimated.state).loss


@cache  # so that a mutation of the trainer does not change what was recorded
def sample(name: str, change: float = 0.0) -> SampledAnswers:
    """Return the answers that a sampler drew from the first model.

    change: how far the weights of the policy have moved since.
    """
    logits = state_logits(make_model())
    allowed = CUTS[name](logits)
    logp = logits.masked_fill(~allowed, -torch.inf).log_softmax(-1)[STATES, IDS]
    possible = (logp > -torch.inf).all(1)
    support = Support.build([encode_set(mask) for mask in allowed[STATES[possible]].flatten(0, 1).numpy()])
    assert support is not None
    index = torch.tensor(support.index, dtype=torch.int32).view(-1, LENGTH)
    context = torch.full((len(index), 1), -1, dtype=torch.int32)
    batch = answers(possible).replace(
        behavior_logp=at_actions(logp[possible]),
        support=torch.cat([context, index], 1).flatten(),
        support_sets=SupportSets.from_support(support),
    )
    reference = FrozenModel(make_model(change=0.3), MANY)
    policy = make_model(change)
    drawn = SampledAnswers(policy, allowed, possible, batch, logp[possible].sum(1).exp(), reference)
    with torch.no_grad():
        old_logp = at_actions(drawn.drawn(drawn.distribution(policy)))
    recorded = batch.replace(old_logp=old_logp, ref_logp=reference.logp(batch))
    return SampledAnswers(policy, allowed, possible, recorded, drawn.probability, reference)
