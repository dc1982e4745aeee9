"""A conversation becomes an `Ask`: what chat and responses have in common."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from starlette.requests import Request

from octavo.engine.async_llm import Ask
from octavo.server.answer_grammar import chat_grammar, held_to
from octavo.server.answer_parts import AnswerForm, answer_form
from octavo.server.encoding import encode_chat, spell_words
from octavo.server.request_bodies import ChatBody, ResponseBody
from octavo.server.sampling import check_totals, sampling_params, terms_of
from octavo.server.state import Server
from octavo.structured_outputs import StructuredOutputs
from octavo.text.prompt import Message
from octavo.text.tools import ToolChoice


async def chat_ask(
    request: Request,
    server: Server,
    body: ChatBody | ResponseBody,
    own: Mapping[str, object],
    messages: Callable[[], Sequence[Message]],
    offered: list[dict[str, object]],
    choice: ToolChoice,
    asked: StructuredOutputs | None,
) -> tuple[Ask, AnswerForm]:
    """`own`: see `sampling_params`. `messages`: called in a thread, for there may be many. `offered`: the tools of the prompt.

    `asked`: the form the answer must have.
    """
    params = sampling_params(body, own, server.config, server.llm.sampling_defaults).for_chat()
    terms = terms_of(body, server.config)
    text, ids = await encode_chat(request, server, messages, offered, body.chat_template_kwargs)
    words = await spell_words(request, server, params.bad_words)
    check_totals(params, words, [len(ids)], server.llm.facts.limits)
    form = answer_form(server, offered, body.parallel_tool_calls)
    if asked is not None or choice.mode == "required":  # in a thread: a form may have 200,000 characters
        written = partial(chat_grammar, asked, form, offered, choice, text)
        params = await held_to(server, params, await server.threads.run("bodies", request, written))
    return Ask(text, ids, params, *terms, bad_words=words), form
