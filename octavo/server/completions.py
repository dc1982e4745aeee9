"""/v1/completions: one prompt or many, as text or token ids. With `echo` the answer begins with the text and logprobs of the prompt."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.messages import AddRequest
from octavo.outputs import TextDelta, TokenChoices
from octavo.server.body import named, param_of, read_generation_body, structured_outputs_of, takes
from octavo.server.fields import CompletionBody
from octavo.server.generation import Frame, Tally, Updates, all_updates, chunk_events, collect, respond
from octavo.server.logprobs import CompletionLogprobs
from octavo.server.requests import completion_requests, timeout_of
from octavo.server.state import Server
from octavo.structured_outputs import PARAM
from octavo.text.detokenizer import shown_tail

FORMAT = "response_format"


def router(server: Server) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", openapi_extra=takes(CompletionBody))
    async def completions(request: Request) -> Response:
        body = await read_generation_body(request, CompletionBody, server)
        # the engine's name of a field -> its name here
        names = {"prompt_logprobs": "logprobs", PARAM: param_of(body.structured_outputs, FORMAT)}
        with named(names):
            structured = structured_outputs_of(body.structured_outputs, body.response_format, FORMAT)
            texts, requests = await completion_requests(request, server, body, structured)
            answer = _Answer(server, body, texts, requests, names)
        return await respond(request, server, answer, body.stream)

    return routes


@dataclass(slots=True)
class _Choice:
    logprobs: CompletionLogprobs | None
    begun: bool = False
    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Answer:
    def __init__(
        self, server: Server, body: CompletionBody, texts: list[str | None], requests: list[AddRequest], names: Mapping[str, str]
    ) -> None:
        """`texts`: those of the prompts that came as text."""
        self._names = names
        self._llm = server.llm
        self._echo = bool(body.echo)
        self._texts, self._requests = texts, requests
        self._timeout = timeout_of(body, server.config)
        self._n = requests[0].params.n
        self._tally = Tally(requests)
        self._watch = server.observer.watch("cmpl-", requests)
        timings = bool(body.include_timings)
        self._frame = Frame(self._watch.id, "text_completion", server, requests[0].params.seed, self._tally, body.stream_options, timings)
        self._choices = [choice for request in requests for choice in self._choices_of(request)]

    def _choices_of(self, request: AddRequest) -> list[_Choice]:
        if request.params.logprobs is None:
            return [_Choice(None) for _ in range(self._n)]
        tokenizer, skip = self._llm.tokenizer, request.params.skip_special_tokens
        before = [] if self._echo else shown_tail(tokenizer, request.prompt_token_ids)
        return [_Choice(CompletionLogprobs(tokenizer, before, skip)) for _ in range(self._n)]

    def events(self) -> AsyncGenerator[str, None]:
        return chunk_events(self._updates(), self._tally, self._frame, self._chunks_of)

    async def whole(self) -> Response:
        await collect(self._updates(), self._tally, self._take)
        return self._frame.whole([self._written(index) for index in range(len(self._choices))])

    async def _updates(self) -> Updates:
        """Yields all updates. Adds the logprobs of prompts first, in a thread, because those of a whole prompt come at once."""
        async with aclosing(all_updates(self._llm, self._requests, self._timeout, self._names, self._watch)) as updates:
            async for deltas in updates:
                for delta in deltas:
                    if delta.prompt_logprobs is not None:
                        await asyncio.to_thread(self._add_prompt, delta.index // self._n, delta.prompt_logprobs)
                yield deltas

    def _add_prompt(self, prompt: int, found: list[TokenChoices | None]) -> None:
        for choice in self._choices[prompt * self._n : (prompt + 1) * self._n]:
            assert choice.logprobs is not None
            choice.logprobs.add(self._requests[prompt].prompt_token_ids, found)

    def _text_of(self, delta: TextDelta) -> str:
        """Returns the new text of a choice, and adds its logprobs. With `echo` the first text begins with the prompt."""
        prompt, choice = delta.index // self._n, self._choices[delta.index]
        text = delta.text
        if self._echo and not choice.begun:
            text = self._echoed(prompt) + text
        choice.begun = True
        if choice.logprobs is not None:
            choice.logprobs.add(delta.token_ids, delta.logprobs or [])
        return text

    def _echoed(self, prompt: int) -> str:
        """Returns the text of a prompt. If it came as ids, it is decoded once for all samples."""
        text = self._texts[prompt]
        if text is None:
            request = self._requests[prompt]
            text = self._llm.tokenizer.decode(request.prompt_token_ids, request.params.skip_special_tokens)
            self._texts[prompt] = text
        return text

    def _chunks_of(self, delta: TextDelta) -> Iterator[str]:
        text, logprobs = self._text_of(delta), self._choices[delta.index].logprobs
        if not (text or logprobs or delta.finish_reason):
            return
        found = "null" if logprobs is None else logprobs.take()
        end = "null" if delta.finish_reason is None else f'"{delta.finish_reason}","stop_reason":{json.dumps(delta.stop_reason)}'
        yield f'{{"index":{delta.index},"text":{json.dumps(text)},"logprobs":{found},"finish_reason":{end}}}'

    def _take(self, delta: TextDelta) -> None:
        choice = self._choices[delta.index]
        choice.texts.append(self._text_of(delta))
        choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason

    def _written(self, index: int) -> str:
        choice = self._choices[index]
        text, found = json.dumps("".join(choice.texts)), "null" if choice.logprobs is None else choice.logprobs.take()
        end = f'"finish_reason":{json.dumps(choice.finish_reason)},"stop_reason":{json.dumps(choice.stop_reason)}'
        return f'{{"index":{index},"text":{text},"logprobs":{found},{end}}}'
