"""`ModelDescription`: what one model is made of, as numbers and names. A family makes it out of a config; torch is not needed.

    matrices   the products of all layers and of the vocabulary, one by one, merged as the programs merge them
    vectors    the norms
    layers     what each layer is built from: its mixer, its MLP, its norms, and the order in which they are computed

Plans, loaders and programs read this and nothing else. A program looks at the layers to see whether it can run a model.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from octavo.policy.cache_spec import Buffer


@dataclass(frozen=True, slots=True)
class Matrix:
    name: str  # what plans call it: qkv, output, gate_up, down, head; of a mixture: router, experts_gate_up, shared_down, ...
    module: str  # where it lies in the model: layers.3.attention.qkv
    parts: dict[str, int]  # weight in the checkpoint -> rows
    columns: int
    layer: int | None = None
    bias: bool = False
    split: Literal["rows", "columns"] | None = None  # along which several ranks may share it; of merged parts, each by itself
    gated: bool = False  # its two parts are a gate and what it multiplies
    vocabulary: bool = False  # its rows are the tokens of the vocabulary
    merged: tuple[int, ...] = ()  # rows of each part, where one weight of the checkpoint has all of them

    @property
    def rows(self) -> int:
        return sum(self.parts.values())

    @property
    def part_rows(self) -> tuple[int, ...]:
        """The rows of each part, however the checkpoint has them."""
        return self.merged or tuple(self.parts.values())

    @property
    def numbers(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Vector:
    name: str  # attention_norm, mlp_norm, attention_after_norm, mlp_after_norm, q_norm, k_norm, sinks, norm
    module: str  # layers.3.attention_norm
    size: int
    layer: int | None = None
    bias: bool = False
    wide: bool = False  # kept in float32, whatever the dtype of the run

    @property
    def numbers(self) -> int:
        return 2 * self.size if self.bias else self.size


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The fullest step that a configuration allows."""

    tokens: int  # computed in the step
    rows: int  # sampled
    context: int  # of the longest row
    gathered: int  # keys read, over all rows


class MixerSpec(Protocol):
    """What plans and programs ask of a mixer, the part of a layer in which tokens look at each other."""

    @property
    def kind(self) -> str:
        """For programs that know certain mixers only: "attention"."""

    @property
    def window(self) -> int | None:
        """How many tokens a token sees, itself included; None: all before it."""

    @property
    def features(self) -> tuple[str, ...]:
        """What it asks for beyond the plain mixer of its kind, such as "window". A program may lack it."""

    @property
    def position_table(self) -> tuple[Hashable, int] | None:
        """The key of the table that it looks positions up in, and the numbers for each position. Equal keys share one table."""

    @property
    def gpu_token_numbers(self) -> int:
        """Numbers of a token at the widest point on a GPU."""

    def buffers(self, dtype: str) -> dict[str, Buffer]:
        """What a layer keeps of each token, in a cache of this dtype."""

    def step_bytes(self, load: StepLoad, dtype: str, cache_dtype: str) -> int:
        """The most that the plain torch kernels hold at once in a layer."""

    def gpu_step_bytes(self, rows: int) -> int:
        """What the kernels of a GPU hold in a layer, beside the numbers of each token."""


EXPERT_STACKS = ("experts_gate_up", "experts_down")  # matrices whose parts are those of all experts, one after the other
Activation = Literal["swiglu", "geglu", "clamped"]  # silu(gate) * up, gelu(gate) * up by tanh, or as gpt-oss has it: both clamped
Scores = Literal["all", "chosen"]  # softmax over the logits of all experts, or over those of the chosen ones


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: a router picks some of many MLPs for each token, and weighs what they give."""

    count: int
    chosen: int  # for each token
    scores: Scores = "all"
    normed: bool = True  # weights of the chosen ones are made to sum up to 1; of "chosen" scores they do so anyway
    shared_inner: int = 0  # of one more MLP that every token goes through, with a gate of its own; 0: there is none
    ranks: int = 1  # that deal the experts out: each has whole ones, and the same number

    @property
    def held(self) -> int:
        """By each rank."""
        return self.count // self.ranks


@dataclass(frozen=True, slots=True)
class MLPShape:
    inner: int  # of one expert, if it is a mixture
    activation: Activation = "swiglu"
    experts: Experts | None = None

    @property
    def gpu_token_numbers(self) -> int:
        """Gate and up, their product. Torch makes a GELU, and holds it beside them."""
        return (3 if self.activation == "swiglu" else 4) * self.width

    @property
    def width(self) -> int:
        """Of all that a token goes through."""
        return self.inner if self.experts is None else self.inner * self.experts.chosen + self.experts.shared_inner


@dataclass(frozen=True, slots=True)
class NormShape:
    eps: float
    kind: str = "rms"


@dataclass(frozen=True, slots=True)
class LayerShape:
    mixer: MixerSpec
    mlp: MLPShape
    norm: NormShape
    parallel: bool = False  # mixer and MLP read the same input; else a norm and the mixer, then a norm and the MLP
    norms: Literal["before", "after", "both"] = "before"  # where they stand: before a sub-layer, after it (what it adds is normed), or both
    residual_scale: float = 1.0  # of what a sub-layer adds to the stream

    def unlike_the_plain_one(self) -> str | None:
        """Returns what differs from an RMS norm, attention, an RMS norm and a SwiGLU MLP, or None."""
        different = {
            f"has a mixer of kind {self.mixer.kind}": self.mixer.kind != "attention",
            "computes its mixer and its MLP in parallel": self.parallel,
            "has a mixture of experts": self.mlp.experts is not None,
            f"has an MLP of kind {self.mlp.activation}": self.mlp.activation != "swiglu",
            f"has norms of kind {self.norm.kind}": self.norm.kind != "rms",
            f"has norms {self.norms} its sub-layers": self.norms != "before",
            f"scales what it adds by {self.residual_scale:g}": self.residual_scale != 1,
        }
        return next((difference for difference, there in different.items() if there), None)


@dataclass(frozen=True)
class ModelDescription:
    family: str
    vocab_size: int
    hidden_size: int
    max_position: int
    norm: NormShape  # the last one
    layers: tuple[LayerShape, ...]
    matrices: tuple[Matrix, ...]  # in the order in which they are loaded
    vectors: tuple[Vector, ...]
    lookup: Matrix | None = None  # the embedding, where it is not the matrix of the head too
    gives_back: bool = False  # layers with a window are cache groups of their own, which give back the blocks behind it
    embedding_scale: float = 1.0  # of the rows of the embedding, when they become the stream
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap), after they are scaled
    captured: bool = False  # a step can be captured as a CUDA graph: it never waits for the device, and its shapes follow from the batch's

    @cached_property
    def kinds(self) -> dict[LayerShape, int]:
        """The different kinds of layers, each with the first layer of that kind."""
        return {layer: index for index, layer in reversed(list(enumerate(self.layers)))}

    @cached_property
    def num_parameters(self) -> int:
        every = [*self.matrices, *([self.lookup] if self.lookup else [])]
        return sum(one.numbers + (one.rows if one.bias else 0) for one in every) + self.vector_numbers

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token is computed with: of experts, as many as are chosen."""
        idle = 0
        for matrix in self.matrices:
            experts = None if matrix.layer is None else self.layers[matrix.layer].mlp.experts
            if experts is not None and matrix.name in EXPERT_STACKS:
                numbers = matrix.numbers + (matrix.rows if matrix.bias else 0)
                idle += numbers - min(numbers * experts.chosen // experts.held, numbers)
        return self.num_parameters - idle

    @cached_property
    def vector_numbers(self) -> int:
        return sum(vector.numbers for vector in self.vectors)

    @cached_property
    def wide_numbers(self) -> int:
        """Those of the vectors that are kept in float32."""
        return sum(vector.numbers for vector in self.vectors if vector.wide)

    @cached_property
    def position_numbers(self) -> int:
        """Numbers for each position in the tables that mixers look up."""
        tables = {layer.mixer.position_table for layer in self.kinds}
        return sum(table[1] for table in tables if table is not None)

    def unlike_the_plain_layer(self) -> str | None:
        """Fused kernels know one layer: RMS norm, attention, RMS norm, SwiGLU MLP. Returns what differs from it, or None."""
        for layer, index in self.kinds.items():
            if (difference := layer.unlike_the_plain_one()) is not None:
                return f"layer {index} {difference}"
        wide = next((vector.name for vector in self.vectors if vector.wide), None)
        different = {
            f"the last norm is of kind {self.norm.kind}": self.norm.kind != "rms",
            f"its {wide} is kept in float32": wide is not None,
            f"its embedding is scaled by {self.embedding_scale:g}": self.embedding_scale != 1,
            f"its logits are scaled by {self.logit_scale:g}": self.logit_scale != 1,
            f"its logits are capped at {self.logit_cap}": self.logit_cap is not None,
        }
        return next((difference for difference, there in different.items() if there), None)

    def several_tables(self) -> str | None:
        """Some programs read one block table a sequence. Returns why this model may have several, or None."""
        windows = (index for index, layer in enumerate(self.layers) if layer.mixer.window is not None)
        first = next(windows, None) if self.gives_back else None
        return None if first is None else f"layer {first} gives back the blocks behind its window, so that it has a block table of its own"
