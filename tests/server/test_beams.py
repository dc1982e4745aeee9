"""Beam search through the openai client: what the engine finds offline. What it cannot have beside it is in the table of bad inputs."""

from octavo import BeamSearchParams
from tests.server.conftest import Served

PROMPTS = ["Once upon a time", "The dog was"]


# promise: extra-body-beams
def test_completions_are_those_of_the_python_api(served: Served) -> None:
    found = served.offline.beam_search(PROMPTS, BeamSearchParams(4, 12, length_penalty=0.6, early_stopping=True), use_tqdm=False)
    texts = [answer.text for output in found for answer in output.sequences]
    search = {"use_beam_search": True, "length_penalty": 0.6, "early_stopping": True}
    create = served.client.completions.create
    answer = create(model="stories", prompt=PROMPTS, n=4, max_tokens=12, echo=True, extra_body=search)
    assert [choice.text for choice in answer.choices] == texts and len(set(texts)) == 8
    best = create(model="stories", prompt=PROMPTS[0], n=2, max_tokens=12, echo=True, temperature=0.7, extra_body=search | {"beam_width": 4})
    assert [choice.text for choice in best.choices] == texts[:2], "the best 2 of 4"
    assert best.usage and best.usage.completion_tokens == sum(
        len(one.tokens) - best.usage.prompt_tokens + (one.finish_reason == "stop") for one in found[0].sequences[:2]
    )


def test_a_chat_gets_logprobs_of_its_beams(served: Served) -> None:
    answer = served.client.chat.completions.create(
        model="stories", messages=[{"role": "user", "content": "A"}], n=3, max_tokens=8, logprobs=True, top_logprobs=2,
        extra_body={"use_beam_search": True},
    )  # fmt: skip
    sums = []
    for choice in answer.choices:
        assert choice.logprobs and choice.logprobs.content
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
        sums.append(sum(token.logprob for token in choice.logprobs.content) / len(choice.logprobs.content))
    assert len({choice.message.content for choice in answer.choices}) == 3 and sums == sorted(sums, reverse=True)
