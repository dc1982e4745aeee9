"""The proof of paging on a GPU: random weights of a small Qwen3 shape, three types, both depths, with and without graphs.

    python bench/gpu_verify.py
"""

import json
import tempfile
from pathlib import Path

from octavo.bench.loads import QWEN3_06B
from octavo.config import EngineConfig
from octavo.engine.verify import verify
from octavo.loading.resolve import load_model_config, resolve_model

SMALL = dict(QWEN3_06B, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=64, vocab_size=2000, bos_token_id=1, eos_token_id=2)  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SMALL))
        source = resolve_model(folder)
        for dtype in ("bfloat16", "float16", "float32"):
            for depth in (1, 2):
                for eager in (False, True):
                    config = EngineConfig(model=folder, load_format="dummy", device="cuda", dtype=dtype, enforce_eager=eager)
                    found = verify(config, source, load_model_config(source), depth, 40)
                    values = found.compared.cache_values + found.compared.output_values
                    print(f"{dtype:9} depth {depth} {'eager ' if eager else 'graphs'}: {values:,} values equal bit for bit", flush=True)


if __name__ == "__main__":
    main()
