"""Addresses in options and flags: a host and a port, or a URL with a port."""

from __future__ import annotations

from urllib.parse import urlsplit

from etude.errors import ConfigError

MAX_PORT = 65_535


def parse_address(text: str, option: str) -> tuple[str, int]:
    """Return the host and the port of `127.0.0.1:8700` or `[::1]:8700`. option: the option, up to its value."""
    host, _, port = text.rpartition(":")
    if not host or any(character.isspace() for character in host) or not (port.isascii() and port.isdecimal()):
        raise ConfigError(f"`{option}{text}` is no address and port. Give both, such as `{option}127.0.0.1:8700`.")
    if int(port) > MAX_PORT:
        raise ConfigError(f"`{option}{text}` has the port {port}, and ports end at {MAX_PORT}. Give a lower one.")
    return host.strip("[]"), int(port)


def check_url(url: str, what: str) -> None:
    """Refuse a URL whose port is no port. what: the words for it in the error."""
    try:
        urlsplit(url).port  # noqa: B018
    except ValueError:
        raise ConfigError(f"{what} is '{url}', and its port is no number up to {MAX_PORT}. Correct the port.") from None
