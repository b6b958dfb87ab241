"""Time every advantage estimator and every loss against one copy of its inputs.

    python -m bench.algorithms [--sequences 4096] [--longest 2048] [--rounds 5] [--only gae ppo] [--json FILE]

The inputs of an estimator are its declared columns, at the action tokens. A rollout's reward counts at each of them,
because an estimator returns a value for each. A loss also has the model's outputs, and is timed forward and backward. A
copy is `torch.empty_like(x).copy_(x)` of each. Finding the action tokens in the batch is part of the time,
as it is in a run. An estimator should cost at most 60 copies, a loss 20.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.common import Case, machine, measure, table, write_json
from etude.algorithms import ADVANTAGES, LOSSES, AlgorithmState, Denominators, Outputs, View
from etude.algorithms.base import Advantage, Loss
from etude.algorithms.losses import SUPERVISED
from etude.batch import COLUMNS, Batch, ColumnKind, ranges
from etude.observe import make_console, progress

ESTIMATOR_LIMIT, LOSS_LIMIT = 60.0, 20.0
SHORTEST, GROUP, TURN, CONTEXT, TOP = 64, 8, 128, 32, 4
"""Tokens of the shortest sequence; rollouts of a group; tokens of a turn, the first of them context; k of top-k."""


def random_batch(sequences: int, longest: int, seed: int = 0) -> Batch:
    """Return multi-turn rollouts in groups of eight, one row each, with every column that an algorithm may need."""
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(SHORTEST, longest + 1, (sequences,), generator=chance)
    tokens = int(lengths.sum())
    place = ranges(torch.zeros_like(lengths), lengths)
    action = place % TURN >= CONTEXT
    rollout = torch.arange(sequences)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=chance)

    behavior = -normal(tokens).abs()
    old = (behavior + normal(tokens, scale=0.05)).clamp(max=0.0)
    pi = old.double().exp()
    turn_ends = (place % TURN == TURN - 1) & action
    return Batch(
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        unit=rollout,
        group=rollout // GROUP,
        part_names=("right", "brief", "polite"),
        ids=torch.randint(0, 32_000, (tokens,), generator=chance, dtype=torch.int32),
        action=action,
        observation=~action,
        turn=(place // TURN).int(),
        version=torch.zeros(tokens, dtype=torch.int32),
        behavior_logp=behavior,
        old_logp=old,
        ref_logp=behavior + normal(tokens, scale=0.2),
        teacher_logp=behavior + normal(tokens, scale=0.2),
        entropy=normal(tokens).abs(),
        sum_pi_squared=(pi.square() + torch.rand(tokens, generator=chance) * (1 - pi).square()).float(),
        value=normal(tokens),
        token_reward=torch.where(turn_ends, torch.rand(tokens, generator=chance), 0.0),
        advantage=normal(sequences).repeat_interleave(lengths),
        returns=normal(tokens),
        teacher_topk_ids=torch.randint(0, 32_000, (tokens, TOP), generator=chance),
        teacher_topk_logp=torch.randn(tokens, TOP, generator=chance).log_softmax(-1) - 0.1,
        reward=torch.rand(sequences, generator=chance, dtype=torch.float64),
        metric=torch.rand(sequences, generator=chance, dtype=torch.float64),
        reward_parts=torch.rand(sequences, 3, generator=chance, dtype=torch.float64),
        greedy_reward=torch.rand(sequences, generator=chance, dtype=torch.float64),
        truncated=torch.rand(sequences, generator=chance) < 0.1,
        role=rollout % 2,
        rollout_id=rollout,
        trainer_version=torch.zeros(sequences, dtype=torch.int64),
        anchor=torch.randint(0, 64, (tokens,), generator=chance),
    )


def inputs(batch: Batch, names: Iterable[str], view: View) -> list[Tensor]:
    """Return the columns of these names, at the action tokens."""
    columns = []
    for name in sorted(names):
        of_unit = COLUMNS.get(name, ColumnKind.TOKEN) is ColumnKind.UNIT
        place = view.rollouts.segment_ids if of_unit else view.action_index
        columns.append(batch.require(name).index_select(0, place))
    return columns


def copies(columns: Sequence[Tensor]) -> list[Tensor]:
    """Copy each of them once."""
    return [torch.empty_like(x).copy_(x) for x in columns]


def estimator_case(name: str, estimator: Advantage, batch: Batch) -> Case:
    """Return the case of an estimator."""
    columns = inputs(batch, estimator.required_columns(), View(batch))
    return Case(
        f"advantage={name}",
        "estimators",
        lambda: estimator(View(batch), AlgorithmState()),
        lambda: copies(columns),
        ESTIMATOR_LIMIT,
    )


def loss_case(name: str, loss: Loss, batch: Batch) -> Case:
    """Return the case of a loss and its gradient. The selection of tokens, once a step, is not timed."""
    view = View(batch)
    if name in LOSSES:
        chosen = LOSSES[name].choose_tokens(loss, view, seed=0, step=0)  # type: ignore[arg-type]
        batch = batch if chosen is None else batch.replace(chosen=view.scatter(chosen, fill=False))
    whole = Denominators.from_view(view)
    given = {output: _output(output, batch) for output in sorted(loss.forward_outputs())}
    own = list(inputs(batch, loss.required_columns(), view))
    own += [
        x.detach()[view.rollouts.segment_ids if output == "score" else view.action_index] for output, x in given.items()
    ]

    def work() -> None:
        for x in given.values():
            x.grad = None
        loss(View(batch, Outputs(**given)), whole).loss.backward()  # type: ignore[no-untyped-call]

    return Case(f"loss={name}", "losses, forward and backward", work, lambda: copies(own), LOSS_LIMIT)


def _output(name: str, batch: Batch) -> Tensor:
    """Return outputs of a forward pass that are close to the values of the batch."""
    near = {
        "logp": lambda: batch.require("old_logp") + 0.05 * torch.randn(batch.num_tokens),
        "entropy": lambda: batch.require("entropy"),
        "topk_logp": lambda: torch.randn(batch.num_tokens, TOP + 1).log_softmax(-1),
        "value": lambda: batch.require("value") + 0.1,
        "score": lambda: torch.randn(batch.num_rollouts),
    }[name]
    return near().clone().requires_grad_()


def cases(batch: Batch, only: Sequence[str]) -> list[Case]:
    """Return the cases of every estimator and every loss, or only the named ones."""
    pairs = batch.replace(group=torch.arange(batch.num_rollouts) // 2)  # learning from pairs needs groups of two
    result = [estimator_case(name, kind(), batch) for name, kind in ADVANTAGES.items() if not only or name in only]
    for name, kind in {**LOSSES, **SUPERVISED}.items():
        if not only or name in only:
            result.append(loss_case(name, kind(), pairs if kind.split_unit == "group" else batch))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4096, help="rollouts in the batch; a multiple of 8")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of the longest; the shortest has 64")
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; medians are shown")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="time these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    arguments = parser.parse_args(argv)
    console, batch = make_console(), random_batch(arguments.sequences, arguments.longest)
    chosen = cases(batch, arguments.only)
    if not chosen:
        parser.error(f"none of these is an estimator or a loss: {' '.join(arguments.only)}")
    about = {"sequences": batch.num_rollouts, "tokens": batch.num_tokens, "action_tokens": int(batch.action.sum())}
    console.print(
        f"{batch.num_rollouts:,} sequences of {SHORTEST} to {arguments.longest:,} tokens, "
        f"{about['action_tokens']:,} of {batch.num_tokens:,} tokens are actions; "
        f"{machine()['threads']} threads, median of {arguments.rounds} rounds.",
        soft_wrap=True,
    )
    with progress("timing", len(chosen) * (arguments.rounds + 1), console) as bar:
        measured = measure(chosen, arguments.rounds, bar.advance)
    console.print(table(measured, "one copy"))
    missed = [case.name for case in measured if not case.met]
    console.print(f"{len(measured) - len(missed)} of {len(measured)} stay within their limit.", soft_wrap=True)
    if arguments.json:
        write_json(arguments.json, measured, about)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
