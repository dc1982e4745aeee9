"""The hash chain that identifies cached blocks (`Digests`), and the longest cached prefix of a sequence (`PrefixMatcher`).

    root      H(identity, salt, offset)      lookups never match across identities, salts or offsets of positions
    d0        H(root, tokens of block 0)
    d1        H(d0, tokens of block 1)       equal digests mean equal prefixes

The matcher hashes no more of a sequence than it needs to:

    match         looks up one digest after the other until a block is missing, and hashes little behind that block
    links_left    bounds the hashing of one step, so that a burst of long prompts is matched over several steps
    _copy         copies the digests of another sequence that begins with the same tokens
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import repeat
from weakref import WeakValueDictionary

from octavo.messages import AddRequest, HitReason
from octavo.policy.block_pool import NULL_BLOCK, BlockKey, BlockPool
from octavo.policy.cache_group import UNBOUNDED, CacheGroup
from octavo.policy.request import Sequence
from octavo.policy.states import States

SHORT = 8  # bytes of a digest that a frontend stores: among a million blocks, a collision occurs once in 40 million times


class Digests:
    """An engine identifies its blocks by these digests. A frontend with the same key and identity computes the same digests for a prompt,
    so it can tell which engine has the prompt's prefix cached.
    """

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


@dataclass(frozen=True, slots=True)
class PrefixHit:
    tables: list[list[int]]  # one per group; null where nothing is read
    num_tokens: int
    common: int  # tokens whose blocks were found: more, if no state was kept after the last of them
    reason: HitReason  # why it ends where it does
    missed: BlockKey | None = None  # the block that was not found
    misses: tuple[BlockKey, ...] = ()  # all that were not found: the hit cannot be longer before one of them is sealed


class PrefixMatcher:
    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        caching: bool,
        digests: Digests,
        pending: dict[BlockKey, Sequence],
        groups: tuple[CacheGroup, ...],
        force_miss: bool,
        states: States | None = None,
    ) -> None:
        """`pending`: block -> the sequence that computes it; the manager's own. `states`: of a recurrent model"""
        self.links_left = UNBOUNDED  # how many links may still be hashed in this step
        self._pool = pool
        self._block_size = block_size
        self._caching = caching
        self._digests = digests
        self._pending = pending
        self._groups = groups
        self._states = states
        self._lookup: Callable[[BlockKey], int | None] = (lambda key: None) if force_miss else pool.index.get
        self._longest: WeakValueDictionary[bytes, Sequence] = WeakValueDictionary()  # first digest -> the sequence with the most digests

    def extend(self, seq: Sequence, count: int) -> None:
        """Hashes the sequence up to `count` links."""
        self._digests.extend(seq.digests, seq.request.root, seq.token_ids, self._block_size, count, seq.request.extras)

    def match(self, seq: Sequence) -> PrefixHit | None:
        """The longest cached prefix that all groups can use, excluding the last token: that one is always computed.

        Returns None if it takes more hashing than `links_left` allows.
        """
        if not self._caching or not seq.reads_cache:
            return PrefixHit([[] for _ in self._groups], 0, 0, "off")
        if self.links_left <= 0:
            return None
        longest = (seq.num_tokens - 1) // self._block_size  # in links
        misses: list[BlockKey] = []
        common = cut = self._fit_all(seq, longest, misses)
        while cut is not None and self._states is not None and (reach := self._states.reach(seq.digests, cut)) < cut:
            cut = self._fit_all(seq, reach, [])
        if cut is None or common is None:
            return None
        tables = [self._found(number, seq, cut) for number in range(len(self._groups))]
        numbers = cut * self._block_size, common * self._block_size
        missed = next((key for key in misses if key in self._pending), misses[-1]) if misses else None
        if cut < common:
            reason = self._state_reason(seq, cut, common)
        elif missed is None:
            reason = "end" if longest else "short"
        else:
            reason = self._miss_reason(missed, cut)
        return PrefixHit(tables, *numbers, reason, missed, tuple(misses))

    def _fit_all(self, seq: Sequence, cut: int, misses: list[BlockKey]) -> int | None:
        """Returns the longest prefix of at most `cut` links that all groups can use, and adds blocks that they lack to `misses`.

        Returns None if it takes too much hashing.
        """
        number = content = 0
        while content < len(self._groups):  # each group may shorten it, until it is stable
            fit = self._fit(number, seq, cut, misses)
            if fit is None:
                return None
            content = content + 1 if fit == cut else 1
            cut, number = fit, (number + 1) % len(self._groups)
        return cut

    def _state_reason(self, seq: Sequence, cut: int, common: int) -> HitReason:
        assert self._states is not None
        return "state_evicted" if self._states.was_evicted(seq.digests[cut:common]) else "no_state"

    def _fit(self, number: int, seq: Sequence, cut: int, misses: list[BlockKey]) -> int | None:
        """Returns the longest prefix of at most `cut` links that this group can use, and adds the block it lacks for more to `misses`.

        Returns None if it takes too much hashing.
        """
        group = self._groups[number]
        fit = group.fit(cut // group.links, group.links * self._block_size, partial(self._find, number, seq))
        if fit is None:
            return None
        end, missing = fit
        if missing is not None:
            misses.append((number, seq.digests[(missing + 1) * group.links - 1]))
        return end * group.links

    def _found(self, number: int, seq: Sequence, cut: int) -> list[int]:
        """Returns the table of a hit of `cut` links: null blocks where a query at its end does not read."""
        group = self._groups[number]
        end = cut // group.links
        first = min(end, group.first_read(cut * self._block_size) // (group.links * self._block_size))
        blocks = [block for block in self._find(number, seq, first, end) or () if block is not None]
        assert len(blocks) == end - first, "a block of the hit is not in the index"
        return [NULL_BLOCK] * first + blocks

    def _find(self, number: int, seq: Sequence, first: int, end: int) -> list[int | None] | None:
        """Returns the cached blocks that a table would have at these indices, or None if that takes too much hashing."""
        links = self._groups[number].links
        if not self._hash(seq, end * links):
            return None
        return list(map(self._lookup, zip(repeat(number), seq.digests[(first + 1) * links - 1 : end * links : links])))

    def _hash(self, seq: Sequence, count: int) -> bool:
        """Extends the digests to `count` links, or to as many as `links_left` allows. Returns whether there are `count`."""
        while (lacking := count - len(seq.digests)) > 0 < self.links_left:
            first = not seq.digests
            hashed = 1 if first else min(lacking, self.links_left)
            self.links_left -= hashed
            self.extend(seq, len(seq.digests) + hashed)
            alike = self._longest.get(seq.digests[0])
            if first and alike is not None:
                self._copy(seq, alike)
            if alike is None or len(alike.digests) < len(seq.digests):
                self._longest[seq.digests[0]] = seq
        return lacking <= 0

    def _copy(self, seq: Sequence, other: Sequence) -> None:
        """Copies the digests of the tokens that both begin with: comparing ids takes a fiftieth of the time that hashing them takes."""
        if seq.request.extras or other.request.extras:
            return
        common, end = len(seq.digests), min(len(other.digests), seq.num_tokens // self._block_size)
        while common < end:
            middle = (common + end + 1) // 2
            part = slice(common * self._block_size, middle * self._block_size)
            if seq.token_ids[part] == other.token_ids[part]:
                common = middle
            else:
                end = middle - 1
        seq.digests += other.digests[len(seq.digests) : common]

    def hash_all(self, seq: Sequence) -> bool:
        """Hashes the rest of the sequence. Returns False if that is more than `links_left` allows."""
        return not self._caching or self._hash(seq, seq.num_tokens // self._block_size)

    def any_cached(self, keys: tuple[BlockKey, ...]) -> bool:
        return any(self._lookup(key) is not None for key in keys)

    def wait_for(self, seq: Sequence, missed: BlockKey) -> BlockKey:
        """Returns the last block of the prefix that another sequence is computing, where `missed` is the first."""
        number = missed[0]
        links = self._groups[number].links
        keys = list(zip(repeat(number), seq.digests[links - 1 :: links]))
        first = keys.index(missed)
        return keys[first + bisect_left(range(first + 1, len(keys)), True, key=lambda index: keys[index] not in self._pending)]

    def _miss_reason(self, missed: BlockKey, num_matched: int) -> HitReason:
        if missed in self._pool.evicted:
            return "evicted"
        return "differs" if num_matched else "cold"
