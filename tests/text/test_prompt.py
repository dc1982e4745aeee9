"""Conversations with options, and texts that are too long to be worth tokenising."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import RequestError
from octavo.loading.resolve import resolve_model
from octavo.loading.text_side import load_tokenizer
from octavo.text.prompt import TOOL_TEMPLATE, ChatTemplate, PromptEncoder
from octavo.text.tokenizer import Tokenizer
from tests.support.tokenizers import DATA, gpt2_metadata, qwen_folder, stories_metadata

QWEN3 = str(DATA / "templates" / "Qwen-Qwen3-0.6B.jinja")
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder(Tokenizer.from_folder(qwen_folder(tmp_path_factory.mktemp("qwen"))), QWEN3)


def test_options_reach_the_template(qwen: PromptEncoder) -> None:
    plain, ids = qwen.encode_chat([USER])
    assert plain == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" and ids
    assert qwen.encode_chat([USER], options={"enable_thinking": False})[0] == plain + "<think>\n\n</think>\n\n"
    assert qwen.encode_chat([USER], options={"add_generation_prompt": False})[0] == plain.removesuffix("<|im_start|>assistant\n")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    assert '"name": "weather"' in qwen.encode_chat([USER], tools=[tool])[0]


@pytest.mark.parametrize("content", ["It is", " It is ", "hi"])
def test_the_last_message_may_be_gone_on_with(qwen: PromptEncoder, content: str) -> None:
    options = {"continue_final_message": True}
    text, _ = qwen.encode_chat([USER, {"role": "assistant", "content": content}], options=options)
    assert text.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n") and text.endswith(content)
    for last in ("", "  "):
        with pytest.raises(RequestError, match="a last message with content"):
            qwen.encode_chat([USER, {"role": "assistant", "content": last}], options=options)


# promise: page-continue
def test_a_thought_that_was_cut_off_goes_on_and_so_does_the_answer_behind_it(qwen: PromptEncoder) -> None:
    options = {"continue_final_message": True}
    asked = qwen.encode_chat([USER])[0]
    for content, written in (("", "<think>\nIt is 4."), ("The sum", "<think>\nIt is 4.\n</think>\n\nThe sum")):
        begun = {"role": "assistant", "content": content, "reasoning_content": "It is 4."}
        assert qwen.encode_chat([USER, begun], options=options)[0] == asked + written
    with pytest.raises(RequestError, match="must be text"):
        qwen.encode_chat([USER, {"role": "assistant", "content": "", "reasoning_content": 7}], options=options)


# promise: extra-body-chat
@pytest.mark.parametrize(
    "options",
    [{"tokenize": True}, {"messages": []}, {"__class__": 1}, {"enable_thinking": "no"}, {"enable_thinking": None}]
    + [{"add_generation_prompt": True, "continue_final_message": True}],
)
def test_other_options_are_refused(qwen: PromptEncoder, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        qwen.encode_chat([USER], options=options)
    assert caught.value.param == "chat_template_kwargs"


# ---- a place for tools

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALLS = [{"id": name, "type": "function", "function": {"name": name, "arguments": '{"a": 1}'}} for name in ("weather", "clock")]
CALLED: list[Any] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    *({"role": "tool", "tool_call_id": name, "content": f"<{name}>"} for name in ("clock", "weather", "other")),
]


def default_encoder(template: str | None = None) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(resolve_model(None)), template)


# promise: tools-default-model
def test_our_template_gives_chatml_a_place_for_tools_and_changes_no_other_conversation() -> None:
    plain, encoder = default_encoder(), default_encoder()
    assert encoder.add_tool_template()
    assert encoder.encode_chat([USER]) == plain.encode_chat([USER])
    with pytest.raises(RequestError, match=r"no place for tools.* --tool-call-parser hermes"):
        plain.encode_chat([USER], [WEATHER])
    text, _ = encoder.encode_chat([USER], [WEATHER])
    system, _, rest = text.partition("\n\n# Tools\n\n")
    assert plain.encode_chat([USER])[0].startswith(system) and system.endswith("trained by Hugging Face")
    assert '"name": "weather"' in rest and rest.endswith("<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    answered, _ = encoder.encode_chat(CALLED)  # also where the tools are not offered again
    calls = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {{"a": 1}}}}\n</tool_call>' for name in ("weather", "clock"))
    results = "The result of clock is: <clock>\nThe result of weather is: <weather>\nThe result of the call is: <other>\n"
    assert f"<|im_start|>assistant\n{calls}<|im_end|>\n<|im_start|>user\n{results}Answer in a sentence.<|im_end|>\n" in answered


# promise: tools-default-model
def test_a_template_that_was_given_or_that_has_tools_or_is_no_chatml_stays(tmp_path: Path, qwen: PromptEncoder) -> None:
    chatml = tmp_path / "chatml.jinja"
    chatml.write_text(str(default_encoder().template))
    assert not default_encoder(str(chatml)).add_tool_template() and not qwen.add_tool_template()
    folder = qwen_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert not PromptEncoder(Tokenizer.from_folder(folder), None).add_tool_template()


# promise: tools-default-model
def test_our_template_says_of_tools_and_calls_what_qwen_says() -> None:
    reference = json.loads((DATA / "refs" / "chat_template_renders.json").read_text(encoding="utf-8"))
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    template = ChatTemplate(TOOL_TEMPLATE.read_text(encoding="utf-8"), "ours", "", "", {"system_prompt": system})
    for name, expected in reference["renders"]["Qwen-Qwen2.5-7B-Instruct.jinja"].items():
        given = reference["conversations"][name]
        text = template.render(given["messages"], tools=given["tools"])
        results = expected.find("<|im_start|>user\n<tool_response>")
        assert text == expected if results < 0 else text.startswith(expected[:results]), name


@pytest.mark.parametrize("metadata", [gpt2_metadata, stories_metadata])
def test_no_token_is_longer_than_the_longest(metadata: Any) -> None:
    tokenizer = Tokenizer.from_gguf(metadata(), "test")
    longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    assert longest <= tokenizer.longest_token <= 3 * longest


def test_what_cannot_fit_is_refused_untokenised(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    tokenizer = Tokenizer.from_gguf(gpt2_metadata(), "gpt2")
    encoder = PromptEncoder(tokenizer, str(template))
    most = "a" * (100 * tokenizer.longest_token + tokenizer.longest_token - 1)
    assert encoder.encode(most, 100)[0] == encoder.encode_chat([{"role": "user", "content": most}], limit=100)[0] == most
    monkeypatch.setattr(Tokenizer, "encode", None)
    for text in (most + "a", "\U0001f600" * 2_500_000):
        with pytest.raises(RequestError, match=r"maximum context length is 100 tokens.*at least \d+ tokens in the prompt") as caught:
            encoder.encode(text, 100)
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        with pytest.raises(RequestError) as caught:
            encoder.encode_chat([{"role": "user", "content": text}], limit=100)
        assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_other_threads_run_while_a_text_is_tokenised() -> None:
    tokenizer = Tokenizer.from_gguf(gpt2_metadata(), "gpt2")
    thread = threading.Thread(target=tokenizer.encode, args=("Once upon a time there was a dog. " * 10_000,))
    rounds = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        rounds += 1
    assert rounds > 20, "a tokenizer that holds the interpreter's lock leaves one or two"


def test_a_text_that_spells_the_token_of_an_image_is_refused_in_linear_time(qwen: PromptEncoder) -> None:
    start = time.process_time()
    for text in ("<|image_pad|>", "a <|video_pad|> b", "<|image_pad|>" * 10_000):
        with pytest.raises(RequestError, match=r"the prompt has <\|(image|video)_pad\|> in it") as refused:
            qwen.encode(text)
        assert refused.value.param == "prompt"
        with pytest.raises(RequestError, match="the messages has") as refused:
            qwen.encode_chat([{"role": "user", "content": text}])
        assert refused.value.param == "messages"
    assert time.process_time() - start < 2
    for text in ("<image>", "<|image|>", "<| image_pad |>", "<|im_start|><|vision_start|>"):  # words to this tokenizer, or no image
        assert qwen.encode(text)[1]
    (pad,) = qwen._tokenizer.image_ids - {151656}  # type: ignore[union-attr]
    assert qwen.encode([pad])[1] == [pad]
