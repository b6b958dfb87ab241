"""The laboratory of mismatch: its steps are those of the product, and its page is up to date."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from etude.algorithms import AlgorithmState, Denominators, Outputs, View
from etude.algorithms.logits import topk_logp_with_tail
from etude.batch import Batch, Column, ColumnKind
from tests.conformance import laboratory_page as written
from tests.conformance.laboratory import (
    DRIFT_STEP,
    SAMPLERS,
    STATES,
    TOKENS,
    TREATMENTS,
    Array,
    Toy,
    Treatment,
    gradient,
    run,
    softmax,
)

ACTIONS = torch.tensor([False, True, False, True])
"""The tokens of an answer: a prompt, the first token, luck, and the second."""


def every_answer(toy: Toy, q: Array) -> tuple[Batch, Tensor]:
    """Return all answers that the sampler can draw as one group, and the probability of each."""
    first, luck, second = (torch.from_numpy(each.ravel()) for each in np.indices((TOKENS, 2, TOKENS)))
    state = 1 + 2 * first + luck
    table = torch.from_numpy(q)
    probability = table[0, first] * table[state, second] / 2
    possible = probability > 0
    ids = torch.stack([torch.zeros_like(first), first, luck, second], 1)[possible]
    states = torch.stack([torch.zeros_like(first), torch.zeros_like(first), state, state], 1)[possible]
    count = len(ids)
    batch = Batch(
        offsets=4 * torch.arange(count + 1),
        unit=torch.arange(count),
        group=torch.zeros(count, dtype=torch.int64),
        ids=ids.flatten().int(),
        action=ACTIONS.repeat(count),
        reward=torch.from_numpy(toy.returns()[0].ravel())[possible],
        extra={"state": Column(ColumnKind.TOKEN, states.flatten())},
    )
    return batch, probability[possible]


def product_gradient(treatment: Treatment, toy: Toy, p: Array, q: Array) -> Tensor:
    """[17, 8]: return minus the gradient of the product's own loss, in expectation over all answers."""
    algorithm = treatment.algorithm
    batch, probability = every_answer(toy, q)
    state = batch.extra["state"].tensor
    ids = batch.ids.long() % TOKENS
    sampler = torch.from_numpy(q).log()
    policy = torch.from_numpy(p).log().requires_grad_()
    k = treatment.recorded or 1
    likeliest = torch.from_numpy(np.argsort(-q, -1, kind="stable")[:, :k].copy())
    batch = batch.replace(
        behavior_logp=sampler[state, ids],
        old_logp=policy.detach()[state, ids],
        alternative_ids=likeliest[state],
        alternative_logp=sampler.gather(1, likeliest)[state],
        old_alternative_logp=topk_logp_with_tail(policy.detach(), likeliest)[state],
    )
    estimated = algorithm.estimate(batch, AlgorithmState())
    reward = batch.require("reward")
    # the losses are proportional to the size of A, so an answer's probability can multiply it
    advantage = (reward - (probability * reward).sum()) * probability * len(reward)
    ready = estimated.batch.replace(advantage=advantage.repeat_interleave(len(ACTIONS)))
    logp = policy.log_softmax(1)
    outputs = Outputs(logp=logp[state, ids])
    if treatment.recorded:
        outputs = replace(outputs, alternative_logp=topk_logp_with_tail(policy, likeliest)[state])
    loss = algorithm.compute_loss(ready, outputs, Denominators.from_view(View(ready)), estimated.state).loss
    return -torch.autograd.grad(loss, policy)[0]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_step_is_that_of_the_product(sampler: str) -> None:
    toy = Toy.make(1)
    now = toy.logits[0]
    old = now + 0.3 * np.random.default_rng(7).standard_normal(now.shape)
    sharp = 3 * now if sampler.startswith("`min_p") else now  # so that it cuts some tokens off
    q = softmax(SAMPLERS[sampler](sharp, old, toy.errors[0]))
    for treatment in TREATMENTS:
        p = softmax(np.where(q > 0, sharp, -np.inf)) if treatment.over_sets else softmax(sharp)
        above, below = toy.advantages(q[None])
        step = toy.visits(q)[:, None] * gradient(treatment, p, q, above[0], below[0])
        expected = product_gradient(treatment, toy, p, q)
        assert np.abs(step).max() > 1e-3
        np.testing.assert_allclose(step, expected.numpy(), rtol=0, atol=1e-13, err_msg=treatment.name)


def test_advantages_have_no_mean_at_the_first_token_and_one_behind_luck() -> None:
    toy = Toy.make(1)
    q = softmax(toy.logits)
    above, below = toy.advantages(q)
    mean = (q * (above + below)).sum(-1)[0]
    assert mean.shape == (STATES,)
    assert abs(mean[0]) < 1e-15
    assert (mean[1::2] < -0.5).all() and (mean[2::2] > 0.5).all()


def test_the_drift_on_the_page_is_up_to_date() -> None:
    toy = Toy.make()
    table = written.drift_table({treatment: run(treatment, toy, DRIFT_STEP) for treatment in TREATMENTS})
    message = "mismatch.md is stale: run `python -m tests.conformance.laboratory_page`"
    assert table in written.PAGE.read_text(encoding="utf-8"), message


def text_and_numbers(page: str) -> tuple[str, list[float]]:
    """Return a page without its decimal numbers, and these."""
    number = r"\d+\.\d+"
    return re.sub(number, "", page), [float(found) for found in re.findall(number, page)]


@pytest.mark.slow
def test_the_whole_page_is_up_to_date() -> None:
    """Over 3,000 steps the last digits of another processor may grow, above all where logits are rounded."""
    toy = Toy.make()
    outcomes = {treatment: run(treatment, toy) for treatment in TREATMENTS}
    text, numbers = text_and_numbers(written.PAGE.read_text(encoding="utf-8"))
    expected_text, expected_numbers = text_and_numbers(written.page(outcomes))
    assert text == expected_text
    assert numbers == pytest.approx(expected_numbers, abs=0.02)
    labels = [text_and_numbers(each)[0] for each in re.findall("<text.*", written.picture(outcomes))]
    drawn = [text_and_numbers(each)[0] for each in re.findall("<text.*", written.PICTURE.read_text(encoding="utf-8"))]
    assert labels == drawn
