"""The benchmark of weight transports at a tiny size: the timed weights arrive, and the file has the time of each."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from bench.sync import Published, Receiver, main, weights_of


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    assert main(["--size", "tiny", "--rounds", "1", "--bucket-mib", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert set(report["ratios"]) == {"alias", "local", "shm", "disk", "gloo"}
    assert report["bytes"] > 0 and report["bucket_mib"] == 1
    assert "of a copy's bandwidth" in capsys.readouterr().out


def test_a_publish_that_brings_nothing_or_another_weight_is_found_out(tmp_path: Path) -> None:
    weights = weights_of("tiny")
    with closing(Receiver(tmp_path / "receiver.log", 1)) as receiver:
        for name in ("local", "shm", "disk"):
            published = Published(name, weights, receiver, tmp_path / "weights", 1)
            published.prepare()
            published.publish()
            published.check()
            for weight in weights.values():
                last = weight.view(-1)[-1].clone()
                weight.view(-1)[-1] += 1
                with pytest.raises(RuntimeError, match=f"published to it by {name}"):
                    published.check()
                weight.view(-1)[-1] = last
            published.check()
            published.prepare()
            with pytest.raises(RuntimeError, match=f"published to it by {name}"):
                published.check()
