"""Who may ask, and who may read what others ask: bearer keys, compared in constant time over their SHA-256 digests, all of them every time.

Where several keys are valid their owners are strangers to each other: only the admin key reads what all of them send.
"""

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.server.errors import ApiError
from octavo.server_config import ServerConfig

OPEN = frozenset({"/health", "/"})  # answered without a key, and so are the files of the page
ADMIN = frozenset({"/reset_prefix_cache"})  # answered with the admin key alone, and there only with --admin-key


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith("/web/")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request: the owner of a key where there are several keys, else an address."""

    name: str = ""
    reads_all: bool = True

    def may_read(self, other: "Caller") -> bool:
        """Whether what `other` sent is for its eyes."""
        return self.reads_all or self.name == other.name


class Keys:
    def __init__(self, config: ServerConfig) -> None:
        self._users = [_digest(key.encode()) for key in dict.fromkeys(config.api_key)]
        self._admins = [] if config.admin_key is None else [_digest(config.admin_key.encode())]

    def check(self, path: str, authorization: bytes | None, address: str = "") -> Caller:
        if is_open(path) or (path not in ADMIN and not self._users):
            return Caller(address)
        token = _digest(_bearer(authorization))
        user, admin = _among(token, self._users), _among(token, self._admins)
        if path in ADMIN and user and not admin:
            raise ApiError(403, "this route wants the admin key", code="admin_key_required")
        if not admin and (path in ADMIN or not user):
            said = "the API key is not valid" if authorization else "an API key is wanted: Authorization: Bearer KEY"
            raise ApiError(401, said, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return Caller(address) if admin or len(self._users) == 1 else Caller(token.hex(), reads_all=False)


def _bearer(authorization: bytes | None) -> bytes:
    scheme, _, token = (authorization or b"").partition(b" ")
    return token if scheme.lower() == b"bearer" else b""


def _among(token: bytes, known: Iterable[bytes]) -> bool:
    found = False
    for one in known:
        found |= secrets.compare_digest(token, one)
    return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
