"""Beam search beside transformers, in one run on this CPU: `python bench/beam_search.py [--width 4] [--tokens 64] [--prompts 1 4]`.

Both have the default model's weights in float32 and search the same prompts, with all cores. Rates are tokens of answers a second: the
tokens of each prompt's best answer, over the time of the whole call. Each is run `--rounds` times in turn, and the best is told. The
answers are compared, too. Octavo also runs as users run it, with the weights as they are in the file.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo import LLM, BeamSearchParams
from octavo.loading.resolve import resolve_model
from tests.support.smollm2 import reference_smollm2

TEXT = Path(__file__).parents[1] / "tests/data/prompts/questions.txt"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def prompts_of(llm: LLM, count: int, length: int) -> list[list[int]]:
    """Prompts of equal length, so that transformers need not pad."""
    ids = llm.get_tokenizer().encode(TEXT.read_text(), add_special_tokens=False)
    ids *= -(-(count + length) // len(ids))
    return [ids[7 * number :][:length] for number in range(count)]


def timed(search: Callable[[], list[list[int]]]) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    answers = search()
    return time.perf_counter() - start, answers


def ours(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> Callable[[], list[list[int]]]:
    def search() -> list[list[int]]:
        llm.reset_prefix_cache()
        outputs = llm.beam_search(prompts, params, use_tqdm=False)
        return [output.sequences[0].tokens[len(prompt) :] for prompt, output in zip(prompts, outputs, strict=True)]

    return search


def theirs(model: Any, prompts: list[list[int]], params: BeamSearchParams) -> Callable[[], list[list[int]]]:
    @torch.inference_mode()
    def search() -> list[list[int]]:
        ids = torch.tensor(prompts)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=params.beam_width, do_sample=False, max_new_tokens=params.max_tokens,
            min_new_tokens=params.max_tokens, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return [answer[len(prompts[0]) :] for answer in found.tolist()]

    return search


def main() -> None:
    options = arguments()
    params = BeamSearchParams(options.width, options.tokens, ignore_eos=True)
    model = reference_smollm2(resolve_model(None).path)
    with LLM(dtype="float32", quantization="none") as floats, LLM() as usual:
        for count in options.prompts:
            prompts = prompts_of(floats, count, options.prompt_tokens)
            runs = {
                "transformers, float32": theirs(model, prompts, params),
                "octavo, float32": ours(floats, prompts, params),
                "octavo, as in the file": ours(usual, prompts, params),
            }
            seconds: dict[str, float] = {}
            answers: dict[str, list[list[int]]] = {}
            for _ in range(options.rounds):
                for name, search in runs.items():
                    took, answers[name] = timed(search)
                    seconds[name] = min(took, seconds.get(name, took))
            first, *_ = runs
            equal = sum(one == other for one, other in zip(answers[first], answers["octavo, float32"], strict=True))
            print(f"{count} prompts of {options.prompt_tokens} tokens, {options.tokens} tokens each, width {options.width}")
            for name, took in seconds.items():
                rate = count * options.tokens / took
                print(f"  {name:24} {took:7.2f} s  {rate:7.1f} tokens/s  {seconds[first] / took:5.2f}x")
            print(f"  best answers in float32 that are the same: {equal} of {count}")


if __name__ == "__main__":
    main()
