"""The checks that every request passes before the app sees it, and the headers of every reply.

The key is the first part of each path: `/KEY/run?run=mine`. So relative links keep it, no cookie is needed, and a page
of another site cannot name a single address here. A request is refused unless

1. its host is this machine: a name that an attacker points at 127.0.0.1 does not count,
2. its method reads: GET or HEAD,
3. it does not come from a page of another site, and
4. its key is right.

The headers of a reply let a page load and connect to nothing but this server.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from etude.store.http.connection import GOOD_KEY
from etude.view.replies import describe_error

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class AccessControl:
    """Wraps an app. The app sees the path behind the key."""

    def __init__(self, app: App, key: str) -> None:
        self.app = app
        self._key = key.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        answer = _HeaderSender(send)
        refusal = self._refuse(scope)
        if refusal is not None:
            await answer.refuse(*refusal, dict(scope["headers"]).get(b"accept", b"").decode("latin-1"))
            return
        if GOOD_KEY in scope.get("extensions", ()):
            scope["extensions"][GOOD_KEY](None)
        _, _, rest = scope["path"].removeprefix("/").partition("/")
        prefix = f"/{self._key.decode()}"
        await self.app(
            {**scope, "path": f"/{rest}", "raw_path": f"/{rest}".encode(), "key_path": prefix}, receive, answer
        )

    def _refuse(self, scope: Message) -> tuple[int, str] | None:
        """Return the status and the sentence of a refusal; None for a request that may pass."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if _host_name(headers.get("host", "")) not in LOOPBACK_HOSTS:
            return 403, "This server answers requests to 127.0.0.1 and localhost only. Open the address it printed."
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "This server only reads: use GET."
        if _is_foreign(headers):
            return 403, "A page of another site sent this request. Open the address that `etude view` printed."
        key, _, _ = scope["path"].removeprefix("/").partition("/")
        if not hmac.compare_digest(key.encode(), self._key):
            return 403, "The key in the address is missing or wrong. Open the address that `etude view` printed."
        return None


def _host_name(host: str) -> str:
    """Return the name in a `Host` header, without the port; empty if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_foreign(headers: MutableMapping[str, str]) -> bool:
    """Return whether a page of another site sent the request. A link that the user follows is no such request."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    if origin is not None and urlsplit(origin).netloc != headers.get("host"):
        return True
    is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return site not in ("none", "same-origin") and not is_link


class _HeaderSender:
    """A `send` that adds the headers of every reply."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: Message) -> None:
        """Send a message of the app."""
        if message["type"] == "http.response.start":
            own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await self._send(message)

    async def refuse(self, status: int, sentence: str, accept: str) -> None:
        """Send an error."""
        body, media_type = describe_error(sentence, accept)
        headers = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
        await self({"type": "http.response.start", "status": status, "headers": headers})
        await self({"type": "http.response.body", "body": body})
