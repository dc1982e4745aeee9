"""How the next token is chosen: `SamplingParams`, or how a whole answer is: `BeamSearchParams`.

Both are checked at construction, and `SamplingParams` at each assignment. These checks cover type, finiteness and meaning only. Limits
that depend on a model (vocabulary, context) or on a server are checked where they are known.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Literal

from octavo.errors import RequestError
from octavo.structured_outputs import StructuredOutputsParams, structured_outputs
from octavo.vllm_names import SAMPLING, names_explained

MAX_SEED = 2**64 - 1
# Numbers become float32 where they meet logits: a larger one would become infinite, a smaller one 0, which is as good unless it divides.
LARGEST_FLOAT = float.fromhex("0x1.fffffep127")
MOST_PENALTY = 16.0  # of a length: its power still is a number
LEAST_FLOAT = float.fromhex("0x1p-126")


class _UnsetInt(int):
    """A default that differs from the same number set by the user: a model's own default may replace it."""


class _UnsetFloat(float):
    """The same for a fraction."""


def is_unset(value: object) -> bool:
    return isinstance(value, (_UnsetInt, _UnsetFloat))


class RequestOutputKind(Enum):
    """What `AsyncLLM.generate` yields while an answer is generated. The numbers are those of vLLM."""

    CUMULATIVE = 0  # all of the answer so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # nothing before the end


@names_explained(SAMPLING)
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Every assignment is checked like the construction. The engine copies these, so a change concerns later requests only."""

    n: int = 1
    temperature: float = _UnsetFloat(1.0)  # 0 = greedy
    top_p: float = _UnsetFloat(1.0)
    top_k: int = _UnsetInt(0)  # 0 or -1: off
    min_p: float = _UnsetFloat(0.0)
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = _UnsetFloat(1.0)
    stop: Sequence[str] = ()  # one string or several; kept as a tuple
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = _UnsetInt(16)  # None: to the end of the context
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit
    allowed_token_ids: Sequence[int] | None = None  # no other id is ever sampled
    bad_words: Sequence[str] = ()  # never completed in the answer, as the tokens that usually spell them
    detokenize: bool = True  # False: token ids alone, no text
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False  # keep the stop string, or the text of the end id
    logprobs: int | None = None  # how many alternatives to report beside the chosen token
    prompt_logprobs: int | None = None  # the same for every token of the prompt but its first; reads no cache
    structured_outputs: StructuredOutputsParams | None = None  # the form the answer must have; a mapping with the same names is taken, too
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE  # of `AsyncLLM.generate`
    greedy: bool = field(init=False)  # set last: it is there once the rest is checked

    def __setattr__(self, name: str, value: Any) -> None:
        set_ = object.__setattr__
        if not hasattr(self, "greedy"):  # under construction
            set_(self, name, value)
            return
        checked = replace(self, **{name: value})
        for each in fields(self):
            set_(self, each.name, getattr(checked, each.name))

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "bad_words", _strings("bad_words", self.bad_words))
        set_(self, "stop", _strings("stop", self.stop))
        set_(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        _integer("n", self.n, 1)
        _number("temperature", self.temperature, 0.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, LEAST_FLOAT)  # logits are divided by it
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if type(getattr(self, name)) is not bool:
                raise _bad(name, getattr(self, name), "true or false")
        if self.logit_bias is not None:
            set_(self, "logit_bias", _bias("logit_bias", self.logit_bias))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise _bad("allowed_token_ids", self.allowed_token_ids, "at least one token id")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings are found in text, and detokenize is false; use stop_token_ids", "stop")
        if self.seed is not None:
            _integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0)
        if self.structured_outputs is not None:
            set_(self, "structured_outputs", structured_outputs(self.structured_outputs))
            for name in ("allowed_token_ids", "bad_words"):
                if getattr(self, name):
                    raise RequestError(f"{name} and structured_outputs exclude each other: nothing might be left to say", name)
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _bad("output_kind", self.output_kind, f"one of {', '.join(map(str, RequestOutputKind))}")
        set_(self, "greedy", self.temperature == 0.0)

    def __copy__(self) -> "SamplingParams":
        copied = object.__new__(SamplingParams)
        for name in SamplingParams.__slots__:  # without checks: this is done for every request
            object.__setattr__(copied, name, getattr(self, name))
        return copied

    def clone(self) -> "SamplingParams":
        """Returns a copy that shares nothing with this one."""
        return deepcopy(self)

    @property
    def filtered(self) -> bool:
        """Whether tokens are left out before one is drawn; the best one is taken whatever is left out beside it."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before tokens are drawn. Bad words change them, too, but the engine has these as ids."""
        penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return bool(penalised or self.min_tokens or self.logit_bias or self.allowed_token_ids)

    def for_chat(self) -> "SamplingParams":
        """The same, but an answer of no stated length may take the rest of the context."""
        return self.with_defaults({"max_tokens": None})

    def with_defaults(self, values: Mapping[str, object]) -> "SamplingParams":
        """Returns the same parameters, with `values` in the fields that the user has not set."""
        wanted = {name: value for name, value in values.items() if is_unset(getattr(self, name))}
        return replace(self, **wanted) if wanted else self  # type: ignore[arg-type]


@names_explained(SAMPLING)
@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How a beam search goes: the fields of vLLM, and `early_stopping` of transformers."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # changes nothing: beams are ranked by the model's own logprobs
    length_penalty: float = 1.0  # answers are ranked by the sum of their logprobs over length ** length_penalty
    include_stop_str_in_output: bool = False  # keep the end id, and its text
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.beam_width, 1)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _number("temperature", self.temperature, 0.0)
        _number("length_penalty", self.length_penalty, -MOST_PENALTY, MOST_PENALTY)
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if type(getattr(self, name)) is not bool:
                raise _bad(name, getattr(self, name), "true or false")
        if type(self.early_stopping) is not bool and self.early_stopping != "never":
            raise _bad("early_stopping", self.early_stopping, 'true, false or "never"')


def _bad(name: str, value: object, wanted: str) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {_show(value)}", name)


def _show(value: object) -> str:
    text = repr(value[:60] if isinstance(value, (str, list, tuple)) else value)  # no more of it would be shown
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(name: str, value: object, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        bounds = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
        raise _bad(name, value, bounds)


def _number(name: str, value: object, low: float, high: float = LARGEST_FLOAT, open_low: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]
        wanted = f"a finite number {'above' if open_low else 'of at least'} {low:g}"
        tell_high = high < LARGEST_FLOAT or (is_number and value > high)  # type: ignore[operator]
        raise _bad(name, value, wanted + (f" and at most {high:g}" if tell_high else ""))


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) and item for item in items):
        raise _bad(name, value, "a non-empty string or a list of them")
    return tuple(items)


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, range)) or not all(type(item) is int and item >= 0 for item in value):
        raise _bad(name, value, "a list of token ids")
    return tuple(value)


def _bias(name: str, value: object) -> dict[int, float]:
    """Keys may be text, as JSON has them."""
    wanted = "token ids, each with a finite number"
    if not isinstance(value, Mapping):
        raise _bad(name, value, wanted)
    bias = {}
    for key, amount in value.items():
        token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 12 else key
        if type(token) is not int or token < 0:
            raise _bad(name, key, wanted)
        _number(name, amount, -LARGEST_FLOAT)
        bias[token] = float(amount)
    return bias
