"""The estimators of turns restated in numpy, one rollout and one turn at a time; and what turns were shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from etude.records import Turn
from tests.conformance.restated_advantages import EPSILON, grpo_of, level, to_go
from tests.conformance.twin import Array, Try, flat


def earned(t: Try) -> Array:
    """[turns]: what each turn was paid, the rollout's own reward in the last."""
    return np.array([t.rewards[turn].sum() for turn in t.turns])


def paid(t: Try) -> Array:
    """[turns]: what each turn was paid, the rollout's own reward aside."""
    return np.array([t.paid[turn].sum() for turn in t.turns])


def over_tokens(of: Sequence[Try], found: Sequence[Array]) -> Array:
    """One number a turn, given to each of its tokens."""
    return flat([np.repeat(a, [turn.stop - turn.start for turn in t.turns]) for t, a in zip(of, found, strict=True)])


def others(of: Sequence[Try], u: int) -> list[int]:
    return [o for o, t in enumerate(of) if t.group == of[u].group and o != u]


def step_rewards(of: Sequence[Try], how: str, gamma: float) -> list[Array]:
    """x_k: discounted rewards to go over turns, or each turn's own with the final reward given to all of them."""
    if how == "final_to_all":
        return [paid(t) + t.reward for t in of]
    return [to_go(earned(t), gamma) for t in of]


def less_the_others(of: Sequence[Try], values: Sequence[Array]) -> list[Array]:
    """x_k less the mean of the others' x_k, where a turn that never came counts 0; a rollout that never acted counts at
    turn 0 with all it earned."""

    def at(o: int, k: int) -> float:
        if not len(values[o]):
            return of[o].total if k == 0 else 0.0
        return float(values[o][k]) if len(values[o]) > k else 0.0

    return [
        np.array(
            [x - (np.mean([at(o, k) for o in others(of, u)]) if others(of, u) else 0.0) for k, x in enumerate(own)]
        )
        for u, own in enumerate(values)
    ]


def turn_baseline(of: Sequence[Try]) -> Array:
    return over_tokens(of, less_the_others(of, step_rewards(of, "to_go", 1.0)))


def turn_baseline_biased(of: Sequence[Try]) -> Array:
    """Σ_{j=k}^{own stop} (r_j − b_j), b_j the mean reward of turn j in the group, among those that had one."""
    turns = [earned(t) for t in of]
    found = []
    for u, own in enumerate(turns):
        group = [turns[o] for o in [u, *others(of, u)]]
        found.append(
            to_go(np.array([r - np.mean([g[j] for g in group if len(g) > j]) for j, r in enumerate(own)]), 1.0)
        )
    return over_tokens(of, found)


def normal(values: Array, divide: bool) -> Array:
    """Less the mean, by the standard deviation on request; 0 for a value that has no company."""
    if len(values) == 1 or level(values):
        return 0 * values
    found: Array = (values - values.mean()) / (values.std(ddof=1) + EPSILON if divide else 1)
    return found


def among(of: Sequence[Try], values: Sequence[Array], key: Callable[[int, int], object], divide: bool) -> list[Array]:
    """Each turn's value compared with those of the turns that have the same key; a key of None is left out."""
    found = [0 * v for v in values]
    cells: dict[object, list[tuple[int, int]]] = {}
    for u, own in enumerate(values):
        for k in range(len(own)):
            if key(u, k) is not None:
                cells.setdefault(key(u, k), []).append((u, k))
    for members in cells.values():
        compared = normal(np.array([values[u][k] for u, k in members]), divide)
        for (u, k), value in zip(members, compared, strict=True):
            found[u][k] = value
    return found


def mt_grpo(of: Sequence[Try], weight: float) -> Array:
    """The outcome (own reward and what the last turn was paid) as in grpo, plus λ times each earlier turn's own."""
    rewards = [paid(t) for t in of]
    outcome = grpo_of(of, [t.reward + (r[-1] if len(r) else 0.0) for t, r in zip(of, rewards, strict=True)])

    def stage(u: int, k: int) -> object:
        return (of[u].group, k) if k < len(rewards[u]) - 1 else None

    own = among(of, rewards, stage, divide=True)
    return over_tokens(of, [outcome[u] + weight * own[u] for u in range(len(of))])


def gigpo(of: Sequence[Try], weight: float, gamma: float, divide: bool) -> Array:
    """R against the group, plus ω times the discounted rewards to go against the group's turns of the same anchor."""
    going = [to_go(earned(t), gamma) for t in of]
    anchors = [[t["anchor"][turn.start] for turn in t.turns] for t in of]
    step = among(of, going, lambda u, k: (of[u].group, anchors[u][k]), divide)
    found = []
    for u, t in enumerate(of):
        group = [u, *others(of, u)]
        totals = np.array([of[o].total for o in group])
        found.append((t.total if len(group) == 1 else normal(totals, divide)[0]) + weight * step[u])
    return over_tokens(of, found)


def seen_plainly(turns: Sequence[Turn]) -> list[tuple[tuple[int, ...], int]]:
    """Every token that the environment showed, after the tokens it follows, one place of one prompt at a time."""
    found = []
    shown = set[tuple[str, tuple[int, ...]]]()
    known: list[tuple[str, tuple[int, ...], bool]] = []  # model, ids, and whether an answer stands in them
    for t in turns:
        prompt, said = tuple(t.prompt.tolist()), tuple(t.completion.ids.tolist())
        begun = [(ids, acted) for model, ids, acted in known if model == t.model and prompt[: len(ids)] == ids]
        before, answered = max(begun, key=lambda each: len(each[0]), default=((), False))
        end = len(prompt) - t.opened
        begin = len(before)
        if t.observed is not None:
            answered, begin = t.observed > 0, max(begin, end - t.observed)
        for place in range(begin, end) if answered else ():
            if (t.model, prompt[: place + 1]) not in shown:
                found.append((prompt[:place], prompt[place]))
        shown |= {(t.model, prompt[: place + 1]) for place in range(len(prompt))}
        known += [(t.model, prompt, answered), (t.model, prompt + said, answered or bool(said))]
    return found
