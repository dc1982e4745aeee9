"""Nothing of one request appears in another's text: each may write one letter only, and each has its own."""

import pytest

from octavo import LLM, SamplingParams

LETTERS = "abcdefghijklmno"
PROMPT = "Once upon a time, there was a little girl named Lily. She loved to play"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_letter_of_a_request_stands_in_its_own_text_alone(stories: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_DEBUG", "check=1,preempt.every=3")
    with LLM(stories, num_gpu_blocks_override=40, block_size=4, max_num_seqs=6, pipeline_depth=depth) as llm:
        tokenizer = llm.get_tokenizer()
        spelled = {token: tokenizer.token_bytes(token).decode().strip() for token in range(259, 512)}
        marks = [[token for token, text in spelled.items() if set(text) == {letter}] for letter in LETTERS]
        assert all(marks)
        params = [SamplingParams(n=1 + number % 3, max_tokens=6 + number, allowed_token_ids=mark) for number, mark in enumerate(marks)]
        outputs = llm.generate([PROMPT + " with" * (number % 4) for number in range(len(LETTERS))], params)
        stats = llm.stats()
    assert stats.preemptions > 5 and stats.prefix_hits > 0
    for letter, asked, output in zip(LETTERS, params, outputs):
        assert len(output.outputs) == asked.n
        for sample in output.outputs:
            assert set(sample.text.replace(" ", "")) == {letter} and len(sample.token_ids) == asked.max_tokens
