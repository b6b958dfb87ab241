"""Language models as trainer and engine both see them: the same weights and layers, two ways to attend."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import MissingPackageError
from etude.lazy import names_of

if TYPE_CHECKING:
    from etude.models.attention import PackedAttention
    from etude.models.body import Attend
    from etude.models.config import Head, Lora
    from etude.models.divided import Divided
    from etude.models.files import context_of, create, load, outlined, save
    from etude.models.head import logp_and_entropy, over_chunks, token_logp
    from etude.models.layout import Layout
    from etude.models.model import Model
    from etude.models.resident import Resident
    from etude.models.sizes import tiny
    from etude.models.strand import Side

__all__ = [
    "Attend",
    "Divided",
    "Head",
    "Layout",
    "Lora",
    "Model",
    "PackedAttention",
    "Resident",
    "Side",
    "adapt",
    "adapter_config",
    "context_of",
    "create",
    "load",
    "logp_and_entropy",
    "outlined",
    "over_chunks",
    "save",
    "tiny",
    "token_logp",
]

__getattr__ = names_of(
    __name__,
    {
        "attention": ("PackedAttention",),
        "body": ("Attend",),
        "config": ("Head", "Lora"),
        "divided": ("Divided",),
        "files": ("context_of", "create", "load", "outlined", "save"),
        "head": ("logp_and_entropy", "over_chunks", "token_logp"),
        "layout": ("Layout",),
        "model": ("Model",),
        "resident": ("Resident",),
        "sizes": ("tiny",),
        "strand": ("Side",),
    },
)


def adapt(model: Model, lora: Lora, *, seed: int) -> Model:
    """The model with adapters, which alone are trained from now on. The one given is used up."""
    try:
        from etude.models.lora import adapt
    except ImportError as error:
        raise _missing(error) from error
    return adapt(model, lora, seed=seed)


def adapter_config(model: Model, base: Path) -> dict[str, Any]:
    """What stands in an adapter's `adapter_config.json`."""
    try:
        from etude.models.lora import adapter_config
    except ImportError as error:
        raise _missing(error) from error
    return adapter_config(model, base)


def _missing(error: ImportError) -> MissingPackageError:
    return MissingPackageError(
        f"`lora` needs the package peft, which cannot be imported here ({error}). Install it with: pip install "
        f"'etude[lora]'"
    )
