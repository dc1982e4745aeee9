"""`bad_words`: an answer never completes one, in whatever place its tokens begin."""

from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import RequestError

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play"


@pytest.fixture(scope="module", params=[1, 2], ids=["depth1", "depth2"])
def llm(stories: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(stories, num_gpu_blocks_override=200, max_num_seqs=8, pipeline_depth=request.param) as llm:
        yield llm


def texts(llm: LLM, words: list[str], n: int = 6) -> list[str]:
    params = SamplingParams(n=n, seed=3, max_tokens=60, ignore_eos=True, bad_words=words)
    return [sample.text for sample in llm.generate(PROMPT, params, use_tqdm=False)[0].outputs]


# promise: samplingparams-bad-words
def test_the_word_never_comes_and_the_rest_of_the_text_is_as_it_was(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=52)
    plain = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].text
    assert " ball" in plain and " red" in plain
    without = SamplingParams(temperature=0, max_tokens=52, bad_words=["ball"])
    (output,) = llm.generate(PROMPT, without, use_tqdm=False)
    changed = output.outputs[0]
    assert " ball" not in changed.text
    spelled = llm.encoder.spellings(["ball"])
    assert all(len(ids) > 1 for ids in spelled), "choose a word of several tokens"
    begun = plain[: plain.index(" ball")]
    assert changed.text.startswith(begun), "its first tokens alone are no reason to change anything"


def test_samples_and_several_words_at_once(llm: LLM) -> None:
    words = ["She", "he", "was", "the", "to", "and", "day"]
    plain = texts(llm, [])
    tokenizer = llm.get_tokenizer()
    spelled = llm.encoder.spellings(words)
    params = SamplingParams(n=6, seed=3, max_tokens=60, ignore_eos=True, bad_words=words)
    outputs = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs

    def holds(ids: list[int]) -> bool:
        return any(ids[i : i + len(word)] == word for word in spelled for i in range(len(ids)))

    assert sum(holds(tokenizer.encode(PROMPT + text)[len(tokenizer.encode(PROMPT)) :]) for text in plain) == 6
    assert not any(holds(sample.token_ids) for sample in outputs)


def test_a_prompt_may_hold_the_word_and_may_end_with_its_beginning(llm: LLM) -> None:
    ids = llm.encoder.spellings(["ball"])[-1]
    prompt = llm.get_tokenizer().encode(PROMPT + " with the")
    params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[ids[-1]], bad_words=["ball"])
    (output,) = llm.generate([prompt + ids[:-1]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [ids[-1]], "only what the answer itself completes counts"


def test_a_ban_of_everything_that_is_allowed_is_lifted(llm: LLM) -> None:
    single = next(ids for ids in llm.encoder.spellings(["a", "b", "c", "d"]) if len(ids) == 1)
    word = llm.get_tokenizer().decode(single)
    params = SamplingParams(temperature=0, max_tokens=3, allowed_token_ids=single, bad_words=[word])
    assert llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids == single * 3


def test_words_are_spelled_once_for_all_prompts_that_have_the_same(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    spelled, spellings = list[tuple[str, ...]](), llm.encoder.spellings

    def counted(words: tuple[str, ...]) -> list[list[int]]:
        spelled.append(words)
        return spellings(words)

    monkeypatch.setattr(llm.encoder, "spellings", counted)
    one, other = (SamplingParams(max_tokens=2, bad_words=[word]) for word in ("ball", "park"))
    llm.generate([PROMPT] * 4, [one, other, one, other], use_tqdm=False)
    assert spelled == [("ball",), ("park",)]


# promise: samplingparams-bad-words
def test_preemption_does_not_let_a_word_through(stories: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = texts(llm, ["ball", "play"])
    monkeypatch.setenv("OCTAVO_DEBUG", "preempt.every=2,check=1")
    with LLM(stories, num_gpu_blocks_override=200, max_num_seqs=8) as again:
        assert texts(again, ["ball", "play"]) == expected


def test_words_need_a_tokenizer(stories: str) -> None:
    with (
        LLM(stories, num_gpu_blocks_override=20, skip_tokenizer_init=True) as llm,
        pytest.raises(RequestError, match="bad_words needs a tokenizer"),
    ):
        llm.generate([[1, 2]], SamplingParams(bad_words=["x"]), use_tqdm=False)
