"""The text side of a request: a prompt or a conversation becomes token ids."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from octavo.errors import ConfigError, LoadError, RequestError
from octavo.text.chat_template import ChatTemplate, check_messages
from octavo.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Sequence[int]]
Message = Mapping[str, object]


class PromptEncoder:
    def __init__(self, tokenizer: Tokenizer | None, template_file: str | None) -> None:
        if tokenizer is None and template_file is not None:
            raise ConfigError("chat_template is set, but so is skip_tokenizer_init: without a tokenizer there is no chat")
        self._tokenizer = tokenizer
        self._template = None if tokenizer is None else _load_template(tokenizer, template_file)

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, where it has one, and its ids."""
        if isinstance(prompt, str):
            if not prompt:  # some tokenizers would make a BOS of it; whoever wants just that can ask for it by id
                raise RequestError("the prompt is empty", "prompt")
            return prompt, self._need_tokenizer("a text prompt").encode(prompt)
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else prompt
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes)) or not all(type(token) is int for token in ids):
            raise RequestError("a prompt is a str, a list of token ids, or {'prompt_token_ids': [...]}", "prompt")
        return None, list(ids)

    def encode_chat(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """The rendered conversation; the template writes the special tokens itself, so none are added."""
        tokenizer = self._need_tokenizer("chat")
        if self._template is None:
            raise RequestError("the model has no chat template; give one with chat_template", "messages")
        text = self._template.render(check_messages(messages))
        return text, tokenizer.encode(text, add_special_tokens=False)

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


def _load_template(tokenizer: Tokenizer, template_file: str | None) -> ChatTemplate | None:
    source, name = tokenizer.chat_template, tokenizer.source
    if template_file is not None:
        try:
            source, name = Path(template_file).read_text(encoding="utf-8"), template_file
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"chat_template {template_file}: {error}") from error
    return None if source is None else ChatTemplate(source, name, tokenizer.bos_token, tokenizer.eos_token)
