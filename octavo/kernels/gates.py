"""The activations of an MLP by name, for kernels and their references. Imports no torch and no Triton.

    swiglu    silu(gate) * up
    geglu     gelu(gate) * up, with the tanh approximation
    clamped   (up + 1) * g * sigmoid(ALPHA * g), where g is the gate limited to CLAMP and up is clamped to [-CLAMP, CLAMP] (gpt-oss)
    gelu      gelu(up), with the tanh approximation: there is no gate
"""

from typing import Literal

Gate = Literal["swiglu", "geglu", "clamped"]
Activation = Gate | Literal["gelu"]
GATES: tuple[Gate, ...] = ("swiglu", "geglu", "clamped")
CLAMP, ALPHA = 7.0, 1.702
