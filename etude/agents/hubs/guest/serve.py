"""The guest's side of the pipe: it plays the environments of one hub, and is run by the hub's own Python.

    python serve.py gymnasium        with the file gymnasium_guest.py beside it, whose class is `Hub`

A line is a JSON object. The first line of each side says what it is:

    {"protocol": 1, "what": "Blackjack-v1", "options": {}, "max_turns": 8, "memory_mb": null}
    {"protocol": 1, "ready": "gymnasium 1.4.0"}         or {"protocol": 1, "refused": "There is no …"}

Then come requests, each with an answer, in any order:

    {"id": 1, "do": "tasks", "first": 0, "count": 100}           {"id": 1, "result": [{"prompt": …, "seed": 0}, …]}
    {"id": 2, "do": "reset", "session": 7, "task": {…}}          {"id": 2, "result": {"content": …, "tools": […]}}
    {"id": 3, "do": "step", "session": 7, "answer": {…}}         {"id": 3, "result": {"content": …, "reward": 1.0}}
    {"id": 4, "do": "run", "session": 8, "task": {…}, …}         {"id": 4, "result": {"rewards": {…}, "errors": […]}}
    {"do": "close", "session": 7}                                no answer; a `run` that still plays ends
                                                                 {"id": 3, "error": "ValueError: …"} where it failed

Each session has a thread of its own. Standard input of an environment is empty, and its standard output goes to
standard error. The end of the pipe ends the process, whatever its threads do.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
import traceback
from queue import SimpleQueue
from typing import Any

PROTOCOL = 1


class Pipe:
    """The two ends of the guest, taken away from the environments."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._out = os.dup(1)
        os.dup2(2, 1)
        self.lines = open(os.dup(0), "rb")  # noqa: SIM115  # it is open as long as the process
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.close(empty)

    def send(self, **message: Any) -> None:
        """Write one line. Raise `TypeError` or `ValueError` where it is no JSON."""
        rest = memoryview(json.dumps(message, allow_nan=False).encode() + b"\n")
        with self._lock:
            while rest:
                rest = rest[os.write(self._out, rest) :]

    def answer(self, request: Any, result: Any) -> None:
        """Answer a request with what the hub gave, which may be no JSON."""
        try:
            self.send(id=request["id"], result=result)
        except (TypeError, ValueError, RecursionError) as error:
            self.send(id=request["id"], error=f"for `{request['do']}` the hub gave a value that is no JSON: {error}")


class Session(threading.Thread):
    """The thread of one rollout. Its environment is made, played and closed on it."""

    def __init__(self, hub: Any, pipe: Pipe) -> None:
        super().__init__(daemon=True)
        self._hub = hub
        self._pipe = pipe
        self._env: Any = None
        self.requests: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def run(self) -> None:
        """Answer the requests of the rollout, until it is closed."""
        while (request := self.requests.get()) is not None:
            try:
                if request["do"] == "step":
                    result = self._env.step(request["answer"])
                else:
                    self._env = self._hub.open()
                    result = self._env.run(request) if request["do"] == "run" else self._env.reset(request["task"])
            except BaseException as error:  # SystemExit of an environment is its failure too
                self._pipe.send(id=request["id"], error=describe(error))
            else:
                self._pipe.answer(request, result)
        if hasattr(self._env, "close"):
            self._env.close()

    def end(self) -> None:
        """End the rollout after its current request, which ends at once if the environment can do that."""
        self.requests.put(None)
        if hasattr(self._env, "cancel"):
            self._env.cancel()


def describe(error: BaseException) -> str:
    """Return an error as one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = os.path.dirname(os.path.abspath(__file__))
    foreign = [frame for frame in frames if not frame.filename.startswith(own)]
    place = f" ({os.path.basename(foreign[-1].filename)}, line {foreign[-1].lineno})" if foreign else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:2000]}{place}"


def open_hub(name: str, first: dict[str, Any]) -> Any:
    """Return the hub; raise `ValueError` with a sentence where it cannot be."""
    if first["protocol"] != PROTOCOL:
        raise ValueError(f"The guest speaks protocol {PROTOCOL}, and the run protocol {first['protocol']}.")
    if first["memory_mb"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (first["memory_mb"] << 20, first["memory_mb"] << 20))
    module = importlib.import_module(f"{name}_guest")
    sys.path[0] = os.getcwd()  # the user's modules, in place of the guests
    return module.Hub(first["what"], first["options"], first["max_turns"])


def main(name: str) -> None:
    """Answer requests until the pipe ends."""
    pipe = Pipe()
    first = json.loads(pipe.lines.readline())
    try:
        hub = open_hub(name, first)
    except BaseException as error:
        traceback.print_exc()
        sentence = str(error) if type(error) is ValueError else describe(error)
        missing = getattr(error, "name", None) if isinstance(error, ImportError) else None
        pipe.send(protocol=PROTOCOL, refused=sentence, missing=missing)
        return
    pipe.send(protocol=PROTOCOL, ready=hub.version)
    sessions: dict[int, Session] = {}
    for line in pipe.lines:
        request = json.loads(line)
        if request["do"] == "tasks":
            try:
                pipe.answer(request, hub.tasks(request["first"], request["count"]))
            except Exception as error:
                pipe.send(id=request["id"], error=describe(error))
            continue
        if request["do"] in ("reset", "run"):
            sessions[request["session"]] = Session(hub, pipe)
            sessions[request["session"]].start()
        if request["do"] == "close":
            if (closed := sessions.pop(request["session"], None)) is not None:  # else its rollout never began
                closed.end()
        else:
            sessions[request["session"]].requests.put(request)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
