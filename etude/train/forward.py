"""Forward passes: from a micro-batch to the outputs that losses and columns are computed from.

    rows ──► tree of segments ──► hidden states ──► those that predict an action ──► log-prob, entropy … in chunks

Context tokens cost a forward pass and nothing more: logits are computed only for the tokens that need an output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from etude.algorithms import logits as logit_functions
from etude.algorithms.view import flatnonzero
from etude.batch import Batch, Pack
from etude.errors import BatchError
from etude.images.pixel_cache import PixelCache
from etude.models import (
    HeadRows,
    Model,
    TokenSets,
    logp_and_entropy,
    map_logit_chunks,
    token_logp,
)
from etude.models.routes import Routes, RouteShape, use_routes
from etude.train.balance_loss import BalanceLoss
from etude.train.images import compute_hidden

OutputFn = Callable[[Tensor, Tensor, float], Tensor]
ComputeFn = Callable[[], dict[str, Tensor]]

OUTPUT_FUNCTIONS: dict[str, OutputFn] = {
    "logp": logit_functions.token_logp,
    "entropy": lambda logits, _, temperature: logit_functions.entropy(logits, temperature),
    "sum_pi_squared": lambda logits, _, temperature: logit_functions.sum_pi_squared(logits, temperature),
    "value": lambda scores, _, __: scores[:, 0],
}
"""The outputs per token that one model's logits determine (a critic's logits are one number).

Each function takes the logits, the tokens' ids and the temperature."""
LISTED_BY = {"topk_logp": "teacher_topk_ids", "alternative_logp": "alternative_ids"}
"""The outputs that are the log-probs of several tokens and of all others together, by the column that lists these
tokens."""
ROUTES = "routes"
"""The output that is no function of the logits: the experts that each token goes through, context included."""
ROLLOUT_OUTPUTS = frozenset({"score"})
"""The outputs per rollout, which are read at its last token."""


@dataclass(frozen=True)
class ForwardResult:
    """The result of one pass: flat columns of the micro-batch, NaN where nothing was computed.

    predicted: the number of tokens that got logits.
    """

    columns: dict[str, Tensor]
    """[T, …] each; [U] for outputs per rollout."""
    pack: Pack
    predicted: int


class ReferenceModel(Protocol):
    """Another model with the same vocabulary: it provides distributions and is never trained."""

    def hidden(self, pack: Pack) -> Tensor:
        """[P, H]: compute the hidden states that `logits` takes."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] → [N, V]: compute the logits."""
        ...

    def run_empty(self) -> None:
        """Take part in the exchanges of a `hidden` that other ranks compute."""
        ...

    def release(self) -> None:
        """Release the weights that `hidden` left whole for `logits`."""
        ...


def run_now(compute: ComputeFn) -> dict[str, Tensor]:
    """Return the outputs of `compute`, whose weights are whole already."""
    return compute()


class SharedPacks(Protocol):
    """A model whose packs several ranks compute together. All receive the same packs in the same order."""

    def hidden(self, pack: Pack, routes: Routes | None = None) -> Tensor:
        """[P, H]: compute the final hidden states of the whole pack, on every rank. routes: those of its tokens."""
        ...

    def own_rows(self, rows: int) -> slice:
        """Return the slice of `rows` rows that this rank computes outputs of."""
        ...

    def gather_rows(self, values: Tensor, rows: int) -> Tensor:
        """[own rows, …] of each rank → [rows, …]: gather them on every rank."""
        ...


@dataclass(frozen=True)
class ForwardPass:
    """A model with its settings for forward passes over batches."""

    model: Model
    pack: Callable[[Batch], Pack]
    temperature: float
    reference: ReferenceModel | None = None
    """The model whose whole distributions are compared with this model's."""
    shared_packs: SharedPacks | None = None
    """The same model if other ranks compute the same packs: each computes some tokens' outputs, and all gather them."""
    run: Callable[[ComputeFn], dict[str, Tensor]] = run_now
    """The function that computes with whole weights; `ShardedModel.run` if they are sharded."""
    routes: RouteShape | None = None
    """The size of the routes that batches bring, for a model that replays them. None: its routers always choose."""
    pixels: PixelCache | None = None
    """The pixels of the images that batches bring; None for a model of text."""

    def __call__(
        self,
        batch: Batch,
        wanted: frozenset[str],
        *,
        observations: bool = False,
        balance: BalanceLoss | None = None,
    ) -> ForwardResult:
        """Compute the wanted outputs of the action tokens. observations: of tokens of tool output too. balance: a loss
        on the routers' scores, whose gradient the backward pass adds."""
        mask = batch.action
        if observations:
            mask = mask | batch.require("observation", needed_by="An objective that trains on tool output")
        at, pack, source = self._locate_predictions(batch, mask)
        uncomputed = ROLLOUT_OUTPUTS if not batch.num_tokens else frozenset()
        uncomputed |= wanted - ROLLOUT_OUTPUTS if not len(at) else frozenset()
        empty = {name: self._empty_column(name, batch) for name in wanted & uncomputed}
        if wanted == empty.keys():
            return ForwardResult(empty, pack, 0)

        def compute() -> dict[str, Tensor]:
            columns = dict[str, Tensor]()
            routes = self._routes(batch, pack, balance, records=ROUTES in wanted)
            hidden = self._hidden(pack, routes)
            if routes is not None and routes.records:
                columns[ROUTES] = routes.recorded().index_select(0, pack.places(batch.offsets))
            if tokenwise := wanted - ROLLOUT_OUTPUTS - uncomputed - {ROUTES}:
                own_rows = self._own_rows(len(at))
                rows, before = at[own_rows], source[own_rows]
                listed = {name: _listed_ids(batch, name)[rows] for name in wanted & LISTED_BY.keys()}
                reference_hidden = self._reference_hidden(pack, before) if "full_kl" in wanted else None
                own_hidden = hidden.index_select(0, before)
                sets = None
                if batch.support is not None and batch.support_sets is not None:
                    sets = TokenSets(batch.support[rows], batch.support_sets)
                outputs = self._compute_outputs(own_hidden, batch.ids[rows], listed, tokenwise, reference_hidden, sets)
                for name, values in outputs.items():
                    columns[name] = _scatter(self._gather_rows(values, len(at)), at, batch.num_tokens)
            if "score" in wanted:
                columns["score"] = self._score(hidden, pack, batch)
            return columns

        return ForwardResult(empty | self.run(compute), pack, len(at))

    def top_tokens(self, batch: Batch, count: int, among: int) -> tuple[Tensor, Tensor]:
        """[T, k] of each: return the most likely ids at every action token, and their log-probs; NaN elsewhere.

        Both come from the distribution over the first `among` ids of the vocabulary.
        """
        at, pack, source = self._locate_predictions(batch, batch.action)
        ids = torch.zeros((batch.num_tokens, count), dtype=torch.int64, device=batch.device)
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        logp = torch.full((batch.num_tokens, count), torch.nan, dtype=dtype, device=batch.device)
        if not len(at):
            return ids, logp

        def likeliest(logits: Tensor, _start: int, _stop: int) -> tuple[Tensor, ...]:
            return logit_functions.top_tokens(logits[:, :among], count, self.temperature)

        def compute() -> dict[str, Tensor]:
            hidden = self._hidden(pack).index_select(0, source[self._own_rows(len(at))])
            top_ids, top_logp = (
                self._gather_rows(values, len(at)) for values in map_logit_chunks(self.model, hidden, likeliest)
            )
            return {"ids": top_ids, "logp": top_logp}

        top = self.run(compute)
        return ids.index_copy(0, at, top["ids"]), logp.index_copy(0, at, top["logp"])

    def _hidden(self, pack: Pack, routes: Routes | None = None) -> Tensor:
        """[P, H]: compute the hidden states of every token of the pack."""
        if self.shared_packs is not None:
            return self.shared_packs.hidden(pack, routes)
        with use_routes(routes):
            return compute_hidden(self.model, pack, self.pixels)

    def _routes(self, batch: Batch, pack: Pack, balance: BalanceLoss | None, *, records: bool) -> Routes | None:
        """Return the routes of a pass; None if its routers just choose.

        They are those that the batch gives. A shared prompt has those of its first row.
        """
        if self.routes is None or batch.routes is None:
            return Routes(self.routes) if self.routes is not None and records else None
        tokens = torch.arange(batch.num_tokens, device=batch.device)
        first = tokens.new_full((len(pack.ids),), batch.num_tokens)
        places = pack.places(batch.offsets)
        first.scatter_reduce_(0, places, tokens, "amin")
        of_pass = None if balance is None else balance.start_pass(batch, places, len(pack.ids))
        return Routes(self.routes, batch.routes[first], records=records, balance=of_pass)

    def _own_rows(self, rows: int) -> slice:
        """Return the slice of `rows` rows that this rank computes outputs of."""
        return slice(0, rows) if self.shared_packs is None else self.shared_packs.own_rows(rows)

    def _gather_rows(self, values: Tensor, rows: int) -> Tensor:
        """Return the values of all rows, from this rank and those that share its packs."""
        return values if self.shared_packs is None else self.shared_packs.gather_rows(values, rows)

    def _locate_predictions(self, batch: Batch, mask: Tensor) -> tuple[Tensor, Pack, Tensor]:
        """Return [N] the masked tokens' indices, the pack, and [N] the pack's index that predicts each of them."""
        at = flatnonzero(mask)
        pack = self.pack(batch)
        source = pack.source[at]
        if bool((source < 0).any()):
            token = int(at[source < 0][0])
            row = int(torch.searchsorted(batch.offsets, token, right=True)) - 1
            raise BatchError(
                f"Row {row} begins with a token to learn, and no token before it can predict it. Give the model's "
                f"tokenizer a beginning-of-sequence token, or the prompt at least one token."
            )
        return at, pack, source

    def _reference_hidden(self, pack: Pack, source: Tensor) -> Tensor:
        """[N, H]: compute the reference's hidden states of the same tokens."""
        assert self.reference is not None, "a comparison of whole distributions needs a reference"
        return self.reference.hidden(pack).index_select(0, source)

    def _score(self, hidden: Tensor, pack: Pack, batch: Batch) -> Tensor:
        """[U]: compute the head's score of each rollout at its last token; NaN for one without tokens."""
        rows = batch.rollout_row_offsets
        empty = rows[1:] == rows[:-1]
        last = torch.where(empty, -1, pack.row_ends[rows[1:] - 1])
        last_hidden = hidden.index_select(0, last[self._own_rows(len(last))].clamp(min=0))
        scores = self._gather_rows(self.model.logits(last_hidden)[:, 0], len(last))
        return torch.where(last < 0, torch.nan, scores)

    def _empty_column(self, name: str, batch: Batch) -> Tensor:
        """Return the column of a micro-batch without tokens to compute this output of: NaN, or no routes."""
        if name == ROUTES and self.routes is not None:
            return self.routes.blank(batch.num_tokens, batch.device)
        shape: tuple[int, ...] = (batch.num_rollouts if name in ROLLOUT_OUTPUTS else batch.num_tokens,)
        if name in LISTED_BY:
            shape = (*shape, _listed_ids(batch, name).shape[1] + 1)
        return torch.full(shape, torch.nan, device=batch.device)

    def _compute_outputs(
        self,
        hidden: Tensor,
        ids: Tensor,
        listed: dict[str, Tensor],
        wanted: frozenset[str],
        reference_hidden: Tensor | None,
        sets: TokenSets | None,
    ) -> dict[str, Tensor]:
        """[N, …] of each: compute outputs per token. The common two have a hand-written gradient."""
        if wanted == {"logp"}:
            return {"logp": token_logp(self.model, hidden, ids, self.temperature, sets=sets)}
        if wanted <= {"logp", "entropy"}:
            logp, entropy = logp_and_entropy(self.model, hidden, ids, self.temperature, sets=sets)
            return {name: {"logp": logp, "entropy": entropy}[name] for name in sorted(wanted)}
        names = sorted(wanted)

        def compute_chunk(logits: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
            drawn = ids[start:stop]
            outputs = {
                name: OUTPUT_FUNCTIONS[name](logits, drawn, self.temperature)
                for name in names
                if name in OUTPUT_FUNCTIONS
            }
            for name, of_rows in listed.items():
                outputs[name] = logit_functions.topk_logp_with_tail(logits, of_rows[start:stop], self.temperature)
            if reference_hidden is not None and self.reference is not None:
                reference = self.reference.logits(reference_hidden[start:stop])
                if sets is not None:
                    sets.restrict_(reference, HeadRows(slice(start, stop)))
                outputs["full_kl"] = logit_functions.full_kl(logits, reference, self.temperature)
            return tuple(outputs[name] for name in names)

        sets = None if "value" in wanted else sets  # the scores of a critic are of no vocabulary
        return dict(zip(names, map_logit_chunks(self.model, hidden, compute_chunk, sets=sets), strict=True))


def _scatter(values: Tensor, at: Tensor, tokens: int) -> Tensor:
    """[N, …] → [T, …]: put the values at these indices, and NaN elsewhere."""
    whole = values.new_full((tokens, *values.shape[1:]), torch.nan)
    return whole.index_copy(0, at, values)


def _listed_ids(batch: Batch, name: str) -> Tensor:
    """[T, k]: the tokens that an output gives the log-probs of."""
    return batch.require(LISTED_BY[name], needed_by=f"The model's `{name}`")
