"""Marks of the options that a run may change when it continues.

    timeout: Annotated[float, MAY_CHANGE] = Field(30.0, description="…")

A run refuses to continue with other options, except for those with a mark. None of these changes the training data,
with two exceptions. A timeout decides which answers fail. `max_staleness` decides by which policy the later steps are
sampled, and `collect.order` which groups they take. Options of memory and processes may change the last bits of the
results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True)
class ResumeMark:
    """Marks an option that a run may change when it continues. A marked section may change as a whole."""

    sets_length: bool = False
    """True of an option that sets the run's length. It may change only while no schedule depends on the length."""


MAY_CHANGE = ResumeMark()
SETS_LENGTH = ResumeMark(sets_length=True)


def marked_options(options: BaseModel) -> Iterator[tuple[str, ResumeMark]]:
    """Yield the dotted path of each marked option, with its mark. The options below a marked section are not listed."""
    for name, field in type(options).model_fields.items():
        mark = next((one for one in field.metadata if isinstance(one, ResumeMark)), None)
        if mark is not None:
            yield name, mark
            continue
        value = getattr(options, name)
        sections = value if isinstance(value, Mapping) else {"": value}
        for key, section in sections.items():
            if isinstance(section, BaseModel):
                path = f"{name}.{key}" if key else name
                yield from ((f"{path}.{inner}", inner_mark) for inner, inner_mark in marked_options(section))
