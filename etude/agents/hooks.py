"""Hooks: functions that a runner calls around each attempt of an agent.

    @etude.on("attempt_start")
    def begin(task, rollout): …

    @etude.on("turn")                      # once for each call to the model, after the agent has returned
    def prefer_short(turn, index):
        etude.emit.reward(-0.001 * len(turn.completion.ids), turn=index)

    @etude.on("attempt_end")
    async def check(report): …

A hook is a function or a class at the top level of the agent's file, or a method of an `etude.Agent`. Its parameters'
names select the arguments, as for agents. It is part of the attempt: the attempt's time limit holds, `etude.emit`
works, and an error fails the attempt. No hook is called for an attempt that was stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from etude.agents.agent import AGENT_PARAMETERS, Agent, CallSignature, read_signature
from etude.errors import AgentError

T = TypeVar("T", bound=Callable[..., Any])

HookEvent: TypeAlias = Literal["attempt_start", "turn", "attempt_end"]
EVENTS: tuple[HookEvent, ...] = get_args(HookEvent)
PARAMETERS: Mapping[HookEvent, tuple[str, ...]] = {
    "attempt_start": AGENT_PARAMETERS,
    "turn": (*AGENT_PARAMETERS, "turn", "index"),
    "attempt_end": (*AGENT_PARAMETERS, "report"),
}
"""The parameters that a hook may have, by name."""
MARK = "__etude_events__"
"""The attribute of a hook that names its events."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A function to call at an event."""

    function: Callable[..., Any]
    signature: CallSignature


def on(event: HookEvent) -> Callable[[T], T]:
    """Have runners call a function at an event of each attempt: `attempt_start`, `turn` or `attempt_end`."""
    if event not in EVENTS:
        raise AgentError(f"There is no event '{event}' to call a hook at. There are {', '.join(EVENTS)}.")

    def decorate(hook: T) -> T:
        if not isinstance(hook, FunctionType | type):
            raise AgentError(f"A hook is a function or a class; {hook!r} is neither. Put `@etude.on` right above it.")
        setattr(hook, MARK, (*_events(hook), event))
        return hook

    return decorate


def find_hooks(agent: Agent) -> Mapping[HookEvent, list[Hook]]:
    """Return the hooks of an agent: those of its file, in their order there, and then its own methods."""
    functions = [value for value in agent.namespace().values() if _events(value)]
    names = (name for each in reversed(type(agent).__mro__) for name, value in vars(each).items() if _events(value))
    methods = [getattr(agent, name) for name in dict.fromkeys(names)]
    found: dict[HookEvent, list[Hook]] = {event: [] for event in EVENTS}
    for function in [*dict.fromkeys(functions), *methods]:
        for event in _events(getattr(function, "__func__", function)):
            title = f"{function.__name__}, a hook of `{event}`,"
            found[event].append(Hook(function, read_signature(function, title, PARAMETERS[event])))
    return found


def _events(value: object) -> tuple[HookEvent, ...]:
    """Return the events of a hook; none for any other object."""
    if not isinstance(value, FunctionType | type):
        return ()
    events: tuple[HookEvent, ...] = vars(value).get(MARK, ())
    return events
