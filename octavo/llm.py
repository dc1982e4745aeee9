"""`LLM`: the offline API. Text becomes ids here, the engine works on ids, and ids become text here again.

Threads share it in turns. A turn is one step, which brings updates to every call and stream. A thread without updates takes the next
turn.
"""

import inspect
import itertools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Never, Unpack

from octavo import log
from octavo.config import EngineConfig, debug_from_environment, log_level
from octavo.engine.batch import (
    DeferredInterrupt,
    Encoded,
    FairLock,
    Reader,
    beam_output,
    each_of,
    numbered,
    prompt_named,
    spread,
    spread_priority,
)
from octavo.engine.build import build_engine
from octavo.engine.core import EngineCore
from octavo.engine.output import OutputProcessor, check_params
from octavo.errors import EngineError, RequestError
from octavo.grammar.text import check_limits
from octavo.inputs import Conversation, Prompt, Settings, as_conversations, as_prompts, check_names
from octavo.loading.text_side import open_text_side
from octavo.messages import AddRequest, Beams, PinOrder, SchedulerStats
from octavo.metrics import Metric, engine_metrics
from octavo.outputs import BeamSearchOutput, PinnedPrefix, RequestOutput, TextDelta
from octavo.policy.pins import COMPUTE
from octavo.policy.request import check_pin, no_such_prefix, prefix_in_use
from octavo.progress import GenerateProgress
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
from octavo.text.prompt import template_options
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools import check_tools
from octavo.vllm_names import ATTRIBUTES, explained, refuse_arguments


def _signature() -> inspect.Signature:
    """The settings with their types and defaults. `model` may be given without its name."""
    model, *others = inspect.signature(EngineConfig).parameters.values()
    return inspect.Signature([model.replace(kind=model.POSITIONAL_OR_KEYWORD), *others])


class LLM:
    """A model, ready to generate. Without `model` it is the default one. Use it in a `with` block, or `close` it.

    Several threads may use one at the same time: their requests run in the same steps, and each call gets its own outputs. A stream
    belongs to one thread at a time. A process that was forked cannot use it.
    """

    __signature__ = _signature()  # so that help() shows every setting

    def __init__(self, model: str | None = None, **settings: Unpack[Settings]) -> None:
        """docs/python.md describes the settings. They are the fields of `EngineConfig`."""
        check_names(settings)
        self._open(EngineConfig(model=model, **settings))

    @classmethod
    def from_config(cls, config: EngineConfig, log_default: str = "INFO") -> "LLM":
        """`log_default`: how much is logged if OCTAVO_LOG_LEVEL is not set."""
        llm = cls.__new__(cls)
        llm._open(config, log_default)
        return llm

    def _open(self, config: EngineConfig, log_default: str = "INFO") -> None:
        log.setup(log_level(log_default))
        debug = debug_from_environment()
        if debug.switched_on:
            log.logger.warning("OCTAVO_DEBUG is set, for tests only: %s", ", ".join(debug.switched_on))
        self.config = config
        text = open_text_side(config)
        self.model_name = text.source.name
        self._tokenizer = text.tokenizer
        self.sampling_defaults = text.sampling_defaults
        self.encoder = text.encoder
        self._engine: EngineCore | None = build_engine(config, text.source, text.model, debug, text.give_tokenizer)
        self._outputs = OutputProcessor(self._tokenizer, self._engine.abort)
        self._ids = map(str, itertools.count())
        self._prompt_tokens = 0  # of all requests
        self._process = os.getpid()
        self._lock = FairLock()
        self._chores: deque[Callable[[], None]] = deque()  # done at the end of a turn

    # --- what users call ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Completes each prompt, with one `sampling_params` for all or one for each. Returns results in the order of the prompts.

        Without `sampling_params`, as the model's makers recommend (generation_config.json).

        `priority`: lower runs first, where scheduling_policy is priority.
        """
        refuse_arguments(LLM.generate, unknown)
        encoded = each_of(self.encoder.encode, as_prompts(prompts))
        return self._run(encoded, self._spread(sampling_params, len(encoded)), use_tqdm, spread_priority(priority, len(encoded)))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        priority: int | Sequence[int] = 0,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several.

        What `sampling_params` leaves open is as the model's makers recommend (generation_config.json), the length up to the rest of the
        context.

        `tools`: what an answer may call, in OpenAI's form; the call is a part of the answer's text. `chat_template`: the text of a
        template to use instead of the model's. `add_generation_prompt`: the template begins an answer; without it, it does so unless
        `continue_final_message` is set, with which the answer continues the last message.
        """
        refuse_arguments(LLM.chat, unknown)
        options = template_options(chat_template_kwargs, add_generation_prompt, continue_final_message)
        if tools:
            self.encoder.add_tool_template()
        checked, conversations = check_tools(tools) or None, as_conversations(messages)
        encoded = each_of(partial(self.encoder.encode_chat, tools=checked, options=options, template=chat_template), conversations)
        wanted = [self._for_chat(one) for one in spread(sampling_params or SamplingParams(), len(encoded))]
        find_ends = partial(self.encoder.message_ends, tools=checked, options=options, template=chat_template)
        ends = list(map(find_ends, conversations, encoded)) if self._core.scheduler.kv.keeps_states else None
        return self._run(encoded, wanted, use_tqdm, spread_priority(priority, len(encoded)), ends=ends)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        **unknown: Never,
    ) -> list[BeamSearchOutput]:
        """Searches for the likeliest completions of each prompt. Returns results in the order of the prompts, each with the best first."""
        refuse_arguments(LLM.beam_search, unknown)
        if not isinstance(params, BeamSearchParams):
            raise RequestError("params must be BeamSearchParams", "params")
        encoded = each_of(self.encoder.encode, as_prompts(prompts))
        wanted = SamplingParams(
            n=params.beam_width,
            max_tokens=params.max_tokens,
            ignore_eos=params.ignore_eos,
            include_stop_str_in_output=params.include_stop_str_in_output,
            logprobs=min(2 * params.beam_width, self.config.max_logprobs),
        )
        beams = Beams(params.beam_width, params.length_penalty, params.early_stopping)
        outputs = self._run(encoded, [wanted] * len(encoded), use_tqdm, spread_priority(priority, len(encoded)), beams)
        return [beam_output(output, self._tokenizer, params.include_stop_str_in_output) for output in outputs]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[TextDelta, None, None]:
        """Completes one prompt and yields its text as it comes. Leaving the loop early aborts the request."""
        return self._stream([next(self._ids)], [self.encoder.encode(prompt)], self._spread(sampling_params, 1))

    def stream_batch(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        checkpoints: Sequence[list[int]] | None = None,
    ) -> Generator[tuple[int, TextDelta], None, None]:  # fmt: skip
        """Completes prompts in one batch and yields their texts as they come, each piece with the index of its prompt.

        Leaving the loop early aborts all of them. `checkpoints`: of each prompt, for recurrent models, as in `AddRequest`
        """
        encoded = each_of(self.encoder.encode, as_prompts(prompts))
        ids = [next(self._ids) for _ in encoded]
        return numbered(ids, self._stream(ids, encoded, self._spread(sampling_params, len(encoded)), checkpoints))

    def stream_chat(self, messages: Conversation, sampling_params: SamplingParams | None = None) -> Generator[TextDelta, None, None]:
        """Answers one conversation and yields its text as it comes."""
        wanted = self._for_chat(sampling_params or SamplingParams())
        encoded = self.encoder.encode_chat(messages)
        ends = [self.encoder.message_ends(messages, encoded)] if self._core.scheduler.kv.keeps_states else None
        return self._stream([next(self._ids)], [encoded], [wanted], ends)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what `generate` uses without `sampling_params`: what the model's makers recommend."""
        return SamplingParams().with_defaults(self.sampling_defaults).clone()

    def get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init is set", "skip_tokenizer_init")
        return self._tokenizer

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence, prompt and answer: the number asked for, or the one that start-up found to fit."""
        return self._core.scheduler.limits.max_model_len

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks except those of pinned prefixes. Blocks in use are not found again."""
        with self._turn():
            self._core.scheduler.kv.forget()

    def pin_prefix(
        self, name: str, prompt: Prompt | None = None, messages: Conversation | None = None, ttl: float | None = None
    ) -> PinnedPrefix:
        """Computes a prompt, or the beginning of a conversation, and holds its whole blocks for requests that begin with it.

        `ttl`: seconds from now on that it is held; without it, until `unpin_prefix`. max_pinned_blocks limits how much is held.
        """
        check_pin(name, ttl)
        if (prompt is None) == (messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        encoded = self.encoder.encode(prompt) if prompt is not None else self.encoder.encode_beginning(messages or [])
        with self._turn():
            if name in self._core.scheduler.pins:
                raise prefix_in_use(name)
        (output,) = self._run([encoded], [COMPUTE], False, [0], pin=PinOrder(name, ttl))
        if output.outputs[0].finish_reason == "error":
            raise EngineError(f"the prefix could not be computed: {output.outputs[0].stop_reason}")
        found = next((prefix for prefix in self.pinned_prefixes() if prefix.name == name), None)
        if found is None:
            raise RequestError("the prefix was released, or its ttl ended, before it was computed", "ttl", "prefix_released")
        return found

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """Returns all prefixes that are held, the oldest first."""
        with self._turn():
            return [PinnedPrefix.of(state.pin_id, state) for state in self._core.scheduler.pins.states() if state.held]

    def unpin_prefix(self, name: str) -> None:
        """Ends a pinned prefix. Requests that use it are not disturbed."""
        with self._turn():
            if name not in self._core.scheduler.pins:
                raise no_such_prefix(name)
            self._core.unpin(name)

    def stats(self) -> SchedulerStats:
        with self._turn():
            return self._core.scheduler.snapshot()

    def get_metrics(self) -> list[Metric]:
        """Returns the numbers of `stats` in the form of vLLM's, by the names that `octavo serve` reports at /metrics."""
        return engine_metrics(self.stats(), self._prompt_tokens, self.model_name)

    def close(self) -> None:
        """Frees all memory. Calls in other threads end with an EngineError. Closing twice is harmless."""
        self._in_a_turn(self._close_engine)

    def __enter__(self) -> "LLM":
        _ = self._core  # a closed one says so
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Never:
            raise AttributeError(f"LLM has no attribute {name!r}{explained(name, ATTRIBUTES)}")

    # --- how it works ------------------------------------------------------------------------------------------------

    @property
    def _core(self) -> EngineCore:
        self._check_process()
        if self._engine is None:
            raise EngineError("this LLM is closed")
        return self._engine

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise EngineError(
                f"this LLM belongs to process {self._process}, and process {os.getpid()} was forked from it: "
                "make a new LLM in each process, and start processes with spawn"
            )

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Returns a context in which only this thread uses the engine. No thread stays in it longer than a step takes."""
        self._check_process()  # a lock that another thread held when this process was forked would never be released
        with self._lock:
            if self._engine is not None:
                self._engine.scheduler.pins.expire()
            try:
                yield
            finally:
                while self._chores:
                    self._chores.popleft()()

    def _in_a_turn(self, chore: Callable[[], None]) -> None:
        """Runs some work in a turn of its own, or at the end of this turn if a finalizer or a signal handler calls it during a step."""
        if os.getpid() != self._process:
            return  # the engine belongs to another process
        self._chores.append(chore)
        if not self._lock.is_mine:
            with self._turn():
                pass

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _spread(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        return spread(self.get_default_sampling_params() if params is None else params, count)

    def _for_chat(self, params: SamplingParams) -> SamplingParams:
        return params.with_defaults(self.sampling_defaults).for_chat()

    def _add(
        self, ids: Sequence[str], encoded: Sequence[Encoded], params: Sequence[SamplingParams], priority: Sequence[int], reader: Reader,
        beams: Beams | None = None, pin: PinOrder | None = None, ends: Sequence[list[int]] | None = None,
    ) -> None:  # fmt: skip
        """Passes requests to the engine, all before its next step."""
        spelled: dict[Sequence[str], list[list[int]]] = {}  # bad words as ids, encoded once for all prompts that share them
        checked: StructuredOutputsParams | None = None  # the newest grammar, which the prompts of one call often share
        with self._turn():
            for index, request_id in enumerate(ids):
                with prompt_named(index):
                    words, form = params[index].bad_words, params[index].structured_outputs
                    if form is not None and form != checked:
                        check_limits(form)
                        checked = form
                    if words not in spelled:
                        spelled[words] = self.encoder.spellings(words)
                    text, token_ids = encoded[index]
                    check_params(params[index], self.config)
                    terms = copy(params[index]), priority[index], "", spelled[words]
                    request = AddRequest(request_id, token_ids, *terms, beams=beams, pin=pin, checkpoints=ends[index] if ends else [])
                    self._core.add(request)
                    self._prompt_tokens += len(token_ids)
                    self._outputs.add(request, text, reader)

    def _run(
        self, encoded: Sequence[Encoded], params: Sequence[SamplingParams], use_tqdm: bool, priority: Sequence[int],
        beams: Beams | None = None, pin: PinOrder | None = None, ends: Sequence[list[int]] | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        ids = [next(self._ids) for _ in encoded]
        with DeferredInterrupt() as interrupt, GenerateProgress(len(ids), use_tqdm) as progress:
            try:
                reader = Reader(progress)
                self._add(ids, encoded, params, priority, reader, beams, pin, ends)
                while len(reader.finished) < len(ids):
                    self._pump()
                    progress.show()
                    interrupt.check()
                return [reader.finished[request_id] for request_id in ids]
            finally:
                self._in_a_turn(partial(self._drop, ids))

    def _stream(
        self, ids: Sequence[str], encoded: Sequence[Encoded], params: Sequence[SamplingParams], ends: Sequence[list[int]] | None = None
    ) -> Generator[TextDelta, None, None]:
        reader = Reader()
        try:
            with DeferredInterrupt():
                self._add(ids, encoded, params, [0] * len(ids), reader, ends=ends)
            while len(reader.finished) < len(ids) or reader.updates:  # in this order: the last may come between the two
                if not reader.updates:
                    with DeferredInterrupt():
                        self._pump()
                while reader.updates:
                    yield reader.updates.popleft()
        finally:
            self._in_a_turn(partial(self._drop, ids))

    def _pump(self) -> None:
        """Runs one step. Its updates go to all readers, also in other threads and in streams that are not being read."""
        with self._turn():
            if self._engine is None:
                raise EngineError("this LLM is closed: that happened while this call was under way")
            if self._engine.has_work:
                self._outputs.process(self._engine.step())

    def _drop(self, request_ids: Sequence[str]) -> None:
        """Ends and forgets requests in any state."""
        for request_id in request_ids:
            if self._engine is not None:
                self._engine.abort(request_id)
            self._outputs.drop(request_id)
