"""The experts that a model's routers choose: recorded in one forward pass, and given to another (router replay).

    hidden ──► router: scores ──topk──► chosen experts, and their weights from the scores
                                 │ ▲
                          recorded given

Only the choice is given. Scores, their normalization, groups and gradients stay the router's own. So a family needs no
code here, if its routers choose by one `topk` over all experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from etude.errors import BatchError
from etude.models.balance import PassBalance, Scoring, WatchScores, is_score_product
from etude.models.experts import is_experts
from etude.token_routes import MAX_BYTE_EXPERTS, NO_EXPERT

ROUTER_NAMES = ("gate", "router")
"""The names of the router beside the experts of a mixture."""
TRIAL_TOKENS = 3
"""The tokens that a router is tried with."""


@dataclass(frozen=True)
class RouteShape:
    """The size of the choices that a model makes for each token."""

    layers: tuple[int, ...]
    """The layers with experts."""
    per_token: int
    """The number of experts that a token goes through in each of them."""
    experts: int
    """The number of experts that a router chooses from."""
    scoring: Scoring | None = None
    """The function of the scores that routers choose by; None if these scores cannot be balanced."""

    @property
    def mixtures(self) -> int:
        """The number of layers with experts."""
        return len(self.layers)

    @property
    def width(self) -> int:
        """The number of choices for a token."""
        return self.mixtures * self.per_token

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that has every expert, and one more number for none."""
        return torch.uint8 if self.experts <= MAX_BYTE_EXPERTS else torch.int16

    @property
    def none(self) -> int:
        """The number that stands for no choice: the router then chooses itself."""
        return NO_EXPERT[str(self.dtype).removeprefix("torch.")]

    def blank(self, tokens: int, device: torch.device | None = None) -> Tensor:
        """[T, L · k]: return the routes of tokens without choices."""
        return torch.full((tokens, self.width), self.none, dtype=self.dtype, device=device)

    def check(self, routes: Tensor) -> None:
        """Refuse routes [T, L · k] of another model."""
        if routes.shape[1] != self.width or routes.dtype != self.dtype:
            raise BatchError(
                f"The column `routes` has {routes.shape[1]} experts a token, as {routes.dtype}. This model has "
                f"{self.width}, as {self.dtype}: {self.mixtures} mixtures with {self.per_token} experts a token. The "
                f"routes were sampled by another model. Sample again, or set `train.router_replay=none`."
            )
        wrong = ((routes >= self.experts) & (routes != self.none)).nonzero()
        if len(wrong):
            token, place = wrong[0].tolist()
            raise BatchError(
                f"The route of token {token} has expert {int(routes[token, place])}, and a mixture of this model has "
                f"the experts 0 to {self.experts - 1}. The routes were sampled by another model. Sample again, or set "
                f"`train.router_replay=none`."
            )


class Routes:
    """The choices of one forward pass over P tokens: given in advance, recorded, or both."""

    def __init__(
        self,
        shape: RouteShape,
        given: Tensor | None = None,
        *,
        records: bool = True,
        balance: PassBalance | None = None,
    ) -> None:
        """given: [P, L · k], the experts of each token in each mixture. records: keep those of this pass. balance: a
        loss on the routers' scores."""
        self.shape = shape
        self.given = given
        self.records = records
        self.balance = balance
        self._recorded: dict[int, Tensor] = {}

    def given_to(self, mixture: int) -> Tensor | None:
        """[P, k]: return the choices that a mixture is given."""
        start = mixture * self.shape.per_token
        return None if self.given is None else self.given[:, start : start + self.shape.per_token]

    def record(self, mixture: int, chosen: Tensor) -> None:
        """Keep the choices [P, k] of a mixture. A layer that is computed again makes the same ones."""
        if self.records:
            self._recorded[mixture] = chosen.detach().to(self.shape.dtype)

    def record_all(self, chosen: Tensor) -> None:
        """Keep the choices [P, L · k] of all mixtures."""
        for mixture, own in enumerate(torch.split(chosen, self.shape.per_token, 1)):
            self.record(mixture, own)

    def recorded(self) -> Tensor:
        """[P, L · k]: return the choices of all mixtures."""
        return torch.cat([self._recorded[mixture] for mixture in range(self.shape.mixtures)], 1)


_routes: ContextVar[Routes | None] = ContextVar("routes", default=None)


def current_routes() -> Routes | None:
    """Return the routes of the pass that runs now."""
    return _routes.get()


@contextmanager
def use_routes(routes: Routes | None) -> Iterator[None]:
    """Let routers record their choices in `routes`, and take given ones from there, within this context."""
    token = _routes.set(routes)
    try:
        yield
    finally:
        _routes.reset(token)


def control_routers(layers: Sequence[nn.Module], hidden_size: int) -> RouteShape | str:
    """Let the routers of these layers follow `use_routes`; return the size of their choices.

    Return the reason instead if they cannot. Weights may be divided over ranks, or on the meta device.
    """
    mixtures = [
        (index, block)
        for index, layer in enumerate(layers)
        for block in layer.modules()
        if any(map(is_experts, block.children()))
    ]
    if not mixtures:
        return "has no mixture of experts"
    shapes = set[tuple[int, int]]()
    scorings = set[Scoring | None]()
    for column, (_, block) in enumerate(mixtures):
        router = next((getattr(block, name) for name in ROUTER_NAMES if hasattr(block, name)), None)
        experts = next(filter(is_experts, block.children()))
        per_token = getattr(router, "top_k", None)
        if not isinstance(router, nn.Module) or not isinstance(per_token, int):
            return f"has no router beside the experts of {type(block).__name__}"
        router.etude_mixture = column  # type: ignore[assignment]
        router.forward = MethodType(_uncompiled_forward, router)
        count = int(experts.num_experts)  # type: ignore[arg-type]
        shapes.add((per_token, count))
        with WatchScores(count) as scores:
            follows = _follows_routes(router, RouteShape(tuple(range(column + 1)), per_token, count), hidden_size)
        scorings.add(scores.scoring)
        if not follows:
            return f"has routers ({type(router).__name__}) that do not choose by one topk over all experts"
    if len(shapes) > 1:
        return "has mixtures with different numbers of experts"
    ((per_token, count),) = shapes
    scoring = scorings.pop() if len(scorings) == 1 else None
    return RouteShape(tuple(index for index, _ in mixtures), per_token, count, scoring)


def _follows_routes(router: Any, shape: RouteShape, hidden_size: int) -> bool:
    """Return true if a router passes on the choices that it is given, tried with random weights."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.rand(weight.shape, generator=generator)
        for name, weight in (*router.named_parameters(), *router.named_buffers())
    }
    inputs = [torch.rand((TRIAL_TOKENS, hidden_size), generator=generator)]
    biases = list(signature(type(router).forward).parameters)[2:3]  # after `self` and the hidden states
    inputs += [torch.rand(shape.experts, generator=generator) for _ in biases]
    places = torch.arange(TRIAL_TOKENS * shape.width).view(TRIAL_TOKENS, shape.width)
    routes = Routes(shape, (places % shape.experts).to(shape.dtype))
    given = routes.given_to(router.etude_mixture)
    assert given is not None, "the trial gives choices"
    try:
        with torch.no_grad(), use_routes(routes):
            outputs = functional_call(router, weights, tuple(inputs))
    except Exception:  # it takes other inputs, or chooses otherwise
        return False
    returned = outputs if isinstance(outputs, tuple) else (outputs,)
    return any(isinstance(x, Tensor) and x.shape == given.shape and torch.equal(x, given.to(x.dtype)) for x in returned)


def _forward(router: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a router of a family, whose choice is recorded, and given if the pass has one."""
    routes = _routes.get()
    if routes is None:
        return type(router).forward(router, *args, **kwargs)
    with _Choice(routes, router.etude_mixture) as choice:
        out = type(router).forward(router, *args, **kwargs)
    assert choice.answers == 1, "a router chooses by one topk over all experts"
    return out


_uncompiled_forward = torch.compiler.disable(_forward)  # type: ignore[no-untyped-call]


class _Choice(TorchFunctionMode):
    """Has `topk` over the experts return given choices with the router's own scores of them, and balances these."""

    def __init__(self, routes: Routes, mixture: int) -> None:
        super().__init__()
        self._routes = routes
        self._mixture = mixture
        self.answers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        shape = self._routes.shape
        if func not in (torch.topk, torch.Tensor.topk):
            out = func(*args, **kwargs)
            balance = self._routes.balance
            if balance is None or not is_score_product(func, out, shape.experts):
                return out
            return balance.apply(self._mixture, out)
        scores = args[0] if args else kwargs["input"]
        count = args[1] if len(args) > 1 else kwargs["k"]
        if scores.ndim != 2 or (scores.shape[1], count) != (shape.experts, shape.per_token):
            return func(*args, **kwargs)  # such as the choice of a group, [T, groups, experts of a group]
        self.answers += 1
        own = func(*args, **kwargs)
        given = self._routes.given_to(self._mixture)
        if given is None:
            self._routes.record(self._mixture, own[1].reshape(-1, count))
            return own
        given = given.reshape(own[1].shape)
        chosen = torch.where(given == shape.none, own[1], given.to(own[1].dtype))
        self._routes.record(self._mixture, chosen.reshape(-1, count))
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))
