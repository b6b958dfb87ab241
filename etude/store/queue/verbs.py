"""The verbs of a rollout queue: each is written once, as a method with types and without a body.

    @verb(Rules(scopes=RUNNERS, once=True))
    async def claim(self, runner: Name, n: Count = 1, wait_s: PollSeconds = 0.0) -> list[Claim]:
        "Claim up to `n` rollouts. …"

The signature says what a request and its reply hold, and `Rules` says what a signature cannot. The client's half
(`etude.store.http.forms`), the check of a request (`etude.store.http.checks`), its route and its description follow
from both. A queue in this process overrides the method; a queue of another process has `send`, which the method calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from typing import Any, Protocol, TypeAlias, TypeVar, cast, get_type_hints

from etude.store.queue.keys import Scope

Arguments: TypeAlias = Mapping[str, Any]
"""The arguments of a call, by the names of the parameters."""
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])

ADMIN: frozenset[Scope] = frozenset({"admin"})
RUNNERS: frozenset[Scope] = frozenset({"admin", "runner"})
ATTEMPTS: frozenset[Scope] = frozenset({"admin", "runner", "reward"})
"""A reward key may write its own attempt only."""
SMALL_BYTES = 16 * 2**10
"""Bytes of a request that holds a few values."""
SHORT_BYTES = 2**17
"""Bytes of a request that holds ids and little else."""


def never(_: Arguments) -> bool:
    """Return False, whatever the arguments are."""
    return False


def nothing(_: Arguments) -> Any:
    """Return an empty list, whatever the arguments are."""
    return []


@dataclass(frozen=True)
class Rules:
    """The rules of a verb that its signature cannot say."""

    scopes: frozenset[Scope] = ADMIN
    """Scopes of the keys that may call it."""
    once: bool = False
    """True if a second execution has another effect than one. The reply is then cached for repeated requests."""
    counts_twice: Callable[[Arguments], bool] = never
    """Return true for a call that must never run twice, even if the server was restarted in between."""
    is_batched: bool = False
    """True for a write of an attempt, which a client sends together with others."""
    wait: str = ""
    """The parameter with the seconds to wait for a result; empty if it does not wait. A longer wait takes several
    requests."""
    empty: Callable[[Arguments], Any] = nothing
    """The result of a wait without a result."""
    most: str = ""
    """The parameter with the largest number of results. One request asks for at most 1000."""
    split: str = ""
    """The parameter with a list that takes several requests if it is longer than 1000."""
    max_bytes: int | None = None
    """Largest size of the body, in bytes. None is the limit of all bodies."""
    has_long_reply: bool = False
    """True if the reply may be long, and is therefore encoded in a thread."""


@dataclass(frozen=True, eq=False)
class Verb:
    """A verb: its name, its method without a body, and its rules."""

    name: str
    method: Callable[..., Any]
    rules: Rules

    @cached_property
    def _hints(self) -> Mapping[str, Any]:
        return get_type_hints(self.method, include_extras=True)

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """The types of its parameters, in order."""
        return {name: self._hints[name] for name in inspect.signature(self.method).parameters if name != "self"}

    @cached_property
    def defaults(self) -> Arguments:
        """The values of the parameters that may be left out."""
        parameters = inspect.signature(self.method).parameters.values()
        return {each.name: each.default for each in parameters if each.default is not inspect.Parameter.empty}

    @property
    def reply(self) -> Any:
        """The type of what it returns."""
        return self._hints["return"]

    @property
    def text(self) -> str:
        """Its description."""
        return inspect.getdoc(self.method) or ""

    def bind(self, args: tuple[Any, ...], named: Arguments) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        if len(args) > len(self.parameters):
            raise TypeError(f"'{self.name}' takes {len(self.parameters)} arguments, and {len(args)} were given.")
        return dict(zip(self.parameters, args, strict=False)) | dict(named)


class Sender(Protocol):
    """A queue that sends its calls to another process."""

    async def send(self, verb: Verb, arguments: Arguments) -> Any:
        """Call a verb there, and return its result."""
        ...


def verb(rules: Rules) -> Callable[[F], F]:
    """Make a method without a body a verb: it sends its arguments, unless a subclass implements it."""

    def mark(method: F) -> F:
        this = Verb(method.__name__, method, rules)

        @wraps(method)
        async def call(self: Sender, *args: Any, **named: Any) -> Any:
            return await self.send(this, this.bind(args, named))

        call.verb = this  # type: ignore[attr-defined]
        return cast(F, call)

    return mark


@cache
def verbs_of(queue: type) -> Mapping[str, Verb]:
    """Return the verbs of a class by name, in the order in which they are written."""
    found = (getattr(method, "verb", None) for method in vars(queue).values())
    return {each.name: each for each in found if isinstance(each, Verb)}
