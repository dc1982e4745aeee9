"""Turns a prompt or a conversation into token ids. A conversation goes through the model's chat template first."""

import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType

from jinja2 import TemplateSyntaxError, nodes

from octavo.errors import ConfigError, LoadError, RequestError, TemplateError
from octavo.inputs import Message, Prompt, prompt_parts
from octavo.text.conversation import check_messages, common_length, message_ends
from octavo.text.reasoning import begun_answer
from octavo.text.template_sandbox import TemplateSandbox
from octavo.text.tokenizer import Tokenizer

TEMPLATE_OPTIONS = ("enable_thinking", "add_generation_prompt", "continue_final_message")
_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})
TOOL_TEMPLATE = Path(__file__).with_name("tool_template.jinja")
CHATML = "<|im_start|>"


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer | None, template_file: str | None) -> None:
        if tokenizer is None and template_file is not None:
            raise ConfigError("chat_template is set, but so is skip_tokenizer_init: without a tokenizer there is no chat")
        self._tokenizer = tokenizer
        source, name = (None, "") if tokenizer is None else _template_source(tokenizer, template_file)
        self.template = source  # its text, where there is one
        self._is_own = template_file is None  # the model's, or one that the user gave
        self._template = None
        self._given: tuple[str, ChatTemplate] | None = None  # the newest template that came with a call, and its text
        self._tool_template: ChatTemplate | None = None  # for conversations with tools
        if source is not None and tokenizer is not None:
            self._template = ChatTemplate(source, name, tokenizer.bos_token, tokenizer.eos_token)

    def add_tool_template(self) -> bool:
        """Gives conversations with tools a place for them, TOOL_TEMPLATE, if the model's own ChatML has none. Returns whether it did.

        Conversations without tools keep the model's own template.
        """
        if self._needs_tool_template and self._tool_template is None:
            variables = {"system_prompt": self.default_system_prompt()}
            self._tool_template = ChatTemplate(TOOL_TEMPLATE.read_text(encoding="utf-8"), TOOL_TEMPLATE.name, "", "", variables)
        return self._needs_tool_template

    @property
    def _needs_tool_template(self) -> bool:
        return self._template is not None and self._is_own and CHATML in str(self.template) and not self._template.reads_tools

    def encode(self, prompt: Prompt, limit: int | None = None) -> tuple[str | None, list[int]]:
        """Returns the prompt's text, or None if it has none, and its ids. A text too long for `limit` tokens is refused untokenised."""
        text, ids = (prompt, None) if isinstance(prompt, str) else prompt_parts(prompt)
        if ids is not None:
            return text, ids
        assert text is not None
        if not text:  # some tokenizers would make a BOS of it; a client that wants just a BOS can send its id
            raise RequestError("the prompt is empty", "prompt")
        tokenizer = self._need_tokenizer("a text prompt")
        _check_length(text, tokenizer, limit, "prompt")
        return text, _without_images(tokenizer.encode(text), tokenizer, "prompt")

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] = _NO_OPTIONS,
        limit: int | None = None,
        template: str | None = None,
    ) -> tuple[str, list[int]]:
        """Returns the rendered conversation and its ids. The template writes the special tokens itself, so none are added.

        `options`: some of TEMPLATE_OPTIONS. A text too long for `limit` tokens is refused untokenised. `template`: the text of a
        chat template to use instead of the model's.
        """
        text = self.render_chat(messages, tools, options, template)
        tokenizer = self._need_tokenizer("chat")
        _check_length(text, tokenizer, limit, "messages")
        return text, _without_images(tokenizer.encode(text, add_special_tokens=False), tokenizer, "messages")

    def encode_beginning(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] = _NO_OPTIONS,
        limit: int | None = None,
    ) -> tuple[None, list[int]]:
        """Returns the ids with which every conversation begins that begins with these messages.

        They are what two such conversations have in common. Some templates write the last message in another way, and some write a
        system message into the first question.
        """
        ends_with_user = check_messages(messages)[-1]["role"] == "user"
        next_message = {"role": "assistant" if ends_with_user else "user", "content": "Yes"}
        one = messages if ends_with_user else [*messages, {"role": "user", "content": "1. No"}]  # if it is asked, an answer may begin
        try:
            first, second = (self.encode_chat(each, tools, options, limit)[1] for each in (one, [*messages, next_message]))
        except TemplateError:  # nothing may follow
            return None, self.encode_chat(messages, tools, {**options, "add_generation_prompt": False}, limit)[1]
        return None, first[: common_length(first, second)]

    def message_ends(
        self,
        messages: Sequence[Message],
        encoded: tuple[str | None, list[int]],
        tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] = _NO_OPTIONS,
        template: str | None = None,
    ) -> list[int]:
        """Returns the lengths of prefixes that other conversations may continue. `encoded`: what `encode_chat` returned"""
        text, ids = encoded
        if text is None or self._tokenizer is None:
            return []
        thinking = {name: options[name] for name in ("enable_thinking",) if name in options}
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        return message_ends(check_messages(messages), text, ids, lambda others: self.render_chat(others, tools, thinking, template), encode)

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] = _NO_OPTIONS, given: str | None = None,
    ) -> str:  # fmt: skip
        """Returns the conversation as the template writes it. `given`: the text of a template to use instead of the model's"""
        template = self._chosen_template(given)
        _check_options(options)
        plain, goes_on = check_messages(messages), bool(options.get("continue_final_message"))
        if given is None and self._tool_template is not None and (tools or any(map(_is_of_tools, plain))):
            template = self._tool_template
        if tools and not template.reads_tools:
            instead = "serve it with --tool-call-parser hermes" if self._needs_tool_template else "give a template with --chat-template"
            message = f"the chat template of this model has no place for tools; leave them out, or {instead}"
            raise RequestError(message, "tools", "unsupported_parameter")
        thinking = {name: options[name] for name in ("enable_thinking",) if name in options}
        if goes_on and (thought := _thought_of(plain[-1])):
            question = template.render(plain[:-1], True, tools, thinking)
            return begun_answer(question, given or self.template or "", thought, str(plain[-1]["content"]))
        text = template.render(plain, bool(options.get("add_generation_prompt", not goes_on)), tools, thinking)
        if goes_on:
            text = _open_last_message(text, str(plain[-1]["content"]))
        return text

    def _chosen_template(self, given: str | None) -> "ChatTemplate":
        tokenizer = self._need_tokenizer("chat")
        if given is None:
            if self._template is None:
                raise RequestError("the model has no chat template; give one with --chat-template", "messages")
            return self._template
        if not isinstance(given, str):
            raise RequestError(f"chat_template must be the text of a template, not {type(given).__name__}", "chat_template")
        newest = self._given
        if newest is None or newest[0] != given:
            newest = self._given = given, ChatTemplate(given, "this call", tokenizer.bos_token, tokenizer.eos_token)
        return newest[1]

    def default_system_prompt(self) -> str | None:
        """As `ChatTemplate.default_system_prompt`, but None without a template. This renders: call it once and keep the answer."""
        return None if self._template is None else self._template.default_system_prompt()

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each word, at the start of a text and after a space."""
        if not words:
            return []
        tokenizer = self._need_tokenizer("bad_words")
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        return [ids for ids in (tokenizer.encode(text, add_special_tokens=False) for text in dict.fromkeys(texts)) if ids]

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and skip_tokenizer_init is set; pass token ids", "prompt")
        return self._tokenizer


def _template_source(tokenizer: Tokenizer, template_file: str | None) -> tuple[str | None, str]:
    """Returns the text of the template, or None, and where it comes from."""
    if template_file is None:
        return tokenizer.chat_template, tokenizer.source
    try:
        return Path(template_file).read_text(encoding="utf-8"), template_file
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"chat_template {template_file}: {error}") from error


def template_options(
    given: Mapping[str, object] | None, add_generation_prompt: bool | None, continue_final_message: bool
) -> dict[str, object]:
    """Returns the options of a chat template. What stands in `given` goes before the two others."""
    if not isinstance(given, Mapping | None):
        raise RequestError(f"chat_template_kwargs must be an object, not {type(given).__name__}", "chat_template_kwargs")
    options: dict[str, object] = {"continue_final_message": continue_final_message}
    if add_generation_prompt is not None:
        options["add_generation_prompt"] = add_generation_prompt
    return {**options, **(given or {})}


def _is_of_tools(message: Message) -> bool:
    return message["role"] == "tool" or "tool_calls" in message


def _check_options(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if name not in TEMPLATE_OPTIONS:
            known = ", ".join(TEMPLATE_OPTIONS)
            raise RequestError(f"chat_template_kwargs has {reprlib.repr(name)}; it may have {known}", "chat_template_kwargs")
        if type(value) is not bool:
            raise RequestError(f"{name} must be true or false, got {reprlib.repr(value)}", "chat_template_kwargs")
    if options.get("add_generation_prompt") and options.get("continue_final_message"):
        raise RequestError("add_generation_prompt and continue_final_message exclude each other", "chat_template_kwargs")


def _thought_of(message: Message) -> str:
    """Returns the reasoning in a message of the assistant, as a client sends it back; templates drop it, or write it in their own way."""
    thought = message.get("reasoning_content") if message["role"] == "assistant" else None
    if not isinstance(thought, str | None):
        raise RequestError("reasoning_content of the last message must be text", "messages")
    return thought or ""


def _open_last_message(text: str, content: str) -> str:
    """Returns the text up to the end of the last message's content, so that the answer continues it."""
    start = text.rfind(content.strip()) if content.strip() else -1
    if start < 0:
        raise RequestError("continue_final_message needs a last message with content that the chat template writes as it is", "messages")
    whole = start + len(content.lstrip())
    return text[: whole if text[start:whole] == content.lstrip() else start + len(content.strip())]  # templates may cut spaces off


def _check_length(text: str, tokenizer: Tokenizer, limit: int | None, param: str) -> None:
    """Refuses a text by the fewest tokens it can have. Tokenising 10 MB would take seconds."""
    if limit is None or len(text) <= limit:
        return
    fewest = len(text.encode("utf-8", "replace")) // tokenizer.longest_token
    if fewest > limit:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. However, you requested at least {fewest} tokens in the prompt; "
            "shorten it",
            param,
            "context_length_exceeded",
        )


def _without_images(ids: list[int], tokenizer: Tokenizer, param: str) -> list[int]:
    """Returns the ids of a text. A text that spells the token of an image is refused, since it has no image."""
    if not tokenizer.image_ids.isdisjoint(ids):
        found = next(token for token in ids if token in tokenizer.image_ids)
        raise RequestError(f"the {param} has {tokenizer.token(found)} in it, which stands for an image, and there is none", param)
    return ids


# -- the chat template, which makes the prompt that a model was trained on
#
# The template is text out of the model's files, written in jinja2 and rendered as Hugging Face does (trimmed blocks, plain
# JSON, `raise_exception`, `strftime_now`). It is not trusted: it runs in `TemplateSandbox` with a limit on time and on the
# size of its output, and any failure in it is a TemplateError of one short line.

MAX_SECONDS = 2.0
MAX_UNITS = 8_000_000  # characters made, roughly; for a large conversation UNITS_PER_INPUT_UNIT adds to it
UNITS_PER_INPUT_UNIT = 32  # a template copies each message a handful of times
MAX_SOURCE_CHARS = 65_536  # twice the longest real template; jinja2 compiles some in quadratic time: here in a second
MAX_ERROR_CHARS = 300

Renderer = tuple[TemplateSandbox, Callable[[dict[str, object]], str]]
_NO_VARIABLES: Mapping[str, object] = MappingProxyType({})


class ChatTemplate:
    def __init__(self, source: str, name: str, bos_token: str, eos_token: str, variables: Mapping[str, object] = _NO_VARIABLES) -> None:
        """`name` says where the template comes from, for errors. `variables`: what it may read in every conversation."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(f"chat template of {name} has {len(source):,} characters, at most {MAX_SOURCE_CHARS:,} are taken")
        self._name = name
        self._constants = {**variables, "bos_token": bos_token, "eos_token": eos_token}
        self._source = source
        self._idle = [self._build()]  # a sandbox has one meter, so it renders for one thread at a time

    def _build(self) -> Renderer:
        sandbox = TemplateSandbox()
        try:
            return sandbox, sandbox.build(self._source, self._name)
        except Exception as error:
            raise self._failure("is not valid", error) from None

    @cached_property
    def reads_tools(self) -> bool:
        """Whether it can write tools into the prompt."""
        return any(name.name == "tools" for name in TemplateSandbox().parse(self._source).find_all(nodes.Name))

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        variables: Mapping[str, object] = _NO_VARIABLES,
    ) -> str:
        """Returns the prompt text. `variables`: extra names that the template may read, such as enable_thinking."""
        given: dict[str, object] = {"messages": messages, "tools": tools, "documents": None}
        given |= {"add_generation_prompt": add_generation_prompt, **self._constants}
        if clash := given.keys() & variables.keys():
            raise RequestError(f"chat template variable {min(clash)!r} is set by the engine and cannot be given", param=min(clash))
        try:
            renderer = self._idle.pop()
        except IndexError:  # all are at work in other threads
            renderer = self._build()
        sandbox, render = renderer
        sandbox.meter.start(MAX_UNITS + UNITS_PER_INPUT_UNIT * units_of((messages, tools)), MAX_SECONDS)
        try:
            return render({**variables, **given})
        except Exception as error:  # templates raise anything: a missing key, a wrong type, too deep a recursion
            raise self._failure("failed", error) from None
        finally:
            self._idle.append(renderer)

    def default_system_prompt(self) -> str | None:
        """Returns the system prompt that the template writes by itself, or None if there is none or it cannot be found.

        The text in the place of a system message is cut out. Given as a system message, it must make the same prompt.
        """
        user = {"role": "user", "content": "a question"}
        mark = "the system prompt stands here"
        try:
            without = self.render([user])
            before, *after = self.render([{"role": "system", "content": mark}, user]).split(mark)
            if len(after) != 1 or not (without.startswith(before) and without.endswith(after[0])):
                return None
            found = without[len(before) : len(without) - len(after[0])]
            return found if found and self.render([{"role": "system", "content": found}, user]) == without else None
        except TemplateError:  # it takes no system message, or wants something that is not there
            return None

    def _failure(self, what: str, error: Exception) -> TemplateError:
        place, reason = "", str(error)
        if isinstance(error, TemplateSyntaxError):
            place, reason = f" (line {error.lineno})", str(error.message)
        reason = " ".join(reason.split()) or type(error).__name__
        return TemplateError(f"chat template of {self._name} {what}{place}: {reason[:MAX_ERROR_CHARS]}")


def units_of(value: object) -> int:
    """Returns the size of the input in characters and items, counted without recursion."""
    units, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        units += len(item) if isinstance(item, str) else 1
        if isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            waiting += item
    return units
