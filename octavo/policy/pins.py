"""`Pins`: prefixes that are held for future requests.

    begin      a request that computes a prefix arrives: its blocks are counted, and its prompt is cut to whole blocks
    settle     that request has ended: the pin takes over its blocks before they are freed
    note       another request was admitted: the tokens it found in pinned blocks are counted
    release    the pin expires, or is released explicitly

A pin holds blocks as a block table does, so they are neither free nor evicted. It holds the blocks that a hit of the whole prefix
needs: all blocks of a full group, and of a group with a window those that the window sees from the prefix's end. Blocks are counted
when the request arrives, before they are computed. Pins with a common prefix share its blocks, which are counted once.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Literal

from octavo.errors import RequestError
from octavo.messages import AddRequest, Ending, Limits, PinState, SchedulerStats
from octavo.policy.block_pool import BlockKey
from octavo.policy.kv_manager import KVManager
from octavo.policy.prefix_matcher import PrefixHit
from octavo.policy.request import Sequence, prefix_in_use
from octavo.sampling_params import SamplingParams

OnChange = Callable[[Literal["pin", "unpin"], int, int], None]  # event, number of blocks and tokens of the pin
COMPUTE = SamplingParams(max_tokens=1, temperature=0.0)  # sampling of a request that computes a prefix: its token is discarded


@dataclass(slots=True, eq=False)
class Pin:
    pin_id: str
    num_prompt: int  # tokens of the prompt that it was made from
    num_tokens: int  # the part of those that fills whole blocks
    keys: list[BlockKey]  # of the blocks that a hit of the whole prefix needs
    ends: float | None  # expiry by the clock; None: until it is released
    hits: int
    tokens_saved: int
    blocks: list[int] = field(default_factory=list)  # empty until it is computed
    states: list[int] = field(default_factory=list)  # of a recurrent model: the slot of the state after the prefix
    requests: set[str] = field(default_factory=set)  # the requests that compute it

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.num_prompt, self.num_tokens, len(self.keys)


class Pins:
    def __init__(self, kv: KVManager, limits: Limits, stats: SchedulerStats, clock: Callable[[], float]) -> None:
        self._kv = kv
        self._limits = limits
        self._stats = stats
        self._clock = clock
        self._span = lcm(*kv.spans)  # a prefix of a multiple of this length ends at a block boundary of every cache group
        self._pins: dict[str, Pin] = {}  # oldest first
        self._keys: Counter[BlockKey] = Counter()  # block -> number of pins that hold it, or will
        self._holder: dict[int, Pin] = {}  # block -> the oldest pin that holds it
        self.on_change: OnChange = lambda what, num_blocks, num_tokens: None  # a temporary observer sets its own callback here
        self.version = 0  # incremented when a pin is created, computed or removed

    def __contains__(self, pin_id: str) -> bool:
        return pin_id in self._pins

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are pinned, or will be once they are computed."""
        return len(self._keys)

    @property
    def num_holders(self) -> Counter[int]:
        """How many pins hold each block."""
        return Counter(block for pin in self._pins.values() for block in pin.blocks)

    def states(self) -> list[PinState]:
        return [
            PinState(pin.pin_id, bool(pin.blocks), *pin.sizes, pin.hits, pin.tokens_saved, self._left(pin)) for pin in self._pins.values()
        ]

    # --- making one --------------------------------------------------------------------------------------------------

    def begin(self, message: AddRequest, most_beams: int) -> AddRequest:
        """Returns the request with its prompt cut to whole blocks, or refuses it. `most_beams`: blocks that a beam search may grow to"""
        order, prompt = message.pin, self._whole_blocks(message.prompt_token_ids)
        assert order is not None and message.params.n == message.params.max_tokens == 1
        keys = self._keys_of(prompt, message)
        pin = self._pins.get(order.pin_id)
        if pin is None:
            self._check_room(keys, most_beams)
            self._check_states()
            ends = None if order.seconds is None else self._clock() + order.seconds
            sizes = len(message.prompt_token_ids), len(prompt)
            pin = self._pins[order.pin_id] = Pin(order.pin_id, *sizes, keys, ends, order.hits, order.tokens_saved)
            self._keys.update(keys)
        elif pin.keys != keys:
            raise prefix_in_use(order.pin_id)
        pin.requests.add(message.request_id)
        self.version += 1
        return replace(message, prompt_token_ids=prompt)

    def _whole_blocks(self, prompt: list[int]) -> list[int]:
        """Returns the prefix of a prompt that fills whole blocks, and refuses a prompt that is too short."""
        if not self._kv.caching:
            raise RequestError("prefix caching is off, and a pinned prefix is a part of it: leave out --no-enable-prefix-caching", "prompt")
        if len(prompt) < self._span:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, and whole blocks of {self._span} are held: it must have at least {self._span}",
                "prompt",
                "prefix_too_short",
            )
        return prompt[: len(prompt) // self._span * self._span]

    def _keys_of(self, prompt: list[int], message: AddRequest) -> list[BlockKey]:
        kv, digests = self._kv, list[bytes]()
        root = kv.digests.root(message)
        kv.digests.extend(digests, root, array("i", prompt), kv.block_size, len(prompt) // kv.block_size, message.extras)
        return kv.keys_of(digests)

    def _check_room(self, keys: list[BlockKey], most_beams: int) -> None:
        """Refuses a pin that is too large. A pin must leave room for the longest request, which would otherwise wait for ever."""
        needed, pinned, most = sum(key not in self._keys for key in keys), self.num_blocks, self._limits.max_pinned_blocks
        if pinned + needed > most:
            raise RequestError(
                f"the prefix needs {needed} blocks and {pinned} are pinned, but at most {most} may be (--max-pinned-blocks)",
                "prompt",
                "pinned_blocks_exceeded",
            )
        longest = min(self._limits.max_model_len - 1, self._limits.cache_tokens)  # the last token is never computed
        usable, kept = self._kv.pool.num_blocks - 1, max(self._kv.blocks_for(longest), most_beams)
        if pinned + needed + kept > usable:
            raise RequestError(
                f"the prefix needs {needed} blocks and {pinned} are pinned, but of the {usable} blocks of the KV cache {kept} must stay "
                f"for {'a beam search that runs' if kept == most_beams else f'a request of {longest + 1} tokens'}; lower --max-model-len "
                "or enlarge the KV cache (--kv-cache-memory-bytes, --num-gpu-blocks-override)",
                "prompt",
                "pinned_blocks_exceeded",
            )

    def _check_states(self) -> None:
        """Refuses a pin of a recurrent model if pins may hold no further state."""
        states = self._kv.states
        if states is not None and len(self._pins) >= states.most_pinned:
            raise RequestError(
                f"a pinned prefix holds a recurrent state, and at most {states.most_pinned} may be pinned; raise --state-cache-share",
                "prompt",
                "pinned_blocks_exceeded",
            )

    def settle(self, seq: Sequence, reason: Ending) -> None:
        """Handles the end of a request that computes a prefix. If it ended normally, the pin takes over its blocks."""
        assert seq.request.pin is not None
        pin = self._pins.get(seq.request.pin.pin_id)
        if pin is None:
            return  # released in the meantime
        pin.requests.discard(seq.request.request_id)
        if reason in ("stop", "length") and not pin.blocks:
            pin.blocks = self._kv.find_all(seq)
            self._kv.pool.pin(pin.blocks)
            if self._kv.states is not None:
                pin.states = [self._kv.states.find(seq, pin.num_tokens)]
                self._kv.states.pool.pin(pin.states)
            self._know_holders()
            self.on_change("pin", len(pin.blocks), pin.num_tokens)
        if not pin.blocks and not pin.requests:
            self._drop(pin)
        self.version += 1

    def _know_holders(self) -> None:
        self._holder = {block: pin for pin in reversed(self._pins.values()) for block in pin.blocks}

    # --- using one ---------------------------------------------------------------------------------------------------

    def note(self, seq: Sequence, hit: PrefixHit) -> int:
        """Counts the tokens that an admitted request found in pinned blocks, for the oldest pin that holds them. Returns the tokens."""
        if not self._holder or seq.request.pin is not None:
            return 0
        table = hit.tables[0]
        last = next((index for index in reversed(range(len(table))) if table[index] in self._holder), None)
        if last is None:
            return 0
        pin, tokens = self._holder[table[last]], (last + 1) * self._kv.spans[0]
        pin.hits += 1
        pin.tokens_saved += tokens
        self._stats.pin_hits += 1
        self._stats.pin_tokens += tokens
        return tokens

    # --- ending one --------------------------------------------------------------------------------------------------

    def release(self, pin_id: str) -> list[str]:
        """Ends a pin, if it exists. Other holders keep its blocks. Returns the requests that still compute it."""
        pin = self._pins.get(pin_id)
        if pin is None:
            return []
        self._drop(pin)
        return sorted(pin.requests)

    def expire(self) -> None:
        """Ends the pins that have expired. A pin that is still being computed ends when that is done."""
        now = self._clock()
        for pin in [pin for pin in self._pins.values() if pin.blocks and pin.ends is not None and pin.ends <= now]:
            self._drop(pin)

    def seconds_left(self) -> float | None:
        """Returns the seconds until the next pin expires, or None if none does."""
        found = [left for pin in self._pins.values() if pin.blocks and (left := self._left(pin)) is not None]
        return min(found, default=None)

    def _left(self, pin: Pin) -> float | None:
        return None if pin.ends is None else max(0.0, pin.ends - self._clock())

    def _drop(self, pin: Pin) -> None:
        del self._pins[pin.pin_id]
        self._keys -= Counter(pin.keys)
        if pin.blocks:
            self._kv.pool.unpin(pin.blocks)
            if self._kv.states is not None:
                self._kv.states.pool.unpin(pin.states)
            self._know_holders()
            self.on_change("unpin", len(pin.blocks), pin.num_tokens)
        self.version += 1

    def check(self) -> None:
        """Asserts the invariants of pins: their blocks are those that their keys find, and all are counted."""
        pool = self._kv.pool
        assert pool.pinned == self.num_holders, "pool and pins disagree on what is pinned"
        if self._kv.states is not None:
            pinned = Counter(slot for pin in self._pins.values() for slot in pin.states)
            assert self._kv.states.pool.pinned == pinned, "pins and state slots disagree"
        assert self._keys == Counter(key for pin in self._pins.values() for key in pin.keys), "pinned blocks are counted wrong"
        for pin in self._pins.values():
            assert pin.blocks or pin.requests, f"nobody computes pin {pin.pin_id}"
            assert not pin.blocks or [pool.lookup(key) for key in pin.keys] == pin.blocks, f"pin {pin.pin_id} cannot be found"
        longest = min(self._limits.max_model_len - 1, self._limits.cache_tokens)
        assert not self._pins or self.num_blocks + self._kv.blocks_for(longest) < pool.num_blocks, "no room for the longest request"
