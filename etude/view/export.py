"""`etude view RUN --export FILE.html`: the page of a step or of a rollout as one file that can be sent.

The file has the scripts and styles of the pages, and the replies that the page asks for. It loads nothing, and its
policy lets it run and connect to nothing else. The replies are compressed bytes in base64, so that no text of a rollout
can end a script or become one.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.text import Text

from etude.errors import ConfigError, EtudeError
from etude.observe import make_console
from etude.tools.replay.files import find_replays
from etude.tools.replay.files import read_tokens as read_signals
from etude.view.catalog import RunCatalog
from etude.view.images import split_images, stored_url
from etude.view.queries.replay import StepReplays, changed_options
from etude.view.queries.rollout import RolloutPage, read_rollout_page, read_tokens
from etude.view.queries.step import read_step
from etude.view.replies import to_json
from etude.view.run_reader import RunReader

MOST_BYTES = 64 * 2**20
"""Bytes of tokens that a file has at most; further turns are shown without their tokens."""
ENTRY = "saved.js"
"""The script of an exported page."""
IMPORT = re.compile(r'import \{([^}]*)\} from "\./([^"]+)";\n')
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) (\w+))", re.MULTILINE)
EXPORTED_LIST = re.compile(r"export\s*\{([^}]*)\};?")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div id="app"><noscript>This page needs JavaScript.</noscript></div>
<script type="application/json" id="saved">{data}</script>
<script type="text/plain">{licenses}</script>
<script type="module">{script}</script>
</body>
</html>
"""
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src data:; base-uri 'none'; form-action 'none'"
)


def export_page(root: Path, target: Path, step: int | None, rollout: int | None) -> None:
    """Write the page of a step or of a rollout of the run in `root`."""
    number = rollout if step is None else step
    if number is None:
        raise ConfigError("--export writes one page: name it by --step K or by --rollout N.")
    catalog = RunCatalog(root)
    names = list(catalog.directories())
    if len(names) != 1:
        raise ConfigError(
            f"--export writes a page of one run, and {root} has {len(names)}. Name one: `etude view RUN`."
        )
    kind = "rollout" if step is None else "step"
    with closing(catalog), catalog.reader(names[0]) as reader:
        replies = dict(_step_replies(reader, number) if kind == "step" else _rollout_replies(reader, number))
    saved = {"page": kind, "parameters": {"run": names[0], kind: str(number)}, "replies": replies}
    title = f"{kind.capitalize()} {number} of {names[0]}"
    target.write_text(_document(title, saved), encoding="utf-8")
    size = f"{target.stat().st_size / 2**10:,.0f} KiB"
    message = (
        f"{title} is in {target}, {size}. The file needs no server. Its texts may contain secrets: none is masked."
    )
    make_console().print(Text(message), soft_wrap=True)


def _step_replies(reader: RunReader, step: int) -> Iterator[tuple[str, str]]:
    """Yield the reply for the page of a step. Its neighbours and its replays are not in the file."""
    page = replace(read_step(reader, step), steps=[], replays=None)
    yield _reply("step", to_json(page), run=reader.name, step=step)


def _rollout_replies(reader: RunReader, rollout: int) -> Iterator[tuple[str, str]]:
    """Yield the replies for the page of a rollout: its record, and its tokens from the last turn to the first, with
    the signals of the newest replay."""
    page = _with_newest_replay(reader, read_rollout_page(reader, rollout))
    pictures = {digest: url for digest in page.pictures if (url := stored_url(reader.journal, digest))}
    _, images = split_images(reader.journal.task(page.task))
    images = [] if pictures else [image for image in images if image.startswith("data:")]
    page = replace(page, images=images, pictures=pictures)
    yield _reply("rollout", to_json(page), run=reader.name, rollout=rollout)
    left = MOST_BYTES - sum(map(len, pictures.values()))
    for attempt, turn, replayed in _turns(page):
        tokens = read_tokens(reader, rollout, attempt, turn, **replayed)
        left -= len(tokens)
        if left < 0:
            break
        yield _reply("tokens", tokens, run=reader.name, rollout=rollout, attempt=attempt, turn=turn, **replayed)


def _with_newest_replay(reader: RunReader, page: RolloutPage) -> RolloutPage:
    """Return the page with the newest readable replay alone, and without the command, which names the directory."""
    for path in find_replays(reader.directory, page.step).values() if page.replays is not None else ():
        with suppress(EtudeError):
            read_signals(path, page.rollout)
            return replace(page, replays=StepReplays("", [path.stem], [changed_options(path)]))
    return replace(page, replays=None)


def _turns(page: RolloutPage) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield the attempts and turns from the last to the first; in the last attempt for each algorithm of the replay."""
    last = len(page.attempts) - 1
    sides: list[dict[str, str]] = []
    if page.replays is not None:
        names = ["recorded", "changed"] if page.replays.options[0] else ["recorded"]
        sides = [{"replay": page.replays.names[0], "side": side} for side in names]
    for attempt in reversed(range(len(page.attempts))):
        for turn in reversed(range(len(page.attempts[attempt].turns))):
            for side in sides if attempt == last and sides else [{}]:
                yield attempt, turn, side


def _reply(query: str, content: bytes, **parameters: Any) -> tuple[str, str]:
    """Return the address of a query, with sorted parameters, and its reply as text."""
    address = " ".join([f"api/{query}", *sorted(f"{name}={value}" for name, value in parameters.items())])
    return address, base64.b64encode(gzip.compress(content, mtime=0)).decode()


def _document(title: str, saved: dict[str, Any]) -> str:
    static = files("etude.view") / "static"
    style = (static / "style.css").read_text(encoding="utf-8")
    script = _bundle()
    assert "</script" not in script and "<!--" not in script and "</style" not in style
    return PAGE.format(
        policy=POLICY.format(script=_hash(script), style=_hash(style)),
        title=html.escape(title),
        style=style,
        data=json.dumps(saved).replace("<", "\\u003c"),
        licenses=html.escape((static / "vendor" / "LICENSES.txt").read_text(encoding="utf-8")),
        script=script,
    )


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _bundle() -> str:
    """Return the modules of an exported page as one script: each is a function that returns what it exports."""
    static = files("etude.view") / "static"
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        text = static.joinpath(*name.split("/")).read_text(encoding="utf-8")
        for _, other in IMPORT.findall(text):
            if other not in parts:
                add(other)
        names = [f"{name}: {name}" for name in EXPORT.findall(text)]
        for listed in EXPORTED_LIST.findall(text):
            names += [_renamed(item, exported=True) for item in listed.split(",")]
        text = IMPORT.sub(_as_constants, text)
        text = EXPORTED_LIST.sub("", EXPORT.sub("", text))
        parts[name] = f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {", ".join(names)} }};\n}})();\n'

    add(ENTRY)
    return "const modules = {};\n" + "".join(parts.values())


def _as_constants(found: re.Match[str]) -> str:
    names = [_renamed(item, exported=False) for item in found[1].split(",") if item.strip()]
    return f'const {{ {", ".join(names)} }} = modules["{found[2]}"];\n'


def _renamed(item: str, *, exported: bool) -> str:
    """Return `a as b` as an entry of an object: of the exports, or of a pattern that takes them apart."""
    inner, _, outer = (part.strip() for part in item.partition(" as "))
    outer = outer or inner
    return f"{outer}: {inner}" if exported else f"{inner}: {outer}"
