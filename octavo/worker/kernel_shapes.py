"""What determines which GPU kernels a model calls: its description, and how its matrices are stored. It imports no torch and no Triton.

The process that compiles kernels receives it as JSON (`worker/compile_process.py`). Whatever a description says of layers is in it.
"""

from dataclasses import dataclass, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from octavo.attention.delta_net import DeltaNetSpec
from octavo.attention.mixer import MixerSpec
from octavo.attention.spec import AttentionSpec
from octavo.kernels.kernel_shapes import ExpertShape, Fp8Shape, PackedShape
from octavo.models.description import Experts, LayerShape, MLPShape, ModelDescription
from octavo.sizing.model_size import Codes, Kept

EXPERTS = "experts_"  # prefix of the names of expert matrices


@dataclass(frozen=True, slots=True)
class KernelShapes:
    model: ModelDescription  # one layer of each kind; no matrices, and no vectors of layers
    qkv_bias: bool
    packed: tuple[PackedShape, ...] = ()
    fp8: tuple[Fp8Shape, ...] = ()
    experts: ExpertShape | None = None

    @property
    def layer(self) -> LayerShape:
        """All layers are like this one, except for their mixers, which differ in windows and rotations, or are recurrent.

        Beside layers with latents, MLPs differ, too.
        """
        return self.model.layers[0]

    @property
    def mlps(self) -> list[MLPShape]:
        return list({layer.mlp: None for layer in self.model.layers})

    @property
    def attentions(self) -> list[AttentionSpec]:
        """One of each kind that calls other kernels."""
        specs = [layer.mixer for layer in self.model.layers if isinstance(layer.mixer, AttentionSpec)]
        return list({(spec.window is None, spec.turned): spec for spec in specs}.values())

    @property
    def recurrences(self) -> list[DeltaNetSpec]:
        return [layer.mixer for layer in self.model.layers if isinstance(layer.mixer, DeltaNetSpec)]

    @property
    def wide_norms(self) -> bool:
        return any(vector.wide for vector in self.model.vectors)


def kernel_shapes(model: ModelDescription, kept: list[Kept]) -> KernelShapes | None:
    """Returns the kernels to compile for this model, or None if its layers use kernels of another kind. `kept`: its matrices"""
    mixers = [layer.mixer for layer in model.kinds if isinstance(layer.mixer, AttentionSpec)]
    alike = {replace(mixer, window=None, rope=None) for mixer in mixers}
    first, latents = model.layers[0], any(mixer.latent is not None for mixer in mixers)
    others = {replace(layer, mixer=first.mixer, mlp=first.mlp if latents else layer.mlp) for layer in model.kinds}
    known = all(isinstance(layer.mixer, (AttentionSpec, DeltaNetSpec)) for layer in model.kinds)
    if not known or len(alike) != 1 or len(others) != 1:
        return None
    codes = [(one.matrix, one.codes) for one in kept if one.codes and not one.matrix.name.startswith(EXPERTS)]
    packed = {
        PackedShape(one.rows, one.columns, form.bits, form.group, one.bias, one.gated, *_table(form))
        for one, form in codes
        if not form.fp8_span
    }
    fp8 = {Fp8Shape(one.rows, one.columns, form.fp8_span, one.bias) for one, form in codes if form.fp8_span}
    experts = next((layer.mlp.experts for layer in model.kinds if layer.mlp.experts is not None), None)
    outside = tuple(vector for vector in model.vectors if vector.layer is None)
    return KernelShapes(
        model=replace(model, layers=tuple(model.kinds), matrices=(), vectors=outside, lookup=None),
        qkv_bias=any(matrix.bias for matrix in model.matrices if matrix.name == "qkv"),
        packed=tuple(sorted(packed)),
        fp8=tuple(sorted(fp8)),
        experts=None if experts is None else _experts(experts, model, kept),
    )


def _experts(experts: Experts, model: ModelDescription, kept: list[Kept]) -> ExpertShape:
    form = next((one.codes for one in kept if one.codes and one.matrix.name.startswith(EXPERTS)), None)
    bias = any(matrix.bias for matrix in model.matrices if matrix.name.startswith(EXPERTS))
    codes = (0, 0, False, False) if form is None else (form.bits, form.group, *_table(form))
    in_groups = None if experts.plain else (experts.groups, experts.chosen_groups)
    shared = experts.shared_inner, experts.shared_gated
    return ExpertShape(experts.held, experts.chosen, experts.scores, experts.normed, bias, *codes, in_groups, experts.biased, *shared)


def _table(form: Codes) -> tuple[bool, bool]:
    """Returns whether there is a table, and whether it is that of MXFP4."""
    return bool(form.table), form.table == "FP4"


def from_json(kind: Any, value: Any) -> Any:
    """Returns the value of an annotated type that `asdict` and JSON have taken apart."""
    if kind is MixerSpec:
        kind = DeltaNetSpec if "conv_width" in value else AttentionSpec
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{name: from_json(hints[name], one) for name, one in value.items()})
    if get_origin(kind) is tuple:
        return tuple(from_json(get_args(kind)[0], one) for one in value)
    if get_origin(kind) in (Union, UnionType):
        return None if value is None else from_json(next(one for one in get_args(kind) if one is not NoneType), value)
    return kind(*value) if isinstance(kind, type) and issubclass(kind, tuple) else value
