"""Where an engine computes as on a GPU: there, or on the CPU with the kernels' twins in place of the kernels.

A test that takes a place runs here, on the twins, and there, on kernels and graphs, with models that fill their tiles.
"""

import os
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest

from octavo import LLM
from tests.support.models import tiny_model

Place = Literal["cpu", "cuda"]
TWINS, GPU = pytest.param("cpu", id="twins"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)
PLACES = pytest.mark.parametrize("place", [TWINS, GPU])

# Heads of 64 and of 128 numbers, groups of 4 and of 2; one hidden size and one vocabulary, so that most kernels are compiled once.
SHAPES: dict[str, dict[str, int]] = {
    "LlamaForCausalLM": {"heads": 16, "kv_heads": 4},
    "Qwen2ForCausalLM": {"heads": 8, "kv_heads": 2},
    "Qwen3ForCausalLM": {"heads": 16, "kv_heads": 8, "head_dim": 128},
}
LARGE: dict[str, int] = {"hidden": 1024, "layers": 2, "vocab": 4096, "context": 1024}


def random_model(folder: Path, architecture: str, place: Place) -> Path:
    """Its best logits are about 4: there bfloat16 has steps of 1/64, and 0.1 is a few of them."""
    shape = SHAPES[architecture] | LARGE if place == "cuda" else {}
    return tiny_model(folder, architecture, seed=1, spread=1.0, **shape)  # type: ignore[arg-type]


def vocabulary(place: Place) -> int:
    return LARGE["vocab"] if place == "cuda" else 320


def open_engine(folder: Path, place: Place, runner: Literal["device", "model"] = "device", check: bool = False, **settings: Any) -> LLM:
    """`runner`: "model" is the CPU's own, which never pads a step."""
    with patch.dict(os.environ, OCTAVO_DEBUG=f"runner={runner},check={int(check)}"):
        return LLM(str(folder), device=place, skip_tokenizer_init=True, native=False, **settings)
