"""`ModelDescription`: the parts of a model, as numbers and names. A family builds it from a config, without torch.

    matrices   the matrices of all layers and of the vocabulary, one by one, merged as the programs merge them
    vectors    the norms
    layers     the parts of each layer: its mixer, its MLP, its norms, and the order in which they are computed

Plans, loaders and programs read only this. A program checks the layers to decide whether it can run a model.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from octavo.attention.mixer import MixerSpec


@dataclass(frozen=True, slots=True)
class Matrix:
    # its name in plans: qkv, output, gate_up, down, head; in an MoE layer: router, experts_gate_up, shared_down, ...; instead of qkv in a
    # recurrent layer: delta_in, delta_gates; with a latent: latent_in, latent_q, latent_k, latent_v
    name: str
    module: str  # its path in the model: layers.3.attention.qkv
    parts: dict[str, int]  # weight in the checkpoint -> rows
    columns: int
    layer: int | None = None
    bias: bool = False
    split: Literal["rows", "columns"] | None = None  # the dimension along which ranks may share it; merged parts are split one by one
    gated: bool = False  # its two parts are a gate and the projection that the gate multiplies
    vocabulary: bool = False  # its rows are the tokens of the vocabulary
    heads: int = 0  # of a stack, the matrices of all heads in sequence: their number. Stacks are always floats
    # weight in the checkpoint -> rows of each section, if it has several, such as q, k and v: they are split one by one
    sections: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return sum(self.parts.values())

    @property
    def part_rows(self) -> tuple[int, ...]:
        """The rows of each part, whether or not the checkpoint merges them."""
        return tuple(size for name, rows in self.parts.items() for size in self.sections.get(name, (rows,)))

    @property
    def numbers(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Vector:
    # attention_norm, mlp_norm, attention_after_norm, mlp_after_norm, q_norm, k_norm, sinks, norm, embedding_norm; in a recurrent layer:
    # delta_conv, delta_decay, delta_dt_bias, delta_norm; in an MoE layer: expert_bias
    name: str
    module: str  # layers.3.attention_norm
    size: int
    layer: int | None = None
    bias: bool = False
    wide: bool = False  # stored in float32, whatever the dtype of the run
    sections: tuple[int, ...] = ()  # rows of each section, if it has rows of several numbers: sections are split one by one

    @property
    def numbers(self) -> int:
        return 2 * self.size if self.bias else self.size


EXPERT_STACKS = ("experts_gate_up", "experts_down")  # matrices whose parts are the matrices of all experts in sequence
# silu(gate) * up, tanh-gelu(gate) * up, as in gpt-oss: both clamped, or tanh-gelu(up) without a gate
Activation = Literal["swiglu", "geglu", "clamped", "gelu"]
Scores = Literal["all", "chosen", "sigmoid"]  # softmax over the logits of all experts, or over those of the chosen ones; or of each alone


@dataclass(frozen=True, slots=True)
class Experts:
    """An MoE layer: a router selects some of many MLPs for each token, and weights their results.

    If experts are in groups, only those of the best groups are selected. The score of a group is that of its best expert, or with
    sigmoids the sum of its best two.
    """

    count: int
    chosen: int  # per token
    scores: Scores = "all"
    normed: bool = True  # the weights of the chosen experts are normalised to a sum of 1; with "chosen" scores they always are
    shared_inner: int = 0  # width of one more MLP that every token passes through; 0: there is none
    shared_gated: bool = True  # it has a gate, which weights its result
    groups: int = 1  # of equal size
    chosen_groups: int = 1
    biased: bool = False  # a bias of each expert is added to its score for the selection, but not for its weight
    scale: float = 1.0  # factor on the weights
    ranks: int = 1  # ranks that share the experts: each has the same number of whole ones

    @property
    def plain(self) -> bool:
        """Whether the best experts are selected by their logits alone."""
        return self.scores != "sigmoid" and self.groups == 1 and not self.biased and self.scale == 1

    @property
    def held(self) -> int:
        """The number of experts on each rank."""
        return self.count // self.ranks


@dataclass(frozen=True, slots=True)
class MLPShape:
    inner: int  # width of one expert in an MoE layer
    activation: Activation = "swiglu"
    experts: Experts | None = None

    @property
    def gated(self) -> bool:
        """Whether the first product has a gate beside `up`. If not, its matrix `gate_up` has the part `up` alone."""
        return self.activation != "gelu"

    @property
    def gpu_token_numbers(self) -> int:
        """Gate and up, and their product; for GELU, torch allocates the result in addition. Without a gate: up, and the result."""
        return {"swiglu": 3, "gelu": 2}.get(self.activation, 4) * self.width

    @property
    def width(self) -> int:
        """The total inner width that a token passes through."""
        return self.inner if self.experts is None else self.inner * self.experts.chosen + self.experts.shared_inner


@dataclass(frozen=True, slots=True)
class NormShape:
    """A norm of rows: x / rms(x) * weight, or (x - mean(x)) / deviation(x) * weight + bias."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerShape:
    mixer: MixerSpec
    mlp: MLPShape
    norm: NormShape
    parallel: bool = False  # mixer and MLP read the same normed input, and both are added: there is no mlp_norm
    norms: Literal["before", "after", "both"] = "before"  # position: before a sub-layer, after it (its output is normed), or both
    residual_scale: float = 1.0  # factor on the output of a sub-layer before it is added to the residual stream

    def unlike_the_plain_one(self) -> str | None:
        """Returns how it differs from an RMS norm, attention, an RMS norm and a SwiGLU MLP, or None."""
        different = {
            f"has a mixer of kind {self.mixer.kind}": self.mixer.kind != "attention",
            "computes its mixer and its MLP in parallel": self.parallel,
            "has a mixture of experts": self.mlp.experts is not None,
            f"has an MLP of kind {self.mlp.activation}": self.mlp.activation != "swiglu",
            f"has norms of kind {self.norm.kind}": self.norm.kind != "rms",
            "has norms with biases": self.norm.bias,
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
    norm: NormShape  # the final one, and that of the embedding if there is a vector embedding_norm
    layers: tuple[LayerShape, ...]
    matrices: tuple[Matrix, ...]  # in the order in which they are loaded
    vectors: tuple[Vector, ...]
    lookup: Matrix | None = None  # the embedding, if it is not tied to the head
    embedding_scale: float = 1.0  # factor on the embedding rows when they enter the residual stream
    logit_scale: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap), after scaling
    captured: bool = False  # steps can be captured as CUDA graphs: they never wait for the device, and shapes follow from the batch's

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
        """The parameters that one token is computed with: only the chosen experts count."""
        idle = 0
        for matrix in self.matrices:
            experts = None if matrix.layer is None else self.layers[matrix.layer].mlp.experts
            if experts is not None and matrix.name in EXPERT_STACKS:
                numbers = matrix.numbers + (matrix.rows if matrix.bias else 0)
                idle += numbers - min(numbers * experts.chosen // experts.held, numbers)
        return self.num_parameters - idle

    @property
    def normed_embedding(self) -> bool:
        return any(vector.name == "embedding_norm" for vector in self.vectors)

    @cached_property
    def vector_numbers(self) -> int:
        return sum(vector.numbers for vector in self.vectors)

    @cached_property
    def wide_numbers(self) -> int:
        """The numbers of the vectors stored in float32."""
        return sum(vector.numbers for vector in self.vectors if vector.wide)

    @cached_property
    def shares_context(self) -> bool:
        """Whether several ranks share the tokens of a sequence."""
        return any("context_parallel" in layer.mixer.features for layer in self.kinds)

    @cached_property
    def position_numbers(self) -> int:
        """Numbers per position in the tables that mixers look up."""
        tables = {layer.mixer.position_table for layer in self.kinds}
        return sum(table[1] for table in tables if table is not None)

    def unlike_the_plain_layer(self) -> str | None:
        """Fused kernels support one layer: RMS norm, attention, RMS norm, SwiGLU MLP. Returns the first difference from it, or None."""
        for layer, index in self.kinds.items():
            if (difference := layer.unlike_the_plain_one()) is not None:
                return f"layer {index} {difference}"
        wide = next((vector.name for vector in self.vectors if vector.wide), None)
        different = {
            f"the last norm is of kind {self.norm.kind}": self.norm.kind != "rms",
            f"its {wide} is kept in float32": wide is not None,
            f"its embedding is scaled by {self.embedding_scale:g}": self.embedding_scale != 1,
            "its embedding is normed": self.normed_embedding,
            f"its logits are scaled by {self.logit_scale:g}": self.logit_scale != 1,
            f"its logits are capped at {self.logit_cap}": self.logit_cap is not None,
        }
        return next((difference for difference, there in different.items() if there), None)
