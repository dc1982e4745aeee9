"""The text side of a request: a prompt or a conversation becomes token ids."""

import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from octavo.errors import ConfigError, LoadError, RequestError
from octavo.text.chat_template import ChatTemplate
from octavo.text.conversation import check_messages
from octavo.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]
Message = Mapping[str, object]
Conversation = Sequence[Message]
TEMPLATE_OPTIONS = ("enable_thinking", "add_generation_prompt", "continue_final_message")
_NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer | None, template_file: str | None) -> None:
        if tokenizer is None and template_file is not None:
            raise ConfigError("chat_template is set, but so is skip_tokenizer_init: without a tokenizer there is no chat")
        self._tokenizer = tokenizer
        source, name = (None, "") if tokenizer is None else _template_source(tokenizer, template_file)
        self.template = source  # its text, where there is one
        self._template = None
        if source is not None and tokenizer is not None:
            self._template = ChatTemplate(source, name, tokenizer.bos_token, tokenizer.eos_token)

    def encode(self, prompt: Prompt, limit: int | None = None) -> tuple[str | None, list[int]]:
        """The prompt's text, where it has one, and its ids. A text too long for `limit` tokens is not tokenised."""
        if isinstance(prompt, str):
            if not prompt:  # some tokenizers would make a BOS of it; whoever wants just that can ask for it by id
                raise RequestError("the prompt is empty", "prompt")
            tokenizer = self._need_tokenizer("a text prompt")
            _check_length(prompt, tokenizer, limit, "prompt")
            return prompt, _without_images(tokenizer.encode(prompt), tokenizer, "prompt")
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)) or not all(type(token) is int for token in ids):
            raise RequestError("a prompt is a str, a list of token ids, or {'prompt_token_ids': [...]}", "prompt")
        return None, list(ids)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] = _NO_OPTIONS,
        limit: int | None = None,
    ) -> tuple[str, list[int]]:
        """The rendered conversation; the template writes the special tokens itself, so none are added.

        `options`: some of TEMPLATE_OPTIONS. A text too long for `limit` tokens is not tokenised.
        """
        text = self.render_chat(messages, tools, options)
        tokenizer = self._need_tokenizer("chat")
        _check_length(text, tokenizer, limit, "messages")
        return text, _without_images(tokenizer.encode(text, add_special_tokens=False), tokenizer, "messages")

    def render_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None = None, options: Mapping[str, object] = _NO_OPTIONS
    ) -> str:
        """The conversation as the template writes it."""
        self._need_tokenizer("chat")
        if self._template is None:
            raise RequestError("the model has no chat template; give one with --chat-template", "messages")
        if tools and not self._template.reads_tools:
            message = "the chat template of this model has no place for tools; leave them out, or give a template with --chat-template"
            raise RequestError(message, "tools", "unsupported_parameter")
        _check_options(options)
        plain, goes_on = check_messages(messages), bool(options.get("continue_final_message"))
        thinking = {name: options[name] for name in ("enable_thinking",) if name in options}
        text = self._template.render(plain, bool(options.get("add_generation_prompt", not goes_on)), tools, thinking)
        if goes_on:
            text = _open_last_message(text, str(plain[-1]["content"]))
        return text

    def default_system_prompt(self) -> str | None:
        """See `ChatTemplate.default_system_prompt`; None where there is no template. It renders, so ask once and keep the answer."""
        return None if self._template is None else self._template.default_system_prompt()

    def spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word, as it stands at the start of a text and behind a space."""
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
    """The text of the template, where there is one, and where it comes from."""
    if template_file is None:
        return tokenizer.chat_template, tokenizer.source
    try:
        return Path(template_file).read_text(encoding="utf-8"), template_file
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"chat_template {template_file}: {error}") from error


def _check_options(options: Mapping[str, object]) -> None:
    for name, value in options.items():
        if name not in TEMPLATE_OPTIONS:
            known = ", ".join(TEMPLATE_OPTIONS)
            raise RequestError(f"chat_template_kwargs has {reprlib.repr(name)}; it may have {known}", "chat_template_kwargs")
        if type(value) is not bool:
            raise RequestError(f"{name} in chat_template_kwargs must be true or false, got {reprlib.repr(value)}", "chat_template_kwargs")
    if options.get("add_generation_prompt") and options.get("continue_final_message"):
        raise RequestError("add_generation_prompt and continue_final_message exclude each other", "chat_template_kwargs")


def _open_last_message(text: str, content: str) -> str:
    """The text up to the end of the last message's content, so that an answer goes on with it."""
    start = text.rfind(content.strip()) if content.strip() else -1
    if start < 0:
        raise RequestError("continue_final_message needs a last message with content that the chat template writes as it is", "messages")
    whole = start + len(content.lstrip())
    return text[: whole if text[start:whole] == content.lstrip() else start + len(content.strip())]  # templates may cut spaces off


def _check_length(text: str, tokenizer: Tokenizer, limit: int | None, param: str) -> None:
    """By the fewest tokens it can have: to count what 10 MB have would take seconds."""
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
    """These; a text that spells the token of an image is refused, for none came along. Whoever sends ids means them."""
    if not tokenizer.image_ids.isdisjoint(ids):
        found = next(token for token in ids if token in tokenizer.image_ids)
        raise RequestError(f"the {param} has {tokenizer.token(found)} in it, which stands for an image, and there is none", param)
    return ids


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt or many; a flat list of ints is one."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be one prompt or a list of them, not {type(prompts).__name__}", "prompts")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def as_conversations(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    """One conversation or many; an empty list is a conversation without messages, which the template refuses."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise RequestError(f"messages must be a list of messages or of such lists, not {type(messages).__name__}", "messages")
    if not messages or isinstance(messages[0], Mapping):
        return [messages]  # type: ignore[list-item]
    return messages  # type: ignore[return-value]
