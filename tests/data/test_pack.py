"""A pack's tree computes shared tokens once, and every token is predicted from exactly its own row's past."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.batch import Batch, ImageContent, Pack
from etude.data.pack import micro_batches, pack_prefix_tree
from etude.errors import BatchError
from tests.batches import batches, same
from tests.packs import attention_mask, separate_rows, unpack

Row = tuple[list[int], list[int]]  # its context, and the answer after it


def batch_of(groups: list[list[list[Row]]]) -> Batch:
    """Return a batch of groups of rollouts of rows."""
    rollouts = [(g, rollout) for g, group in enumerate(groups) for rollout in group]
    rows = [(u, row) for u, (_, rollout) in enumerate(rollouts) for row in rollout]
    ids = [token for _, (context, rest) in rows for token in context + rest]
    action = [act for _, (context, rest) in rows for act in [False] * len(context) + [True] * len(rest)]
    return Batch(
        offsets=torch.tensor([0, *np.cumsum([len(c) + len(r) for _, (c, r) in rows]).tolist()], dtype=torch.int64),
        unit=torch.tensor([u for u, _ in rows], dtype=torch.int64),
        group=torch.tensor([g for g, _ in rollouts]),
        ids=torch.tensor(ids, dtype=torch.int32),
        action=torch.tensor(action, dtype=torch.bool),
        rollout_id=torch.arange(len(rollouts)) + 100,
    )


# Two ids and short contexts: equal rows, prefixes of one another, empty rows and empty completions are all common.
tokens = st.lists(st.integers(1, 2), max_size=4)
rows = st.tuples(tokens, tokens)
groups = st.lists(st.lists(rows, max_size=3), min_size=1, max_size=4)
trees = st.lists(groups, min_size=1, max_size=3).map(batch_of)


def check_paths(batch: Batch, pack: Pack) -> None:
    """Check that each token's predictor sees the tokens of its row before it, in order, and nothing else."""
    seen = attention_mask(pack)
    for row in range(batch.num_rows):
        start, end = batch.offsets[row : row + 2].tolist()
        for token in range(start, end):
            source = int(pack.source[token])
            assert (source < 0) == (token == start)
            if source >= 0:
                path = seen[source].nonzero()[:, 0]
                path = path[pack.positions[path].argsort()]
                assert pack.positions[path].tolist() == list(range(token - start))
                assert torch.equal(pack.ids[path], batch.ids[start:token])
                assert int(path[-1]) == source
        if end == start:
            assert int(pack.row_ends[row]) == -1
        else:
            path = seen[int(pack.row_ends[row])].nonzero()[:, 0]
            assert torch.equal(pack.ids[path[pack.positions[path].argsort()]], batch.ids[start:end])


def with_images(batch: Batch, seed: int) -> Batch:
    """Return the batch with one of two images at the first tokens of each context, if it has two tokens."""
    image = torch.full((batch.num_tokens,), -1, dtype=torch.int32)
    feature = image.clone()
    choices = np.random.default_rng(seed).integers(0, 2, batch.num_rows)
    for start, end, choice in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), choices, strict=True):
        if end - start >= 2 and not batch.action[start : start + 2].any():
            image[start : start + 2] = int(choice)
            feature[start : start + 2] = torch.arange(2)
    contents = (ImageContent("aa", b"a"), ImageContent("bb", b"b"))
    ids = torch.where(image < 0, batch.ids, 7)
    return batch.replace(ids=ids, image=image, feature=feature, images=contents)


@given(trees, st.integers(0, 9))
def test_rows_share_an_image_only_if_it_is_the_same(bare: Batch, seed: int) -> None:
    """Equal ids with another image are another context. Everything else is as without images."""
    batch = with_images(bare, seed)
    pack = pack_prefix_tree(batch)
    check_paths(batch, pack)
    assert pack.images is not None and batch.image is not None and batch.feature is not None
    packed = pack.places(batch.offsets)
    assert torch.equal(pack.images.image[packed], batch.image)
    assert torch.equal(pack.images.feature[packed], batch.feature)
    assert len(pack.ids) == trie_size(batch.replace(ids=torch.where(batch.image < 0, batch.ids, 50 + batch.image)))
    assert pack_prefix_tree(bare).images is None


def test_the_same_prompt_with_the_same_image_is_packed_once() -> None:
    batch = with_images(batch_of([[[([7, 7, 1], [2])], [([7, 7, 1], [3])]]]), 0)
    assert batch.image is not None
    other = batch.replace(image=torch.tensor([0, 0, -1, -1, 1, 1, -1, -1], dtype=torch.int32))
    alike = batch.replace(image=torch.where(batch.image < 0, -1, 1).int())
    assert [len(pack_prefix_tree(each).ids) for each in (other, alike)] == [8, 5]
    assert [len(micro_batches(each, 6)) for each in (other, alike)] == [2, 1]


def trie_size(batch: Batch) -> int:
    """Count packed tokens: the different prefixes of the contexts of a group, and the tokens that are not shared."""
    group = batch.group[batch.unit].tolist()
    prefixes: set[tuple[int, tuple[int, ...]]] = set()
    rest = 0
    for row in range(batch.num_rows):
        start, end = batch.offsets[row : row + 2].tolist()
        acts = batch.action[start:end].nonzero()[:, 0].tolist()
        context = batch.ids[start : start + acts[0] if acts else end].tolist()
        rest += end - start - len(context)
        prefixes |= {(group[row], tuple(context[: n + 1])) for n in range(len(context))}
    return len(prefixes) + rest


@given(trees)
def test_every_prediction_is_made_from_exactly_the_rows_past(batch: Batch) -> None:
    check_paths(batch, pack_prefix_tree(batch))


@given(batches)
def test_predictions_are_right_with_tool_output_and_many_turns_too(batch: Batch) -> None:
    pack = pack_prefix_tree(batch)
    check_paths(batch, pack)
    assert len(pack.ids) == trie_size(batch)


@given(trees)
def test_shared_tokens_are_packed_once(batch: Batch) -> None:
    pack = pack_prefix_tree(batch)
    assert len(pack.ids) == trie_size(batch)
    assert bool((pack.offsets[1:] > pack.offsets[:-1]).all())  # no segment is empty


@given(trees)
def test_unpacking_gives_each_token_the_one_before_it(batch: Batch) -> None:
    pack = pack_prefix_tree(batch)
    unpacked = unpack(pack, pack.ids.double())
    separate = separate_rows(batch)
    assert torch.equal(unpacked.nan_to_num(-1), unpack(separate, separate.ids.double()).nan_to_num(-1))


@given(trees)
def test_action_tokens_of_two_rows_never_share_a_position(batch: Batch) -> None:
    """A token's position is where the next one is predicted: gradients of two rows meet only in contexts."""
    pack = pack_prefix_tree(batch)
    inner = pack.source[1:][batch.action[:-1] & (pack.source[1:] >= 0)]
    assert len(inner.unique()) == len(inner)


def test_a_group_with_one_prompt_has_it_once() -> None:
    prompt = list(range(10, 15))
    pack = pack_prefix_tree(batch_of([[[(prompt, [1, 2])], [(prompt, [3])], [(prompt, [])]]]))
    assert pack.ids.tolist() == [*prompt, 1, 2, 3]
    assert pack.parent.tolist() == [-1, 0, 0]
    assert pack.offsets.tolist() == [0, 5, 7, 8]
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 5]
    assert pack.source.tolist() == [-1, 0, 1, 2, 3, 4, 5, -1, 0, 1, 2, 3, 4, -1, 0, 1, 2, 3]


def test_a_rewritten_history_shares_at_any_depth() -> None:
    pack = pack_prefix_tree(batch_of([[[([1, 2], [7]), ([1, 2, 3, 4], [8])], [([1, 2, 3, 5], [9])]]]))
    assert pack.ids.tolist() == [1, 2, 7, 3, 4, 8, 5, 9]
    assert pack.parent.tolist() == [-1, 0, 0, 2, 2]


@given(trees)
def test_segments_are_breadth_first(batch: Batch) -> None:
    parent = pack_prefix_tree(batch).parent
    assert bool((parent.diff() >= 0).all())
    roots = range(int((parent < 0).sum()))
    with_children = [bool((parent == root).any()) for root in roots]
    assert with_children == sorted(with_children, reverse=True)


def test_prompts_come_first_then_single_rows_then_completions() -> None:
    pack = pack_prefix_tree(batch_of([[[([9], [1])]], [[([5, 6], [7])], [([5, 6], [8, 8])]]]))
    assert pack.ids.tolist() == [5, 6, 9, 1, 7, 8, 8]
    assert pack.parent.tolist() == [-1, -1, 0, 0]
    assert pack.source.tolist() == [-1, 2, -1, 0, 1, -1, 0, 1, 5]
    assert pack.row_ends.tolist() == [3, 4, 6]


def test_different_groups_share_no_tokens() -> None:
    pack = pack_prefix_tree(batch_of([[[([1, 2], [3])]], [[([1, 2], [3])]]]))
    assert pack.ids.tolist() == [1, 2, 3, 1, 2, 3]
    assert pack.parent.tolist() == [-1, -1]


def test_a_batch_without_a_row_has_an_empty_pack() -> None:
    pack = pack_prefix_tree(batch_of([[[], []]]))
    assert len(pack.ids) == len(pack.parent) == len(pack.source) == 0


def test_a_thousand_nested_contexts_are_no_deep_recursion() -> None:
    pack = pack_prefix_tree(batch_of([[[([1] * n, [2]) for n in range(1, 1500)]]]))
    assert len(pack.ids) == 1499 + 1499


def names(batch: Batch) -> list[int]:
    """Return the rollouts of a batch, by their places in the batch they came from."""
    assert batch.rollout_id is not None
    return [int(name) - 100 for name in batch.rollout_id]


def heavy(batch: Batch, by: str) -> int:
    """Count the rollouts (or groups) of a batch that have a token."""
    has = batch.rollout_token_offsets[1:] > batch.rollout_token_offsets[:-1]
    return len(batch.group[has].unique()) if by == "group" else int(has.sum())


@given(trees, st.integers(1, 20), st.sampled_from(["rollout", "group"]))
def test_micro_batches_are_whole_units_within_the_budget(batch: Batch, budget: int, by: str) -> None:
    parts = micro_batches(batch, budget, by)
    assert sorted(name for part in parts for name in names(part)) == list(range(batch.num_rollouts))
    for part in parts:
        assert same(part, batch.select(names(part)))
        assert len(pack_prefix_tree(part).ids) <= budget or heavy(part, by) == 1
    if by == "group":
        assert sum(part.num_groups for part in parts) == batch.num_groups


@given(trees, st.integers(1, 40))
def test_a_group_within_the_budget_stays_together(batch: Batch, budget: int) -> None:
    parts = micro_batches(batch, budget, "rollout")
    for group in range(batch.num_groups):
        members = (batch.group == group).nonzero()[:, 0].tolist()
        if len(pack_prefix_tree(batch.select(members)).ids) <= budget:
            assert sum(not set(members).isdisjoint(names(part)) for part in parts) == 1


def test_sharing_counts_once_in_the_budget() -> None:
    prompt = list(range(10, 20))
    batch = batch_of([[[(prompt, [1, 2])] for _ in range(4)]])
    assert batch.num_tokens == 48
    assert len(micro_batches(batch, 18)) == 1
    halves = micro_batches(batch, 17)
    assert [part.num_rollouts for part in halves] == [3, 1]
    assert [len(pack_prefix_tree(part).ids) for part in halves] == [16, 12]
    assert [part.num_rollouts for part in micro_batches(batch, 17, "group")] == [4]


def test_bins_are_filled_largest_first() -> None:
    lone = [[[([1], [2] * (n - 1))]] for n in (2, 7, 3, 8)]
    parts = micro_batches(batch_of(lone), 10)
    assert [names(part) for part in parts] == [[0, 3], [1, 2]]


def test_impossible_micro_batches_are_refused() -> None:
    batch = batch_of([[[([1], [2])]]])
    with pytest.raises(BatchError, match="not of 0 by `rollout`"):
        micro_batches(batch, 0)
    with pytest.raises(BatchError, match="not of 5 by `row`"):
        micro_batches(batch, 5, "row")


def test_a_large_batch_packs_in_milliseconds() -> None:
    """The bound is ten times the processor time it takes."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(64):
        prompt = rng.integers(0, 1000, 500).tolist()
        made.append([[(prompt, rng.integers(0, 1000, 100).tolist())] for _ in range(8)])
    batch = batch_of(made)
    took = []
    for _ in range(3):
        start = time.thread_time()
        pack = pack_prefix_tree(batch)
        took.append(time.thread_time() - start)
    assert len(pack.ids) == 64 * 500 + 512 * 100
    assert min(took) < 0.1


def test_tokens_of_images_may_count_as_several() -> None:
    batch = with_images(batch_of([[[([7, 7, 1], [2])], [([7, 7, 1], [3])]]]), 0)
    for weight, most in ((1, 5), (3, 9)):
        assert len(micro_batches(batch, most, image_weight=weight)) == 1
        assert len(micro_batches(batch, most - 1, image_weight=weight)) == 2
