"""Turns join into rows by their ids alone, and no action token is lost or counted twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.batch import Batch
from etude.data.samples import build_samples, count_joined_rows, find_observation_starts, find_parents
from etude.errors import BatchError
from etude.images import ImageSpan
from etude.records import Completion, Rollout, Turn
from etude.token_routes import TokenRoutes
from tests.conformance.restated_turns import observed_tokens


def turn(
    index: int,
    prompt: Sequence[int],
    answer: Sequence[int],
    reward: float | None = None,
    model: str = "policy",
    anchor: int | None = None,
) -> Turn:
    """Return a turn with different log-probs and versions for its tokens."""
    ids = np.array(answer, dtype=np.int32)
    completion = Completion(ids, -0.01 * ids - index, ids % 3 + index, "stop")
    return Turn(np.array(prompt, dtype=np.int32), completion, index, model=model, reward=reward, anchor=anchor)


def test_a_continued_conversation_is_one_row() -> None:
    (row,) = build_samples([turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 3, 4, 5], [6])], 11)
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.action.tolist() == [False, False, True, True, False, True]
    assert row.turn.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.version[row.action].tolist() == [0, 1, 1]
    assert np.allclose(row.logp[row.action], [-0.03, -0.04, -1.06])
    assert np.isnan(row.logp[~row.action]).all()
    assert (row.rollout, row.model, row.reward) == (11, "policy", None)


def test_a_rewritten_history_begins_a_row() -> None:
    rows = build_samples([turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 4, 5], [6]), turn(2, [1, 2, 4, 5, 6], [7])], 0)
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2, 4, 5, 6, 7]]
    assert rows[1].turn.tolist() == [-1, -1, -1, -1, 1, 2]


def test_a_shorter_prompt_begins_a_row() -> None:
    assert len(build_samples([turn(0, [1, 2], [3]), turn(1, [1, 2], [3])], 0)) == 2


def test_another_models_turn_begins_a_row() -> None:
    rows = build_samples([turn(0, [1], [2]), turn(1, [1, 2], [3], model="judge"), turn(2, [1, 2, 3], [4])], 0)
    assert [row.model for row in rows] == ["policy", "judge", "policy"]


PAD = 9
CAT, DOG = "c" * 64, "d" * 64


def shown(index: int, prompt: Sequence[int], answer: Sequence[int], *spans: ImageSpan) -> Turn:
    """Return a turn whose prompt has images."""
    return replace(turn(index, prompt, answer), images=spans)


def test_a_row_has_the_images_of_its_prompt() -> None:
    cat = ImageSpan(CAT, 1, 3)
    dog = ImageSpan(DOG, 6, 8, first=2)
    first = shown(0, [1, PAD, PAD], [PAD, 5], cat)  # the policy may sample the image token
    rows = build_samples([first, shown(1, [1, PAD, PAD, PAD, 5, 2, PAD, PAD], [4], cat, dog)], 0)
    assert [row.images for row in rows] == [(cat, dog)]
    assert rows[0].ids.tolist() == [1, PAD, PAD, PAD, 5, 2, PAD, PAD, 4]
    assert find_observation_starts([first, shown(1, [1, PAD, PAD, PAD, 5, 2, PAD, PAD], [4], cat, dog)]) == [3, 5]


def test_equal_ids_with_other_images_are_not_joined() -> None:
    turns = [shown(0, [1, PAD, 2], [3], ImageSpan(CAT, 1, 2)), shown(1, [1, PAD, 2, 3, 4], [5], ImageSpan(DOG, 1, 2))]
    assert [row.images for row in build_samples(turns, 0)] == [turns[0].images, turns[1].images]
    assert find_parents(turns) == [None, None] and count_joined_rows(turns) == (2, 0)
    assert find_observation_starts(turns) == [3, 5]
    text = [replace(each, images=()) for each in turns]
    assert len(build_samples(text, 0)) == 1 and find_parents(text) == [None, 0] and count_joined_rows(text) == (1, 4)
    assert find_observation_starts(text) == [3, 4]


def test_another_part_of_the_same_image_is_not_joined() -> None:
    turns = [
        shown(0, [1, PAD], [3], ImageSpan(CAT, 1, 2, first=4)),
        shown(1, [1, PAD, 3, 4], [5], ImageSpan(CAT, 1, 2, first=5)),
    ]
    assert len(build_samples(turns, 0)) == 2


def test_a_turns_reward_stands_at_its_last_action_token() -> None:
    (row,) = build_samples([turn(0, [1], [2, 3], reward=0.5), turn(1, [1, 2, 3, 4], [5], reward=0.0)], 0)
    assert row.reward is not None and row.reward.tolist() == [0, 0, 0.5, 0, 0]


def test_the_reward_of_an_empty_turn_is_at_the_action_before() -> None:
    rows = build_samples([turn(0, [1], [2, 3], reward=0.5), turn(1, [9], [], reward=0.25)], 0)
    assert rows[0].reward is not None and rows[0].reward.tolist() == [0, 0, 0.75]
    assert rows[1].ids.tolist() == [9] and rows[1].reward is None and not rows[1].action.any()


def test_a_reward_without_an_action_is_dropped() -> None:
    (row,) = build_samples([turn(0, [1, 2], [], reward=1.0)], 0)
    assert row.reward is None


def test_a_turns_state_is_read_at_each_of_its_tokens() -> None:
    (row,) = build_samples([turn(0, [1], [2, 3], anchor=-5), turn(1, [1, 2, 3, 4], [5], anchor=2**62)], 0)
    assert row.anchor is not None and row.anchor[row.action].tolist() == [-5, -5, 2**62]
    batch = Batch.from_records([row], [Rollout(0, 0, 0, 1.0)])
    assert batch.anchor is not None and batch.anchor[batch.action].tolist() == [-5, -5, 2**62]
    (plain,) = build_samples([turn(0, [1], [2])], 1)
    assert plain.anchor is None and Batch.from_records([plain], [Rollout(1, 0, 0, 1.0)]).anchor is None
    with pytest.raises(BatchError, match="Of 2 rows 1 have `anchor`, and row 1 has none"):
        Batch.from_records([row, plain], [Rollout(0, 0, 0, 1.0), Rollout(1, 0, 0, 1.0)])


def test_a_turn_continues_the_longest_conversation_that_its_prompt_begins_with() -> None:
    pairs = [([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 2, 3, 6], [7]), ([8], [9]), ([1, 2, 3, 4, 5], [6])]
    turns = [turn(index, *pair) for index, pair in enumerate(pairs)]
    assert find_parents(turns) == [None, 0, 0, None, 1]
    assert find_parents([turns[0], replace(turns[1], model="judge")]) == [None, None]


def routed(turn: Turn, start: int, expert: int) -> Turn:
    """Return a turn whose tokens went through this expert from `start` on, in one mixture."""
    computed = len(turn.prompt) + len(turn.completion.ids) - 1
    routes = TokenRoutes(np.full((computed - start, 1, 1), expert, np.uint8), start)
    return replace(turn, completion=replace(turn.completion, routes=routes))


def test_a_row_has_the_routes_of_the_turns_that_computed_its_tokens() -> None:
    """Each token has those of the first turn that computed it. The last token of an answer waits for the next turn."""
    first = routed(turn(0, [1, 2], [3, 4]), 0, 7)
    second = routed(turn(1, [1, 2, 3, 4, 5], [6]), 3, 8)
    (row,) = build_samples([first, second], 0)
    assert row.routes is not None and row.routes[:, 0].tolist() == [7, 7, 7, 8, 8, 255]
    whole = routed(turn(1, [1, 2, 3, 4, 5], [6]), 0, 8)
    (row,) = build_samples([first, whole], 0)
    assert row.routes is not None and row.routes[:, 0].tolist() == [7, 7, 7, 8, 8, 255]


def test_a_row_that_begins_anew_has_the_routes_of_the_turn_that_it_continues() -> None:
    """Two answers to one conversation are two rows. An answer without a record has none."""
    first = routed(turn(0, [1, 2], [3, 4]), 0, 7)
    others = [routed(turn(index, [1, 2, 3, 4, index], [9]), 3, index) for index in (5, 6)]
    _, last = build_samples([first, *others], 0)
    assert last.routes is not None and last.routes[:, 0].tolist() == [7, 7, 7, 6, 6, 255]
    (row,) = build_samples([first, turn(1, [1, 2, 3, 4, 5], [6])], 0)
    assert row.routes is not None and row.routes[:, 0].tolist() == [7, 7, 7, 255, 255, 255]


def test_routes_that_do_not_reach_the_end_of_an_answer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"are those of the tokens 0 to 2, .* have 3 tokens that were computed"):
        whole = turn(0, [1], [2, 3, 4])
        routes = TokenRoutes(np.zeros((2, 1, 1), np.uint8))
        replace(whole, completion=replace(whole.completion, routes=routes))


def test_no_turns_give_no_rows() -> None:
    assert build_samples([], 0) == []


# -- observations between answers -------------------------------------------------------------------------------------


def seen(turns: Sequence[Turn]) -> list[tuple[tuple[int, ...], int]]:
    """Return every token that a row marks as observed, after the tokens before it."""
    observed = []
    for row in build_samples(turns, 0):
        marked = [] if row.observation is None else np.flatnonzero(row.observation).tolist()
        assert not row.action[marked].any()
        observed += [(tuple(row.ids[:place].tolist()), int(row.ids[place])) for place in marked]
    return sorted(observed)


def test_text_added_to_the_answer_before_is_observed() -> None:
    (row,) = build_samples([turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 3, 4, 5, 6], [7])], 0)
    assert row.observation is not None and np.flatnonzero(row.observation).tolist() == [4, 5]
    (alone,) = build_samples([turn(0, [1, 2], [3, 4])], 0)
    assert alone.observation is None


def test_a_rewritten_history_has_the_observation_that_its_turn_records() -> None:
    """The thinking 3 was dropped from the answer [3, 4]; 5 and 6 were shown after it."""
    rewritten = replace(turn(1, [1, 2, 4, 5, 6], [7]), observed=2)
    rows = build_samples([turn(0, [1, 2], [3, 4]), rewritten], 0)
    assert rows[0].observation is None
    assert rows[1].observation is not None and np.flatnonzero(rows[1].observation).tolist() == [3, 4]
    assert seen([turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 4, 5, 6], [7])]) == [], "the ids alone do not tell"


def test_a_token_that_was_shown_before_is_not_observed_again() -> None:
    """Two answers to one prompt, and a prompt that continues another prompt without its answer."""
    first, again = turn(0, [1], [2]), turn(2, [1, 2, 5], [7])
    tokens = [((1, 2), 5)]
    assert seen([first, turn(1, [1, 2, 5], [6])]) == seen([first, turn(1, [1, 2, 5], [6]), again]) == tokens
    assert seen([first, turn(1, [1, 2, 5], [6]), turn(2, [1, 2, 5, 8], [7])]) == [*tokens, ((1, 2, 5), 8)]


@pytest.mark.parametrize("observed", [3, None])
def test_a_token_that_prompts_have_in_common_is_observed_once(observed: int | None) -> None:
    """Two calls after one answer, whose prompts differ in their last token alone."""
    prompts = [1, 2, 3, 10, 11, 50], [1, 2, 3, 10, 11, 60]
    turns = [
        turn(0, [1, 2], [3]),
        *(replace(turn(n + 1, ids, [4]), observed=observed) for n, ids in enumerate(prompts)),
    ]
    shared = [((1, 2, 3), 10), ((1, 2, 3, 10), 11)]
    assert seen(turns) == sorted([*shared, ((1, 2, 3, 10, 11), 50), ((1, 2, 3, 10, 11), 60)])


@pytest.mark.parametrize("observed", [2, None])
def test_the_prefix_of_an_answer_is_not_observed(observed: int | None) -> None:
    """8 and 9 were written for the model: it continues as if it had written them."""
    turns = [turn(0, [1, 2], [3]), replace(turn(1, [1, 2, 3, 5, 6, 8, 9], [7]), observed=observed, opened=2)]
    assert seen(turns) == [((1, 2, 3), 5), ((1, 2, 3, 5), 6)]
    assert seen([replace(turns[0], opened=1), replace(turns[1], observed=0)]) == []
    assert seen([*turns, turn(2, [1, 2, 3, 5, 6, 8, 9, 7, 4], [7])]) == [*seen(turns), ((1, 2, 3, 5, 6, 8, 9, 7), 4)]


def test_a_turn_records_no_more_observed_tokens_than_its_prompt_has() -> None:
    for opened, observed, message in (
        (3, None, "opened must be"),
        (-1, None, "opened must be"),
        (1, 2, "less the 1 that"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(turn(0, [1, 2], [3]), opened=opened, observed=observed)


def test_tokens_of_an_image_are_not_observed() -> None:
    """Their ids are placeholders, and to predict those teaches nothing about the image."""
    later = shown(1, [1, 5, 2, PAD, PAD, 3], [4], ImageSpan(CAT, 3, 5))
    assert seen([turn(0, [1], [5]), later]) == [((1, 5), 2), ((1, 5, 2, PAD, PAD), 3)]
    (row,) = build_samples([turn(0, [1], [5]), shown(1, [1, 5, PAD], [4], ImageSpan(CAT, 2, 3))], 0)
    assert row.observation is None


def test_an_answer_that_is_not_trained_is_not_observed() -> None:
    """It is the model's own, even in the context of an answer that is trained on."""
    turns = [turn(0, [1], [2]), turn(1, [1, 2, 5], [6]), turn(2, [1, 2, 5, 6, 8], [7])]
    tagged = [replace(one, tags=("solver",) if one.index != 1 else ()) for one in turns]
    (row,) = build_samples(tagged, 0, ("solver",))
    assert row.ids.tolist() == [1, 2, 5, 6, 8, 7]
    assert row.observation is not None and np.flatnonzero(row.observation).tolist() == [4]


ids = st.lists(st.integers(1, 2), max_size=4)


@st.composite
def attempts(draw: st.DrawFn) -> list[Turn]:
    """Draw turns that continue, repeat, shorten or rewrite earlier ones, over two ids so that repeats are likely."""
    turns: list[Turn] = []
    sofar: list[int] = []
    for index in range(draw(st.integers(1, 5))):
        prompt = sofar + draw(ids) if draw(st.booleans()) else draw(ids)
        answer = draw(ids)
        turns.append(turn(index, prompt, answer, reward=draw(st.none() | st.integers(-2, 2).map(float))))
        sofar = prompt + answer
    return turns


@given(attempts())
def test_every_action_token_stands_once_after_exactly_its_own_past(turns: list[Turn]) -> None:
    rows = build_samples(turns, 5)
    action_tokens = [(row, place) for row in rows for place in np.flatnonzero(row.action)]
    answer_tokens = [(turn_of_token, n) for turn_of_token in turns for n in range(len(turn_of_token.completion.ids))]
    assert len(action_tokens) == len(answer_tokens)
    for (row, place), (turn_of_token, n) in zip(action_tokens, answer_tokens, strict=True):
        past = [*turn_of_token.prompt, *turn_of_token.completion.ids[:n]]
        assert row.ids[:place].tolist() == past
        assert row.ids[place] == turn_of_token.completion.ids[n]
        assert row.logp[place] == turn_of_token.completion.logp[n]
        assert row.version[place] == turn_of_token.completion.version[n]
        assert row.turn[place] == turn_of_token.index


@given(attempts())
def test_observed_tokens_do_not_depend_on_the_division_into_rows(turns: list[Turn]) -> None:
    """Another model's turn between any two keeps each in a separate row."""
    separated = [
        inserted for original in turns for inserted in (original, turn(original.index, [9], [9], model="other"))
    ]
    assert seen(separated) == seen(turns)


@given(attempts(), st.data())
def test_no_token_is_observed_twice(turns: list[Turn], data: st.DataObject) -> None:
    """This holds for any part of its prompt that a turn marks as shown."""
    marked = []
    for original in turns:
        opened = data.draw(st.integers(0, len(original.prompt)))
        observed = data.draw(st.none() | st.integers(0, len(original.prompt) - opened))
        marked.append(replace(original, opened=opened, observed=observed))
    assert len(seen(marked)) == len(set(seen(marked)))
    assert seen(marked) == sorted(observed_tokens(marked))


@given(attempts())
def test_no_reward_is_lost_on_the_way_to_the_batch(turns: list[Turn]) -> None:
    batch = Batch.from_records(build_samples(turns, 5), [Rollout(5, 0, 0, 0.0)])
    acted = next((i for i, one in enumerate(turns) if len(one.completion.ids)), len(turns))
    assert batch.token_reward is not None
    assert float(batch.token_reward[batch.action].sum()) == sum(one.reward or 0.0 for one in turns[acted:])
