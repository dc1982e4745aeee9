"""Closing an `LLM` gives everything back at once, not when the garbage collector comes by."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any

from octavo import LLM


def assert_closing_frees(llm: LLM, kept: Sequence["weakref.ref[Any]"]) -> None:
    gc.disable()
    try:
        llm.close()
        assert [ref() for ref in kept] == [None] * len(kept)
    finally:
        gc.enable()
