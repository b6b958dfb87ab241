"""Vision-language models of transformers: their parts, and their passes with images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from etude.models.transformers_backbone import decoder_layers
from tests.vlms import FAMILIES, vlm_config


@pytest.mark.parametrize("family", FAMILIES)
def test_decoder_layers_are_those_of_the_text_part(family: str) -> None:
    with torch.device("meta"):
        module: Any = AutoModelForImageTextToText.from_config(vlm_config(family))
    lists = [part for part in module.modules() if isinstance(part, torch.nn.ModuleList) and len(part) == 3]
    assert len(lists) > 1, "the tower has as many layers"
    layers = set(decoder_layers(module, 3))
    names = [name for name, part in module.named_modules() if part in layers]
    assert len(names) == 3 and all(".text_model." in name or ".language_model." in name for name in names)
