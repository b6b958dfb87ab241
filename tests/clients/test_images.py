"""Clients of PyPI send a picture, each in its own way, and the model sees it."""

from __future__ import annotations

import base64
import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.chat import ChatConfig, Tokenizer
from etude.images import image_digest
from tests.agents.proxy.world import Scripted, World, serving
from tests.clients.suite import CLIENTS, PATIENCE_S, PINNED, SCRIPTS
from tests.components import require_python_clients
from tests.vlms import make_vlm, picture

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ENCODES_ANEW = ("autogen", "smolagents")
"""Clients that take a picture of Pillow, and write its bytes themselves."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    require_python_clients(PINNED)
    directory = make_vlm("qwen3_vl")
    chat = ChatConfig().build_renderer(Tokenizer.load(directory), directory)
    with serving(Scripted(chat.tokenizer, lambda _: "two<|im_end|>"), chat) as world:
        yield world


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_sends_a_picture(world: World, client: str, tmp_path: Path) -> None:
    file = io.BytesIO()
    picture(0, 40, 24).save(file, "PNG")
    content = file.getvalue()
    claim = world.attempt()
    done = subprocess.run(
        [str(require_python_clients(PINNED)), str(SCRIPTS / "show_image.py"), client],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "ETUDE_URL": world.root,
            "ETUDE_KEYS": "{}",
            "ETUDE_KEY": claim.model_key,
            "ETUDE_IMAGE": f"data:image/png;base64,{base64.b64encode(content).decode()}",
        },
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "two"
    (turn,) = world.turns(claim.attempt_id)
    (span,) = turn.images
    assert client in ENCODES_ANEW or span.digest == image_digest(content)
