"""Requests that ask for their logits to be adjusted, over a few ids that meet often."""

from dataclasses import dataclass

from hypothesis import strategies as st

from octavo.sampling_params import SamplingParams


@dataclass(frozen=True)
class Asked:
    params: SamplingParams
    end_ids: tuple[int, ...]
    bad_words: list[list[int]]
    ids: list[int]  # prompt and output so far
    num_prompt: int


@st.composite
def asking(draw: st.DrawFn, vocab: int) -> Asked:
    """One that asks for something."""
    token = st.integers(0, vocab - 1) | st.integers(0, 3)
    ids = draw(st.lists(token, min_size=1, max_size=30))
    words = draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=10))
    # words that the output has begun, too
    words += [[*ids[len(ids) - size :], draw(token)] for size in draw(st.lists(st.integers(0, min(3, len(ids))), max_size=2))]
    words = words or [[0]]
    params = SamplingParams(
        max_tokens=None,
        min_tokens=draw(st.sampled_from([0, 0, 1, 9, 40])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.7, 1.5])),
        presence_penalty=draw(st.sampled_from([0.0, 0.4])),
        logit_bias=draw(st.none() | st.dictionaries(token, st.sampled_from([-100.0, -0.3, 2.5]), max_size=10)),
        allowed_token_ids=draw(st.none() | st.lists(token, min_size=1, max_size=12)),
        temperature=draw(st.sampled_from([0.0, 0.8])),
        bad_words=("as ids they are beside",),
    )
    return Asked(params, tuple(draw(st.sets(token, max_size=3))), words, ids, draw(st.integers(1, len(ids))))
