"""A problem small enough to be solved exactly: two prompts, three tokens, answers of at most three tokens.

    prompt │ y₁ │ tool │ y₂ y₃          tokens: a, b and the stop `.`
     ctx     turn 0  ctx    turn 1

After a first letter that is not the stop, a tool replies `a` (it was right) or `b` (it was wrong). Each prompt has one
right answer. The reward has three named parts: `opening` (given with the first token), `middle` and `answer`. Each
prompt has 15 possible answers, so every expectation is a sum over 30 episodes, without sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, product

import torch
from torch import Tensor

from etude.algorithms import Segments
from etude.batch import Batch, Column, ColumnKind

TOKENS = "ab."
STOP = TOKENS.index(".")
HORIZON = 3
WANTED = ("ab.", "b.")
"""The right answer of each prompt."""
PARTS = {"opening": 0.25, "middle": 0.25, "answer": 0.5}
"""The reward parts: for a right first token, two right first tokens, and a right answer."""
TEACHER_TEMPERATURE = 0.2
"""The reward difference by which the teacher prefers an answer e-fold."""


@dataclass(frozen=True)
class EnumeratedEpisode:
    """One answer to one prompt, as tokens."""

    prompt: int
    answer: str
    ids: tuple[int, ...] = field(init=False)
    """The tokens of the prompt, the answer, and the tool's reply inside it."""

    def __post_init__(self) -> None:
        first, rest = TOKENS.index(self.answer[0]), [TOKENS.index(letter) for letter in self.answer[1:]]
        reply = [] if first == STOP else [0 if self.answer[0] == WANTED[self.prompt][0] else 1]
        object.__setattr__(self, "ids", (self.prompt, first, *reply, *rest))

    @property
    def action(self) -> list[bool]:
        """The mask of the tokens that the policy chose."""
        return [index not in (0, 2) for index in range(len(self.ids))]

    @property
    def parts(self) -> dict[str, float]:
        """The reward parts by name."""
        wanted = WANTED[self.prompt]
        matches = {
            "opening": self.answer[0] == wanted[0],
            "middle": self.answer[:2] == wanted[:2],
            "answer": self.answer == wanted,
        }
        return {name: PARTS[name] * matches[name] for name in PARTS}


def all_answers() -> list[str]:
    """Return every answer: letters up to the stop, or truncated at the horizon."""
    letters = TOKENS[:STOP]
    stopped = ["".join(word) + "." for length in range(HORIZON) for word in product(letters, repeat=length)]
    return stopped + ["".join(word) for word in product(letters, repeat=HORIZON)]


class EnumeratedMDP:
    """The episodes and their states, with exact rewards and transitions.

    A state is the prefix before a token. E: episodes, N: states; there are three tokens.
    """

    def __init__(self) -> None:
        self.episodes = [EnumeratedEpisode(prompt, answer) for prompt in range(len(WANTED)) for answer in all_answers()]
        seen = sorted({episode.ids[:t] for episode in self.episodes for t in range(len(episode.ids))}, key=len)
        self.state_index = {prefix: n for n, prefix in enumerate(seen)}
        self.all_episodes = self._all_episodes()
        self.state = self.all_episodes.require("state")  # [T] the state before each token
        self.rewards = torch.tensor([sum(episode.parts.values()) for episode in self.episodes], dtype=torch.float64)
        self.prompt = torch.tensor([episode.prompt for episode in self.episodes])
        self.start = torch.tensor([self.state_index[(prompt,)] for prompt in range(len(WANTED))])  # [P]
        self.next, self.end = self._transitions()  # [N, 3] the next state; [N, 3] the episode that ends there, or -1
        self.action_segments = Segments(torch.tensor([sum(episode.action) for episode in self.episodes]))
        # [N, E] 1 if an episode passes a state; its reward from there on. [N, 3] the highest reward after a token
        self.visits, self.reward_to_go, self.best_return = self._returns()

    @property
    def states(self) -> int:
        """N: the number of rows of a table."""
        return len(self.state_index)

    @property
    def optimum(self) -> float:
        """The highest expected reward of any policy."""
        return sum(float(self.rewards[self.prompt == p].max()) for p in range(len(WANTED))) / len(WANTED)

    def run_episodes(self, prompts: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Answer prompts [n] token by token, and return the episodes [n]. `choose` maps states [n] to tokens [n]."""
        state, episode = self.start[prompts], torch.full_like(prompts, -1)
        for _ in range(HORIZON):
            token = choose(state)
            episode = torch.where(episode < 0, self.end[state, token], episode)
            state = self.next[state, token]
        return episode

    def episode_probabilities(self, logp: Tensor) -> Tensor:
        """Return [E], the probability of each episode given its prompt, from logp [N, 3], with its gradient."""
        chosen = logp[self.state, self.all_episodes.ids.long()]
        return self.action_segments.sum(chosen[self.all_episodes.action]).exp()

    def expected_reward(self, logp: Tensor) -> float:
        """Return J, the exact expected reward, with equally likely prompts."""
        return float((self.episode_probabilities(logp) * self.rewards).sum()) / len(WANTED)

    def values(self, logp: Tensor) -> Tensor:
        """Return V^π [N] from logp [N, 3]: the exact future reward at each state where the policy chooses."""
        weights = self.episode_probabilities(logp) * self.visits
        return (weights * self.reward_to_go).sum(1) / weights.sum(1).clamp(min=1e-300)

    def _all_episodes(self) -> Batch:
        """Return a batch with every episode once; sampled batches select from it."""
        episodes = self.episodes
        lengths = torch.tensor([0, *(len(episode.ids) for episode in episodes)])
        action = torch.tensor([chosen for episode in episodes for chosen in episode.action])
        position = torch.tensor([t for episode in episodes for t in range(len(episode.ids))])
        states = [self.state_index[episode.ids[:t]] for episode in episodes for t in range(len(episode.ids))]
        paid = [episode.parts["opening"] if t == 1 else 0.0 for episode in episodes for t in range(len(episode.ids))]
        parts = torch.tensor([list(episode.parts.values()) for episode in episodes], dtype=torch.float64)
        return Batch(
            offsets=lengths.cumsum(0),
            unit=torch.arange(len(episodes)),
            group=torch.tensor([episode.prompt for episode in episodes]),
            part_names=tuple(PARTS),
            ids=torch.tensor([token for episode in episodes for token in episode.ids], dtype=torch.int32),
            action=action,
            observation=position == 2,
            turn=(position > 2).int(),
            token_reward=torch.tensor(paid, dtype=torch.float64),
            reward=parts[:, 1:].sum(1),
            metric=parts.sum(1),
            reward_parts=parts,
            truncated=torch.tensor([episode.answer[-1] != "." for episode in episodes]),
            role=torch.tensor([episode.prompt for episode in episodes]),
            anchor=torch.tensor(states),
            extra={"state": Column(ColumnKind.TOKEN, torch.tensor(states))},
        )

    def _transitions(self) -> tuple[Tensor, Tensor]:
        following = torch.zeros(self.states, len(TOKENS), dtype=torch.int64)
        end = torch.full((self.states, len(TOKENS)), -1)
        for e, episode in enumerate(self.episodes):
            action_positions = [t for t, chosen in enumerate(episode.action) if chosen]
            for t, later in pairwise(action_positions):
                following[self.state_index[episode.ids[:t]], episode.ids[t]] = self.state_index[episode.ids[:later]]
            end[self.state_index[episode.ids[: action_positions[-1]]], episode.ids[action_positions[-1]]] = e
        return following, end

    def _returns(self) -> tuple[Tensor, Tensor, Tensor]:
        passes, to_come = torch.zeros(2, self.states, len(self.episodes), dtype=torch.float64)
        best = torch.zeros(self.states, len(TOKENS), dtype=torch.float64)
        for e, (episode, reward) in enumerate(zip(self.episodes, self.rewards.tolist(), strict=True)):
            for t, token in enumerate(episode.ids):
                state = self.state_index[episode.ids[:t]]
                best[state, token] = max(float(best[state, token]), reward)
                if t > 0:
                    passes[state, e] = 1
                    to_come[state, e] = reward - (episode.parts["opening"] if t > 1 else 0.0)
        return passes, to_come, best
