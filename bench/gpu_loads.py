"""The published loads on one NVIDIA GPU, with random weights of the shapes of published models.

    python bench/gpu_loads.py [--model 0.6B] [--fp8 rows] [--loads single,nano256] [--profile] [--busy] [--steps]

Each model runs in this process, the loads in turn, each after a warm-up; `ready` is the time from the start of the process to the
first token, with whatever is in Triton's cache (TRITON_CACHE_DIR on an empty folder makes it a cold start).
"""

import argparse
import cProfile
import json
import pstats
import statistics
import tempfile
import time
from pathlib import Path

STARTED = time.perf_counter() - time.process_time()

from collections import defaultdict  # noqa: E402
from itertools import pairwise, product  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from octavo import LLM, SamplingParams  # noqa: E402
from octavo.bench import loads  # noqa: E402
from octavo.step.step_tensors import Shape  # noqa: E402

QWEN3_30B_A3B = dict(
    loads.QWEN3_06B, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144,
    moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128, tie_word_embeddings=False,
)  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
    "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "attention_bias": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "bfloat16", "rope_theta": 150000, "bos_token_id": 199998, "eos_token_id": 200002,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
}  # fmt: skip
GEMMA_3_4B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262208,
    "sliding_window": 1024, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "rope_local_base_freq": 10000, "max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "torch_dtype": "bfloat16", "bos_token_id": 2, "eos_token_id": 1,
}  # fmt: skip
MODELS = {
    "0.6B": loads.QWEN3_06B, "8B": loads.QWEN3_8B, "30B-A3B": QWEN3_30B_A3B, "gemma-3-4b": GEMMA_3_4B, "gpt-oss-20b-bf16": GPT_OSS_20B,
    "gpt-oss-20b": dict(GPT_OSS_20B, quantization_config={"quant_method": "mxfp4"}),
}  # fmt: skip
FP8 = {
    "rows": {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
AIMS = {
    "0.6B": {"single": 1600, "nano256": 30_000, "many1024": 30_000, "prefill": 450_000, "prefix": 25_000},
    "8B": {"single": 245, "nano256": 10_500, "many1024": 13_400, "prefill": 45_000, "prefix": 12_000},
    "30B-A3B": {"single": 380, "nano256": 5_400, "many1024": 9_500},
    "gpt-oss-20b": {"single": 500},
    "gemma-3-4b": {"single": 384, "nano256": 12_900},  # 70 and 65 % of the least time that reading and multiplying take
}  # rates to reach, where one was set


def run(llm: LLM, requests: list[tuple[list[int], int]], temperature: float) -> float:
    llm.reset_prefix_cache()
    params = [SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False) for _, count in requests]
    start = time.perf_counter()
    llm.generate([ids for ids, _ in requests], params, use_tqdm=False)
    return time.perf_counter() - start


def print_busy(llm: LLM, requests: list[tuple[list[int], int]], temperature: float) -> None:
    """Prints how long the device computed in one round, and with which kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        seconds = run(llm, requests, temperature)
    spent: dict[str, float] = defaultdict(float)
    for event in traced.events():
        spent[event.name.split("<")[0][:50]] += event.time_range.elapsed_us() / 1e6
    print(f"  device busy {sum(spent.values()):.2f} of {seconds:.2f} s (profiled)")
    for name, share in sorted(spent.items(), key=lambda item: -item[1])[:14]:
        print(f"    {share:8.3f} s   {name}")


class StepTimes:
    """How long steps of each shape took on the device, and how full they were."""

    def __init__(self, llm: LLM) -> None:
        runner: Any = llm._core.executor  # type: ignore[attr-defined]
        self._program, self._run, self._runner = runner.program, runner.program.run, runner
        self._events: list[tuple[Shape, int, torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> "StepTimes":
        self._program.run = self._timed
        return self

    def _timed(self, shape: Shape, whole: bool) -> Any:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        forward = self._run(shape, whole)
        end.record()
        self._events.append((shape, sum(self._runner._plan.num_query), start, end))
        return forward

    def __exit__(self, *_: object) -> None:
        del self._program.run
        torch.cuda.synchronize()
        kinds: dict[str, list[tuple[float, int]]] = defaultdict(list)
        between = 0.0
        for (_, _, _, before), (_, _, start, _) in pairwise(self._events):
            between += before.elapsed_time(start) / 1000
        for shape, tokens, start, end in self._events:
            kind = f"decode, up to {-(-shape.entries // 64) * 64:4}" if shape.decodes else f"mixed,  {-(-shape.tokens // 256) * 256:9}"
            kinds[kind].append((start.elapsed_time(end), tokens))
        print(f"  {len(self._events)} steps, {between:.2f} s between them")
        for kind, each in sorted(kinds.items()):
            total, tokens = sum(one for one, _ in each) / 1000, sum(count for _, count in each)
            mean = total / len(each) * 1000
            print(f"    {kind}: {len(each):5} steps, {total:7.2f} s, {mean:7.2f} ms and {tokens / len(each):7.0f} tokens each")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="0.6B", choices=MODELS)
    parser.add_argument("--fp8", choices=FP8, help="random 8-bit floats, with a scale for each row or for blocks of 128 x 128")
    parser.add_argument("--loads", default=",".join(loads.GPU))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperatures", default="0.6", help="0 is greedy")
    parser.add_argument("--profile", action="store_true", help="where the host's time goes, over one round of each load")
    parser.add_argument("--busy", action="store_true", help="how long the device computes in a round, by kernel")
    parser.add_argument("--steps", action="store_true", help="how long steps of each shape take, over one round of each load")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine")
    args = parser.parse_args()
    settings = dict(item.split("=", 1) for item in args.set)
    with tempfile.TemporaryDirectory() as folder:
        quantised = {"quantization_config": FP8[args.fp8]} if args.fp8 else {}
        Path(folder, "config.json").write_text(json.dumps(MODELS[args.model] | quantised))
        given = {name: json.loads(value) if value[0].isdigit() or value in ("true", "false") else value for name, value in settings.items()}
        llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, **{"device": "cuda"} | given)
    run(llm, [([1, 2, 3], 1)], 0)
    print(f"{args.model}: ready after {time.perf_counter() - STARTED:.1f} s", flush=True)
    for name, temperature in product(args.loads.split(","), map(float, args.temperatures.split(","))):
        requests = loads.GPU[name]()
        run(llm, [(ids[:64][::-1], min(count, 4)) for ids, count in requests[:64]], temperature)
        seconds = [run(llm, requests, temperature) for _ in range(args.rounds)]
        tokens = sum(len(ids) for ids, _ in requests) if name == "prefill" else sum(count for _, count in requests)
        rate, aim = tokens / statistics.median(seconds), AIMS.get(args.model, {}).get(name)
        rounds, what = " ".join(f"{one:.2f}" for one in seconds), f"{name} {temperature or 'greedy'}"
        reached = "" if aim is None else f"aim {aim:8,}   {rate / aim:5.2f}   "
        print(f"{args.model} {what:15} {rate:10,.0f} tok/s   {reached}rounds {rounds} s", flush=True)
        if args.busy:
            print_busy(llm, requests, temperature)
        if args.steps:
            with StepTimes(llm):
                run(llm, requests, temperature)
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(run, llm, requests, temperature)
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
