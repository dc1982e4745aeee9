"""The native step layer by layer: the same kernels with the same bits as the single call of `NativeProgram`.

    embed -> [ norm -> qkv -> ATTENTION -> output -> norm -> gate, up -> down ] x layers -> norm -> logits
             [ norm -> down -> absorb -> ATTENTION -> expand -> output -> ... ]     with a latent
             [ norm -> qkvz, gates -> Gated DeltaNet -> output -> ... ]

Attention and recurrence are an object here, over caches and states of its own, so that the verification of paging
(`worker/shadow_program.py`) can run between the layers. `see` receives the results of each layer (`worker/layer_states.py`).
"""

import ctypes
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from octavo.kernels.cpu.library import Layer, Matrix, Norm
from octavo.kernels.cpu.packing import unpack_rows
from octavo.step.shared_keys import AllShared
from octavo.step.step_tensors import StepTensors
from octavo.worker.kv_store import Caches
from octavo.worker.native_program import NativeProgram, at, put_shared, step_struct


class LayerAttention(Protocol):
    def prepare(self, step: StepTensors, shared: AllShared) -> None:
        """Called once per step."""

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Returns the attention of a layer [T, heads * head_dim] for q, k and v [T, all heads * head_dim], which are modified.

        With a latent, for q and the key, and the result is [T, heads * latent].
        """

    def recur(self, layer: int, qkvz: Tensor, gates: Tensor) -> Tensor:
        """Returns the result of a recurrent layer [T, v_heads * v_dim], and stores the states of all rows."""


class NativeAttention:
    """The attention and the recurrence of the native step, over its own caches and states."""

    def __init__(self, whole: NativeProgram, caches: Caches, states: Caches | None = None) -> None:
        self._call = whole.library.call
        self._model = whole.over(caches, states or [])
        self._held = whole, caches, states  # objects that the model struct points to

    def prepare(self, step: StepTensors, shared: AllShared) -> None:
        self._tensors, self._shared, self._step = step, shared, step_struct(step)  # the struct points to the other two
        put_shared(self._step, shared)

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        self.write(layer, qkv)
        return self.read(layer, qkv)

    def write(self, layer: int, qkv: Tensor) -> None:
        """Norms and rotates q and k in place, and stores k and v."""
        self._call.octavo_write(ctypes.byref(self._model), layer, ctypes.byref(self._step), at(qkv))

    def read(self, layer: int, qkv: Tensor) -> Tensor:
        shape = self._model.layers[layer]
        out = torch.empty(len(qkv), shape.heads * (shape.head_dim - (shape.rotary_dim if shape.latent else 0)))
        self._call.octavo_attend(ctypes.byref(self._model), layer, ctypes.byref(self._step), at(qkv), at(out))
        return out

    def recur(self, layer: int, qkvz: Tensor, gates: Tensor) -> Tensor:
        net = self._model.layers[layer].delta_net.contents
        out = torch.empty(len(qkvz), net.v_heads * net.v_dim)
        self._call.octavo_delta_net(ctypes.byref(self._model), layer, ctypes.byref(self._step), at(qkvz), at(gates), at(out))
        return out


See = Callable[[str, Tensor], None]  # a part of the model, and its result [T, ...]


def ignore(part: str, result: Tensor) -> None:
    """Drops the result."""


class NativeLayers:
    def __init__(self, whole: NativeProgram, attention: LayerAttention, see: See = ignore) -> None:
        self._whole = whole
        self._attention = attention
        self._see = see

    def compute(self, step: StepTensors) -> tuple[Tensor, Tensor]:
        """Returns the hidden states of all tokens, and the logits of the last token of each scheduled row."""
        whole = self._whole
        stream, pending = self._through(step)
        hidden = self._norm(stream, pending, whole.model.norm)
        self._see("the last norm", hidden)
        return hidden, whole.logits_in(len(step.token_ids), hidden[step.sample_index])

    def pass_on(self, step: StepTensors) -> None:
        """Sends the residual stream to the next stage of a pipeline."""
        stream, pending = self._through(step)
        assert self._whole.place.after is not None
        self._whole.place.after.send(stream + pending)

    def _through(self, step: StepTensors) -> tuple[Tensor, Tensor]:
        """Returns the residual stream, and the output of the last sub-layer, which is not added yet."""
        whole, sum_up = self._whole, self._whole.place.comm.all_reduce
        self._attention.prepare(step, whole.shared_keys)
        received = whole.received(len(step.token_ids))
        stream, pending = self._embed(step.token_ids) if received is None else received, None
        self._see("the embedding", stream)
        for index, layer in enumerate(whole.layers):
            normed = self._norm(stream, pending, layer.attention_norm)
            mix = self._recur if layer.delta_net else self._attend_latents if layer.latent else self._attend
            attended = self._product(layer.output, mix(index, normed))
            if layer.parallel:
                pending = sum_up(attended + self._mlp(layer, normed))
            else:
                pending = self._added(sum_up(attended), layer.attention_after_norm, layer.residual_scale)
                pending = sum_up(self._mlp(layer, self._norm(stream, pending, layer.mlp_norm)))
            pending = self._added(pending, layer.mlp_after_norm, layer.residual_scale)
            self._see(f"layer {index}, MLP", pending)
        assert pending is not None
        return stream, pending

    def _attend(self, index: int, normed: Tensor) -> Tensor:
        qkv = self._product(self._whole.layers[index].qkv, normed)
        self._see(f"layer {index}, q, k and v", qkv)
        attended = self._attention.attend(index, qkv)
        self._see(f"layer {index}, attention", attended)
        return attended

    def _attend_latents(self, index: int, normed: Tensor) -> Tensor:
        model, call, layer = ctypes.byref(self._whole.model), self._whole.library.call, self._whole.layers[index]
        latent, count = layer.latent.contents, len(normed)
        down = self._product(latent.down, normed)
        self._see(f"layer {index}, latents", down)
        qk = torch.empty(count, (layer.heads + 1) * layer.head_dim)
        call.octavo_absorb(model, index, at(down), at(qk), count)
        self._see(f"layer {index}, q and the key", qk)
        attended, out = self._attention.attend(index, qk), torch.empty(count, layer.heads * latent.value_dim)
        self._see(f"layer {index}, attention", attended)
        call.octavo_expand(model, index, at(attended), at(out), count)
        return out

    def _recur(self, index: int, normed: Tensor) -> Tensor:
        net = self._whole.layers[index].delta_net.contents
        qkvz, gates = self._product(net.qkvz, normed), self._product(net.gates, normed)
        self._see(f"layer {index}, q, k, v and z", qkvz)
        out = self._attention.recur(index, qkvz, gates)
        self._see(f"layer {index}, recurrence", out)
        return out

    def _embed(self, ids: Tensor) -> Tensor:
        """If ranks share the vocabulary, each looks up its own rows, and the results are summed."""
        whole, model = self._whole, self._whole.model
        elsewhere = (ids < model.vocab_start) | (ids >= model.vocab_start + model.vocab_rows)
        rows = self._rows((ids - model.vocab_start).masked_fill(elsewhere, 0)).masked_fill(elsewhere[:, None], 0)
        rows = whole.place.comm.all_reduce(rows) if model.vocab_rows < model.vocab else rows
        return self._norm(rows, None, model.embedding_norm)

    def _rows(self, index: Tensor) -> Tensor:
        if self._whole.embed is not None:
            return self._scaled(self._whole.embed[index].float())
        assert self._whole.head is not None
        return self._scaled(torch.from_numpy(unpack_rows(self._whole.head, index.numpy())).contiguous())

    def _scaled(self, rows: Tensor) -> Tensor:
        scale = self._whole.model.embedding_scale
        return rows if scale == 1 else rows * scale

    def _added(self, pending: Tensor, norm: Norm, scale: float) -> Tensor:
        """Returns a sub-layer's output after the norm and scale that the layer defines."""
        pending = self._norm(pending, None, norm)
        return pending if scale == 1 else pending * scale

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        call = self._whole.library.call
        if layer.mixture:
            y = torch.empty_like(x)
            call.octavo_mix(layer.mixture, layer.activation, at(x), at(y), len(x))
            return y
        gated = torch.empty(len(x), layer.down.k)
        call.octavo_gate_up(ctypes.byref(layer.gate_up), layer.activation, at(x), at(gated), len(x), len(x))
        return self._product(layer.down, gated)

    def _norm(self, stream: Tensor, pending: Tensor | None, norm: Norm) -> Tensor:
        """Adds a sub-layer's output to the stream in place, and norms the sum if there is a norm."""
        normed, added = torch.empty_like(stream), None if pending is None else at(pending)
        self._whole.library.call.octavo_add_norm(at(stream), added, ctypes.byref(norm), at(normed), *stream.shape)
        return normed

    def _product(self, matrix: Matrix, x: Tensor) -> Tensor:
        y = torch.empty(len(x), matrix.n)
        self._whole.library.call.octavo_matmul(ctypes.byref(matrix), at(x), at(y), len(x), len(x))
        return y
