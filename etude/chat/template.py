"""A chat template, rendered as transformers renders it: the same sandbox, the same filters, the same text.

Templates come with downloaded models, so they run in jinja2's immutable sandbox and only see plain JSON values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from etude.chat.messages import message_to_dict
from etude.errors import ChatError, ConfigError
from etude.records import Message, ToolCall

PASSED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""The variables that every template gets."""
_PROBE = "etudeprobe"


class ChatTemplate:
    """A compiled chat template. Templates differ in their input, so the constructor tests each once. Some take a
    message's text as a string, others only as a list of parts. Some take a call's arguments as a value, others only as
    text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"The chat template is not valid jinja: {error.message} (line {error.lineno}). Correct the template."
            ) from error
        self._parts = self._wants_parts()
        self._arguments_as_text = self._wants_arguments_as_text()

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads, without those that it sets itself."""
        environment = _environment()
        return frozenset(meta.find_undeclared_variables(environment.parse(self.source)) - environment.globals.keys())

    def render(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Return the text of a conversation, up to the start of the assistant's answer if `add_generation_prompt`.

        `extra` has further variables of the template, such as `enable_thinking=False`. Mappings are passed to the
        template as they are, without the keys whose value is None.
        """
        try:
            return self._render_template(messages, tools, add_generation_prompt, extra)
        except Exception as error:  # a template is a program: it may raise any error about a conversation
            roles = ", ".join(_role(message) for message in messages) or "none"
            raise ChatError(
                f"The chat template refused a conversation (the roles of its messages: {roles}): {error}. "
                "Change the conversation, or give the model another template."
            ) from error

    def _render_template(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
    ) -> str:
        variables = {
            "messages": [self._message_variables(message) for message in messages],
            "tools": [dict(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render({**variables, **self._special_tokens, **extra})

    def _message_variables(self, message: Message | Mapping[str, Any]) -> dict[str, Any]:
        """Return a message as the template gets it. Its reasoning has every name that templates use for it."""
        if isinstance(message, Message):
            message = message_to_dict(message, parts=self._parts, arguments_as_text=self._arguments_as_text)
        variables = {key: value for key, value in message.items() if value is not None}
        reasoning = next((variables[key] for key in _REASONING_ORDER if key in variables), None)
        return variables if reasoning is None else {"thinking": reasoning, **variables, "reasoning_content": reasoning}

    def _wants_parts(self) -> bool:
        self._parts = self._arguments_as_text = False
        question = Message("user", _PROBE)
        if self._shows([question]):
            return False
        self._parts = True
        return self._shows([question])

    def _wants_arguments_as_text(self) -> bool:
        arguments = json.dumps({_PROBE: _PROBE})
        conversation = (
            Message("user", "?"),
            Message("assistant", "", tool_calls=(ToolCall("call00000", "probe", arguments),)),
        )
        if self._shows(conversation):
            return False
        self._arguments_as_text = True
        return self._shows(conversation)

    def _shows(self, messages: Sequence[Message]) -> bool:
        try:
            return _PROBE in self.render(messages, add_generation_prompt=False)
        except ChatError:
            return False


_REASONING_ORDER = ("reasoning_content", "thinking", "reasoning")


def _role(message: Message | Mapping[str, Any]) -> str:
    return message.role if isinstance(message, Message) else str(message.get("role", "nobody"))


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the jinja2 environment of chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    names = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.globals.update(names)
    return environment


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text; it does not change the text."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict(…)` without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return `dict.fromkeys` of the arguments."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace(…)` that refuses private attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        namespace, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a template's namespace cannot have the attribute {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)
