"""A program whose steps are verified: layer by layer under the shadow, and then once more as an engine computes them.

    torch program     `shadowed` (`worker/shadow.py`) wraps the attention backend of each layer, `ShadowedRecurrence` each recurrence
    native program    `ShadowedAttention` runs between its layers, which are called one by one

Both ways of computing a step must give the same bits. The second one writes the same slots again.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from octavo.layers.delta_net import DeltaNet, Recurrence
from octavo.step.shared_keys import AllShared
from octavo.step.step_tensors import Shape, StepStates, StepTensors
from octavo.worker.kv_store import KVStore
from octavo.worker.native_layers import NativeAttention, NativeLayers
from octavo.worker.native_program import NativeProgram
from octavo.worker.program import Eager, Forward, Program
from octavo.worker.shadow import Shadow
from octavo.worker.step_sharing import rows_together


class ShadowedAttention:
    """The native mixers over the store and over what the shadow keeps, with the comparison in between."""

    def __init__(self, whole: NativeProgram, store: KVStore, shadow: Shadow) -> None:
        self._paged, self._plain = (NativeAttention(whole, over.caches, over.states) for over in (store, shadow.regions))
        self._store, self._shadow, self._groups = store, shadow, whole.groups

    def prepare(self, step: StepTensors, shared: AllShared) -> None:
        self._step = step
        self._paged.prepare(step, shared)
        self._plain.prepare(self._shadow.contiguous(step), shared)  # the same rows share keys, so that bits are equal

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        twin = qkv.clone()
        self._paged.write(layer, qkv)
        self._plain.write(layer, twin)
        group = self._groups[layer]
        lengths, tables = self._step.context_len[group], self._step.tables[group]
        self._shadow.compare_caches(layer, self._store.caches[layer], self._step.row, lengths, tables)
        out = self._paged.read(layer, qkv)
        self._shadow.compare_outputs(layer, out, self._plain.read(layer, twin))
        return out

    def recur(self, layer: int, qkvz: Tensor, gates: Tensor) -> Tensor:
        states = self._store.states[layer]
        self._shadow.states.compare_read(layer, states)
        plain, out = (mixer.recur(layer, qkvz, gates) for mixer in (self._plain, self._paged))
        self._shadow.states.compare_written(layer, states)
        self._shadow.compare_outputs(layer, out, plain, "the recurrence differs over equal states")
        return out


class ShadowedRecurrence:
    """The recurrence of a layer over the store and over what the shadow keeps, with the comparison in between."""

    def __init__(self, recur: Recurrence, layer: int, shadow: Shadow) -> None:
        self._recur, self._layer, self._shadow = recur, layer, shadow

    def __call__(
        self, qkv: Tensor, gates: Tensor, conv_weight: Tensor, decay: Tensor, dt_bias: Tensor, conv: Tensor, recurrent: Tensor,
        query_start: Tensor, states: StepStates,
    ) -> Tensor:  # fmt: skip
        over_slots = partial(self._recur, qkv, gates, conv_weight, decay, dt_bias)
        if not self._shadow.watches:
            return over_slots(conv, recurrent, query_start, states)
        shadow, layer, read = self._shadow.states, self._layer, {"conv": conv, "recurrent": recurrent}
        shadow.compare_read(layer, read)
        own = shadow.own[layer]
        plain = over_slots(own["conv"], own["recurrent"], query_start, shadow.own_slots(states))
        out = over_slots(conv, recurrent, query_start, states)
        shadow.compare_written(layer, read)
        self._shadow.compare_outputs(layer, out, plain, "the recurrence differs over equal states")
        return out


class ShadowedProgram:
    """A program with verification in every layer."""

    def __init__(self, program: Program, watched: Callable[[Shape, bool], tuple[Tensor, Tensor] | None], shadow: Shadow) -> None:
        """`watched` computes a step with verification, and returns hidden states and logits as in the program's `Forward`.

        It returns None if the program does: in that case the data for the next stage is compared when it is sent (`worker/twice.py`).
        """
        self.vocab_size, self.nbytes = program.vocab_size, program.nbytes
        self.load, self.logits = program.load, program.logits
        self._program, self._watched, self._shadow = program, watched, shadow

    def run(self, shape: Shape, whole: bool = False) -> Forward | None:
        seen = self._watched(shape, whole)
        forward = self._program.run(shape, whole)  # writes the same bits into the same slots
        if forward is None or seen is None:
            return None
        hidden, logits = seen
        used = int(forward.step.query_start[-1])  # the rest is padding
        outputs = int(forward.step.first_output[int((forward.step.row >= 0).sum())])
        count = outputs if len(forward.hidden) == shape.outputs else used
        self._shadow.compare_ways((forward.hidden[:count], forward.logits[:outputs]), (hidden[:count], logits[:outputs]))
        return forward


def watched_native(program: NativeProgram, store: KVStore, shadow: Shadow) -> ShadowedProgram:
    layers = NativeLayers(program, ShadowedAttention(program, store, shadow))
    program.sharing.share_all()

    def watched(shape: Shape, whole: bool) -> tuple[Tensor, Tensor] | None:
        if shape.decodes:
            shadow.compared.together += rows_together(program.keys)
        step = program.prepared(shape)
        if program.place.after is None:
            return layers.compute(step)
        layers.pass_on(step)
        return None

    return ShadowedProgram(program, watched, shadow)


def watched_torch(program: Program, eager: Eager, shadow: Shadow) -> ShadowedProgram:
    """`eager`: the program inside `program`. Its layers have a `shadowed` backend."""
    recurrent = (module for module in eager.model.modules() if isinstance(module, DeltaNet))
    for module, layer in zip(recurrent, [layer for layer, state in enumerate(shadow.regions.states) if state], strict=True):
        module.recur = ShadowedRecurrence(module.recur, layer, shadow)
    if eager.sharing is not None:
        eager.sharing.share_all()
    all_share = eager.teams is None and eager.place.context.size == 1  # on a device only steps with shared-prefix groups do

    def watched(shape: Shape, whole: bool) -> tuple[Tensor, Tensor] | None:
        if shape.decodes and (all_share or shape.in_teams):
            shadow.compared.together += rows_together(eager.shared)
        shadow.watches = True
        found = eager.compute(shape, whole) if eager.place.after is None else eager.run(shape, whole)
        shadow.watches = False
        if not isinstance(found, tuple):
            return None
        states, hidden, logits = found
        return (states if whole else hidden).clone(), logits.clone()  # the next step overwrites them

    return ShadowedProgram(program, watched, shadow)
