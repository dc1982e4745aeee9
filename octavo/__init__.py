"""Octavo: a paged LLM inference engine that shows and proves what its pages do.

    from octavo import LLM, SamplingParams
"""

from typing import TYPE_CHECKING

from octavo.config import calm_torch
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
from octavo.version import __version__

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import BeamSearchOutput, CompletionOutput, PinnedPrefix, RequestOutput

__all__ = [
    "LLM", "BeamSearchOutput", "BeamSearchParams", "CompletionOutput", "PinnedPrefix", "RequestOutput", "SamplingParams",
    "StructuredOutputsParams", "__version__",
]  # fmt: skip

calm_torch()


def __getattr__(name: str) -> object:
    """The rest loads when first used: it needs torch, and `import octavo` should not."""
    if name == "LLM":
        from octavo.llm import LLM

        return LLM
    if name in ("BeamSearchOutput", "CompletionOutput", "PinnedPrefix", "RequestOutput"):
        from octavo import outputs

        return getattr(outputs, name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
