"""`Digests`: the chain of keyed hashes that identifies cached blocks.

    root      H(identity, salt, offset)      lookups never match across identities, salts or offsets of positions
    d0        H(root, tokens of block 0)
    d1        H(d0, tokens of block 1)       equal digests mean equal prefixes

An engine identifies its blocks by these digests. A frontend with the same key and identity computes the same digests for a prompt, so
it can tell which engine has the prompt's prefix cached.
"""

from array import array
from collections.abc import Mapping
from hashlib import blake2b

from octavo.messages import AddRequest

SHORT = 8  # bytes of a digest that a frontend stores: among a million blocks, a collision occurs once in 40 million times


class Digests:
    def __init__(self, key: bytes, identity: bytes) -> None:
        """`identity`: everything that must be equal for two caches to hold equal bytes."""
        self._hash = blake2b(key=key, digest_size=32)  # keyed once, then copied for every digest
        self.key, self.identity = key, identity

    def root(self, message: AddRequest) -> bytes:
        """Returns the start of a request's digest chain. It depends on the offset, because keys are stored rotated by positions."""
        state = self._hash.copy()
        state.update(b"\0".join((self.identity, str(message.position_offset).encode(), message.cache_salt.encode())))
        return state.digest()

    def extend(
        self, digests: list[bytes], root: bytes, token_ids: "array[int]", block_size: int, count: int, extras: Mapping[int, bytes]
    ) -> None:
        """Appends digests to the list until there are `count`. `extras`: additional bytes that a digest covers besides its tokens."""
        parent = digests[-1] if digests else root
        for start in range(len(digests) * block_size, count * block_size, block_size):
            state = self._hash.copy()
            state.update(parent)
            state.update(token_ids[start : start + block_size])
            if extras:
                state.update(extras.get(start // block_size, b""))
            parent = state.digest()
            digests.append(parent)

    def of_prompt(self, message: AddRequest, block_size: int) -> list[bytes]:
        """Returns the short digests of a prompt: of its full blocks before the last token, which is never looked up."""
        digests: list[bytes] = []
        token_ids, count = array("i", message.prompt_token_ids), max(0, len(message.prompt_token_ids) - 1) // block_size
        self.extend(digests, self.root(message), token_ids, block_size, count, message.extras)
        return [digest[:SHORT] for digest in digests]
