"""Python functions as tools: their schemas for the model, and the arguments of a call.

    def add(a: int, b: int = 0) -> int:
        '''Add two numbers.

        Args:
            a: the first of them
            b: the second
        '''

The name, the docstring and the annotations are all that a tool needs. Pydantic derives the JSON schema from them, and
validates each call. The model does not see a parameter of type `Task`: it gets the current task.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

import pydantic
import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.chat.messages import is_part, read_parts
from etude.errors import PluginError
from etude.images.encoding import is_image
from etude.records import ContentPart, Task

_SECTION = re.compile(r"^(args|arguments|parameters|returns?|yields|raises|examples?|notes?):\s*$", re.IGNORECASE)
_PARAMETER_SECTIONS = ("args", "arguments", "parameters")
_PARAMETER_ENTRY = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SPHINX_OTHER = re.compile(r"^\s*:(returns?|rtype|raises|yields)\b")
_SPHINX_PARAMETER = re.compile(r"^\s*:param\s+(?:[\w\[\], |.]+\s+)?(\w+)\s*:\s*(.*)$")
_MODEL_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}")


class InvalidToolCallError(Exception):
    """A call that does not fit the function; the model gets the reason."""


class FunctionTool:
    """One function that the model may call. A function that cannot be described to the model is refused."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = str(getattr(function, "__name__", ""))
        if not _NAME.fullmatch(self.name):
            raise PluginError(f"The tool {function!r} has no name that a model can call. Give a function.")
        callee = function if inspect.isroutine(function) else type(function).__call__
        self.is_async = inspect.iscoroutinefunction(callee)
        """True if a call returns a coroutine."""
        description, parameter_descriptions = _parse_docstring(inspect.getdoc(function) or "")
        if not description:
            raise PluginError(
                f"The tool `{self.name}` has no docstring, from which the model gets its description. Write one."
            )
        self._field_names: dict[str, str] = {}
        """The model's parameters, and their fields in the arguments model. A field must not have the name of one of its
        methods."""
        self._task_parameter = ""
        """The parameter that gets the task."""
        try:
            self._arguments_model = self._build_arguments_model(parameter_descriptions)
            parameters = _remove_titles(self._arguments_model.model_json_schema(by_alias=True))
        except pydantic.PydanticUserError as error:
            raise PluginError(f"The tool `{self.name}` has a type that no JSON can be: {error.message}.") from error
        parameters.pop("additionalProperties", None)
        parameters = {"type": "object", "properties": {}, **parameters}
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": parameters},
        }
        """The tool's schema for the model."""

    def parse_arguments(self, text: str, task: Task | None) -> dict[str, Any]:
        """Return the function's arguments, from the JSON text that the model wrote."""
        try:
            parsed = self._arguments_model.model_validate_json(text or "{}")
        except ValidationError as error:
            problems = "; ".join(
                _format_error(problem) for problem in error.errors(include_url=False, include_context=False)
            )
            raise InvalidToolCallError(f"`{self.name}` cannot be called with {text}: {problems}") from None
        arguments = {name: getattr(parsed, field_name) for name, field_name in self._field_names.items()}
        return arguments | ({self._task_parameter: task} if self._task_parameter else {})

    def _build_arguments_model(self, descriptions: Mapping[str, str]) -> type[BaseModel]:
        """Return the model that validates a call, with a field for each parameter."""
        try:
            hints = typing.get_type_hints(self.function, include_extras=True)
            parameters = inspect.signature(self.function).parameters.values()
        except (NameError, TypeError, ValueError) as error:
            raise PluginError(
                f"The types of the tool `{self.name}` cannot be read: {error}. Annotate it with types that its module "
                f"defines or imports."
            ) from error
        fields: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise PluginError(
                    f"The tool `{self.name}` takes `{parameter.name}` as {parameter.kind.description}, and a model "
                    f"passes every argument by name. Leave it out."
                )
            if parameter.name not in hints:
                raise PluginError(
                    f"The tool `{self.name}` has no type for `{parameter.name}`, so the model would not know "
                    f"it. Annotate it: `{parameter.name}: int`."
                )
            if hints[parameter.name] is Task:
                self._task_parameter = parameter.name
                continue
            field_name = self._field_names[parameter.name] = f"given_{len(fields)}"
            default: Any = ... if parameter.default is parameter.empty else parameter.default
            description: dict[str, Any] = (
                {"description": descriptions[parameter.name]} if parameter.name in descriptions else {}
            )
            fields[field_name] = (hints[parameter.name], Field(default, alias=parameter.name, **description))
        return pydantic.create_model(self.name, __config__=_MODEL_CONFIG, **fields)


def format_result(result: Any) -> str | tuple[ContentPart, ...]:
    """Return a result as the model sees it: a string as it is, images as images, alone or in a list with texts.

    Another value is JSON if possible, else text by `str`.
    """
    parts = result if isinstance(result, list | tuple) else [result]
    if any(is_image(part) or isinstance(part, ContentPart) for part in parts):
        return read_parts([part if is_part(part) else _format_text(part) for part in parts])
    return _format_text(result)


def _format_text(result: Any) -> str:
    if isinstance(result, str):
        return result.encode(errors="replace").decode()
    return pydantic_core.to_json(result, fallback=str, serialize_unknown=True).decode()


def _format_error(error: Any) -> str:
    """Return one validation error of a call."""
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {error['msg']}" if where else str(error["msg"])


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return a docstring's description of the function, and of each parameter by name."""
    description: list[str] = []
    parameters: dict[str, list[str]] = {}
    section = ""
    indent = ""
    name = ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1].lower()
            indent = ""
            name = ""
        elif field := _SPHINX_PARAMETER.match(line):
            section, name = "field", field[1]
            parameters[name] = [field[2]]
        elif _SPHINX_OTHER.match(line):
            section, name = "field", ""
        elif section in _PARAMETER_SECTIONS and (entry := _PARAMETER_ENTRY.match(line)) and indent in ("", entry[1]):
            indent, name = entry[1], entry[2]
            parameters[name] = [entry[3]]
        elif name:
            parameters[name].append(line.strip())
        elif not section:
            description.append(line)
    return "\n".join(description).strip(), {name: " ".join(lines).strip() for name, lines in parameters.items()}


def _remove_titles(schema: Any, *, keys_are_names: bool = False) -> Any:
    """Return a schema without the titles that pydantic adds. keys_are_names: the keys of this mapping are names, not
    keywords of a schema."""
    if isinstance(schema, list):
        return [_remove_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name_maps = ("properties", "$defs")
    return {
        key: _remove_titles(value, keys_are_names=not keys_are_names and key in name_maps)
        for key, value in schema.items()
        if keys_are_names or key != "title"
    }
