"""Choices: a field whose value is one of several classes, chosen by name.

    LOSSES = {"ppo": PPO, "gspo": GSPO}

    class Run(Config):
        loss: Annotated[Loss, Choice(LOSSES)] = Field(PPO(), description="What the policy minimizes.")
        kl: Annotated[KL | None, Choice(KLS)] = Field(None, description="What keeps the policy near the reference.")

`loss` accepts an instance of `Loss`, or the name of a class in the table (`gspo`: that class with its defaults). It
also accepts a mapping with that `name` and the fields to set, or `module:Name` for a plug-in that derives from `Loss`.
`kl` also accepts `none`. The field `name` belongs to the choice, so the classes themselves have none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from inspect import isabstract
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from etude.config.plugin import load_plugin, plugin_spec
from etude.config.secrets import mask
from etude.config.suggestions import suggest_name
from etude.errors import PluginError, UnknownChoiceError, UnknownKeyError

NONE = "none"


@dataclass(frozen=True)
class ChoiceOptions:
    """The possible values of a choice field."""

    table: Mapping[str, type[BaseModel]]
    """The classes by name."""
    base: type
    """The base class of every option, plug-ins included."""
    optional: bool
    """True if `none` is an option too."""

    @property
    def names(self) -> list[str]:
        """The names of the options, without plug-ins."""
        return [*self.table, *([NONE] if self.optional else [])]

    def resolve(self, name: str) -> type[BaseModel] | None:
        """Return the class of a name; None for `none`."""
        if name == NONE and self.optional:
            return None
        if name in self.table:
            return self.table[name]
        if ":" in name:
            return self._plugin(name)
        theirs: Mapping[str, str] = getattr(self.base, "choice_aliases", {})
        hint = f" It is {theirs[name]} here." if name in theirs else suggest_name(name, self.names)
        raise UnknownChoiceError(f"there is no '{mask(name)}'.{hint} The choices are {self.listing}.")

    def validate_name(self, value: Any) -> str:
        """Check that a value is a name, and return it; null stands for `none`, as in YAML."""
        if value is None and self.optional:
            return NONE
        if not isinstance(value, str):
            raise UnknownChoiceError(
                f"a name is needed, and {mask(value)!r} was given. The choices are {self.listing}."
            )
        return value

    def name_of(self, value: BaseModel | None) -> str:
        """Return the name of a value's class."""
        if value is None:
            return NONE
        return next((name for name, kind in self.table.items() if kind is type(value)), plugin_spec(type(value)))

    def validate(self, value: Any) -> Any:
        """Return the field's value, from an instance, a name, or a mapping with a name."""
        if isinstance(value, self.base):
            return value
        fields = dict(value) if isinstance(value, Mapping) else {"name": value}
        kind = self.resolve(self.validate_name(fields.pop("name", None)))
        if kind is not None:
            return kind.__pydantic_validator__.validate_python(fields)
        if fields:
            takers = [name for name, option in self.table.items() if fields.keys() <= option.model_fields.keys()]
            names = takers or list(self.table)
            raise UnknownKeyError(
                f"{NONE} has no options, so {', '.join(fields)} cannot be set. "
                f"Choose {'one of ' if len(names) > 1 else ''}{', '.join(names)} as well."
            )
        return None

    @property
    def listing(self) -> str:
        """The choices as a list for an error sentence."""
        return f"{', '.join(self.names)}, or a plug-in written module:Name"

    def _plugin(self, spec: str) -> type[BaseModel]:
        source = spec.partition(":")[0]
        if source.endswith(".py"):
            remedy = f"Write `{Path(source).stem}:…`, with the folder of the file on PYTHONPATH."
            if "function" in self.table:
                remedy = f"A function in a file is the choice `function` with `path={spec}`."
            raise PluginError(f"The plug-in '{spec}' names a file, and a plug-in is a class of a module. {remedy}")
        kind: type = load_plugin(spec, self.base)
        if not issubclass(kind, BaseModel):
            raise PluginError(
                f"The plug-in '{spec}' must be a Config, so that its options can be set. Derive it from Config."
            )
        if isabstract(kind):
            missing = ", ".join(sorted(kind.__abstractmethods__))
            raise PluginError(
                f"The plug-in '{spec}' is abstract: it lacks {missing}. Implement that, or name a subclass."
            )
        if "name" in kind.model_fields:
            raise PluginError(
                f"The plug-in '{spec}' has a field `name`, which is the key of the choice itself. Rename that field."
            )
        return kind


@dataclass(frozen=True, eq=False)
class Choice:
    """Marks a field as a choice: `Annotated[Loss, Choice(LOSSES)]`."""

    table: Mapping[str, type[BaseModel]]
    """The classes by name: a literal dict in the package that owns them."""
    base: type | None = None
    """The base class of every option; None reads it from the annotation."""

    def __post_init__(self) -> None:
        for name, kind in self.table.items():
            assert "name" not in kind.model_fields, f"{kind.__qualname__} has a field called name, which chooses it"
            assert name != NONE and ":" not in name, f"'{name}' cannot name a choice"

    def options(self, annotation: Any) -> ChoiceOptions:
        """Return the possible values of the annotated field."""
        kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        bases = [kind for kind in kinds if kind is not NoneType]
        base = self.base or (bases[0] if len(bases) == 1 else None)
        assert isinstance(base, type), (
            f"Choice needs one base class, and {annotation} has none: give Choice(table, base)"
        )
        return ChoiceOptions(table=self.table, base=base, optional=NoneType in kinds)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Make pydantic validate the field with `ChoiceOptions.validate`."""
        return core_schema.no_info_plain_validator_function(self.options(source).validate)


def options_of(annotation: Any, metadata: Iterable[Any] = ()) -> ChoiceOptions | None:
    """Return the options of an annotated field; None if it is not a choice."""
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
    return next((item.options(annotation) for item in metadata if isinstance(item, Choice)), None)
