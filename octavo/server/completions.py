"""/v1/completions: one prompt or many, as text or token ids; with `echo`, the prompt's own text and logprobs before the answer."""

import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.engine.async_llm import Ask
from octavo.errors import RequestError
from octavo.outputs import TextDelta, TokenChoices
from octavo.server.answer_grammar import asked_form, held_to, param_of
from octavo.server.body import takes
from octavo.server.encoding import encode_prompts
from octavo.server.generation import Frame, all_news, chunk_events, collect, respond
from octavo.server.logprobs import CompletionLogprobs
from octavo.server.request_bodies import CompletionBody, read_generation_body
from octavo.server.sampling import named, sampling_params, terms_of
from octavo.server.state import Server
from octavo.server.usage import Tally
from octavo.structured_outputs import PARAM

MOST_PROMPT_LOGPROBS = 250_000  # numbers in the answer to one request that wants its prompts' logprobs: some 50 MB while it is made
FORMAT = "response_format"


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=takes(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await read_generation_body(request, CompletionBody, server)
        names = {"prompt_logprobs": "logprobs", PARAM: param_of(body.structured_outputs, FORMAT)}  # what the engine calls otherwise
        with named(names):
            answer = _Answer(server, body, await _asks(request, server, body), names)
        return await respond(request, server, answer, body.stream)

    return routes


async def _asks(request: Request, server: Server, body: CompletionBody) -> list[Ask]:
    own = {"n": body.n, "max_tokens": body.max_tokens, "logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
    asked = asked_form(body.structured_outputs, body.response_format, FORMAT)
    params = sampling_params(body, own, server.config, server.llm.sampling_defaults)
    terms = terms_of(body, server.config)
    encoded = await encode_prompts(request, server, body.prompt)
    if len(encoded) * params.n > server.config.max_prompts:
        message = f"{len(encoded)} prompts of {params.n} samples each are more than {server.config.max_prompts} answers (--max-prompts)"
        raise RequestError(message, "n")
    each = (params.logprobs or 0) + 1 if body.echo and params.logprobs is not None else 0
    if (numbers := each * sum(len(ids) for _, ids in encoded)) > MOST_PROMPT_LOGPROBS:
        message = f"echo with logprobs would answer {numbers:,} numbers, at most {MOST_PROMPT_LOGPROBS:,}; send fewer prompts at once"
        raise RequestError(message, "logprobs")
    params = await held_to(server, params, asked)
    return [Ask(text, ids, params, *terms) for text, ids in encoded]


@dataclass(slots=True)
class _Choice:
    logprobs: CompletionLogprobs | None
    begun: bool = False
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Answer:
    def __init__(self, server: Server, body: CompletionBody, asks: list[Ask], names: Mapping[str, str]) -> None:
        self._names = names
        self._llm = server.llm
        self._echo = bool(body.echo)
        self._asks = asks
        self._n = asks[0].params.n
        self._tally = Tally(asks)
        self._watch = server.observer.watch("cmpl-", asks)
        timings = bool(body.include_timings)
        self._frame = Frame(self._watch.id, "text_completion", server.model_name, self._tally, body.stream_options, timings)
        self._choices = [_Choice(self._logprobs(ask)) for ask in asks for _ in range(self._n)]
        self._prompt_logprobs: list[list[TokenChoices | None] | None] = [None] * len(asks)

    def _logprobs(self, ask: Ask) -> CompletionLogprobs | None:
        if ask.params.logprobs is None:
            return None
        return CompletionLogprobs(self._llm.tokenizer, ask.prompt_token_ids, self._echo, ask.params.skip_special_tokens)

    def events(self) -> AsyncGenerator[str, None]:
        return chunk_events(all_news(self._llm, self._asks, self._names, self._watch), self._tally, self._frame, self._chunks_of)

    async def whole(self) -> Response:
        await collect(all_news(self._llm, self._asks, self._names, self._watch), self._tally, self._take)
        return JSONResponse(self._frame.whole([self._written(index) for index in range(len(self._choices))]))

    def _text_of(self, delta: TextDelta) -> str:
        """What is new of the choice, its logprobs taken in; the first time after the prompt, where that is wanted."""
        prompt, choice = delta.index // self._n, self._choices[delta.index]
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = delta.prompt_logprobs
        text = delta.text
        if self._echo and not choice.begun:
            ask = self._asks[prompt]
            known = self._llm.tokenizer.decode(ask.prompt_token_ids, ask.params.skip_special_tokens) if ask.prompt is None else ask.prompt
            text = known + text
            if choice.logprobs is not None:
                choice.logprobs.add(ask.prompt_token_ids, self._prompt_logprobs[prompt] or [])
        choice.begun = True
        if choice.logprobs is not None:
            choice.logprobs.add(delta.token_ids, delta.logprobs or [])
        return text

    def _chunks_of(self, delta: TextDelta) -> Iterator[str]:
        text, logprobs = self._text_of(delta), self._choices[delta.index].logprobs
        if not (text or logprobs or delta.finish_reason):
            return
        found = "null" if logprobs is None else json.dumps(logprobs.take())
        end = "null" if delta.finish_reason is None else f'"{delta.finish_reason}","stop_reason":{json.dumps(delta.stop_reason)}'
        yield f'{{"index":{delta.index},"text":{json.dumps(text)},"logprobs":{found},"finish_reason":{end}}}'

    def _take(self, delta: TextDelta) -> None:
        choice = self._choices[delta.index]
        choice.texts.append(self._text_of(delta))
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def _written(self, index: int) -> dict[str, object]:
        choice = self._choices[index]
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": None if choice.logprobs is None else choice.logprobs.take(),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
