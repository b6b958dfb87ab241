"""The enumerated MDP is as its docstring says, and its exact values equal those counted by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from etude.demo.tabular.enumerated_mdp import PARTS, TOKENS, WANTED, EnumeratedEpisode, EnumeratedMDP, all_answers

WORLD = EnumeratedMDP()


def random_logp(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(WORLD.states, len(TOKENS), dtype=torch.float64, generator=generator).log_softmax(-1)


def test_fifteen_answers_exist_and_each_ends_once() -> None:
    answers = all_answers()
    assert len(answers) == len(set(answers)) == 15
    for answer in answers:
        assert "." not in answer[:-1]
        assert answer.endswith(".") or len(answer) == 3


def test_the_tools_answer_stands_between_the_turns_of_an_episode() -> None:
    episode = EnumeratedEpisode(0, "ab.")
    assert episode.ids == (0, 0, 0, 1, 2)  # prompt, a, the tool answers right, b, stop
    assert episode.action == [False, True, False, True, True]
    assert EnumeratedEpisode(0, "ba.").ids[2] == 1  # the tool answers wrong
    assert EnumeratedEpisode(1, ".").ids == (1, 2)  # the stop ends it before the tool can answer


def test_only_the_wanted_answer_earns_the_full_reward() -> None:
    for prompt, wanted in enumerate(WANTED):
        earned = {answer: sum(EnumeratedEpisode(prompt, answer).parts.values()) for answer in all_answers()}
        assert earned[wanted] == sum(PARTS.values()) == 1.0
        assert max(value for answer, value in earned.items() if answer != wanted) < 1.0
    assert WORLD.optimum == 1.0


def test_the_rewards_of_the_library_are_those_of_the_episodes() -> None:
    library = WORLD.all_episodes
    paid = torch.zeros(library.num_rollouts, dtype=torch.float64)
    paid.index_add_(
        0, torch.repeat_interleave(library.unit, torch.diff(library.offsets)), library.require("token_reward")
    )
    assert torch.equal(paid + library.require("reward"), WORLD.rewards)
    assert torch.equal(library.require("metric"), WORLD.rewards)


def test_the_probabilities_of_the_answers_to_a_prompt_sum_to_one() -> None:
    chances = WORLD.episode_probabilities(random_logp())
    for prompt in range(len(WANTED)):
        assert float(chances[WORLD.prompt == prompt].sum()) == pytest.approx(1, abs=1e-12)


def test_given_tokens_lead_to_their_episode() -> None:
    for e, episode in enumerate(WORLD.episodes):
        letters = iter([TOKENS.index(letter) for letter in episode.answer + "." * 2])

        def choose(state: Tensor, letters: Iterator[int] = letters) -> Tensor:
            return torch.tensor([next(letters)])

        episodes = WORLD.run_episodes(torch.tensor([episode.prompt]), choose)
        assert int(episodes) == e


def test_sampled_episodes_have_their_probabilities() -> None:
    logp, generator = random_logp(1), torch.Generator().manual_seed(0)
    chances, n = logp.exp(), 20_000
    prompts = torch.arange(n) % len(WANTED)
    episodes = WORLD.run_episodes(prompts, lambda s: torch.multinomial(chances[s], 1, generator=generator)[:, 0])
    share = torch.bincount(episodes, minlength=len(WORLD.episodes)) / n
    assert torch.allclose(share.double(), WORLD.episode_probabilities(logp) / len(WANTED), atol=0.01)


def test_values_are_expected_remaining_rewards() -> None:
    """The recursion is V(s) = Σ π(token)(reward + V(next)), which the sum over episodes does not use."""
    logp = random_logp(2)
    values = WORLD.values(logp)
    for prompt, answer in itertools.product(range(len(WANTED)), ("", "a", "b", "aa", "ab", "ba", "bb")):
        state = int(WORLD.start[prompt])
        for letter in answer:
            state = int(WORLD.next[state, TOKENS.index(letter)])
        expected = 0.0
        for token in range(len(TOKENS)):
            end = int(WORLD.end[state, token])
            opening = PARTS["opening"] if not answer and TOKENS[token] == WANTED[prompt][0] else 0.0
            earned = sum(PARTS.values()) if end >= 0 and WORLD.episodes[end].answer == WANTED[prompt] else None
            if end >= 0:
                parts = WORLD.episodes[end].parts
                earned = sum(parts.values()) - (parts["opening"] if answer else 0.0)
                expected += float(logp[state, token].exp()) * earned
            else:
                expected += float(logp[state, token].exp()) * (opening + float(values[WORLD.next[state, token]]))
        assert float(values[state]) == pytest.approx(expected, abs=1e-12)
    assert WORLD.expected_reward(logp) == pytest.approx(float(values[WORLD.start].mean()), abs=1e-12)


def test_the_best_continuation_leads_to_the_wanted_answer() -> None:
    greedy = WORLD.run_episodes(torch.arange(len(WANTED)), lambda state: WORLD.best_return[state].argmax(-1))
    assert [WORLD.episodes[e].answer for e in greedy.tolist()] == list(WANTED)
