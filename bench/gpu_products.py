"""The products of a layer on a GPU, by library: `python bench/gpu_products.py [--rows 64,256,1024,8192]`.

For each matrix of Qwen3's shapes and each number of rows: microseconds, TFLOP/s and TB/s of weights, through cuBLAS and through
cuBLASLt. Weights of many layers follow each other, so that none waits in the L2; medians of CUDA graphs replayed.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F

from bench.gpu_kernels import microseconds

SHAPES = {  # in, out
    "8B qkv": (4096, 6144), "8B output": (4096, 4096), "8B gate up": (4096, 24576), "8B down": (12288, 4096),
    "0.6B qkv": (1024, 4096), "0.6B output": (2048, 1024), "0.6B gate up": (1024, 6144), "0.6B down": (3072, 1024),
    "0.6B vocabulary": (1024, 151936),
}  # fmt: skip
BEYOND_L2 = 150_000_000  # bytes
MEASURED = 20  # ms, of each


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="16,64,128,192,256,384,512,768,1024,2048,8192")
    args = parser.parse_args()
    for name, (inner, outer) in SHAPES.items():
        count = max(2, min(64, BEYOND_L2 // (inner * outer * 2)))
        weights = [torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(count)]
        for rows in map(int, args.rows.split(",")):
            x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
            line = f"{name:16} {rows:6} rows"
            for library in ("cublas", "cublaslt"):
                torch.backends.cuda.preferred_blas_library(library)
                chosen = weights if rows < 8192 or outer < 100_000 else weights[:1]
                took = microseconds([partial(F.linear, x, weight) for weight in chosen], MEASURED)
                flops, moved = 2 * rows * inner * outer, 2 * inner * outer
                line += f"   {library:8} {took:8.1f} us {flops / took / 1e6:5.0f} TFLOP/s {moved / took / 1e6:5.2f} TB/s"
            print(line, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
