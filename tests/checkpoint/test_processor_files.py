"""The image processor of an exported model, as transformers and Etude read it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoImageProcessor

from etude.checkpoint import ProcessorFiles
from etude.images.pixels import PixelReader
from tests.vlms import make_vlm, picture


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_an_exported_processor_resizes_as_training_did(family: str, tmp_path: Path) -> None:
    where, shown = make_vlm(family), picture(0, 90, 60)
    nested = {"processor_class": "Any", "image_processor": {"size": {"longest_edge": 9}}}
    for name in ("model", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_bytes((where / "config.json").read_bytes())
    (tmp_path / "model" / "preprocessor_config.json").write_bytes((where / "preprocessor_config.json").read_bytes())
    (tmp_path / "model" / "processor_config.json").write_text(json.dumps(nested))
    ProcessorFiles(tmp_path / "model", 32 * 32).write(tmp_path / "copy")
    expected = PixelReader.load(where, 32 * 32).read(shown).arrays["pixel_values"]
    assert expected.shape != PixelReader.load(where).read(shown).arrays["pixel_values"].shape
    read = AutoImageProcessor.from_pretrained(tmp_path / "copy", backend="pil")(images=[shown], return_tensors="np")
    assert read["pixel_values"].reshape(expected.shape).tolist() == expected.tolist()
    assert PixelReader.load(tmp_path / "copy") == PixelReader.load(where, 32 * 32)
    settings = json.loads((tmp_path / "copy" / "preprocessor_config.json").read_text())
    assert json.loads((tmp_path / "copy" / "processor_config.json").read_text()) == nested | {
        "image_processor": settings
    }


def test_without_a_limit_the_files_are_copies(tmp_path: Path) -> None:
    where = make_vlm("smolvlm")
    ProcessorFiles(where).write(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["preprocessor_config.json"]
    assert (tmp_path / "preprocessor_config.json").read_bytes() == (where / "preprocessor_config.json").read_bytes()


def test_a_model_of_text_has_none(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "copy").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    ProcessorFiles(tmp_path / "model", 32 * 32).write(tmp_path / "copy")
    assert not list((tmp_path / "copy").iterdir())
