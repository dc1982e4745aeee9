"""`ModelShape`: all that a memory plan has to know of a model, read from its config and headers. No weight is read.

    a folder              config.json; the sizes of its safetensors files
    a .gguf file          its header: metadata, and the kind and shape of every tensor
    a config.json alone   what a model of this shape would need
    a name on the hub     the same, from a copy in the cache or by range requests
    nothing               the default model

Quantised weights stay codes in the native program. For torch they are unpacked, one tensor at a time and in the order of the
file: what is held at the widest point of either is known from the header, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from octavo.loading.files import INDEX, SINGLE, read_json_object, read_weight_map
from octavo.loading.hub import cached_model
from octavo.loading.hub_client import Hub
from octavo.loading.hub_files import HubName
from octavo.loading.hub_headers import fetch_headers
from octavo.loading.resolve import ModelSource, in_cache, load_model_config, locate
from octavo.model_config import ModelConfig
from octavo.models.registry import cache_specs
from octavo.policy.cache_spec import ITEM_BYTES
from octavo.policy.memory_plan import ModelNeeds
from octavo.policy.model_size import Quantization, int8_cache_specs, weight_bytes
from octavo.policy.native_size import native_weight_bytes

PLAIN_KINDS = ("F32", "F16", "BF16")  # of tensors that are copied as they stand
UNPACKED_BYTES = 6  # a weight takes while it is unpacked: float32, and parts of the way there


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    config: ModelConfig
    stored_bytes: int | None = None  # of the weights on disk, where there are any
    tensors: tuple[tuple[str, str, int], ...] = ()  # (name, kind, number of weights) in the order of the file, where the header was read

    @staticmethod
    def from_headers(name: str, config: ModelConfig, stored_bytes: int, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> "ModelShape":
        """`tensors`: name in the file -> (dtype or GGUF kind, shape), in the order of the file."""
        return ModelShape(name, config, stored_bytes, tuple((tensor, kind, prod(shape)) for tensor, (kind, shape) in tensors.items()))

    @property
    def packed(self) -> bool:
        """Whether weights are quantised."""
        return any(kind not in PLAIN_KINDS for _, kind, _ in self.tensors)

    def needs(
        self, dtype: str, quantization: Quantization = "none", kv_cache_dtype: str = "auto", native_threads: int = 0
    ) -> ModelNeeds:
        """`quantization` and a `kv_cache_dtype` other than auto are what-ifs: no engine runs them yet. Without threads, torch computes."""
        if kv_cache_dtype == "int8":
            specs = int8_cache_specs(self.config)
        else:
            specs = cache_specs(self.config, dtype if kv_cache_dtype == "auto" else kv_cache_dtype)
        if native_threads and quantization == "none":
            weights, loading = native_weight_bytes(self.config, ITEM_BYTES[dtype], {name: kind for name, kind, _ in self.tensors})
            return ModelNeeds(self.config, dtype, weights, specs, loading, native_threads)
        weights = weight_bytes(self.config, dtype, quantization)
        loading = self._loading_bytes(ITEM_BYTES[dtype]) if quantization == "none" else 0
        return ModelNeeds(self.config, dtype, weights, specs, loading)

    def _loading_bytes(self, item: int) -> int:
        filled = most = 0
        for _, kind, weights in self.tensors:
            filled += weights * item  # a parameter takes memory when it is filled
            most = max(most, filled + (0 if kind in PLAIN_KINDS else weights * UNPACKED_BYTES))
        return most


def model_shape(model: str | None, revision: str | None = None) -> ModelShape:
    """Of whatever a user may name, and of a config.json by itself."""
    if model is not None and Path(model).suffix == ".json" and Path(model).is_file():
        return ModelShape(Path(model).resolve().parent.name, ModelConfig.from_dict(read_json_object(Path(model)), model))
    found = locate(model, revision)
    return _hub_shape(found) if isinstance(found, HubName) else shape_of(found, load_model_config(found))


def _hub_shape(name: HubName) -> ModelShape:
    hub = Hub.from_environment()
    if (path := cached_model(hub, name)) is not None:
        source = in_cache(name, path)
        return shape_of(source, load_model_config(source))
    headers = fetch_headers(name, hub)
    return ModelShape.from_headers(name.shown, ModelConfig.from_dict(headers.config, headers.source), headers.weight_bytes, headers.tensors)


def shape_of(source: ModelSource, config: ModelConfig) -> ModelShape:
    if source.kind == "gguf":
        tensors = source.gguf.tensors.values()
        headers = {tensor.name: (tensor.kind, tensor.shape) for tensor in tensors}
        return ModelShape.from_headers(source.name, config, sum(tensor.num_bytes for tensor in tensors), headers)
    return ModelShape(source.name, config, _folder_bytes(source.path))


def _folder_bytes(folder: Path) -> int | None:
    """The size of the folder's weight files; None if it has none."""
    names = set(read_weight_map(folder / INDEX).values()) if (folder / INDEX).exists() else {SINGLE}
    try:
        return sum((folder / Path(name).name).stat().st_size for name in names)
    except (OSError, ValueError):  # not there, or no name for a file: whoever opens it will say so
        return None
