"""Octavo: a paged LLM inference engine that shows and proves what its pages do.

    from octavo import LLM, SamplingParams
"""

from typing import TYPE_CHECKING

from octavo.config import EngineConfig, calm_torch
from octavo.inputs import TextPrompt, TokensPrompt
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.structured_outputs import StructuredOutputsParams
from octavo.version import __version__
from octavo.vllm_names import IMPORTS

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.llm import LLM
    from octavo.outputs import BeamSearchOutput, CompletionOutput, PinnedPrefix, RequestOutput

__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLM", "BeamSearchOutput", "BeamSearchParams", "CompletionOutput", "EngineArgs", "PinnedPrefix",
    "RequestOutput", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "__version__",
]  # fmt: skip

EngineArgs = AsyncEngineArgs = EngineConfig  # the names that vLLM has for it

calm_torch()


def __getattr__(name: str) -> object:
    """The rest loads when first used: it needs torch or the libraries of a server, and `import octavo` should not."""
    if name == "LLM":
        from octavo.llm import LLM

        return LLM
    if name == "AsyncLLM":
        from octavo.async_llm import AsyncLLM

        return AsyncLLM
    if name in ("BeamSearchOutput", "CompletionOutput", "PinnedPrefix", "RequestOutput"):
        from octavo import outputs

        return getattr(outputs, name)
    if name in IMPORTS:  # no AttributeError: `from octavo import NAME` would replace it by a message of its own
        raise ImportError(f"octavo has no {name}: {IMPORTS[name]}", name=name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
