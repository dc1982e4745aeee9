"""What ranks cost and gain on this host: 32 sequences, alternating, best of the rounds. The model is about as large as the default
one, with heads that two ranks can share; its weights are random, of 4 bits.

    1 thread      one rank on one core
    2 threads     one rank on two cores
    tp 2, pp 2    two ranks, each on a core of its own

    python bench/ranks.py [--rounds 3]
"""

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.worker import ranks

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 49_152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "rope_theta": 100_000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 32, 64, 64


class Counted:
    """How many messages rank 0 sends in a step, and how large they are."""

    def __init__(self) -> None:
        self.messages = self.bytes = self.steps = 0
        tell, forward = ranks.Ranks.tell, ranks.RankedRunner.forward

        def counted_tell(this: ranks.Ranks, message: bytes) -> None:
            self.messages, self.bytes = self.messages + len(this.peers), self.bytes + len(message) * len(this.peers)
            tell(this, message)

        def counted_forward(this: ranks.RankedRunner, plan: ranks.StepPlan) -> None:
            self.steps += 1
            forward(this, plan)

        ranks.Ranks.tell, ranks.RankedRunner.forward = counted_tell, counted_forward  # type: ignore[method-assign]

    def told(self) -> str:
        return f"{self.messages / max(self.steps, 1):.1f} messages and {self.bytes / max(self.steps, 1):,.0f} bytes a step"


def tokens_per_second(model: str, cores: set[int], rounds: int, **sizes: int) -> float:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    prompts = [[(7 * number + 13 * at) % 40_000 + 100 for at in range(PROMPT_TOKENS)] for number in range(PROMPTS)]
    params, best = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False), 0.0
    dummy = {"load_format": "dummy", "quantization": "int4", "skip_tokenizer_init": True}
    with LLM(model, max_model_len=512, max_num_seqs=PROMPTS, enable_prefix_caching=False, **dummy, **sizes) as llm:  # type: ignore[arg-type]
        for _ in range(rounds):
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            best = max(best, PROMPTS * ANSWER_TOKENS / (time.perf_counter() - start))
    os.sched_setaffinity(0, before)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    logging.getLogger("octavo").setLevel(logging.ERROR)
    counted, (first, second, *_) = Counted(), sorted(os.sched_getaffinity(0))
    ways = {
        "1 thread": ({first}, {}), "2 threads": ({first, second}, {}),
        "tp 2": ({first, second}, {"tensor_parallel_size": 2}), "pp 2": ({first, second}, {"pipeline_parallel_size": 2}),
    }  # fmt: skip
    best, folder = dict.fromkeys(ways, 0.0), Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(SHAPE))
    for _ in range(rounds):
        for name, (cores, sizes) in ways.items():
            counted.messages = counted.bytes = counted.steps = 0
            best[name] = max(best[name], tokens_per_second(str(folder), cores, 2, **sizes))
            gain = f"{best[name]:8.1f} tok/s   {best[name] / best['1 thread']:.2f}x of 1 thread"
            print(f"{name:<10} {gain}   {counted.told() if sizes else ''}")


if __name__ == "__main__":
    main()
