"""The estimators of turns restated in numpy, one rollout and one turn at a time, and the observations of turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from etude.records import Turn
from tests.conformance.restated_advantages import EPSILON, all_equal, grpo_of, reward_to_go
from tests.conformance.twin import Array, NumpyRollout, flat


def turn_rewards(t: NumpyRollout) -> Array:
    """[turns]: return the rewards of each turn. The rollout's own reward counts in the last turn."""
    return np.array([t.rewards[turn].sum() for turn in t.turns])


def turn_token_rewards(t: NumpyRollout) -> Array:
    """[turns]: return the rewards of each turn, without the rollout's own reward."""
    return np.array([t.token_rewards[turn].sum() for turn in t.turns])


def to_tokens(rollouts: Sequence[NumpyRollout], result: Sequence[Array]) -> Array:
    """Give the number of each turn to each of its tokens."""
    return flat(
        [np.repeat(a, [turn.stop - turn.start for turn in t.turns]) for t, a in zip(rollouts, result, strict=True)]
    )


def other_members(rollouts: Sequence[NumpyRollout], u: int) -> list[int]:
    return [o for o, t in enumerate(rollouts) if t.group == rollouts[u].group and o != u]


def step_rewards(rollouts: Sequence[NumpyRollout], how: str, gamma: float) -> list[Array]:
    """Return x_k: discounted rewards to go over turns, or each turn's reward plus the rollout's own reward."""
    if how == "final_to_all":
        return [turn_token_rewards(t) + t.reward for t in rollouts]
    return [reward_to_go(turn_rewards(t), gamma) for t in rollouts]


def less_baseline(rollouts: Sequence[NumpyRollout], values: Sequence[Array]) -> list[Array]:
    """Return x_k less the mean x_k of the group's other rollouts.

    A missing turn counts as 0. A rollout without actions counts at turn 0 with its total reward.
    """

    def at(o: int, k: int) -> float:
        if not len(values[o]):
            return rollouts[o].total if k == 0 else 0.0
        return float(values[o][k]) if len(values[o]) > k else 0.0

    return [
        np.array(
            [
                x - (np.mean([at(o, k) for o in other_members(rollouts, u)]) if other_members(rollouts, u) else 0.0)
                for k, x in enumerate(values_of_turns)
            ]
        )
        for u, values_of_turns in enumerate(values)
    ]


def turn_baseline(rollouts: Sequence[NumpyRollout]) -> Array:
    return to_tokens(rollouts, less_baseline(rollouts, step_rewards(rollouts, "to_go", 1.0)))


def turn_baseline_biased(rollouts: Sequence[NumpyRollout]) -> Array:
    """Return Σ_{j≥k} (r_j − b_j). b_j is the mean reward of turn j, over the group's rollouts that have turn j."""
    turns = [turn_rewards(t) for t in rollouts]
    result = []
    for u, values_of_turns in enumerate(turns):
        group = [turns[o] for o in [u, *other_members(rollouts, u)]]
        result.append(
            reward_to_go(
                np.array([r - np.mean([g[j] for g in group if len(g) > j]) for j, r in enumerate(values_of_turns)]), 1.0
            )
        )
    return to_tokens(rollouts, result)


def normalize(values: Array, divide: bool) -> Array:
    """Subtract the mean, and divide by the standard deviation on request. A single value becomes 0."""
    if len(values) == 1 or all_equal(values):
        return 0 * values
    result: Array = (values - values.mean()) / (values.std(ddof=1) + EPSILON if divide else 1)
    return result


def compare_equal_keys(
    rollouts: Sequence[NumpyRollout], values: Sequence[Array], key: Callable[[int, int], object], divide: bool
) -> list[Array]:
    """Compare each turn's value with those of the turns with the same key. A key of None is left out."""
    result = [0 * v for v in values]
    members_of_key: dict[object, list[tuple[int, int]]] = {}
    for u, values_of_turns in enumerate(values):
        for k in range(len(values_of_turns)):
            if key(u, k) is not None:
                members_of_key.setdefault(key(u, k), []).append((u, k))
    for members in members_of_key.values():
        compared = normalize(np.array([values[u][k] for u, k in members]), divide)
        for (u, k), value in zip(members, compared, strict=True):
            result[u][k] = value
    return result


def mt_grpo(rollouts: Sequence[NumpyRollout], weight: float) -> Array:
    """Return GRPO of the outcome (own reward plus that of the last turn), plus λ times that of each earlier turn."""
    rewards = [turn_token_rewards(t) for t in rollouts]
    outcome = grpo_of(rollouts, [t.reward + (r[-1] if len(r) else 0.0) for t, r in zip(rollouts, rewards, strict=True)])

    def turn_key(u: int, k: int) -> object:
        return (rollouts[u].group, k) if k < len(rewards[u]) - 1 else None

    values_of_turns = compare_equal_keys(rollouts, rewards, turn_key, divide=True)
    return to_tokens(rollouts, [outcome[u] + weight * values_of_turns[u] for u in range(len(rollouts))])


def gigpo(rollouts: Sequence[NumpyRollout], weight: float, gamma: float, divide: bool) -> Array:
    """Return R compared within the group, plus ω times the rewards to go compared among turns with the same anchor."""
    rewards_to_go = [reward_to_go(turn_rewards(t), gamma) for t in rollouts]
    anchors = [[t["anchor"][turn.start] for turn in t.turns] for t in rollouts]
    compared_steps = compare_equal_keys(
        rollouts, rewards_to_go, lambda u, k: (rollouts[u].group, anchors[u][k]), divide
    )
    result = []
    for u, t in enumerate(rollouts):
        group = [u, *other_members(rollouts, u)]
        totals = np.array([rollouts[o].total for o in group])
        result.append((t.total if len(group) == 1 else normalize(totals, divide)[0]) + weight * compared_steps[u])
    return to_tokens(rollouts, result)


def observed_tokens(turns: Sequence[Turn]) -> list[tuple[tuple[int, ...], int]]:
    """Return every token that the environment showed, with the tokens before it, one position at a time."""
    result = []
    shown = set[tuple[str, tuple[int, ...]]]()
    known: list[tuple[str, tuple[int, ...], bool]] = []  # model, ids, and True if they contain an answer
    for t in turns:
        prompt, answer_ids = tuple(t.prompt.tolist()), tuple(t.completion.ids.tolist())
        prefixes = [(ids, acted) for model, ids, acted in known if model == t.model and prompt[: len(ids)] == ids]
        before, answered = max(prefixes, key=lambda each: len(each[0]), default=((), False))
        end = len(prompt) - t.opened
        begin = len(before)
        if t.observed is not None:
            answered, begin = t.observed > 0, max(begin, end - t.observed)
        for position in range(begin, end) if answered else ():
            if (t.model, prompt[: position + 1]) not in shown:
                result.append((prompt[:position], prompt[position]))
        shown |= {(t.model, prompt[: position + 1]) for position in range(len(prompt))}
        known += [(t.model, prompt, answered), (t.model, prompt + answer_ids, answered or bool(answer_ids))]
    return result
