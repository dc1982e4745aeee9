"""Decides who may read the text of other people's prompts and answers. The rule holds for the view, records and recordings:

    one key set          every client with the key
    several keys set     every client with the admin key
    no key set           every client on this machine: the server listens on loopback, and no proxy forwarded the request

All other clients see blocks without text. If other machines can reach a server without a key, only the admin key shows text.
"""

from collections.abc import Iterable
from typing import Literal

from octavo.server.listen import is_loopback
from octavo.server_config import ServerConfig

Holder = Literal["nobody", "user", "admin"]  # which valid key a request has

# Headers that proxies, tunnels and content delivery networks add to a request that they forward.
_FORWARDING = frozenset(
    {
        b"forwarded", b"via", b"x-real-ip", b"x-client-ip", b"x-cluster-client-ip", b"x-original-forwarded-for", b"x-original-host",
        b"true-client-ip", b"fastly-client-ip", b"fly-client-ip", b"client-ip", b"cdn-loop", b"x-amzn-trace-id", b"x-azure-clientip",
        b"x-appengine-user-ip", b"x-proxyuser-ip",
    }
)  # fmt: skip
_FORWARDING_PREFIXES = (b"x-forwarded", b"cf-", b"x-envoy-", b"tailscale-")


def may_read_text(config: ServerConfig, holder: Holder, host: str, header_names: Iterable[bytes]) -> bool:
    """Returns whether a request may read everybody's text. `host`: the name in its Host header. `header_names`: in lower case."""
    if holder == "admin":
        return True
    if config.api_key:
        return holder == "user" and len(set(config.api_key)) == 1
    return is_loopback(config.host) and is_loopback(host) and not any(map(_is_forwarding, header_names))


def _is_forwarding(name: bytes) -> bool:
    return name in _FORWARDING or name.startswith(_FORWARDING_PREFIXES)


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
