"""Which host names clients may use for the server, and which web sites may call it.

A browser on this machine can be made to call a server on 127.0.0.1: by a site whose name suddenly means 127.0.0.1 (the Host header
still says the site's name), or by a script of any site (the Origin header says which). Neither is possible from anything but a browser.
"""

import re

from octavo.server.errors import ApiError
from octavo.server.listen import is_loopback
from octavo.server_config import ServerConfig

_HOST = re.compile(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?")
PREFLIGHT = {
    "access-control-allow-methods": "GET, POST, OPTIONS",
    "access-control-allow-headers": "authorization, content-type, x-request-id",
    "access-control-max-age": "600",
}


def host_name(host: bytes | None) -> str:
    """The name or address in a Host header, without its port; "" where there is none."""
    found = _HOST.fullmatch((host or b"").decode("latin-1"))
    return found[1].lower().strip("[]") if found else ""


class Origins:
    def __init__(self, config: ServerConfig) -> None:
        self._hosts = {name.lower().strip("[]") for name in (config.host, *config.allowed_hosts)}
        self._checks_hosts = bool(config.allowed_hosts) or (is_loopback(config.host) and not config.api_key)
        self._origins = frozenset(config.allowed_origins)

    def check_host(self, host: bytes | None) -> None:
        """`None`: there was none, as HTTP/1.0 allows."""
        name = host_name(host)
        if host is not None and not name:
            raise ApiError(400, "the Host header must be a name or an address, with or without a port")
        if self._checks_hosts and name not in self._hosts and not is_loopback(name):
            raise ApiError(403, f"the host name {name!r} is not allowed; allow it with --allowed-hosts", code="host_not_allowed")

    def allows(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may call: the allowed ones, and our own."""
        return "*" in self._origins or origin in self._origins or (bool(host) and origin.partition("://")[2] == host)
