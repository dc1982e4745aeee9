"""The listening socket, which is opened before anything is loaded, so that a port in use fails at once; and who can reach it."""

import errno
import ipaddress
import socket
from functools import lru_cache

from octavo.errors import ConfigError
from octavo.server_config import ServerConfig

_BACKLOG = 2048
_ADVICE = {
    errno.EADDRINUSE: "is in use; choose another one with --port (0: any free port)",
    errno.EACCES: "may not be used by this user; choose one above 1023 with --port",
    errno.EADDRNOTAVAIL: "cannot be used: this machine has no such address (--host)",
}


def bind(host: str, port: int) -> socket.socket:
    """Returns a socket that already listens, so that clients get an answer while the model loads."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections of a server that has ended do not block it
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {str(error.strerror).lower()}") from error
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, f"cannot be used: {str(error.strerror or error).lower()}")
        raise ConfigError(f"port {port} of {host} {advice}") from error
    return listener


@lru_cache(64)  # few are kept: a client may send any host
def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def recording_has_text(config: ServerConfig) -> bool:
    """Returns whether `--record` writes text: only if some client may read it."""
    return is_loopback(config.host) or bool(config.api_key) or config.admin_key is not None


def who_reads(config: ServerConfig) -> str | None:
    """Returns what an operator should know about a server that other machines can reach; None on loopback."""
    if is_loopback(config.host):
        return None
    if not config.api_key:
        used = f"NO API KEY: everyone who can reach {config.host} can use this server"
        seen = f" and watch its blocks. {_readers(config)}" if config.inspector else "."
        return f"{used}{seen}{_recorded(config)} Set --api-key or OCTAVO_API_KEY, or leave out --host."
    return f"Everyone with a key can use this server. {_readers(config)}{_recorded(config)}" if config.inspector else None


def _readers(config: ServerConfig) -> str:
    if len(set(config.api_key)) == 1:
        return "Everyone with the key can read all prompts and answers at /v1/view; --no-inspector removes it."
    who = "Nobody" if config.admin_key is None else "Only the admin key"
    return f"{who} can read the prompts and answers of others."


def _recorded(config: ServerConfig) -> str:
    if config.record is None:
        return ""
    return f" The recording {config.record} has {'their text' if recording_has_text(config) else 'no text'}."
