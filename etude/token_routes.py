"""The experts that tokens went through in a sampler, which a trainer replays (`train.router_replay=r3`).

A mixture is a layer with experts. Each token goes through k of them in each of L mixtures. The last token of an answer
went through none: it was drawn, and not computed. A later turn, whose prompt contains it, computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import DataError
from etude.frozen_arrays import FrozenRecord, read_only_array

MAX_BYTE_EXPERTS = 255
"""The most experts of a mixture whose choices take one byte each; with more they take two."""
NO_EXPERT = {"uint8": 255, "int16": -1}
"""The number that stands for no choice, by dtype. The trainer's router then chooses itself."""

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRoutes(FrozenRecord):
    """The experts of the tokens of a prompt and its answer, from one of them on."""

    experts: NDArray[Any]
    """[N, L, k] uint8, or int16 for more than 255 experts."""
    start: int = 0
    """The first token that they are of. Those before it are in the routes of an earlier turn."""

    def __post_init__(self) -> None:
        dtype = np.asarray(self.experts).dtype
        if dtype.name not in NO_EXPERT:
            raise ValueError(f"TokenRoutes.experts must be {' or '.join(NO_EXPERT)}; {dtype.name} was given.")
        object.__setattr__(self, "experts", read_only_array(self.experts, dtype.type, "TokenRoutes.experts", 3))

    def covers(self, computed: int) -> bool:
        """Return true if these routes end with the last computed token. computed: the tokens but for the last one."""
        return 0 <= self.start <= self.start + len(self.experts) == computed

    def check_length(self, computed: int) -> None:
        """Refuse routes that do not end with the last computed token; see `covers`."""
        if not self.covers(computed):
            end = self.start + len(self.experts)
            raise ValueError(
                f"The routes of a turn are those of the tokens {self.start} to {end}, and its prompt and answer have "
                f"{computed} tokens that were computed. Record the routes of all of them from the start on."
            )

    def spread(self, tokens: int, before: NDArray[Any] | None = None) -> NDArray[Any]:
        """[tokens, L · k]: return the routes of all tokens of a context; none where they are not known.

        before: the routes of the tokens that an earlier turn computed, which are kept.
        """
        flat = self.experts.reshape(len(self.experts), -1)
        routes = blank_routes(tokens, flat.shape[1], flat.dtype)
        routes[self.start : self.start + len(flat)] = flat
        if before is not None and before.shape[1:] == flat.shape[1:]:
            known = before[:, 0] != NO_EXPERT[flat.dtype.name]
            routes[: len(before)][known] = before[known]
        return routes


@dataclass(frozen=True)
class ServedRoutes:
    """The form of the routes that servers report, and the part of them that the trainer's model replays."""

    layers: tuple[int, ...]
    """The layers with experts."""
    all_layers: int
    """The number of all layers. Servers report numbers for each, which mean nothing for one without experts."""
    per_token: int
    experts: int
    """The number of experts that a router chooses from."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest dtype that has every expert, and one more number for none."""
        return np.dtype(np.uint8 if self.experts <= MAX_BYTE_EXPERTS else np.int16)

    def blank(self, tokens: int) -> NDArray[Any]:
        """[tokens, L · k]: return routes without a choice."""
        return blank_routes(tokens, len(self.layers) * self.per_token, self.dtype)

    def read(self, reported: NDArray[Any], start: int, server: str) -> TokenRoutes:
        """Return reported routes, [N, layers, k] or flat, from the token `start` on. server: its name for errors."""
        if reported.ndim == 1 and reported.size % (self.all_layers * self.per_token) == 0:
            reported = reported.reshape(-1, self.all_layers, self.per_token)
        if reported.ndim != 3 or reported.shape[1:] != (self.all_layers, self.per_token):
            raise DataError(
                f"{server} reports routes of the shape {list(reported.shape)}, and this model has {self.all_layers} "
                f"layers, with {self.per_token} experts a token: the server has another model. Set "
                f"`train.router_replay=r2`, or serve the model of the run."
            )
        chosen = reported[:, list(self.layers)]
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.experts:
            raise DataError(
                f"{server} reports the expert {chosen.max()}, and a router of this model chooses from the experts 0 to "
                f"{self.experts - 1}: the server has another model. Set `train.router_replay=r2`, or serve the model "
                f"of the run."
            )
        return TokenRoutes(chosen.astype(self.dtype), start)


def blank_routes(tokens: int, width: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """[tokens, width]: return routes without a choice."""
    return np.full((tokens, width), NO_EXPERT[dtype.name], dtype)


def find_routes_start(asked: int | None, known: int) -> int | None:
    """Return the first token whose experts a turn asks for, if any turn does; see `SamplingParams.routes_start`.

    known: the number of tokens at the beginning of the prompt that are those of an earlier turn, answer included. The
    last of them was drawn there, and not computed.
    """
    return None if asked is None else max(asked, known - 1)
