"""transformers' `generate`: one left-padded batch, as its users run it; an answer is cut at its own length afterwards."""

from typing import Any

import torch
from serve import Answers, Requests, serve
from transformers import AutoModelForCausalLM


class Transformers:
    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16).eval()
        self.times: list[list[float]] = []

    def prepare(self, requests: Requests) -> None:
        """Nothing is kept between calls."""

    @torch.inference_mode()
    def generate(self, requests: Requests) -> Answers:
        longest, count = max(len(ids) for ids, _ in requests), max(count for _, count in requests)
        padded = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in requests])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in requests])
        made = self._model.generate(
            padded, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return [row[longest : longest + wanted].tolist() for row, (_, wanted) in zip(made, requests)]


if __name__ == "__main__":
    serve(Transformers)
