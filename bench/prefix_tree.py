"""Measures decode over a tree of prompts: `python bench/prefix_tree.py [--rows 8,16,64] [--rounds 3]`.

Four prompts of 512 tokens begin with the same 256. Each is asked by a fourth of the rows, which come in a random order, each with 16 tokens
of its own. The default model, greedy, 32 tokens out.
"""

import argparse
import random
import time

from octavo import LLM, SamplingParams

COMMON, PROMPT, OWN, OUTPUT, PROMPTS = 256, 512, 16, 32, 4


def prompts(rows: int) -> list[list[int]]:
    draw = random.Random(rows)

    def ids(count: int) -> list[int]:
        return [draw.randrange(100, 40_000) for _ in range(count)]

    common = ids(COMMON)
    begins = [common + ids(PROMPT - COMMON) for _ in range(PROMPTS)]
    asked = [begins[row % PROMPTS] + ids(OWN) for row in range(rows)]
    draw.shuffle(asked)
    return asked


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="8,16,32,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-native", action="store_true")
    args = parser.parse_args()
    first = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    with LLM(max_model_len=1024, max_num_seqs=64, native=not args.no_native) as llm:
        for rows in map(int, args.rows.split(",")):
            asked = prompts(rows)
            llm.generate(asked, first, use_tqdm=False)  # so that prompts are found in the cache
            for _ in range(args.rounds):
                start = time.perf_counter()
                llm.generate(asked, params, use_tqdm=False)
                print(f"{rows} rows: {rows * OUTPUT / (time.perf_counter() - start):.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
