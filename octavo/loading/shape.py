"""`ModelShape`: all that a memory plan needs to know of a model, from its config and headers. No weight is read.

    a folder              config.json; the sizes of its safetensors files, and their headers if they are quantised
    a .gguf file          its header: metadata, and the kind and shape of every tensor
    a config.json alone   the memory that a model of this shape would need
    a name on the hub     the same, from a copy in the cache or by range requests
    nothing               the default model

Quantised weights stay quantised in the native program and on a GPU. For torch they are dequantised, one tensor at a time and in the
order of the file. The header also determines the peak memory of loading in either way.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config import Quantization
from octavo.kernels.cpu.gguf_blocks import BLOCK_KINDS
from octavo.loading.files import INDEX, SINGLE, Entry, read_header, read_json_object, read_weight_map
from octavo.loading.gguf import read_gguf_model
from octavo.loading.hub import cached_model, fetch_headers
from octavo.loading.hub_client import Hub
from octavo.loading.names import HubName
from octavo.loading.overrides import overridden, read_overridden
from octavo.loading.resolve import ModelSource, in_cache, load_model_config, locate
from octavo.model_config import ModelConfig
from octavo.models.description import EXPERT_STACKS, ModelDescription
from octavo.models.family import MAX_EXPERTS, Rules, of_expert
from octavo.models.registry import cache_specs, describe, family_of, rank_config, stage_config
from octavo.models.split import with_rows_of_rank
from octavo.models.stages import ONLY, Stage, deal_layers, of_stage, one_table
from octavo.platforms import is_arm
from octavo.policy.cache_spec import ITEM_BYTES, LayerCacheSpec
from octavo.quant.quant_config import FP8_GROUP, QuantConfig, read_quant_config, whole_group
from octavo.sizing.gpu_size import gpu_matrices, gpu_slab_bytes, gpu_weight_bytes
from octavo.sizing.memory_plan import ModelNeeds
from octavo.sizing.model_size import DECIDING, Codes, Kept, fits_fp8, requantised, weight_bytes
from octavo.sizing.native_size import native_matrices, native_weight_bytes

FLOAT_BITS = 16
UNPACKED_BYTES = 6  # per weight while it is dequantised: float32, and intermediate parts
REQUANTISED_BYTES = 6  # per weight while it is quantised from such floats, or dequantised: those, its code, and a share of its scales
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # name in the file -> (dtype or GGUF kind, shape), in the order of the file
GGUF_CODES = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), Codes(4, 32)),
    **dict.fromkeys(("Q2_K", "Q3_K"), Codes(4, 16)),
    **dict.fromkeys(("IQ4_NL", "IQ4_XS"), Codes(4, 32, table="IQ4")),
    "MXFP4": Codes(4, 32, table="FP4"),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q8_0"), Codes(8, 32)),
    **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S"), Codes(8, 32)),
    **dict.fromkeys(("Q6_K", "IQ1_M", "IQ2_XS", "IQ2_S"), Codes(8, 16)),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), Codes(4, 128)),
}
MXFP4_CODES, BLOCKS = Codes(4, 32, table="FP4"), "_blocks"  # of all experts, in folders
SOME_ORDER = "act-order"  # if the order was not read: one for all modules, since they have the same inputs


@dataclass(frozen=True, slots=True)
class StoredWeight:
    name: str  # Hugging Face's
    kind: str  # for display: BF16, Q4_K, AWQ
    size: int  # numbers, not bytes
    codes: Codes | None = None  # None: floats


def stored_weights(
    tensors: Tensors, source: str, quantization: QuantConfig | None, rules: Rules, orders: Mapping[str, str] | None = None
) -> tuple[StoredWeight, ...]:
    """Returns how each weight is stored, from headers.

        GGUF          by the kind of each tensor
        folders       by `quantization_config`, for quantised modules; their other tensors are part of them
        all others    floats

    `source`: for messages; `orders`: of the columns of each module with act-order, if they are known
    """
    found = []
    codes = {name for name, (kind, _) in tensors.items() if quantization is not None and quantization.is_codes(kind, _leaf(name))}
    for stored, (kind, shape) in tensors.items():
        name = rules.of_checkpoint(stored)
        if name is None:
            continue
        module, _, part = name.rpartition(".")
        if quantization is None or f"{stored.rpartition('.')[0]}.{quantization.codes_part}" not in codes or part == "bias":
            found += _unstacked(name, kind, shape, rules)
        elif stored in codes and len(shape) == 2:
            per_number = 1 if part == "weight" else 32 // quantization.bits
            columns = shape[1] * per_number if part != "qweight" else shape[0] * (1 if quantization.method == "awq" else per_number)
            order = (SOME_ORDER if quantization.desc_act else "") if orders is None else orders.get(module, "")
            held = rules.held_by(module)
            found += [_packed(source, one, prod(shape) * per_number // len(held), columns, quantization, order) for one in held]
    return tuple(found)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _unstacked(name: str, kind: str, shape: tuple[int, ...], rules: Rules) -> list[StoredWeight]:
    """Returns the weights in a tensor: one, or one of every expert."""
    named, size, codes = rules.of_gguf(name) or name, prod(shape), GGUF_CODES.get(kind)
    stack = rules.stacked(name.removesuffix(BLOCKS))
    if stack is not None and name.endswith(BLOCKS):
        kind, size, codes = "MXFP4", 2 * size, MXFP4_CODES
    stacked = [named] if "*" in named else [f"{module}.weight" for module in stack.modules] if stack is not None else []
    count = shape[0] if len(shape) > 1 and shape[0] <= MAX_EXPERTS else 0  # otherwise opening the file will raise the error
    names = [of_expert(one, expert) for expert in range(count) for one in stacked] or _held_by(named, rules)
    return [StoredWeight(one, kind, size // len(names), codes) for one in names]


def _held_by(name: str, rules: Rules) -> list[str]:
    """Returns the weights whose rows a stored weight holds."""
    module, _, leaf = name.rpartition(".")
    held = rules.held_by(module)
    return [name] if held == (module,) else [f"{one}.{leaf}" for one in held]


def of_description(model: ModelDescription, source: str, quantization: QuantConfig) -> tuple[StoredWeight, ...]:
    """Returns the weights as such a model is usually stored: its linear layers quantised, the vocabulary and routers not."""
    kinds = EXPERT_STACKS if quantization.method == "mxfp4" else {matrix.name for matrix in model.matrices} - set(DECIDING)
    products = [matrix for matrix in model.matrices if not matrix.vocabulary and matrix.name in kinds]
    modules = [(part.removesuffix(".weight"), matrix.columns, rows) for matrix in products for part, rows in matrix.parts.items()]
    order = SOME_ORDER if quantization.desc_act else ""
    return tuple(_packed(source, name, rows * k, k, quantization, order) for name, k, rows in modules if quantization.converts(name))


def of_folder(files: Iterable[Path], source: str, quantization: QuantConfig, rules: Rules) -> tuple[StoredWeight, ...]:
    entries: dict[str, Entry] = {}
    orders: dict[str, str] = {}
    for path in files:
        header, begin = read_header(path)
        entries |= header
        for name in [name for name in header if _leaf(name) in ("g_idx", "weight_g_idx")]:
            orders[name.rpartition(".")[0]] = _order(path, begin, header[name], quantization.group_size)
    tensors = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    return stored_weights(tensors, source, quantization, rules, orders)


def _order(path: Path, begin: int, entry: Entry, group_size: int) -> str:
    """Returns a digest of the order of columns, or nothing if they are in the order of their groups."""
    if entry.stop - entry.start > path.stat().st_size:
        return SOME_ORDER  # opening the file will raise the error
    with path.open("rb") as file:
        file.seek(begin + entry.start)
        group_of = file.read(entry.stop - entry.start)
    columns = len(group_of) // 4
    in_order = np.arange(columns, dtype="<i4") // (group_size if group_size > 0 else max(columns, 1))
    return "" if group_of == in_order.tobytes() else hashlib.blake2b(group_of, digest_size=8).hexdigest()


def _packed(source: str, module: str, size: int, columns: int, quantization: QuantConfig, order: str) -> StoredWeight:
    group_size = columns if quantization.group_size == -1 else quantization.group_size
    if quantization.layout == "gptq":
        group_size = min(group_size, columns)
    elif quantization.layout == "fp8":
        group_size = FP8_GROUP
    group = whole_group(f"{source}: {module}.{quantization.codes_part}", group_size, columns)
    span = quantization.fp8_span(columns)
    codes = MXFP4_CODES if quantization.method == "mxfp4" else Codes(quantization.bits, group, order, fp8_span=span)
    return StoredWeight(f"{module}.weight", quantization.shown, size, codes)


# -- the whole model


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    config: ModelConfig
    stored_bytes: int | None = None  # of the weights on disk, if there are any
    weights: tuple[StoredWeight, ...] = ()  # in the order of the file, if a header was read
    ranks: int = 1  # that share each matrix; the config and everything derived from it is that of one rank
    stage: Stage = ONLY  # of a pipeline; the same applies to its layers
    all_stages: ModelConfig | None = None  # the config of a rank with all layers, if this is of a stage

    def of_rank(self, ranks: int, context: int = 1, expert_ranks: int = 1) -> "ModelShape":
        """Returns the shape of one of several ranks. Refuses a model that cannot be divided among them.

        `context`: ranks that share a context; `expert_ranks`: the number of ranks that have whole experts
        """
        if ranks == 1:
            return self
        config = rank_config(self.config, ranks, context, expert_ranks)
        weights = tuple(replace(weight, size=-(-weight.size // ranks)) for weight in self.weights)
        return replace(self, config=config, weights=weights, ranks=ranks)

    def stages(self, count: int) -> "list[ModelShape]":
        """Returns the shape of each stage of a pipeline."""
        return [self._of_layers(Stage(index, count), layers) for index, layers in enumerate(self.stage_layers(count))]

    def stage_layers(self, count: int) -> list[range]:
        """Returns the layers of each stage. Every rank computes the same result, before anything is loaded."""
        if count == 1:
            return [range(self.config.num_layers)]
        bits = {weight.name: weight.codes.bits for weight in self.weights if weight.codes is not None}
        layers, head = [0] * self.config.num_layers, 0
        for matrix in self.model.matrices:
            size = sum(rows * matrix.columns * bits.get(part, FLOAT_BITS) for part, rows in matrix.parts.items())
            if matrix.layer is None:
                head += size
            else:
                layers[matrix.layer] += size
        return deal_layers(layers, head, count)

    def _of_layers(self, stage: Stage, layers: range) -> "ModelShape":
        if stage.count == 1:
            return self
        rules = family_of(self.config).rules
        own = replace(self, config=stage_config(self.config, layers), stage=stage, all_stages=self.config)
        known = {part for matrix in (*own.model.matrices, own.model.lookup) if matrix is not None for part in matrix.parts}
        weights: list[StoredWeight] = []
        for weight in self.weights:
            layer = rules.layer(weight.name)
            if layer is not None and layer in layers:
                weights.append(replace(weight, name=rules.with_layer(weight.name, layer - layers.start)))
            elif layer is None and weight.name in known:
                weights.append(weight)
        return replace(own, weights=tuple(weights))

    @property
    def model(self) -> ModelDescription:
        return of_stage(with_rows_of_rank(describe(self.config), self.ranks), self.stage)

    @property
    def packed(self) -> bool:
        """Whether weights are quantised."""
        return any(weight.codes is not None for weight in self.weights)

    def needs(
        self, dtype: str, quantization: Quantization = "auto", kv_cache_dtype: str = "auto", native_threads: int = 0, device: str = "cpu"
    ) -> ModelNeeds:
        """Returns the data for a memory plan. On a CPU without native threads, torch computes."""
        cache_dtype = dtype if kv_cache_dtype == "auto" else kv_cache_dtype
        specs, item = cache_specs(self.config, cache_dtype), ITEM_BYTES[dtype]
        all_specs = None if self.all_stages is None else cache_specs(self.all_stages, cache_dtype)
        if device == "cuda":
            return replace(self._gpu_needs(dtype, cache_dtype, quantization, specs), all_specs=all_specs)
        if native_threads:
            unpacked = REQUANTISED_BYTES if self.packed and quantization in ("int8", "int4") else 0
            straight = {weight.name for weight in self.weights if weight.kind in BLOCK_KINDS and quantization == "auto" and self.ranks == 1}
            weights, loading = native_weight_bytes(self.model, item, self._forms(quantization, "cpu"), unpacked, straight, is_arm())
        else:
            weights, loading = weight_bytes(self.model, dtype), self._loading_bytes(item, quantization in ("int8", "int4"))
        kept = one_table(self.model, self.stage)
        needs = ModelNeeds(self.model, dtype, weights, specs, cache_dtype, loading, native_threads, arm=is_arm(), one_table=kept)
        return replace(needs, all_specs=all_specs)

    def _gpu_needs(self, dtype: str, cache_dtype: str, quantization: Quantization, specs: list[LayerCacheSpec]) -> ModelNeeds:
        """Returns the needs of a GPU. Files are read on the host, a matrix at a time; floats are quantised on the device."""
        item, forms = ITEM_BYTES[dtype], self._forms(quantization, "cuda")
        weights = gpu_weight_bytes(self.model, item, forms)
        sizes = [matrix.numbers for matrix in self.model.matrices] if quantization in ("int8", "int4") else [0]
        loading = weights + max(sizes) * REQUANTISED_BYTES
        slab = gpu_slab_bytes(self.model, item, forms)
        kept = one_table(self.model, self.stage)
        return ModelNeeds(self.model, dtype, weights, specs, cache_dtype, loading, device="cuda", slab=slab, one_table=kept)

    def kept(self, dtype: str, quantization: Quantization, device: str = "cpu") -> list[Kept]:
        """Returns how each matrix is stored, in the native program or on a GPU."""
        lay_out = gpu_matrices if device == "cuda" else native_matrices
        return lay_out(self.model, ITEM_BYTES[dtype], self._forms(quantization, device))

    def expands(self, one: Kept, quantization: Quantization) -> bool:
        """Whether some of its parts are quantised in the file, but it is stored as floats, because they cannot be merged or split.

        Matrices of heads are always floats.
        """
        stored = {weight.name for weight in self.weights if weight.codes is not None}
        return quantization == "auto" and one.codes is None and not one.matrix.heads and not stored.isdisjoint(one.matrix.parts)

    def _forms(self, quantization: Quantization, device: str) -> dict[str, Codes | None]:
        """Returns the format of each weight after reading, for a CPU or a GPU."""
        if quantization == "auto":
            scattered, fp8 = self._scattered(), self._fp8() if device == "cuda" else set()
            forms = {weight.name: weight.codes for weight in self.weights}
            return {
                name: codes if codes is None or name in fp8 else None if name in scattered else replace(codes, fp8_span=0)
                for name, codes in forms.items()
            }
        if quantization == "none":
            return {}
        return {part: requantised(one, quantization, device) for one in self.model.matrices for part in one.parts}

    def _fp8(self) -> set[str]:
        """Returns the weights that a GPU stores as 8-bit floats. Ranks convert them to integers."""
        spans = {weight.name: weight.codes.fp8_span for weight in self.weights if weight.codes is not None}
        matrices = [one for one in self.model.matrices if all(fits_fp8(one, spans.get(part, 0)) for part in one.parts)]
        return {part for one in matrices for part in one.parts} if self.ranks == 1 else set()

    def _scattered(self) -> set[str]:
        """Returns the weights that a rank cannot store quantised. With act-order the columns of a rank come from any group.

        If they happen to be whole groups, the rank stores them quantised after all, and needs less than was counted.
        """
        if self.ranks == 1:
            return set()
        split = {part for matrix in self.model.matrices if matrix.split == "columns" for part in matrix.parts}
        return {weight.name for weight in self.weights if weight.codes is not None and weight.codes.order and weight.name in split}

    def _loading_bytes(self, item: int, quantised_again: bool) -> int:
        filled = most = 0
        for weight in self.weights:
            filled += weight.size * item  # a parameter uses memory once it is filled
            on_the_way = REQUANTISED_BYTES if quantised_again else 0 if weight.codes is None else UNPACKED_BYTES
            most = max(most, filled + weight.size * on_the_way)
        return most


def model_shape(model: str | None, revision: str | None = None, overrides: dict[str, Any] | None = None) -> ModelShape:
    """Returns the shape of any model that a user can name, or of a config.json alone. `overrides`: the setting `hf_overrides`"""
    if model is not None and Path(model).suffix == ".json" and Path(model).is_file():
        return _config_shape(Path(model), overrides)
    found = locate(model, revision)
    if isinstance(found, HubName):
        return _hub_shape(found, overrides)
    source = replace(found, overrides=overrides)
    return shape_of(source, load_model_config(source))


def _config_shape(path: Path, overrides: dict[str, Any] | None) -> ModelShape:
    raw = read_json_object(path)
    config, quantized = read_overridden(raw, overrides, str(path)), read_quant_config(overridden(raw, overrides), str(path))
    return ModelShape(path.resolve().parent.name, config, None, of_description(describe(config), str(path), quantized) if quantized else ())


def _hub_shape(name: HubName, overrides: dict[str, Any] | None) -> ModelShape:
    hub = Hub.from_environment()
    if (path := cached_model(hub, name)) is not None:
        source = replace(in_cache(name, path), overrides=overrides)
        return shape_of(source, load_model_config(source))
    headers = fetch_headers(name, hub)
    config = read_overridden(headers.config, overrides, headers.source)
    quantized = read_quant_config(overridden(headers.config, overrides), headers.source)
    weights = stored_weights(headers.tensors, headers.source, quantized, family_of(config).rules)
    return ModelShape(name.shown, config, headers.weight_bytes, weights)


def shape_of(source: ModelSource, config: ModelConfig) -> ModelShape:
    if source.kind == "gguf":
        file = source.gguf
        used = read_gguf_model(file.metadata, file.tensors, str(source.path)).tensors.values()
        kinds = {tensor.name: (tensor.kind, tensor.shape) for tensor in used}
        weights = stored_weights(kinds, str(source.path), None, family_of(config).rules)
        return ModelShape(source.name, config, sum(tensor.num_bytes for tensor in file.tensors.values()), weights)
    files = _weight_files(source.path)
    stored_bytes = _total_bytes(files)
    if source.quantization is None:
        return ModelShape(source.name, config, stored_bytes)
    if stored_bytes is None:
        return ModelShape(source.name, config, None, of_description(describe(config), str(source.path), source.quantization))
    return ModelShape(source.name, config, stored_bytes, of_folder(files, str(source.path), source.quantization, family_of(config).rules))


def dummy_shape(source: ModelSource, config: ModelConfig) -> ModelShape:
    """Returns the shape of random weights: floats, or MXFP4 and FP8 according to the config."""
    stored = source.quantization
    if stored is None or (stored.method != "mxfp4" and stored.layout != "fp8"):
        return ModelShape(source.name, config)
    return ModelShape(source.name, config, None, of_description(describe(config), str(source.path), stored))


def _weight_files(folder: Path) -> list[Path]:
    names = set(read_weight_map(folder / INDEX).values()) if (folder / INDEX).exists() else {SINGLE}
    return [folder / Path(name).name for name in sorted(names)]


def _total_bytes(files: list[Path]) -> int | None:
    """Returns None if any file is missing."""
    try:
        return sum(file.stat().st_size for file in files)
    except (OSError, ValueError):  # missing, or an invalid name: opening it will raise the error
        return None
