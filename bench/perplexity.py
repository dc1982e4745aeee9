"""Measures the perplexity of a text, natively and in float32, and so what packed weights and rounded activations cost.

    python bench/perplexity.py wikitext-2-raw-v1_test.txt                 many rows at a time: floats inside the products
    python bench/perplexity.py wikitext-2-raw-v1_test.txt --step 16       few: activations of 8 bits, as when it decodes
    python bench/perplexity.py wikitext-2-raw-v1_test.txt --cpu-isa portable avx2 avx512      each level of the CPU by itself
    python bench/perplexity.py wikitext-2-raw-v1_test.txt --quantization auto int8 int4      its weights quantised again, too
    python bench/perplexity.py octavo/bench/sonnets.txt --kv-cache-dtype int8
"""

import argparse
import itertools
import math
from pathlib import Path
from typing import Any, get_args

from octavo import LLM, SamplingParams
from octavo.config import CpuIsa, KVCacheDtype, Quantization

CHUNK = 2048  # tokens that see each other


def perplexity(text: str, tokens: int, engine: dict[str, Any]) -> float:
    with LLM(max_model_len=CHUNK + 1, max_num_seqs=4, kv_cache_memory_bytes=2**28, **engine) as llm:
        ids = llm.get_tokenizer().encode(text)[:tokens]
        chunks = [ids[start : start + CHUNK] for start in range(0, len(ids), CHUNK)]
        outputs = llm.generate(chunks, SamplingParams(max_tokens=1, prompt_logprobs=0))
    found = [
        choices[token].logprob
        for output in outputs
        for token, choices in zip(output.prompt_token_ids, output.prompt_logprobs or [])
        if choices
    ]
    return math.exp(-sum(found) / len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="perplexity of the default model over a text, native against float32")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=20_480)
    parser.add_argument("--step", type=int, default=CHUNK, help="tokens the native engine computes at once")
    parser.add_argument("--quantization", nargs="+", default=["auto"], choices=get_args(Quantization), help="of the native engine")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=get_args(KVCacheDtype), help="of the native engine")
    parser.add_argument("--cpu-isa", nargs="+", default=["auto"], choices=get_args(CpuIsa), help="of the native engine")
    args = parser.parse_args()
    text = args.file.read_text(encoding="utf-8")[: 8 * args.tokens]
    float32 = perplexity(text, args.tokens, {"native": False, "dtype": "float32"})
    for isa, quantization in itertools.product(args.cpu_isa, args.quantization):
        engine = {"max_num_batched_tokens": args.step, "quantization": quantization, "kv_cache_dtype": args.kv_cache_dtype, "cpu_isa": isa}
        native = perplexity(text, args.tokens, engine)
        print(f"native ({isa}, {quantization}) {native:.3f}, float32 {float32:.3f}: {native / float32 - 1:+.2%}", flush=True)


if __name__ == "__main__":
    main()
