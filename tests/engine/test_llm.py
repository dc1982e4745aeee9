"""`LLM` as a user meets it: every form of a prompt, streams, several at once, closing, and what it refuses."""

import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, RequestOutput, SamplingParams, TextPrompt, TokensPrompt
from octavo.bench.loads import cpu
from octavo.errors import EngineError, RequestError
from octavo.messages import AddRequest
from octavo.outputs import TextDelta
from octavo.text.conversation import common_length
from tests.support.closing import assert_closing_frees
from tests.support.story_folder import TEMPLATE

PROMPT = "Once upon a time"
LONG = "Once upon a time, there was a little girl named Lily. She loved to play"  # 21 tokens
GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(seed=3, max_tokens=24, ignore_eos=True)


def opened(folder: str, depth: int = 1, max_num_seqs: int = 8, blocks: int = 120) -> LLM:
    return LLM(folder, num_gpu_blocks_override=blocks, max_num_seqs=max_num_seqs, pipeline_depth=depth)


@pytest.fixture(scope="module")
def llm(stories: str) -> Iterator[LLM]:
    with opened(stories) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test did to the shared engine, no block, row or request may stay taken."""
    yield
    if "llm" in request.fixturenames:
        assert_idle(request.getfixturevalue("llm"))


def assert_idle(llm: LLM) -> None:
    stats = llm.stats()
    assert (stats.running, stats.waiting, stats.free_blocks) == (0, 0, stats.num_blocks - 1)
    assert not llm._outputs._requests


def text_of(output: RequestOutput) -> str:
    return output.outputs[0].text


def joined(deltas: list[TextDelta], index: int = 0) -> tuple[str, list[int]]:
    mine = [delta for delta in deltas if delta.index == index]
    return "".join(delta.text for delta in mine), [token for delta in mine for token in delta.token_ids]


# --- prompts, params, results ----------------------------------------------------------------------------------------


# promise: octavo-import-llm, get-tokenizer, prompts-str-list, requestoutput-request-id
def test_every_form_of_a_prompt_gives_the_same_text(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode(LONG)
    named: list[Any] = [{"prompt_token_ids": ids}, {"prompt": LONG}, TokensPrompt(prompt_token_ids=ids), TextPrompt(prompt=LONG)]
    named.append(TokensPrompt(prompt_token_ids=ids, prompt="as it was said"))
    forms: list[Any] = [LONG, ids, tuple(ids), *named]
    outputs = [output for form in forms for output in llm.generate(form, GREEDY)] + llm.generate(forms, GREEDY)
    assert {text_of(output) for output in outputs} == {" outside in the park. One day, she saw a big, red ball."}
    assert [output.prompt for output in outputs] == [LONG, None, None, None, LONG, None, LONG, "as it was said"] * 2
    assert all(output.prompt_token_ids == ids and output.finished for output in outputs)
    assert len({output.request_id for output in outputs}) == 16
    assert llm.generate([]) == []


def test_prompt_and_text_joined_are_the_text_of_all_tokens(llm: LLM) -> None:
    """A completion goes on where the prompt ended: a space that starts it is part of it."""
    for prompt in (PROMPT, LONG, "One day, a cat"):
        (output,) = llm.generate(prompt, GREEDY)
        whole = llm.get_tokenizer().decode(output.prompt_token_ids + output.outputs[0].token_ids)
        assert prompt + text_of(output) == whole


# promise: generate-prompts-params
def test_results_come_in_the_order_of_prompts_each_with_its_own_params(llm: LLM) -> None:
    prompts = [LONG, PROMPT, "One day, a cat", "Tim and Sam", LONG]
    params = [SamplingParams(temperature=0, max_tokens=30 - 6 * number, ignore_eos=True) for number in range(5)]
    alone = [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params)]
    together = llm.generate(prompts, params)
    assert [output.prompt for output in together] == prompts
    assert [text_of(output) for output in together] == [text_of(output) for output in alone]
    assert [len(output.outputs[0].token_ids) for output in together] == [30, 24, 18, 12, 6]


# promise: llm-dtype-max, samplingparams-max-tokens, without-params-max, rendered-templates-tokenised
def test_defaults_are_sixteen_tokens_for_generate_and_the_rest_of_the_context_for_chat(endless: str) -> None:
    messages = [{"role": "user", "content": "Once upon a "}, {"role": "user", "content": "time"}]
    with LLM(endless, max_model_len=64, num_gpu_blocks_override=20, max_num_seqs=4) as llm:
        (completed,) = llm.generate(PROMPT)
        (answered,) = llm.chat(messages)
        streamed = joined(list(llm.stream_chat(messages)))
        (unsaid,) = llm.chat(messages, SamplingParams(seed=1))
        (capped,) = llm.chat(messages, SamplingParams(max_tokens=16))
    assert len(completed.outputs[0].token_ids) == len(capped.outputs[0].token_ids) == 16
    assert answered.prompt_token_ids == completed.prompt_token_ids, "the template writes BOS, so the tokenizer must not"
    assert answered.prompt == "<s>" + PROMPT
    assert len(answered.prompt_token_ids) + len(answered.outputs[0].token_ids) == 64 and answered.outputs[0].finish_reason == "length"
    assert len(answered.prompt_token_ids) + len(streamed[1]) == 64
    assert len(answered.prompt_token_ids) + len(unsaid.outputs[0].token_ids) == 64, "params without a length leave it open"


def test_lower_priority_numbers_run_first(endless: str) -> None:
    with LLM(endless, scheduling_policy="priority", max_num_seqs=1, kv_cache_memory_bytes=2**24) as llm:
        prompts, params = ["One", "Two", "Three"], SamplingParams(temperature=0, max_tokens=4)
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=[5, 0, -3])
        started = [output.metrics.first_scheduled or 0.0 for output in outputs]
        assert started[2] < started[1] < started[0]
        with pytest.raises(RequestError, match="priority"):
            llm.generate(prompts, params, use_tqdm=False, priority=[1, 2])


# promise: chat
def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    one, other = ([{"role": "user", "content": text}] for text in (PROMPT, LONG))
    expected = [text_of(output) for output in llm.generate([PROMPT, LONG], GREEDY)]
    assert [text_of(output) for output in llm.chat(one, GREEDY)] == expected[:1]
    assert [text_of(output) for output in llm.chat([one, other], GREEDY)] == expected
    assert joined(list(llm.stream_chat(other, GREEDY)))[0] == expected[1]


def test_a_chat_names_the_ends_of_its_messages_to_a_model_that_keeps_states(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [{"role": "system", "content": "Once upon a time"}, {"role": "user", "content": " there was"}]
    other = [chat[0], {"role": "user", "content": "Tim and Lily"}]
    added, add = list[AddRequest](), llm._core.add
    monkeypatch.setattr(llm._core, "add", lambda request: (added.append(request), add(request)))
    for keeps in (False, True):
        monkeypatch.setattr(llm._core.scheduler.kv, "keeps_states", keeps)
        llm.chat([chat, other], GREEDY)
        list(llm.stream_chat(chat, GREEDY))
    assert [bool(request.checkpoints) for request in added] == [False] * 3 + [True] * 3
    one, two, streamed = added[3:]
    system = common_length(one.prompt_token_ids, two.prompt_token_ids)
    assert one.checkpoints == streamed.checkpoints == [system, len(one.prompt_token_ids)] and two.checkpoints[0] == system


# promise: chat-template
# promise: chat-tools
def test_chatml_without_a_place_for_tools_gets_one_for_conversations_with_tools(stories: str, tmp_path: Path) -> None:
    folder = shutil.copytree(stories, tmp_path / "chatml")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    one = SamplingParams(max_tokens=1)
    with LLM(str(folder), num_gpu_blocks_override=150, hf_overrides={"max_position_embeddings": 2048}) as llm:
        with_tools, without = (llm.chat([{"role": "user", "content": "Hi"}], one, False, tools=tools)[0].prompt for tools in ([tool], None))
    assert with_tools is not None and '"name": "weather"' in with_tools
    assert without == "<|im_start|>user\nHi<|im_end|>"


def test_a_chat_template_file_wins_over_the_models_own(stories: str, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("One day, " + TEMPLATE.removeprefix("{{ bos_token }}"))
    with LLM(stories, chat_template=str(tmp_path / "mine.jinja"), num_gpu_blocks_override=20) as llm:
        (output,) = llm.chat([{"role": "user", "content": "a cat"}], GREEDY)
    assert output.prompt == "One day, a cat"


# --- streams ---------------------------------------------------------------------------------------------------------


# promise: completionoutput-index-text, llm-stream-prompt
def test_deltas_of_a_stream_joined_are_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(seed=9, n=3, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate(LONG, params)
    deltas = list(llm.stream(LONG, params))
    for index, completion in enumerate(output.outputs):
        mine = [delta for delta in deltas if delta.index == index]
        assert joined(deltas, index) == (completion.text, completion.token_ids)
        assert [delta.finish_reason for delta in mine] == [None] * 19 + ["length"]
    assert len({completion.text for completion in output.outputs}) == 3
    assert deltas[0].life is not None and deltas[-1].life is not None and deltas[-1].life.finished is not None


@pytest.mark.parametrize("depth", [1, 2])
def test_leaving_a_stream_early_aborts_its_request_and_frees_its_blocks(stories: str, depth: int) -> None:
    with opened(stories, depth) as llm:
        for moment in (0, 1, 5):
            stream = llm.stream(LONG, SamplingParams(max_tokens=400, n=2, ignore_eos=True))
            for _ in range(moment):
                next(stream)
            assert (llm.stats().running + llm.stats().waiting > 0) == (moment > 0)
            stream.close()
            assert_idle(llm)
        for _ in llm.stream(PROMPT, GREEDY):
            break
        assert_idle(llm)
        assert text_of(llm.generate(PROMPT, GREEDY)[0]).startswith(", there was a little girl")


@pytest.mark.parametrize("depth", [1, 2])
def test_streams_and_generate_may_take_turns(stories: str, depth: int) -> None:
    with opened(stories, depth) as llm:
        alone = [text_of(output) for output in llm.generate([PROMPT, LONG, "Tim and Sam"], SEEDED)]
        one, other = llm.stream(PROMPT, SEEDED), llm.stream(LONG, SEEDED)
        first = [next(one), next(other), next(one)]
        (whole,) = llm.generate("Tim and Sam", SEEDED)  # runs both streams on, which keep what it brings them
        assert text_of(whole) == alone[2]
        rest = [*one, *other]
        for number, request_id in enumerate([first[0].request_id, first[1].request_id]):
            assert joined([d for d in first + rest if d.request_id == request_id])[0] == alone[number]
        assert_idle(llm)


# promise: samplingparams-clone
def test_params_that_are_changed_while_a_request_runs_change_later_requests_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, stop="ball")
    stream = llm.stream(LONG, params)
    deltas = [next(stream)]
    params.max_tokens, params.include_stop_str_in_output = 30, True
    assert joined([*deltas, *stream])[0] == " outside in the park. One day, she saw a big, red "
    assert text_of(llm.generate(LONG, params)[0]) == " outside in the park. One day, she saw a big, red ball"


# --- opening and closing ---------------------------------------------------------------------------------------------


# promise: llm-context-manager
def test_a_closed_llm_says_so_and_closing_twice_is_harmless(stories: str) -> None:
    with opened(stories) as llm:
        stream = llm.stream(PROMPT, GREEDY)
        next(stream)
    llm.close()
    for use in (
        lambda: llm.generate(PROMPT), lambda: next(llm.stream(PROMPT)), lambda: next(stream), llm.stats, llm.reset_prefix_cache,
        lambda: llm.chat([{"role": "user", "content": "Hi"}]), lambda: llm.max_model_len,
    ):  # fmt: skip
        with pytest.raises(EngineError, match="this LLM is closed"):
            use()
    assert llm.get_tokenizer().encode(PROMPT)
    stream.close()


# promise: closing-llm-frees
def test_closing_frees_weights_and_cache_at_once(stories: str) -> None:
    llm = LLM(stories, native=False, num_gpu_blocks_override=60)
    llm.generate([PROMPT, LONG], GREEDY)
    runner = llm._core.executor  # type: ignore[attr-defined]
    model = runner.program.model
    kept = [weakref.ref(model), *map(weakref.ref, model.parameters()), weakref.ref(runner.store.caches[0]["k"])]
    kept.append(weakref.ref(runner.table.token_ids))
    del runner, model
    assert len(kept) == 35
    assert_closing_frees(llm, kept)


# promise: two-llm-may
def test_two_may_live_in_one_process(stories: str, endless: str) -> None:
    with opened(stories) as one, opened(endless, depth=2) as other:
        streams = [one.stream(LONG, SEEDED), other.stream(LONG, SEEDED)]
        texts = ["".join(delta.text for delta in pair) for pair in zip(*streams)]
        assert all(text[: len(text) // 2] == text[len(text) // 2 :] for text in texts)
        one.close()
        assert text_of(other.generate(PROMPT, GREEDY)[0]).startswith(", there was")


# promise: unknown-keyword-typeerror
def test_an_unknown_keyword_is_a_type_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="LLM has no setting 'max_modl_len'; did you mean max_model_len"):
        LLM(max_modl_len=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0.5)  # type: ignore[call-arg]


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    ("", None, "the prompt is empty", "prompt", None),
    ([], None, "the prompt is empty", "prompt", None),
    ([1, 512], None, "token id 512 in prompt is out of vocabulary, which has 512 ids", "prompt", None),
    ([1, -1], None, "token id -1 in prompt is out of vocabulary", "prompt", None),
    ([1, 2**63], None, "out of vocabulary", "prompt", None),
    ([1, True], None, "a prompt is a str, a list of token ids", "prompt", None),
    ([1, 2.0], None, "a prompt is a str, a list of token ids", "prompt", None),
    ([1, "2"], None, "a prompt is a str, a list of token ids", "prompt", None),
    ([[1]], None, "a prompt is a str, a list of token ids", "prompt", None),
    ({"prompt": 5}, None, "a prompt is a str, a list of token ids", "prompt", None),
    ({"prompt": None}, None, "a prompt is a str, a list of token ids", "prompt", None),
    ({"prompt": "Hi", "prompt_token_ids": "Hi"}, None, "a prompt is a str, a list of token ids", "prompt", None),
    ({"prompt": "Hi", "multi_modal_data": {}}, None, "no field 'multi_modal_data': images.* send text", "prompt", None),
    ({"promt": "Hi"}, None, "a prompt has no field 'promt'; did you mean prompt", "prompt", None),
    (None, None, "a prompt is a str, a list of token ids", "prompt", None),
    ("a\ud83d", None, "unpaired surrogate at character 1", None, None),
    ([1] * 512, SamplingParams(max_tokens=1), "context length is 512 tokens.*512 in the prompt", "prompt", "context_length_exceeded"),
    ([1] * 500, SamplingParams(max_tokens=13), "500 in the prompt and 13 in the answer", "max_tokens", "context_length_exceeded"),
    ([1], SamplingParams(n=9), "n is 9, but at most 8 sequences", "n", None),
    ([1], SamplingParams(logprobs=21), "logprobs is 21, max_logprobs is 20", "logprobs", None),
    ([1], SamplingParams(stop_token_ids=(512,)), "token id 512 in stop_token_ids is out of vocabulary", "stop_token_ids", None),
]  # fmt: skip


# promise: max-logprobs, context-length-exceeded
@pytest.mark.parametrize(("prompt", "params", "said", "param", "code"), REFUSED)
def test_one_bad_request_refuses_the_call_by_name_and_number(
    llm: LLM, prompt: Any, params: SamplingParams | None, said: str, param: str | None, code: str | None
) -> None:
    params = params or GREEDY
    with pytest.raises(RequestError, match=said) as refusal:
        llm.generate([PROMPT, LONG, prompt, PROMPT], [GREEDY, GREEDY, params, GREEDY])
    assert isinstance(refusal.value, ValueError)
    assert (refusal.value.param, refusal.value.code, refusal.value.index) == (param, code, 2)
    with pytest.raises(RequestError, match=said):
        next(llm.stream(prompt, params))


# promise: generate-prompts-params
def test_a_call_of_the_wrong_shape_is_refused(llm: LLM) -> None:
    wrong = "sampling_params must be"
    for params, said in (([GREEDY], "2 prompts, but 1 sampling params"), ({"n": 1}, wrong), ([GREEDY, {}], wrong)):
        with pytest.raises(RequestError, match=said) as refusal:
            llm.generate([PROMPT, LONG], params)  # type: ignore[arg-type]
        assert refusal.value.param == "sampling_params"
    for prompts in (None, 5):
        with pytest.raises(RequestError, match="prompts must be one prompt or a list of them, not"):
            llm.generate(prompts)  # type: ignore[arg-type]
    chats: list[Any] = [[], "Hi", None, {"role": "user", "content": "Hi"}, [[]], ["Hi"], [{"role": "boss", "content": "Hi"}]]
    for messages in chats:
        with pytest.raises(RequestError, match="messages"):
            llm.chat(messages)


def test_arguments_of_a_chat_are_refused_by_name(llm: LLM) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"chat_template": "{% if %}"}, "chat template of this call is not valid"),
        ({"chat_template": 5}, "chat_template must be the text of a template, not int"),
        ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs must be an object, not list"),
        ({"chat_template_kwargs": {"colour": True}}, "chat_template_kwargs has 'colour'; it may have enable_thinking"),
        ({"add_generation_prompt": "yes"}, "add_generation_prompt must be true or false, got 'yes'"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "exclude each other"),
        ({"tools": {"type": "function"}}, "tools must be a list, not dict"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be"),
    ]
    for arguments, said in wrong:
        with pytest.raises(ValueError, match=said):
            llm.chat([{"role": "user", "content": "Hi"}], GREEDY, **arguments)


# promise: llm-dtype-max
def test_without_a_tokenizer_ids_go_in_and_out_and_text_is_refused(stories: str) -> None:
    with LLM(stories, skip_tokenizer_init=True, num_gpu_blocks_override=20) as llm:
        (output,) = llm.generate([1, 403, 407, 261, 378], SamplingParams(temperature=0, max_tokens=3, logprobs=1))
        assert output.outputs[0].token_ids == [432, 383, 286] and output.outputs[0].text == ""
        assert output.outputs[0].logprobs is not None and output.outputs[0].logprobs[0][432].decoded_token is None
        with pytest.raises(RequestError, match=r"stop strings need a tokenizer.*stop_token_ids"):
            llm.generate([1], SamplingParams(stop=("x",)))
        with pytest.raises(RequestError, match="a text prompt needs a tokenizer"):
            llm.generate(PROMPT)
        with pytest.raises(RequestError, match="chat needs a tokenizer"):
            llm.chat([{"role": "user", "content": "Hi"}])
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.get_tokenizer()
        assert_idle(llm)


# --- a load of the published kind ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_shared32_computes_its_prefix_of_512_tokens_once(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "runner=fake")
    load = cpu([(7919 * place) % 49_000 for place in range(21_000)])["shared32"]
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in load]
    with LLM(skip_tokenizer_init=True, num_gpu_blocks_override=400, pipeline_depth=depth) as llm:
        outputs = llm.generate([prompt for prompt, _ in load], params)
        stats = llm.stats()
    assert sorted(output.num_cached_tokens for output in outputs) == [0] + [512] * 31
    assert stats.prompt_tokens == 512 + 32 * 32
    assert (stats.generation_tokens, stats.preemptions) == (32 * 32, 0)
