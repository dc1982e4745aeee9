"""The gates of an MLP by name, for kernels and their twins. No torch and no Triton here.

    swiglu    silu(gate) * up
    geglu     gelu(gate) * up, gelu by its approximation with tanh
    clamped   (up + 1) * g * sigmoid(ALPHA * g), where g is the gate up to CLAMP and up is cut to [-CLAMP, CLAMP] (gpt-oss)
"""

from typing import Literal

Gate = Literal["swiglu", "geglu", "clamped"]
GATES: tuple[Gate, ...] = ("swiglu", "geglu", "clamped")
CLAMP, ALPHA = 7.0, 1.702
