"""Reads and checks values of GGUF metadata. Each error names the key as it is in the file.

The common keys are read here and converted to those of a config.json, so that one reader serves both formats.
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from octavo.errors import LoadError

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ROPE_SCALING_KEYS = ("type", "factor", "original_context_length", "finetuned", "attn_factor", "yarn_beta_fast", "yarn_beta_slow")
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
FREQUENCY_FACTORS = "rope_freqs.weight"  # of Llama 3.1 and later
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_FACTORS = (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS)  # tensors that are part of the config
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


class GGUFKeys:
    """Reads keys under the architecture's prefix, such as `llama.block_count`."""

    def __init__(
        self,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        architecture: str,
        source: str,
        factors: Mapping[str, list[float]] | None = None,
    ) -> None:
        """`factors`: contents of the file's tensors `ROPE_FACTORS`; None: only its header is available, and they count as ones"""
        self.metadata = metadata
        self.shapes = shapes  # of the tensors in the file, by name
        self._factors = {name: [1.0] * prod(shapes[name]) for name in ROPE_FACTORS if name in shapes} if factors is None else factors
        self.prefix = architecture + "."
        self.source = source

    def fail(self, key: str, wanted: str) -> LoadError:
        shown = reprlib.repr(self.metadata.get(key, "(missing)"))
        return LoadError(f"{self.source}: {key} must be {wanted}, got {shown}")

    def has(self, name: str) -> bool:
        return self.prefix + name in self.metadata

    def integer(self, name: str, default: int | None = None, low: int = 1) -> int:
        key = self.prefix + name
        value = self.metadata.get(key, default)
        if type(value) is not int or not low <= value < 2**31:
            raise self.fail(key, f"an integer from {low} to {2**31 - 1}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        key = self.prefix + name
        value = self.metadata.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, "a finite number above 0")
        return float(value)

    def token_id(self, key: str, vocab_size: int) -> int:
        value = self.metadata[key]
        if type(value) is not int or not 0 <= value < vocab_size:
            raise self.fail(key, f"a token id below the vocabulary size {vocab_size}")
        return value

    def common(self) -> dict[str, Any]:
        """Returns the keys of a config.json that all families share."""
        vocab_size = self._vocab_size()
        ends = [key for name in END_KEYS if (key := f"tokenizer.ggml.{name}") in self.metadata]
        config = {
            "vocab_size": vocab_size,
            "hidden_size": self.integer("embedding_length"),
            "num_hidden_layers": self.num_layers(),
            "max_position_embeddings": self.integer("context_length"),
            "tie_word_embeddings": HEAD not in self.shapes,
            "eos_token_id": [self.token_id(key, vocab_size) for key in ends],
        }
        if (bos := "tokenizer.ggml.bos_token_id") in self.metadata:
            config["bos_token_id"] = self.token_id(bos, vocab_size)
        return config

    def num_layers(self) -> int:
        """Returns the number of layers. Layers that predict further tokens (MTP) are the last ones in the file, and are not among them."""
        blocks, further = self.integer("block_count"), self.integer("nextn_predict_layers", 0, low=0)
        if further >= blocks:
            raise self.fail(f"{self.prefix}nextn_predict_layers", f"less than {self.prefix}block_count {blocks}")
        return blocks - further

    def _vocab_size(self) -> int:
        """Returns the rows of the embedding. The key, which older files lack, must agree."""
        if EMBEDDING not in self.shapes:
            raise LoadError(f"{self.source}: has no tensor {EMBEDDING} (a file of vocabulary alone is not a model)")
        rows = self.shapes[EMBEDDING][0]
        if self.integer("vocab_size", rows) != rows:
            raise self.fail(f"{self.prefix}vocab_size", f"the {rows} rows of {EMBEDDING}")
        return rows

    def head_dim(self) -> int | None:
        """Returns the width of a head, if the file has it. Keys, values and the rotated part must have the same width."""
        names = ("attention.key_length", "rope.dimension_count", "attention.value_length")
        widths = [(name, self.integer(name)) for name in names if self.has(name)]
        for name, width in widths:
            if width != widths[0][1]:
                raise self.fail(self.prefix + name, f"{widths[0][1]} as {self.prefix}{widths[0][0]}")
        return widths[0][1] if widths else None

    def flag(self, name: str, default: bool) -> bool:
        key = self.prefix + name
        value = self.metadata.get(key, default)
        if type(value) is not bool:
            raise self.fail(key, "true or false")
        return value

    def rope(self, also: Sequence[str] = ()) -> dict[str, Any]:
        """Returns `rope_parameters` of a config.json. Scalings that these cannot express are refused. `also`: keys that the family reads"""
        scaling = self.prefix + "rope.scaling."
        for key in self.metadata:
            if key.startswith(scaling) and key.removeprefix(scaling) not in (*ROPE_SCALING_KEYS, *also):
                raise LoadError(f"{self.source}: {key[:80]} is not supported")
        rope: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", 10000.0), "rope_type": "default"}
        kind = self.metadata.get(scaling + "type", "none")
        if kind not in ROPE_SCALINGS:
            raise self.fail(scaling + "type", f"one of {', '.join(ROPE_SCALINGS)}")
        if (factors := self._frequency_factors(kind)) is not None:
            return rope | factors
        if kind == "longrope":
            raise LoadError(f"{self.source}: {scaling}type is longrope, and there are no tensors {LONG_FACTORS} and {SHORT_FACTORS}")
        if self.number("rope.scaling.attn_factor", 1.0) != 1.0:
            raise self.fail(scaling + "attn_factor", f"1, or the file must have {LONG_FACTORS}")
        if kind == "none":
            if self.number("rope.scale_linear", 1.0) != 1.0:  # the key of old files
                rope |= {"rope_type": "linear", "factor": self.number("rope.scale_linear")}
            return rope
        rope |= {"rope_type": kind, "factor": self.number("rope.scaling.factor")}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = self._original_context()
            rope["beta_fast"] = self.number("rope.scaling.yarn_beta_fast", 32.0)
            rope["beta_slow"] = self.number("rope.scaling.yarn_beta_slow", 1.0)
        return rope

    def _original_context(self) -> int:
        return self.integer("rope.scaling.original_context_length", self.integer("context_length"))

    def _frequency_factors(self, kind: str) -> dict[str, Any] | None:
        """Returns a rotation with a factor for each frequency, or None if the file has none.

        Those of `rope_freqs` apply to short and long contexts alike, and nothing else is scaled.
        """
        single = self._factors.get(FREQUENCY_FACTORS, [])
        long, short = self._factors.get(LONG_FACTORS), self._factors.get(SHORT_FACTORS)
        scaled = any(factor != 1 for factor in single)
        if (long is None) != (short is None) or (scaled and long is not None):
            raise LoadError(f"{self.source}: has one of {LONG_FACTORS} and {SHORT_FACTORS}, or {FREQUENCY_FACTORS} in addition")
        if (scaled or long is not None) and kind not in ("none", "longrope"):
            raise self.fail(f"{self.prefix}rope.scaling.type", "none or longrope, because the file has a factor for each frequency")
        if scaled:
            return {"rope_type": "longrope", "short_factor": single, "long_factor": single, "attention_factor": 1.0}
        if long is None:
            return None
        return {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": self.number("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": self._original_context(),
        }
