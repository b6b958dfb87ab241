"""`Config`: the base class of every object with options."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, ClassVar, Self, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator
from pydantic._internal._model_construction import ModelMetaclass  # it has no public name
from pydantic_core import PydanticCustomError

from etude.config.tree import find_item_type
from etude.config.validation_errors import to_config_error

T = TypeVar("T")


class _ConfigMeta(ModelMetaclass):
    """Make a direct constructor call raise the same sentences as composition.

    Only a direct call passes here. Nested fields are validated without it, so that all problems of a tree are still
    collected into one error.
    """

    def __call__(cls: type[T], *args: Any, **fields: Any) -> T:
        try:
            return super().__call__(*args, **fields)  # type: ignore[misc, no-any-return]
        except ValidationError as error:
            raise to_config_error(cls, error, fields, title=cls.__name__) from error  # type: ignore[arg-type]


class Config(BaseModel, metaclass=_ConfigMeta):
    """A frozen object that is its own configuration: its fields are options, and their descriptions are printed."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, defer_build=True
    )
    aliases: ClassVar[Mapping[str, str]] = {}
    """Option names of other trainers, and Etude's names for them. The error of an unknown key suggests these."""
    choice_aliases: ClassVar[Mapping[str, str]] = {}
    """Of the base class of a choice: names of other trainers, and the names of the choices here."""

    @classmethod
    def model_validate(cls, obj: Any, **settings: Any) -> Self:
        """Validate a plain tree; raise a `ConfigError` with a sentence for each problem."""
        try:
            return super().model_validate(obj, **settings)
        except ValidationError as error:
            raise to_config_error(cls, error, obj, title=cls.__name__) from error

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number; pydantic would read true as 1."""
        if _is_bool_for_number(cls.model_fields[str(info.field_name)].annotation, value):
            raise PydanticCustomError("truth_for_a_number", "true and false are not numbers")
        return value


def _is_bool_for_number(annotation: Any, value: Any) -> bool:
    """Return True if a value is a bool where the annotation allows numbers but no bools."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if isinstance(value, list | tuple):
        return any(_is_bool_for_number(find_item_type(annotation, index), item) for index, item in enumerate(value))
    if isinstance(value, Mapping):
        return any(_is_bool_for_number(find_item_type(annotation), item) for item in value.values())
    if not isinstance(value, bool):
        return False
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    types = {get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds}
    return bool(types & {int, float}) and bool not in types
