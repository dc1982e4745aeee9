"""Who may ask: bearer keys, compared in constant time over their SHA-256 digests, all of them every time."""

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from octavo.server.errors import ApiError
from octavo.server.origins import host_name
from octavo.server.privacy import Holder, may_read_text
from octavo.server_config import ServerConfig

OPEN = frozenset({"/health", "/"})  # answered without a key, and so are the files of the page
ADMIN = frozenset({"/reset_prefix_cache"})  # answered with the admin key alone, and there only with --admin-key


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith("/web/")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request. Its name is its key where several keys are set, else its address."""

    name: str = ""
    reads_text: bool = False  # of everybody, see privacy.py

    def may_read(self, other: "Caller") -> bool:
        """Whether it may see what `other` sent."""
        return self.reads_text or self.name == other.name


class Keys:
    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._users = [_digest(key.encode()) for key in dict.fromkeys(config.api_key)]
        self._admins = [] if config.admin_key is None else [_digest(config.admin_key.encode())]

    def check(self, path: str, headers: Mapping[bytes, bytes], address: str = "") -> Caller:
        """`headers`: names in lower case. Raises where the key is missing, wrong or not enough for this path."""
        if is_open(path):
            return Caller(address)
        authorization = headers.get(b"authorization")
        token = _digest(_bearer(authorization))
        user, admin = _among(token, self._users), _among(token, self._admins)
        if path in ADMIN and user and not admin:
            raise ApiError(403, "this route needs the admin key", code="admin_key_required")
        if not admin and (path in ADMIN or (self._users and not user)):
            said = "the API key is not valid" if authorization else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, said, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        holder: Holder = "admin" if admin else "user" if user else "nobody"
        name = token.hex() if holder == "user" and len(self._users) > 1 else address
        return Caller(name, may_read_text(self._config, holder, host_name(headers.get(b"host")), headers))


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
