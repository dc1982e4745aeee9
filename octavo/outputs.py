"""The results that a user gets: `RequestOutput` with one `CompletionOutput` per sample, or `TextDelta`s while it streams."""

from dataclasses import dataclass, field

from octavo.messages import FinishReason, LifeRecord, PinState


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float
    rank: int | None = None  # 1 is the most likely
    decoded_token: str | None = None


TokenChoices = dict[int, Logprob]  # token id -> its logprob: the chosen token and the alternatives asked for


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenChoices] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that matched; after an error, the reason


@dataclass(slots=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenChoices | None] | None  # if requested; None for the first token, which follows nothing
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: LifeRecord


@dataclass(slots=True)
class BeamSearchSequence:
    """An answer of a beam search."""

    tokens: list[int]  # with those of the prompt
    logprobs: list[TokenChoices]  # of each generated token
    cum_logprob: float = 0.0
    text: str | None = None  # with that of the prompt; None without a tokenizer
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @staticmethod
    def of(output: RequestOutput, sample: CompletionOutput, prompt: str | None, keep_end: bool) -> "BeamSearchSequence":
        """`prompt`: its text, if there is one. `keep_end`: the end id is one of the tokens"""
        ended = sample.finish_reason == "stop" and not keep_end
        return BeamSearchSequence(
            tokens=output.prompt_token_ids + (sample.token_ids[:-1] if ended else sample.token_ids),
            logprobs=sample.logprobs or [],
            cum_logprob=sample.cumulative_logprob or 0.0,
            text=None if prompt is None else prompt + sample.text,
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
        )


@dataclass(slots=True)
class BeamSearchOutput:
    sequences: list[BeamSearchSequence]  # as many as the search was wide, best first


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pinned prefix. With several engines, hits and tokens are sums over all."""

    name: str
    prompt_tokens: int  # of the prompt that it was made of
    num_tokens: int  # the first of those, which are held: whole blocks of them
    num_blocks: int  # in each engine
    hits: int  # requests that found a part of it
    tokens_saved: int  # that were not computed again
    seconds_left: float | None  # None: until it is released
    held: bool = True  # by all engines; or one of them computes it, perhaps again

    @staticmethod
    def of(name: str, state: PinState) -> "PinnedPrefix":
        sizes = state.prompt_tokens, state.num_tokens, state.num_blocks
        return PinnedPrefix(name, *sizes, state.hits, state.tokens_saved, state.seconds_left, state.held)


@dataclass(slots=True)
class TextDelta:
    """An update of one sample."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    life: LifeRecord | None = None  # with the first token and at the end
    logprobs: list[TokenChoices] | None = None  # of the new tokens, if requested
    prompt_logprobs: list[TokenChoices | None] | None = None  # if requested, with the first token of the request
    error: str | None = None  # the reason, if finish_reason is error
    code: str | None = None  # a code for programs, such as numerical_error
