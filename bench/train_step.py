"""Time one optimizer step of a 75 M model: Etude's packed tree against a plain transformers step on padded rows.

    python -m bench.train_step [--rounds 5] [--only mixed shared] [--size 75m] [--json FILE]

Both do the same work on the same random Qwen3-shaped weights, in the precision that `train.precision=auto` chooses:
log-probs of each row's answer tokens, a policy-gradient loss, backward, AdamW without clipping. The plain step uses
transformers alone: rows padded to the longest, in micro-batches of eight, all logits, `log_softmax`, SDPA attention.
Four cases:

    mixed    rows of 16 to 128 tokens, a quarter of each a separate prompt
    shared   512-token prompts, each shared by eight answers of 32 tokens
    hybrid   a small Qwen3.5, whose layers mostly have states: a 256-token prompt, shared by eight answers of 30 to 256
    experts  the rows of `mixed` through a Qwen3-MoE of 32 experts, of which each token goes through four

Etude's own products of experts are compared with transformers' grouped ones and with its loop over experts, on the same
pack; and the whole step with the plain one. The hybrid's tree is compared with the same rows apart: each an own row of
Etude's pack, and one by one by transformers.

It uses the GPU if there is one; `--size 600m --rows 256` is a size for it.

The ratio is the speedup of Etude over the other step; the limits are 1.15, 4, for the hybrid 1.5
beside transformers and 1.2 beside rows apart, and for experts 0.95 beside the same products.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from bench.common import Case, computed_dtype, default_device, machine, measure, precision, table, write_json
from etude.batch import Pack
from etude.models import Model, PackedAttention, create, save, tiny_config, token_logp
from etude.observe import make_console, progress

SIZES = {
    "75m": {"layers": 18, "hidden": 512, "heads": 8, "kv_heads": 4, "intermediate": 1536},
    "600m": {"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "intermediate": 3072},
    "tiny": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 64},
}
VOCABULARY = {"75m": 32_768, "600m": 151_936, "tiny": 64}
HYBRIDS = {
    "75m": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "linear_num_value_heads": 8},
    "600m": {
        "layers": 24,
        "hidden": 1024,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 256,
        "intermediate": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "tiny": {"layers": 4, "hidden": 32, "heads": 4, "kv_heads": 2},
}
"""The hybrid of each size; `600m` has the shapes of Qwen3.5-0.8B."""
MIXTURES = {
    "75m": {
        "layers": 4,
        "hidden": 256,
        "heads": 4,
        "kv_heads": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
    },
    "600m": {
        "layers": 12,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 4,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 256,
    },
    "tiny": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "num_experts": 4, "moe_intermediate_size": 32},
}
"""The mixture of each size. Its vocabulary is small, so that the experts are most of the step."""
MIXTURE_VOCABULARY = 4096
CASES = ("mixed", "shared", "hybrid", "experts")
GROUP, PROMPT, ANSWER, MICRO = 8, 512, 32, 8
"""Rows that share a prompt; its tokens; an answer's tokens; rows of a padded micro-batch."""
ALONE_LIMIT = 1.5
APART_LIMIT = 1.2
PRODUCTS_LIMIT = 0.95


@dataclass(frozen=True)
class Rows:
    """Token sequences with their answers and shared prompts."""

    ids: tuple[Tensor, ...]
    prompts: tuple[int, ...]
    """The number of prompt tokens of each row."""
    group: int
    """The number of adjacent rows with the same prompt."""

    @property
    def tokens(self) -> int:
        """The number of tokens without padding and without sharing."""
        return sum(len(row) for row in self.ids)


def mixed_rows(count: int, vocabulary: int, seed: int = 0) -> Rows:
    """Return rows of 16 to 128 tokens without shared prompts."""
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(16, 129, (count,), generator=chance).tolist()
    ids = tuple(torch.randint(0, vocabulary, (n,), generator=chance) for n in lengths)
    return Rows(ids, tuple(n // 4 for n in lengths), 1)


def shared_rows(count: int, vocabulary: int, prompt: int = PROMPT, answer: int = ANSWER, seed: int = 0) -> Rows:
    """Return groups of eight answers to one long prompt."""
    chance = torch.Generator().manual_seed(seed)
    ids: list[Tensor] = []
    for _ in range(count // GROUP):
        prompt_ids = torch.randint(0, vocabulary, (prompt,), generator=chance)
        ids += [
            torch.cat([prompt_ids, torch.randint(0, vocabulary, (answer,), generator=chance)]) for _ in range(GROUP)
        ]
    return Rows(tuple(ids), (prompt,) * len(ids), GROUP)


def hybrid_rows(vocabulary: int, prompt: int, shortest: int, longest: int, seed: int = 0) -> Rows:
    """Return eight answers to one prompt, evenly spaced in their lengths."""
    chance = torch.Generator().manual_seed(seed)
    prompt_ids = torch.randint(0, vocabulary, (prompt,), generator=chance)
    lengths = [shortest + (longest - shortest) * answer // (GROUP - 1) for answer in range(GROUP)]
    ids = [torch.cat([prompt_ids, torch.randint(0, vocabulary, (n,), generator=chance)]) for n in lengths]
    return Rows(tuple(ids), (prompt,) * GROUP, GROUP)


def tree(rows: Rows) -> Pack:
    """Return the pack, in which a shared prompt is one segment, and its answers are the children."""
    segments: list[Tensor] = []
    parents, positions, source = [], [], []
    start = 0
    for first in range(0, len(rows.ids), rows.group):
        members = range(first, first + rows.group)
        shared = rows.prompts[first] if rows.group > 1 else 0
        root, root_start = len(segments), start
        if shared:
            segments.append(rows.ids[first][:shared])
            parents.append(-1)
            positions.append(torch.arange(shared))
            start += shared
        for row in members:
            own = rows.ids[row][shared:]
            segments.append(own)
            parents.append(root if shared else -1)
            positions.append(torch.arange(shared, shared + len(own)))
            source += list(range(root_start - 1, root_start + shared - 1)) if shared else []
            source += [root_start + shared - 1 if shared else -1, *range(start, start + len(own) - 1)]
            start += len(own)
    return Pack(
        ids=torch.cat(segments).int(),
        positions=torch.cat(positions),
        offsets=torch.tensor([0, *map(len, segments)]).cumsum(0),
        parent=torch.tensor(parents),
        source=torch.tensor(source),
    )


def answers(rows: Rows) -> Tensor:
    """Return the trained tokens. [T] bool"""
    return torch.cat(
        [torch.arange(len(row)) >= prompt_length for row, prompt_length in zip(rows.ids, rows.prompts, strict=True)]
    )


def etude_step(model: Model, rows: Rows) -> Callable[[], float]:
    """Pack, run, take the log-probs of the answers, step. Packing is part of the time."""
    optimizer = torch.optim.AdamW([weight for _, weight in model.trained_weights()], lr=1e-5, fused=True)
    device = model.device
    ids, action, advantage = (x.to(device) for x in (torch.cat(rows.ids), answers(rows), _advantages(rows)))

    def step() -> float:
        pack = _on(device, tree(rows))
        hidden = model.hidden(pack.ids, pack.positions, PackedAttention(pack))
        logp = token_logp(model, hidden[pack.source[action]], ids[action])
        loss = -(logp * advantage).sum() / len(advantage)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def plain_step(model: torch.nn.Module, rows: Rows, micro: int = MICRO) -> Callable[[], float]:
    """Pad, run, take log-softmax of all logits, step. micro: rows of a micro-batch; one alone is not padded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    total = int(answers(rows).sum())
    shares = _advantages(rows).split(
        [len(row) - prompt_length for row, prompt_length in zip(rows.ids, rows.prompts, strict=True)]
    )
    longest, device = max(len(row) for row in rows.ids), next(model.parameters()).device

    def step() -> float:
        summed = 0.0
        for first, stop in pairwise([*range(0, len(rows.ids), micro), len(rows.ids)]):
            count = stop - first
            width = longest if micro > 1 else len(rows.ids[first])
            ids = torch.zeros(count, width, dtype=torch.int64)
            seen, weight = torch.zeros(count, width), torch.zeros(count, width)
            for place, row in enumerate(range(first, stop)):
                length, prompt_length = len(rows.ids[row]), rows.prompts[row]
                ids[place, :length], seen[place, :length] = rows.ids[row], 1
                weight[place, prompt_length:length] = shares[row]
            ids, seen, weight = (x.to(device) for x in (ids, seen, weight))
            logits = model(input_ids=ids, attention_mask=seen.long(), use_cache=False).logits
            logp = logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            loss = -(logp * weight[:, 1:]).sum() / total
            loss.backward()  # type: ignore[no-untyped-call]
            summed += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return summed

    return step


def _on(device: torch.device, pack: Pack) -> Pack:
    tensors = {field.name: getattr(pack, field.name) for field in fields(pack)}
    return replace(pack, **{name: part.to(device) for name, part in tensors.items() if isinstance(part, Tensor)})


def _advantages(rows: Rows) -> Tensor:
    """Return one number for each answer token, equal within a row. [A]"""
    lengths = torch.tensor(
        [len(row) - prompt_length for row, prompt_length in zip(rows.ids, rows.prompts, strict=True)]
    )
    return torch.randn(len(lengths), generator=torch.Generator().manual_seed(1)).repeat_interleave(lengths)


def config_of(size: str) -> PreTrainedConfig:
    """Return the config of a size: Qwen3, tied embeddings."""
    return tiny_config(VOCABULARY[size], **SIZES[size])


def cases(size: str, count: int, only: Sequence[str]) -> list[Case]:
    """Return the cases; both sides have their own weights."""
    prompt, answer = (24, 4) if size == "tiny" else (PROMPT, ANSWER)
    shapes = {
        "mixed": (mixed_rows(count, VOCABULARY[size]), 1.15),
        "shared": (shared_rows(count, VOCABULARY[size], prompt, answer), 4.0),
    }
    result = []
    for name, (rows, limit) in shapes.items():
        if not only or name in only:
            model, plain = models_of(config_of(size))
            kind = f"plain step, {len(rows.ids)} rows"
            result.append(Case(name, kind, plain_step(plain, rows), etude_step(model, rows), limit, is_peer=True))
    result += hybrid_cases(size) if not only or "hybrid" in only else []
    return result + (mixture_cases(size, count) if not only or "experts" in only else [])


def hybrid_cases(size: str) -> list[Case]:
    """Return the tree of a hybrid beside the same rows apart."""
    prompt, shortest, longest = (24, 4, 18) if size == "tiny" else (256, 30, 256)
    rows = hybrid_rows(VOCABULARY[size], prompt, shortest, longest)
    config = tiny_config(VOCABULARY[size], family="qwen3_5", **HYBRIDS[size])
    model, plain = models_of(config)
    own_rows, _ = models_of(config)
    ours = etude_step(model, rows)
    alone = plain_step(plain, rows, micro=1)
    apart = etude_step(own_rows, replace(rows, group=1))
    return [
        Case("hybrid", f"transformers, one by one, {GROUP} rows", alone, ours, ALONE_LIMIT, is_peer=True),
        Case("hybrid, rows apart", f"Etude without trees, {GROUP} rows", apart, ours, APART_LIMIT, is_peer=True),
    ]


def mixture_cases(size: str, count: int) -> list[Case]:
    """Return the step of a mixture beside the same step with transformers' products, and beside the plain step."""
    vocabulary = min(VOCABULARY[size], MIXTURE_VOCABULARY)
    rows = mixed_rows(count, vocabulary)
    # a model keeps its config, which says how experts are computed: each gets its own
    configs = [tiny_config(vocabulary, family="qwen3_moe", **MIXTURES[size]) for _ in range(3)]
    (model, plain), (looped, _), (grouped, _) = map(models_of, configs)
    ours = etude_step(model, rows)
    looped.module.set_experts_implementation("eager")
    grouped.module.set_experts_implementation("grouped_mm")
    kind = f"transformers' products of experts, {len(rows.ids)} rows"
    padded = f"plain step of a mixture, {len(rows.ids)} rows"
    return [
        Case("experts, grouped", kind, etude_step(grouped, rows), ours, PRODUCTS_LIMIT, is_peer=True),
        Case("experts, one by one", kind, etude_step(looped, rows), ours, PRODUCTS_LIMIT, is_peer=True),
        Case("experts", padded, plain_step(plain, rows), ours, 1.15, is_peer=True),
    ]


def models_of(config: PreTrainedConfig) -> tuple[Model, torch.nn.Module]:
    """Return Etude's model and transformers' own, with the same weights."""
    model = create(config, seed=0, dtype=computed_dtype(), device=default_device())
    with tempfile.TemporaryDirectory() as directory:
        save(model, directory)
        plain: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            directory, dtype=computed_dtype(), attn_implementation="sdpa"
        )
    return model, plain.to(default_device())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is timed; medians are shown")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step; a multiple of 8")
    parser.add_argument("--size", choices=list(SIZES), default="75m", help="the model")
    parser.add_argument("--only", nargs="*", default=[], choices=CASES, help="time these alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything there")
    arguments = parser.parse_args(argv)
    console = make_console()
    chosen = cases(arguments.size, arguments.rows, arguments.only)
    with progress("timing", len(chosen) * (arguments.rounds + 1), console) as bar:
        measured = measure(chosen, arguments.rounds, bar.advance)
    console.print(
        f"Size {arguments.size}, {precision()}, {machine()['threads']} threads, median of {arguments.rounds} rounds."
    )
    console.print(table(measured, "Etude's"))
    if arguments.json:
        write_json(arguments.json, measured, {"size": arguments.size, "rows": arguments.rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
