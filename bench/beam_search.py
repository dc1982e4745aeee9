"""Beam search beside transformers, in one run: `python bench/beam_search.py [--device cuda] [--width 4] [--tokens 64] [--prompts 1 4]`.

    on a CPU    the default model: its weights in float32, with all cores; Octavo also as users run it, with the weights in the file
    on a GPU    random weights in the shape of Qwen3-0.6B, in float32 and in bfloat16

All search the same prompts. Rates are tokens of answers a second: the tokens of each prompt's best answer, over the time of the whole
call. Each is run `--rounds` times in turn after a short warm-up, and the best is told. The answers in float32 are compared, too.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

from octavo import LLM, BeamSearchParams
from octavo.bench import loads
from octavo.loading.resolve import resolve_model
from tests.support.smollm2 import reference_smollm2

TEXT = Path(__file__).parents[1] / "tests/data/prompts/questions.txt"
WARM_UP_TOKENS = 4
Dtype = Literal["float32", "bfloat16"]
Prompts = list[list[int]]
Search = Callable[[Prompts, BeamSearchParams], list[list[int]]]  # returns the best answer to each prompt


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


def ours(llm: LLM) -> Search:
    def search(prompts: Prompts, params: BeamSearchParams) -> list[list[int]]:
        llm.reset_prefix_cache()
        outputs = llm.beam_search(prompts, params, use_tqdm=False)
        return [output.sequences[0].tokens[len(prompt) :] for prompt, output in zip(prompts, outputs, strict=True)]

    return search


def theirs(model: Any) -> Search:
    @torch.inference_mode()
    def search(prompts: Prompts, params: BeamSearchParams) -> list[list[int]]:
        ids = torch.tensor(prompts, device=model.device)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=params.beam_width, do_sample=False, max_new_tokens=params.max_tokens,
            min_new_tokens=params.max_tokens, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return [answer[len(prompts[0]) :] for answer in found.tolist()]

    return search


def of_default_model(stack: ExitStack) -> tuple[dict[str, Search], list[int]]:
    """Returns searches by name, and the ids of a text."""
    floats, usual = (stack.enter_context(llm) for llm in (LLM(dtype="float32", quantization="none"), LLM()))
    ids = floats.get_tokenizer().encode(TEXT.read_text(), add_special_tokens=False)
    model = reference_smollm2(resolve_model(None).path)
    return {"transformers, float32": theirs(model), "octavo, float32": ours(floats), "octavo, as in the file": ours(usual)}, ids


def of_random_weights(
    stack: ExitStack, shape: dict[str, Any], device: str, dtypes: tuple[Dtype, ...] = ("float32", "bfloat16")
) -> tuple[dict[str, Search], list[int]]:
    """The same, of weights that transformers draws and both read. Without a text, the ids are random too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    Path(folder, "config.json").write_text(json.dumps({name: value for name, value in shape.items() if name != "eos_token_id"}))
    torch.manual_seed(0)
    with torch.device(device):
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).save_pretrained(folder)
    searches: dict[str, Search] = {}
    room = {"kv_cache_memory_bytes": 2**32, "max_num_seqs": 64, "max_model_len": 1024}  # several engines share the device
    for dtype in dtypes:
        searches[f"transformers, {dtype}"] = theirs(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device))
        llm = LLM(folder, dtype=dtype, device=device, skip_tokenizer_init=True, **room)
        searches[f"octavo, {dtype}"] = ours(stack.enter_context(llm))
    rng = Random(0)
    return searches, [rng.randrange(min(10_000, shape["vocab_size"])) for _ in range(5_000)]


def prompts_of(ids: list[int], count: int, length: int) -> Prompts:
    """Prompts of equal length, so that transformers need not pad."""
    ids = ids * -(-(7 * count + length) // len(ids))
    return [ids[7 * number :][:length] for number in range(count)]


def compare(searches: dict[str, Search], prompts: Prompts, params: BeamSearchParams, rounds: int) -> None:
    seconds: dict[str, float] = {}
    answers: dict[str, list[list[int]]] = {}
    for search in searches.values():
        search(prompts, BeamSearchParams(params.beam_width, WARM_UP_TOKENS, ignore_eos=True))
    for _ in range(rounds):
        for name, search in searches.items():
            start = time.perf_counter()
            answers[name] = search(prompts, params)
            seconds[name] = min(time.perf_counter() - start, seconds.get(name, float("inf")))
    count = len(prompts)
    equal = sum(one == other for one, other in zip(answers["transformers, float32"], answers["octavo, float32"], strict=True))
    print(f"{count} prompts of {len(prompts[0])} tokens, {params.max_tokens} tokens each, width {params.beam_width}")
    baseline = 0.0
    for name, took in seconds.items():
        if name.startswith("transformers"):  # what follows is compared with it
            baseline = took
        print(f"  {name:24} {took:7.2f} s  {count * params.max_tokens / took:8.1f} tokens/s  {baseline / took:5.2f}x")
    print(f"  best answers in float32 that are the same: {equal} of {count}", flush=True)


def main() -> None:
    options = arguments()
    params = BeamSearchParams(options.width, options.tokens, ignore_eos=True)
    with ExitStack() as stack:
        on_gpu = options.device == "cuda"
        searches, ids = of_random_weights(stack, loads.QWEN3_06B, "cuda") if on_gpu else of_default_model(stack)
        for count in options.prompts:
            compare(searches, prompts_of(ids, count, options.prompt_tokens), params, options.rounds)


if __name__ == "__main__":
    main()
