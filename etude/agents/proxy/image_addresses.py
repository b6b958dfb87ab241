"""Images by their address: fetched from the hosts that the options name, and from no other machine.

A request's address may come from text that an agent read, so it must not reach what the endpoint's machine can reach.
The host is named in `agent.image_hosts`, it is resolved once, and the connection goes to the address that was
checked. Private, loopback and link-local addresses are refused, and so are redirects.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import httpx2

from etude.agents.proxy.request import APIError

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host, for a port."""
IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address

FETCH_S = 10.0
"""Seconds to fetch an image."""
PORTS = {"http": 80, "https": 443}
TRANSLATED = ipaddress.ip_network("64:ff9b::/96")
"""Addresses that stand for those of IPv4, which may be private."""


class ImageFetcher:
    """Fetches images from the hosts that are named. Used on one event loop."""

    def __init__(
        self,
        hosts: Sequence[str],
        max_bytes: int,
        *,
        resolve: Resolve | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """hosts: names, or names with a port. resolve, transport: those of the system by default."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._resolve = resolve or resolve_host
        self._transport = transport

    async def fetch(self, address: str, where: str) -> bytes:
        """Return the image at an http(s) address. where: the field that has it."""
        url = self._check(address, where)
        try:
            async with asyncio.timeout(FETCH_S):
                found = await self._resolve(url.host, url.port or PORTS[url.scheme])
                return await self._read(url, self._choose(found, url.host, where), where)
        except TimeoutError as error:
            raise _refusal(where, f"did not answer within {FETCH_S:g} seconds. Send a data URL.") from error
        except (OSError, httpx2.HTTPError) as error:
            raise _refusal(where, f"could not be fetched ({type(error).__name__}). Send a data URL.") from error

    def _check(self, address: str, where: str) -> httpx2.URL:
        """Return an address whose host is named; refuse any other."""
        try:
            url = httpx2.URL(address)
        except httpx2.InvalidURL as error:
            raise _refusal(where, "is not a valid address. Send a data URL.") from error
        named = url.host.lower() if url.port is None else f"{url.host.lower()}:{url.port}"
        if url.scheme not in PORTS or url.userinfo or named not in self._hosts:
            fetched = f"fetches from {', '.join(sorted(self._hosts))} only" if self._hosts else "fetches none"
            raise _refusal(
                where,
                f"is an address, and this endpoint {fetched}. Send a data URL, or name its host in "
                "`agent.image_hosts`.",
            )
        return url

    def _choose(self, found: Sequence[str], host: str, where: str) -> str:
        """Return an address of a host. All of them must be public: a name may have one of each kind."""
        if not found or not all(is_public(address) for address in found):
            raise _refusal(
                where, f"has the host '{host}', which is not a public machine. Send the image as a data URL."
            )
        return found[0]

    async def _read(self, url: httpx2.URL, address: str, where: str) -> bytes:
        headers = {"host": url.netloc.decode("ascii"), "accept": "image/*", "accept-encoding": "identity"}
        client = httpx2.AsyncClient(transport=self._transport, trust_env=False, follow_redirects=False)
        async with client:
            pinned = url.copy_with(host=address)
            extensions = {"sni_hostname": url.host}
            async with client.stream("GET", pinned, headers=headers, extensions=extensions) as response:
                if response.status_code != 200:
                    raise _refusal(where, f"answered with status {response.status_code}, not 200. Send a data URL.")
                parts: list[bytes] = []
                size = 0
                async for part in response.aiter_raw():
                    parts.append(part)
                    size += len(part)
                    if size > self._max_bytes:
                        raise _refusal(where, f"has more than {self._max_bytes:,} bytes. Send a smaller image.")
        return b"".join(parts)


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the internet, and stands for no other."""
    try:
        found: IPAddress = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        elif found in TRANSLATED or found.sixtofour is not None or found.teredo is not None:
            return False
    return found.is_global and not found.is_multicast


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the IP addresses of a host."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


def _refusal(where: str, reason: str) -> APIError:
    return APIError(f"'{where}' {reason}", param=where, code="invalid_image_url")
