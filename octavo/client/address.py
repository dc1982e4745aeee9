"""Where a server is: the URL a user types, taken apart and checked."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from octavo.errors import ConfigError

PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Address:
    scheme: str
    host: str
    port: int
    prefix: str  # of every path, where the server stands below another: "" or "/below"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.prefix}"

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def parse_url(url: str) -> Address:
    """http://127.0.0.1:8000, with or without the /v1 that other clients want."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise _wrong(url, str(error)) from error
    if parts.scheme not in PORTS or not parts.hostname:
        raise _wrong(url, "wanted something like http://127.0.0.1:8000")
    if parts.username is not None or parts.query or parts.fragment:
        raise _wrong(url, "it may have a host, a port and a path, and nothing else; a key is given with --api-key")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise _wrong(url, "it has characters that no URL has")
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(parts.scheme, parts.hostname, PORTS[parts.scheme] if port is None else port, prefix)


def _wrong(url: str, what: str) -> ConfigError:
    return ConfigError(f"the URL {url!r:.200}: {what}")
