"""`etude chat`: a conversation through a pipe and in a terminal, which continues the exact tokens of each answer."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.cli import main
from etude.rollout import TorchEngine
from tests.learn import games

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return games.make_speaker(tmp_path_factory.mktemp("chat") / "model", steps=11)


def chat(lines: str, model: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the command with these lines in its pipe."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return main(["chat", str(model), "sampling.max_tokens=5", "train.precision=fp32", "threads=1", *words])


def test_each_answer_continues_the_exact_tokens(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    prompts, answers, stream = [], [], TorchEngine.stream

    async def watched(self: TorchEngine, prompt: Any, sampling: Any) -> Any:
        prompts.append(prompt)
        async for delta in stream(self, prompt, sampling):
            yield delta
            if delta.completion is not None:
                answers.append(delta.completion.ids)

    monkeypatch.setattr(TorchEngine, "stream", watched)
    assert chat("a\nb\n\n/new\nc\n/nonsense\n/quit\nd\n", model, monkeypatch) == 0
    shown = capsys.readouterr().out
    assert len(prompts) == 3, "nothing is answered behind /quit"
    start = np.concatenate([prompts[0], answers[0]])
    assert np.array_equal(prompts[1][: len(start)], start) and len(prompts[1]) > len(start)
    assert len(prompts[2]) == len(prompts[0]), "/new starts a new conversation"
    assert shown.startswith(f"This is {model}.") and "> a\n" in shown and "/nonsense is not a command" in shown
    again = capsys
    assert chat("a\n", model, monkeypatch) == 0, "the end of the pipe ends it"
    assert again.readouterr().out.splitlines()[2] == shown.splitlines()[2], "the same seed says the same"


def test_a_conversation_that_fills_the_context_is_reported(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    assert chat("a" * 60 + "\n/quit\n", model, monkeypatch) == 0
    assert "and the model has room for 48. /new starts a new" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat"], "Name a run's directory or a model's first: `etude chat runs/mine`."),
        (["serve"], "Name a run's directory or a model's first: `etude serve runs/mine`."),
        (["chat", "nowhere"], "There is no directory nowhere."),
        (["chat", "MODEL", "steps=3"], "`etude chat` does not read `steps`"),
        (["serve", "MODEL", "evaluate.samples=3"], "Sampling is set by `sampling`"),
        (["serve", "MODEL", "--listen", "here"], "`--listen here` is no address and port"),
        (["chat", "MODEL", "--best"], "--best chooses among the checkpoints of a run"),
    ],
)
def test_impossible_requests_are_refused(
    words: list[str], message: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main([str(model) if word == "MODEL" else word for word in words]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    stream, prompts = TorchEngine.stream, []

    async def interrupted(self: TorchEngine, prompt: Any, sampling: Any) -> Any:
        prompts.append(prompt)
        async for delta in stream(self, prompt, sampling):
            yield delta
            if len(prompts) == 1:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(10)

    monkeypatch.setattr(TorchEngine, "stream", interrupted)
    assert chat("a\nb\n", model, monkeypatch, "sampling.temperature=0") == 0
    shown = capsys.readouterr().out
    assert "[stopped]" in shown and len(prompts) == 2
    assert np.array_equal(prompts[1][: len(prompts[0])], prompts[0]) and len(prompts[1]) > len(prompts[0])


END = [
    (b"/quit\n", 0),
    pytest.param(b"\x04", 0, marks=pytest.mark.integration),
    pytest.param(b"\x03", 130, marks=pytest.mark.integration),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ends", "code"), END)
def test_a_conversation_in_a_terminal_is_ended(ends: bytes, code: int, model: Path) -> None:
    words = [sys.executable, "-m", "etude", "chat", str(model), "train.precision=fp32", "threads=1"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1"}
    process = subprocess.Popen(
        words, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, preexec_fn=lambda: os.login_tty(theirs)
    )
    os.close(theirs)
    try:
        _until(ours, "> ", process)
        os.write(ours, b"a\n")
        _until(ours, "> ", process)
        assert _press_until_ended(ours, ends, process) == code
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _press_until_ended(terminal: int, keys: bytes, process: subprocess.Popen[bytes]) -> int:
    """Press keys until the process has ended; return its exit code as a shell has it, for a signal too: the interpreter
    may be ending when they are pressed again. Keys that are pressed between a prompt and the moment at which readline
    takes the terminal over are lost."""
    for _ in range(120):
        os.write(terminal, keys)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(0.5)
            return 128 - code if code < 0 else code
    raise AssertionError("it did not end")


def _until(terminal: int, text: str, process: subprocess.Popen[bytes], seconds: float = 120) -> str:
    """Read the output until it ends with this text."""
    shown, until = "", time.monotonic() + seconds
    os.set_blocking(terminal, False)
    while not shown.endswith(text):
        assert time.monotonic() < until and process.poll() is None, shown
        try:
            shown += os.read(terminal, 4096).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.02)
    return shown
