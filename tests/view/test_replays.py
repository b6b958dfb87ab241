"""Replays in the viewer: their pages, and the signals of tokens. The files are those of `etude replay`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.tools.replay.files import FOLDER
from tests.view.made import Viewer, write_run, write_step_replay


@pytest.fixture
def viewer(tmp_path: Path) -> Viewer:
    write_run(tmp_path / "run", steps=2)
    return Viewer(tmp_path)


def columns_of(reply: bytes) -> dict[str, list[Any]]:
    (size,) = struct.unpack_from("<I", reply)
    head, body = json.loads(reply[4 : 4 + size]), reply[4 + size :]
    return {
        name: np.frombuffer(body, part["type"], part["count"], part["offset"]).tolist()
        for name, part in head["columns"].items()
    }


def test_without_a_replay_the_command_that_makes_one_is_said(viewer: Viewer, tmp_path: Path) -> None:
    said = {"command": f"etude replay {tmp_path / 'run'} --step 1", "names": [], "options": []}
    assert viewer.get("step", run="run", step=1)["replays"] == said
    assert viewer.get("rollout", run="run", rollout=1)["replays"] == said
    assert viewer.get("rollout", run="run", rollout=9)["replays"] is None, "no step trained on it"
    group = viewer.get("group", run="run", task=0)
    assert group["replays"] == said and group["replayed"] == {}
    assert viewer.get("group", run="run", task=4)["replays"] is None


def test_a_replay_has_a_page_and_its_newest_advantages_are_in_the_group(viewer: Viewer, tmp_path: Path) -> None:
    first, second = write_step_replay(tmp_path / "run"), write_step_replay(tmp_path / "run", changed=True)
    replays = viewer.get("step", run="run", step=1)["replays"]
    assert replays["names"] == [second, first] and replays["options"] == ["loss.name=gspo loss.clip_high=0.3", ""]
    assert viewer.get("step", run="run", step=2)["replays"]["names"] == []
    group = viewer.get("group", run="run", task=1)["replayed"]
    assert group["rollout"] == [2, 3] and group["replay"] == [second] * 2
    assert group["advantage_recorded"] == [-0.5] * 2 and group["advantage_changed"] == [0.5] * 2
    page = viewer.get("replay", run="run", replay=second)
    assert page["step"] == 1 and "with other options: 8 rollouts" in page["headline"]
    assert page["options"]["changed"] == ["gspo", 0.3] and page["numbers"]["name"][-1] == "loss"
    assert (page["numbers"]["recorded"][-1], page["numbers"]["changed"][-1]) == (0.1, 0.2)
    assert page["movers"]["text"] == ["token 2"] and page["movers"]["changed"] == [-0.5]
    assert any("3 tokens are pushed in the other direction" in sentence for sentence in page["conclusions"])
    assert list(viewer.get("replay", run="run", replay=first)["numbers"]) == ["name", "recorded"]
    assert viewer.ask(f"api/replay?run=run&replay={first}&as=csv").text.startswith("rollout,reward,advantage_recorded")


def test_the_tokens_of_a_rollout_have_the_signals_of_a_replay(viewer: Viewer, tmp_path: Path) -> None:
    name = write_step_replay(tmp_path / "run", changed=True)
    ask = f"api/tokens?run=run&rollout=3&replay={name}"
    found = columns_of(viewer.ask(ask).content)
    places = [10.0, 11.0, 12.0, 13.0]
    assert found["advantage"] == places and found["weight"] == [-place for place in places]
    assert found["state"] == [0] * 4 and found["entropy"] == places
    assert found["ratio"] == pytest.approx([np.e] * 4) and found["start_logp"] == [-1.0] * 4
    assert found["kl"] == pytest.approx([np.exp(-0.5) + 0.5 - 1] * 4)
    changed = columns_of(viewer.ask(f"{ask}&side=changed").content)
    assert changed["advantage"] == [100 + place for place in places] and changed["state"] == [1] * 4
    for other in ("11", "5"):  # not in the replay; there in another turn
        outside = columns_of(viewer.ask(ask.replace("rollout=3", f"rollout={other}")).content)
        assert outside["state"] == [4] * 4 and np.isnan(outside["advantage"]).all()


def test_a_replay_that_is_damaged_or_unknown_is_an_error_of_its_own(viewer: Viewer, tmp_path: Path) -> None:
    name = write_step_replay(tmp_path / "run")
    folder = tmp_path / "run" / FOLDER
    for given in (f"tokens?rollout=3&replay={name}&side=changed", "replay?replay=../run", "replay?replay=step-1-1-1"):
        reply = viewer.ask(f"api/{given}&run=run")
        assert reply.status_code == 404 and "has no" in reply.json()["error"]
    whole = (folder / f"{name}.npz").read_bytes()
    method, content = whole.index(b"PK\1\2") + 10, 30 + int.from_bytes(whole[26:28], "little") + 30
    for damaged in (b"PK" * 100, _with_bytes(whole, method, b"\x63"), _with_bytes(whole, content, b"\xff" * 20)):
        (folder / f"{name}.npz").write_bytes(damaged)
        reply = viewer.ask(f"api/tokens?run=run&rollout=3&replay={name}")
        assert reply.status_code == 422 and "cannot be read" in reply.json()["error"]
    (folder / f"{name}.json").write_text('{"rollouts": []}')
    assert viewer.ask("api/step?run=run&step=1").status_code == 200
    replays = viewer.get("rollout", run="run", rollout=3)["replays"]
    assert replays["names"] == [name] and "cannot be read" in replays["options"][0]
    assert viewer.get("group", run="run", task=1)["replayed"] == {}
    assert viewer.ask("api/tokens?run=run&rollout=3").status_code == 200


def _with_bytes(content: bytes, at: int, changed: bytes) -> bytes:
    return content[:at] + changed + content[at + len(changed) :]
