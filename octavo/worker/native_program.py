"""The native program: one call per step. All layers, the logits of the sampled rows and their argmax run inside it.

The library reads structs of raw pointers: the struct of the model is built once, when the weights are loaded; that of a step points
into the step memory. The GIL is released for the whole call.
"""

import ctypes
from collections.abc import Sequence
from operator import is_not
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from octavo.attention.backend import Rope
from octavo.attention.spec import LATENT_NORM_EPS, AttentionSpec, kv_buffers
from octavo.comm.shared_memory import SharedMemoryComm
from octavo.kernels.cpu.library import (
    ACTIVATIONS,
    BF16,
    F16,
    F32,
    NORMS,
    PANEL,
    Q8,
    DeltaNet,
    Latent,
    Layer,
    Matrix,
    Mixture,
    Model,
    NativeLibrary,
    Norm,
    Step,
    address,
)
from octavo.kernels.cpu.packing import PackedMatrix
from octavo.kernels.cpu.sampling import NativeSampling
from octavo.kernels.ops import finish, prepare
from octavo.layers.attention import build_rope, slopes_of_rank
from octavo.loading.loader import NativeWeights
from octavo.messages import StepPlan
from octavo.model_config import RopeConfig
from octavo.models.description import EXPERT_STACKS, Experts, LayerShape, ModelDescription, NormShape, Vector
from octavo.policy.cache_group import FULL, CacheGroup
from octavo.step.shared_keys import NATIVE_COST, NOTHING, AllShared
from octavo.step.step_tensors import Shape, StepMemory, StepTensors, plan_sizes
from octavo.worker.kv_store import Caches
from octavo.worker.program import ALONE, Forward, Place
from octavo.worker.rank_sampling import RankSampling
from octavo.worker.request_table import RequestTable
from octavo.worker.step_sharing import StepSharing

RECURRENT = "delta_net"  # the kind of mixer
DELTA_MATRICES = {"delta_in": "qkvz", "delta_gates": "gates"}  # name in a description -> name in the struct
LATENT_MATRICES = {"latent_in": "down", "latent_q": "q_up", "latent_k": "k_up", "latent_v": "v_up"}
HEADS_TOGETHER = 8  # at most, of latent attention: enough that a key is used often once it is loaded, and few enough for all threads
DELTA_VECTORS = ("delta_conv", "delta_decay", "delta_dt_bias", "delta_norm")
KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.int8: Q8}


class NativeProgram:
    def __init__(
        self, model: ModelDescription, weights: NativeWeights, library: NativeLibrary, caches: Caches, table: RequestTable,
        block_size: int, max_len: int, max_tokens: int, groups: Sequence[CacheGroup] = (FULL,), place: Place = ALONE,
        states: Sequence[dict[str, Tensor]] = (),
    ) -> None:  # fmt: skip
        """`model`: one that `native_refusal` accepts.

        `groups`: as many as the table has block tables. `place`: the rank context if the weights are those of one rank. `states`: of
        recurrent layers, which have no cache, as other layers have no states; per layer, if there are any
        """
        self.vocab_size = model.vocab_size
        self.place = place
        self._comm = place.comm if isinstance(place.comm, SharedMemoryComm) else None
        self._ranks = None if self._comm is None else RankSampling(self._comm, self.vocab_size)
        self._vocab_start = 0 if self._ranks is None else self._ranks.tokens.start
        self.library = library
        self.table = table
        self._memory = StepMemory(table.layout, len(table.words), max(max_tokens, len(table.words)), table.words.device)
        self._sampling = NativeSampling(library)
        self._block_size = block_size
        self._result = torch.zeros(len(table.words), dtype=torch.int32)
        self._last: tuple[StepTensors, Step] | None = None
        self._kept: list[Any] = []  # objects that the structs point to
        self._spans = [links * block_size for links in table.layout.links]  # tokens in a block of each cache group
        group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        numbers = iter([group_of[layer] for layer in sorted(group_of)] or [0] * len(model.layers))
        self.groups = [0 if shape.mixer.kind == RECURRENT else next(numbers) for shape in model.layers]  # unused by recurrent layers
        self.sharing = StepSharing(table, self._spans, NATIVE_COST)
        self._alone = [NOTHING] * len(self._spans)  # per cache group: no rows share keys
        self.keys = self._alone  # per cache group: the keys that several scheduled rows read together
        self.shared_keys = AllShared.of(self.keys)
        self._ropes: dict[tuple[RopeConfig | None, int], Rope] = {}
        self.layers = (Layer * len(model.layers))(*(self._layer(model, weights, index, max_len) for index in range(len(model.layers))))
        self.embed = None if model.lookup is None else weights.rows(f"{model.lookup.module}.weight")  # None: tied to the head
        head = next((matrix.module for matrix in model.matrices if matrix.name == "head"), None)
        self.head = None if head is None else weights.matrix(head)  # None: another stage has it
        self._kept.append(self.embed)
        self.model = self._describe(model, weights)
        self._kept += [caches, states]
        self.model = self.over(caches, states)

    @property
    def nbytes(self) -> int:
        """The bytes of the weights."""
        arrays = [array for kept in self._kept for array in (kept.arrays if isinstance(kept, PackedMatrix) else [kept])]
        return sum(array.nbytes for array in arrays if isinstance(array, (np.ndarray, Tensor)))

    def load(self, plan: StepPlan) -> Shape:
        shape = Shape(*plan_sizes(plan), checkpoints=len(plan.checkpoints))
        self._memory.send(plan, shape)
        keys = self.sharing.of(plan) if plan.num_query.count(1) > 1 else self._alone
        if any(map(is_not, keys, self.keys)):  # most steps have the same groups as the previous one
            self.keys, self.shared_keys = keys, AllShared.of(keys)
        return shape

    def run(self, shape: Shape, whole: bool = False) -> Forward | None:
        step = self.prepared(shape)
        if self.place.after is not None:
            self.place.after.send(self._stream(step))
            return None
        hidden, logits, best = self.compute(step)
        parameters = step.temperature, step.noise, step.draw_positions
        ids = self._sampling.sample(logits, best, *parameters) if self._ranks is None else self._ranks.sample(logits, *parameters)
        result = self._result[: shape.outputs]
        finish(self.table.words, self.table.layout, step, ids, hidden, hidden, result)
        return Forward(step, hidden, logits, result)

    def prepared(self, shape: Shape) -> StepTensors:
        """Returns the tensors of a step, filled from the rows."""
        step = self._memory.step(shape.entries, shape.tokens, shape.outputs, shape.checkpoints)
        prepare(self.table.words, self.table.layout, self._block_size, step)
        return step

    def compute(self, step: StepTensors) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the hidden states of all tokens, and for each output the logits and the id of the largest.

        A rank has only the logits of its own part of the vocabulary.
        """
        outputs = len(step.sample_index)
        hidden = torch.empty(len(step.token_ids), self.model.hidden)
        logits, best = torch.empty(outputs, self.model.vocab_rows), torch.empty(outputs, dtype=torch.int64)
        described = self._described(step)
        described.hidden, described.logits, described.best = at(hidden), at(logits), at(best)
        self._call(step, described)
        return hidden, logits, best

    def _stream(self, step: StepTensors) -> Tensor:
        """Returns the residual stream after the layers of this stage, for the next stage."""
        passed, described = torch.empty(len(step.token_ids), self.model.hidden), self._described(step)
        described.passed = at(passed)
        self._call(step, described)
        return passed

    def _call(self, step: StepTensors, described: Step) -> None:
        received = self.received(len(step.token_ids))
        put_shared(described, self.shared_keys)
        described.received = None if received is None else at(received)
        code = self.library.call.octavo_step(ctypes.byref(self.model), ctypes.byref(described))
        if self._comm is not None:
            self._comm.check(code)

    def received(self, tokens: int) -> Tensor | None:
        """Returns the residual stream of the previous stage, or None if this is the first."""
        before = self.place.before
        return None if before is None else before.receive(torch.empty(tokens, self.model.hidden))

    def _described(self, step: StepTensors) -> Step:
        """Returns the struct of a step. It is reused, since most steps have the same tensors as the previous one."""
        if self._last is None or self._last[0] is not step:
            self._last = step, step_struct(step)
        return self._last[1]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.logits_in(len(hidden), hidden)

    def logits_in(self, tokens: int, hidden: Tensor) -> Tensor:
        """Computes logits as in a step of this many tokens."""
        hidden, logits = hidden.contiguous(), torch.empty(len(hidden), self.model.vocab_rows)
        self.library.call.octavo_matmul(ctypes.byref(self.model.head), at(hidden), at(logits), len(hidden), tokens)
        self.library.call.octavo_cap_logits(ctypes.byref(self.model), at(logits), logits.numel())
        return logits

    def over(self, caches: Caches, states: Sequence[dict[str, Tensor]] = ()) -> Model:
        """The model struct with these caches and states. Its owner keeps the program and both of them alive, too."""
        layers, cached = type(self.layers).from_buffer_copy(self.layers), [cache for cache in caches if cache]
        for layer, state in zip(layers, states):
            if state:
                net = DeltaNet.from_buffer_copy(layer.delta_net.contents)
                net.conv_state, net.recurrent_state = at(state["conv"]), at(state["recurrent"])
                layer.delta_net = ctypes.pointer(net)  # which keeps it alive, as the array of layers keeps the pointer
        for layer, cache in zip(layers, caches, strict=True):
            if not cache:
                continue
            k, v, k_scale, v_scale = kv_buffers(cache)
            layer.k_cache, layer.v_cache = at(k), None if v is None else at(v)
            if k_scale is not None and v_scale is not None:
                layer.k_scale, layer.v_scale = at(k_scale), at(v_scale)
        model = Model.from_buffer_copy(self.model)
        model.layers, model.cache_kind = layers, KINDS[kv_buffers(cached[0])[0].dtype] if cached else F32
        return model

    def _layer(self, model: ModelDescription, weights: NativeWeights, index: int, max_len: int) -> Layer:
        """Norms and matrices have the names of the description, and so have numbers unless they are computed here."""
        shape, recurrent = model.layers[index], model.layers[index].mixer.kind == RECURRENT
        numbers = named_numbers(Layer, shape) | {"activation": ACTIVATIONS[shape.mlp.activation]}
        layer = Layer(**numbers) if recurrent else self._attention(shape, numbers, index, max_len)
        latent = Latent() if "latent" in shape.mixer.features else None
        if recurrent:
            layer.delta_net = ctypes.pointer(self._delta_net(model, weights, index))
        if latent is not None:
            layer.latent = ctypes.pointer(self._latent(latent, model, weights, index))
        experts = shape.mlp.experts
        mixture = None if experts is None else self._mixture(experts)
        for vector in model.vectors:
            if vector.layer == index and vector.name not in DELTA_VECTORS:
                self._set_vector(layer, mixture, weights, vector, shape)
        for matrix in model.matrices:
            if matrix.layer == index and matrix.name not in DELTA_MATRICES and matrix.name not in LATENT_MATRICES:
                # down projections read gated values in whole panels, as they were written
                padded = shape.mlp.gated and matrix.name in ("down", "experts_down", "shared_down")
                columns = -(-matrix.columns // PANEL) * PANEL if padded else 0
                held = experts.held if experts is not None and matrix.name in EXPERT_STACKS else 1
                packed = self._matrix(weights.matrix(matrix.module, matrix.gated, columns, held))
                setattr(layer if mixture is None or hasattr(layer, matrix.name) else mixture, matrix.name, packed)
        if mixture is not None:
            layer.mixture = ctypes.pointer(mixture)
        return layer

    def _set_vector(self, layer: Layer, mixture: Mixture | None, weights: NativeWeights, vector: Vector, shape: LayerShape) -> None:
        if vector.name == "sinks":
            layer.sinks = self._vector(weights, vector.module)
        elif vector.name == "expert_bias":
            assert mixture is not None, "only an MoE layer has such a vector"
            mixture.bias = self._vector(weights, vector.module)
        else:
            of_latent = layer.latent and vector.name in ("q_norm", "k_norm")
            setattr(layer, vector.name, self._norm(weights, vector, NormShape(LATENT_NORM_EPS) if of_latent else shape.norm))

    def _attention(self, shape: LayerShape, numbers: dict[str, Any], index: int, max_len: int) -> Layer:
        spec, group = cast(AttentionSpec, shape.mixer), self.groups[index]
        rope = self._rope(spec, max_len)
        numbers |= named_numbers(Layer, spec) | {
            "heads": spec.num_heads, "kv_heads": spec.num_kv_heads, "rotary_dim": 0 if spec.rope is None else spec.rotated,
            "whole_norm": spec.qk_norm == "whole", "cache_group": group, "block_size": self._spans[group], "attention_scale": spec.scale,
        }  # fmt: skip
        layer = Layer(**numbers, cos=at(rope.cos), sin=at(rope.sin))
        if spec.latent is not None:
            layer.kv_heads = spec.num_heads // max(size for size in range(1, HEADS_TOGETHER + 1) if spec.num_heads % size == 0)
        if spec.alibi:
            self._kept.append(slopes_of_rank(spec.num_heads, self.place.comm))
            layer.alibi = at(self._kept[-1])
        return layer

    def _delta_net(self, model: ModelDescription, weights: NativeWeights, index: int) -> DeltaNet:
        """Returns it without states. Checkpoints have log(-decay), and the convolution channel by channel."""
        spec: Any = model.layers[index].mixer
        vectors = {vector.name: vector for vector in model.vectors if vector.layer == index}
        net = DeltaNet(**named_numbers(DeltaNet, spec), norm=self._norm(weights, vectors["delta_norm"], NormShape(spec.norm_eps)))
        conv = weights.vector(f"{vectors['delta_conv'].module}.weight").reshape(-1, spec.conv_width)
        arrays = {
            "conv": np.ascontiguousarray(conv.T), "decay": -np.exp(weights.vector(vectors["delta_decay"].module)),
            "dt_bias": weights.vector(vectors["delta_dt_bias"].module),
        }  # fmt: skip
        for name, array in arrays.items():
            self._kept.append(array)
            setattr(net, name, address(array))
        for matrix in model.matrices:
            if matrix.layer == index and matrix.name in DELTA_MATRICES:
                setattr(net, DELTA_MATRICES[matrix.name], self._matrix(weights.matrix(matrix.module)))
        return net

    def _latent(self, latent: Latent, model: ModelDescription, weights: NativeWeights, index: int) -> Latent:
        """Fills the struct. W_UK is transposed, because in files it multiplies latents, and here it multiplies q."""
        spec = cast(AttentionSpec, model.layers[index].mixer)
        assert spec.latent is not None
        latent.plain_dim, latent.value_dim = spec.latent.plain_dim, spec.latent.value_dim
        for matrix in model.matrices:
            if matrix.layer == index and matrix.name in LATENT_MATRICES:
                if matrix.heads:
                    packed = weights.heads(matrix.module, matrix.heads, turned=matrix.name == "latent_k")
                else:
                    packed = weights.matrix(matrix.module)
                setattr(latent, LATENT_MATRICES[matrix.name], self._matrix(packed))
        return latent

    def _mixture(self, experts: Experts) -> Mixture:
        first = experts.held * self.place.comm.rank if experts.ranks > 1 else 0
        scores = {"over_all": experts.scores == "all", "sigmoid": experts.scores == "sigmoid"}
        mixture = Mixture(**named_numbers(Mixture, experts), **scores, first=first)
        self._kept.append(mixture)
        return mixture

    def _rope(self, spec: AttentionSpec, max_len: int) -> Rope:
        """Layers with the same rotation share one table."""
        key = spec.rope, spec.rotated
        if key not in self._ropes:
            self._ropes[key] = build_rope(*key, max_len)
        return self._ropes[key]

    def _describe(self, model: ModelDescription, weights: NativeWeights) -> Model:
        norms = {vector.name: self._norm(weights, vector, model.norm) for vector in model.vectors if vector.layer is None}
        numbers = named_numbers(Model, model) | {
            "num_layers": len(model.layers), "hidden": model.hidden_size, "vocab": model.vocab_size,
            "embed_kind": Q8 if self.embed is None else KINDS[self.embed.dtype],
            "embedding_scale": float(torch.tensor(model.embedding_scale, dtype=weights.dtype)),  # as the makers round
            "vocab_start": self._vocab_start, "vocab_rows": self._vocab_rows(),
        }  # fmt: skip
        return Model(
            **numbers, **norms, layers=self.layers, embed=None if self.embed is None else at(self.embed),
            head=Matrix() if self.head is None else self._matrix(self.head),
            group=None if self._comm is None else ctypes.pointer(self._comm.group),
        )  # fmt: skip

    def _vocab_rows(self) -> int:
        if self.head is not None:
            return int(self.head.struct.n)
        return 0 if self.embed is None else len(self.embed)

    def _norm(self, weights: NativeWeights, vector: Vector, shape: NormShape) -> Norm:
        bias = self._vector(weights, f"{vector.module}.bias") if vector.bias else None
        return Norm(weight=self._vector(weights, f"{vector.module}.weight"), bias=bias, kind=NORMS[shape.kind], eps=shape.eps)

    def _vector(self, weights: NativeWeights, name: str) -> int | None:
        values = weights.vector(name)
        self._kept.append(values)
        return address(values)

    def _matrix(self, packed: PackedMatrix) -> ctypes.Structure:
        self._kept.append(packed)
        return packed.struct


def named_numbers(struct: type[ctypes.Structure], *parts: Any) -> dict[str, Any]:
    """Returns the numbers of a struct that have the same name in one of these parts of a description; None is 0."""
    names = [field[0] for field in struct._fields_ if field[1] in (ctypes.c_int32, ctypes.c_float)]
    return {name: getattr(part, name) or 0 for part in parts for name in names if hasattr(part, name)}


def put_shared(described: Step, shared: AllShared) -> None:
    described.shared_start, described.shared_nodes, described.shared_rows = shared.addresses


def step_struct(step: StepTensors) -> Step:
    """Describes a step, without shared keys and results. The struct points to the arrays but does not keep them alive."""
    described = Step(
        num_tokens=len(step.token_ids), num_rows=len(step.row), table_width=step.tables.shape[2], num_samples=len(step.sample_index),
        slot_stride=step.slots.stride(0), context_stride=step.context_len.stride(0), table_stride=step.tables.stride(0),
        token_ids=at(step.token_ids), cache_index=at(step.cache_index), positions=at(step.positions[0]), slots=at(step.slots[0]),
        query_start=at(step.query_start), context_len=at(step.context_len[0]), tables=at(step.tables[0]),
        sample_index=at(step.sample_index),
    )  # fmt: skip
    if (states := step.states) is not None:
        described.state_read, described.state_write = at(states.read), at(states.write)
        described.first_checkpoint, described.checkpoints = at(states.first_checkpoint), at(states.checkpoints)
    return described


def at(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
