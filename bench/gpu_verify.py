"""The proof of paging on a GPU: random weights of a small Qwen3 shape, three types, both depths and layouts, with and without graphs.

    python bench/gpu_verify.py

First every step is compared with a contiguous cache; then whole engines, in either layout and without blocks, must say the same.
"""

import json
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from octavo import LLM, SamplingParams
from octavo.bench.loads import QWEN3_06B
from octavo.config import EngineConfig
from octavo.engine.verify import verify
from octavo.loading.resolve import load_model_config, resolve_model

SMALL = dict(QWEN3_06B, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=64, vocab_size=2000, bos_token_id=1, eos_token_id=2)  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")
WAYS = tuple(product(DTYPES, (False, True)))  # type, eager
ENGINES: dict[str, dict[str, Any]] = {
    "nhd": {"kv_cache_layout": "nhd"}, "hnd": {"kv_cache_layout": "hnd"}, "contiguous": {"attention_backend": "contiguous"}
}  # fmt: skip


def prove(folder: str) -> None:
    source = resolve_model(folder)
    for dtype in DTYPES:
        for depth, layout in ((1, "nhd"), (2, "hnd")):
            for eager in (False, True):
                config = EngineConfig(
                    model=folder, load_format="dummy", device="cuda", dtype=dtype, enforce_eager=eager, kv_cache_layout=layout
                )
                found = verify(config, source, load_model_config(source), depth, 40)
                values = found.compared.cache_values + found.compared.output_values
                way = f"{dtype:9} depth {depth} {layout} {'eager ' if eager else 'graphs'}"
                print(f"{way}: {values:,} values equal bit for bit", flush=True)


def compare_engines(folder: str, device: str = "cuda", ways: Iterable[tuple[str, bool]] = WAYS) -> None:
    prompts = [[(7 * number + position) % 2000 for position in range(1 + 37 * number)] for number in range(12)]
    params = SamplingParams(temperature=0.8, n=2, seed=1, max_tokens=60, ignore_eos=True, logprobs=2)
    for dtype, eager in ways:
        said = {}
        for name, asked in ENGINES.items():
            with LLM(
                folder, load_format="dummy", device=device, dtype=dtype, skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=32,
                kv_cache_memory_bytes=2**28, enable_prefix_caching=False, enforce_eager=eager, **asked,
            ) as llm:  # fmt: skip
                outputs = llm.generate(prompts, params, use_tqdm=False)
            said[name] = [(sample.token_ids, sample.logprobs) for output in outputs for sample in output.outputs]
        same = [name for name in ENGINES if said[name] == said["nhd"]]
        way = f"{dtype:9} {'eager ' if eager else 'graphs'}"
        print(f"{way}: the same tokens and logprobs from {', '.join(same)}", flush=True)
        assert len(same) == len(ENGINES), f"others than {', '.join(same)} say something else"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL))
        prove(folder)
        compare_engines(folder)


if __name__ == "__main__":
    main()
