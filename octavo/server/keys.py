"""Who may ask: bearer keys, compared in constant time over their SHA-256 digests, every one of them every time."""

import hashlib
import secrets
from collections.abc import Iterable

from octavo.server.errors import ApiError
from octavo.server_config import ServerConfig

OPEN = frozenset({"/health", "/"})  # answered without a key, and so are the files of the page
ADMIN = frozenset({"/reset_prefix_cache"})  # answered with the admin key alone, and there only with --admin-key


def is_open(path: str) -> bool:
    return path in OPEN or path.startswith("/web/")


class Keys:
    def __init__(self, config: ServerConfig) -> None:
        self._users = [_digest(key.encode()) for key in config.api_key]
        self._admins = [] if config.admin_key is None else [_digest(config.admin_key.encode())]

    def check(self, path: str, authorization: bytes | None) -> None:
        if is_open(path) or (path not in ADMIN and not self._users):
            return
        token = _digest(_bearer(authorization))
        user, admin = _among(token, self._users), _among(token, self._admins)
        if path in ADMIN and user and not admin:
            raise ApiError(403, "this route wants the admin key", code="admin_key_required")
        if not admin and (path in ADMIN or not user):
            said = "the API key is not valid" if authorization else "an API key is wanted: Authorization: Bearer KEY"
            raise ApiError(401, said, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def client(self, authorization: bytes | None, address: tuple[str, int] | None) -> str:
        """Whose request this is: of a key, where keys are asked for, else of an address. A made-up key makes nobody a new client."""
        if self._users and authorization is not None:
            return _digest(_bearer(authorization)).hex()
        return address[0] if address else ""


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
