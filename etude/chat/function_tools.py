"""Python functions as tools: what the model is told of them, and what a call may give them.

    def add(a: int, b: int = 0) -> int:
        '''Add two numbers.

        Args:
            a: the first of them
            b: the second
        '''

The name, the docstring and the annotations are all that there is to write; pydantic makes the JSON schema of them, and
holds a call to it. A parameter of type `Task` is no matter of the model's: it is given the task that is tried.
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

from etude.errors import PluginError
from etude.records import Task

__all__ = ["FunctionTool", "InvalidToolCallError", "format_result"]

_SECTION = re.compile(r"^(args|arguments|parameters|returns?|yields|raises|examples?|notes?):\s*$", re.IGNORECASE)
_PARAMETER_SECTIONS = ("args", "arguments", "parameters")
_PARAMETER_ENTRY = re.compile(r"^(\s+)\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SPHINX_OTHER = re.compile(r"^\s*:(returns?|rtype|raises|yields)\b")
_SPHINX_PARAMETER = re.compile(r"^\s*:param\s+(?:[\w\[\], |.]+\s+)?(\w+)\s*:\s*(.*)$")
_MODEL_CONFIG = ConfigDict(extra="forbid", coerce_numbers_to_str=True)
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}")


class InvalidToolCallError(Exception):
    """A call that does not fit the function; the model is told why."""


class FunctionTool:
    """One function that the model may call. What the model could not be told of it is refused."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = str(getattr(function, "__name__", ""))
        if not _NAME.fullmatch(self.name):
            raise PluginError(f"The tool {function!r} has no name that a model could call it by. Give a function.")
        callee = function if inspect.isroutine(function) else type(function).__call__
        self.is_async = inspect.iscoroutinefunction(callee)
        """Whether calling it makes a coroutine."""
        description, parameter_descriptions = _parse_docstring(inspect.getdoc(function) or "")
        if not description:
            raise PluginError(
                f"The tool `{self.name}` has no docstring, which is what the model is told of it. Write a sentence."
            )
        self._field_names: dict[str, str] = {}
        """The parameters that the model gives, and their fields in what reads a call: a field may not be called like
        the methods that it stands beside."""
        self._task_parameter = ""
        """The parameter that is given the task."""
        self._arguments_model = self._build_arguments_model(parameter_descriptions)
        self.schema: Mapping[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": self._parameters_schema()},
        }
        """What the model is told."""

    def parse_arguments(self, text: str, task: Task | None) -> dict[str, Any]:
        """What a call gives the function, from the JSON text that the model wrote."""
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
        """What reads a call: a field for each parameter."""
        try:
            hints = typing.get_type_hints(self.function, include_extras=True)
            parameters = inspect.signature(self.function).parameters.values()
        except (NameError, TypeError, ValueError) as error:
            raise PluginError(
                f"The types of the tool `{self.name}` cannot be read: {error}. Annotate it with types that its module "
                f"knows by these names."
            ) from error
        fields: dict[str, Any] = {}
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise PluginError(
                    f"The tool `{self.name}` takes `{parameter.name}` as {parameter.kind.description}, and a model "
                    f"gives every argument by its name. Leave it out."
                )
            if parameter.name not in hints:
                raise PluginError(
                    f"The tool `{self.name}` does not say of what type `{parameter.name}` is, so the model cannot be "
                    f"told. Annotate it: `{parameter.name}: int`."
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
        try:
            return pydantic.create_model(self.name, __config__=_MODEL_CONFIG, **fields)
        except pydantic.PydanticUserError as error:
            raise PluginError(f"The tool `{self.name}` has a type that no JSON can be: {error.message}.") from error

    def _parameters_schema(self) -> dict[str, Any]:
        try:
            schema = self._arguments_model.model_json_schema(by_alias=True)
        except pydantic.PydanticUserError as error:
            raise PluginError(f"The tool `{self.name}` has a type that no JSON can be: {error.message}.") from error
        without_titles: dict[str, Any] = _remove_titles(schema)
        without_titles.pop("additionalProperties", None)
        return {"type": "object", "properties": {}, **without_titles}


def format_result(result: Any) -> str:
    """What the model is shown of a result: text as it is, anything else as JSON where it can be, else as text."""
    if isinstance(result, str):
        return result.encode(errors="replace").decode()
    return pydantic_core.to_json(result, fallback=str, serialize_unknown=True).decode()


def _format_error(error: Any) -> str:
    """One thing that is wrong with a call."""
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {error['msg']}" if where else str(error["msg"])


def _parse_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What a docstring says of the function, and of each parameter by its name."""
    description: list[str] = []
    parameters: dict[str, list[str]] = {}
    section, indent, name = "", "", ""
    for line in text.splitlines():
        if heading := _SECTION.match(line):
            section, indent, name = heading[1].lower(), "", ""
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
    """A schema without the titles that pydantic makes up. names: whether these keys are names and not words."""
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
