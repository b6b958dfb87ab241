"""The socket that a server listens on."""

from __future__ import annotations

import socket

from etude.errors import ConfigError, StoreError


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address alone."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio disables Nagle's algorithm only if the socket's protocol says that it is TCP
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StoreError(
            f"The server cannot listen on {host}, port {port}: {error.strerror or error}. Choose another port."
        ) from error
    return listener


def check_address(host: str, port: int, option: str) -> None:
    """Refuse an address that is taken, before what takes long is loaded. option: the option, up to its value."""
    try:
        bind(host, port).close()
    except StoreError as error:
        raise ConfigError(f"{error} `{option}127.0.0.1:0` picks a free port.") from error
