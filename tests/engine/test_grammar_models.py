"""Grammars over a real model: one answer whatever computes and samples, and neighbours that do not notice."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo import llm as llm_module
from octavo.errors import RequestError, UnavailableError
from octavo.grammar import text as limits
from octavo.messages import AddRequest
from octavo.outputs import RequestOutput
from tests.support.engine_process import engine_process, is_idle, read, run, until

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GUIDED = [
    SamplingParams(temperature=0, max_tokens=120, structured_outputs={"json": SCHEMA}, logprobs=1),  # type: ignore[arg-type]
    SamplingParams(seed=3, n=3, max_tokens=120, top_k=40, structured_outputs=StructuredOutputsParams(json=json.dumps(SCHEMA))),
    SamplingParams(
        seed=4, top_p=0.9, max_tokens=60, presence_penalty=1, structured_outputs=StructuredOutputsParams(regex=r"[a-z]{4}\d/[ab]")
    ),
    SamplingParams(temperature=0, max_tokens=60, structured_outputs=StructuredOutputsParams(choice=("a girl", "a boy", "A dog"))),
]
PLAIN = [SamplingParams(temperature=0, max_tokens=20, logprobs=2), SamplingParams(seed=9, max_tokens=25, top_p=0.9, min_tokens=5)]
WAYS = {
    "native": ("", {}),
    "torch": ("", {"native": False}),
    "depth 2": ("", {"pipeline_depth": 2}),
    "device": ("runner=device", {"pipeline_depth": 2, "dtype": "float32"}),
    "preempting": ("preempt.every=3", {}),
}


def answers(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], str, str | None]]:
    return [(sample.token_ids, sample.text, sample.finish_reason) for output in outputs for sample in output.outputs]


@pytest.fixture(scope="module")
def said(stories: str) -> dict[str, tuple[list[RequestOutput], list[RequestOutput]]]:
    """By each way: plain answers alone, and beside guided ones, which come first."""
    found = {}
    for way, (switches, settings) in WAYS.items():
        with pytest.MonkeyPatch.context() as patch, LLM_under(switches, patch, stories, settings) as llm:
            alone = llm.generate(["Once upon a time"] * len(PLAIN), PLAIN, use_tqdm=False)
            llm.reset_prefix_cache()
            found[way] = alone, llm.generate(["Once upon a time"] * len(GUIDED + PLAIN), GUIDED + PLAIN, use_tqdm=False)
    return found


def LLM_under(switches: str, patch: pytest.MonkeyPatch, model: str, settings: dict[str, object]) -> LLM:
    patch.setenv("OCTAVO_DEBUG", switches)
    return LLM(model, max_num_seqs=12, num_gpu_blocks_override=120, **settings)  # type: ignore[arg-type]


# promise: samplingparams-structured-outputs
def test_every_way_to_compute_gives_the_same_answers(said: dict[str, tuple[list[RequestOutput], list[RequestOutput]]]) -> None:
    expected = answers(said["native"][1])
    for way, (_, both) in said.items():
        assert answers(both) == expected, way
    (*jsons, regex, choice) = [text for _, text, _ in expected[:6]]
    for text in jsons:
        assert json.loads(text).keys() == {"name", "age"}, text
    assert len(regex) == 7 and choice in ("a girl", "a boy", "A dog")
    assert {reason for _, _, reason in expected[:6]} == {"stop"}


def test_neighbours_of_a_grammar_say_what_they_say_without_it(said: dict[str, tuple[list[RequestOutput], list[RequestOutput]]]) -> None:
    for way, (alone, both) in said.items():
        neighbours = both[len(GUIDED) :]
        assert answers(neighbours) == answers(alone), way
        if way == "native":  # whose products are the same bits in any company
            assert neighbours[0].outputs[0].logprobs == alone[0].outputs[0].logprobs


def test_logprobs_are_those_of_the_raw_logits(said: dict[str, tuple[list[RequestOutput], list[RequestOutput]]]) -> None:
    for _, both in said.values():
        sample = both[0].outputs[0]
        assert sample.logprobs is not None
        ranks = [choices[token].rank for token, choices in zip(sample.token_ids, sample.logprobs)]
        assert max(ranks) > 1, "what the model would have said is still told"


def test_limits_are_checked_once_for_the_prompts_of_a_call(stories: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the caller's thread, before the engine hears of it; a step does not check at all."""
    checked = list[StructuredOutputsParams]()
    monkeypatch.setattr(llm_module, "check_limits", lambda form: (checked.append(form), limits.check_limits(form)))
    with LLM(stories, num_gpu_blocks_override=200) as llm:
        form = StructuredOutputsParams(grammar="\n" * 10_000 + 'start: "a"')
        outputs = llm.generate(["Once"] * 16, SamplingParams(n=2, structured_outputs=form))
        assert [sample.text for output in outputs for sample in output.outputs] == ["a"] * 32 and checked == [form]
        with pytest.raises(RequestError, match="repeats something 1,000,000 times"):
            llm.generate("Once", SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a{1000}){1000}")))


@pytest.mark.parametrize("switches", ["", "grammar.timeout=1"])
def test_an_engine_process_finds_the_vocabulary_by_itself_and_fails_a_request_alone(stories: str, switches: str) -> None:
    """It knows nothing of text until the first grammar comes."""

    async def work() -> None:
        async with engine_process(stories, switches) as llm:

            def asked(params: SamplingParams) -> AddRequest:
                return AddRequest("", llm.encoder.encode("Once upon a time")[1], params)

            bad = SamplingParams(structured_outputs=StructuredOutputsParams(json='{"$ref": "#"}'))
            good = [asked(params) for params in [*GUIDED[1:], PLAIN[1]]]
            refused, *told = await asyncio.gather(*(read(llm, one) for one in [asked(bad), *good]), return_exceptions=True)
            if switches:
                assert isinstance(refused, UnavailableError) and refused.code == "grammar_busy", "it may be tried again"
            else:
                assert isinstance(refused, RequestError) and (refused.param, refused.code) == ("structured_outputs", "grammar_error")
            assert isinstance(told[-1], list) and len([token for delta in told[-1] for token in delta.token_ids]) >= 5
            for each in told[:-1]:
                if switches:
                    assert isinstance(each, UnavailableError) and "took more than" in str(each)
                else:
                    assert isinstance(each, list) and {delta.finish_reason for delta in each if delta.finish_reason} == {"stop"}
            if not switches:
                assert isinstance(told[0], list)
                for index in range(3):
                    json.loads("".join(delta.text for delta in told[0] if delta.index == index))
            await until(lambda: is_idle(llm))

    run(work())
