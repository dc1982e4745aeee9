"""vLLM's CPU build, compiled and with prefix caching, as it comes."""

from typing import Any

from serve import Answers, Requests, serve
from vllm import LLM, SamplingParams, TokensPrompt


class VLLM:
    def __init__(self, settings: dict[str, Any]) -> None:
        self._llm = LLM(settings["model"], dtype="bfloat16", max_model_len=settings["max_model_len"], seed=0)
        self.times: list[list[float]] = []

    def prepare(self, requests: Requests) -> None:
        self._llm.reset_prefix_cache()

    def generate(self, requests: Requests) -> Answers:
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids, _ in requests]
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in requests]
        return [list(output.outputs[0].token_ids) for output in self._llm.generate(prompts, params, use_tqdm=False)]


if __name__ == "__main__":
    serve(VLLM)
