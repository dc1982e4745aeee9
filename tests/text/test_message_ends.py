"""Where messages end in a prompt, and what recurrent models find again because states are kept there (on FakeKV)."""

from dataclasses import replace

import pytest

from octavo.text.conversation import common_length
from octavo.text.prompt import PromptEncoder
from octavo.text.tokenizer import Tokenizer
from tests.support.fake import FakeEngine, sampling
from tests.support.tokenizers import DATA, qwen_folder

Chat = list[dict[str, object]]
TEMPLATES = ["Qwen-Qwen3-0.6B", "Qwen3.5-4B", "Qwen-Qwen2.5-7B-Instruct", "HuggingFaceTB-SmolLM3-3B", "Qwen3-Coder"]
SYSTEM = {"role": "system", "content": "You answer briefly. " * 30}
BLOCK = 16


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(qwen_folder(tmp_path_factory.mktemp("qwen")))


def encoder_of(tokenizer: Tokenizer, template: str) -> PromptEncoder:
    return PromptEncoder(tokenizer, str(DATA / "templates" / f"{template}.jinja"))


def user(content: str) -> dict[str, object]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, object]:
    return {"role": "assistant", "content": content}


def asked(engine: FakeEngine, encoder: PromptEncoder, name: str, chat: Chat, count: int = 1) -> tuple[list[int], int]:
    """Runs a conversation as a frontend sends it. Returns its ids, and how many of them were found."""
    encoded = encoder.encode_chat(chat)
    request = engine.add(name, encoded[1], sampling(count), checkpoints=encoder.message_ends(chat, encoded))
    engine.run()
    return encoded[1], request.life.cached_tokens


def hybrid() -> FakeEngine:
    engine = FakeEngine(block_size=BLOCK, num_blocks=4000, rows=4, budget=512, max_len=20_000, states=40, check=False)
    engine.scheduler.limits = replace(engine.scheduler.limits, vocab_size=1 << 20)
    return engine


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_second_conversation_computes_at_most_a_block_of_the_system_prompt_again(tokenizer: Tokenizer, template: str) -> None:
    engine, encoder = hybrid(), encoder_of(tokenizer, template)
    one, _ = asked(engine, encoder, "one", [SYSTEM, user("What is a block table? " * 40)])
    other, found = asked(engine, encoder, "other", [SYSTEM, user("Where is the nearest harbour? " * 40)])
    assert found > common_length(one, other) - BLOCK > 100


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("filler", [0, 3, 7])
def test_a_turn_whose_template_drops_a_thought_computes_little_but_the_answer_again(
    tokenizer: Tokenizer, template: str, filler: int
) -> None:
    engine, encoder = hybrid(), encoder_of(tokenizer, template)
    chat = [SYSTEM, user("What is a block table? " * 50 + "So? " * filler)]
    first, _ = asked(engine, encoder, "first", chat, 60)
    answered = [*chat, assistant("<think>\nA thought that is dropped.\n</think>\n\n" + "A list. " * 20), user("And a slot?")]
    second, found = asked(engine, encoder, "second", answered)
    common = common_length(first, second)
    assert found > common - BLOCK > 200
    third, found = asked(engine, encoder, "another question instead", [*answered[:-1], user("Which blocks? " * 20)])
    assert found > common_length(second, third) - BLOCK > common  # also the answer as it is written now


def test_ends_are_few_and_in_the_prompt_however_long_it_is(tokenizer: Tokenizer) -> None:
    encoder = encoder_of(tokenizer, "Qwen3.5-4B")
    chat: Chat = [SYSTEM]
    for number in range(20):
        chat += [user(f"Question {number}. " * 10), assistant(f"Answer {number}. " * 10)]
    text, ids = encoder.encode_chat([*chat, user("The last one?")])
    ends = encoder.message_ends([*chat, user("The last one?")], (text, ids))
    words = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in ends]
    assert len(ends) == 3 and all(text.startswith(beginning) for beginning in words)
    assert [beginning[-35:].split("<|im_end|>")[1] for beginning in words] == ["\n<|im_start|>user\n"] * 2 + ["\n<|im_start|>assistant\n"]


def test_the_result_of_a_tool_and_an_answer_to_go_on_with_are_ends(tokenizer: Tokenizer) -> None:
    encoder = encoder_of(tokenizer, "Qwen3.5-4B")
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": "12:30"}
    chat: Chat = [user("What time is it?"), {**assistant(""), "tool_calls": [call]}, result]
    text, ids = encoder.encode_chat(chat)
    words = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in encoder.message_ends(chat, (text, ids))]
    assert [beginning.count("<|im_end|>") for beginning in words] == [1, 3]
    begun, options = [user("What time is it?"), assistant("It is")], {"continue_final_message": True}
    encoded = encoder.encode_chat(begun, options=options)
    (end,) = encoder.message_ends(begun, encoded, options=options)
    assert tokenizer.decode(encoded[1][:end], skip_special_tokens=False).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("fails", ["messages|length != 2", "messages[-1].content in ('Yes', '1. No')"])
def test_a_template_that_fails_for_others_fails_no_request(tokenizer: Tokenizer, fails: str) -> None:
    encoder = encoder_of(tokenizer, "Qwen3.5-4B")
    body = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    template = "{% if " + fails + " %}{{ raise_exception('no') }}{% endif %}" + body
    chat = [SYSTEM, user("hi")]
    encoded = encoder.encode_chat(chat, template=template)
    found = encoder.message_ends(chat, encoded, template=template)
    assert len(found) == (1 if "length" in fails else 0)
