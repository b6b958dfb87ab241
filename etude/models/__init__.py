"""Language models as trainer and engine both see them: the same weights and layers, two ways to attend."""

from __future__ import annotations

from etude.models.attention import PackedAttention
from etude.models.body import Attend
from etude.models.head import logp_and_entropy, over_chunks, token_logp
from etude.models.layout import Layout
from etude.models.load import Head, create, load, save
from etude.models.model import Model
from etude.models.tiny import tiny

__all__ = [
    "Attend",
    "Head",
    "Layout",
    "Model",
    "PackedAttention",
    "create",
    "load",
    "logp_and_entropy",
    "over_chunks",
    "save",
    "tiny",
    "token_logp",
]
