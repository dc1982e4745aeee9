"""`LLM.beam_search`: its results in vLLM's form, with text, and what it refuses."""

from pathlib import Path

import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import RequestError
from tests.support.story_folder import story_folder

PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play"
PERIOD = 426  # the id of "."


def test_answers_have_text_tokens_and_logprobs_best_first(stories: str) -> None:
    with LLM(stories, num_gpu_blocks_override=120, max_num_seqs=8) as llm:
        found, again = llm.beam_search([PROMPT, llm.get_tokenizer().encode(PROMPT)], BeamSearchParams(4, 30), use_tqdm=False)
        (greedy,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=30, logprobs=0), use_tqdm=False)
    scores = [answer.cum_logprob / len(answer.logprobs) for answer in found.sequences]
    assert len(scores) == 4 and scores == sorted(scores, reverse=True)
    assert found.sequences[0].cum_logprob > (greedy.outputs[0].cumulative_logprob or 0), "a likelier answer than the greedy one"
    for answer, same in zip(found.sequences, again.sequences, strict=True):
        assert answer.tokens == same.tokens and answer.text == same.text and answer.finish_reason == "length"
        assert answer.text is not None and answer.text.startswith(PROMPT) and len(answer.text) > len(PROMPT)
        said = answer.tokens[-30:]
        assert [choices[token].logprob for token, choices in zip(said, answer.logprobs, strict=True)] == pytest.approx(
            [next(iter(choices.values())).logprob for choices in answer.logprobs]
        )
        assert all(len(choices) == 8 for choices in answer.logprobs), "as many alternatives as candidates"


def test_an_end_id_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    with LLM(str(story_folder(tmp_path, end_ids=[PERIOD])), num_gpu_blocks_override=200, max_num_seqs=8) as llm:
        (cut,) = llm.beam_search(PROMPT, BeamSearchParams(3, 40), use_tqdm=False)
        (kept,) = llm.beam_search(PROMPT, BeamSearchParams(3, 40, include_stop_str_in_output=True), use_tqdm=False)
    ended = [(one, other) for one, other in zip(cut.sequences, kept.sequences, strict=True) if one.finish_reason == "stop"]
    assert ended, "no beam came to an end"
    for one, other in ended:
        assert other.tokens == [*one.tokens, PERIOD] and len(one.logprobs) == len(other.logprobs)
        assert one.text is not None and other.text == one.text + "."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0), ("beam_width", 9), ("beam_width", "4"), ("max_tokens", 0), ("max_tokens", None), ("length_penalty", 17),
        ("length_penalty", float("nan")), ("early_stopping", "always"), ("early_stopping", 1), ("ignore_eos", 1), ("temperature", -1),
    ],
)  # fmt: skip
def test_what_makes_no_search_is_refused_by_name(stories: str, name: str, value: object) -> None:
    with LLM(stories, num_gpu_blocks_override=120, max_num_seqs=8) as llm, pytest.raises(ValueError) as refused:
        llm.beam_search(PROMPT, BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | {name: value})), use_tqdm=False)  # type: ignore[arg-type]
    assert isinstance(refused.value, RequestError) and refused.value.param == name


def test_sampling_params_are_no_search(stories: str) -> None:
    with LLM(stories, num_gpu_blocks_override=120, max_num_seqs=8) as llm, pytest.raises(RequestError, match="BeamSearchParams"):
        llm.beam_search(PROMPT, SamplingParams(), use_tqdm=False)  # type: ignore[arg-type]
