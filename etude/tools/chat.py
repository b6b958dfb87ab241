"""`etude chat`: a conversation with a model, or with a run's checkpoint, in the terminal.

consumes       lines from a terminal or a pipe, each a user message
produces       streamed answers; each continues the exact tokens of the conversation
waits for      a line; the engine
unblocked by   `/quit`, the end of the input, or Ctrl-C at the prompt, which end the program; Ctrl-C during an answer,
               which ends that answer
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TextIO

import numpy as np
from rich.console import Console
from rich.text import Text

from etude.chat import ChatRenderer
from etude.chat.streaming import ContentDelta, MessageDelta, ToolCallDelta
from etude.chat.tokenizer import Ids
from etude.chat.transcript import Transcript
from etude.errors import ConfigError, EtudeError
from etude.observe import make_console
from etude.recipes.collect.sampling import SamplingConfig, derived_seed
from etude.recipes.inference import load_for_inference
from etude.recipes.run.config import Run
from etude.records import Completion, Message
from etude.rollout import ServerPool, TorchEngine
from etude.rollout.request import Delta

HELP = "/new starts a new conversation, /quit ends. Ctrl-C stops an answer."


def run_chat(run: Run, source: str, *, best: bool, piped: TextIO | None) -> None:
    """Run a conversation until the user ends it. source: the name of the run. piped: the input with one message a line;
    None is the terminal."""
    if run.model.path is None:
        raise ConfigError("Name a run's directory or a model's first: `etude chat runs/mine`.")
    console = make_console(run.observe.console)
    with load_for_inference(run, best=best) as (step, chat, engine, max_tokens):
        description = str(run.model.path) if step is None else f"step {step} of {source}"
        console.print(Text(f"This is {description}. {HELP}", style="dim"), soft_wrap=True)
        conversation = _Conversation(run.sampling, run.seed, chat, engine, max_tokens, console)
        while (line := _read_line(console, piped)) is not None:
            if line == "/quit":
                break
            if line == "/new":
                conversation = _Conversation(run.sampling, run.seed, chat, engine, max_tokens, console)
                console.print(Text("A new conversation.", style="dim"))
            elif line.startswith("/"):
                console.print(Text(f"{line.split()[0]} is not a command. {HELP}", style="dim"), soft_wrap=True)
            elif line:
                conversation.answer(line)


def _read_line(console: Console, piped: TextIO | None) -> str | None:
    """Read the next line, stripped; return None at the end of the input."""
    if piped is None:
        with suppress(EOFError):
            return console.input("[bold]> [/bold]").strip()
        console.print()
        return None
    line = piped.readline()
    if not line:
        return None
    console.print(Text(f"> {line.strip()}", style="bold"), soft_wrap=True)
    return line.strip()


class _Conversation:
    def __init__(
        self,
        sampling: SamplingConfig,
        seed: int,
        chat: ChatRenderer,
        engine: TorchEngine | ServerPool,
        max_tokens: int,
        console: Console,
    ) -> None:
        self._sampling = sampling
        self._seed = seed
        self._chat = chat
        self._engine = engine
        self._max_tokens = max_tokens
        self._console = console
        self._transcript: Transcript | None = None
        self._turn = 0

    def answer(self, text: str) -> None:
        """Send a message to the model, and print its answer. A stopped answer is kept up to that point."""
        if self._transcript is not None:
            self._transcript.add_observation(text)
        else:
            messages = (Message("user", text),)
            self._transcript = Transcript(self._chat, messages if self._chat.tokenizer.template else text)
        prompt = self._transcript.prompt
        room = self._max_tokens - len(prompt.ids)
        if room < 1:
            message = (
                f"The conversation has {len(prompt.ids)} tokens, and the model has room for {self._max_tokens}. {HELP}"
            )
            self._console.print(Text(message, style="red"), soft_wrap=True)
            return
        deltas: list[Delta] = []
        try:
            asyncio.run(self._stream(prompt.ids, room, deltas))
            stopped = ""
        except KeyboardInterrupt:
            stopped = "stopped"
        except EtudeError as error:
            stopped = str(error)
        completion = _join_deltas(deltas, self._chat)
        self._transcript.add_answer(prompt, completion)
        self._turn += 1
        remark = stopped or ("" if completion.finish_reason == "stop" else completion.finish_reason)
        self._console.print(Text(f"  [{remark}]" if remark else "", style="dim"), soft_wrap=True)

    async def _stream(self, prompt: Ids, room: int, deltas: list[Delta]) -> None:
        """Print an answer while it is sampled, and append its parts to `deltas`."""
        params = self._sampling.params(derived_seed(self._seed, "chat", self._turn))
        params = replace(params, max_tokens=min(params.max_tokens, room))
        parser = self._chat.stream_parser(prompt, sampling=params)
        async with aclosing(self._engine.stream(prompt, params)) as stream:
            async for delta in stream:
                deltas.append(delta)
                self._show(parser.push(delta.ids))
        self._show(parser.finish())

    def _show(self, deltas: Sequence[MessageDelta]) -> None:
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                text = Text(f"\n{delta.call.name}({delta.call.arguments})", style="cyan")
            else:
                text = Text(delta.text, style="" if isinstance(delta, ContentDelta) else "dim")
            self._console.print(text, end="", soft_wrap=True)


def _join_deltas(deltas: Sequence[Delta], chat: ChatRenderer) -> Completion:
    """Return the sampled tokens of an answer as a completion, also of a stopped one."""
    if deltas and deltas[-1].completion is not None:
        return deltas[-1].completion
    empty = np.zeros(0, np.int32)
    ids = np.concatenate([empty, *(delta.ids for delta in deltas)])
    logp = np.concatenate([empty.astype(np.float32), *(delta.logp for delta in deltas)])
    version = np.concatenate([empty, *(delta.version for delta in deltas)])
    return Completion(ids, logp, version, "abort", chat.tokenizer.decode(ids))
