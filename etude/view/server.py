"""The server of `etude view`: queries as JSON, CSV and bytes, and the files of the pages.

consumes       GET requests with the key in their path (`access`)
produces       replies; nothing on the disk
waits for      SIGINT or SIGTERM
unblocked by   a signal: requests under way are answered, and the server ends

Each page has a path, such as `/KEY/run?run=mine`, with the same small document behind it. The script of the page reads
the path, and requests `/KEY/api/…`. Any other program may do the same. Tables also answer as CSV: `…&as=csv`.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import webbrowser
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from rich.console import Console
from rich.text import Text
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from etude.config.env import has_display
from etude.config.secrets import mask_text
from etude.errors import ConfigError, EtudeError, NotFoundError
from etude.observe import get_logger, make_console
from etude.store.http.server_thread import ServerThread, start_server
from etude.tools.store_server import POLL_S, parse_free_address, stop_on_signal
from etude.view.access import LOOPBACK_HOSTS, AccessControl
from etude.view.catalog import RunCatalog
from etude.view.changes import MOST_STREAMS, ChangeWatcher
from etude.view.images import read_image, read_stored
from etude.view.queries.curves import list_steps, phase_times, read_curves
from etude.view.queries.evaluation import read_evaluation
from etude.view.queries.lanes import read_lanes
from etude.view.queries.replay import read_replay_page
from etude.view.queries.rollout import Pick, pick_rollout, read_group, read_rollout_page, read_tokens
from etude.view.queries.run import read_run
from etude.view.queries.runs import list_runs
from etude.view.queries.search import MOST_FOUND, MOST_SECONDS, SEARCH_S, search_rollouts
from etude.view.queries.step import read_step
from etude.view.queries.store import read_store
from etude.view.queries.task import read_task
from etude.view.replies import Table, describe_error, to_csv, to_json

PAGES = ("", "run", "store", "step", "evaluation", "group", "rollout", "compare", "task", "search", "replay")
"""The paths that answer the document of the pages."""
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
RUNS = "runs"
"""The directory that is shown by default, if it exists."""
As = Literal["json", "csv"]
RunName = Annotated[str, Query(max_length=1000)]
Name = Annotated[str, Query(max_length=100)]
Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""An integer that fits into the journal."""
_LOG = get_logger("view")


def create_app(catalog: RunCatalog, key: str, closing: asyncio.Event | None = None) -> FastAPI:
    """Return the app that serves the runs of a catalog to requests with this key. closing: ends the streams."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        catalog.close()

    handlers: dict[Any, Any] = {
        EtudeError: _answer_error,
        HTTPException: _answer_error,
        RequestValidationError: _answer_error,
        Exception: _answer_error,
    }
    app = FastAPI(
        title="Etude's viewer", openapi_url=None, docs_url=None, redoc_url=None, exception_handlers=handlers,
        lifespan=lifespan,
    )  # fmt: skip
    _add_files(app)
    _add_run_queries(app, catalog)
    _add_journal_queries(app, catalog)
    _add_rollout_queries(app, catalog)
    _add_changes(app, ChangeWatcher(catalog, closing or asyncio.Event()))
    app.add_middleware(AccessControl, key=key)
    return app


def start_viewer(root: Path | str, host: str = "127.0.0.1", port: int = 0, key: str = "") -> tuple[ServerThread, str]:
    """Serve the runs of a directory, or the queue in a database, from a thread; return the server and the address of
    its first page."""
    key = key or secrets.token_urlsafe(24)
    catalog = RunCatalog(root)
    closing = asyncio.Event()
    server = start_server(create_app(catalog, key, closing), host, port, key, closing)
    threading.Thread(target=_warm_up, args=(catalog,), name="etude-view-warm-up", daemon=True).start()
    return server, f"{server.url}/{key}/"


def _warm_up(catalog: RunCatalog) -> None:
    """Load the libraries, and read the run that was written last, before the first page asks for them."""
    try:
        for name in list_runs(catalog).columns["run"][:1]:
            with catalog.reader(name) as reader:
                read_run(reader)
    except EtudeError:  # the page shows it
        pass


def serve_viewer(root: str | None, listen: str, *, open_browser: bool, console: Console | None = None) -> None:
    """Serve the runs of a directory until a signal. open_browser: show the first page in a browser, if there is one."""
    console = make_console() if console is None else console
    host, port = parse_free_address(listen)
    if host not in LOOPBACK_HOSTS:
        raise ConfigError(
            f"The viewer was asked to listen on {host}, and it only listens on this machine: 127.0.0.1. To see it from "
            "another one, forward a port there: `ssh -L 8720:127.0.0.1:8720 THIS-MACHINE`."
        )
    default = RUNS if Path(RUNS).is_dir() else "."
    shown = root if root is not None and "://" in root else Path(root or default)
    with ExitStack() as stack:
        stopping = stack.enter_context(stop_on_signal())
        server, address = start_viewer(shown, host, port)
        stack.enter_context(server)
        console.print(Text(f"The runs in {mask_text(str(shown))} are shown at {address}"), soft_wrap=True)
        console.print(Text("Anybody with this address can read them. Ctrl-C ends the viewer."), soft_wrap=True)
        if open_browser and has_display():
            webbrowser.open(address)
        while not stopping.wait(POLL_S):
            pass


def _add_files(app: FastAPI) -> None:
    """Add the routes of the pages and of their files. The files are read once; a path only selects one of them."""
    static = _read_static()

    def page() -> Response:
        return Response(static["index.html"][0], media_type=MEDIA_TYPES[".html"])

    def file(name: str) -> Response:
        if name not in static:
            raise NotFoundError(f"The viewer has no file '{name}'.")
        content, media_type = static[name]
        return Response(content, media_type=media_type)

    for path in PAGES:
        app.get(f"/{path}")(page)
    app.get("/static/{name:path}")(file)


def _add_run_queries(app: FastAPI, catalog: RunCatalog) -> None:
    """Add the routes that need no journal."""

    @app.get("/api/runs")
    def runs(as_: Annotated[As, Query(alias="as")] = "json") -> Response:
        return _answer_table(list_runs(catalog), as_)

    @app.get("/api/run")
    def one_run(run: RunName) -> Response:
        with catalog.reader(run) as reader:
            return _answer(read_run(reader))

    @app.get("/api/curves")
    def curves(run: RunName, names: Annotated[str, Query(max_length=10_000)] = "") -> Response:
        with catalog.reader(run) as reader:
            return _answer(read_curves(reader, [name for name in names.split(",") if name]))

    @app.get("/api/times")
    def times(run: RunName, as_: Annotated[As, Query(alias="as")] = "json") -> Response:
        with catalog.reader(run) as reader:
            return _answer_table(phase_times(reader), as_)

    @app.get("/api/steps")
    def steps(run: RunName, as_: Annotated[As, Query(alias="as")] = "json") -> Response:
        with catalog.reader(run) as reader:
            return _answer_table(list_steps(reader), as_)


def _add_journal_queries(app: FastAPI, catalog: RunCatalog) -> None:
    """Add the routes of many rollouts."""

    @app.get("/api/lanes")
    def lanes(run: RunName, first: Number | None = None, last: Number | None = None) -> Response:
        with catalog.reader(run) as reader:
            return _answer(read_lanes(reader, first, last))

    @app.get("/api/store")
    def store(
        run: RunName,
        as_: Annotated[As, Query(alias="as")] = "json",
        table: Literal["queue", "runners", "attempts", "failures"] = "attempts",
    ) -> Response:
        with catalog.reader(run) as reader:
            page = read_store(reader)
        return _answer(page) if as_ == "json" else _answer_table(getattr(page, table), as_)

    @app.get("/api/step")
    def step(
        run: RunName,
        step: Number,
        as_: Annotated[As, Query(alias="as")] = "json",
        table: Literal["groups", "rollouts"] = "rollouts",
    ) -> Response:
        with catalog.reader(run) as reader:
            page = read_step(reader, step)
        return _answer(page) if as_ == "json" else _answer_table(getattr(page, table), as_)

    @app.get("/api/evaluation")
    def evaluation(
        run: RunName,
        step: Number | None = None,
        source: Annotated[str, Query(max_length=1000)] = "",
        first: Annotated[int, Query(alias="from", ge=0, lt=2**63)] = 0,
        as_: Annotated[As, Query(alias="as")] = "json",
        table: Literal["scores", "answers"] = "answers",
    ) -> Response:
        with catalog.reader(run) as reader:
            page = read_evaluation(reader, step, source, first)
        return _answer(page) if as_ == "json" else _answer_table(getattr(page, table), as_)

    @app.get("/api/search")
    def search(
        run: RunName,
        q: Annotated[str, Query(max_length=1000)] = "",
        start: Annotated[str, Query(alias="from", max_length=50)] = "",
        seconds: Annotated[float, Query(ge=0, le=MOST_SECONDS)] = SEARCH_S,
        most: Annotated[int, Query(ge=1, le=MOST_FOUND)] = MOST_FOUND,
        as_: Annotated[As, Query(alias="as")] = "json",
    ) -> Response:
        with catalog.reader(run) as reader:
            page = search_rollouts(reader, q, start, most=most, seconds=seconds)
        return _answer(page) if as_ == "json" else _answer_table(page.table, as_)


def _add_rollout_queries(app: FastAPI, catalog: RunCatalog) -> None:
    """Add the routes of a group, a task, a rollout, its tokens, and a replay."""

    @app.get("/api/group")
    def group(run: RunName, task: Number) -> Response:
        with catalog.reader(run) as reader:
            return _answer(read_group(reader, task))

    @app.get("/api/task")
    def one_task(
        run: RunName,
        task: Number,
        a: Number | None = None,
        b: Number | None = None,
        as_: Annotated[As, Query(alias="as")] = "json",
    ) -> Response:
        with catalog.reader(run) as reader:
            page = read_task(reader, task, a, b)
        return _answer(page) if as_ == "json" else _answer_table(page.draws, as_)

    @app.get("/api/rollout")
    def rollout(
        run: RunName, rollout: Number | None = None, pick: Pick = "best", step: Number | None = None
    ) -> Response:
        with catalog.reader(run) as reader:
            return _answer(read_rollout_page(reader, pick_rollout(reader, pick, step) if rollout is None else rollout))

    @app.get("/api/image")
    def image(run: RunName, task: Number = 0, image: Number = 0, digest: Name = "") -> Response:
        with catalog.reader(run) as reader:
            if digest:
                content, media_type = read_stored(reader.journal, digest)
            else:
                content, media_type = read_image(reader.journal, task, reader.images(task), image)
        return Response(content, media_type=media_type)

    @app.get("/api/tokens")
    def tokens(
        run: RunName,
        rollout: Number,
        attempt: Number = 0,
        turn: Number = 0,
        replay: Name = "",
        side: Literal["recorded", "changed"] = "recorded",
    ) -> Response:
        with catalog.reader(run) as reader:
            found = read_tokens(reader, rollout, attempt, turn, replay, side)
        return Response(found, media_type="application/octet-stream")

    @app.get("/api/replay")
    def one_replay(run: RunName, replay: Name, as_: Annotated[As, Query(alias="as")] = "json") -> Response:
        with catalog.reader(run) as reader:
            page = read_replay_page(reader, replay)
        return _answer(page) if as_ == "json" else _answer_table(page.rollouts, as_)


def _add_changes(app: FastAPI, watcher: ChangeWatcher) -> None:
    """Add the route of the streams of changes."""

    @app.get("/api/changes")
    async def changes(run: Annotated[str, Query(max_length=1000)] = "") -> Response:
        if watcher.streams >= MOST_STREAMS:
            raise HTTPException(503, f"the server has {MOST_STREAMS} streams of changes, its most")
        stream = watcher.events(run)
        first = await anext(stream, b"")  # an unknown run is refused

        async def events() -> AsyncIterator[bytes]:
            yield first
            async for event in stream:
                yield event

        return StreamingResponse(events(), media_type="text/event-stream")


def _answer(record: Any) -> Response:
    return Response(to_json(record), media_type="application/json")


def _answer_table(table: Table, as_: As) -> Response:
    if as_ == "csv":
        return Response(to_csv(table), media_type="text/csv; charset=utf-8")
    return _answer(table)


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return an error as one sentence."""
    status = 500
    sentence = "The viewer failed on this request; its log has the details."
    headers = None
    if isinstance(error, EtudeError):
        status, sentence = 404 if isinstance(error, NotFoundError) else 422, str(error)
    elif isinstance(error, HTTPException):
        status = error.status_code
        sentence = f"{request.url.path}: {error.detail}."
        headers = error.headers
        if status == 404:
            sentence = f"The viewer has no page at {request.url.path}. The address that it printed lists the runs."
    elif isinstance(error, RequestValidationError):
        found = error.errors()[0]
        status, sentence = 422, f"The parameter '{found['loc'][-1]}' is not valid: {found['msg']}."
    else:
        _LOG.error("The request %s failed.", request.url.path, exc_info=error)
    content, media_type = describe_error(sentence, request.headers.get("accept", ""))
    return Response(content, status, headers, media_type=media_type)


def _read_static() -> dict[str, tuple[bytes, str]]:
    """Return the files of the pages by path, each with its media type."""
    found: dict[str, tuple[bytes, str]] = {}

    def add(folder: Any, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                add(entry, f"{prefix}{entry.name}/")
            else:
                media_type = MEDIA_TYPES.get(Path(entry.name).suffix, "application/octet-stream")
                found[prefix + entry.name] = entry.read_bytes(), media_type

    add(files("etude.view") / "static", "")
    return found
