"""A world small enough to know everything about it: two prompts, three tokens, answers of at most three.

    prompt │ y₁ │ tool │ y₂ y₃          tokens: a, b and the stop `.`
     ctx     turn 0  ctx    turn 1

After a first letter that is not the stop, a tool says `a` (that was right) or `b` (it was not). Each prompt wants one
answer. Its reward has three named parts: `opening` (paid at once, with the first token), `middle` and `answer`.
There are 15 answers to each prompt, so every expectation is a sum over 30 episodes, and no claim rests on sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise, product

import torch
from torch import Tensor

from etude.algorithms import Segments
from etude.batch import Batch, Column, ColumnKind

__all__ = ["PARTS", "TOKENS", "WANTED", "EnumeratedEpisode", "EnumeratedMDP", "all_answers"]

TOKENS = "ab."
STOP = TOKENS.index(".")
HORIZON = 3
WANTED = ("ab.", "b.")
"""The answer that each prompt wants."""
PARTS = {"opening": 0.25, "middle": 0.25, "answer": 0.5}
"""What an answer earns: its first token is right; its first two are; it is the one wanted."""
TEACHER_TEMPERATURE = 0.2
"""How much better an answer must be for the teacher to prefer it e-fold."""


@dataclass(frozen=True)
class EnumeratedEpisode:
    """One answer to one prompt, as the tokens that a policy would see."""

    prompt: int
    answer: str
    ids: tuple[int, ...] = field(init=False)
    """Prompt, answer, and what the tool said in between."""

    def __post_init__(self) -> None:
        first, rest = TOKENS.index(self.answer[0]), [TOKENS.index(letter) for letter in self.answer[1:]]
        reply = [] if first == STOP else [0 if self.answer[0] == WANTED[self.prompt][0] else 1]
        object.__setattr__(self, "ids", (self.prompt, first, *reply, *rest))

    @property
    def action(self) -> list[bool]:
        """Which tokens the policy chose."""
        return [index not in (0, 2) for index in range(len(self.ids))]

    @property
    def parts(self) -> dict[str, float]:
        """What it earns, by name."""
        wanted = WANTED[self.prompt]
        matches = {
            "opening": self.answer[0] == wanted[0],
            "middle": self.answer[:2] == wanted[:2],
            "answer": self.answer == wanted,
        }
        return {name: PARTS[name] * matches[name] for name in PARTS}


def all_answers() -> list[str]:
    """Every answer: letters up to the stop, or cut off at the horizon."""
    letters = TOKENS[:STOP]
    stopped = ["".join(word) + "." for length in range(HORIZON) for word in product(letters, repeat=length)]
    return stopped + ["".join(word) for word in product(letters, repeat=HORIZON)]


class EnumeratedMDP:
    """The episodes, the states they pass, and what is known of both.

    A state is what stands before a token: a prefix. E episodes, N states, three tokens.
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
        self.next, self.end = (
            self._transitions()
        )  # [N, 3] the state that follows; [N, 3] the episode that ends there, or -1
        self.action_segments = Segments(torch.tensor([sum(episode.action) for episode in self.episodes]))
        self.visits, self.reward_to_go = (
            self._rewards_to_go()
        )  # [N, E] whether an episode passes a state; what it earns from there
        self.best_return = self._best()  # [N, 3] the most that can still be earned in all, by choosing this token here

    @property
    def states(self) -> int:
        """N: how many rows a table needs."""
        return len(self.state_index)

    @property
    def optimum(self) -> float:
        """The most that any policy can expect."""
        return sum(float(self.rewards[self.prompt == p].max()) for p in range(len(WANTED))) / len(WANTED)

    def run_episodes(self, prompts: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """prompts [n] → episodes [n]: answer token by token; `choose` takes states [n] and gives tokens [n]."""
        state, episode = self.start[prompts], torch.full_like(prompts, -1)
        for _ in range(HORIZON):
            token = choose(state)
            episode = torch.where(episode < 0, self.end[state, token], episode)
            state = self.next[state, token]
        return episode

    def episode_probabilities(self, logp: Tensor) -> Tensor:
        """logp [N, 3] → [E]: the probability of each episode given its prompt, with its gradient."""
        chosen = logp[self.state, self.all_episodes.ids.long()]
        return self.action_segments.sum(chosen[self.all_episodes.action]).exp()

    def expected_reward(self, logp: Tensor) -> float:
        """J: the exact expected reward, prompts being equally likely."""
        return float((self.episode_probabilities(logp) * self.rewards).sum()) / len(WANTED)

    def values(self, logp: Tensor) -> Tensor:
        """logp [N, 3] → [N]: V^π, the exact reward still to come at each state where the policy chooses."""
        weights = self.episode_probabilities(logp) * self.visits
        return (weights * self.reward_to_go).sum(1) / weights.sum(1).clamp(min=1e-300)

    def _all_episodes(self) -> Batch:
        """Every episode once, as a batch: a sampled batch is picked from it."""
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

    def _rewards_to_go(self) -> tuple[Tensor, Tensor]:
        passes, to_come = torch.zeros(2, self.states, len(self.episodes), dtype=torch.float64)
        for e, episode in enumerate(self.episodes):
            for t in range(1, len(episode.ids)):
                state = self.state_index[episode.ids[:t]]
                passes[state, e] = 1
                to_come[state, e] = sum(episode.parts.values()) - (episode.parts["opening"] if t > 1 else 0.0)
        return passes, to_come

    def _best(self) -> Tensor:
        best = torch.zeros(self.states, len(TOKENS), dtype=torch.float64)
        for episode, reward in zip(self.episodes, self.rewards.tolist(), strict=True):
            for t, token in enumerate(episode.ids):
                key = self.state_index[episode.ids[:t]], token
                best[key] = max(float(best[key]), reward)
        return best
