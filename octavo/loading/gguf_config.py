"""The metadata of a GGUF file in the words of a config.json, by the family that its architecture belongs to."""

import reprlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from octavo.errors import LoadError
from octavo.loading.gguf import GGUFTensor
from octavo.models.family import Family, GGUFForm
from octavo.models.gguf_keys import GGUFKeys
from octavo.models.registry import families


class GGUFModel(NamedTuple):
    """The family of a GGUF file, and what a config.json would say of the model."""

    family: Family
    config: dict[str, Any]
    interleaved: dict[str, int]  # see `GGUFForm`


def gguf_form(metadata: Mapping[str, Any], source: str) -> tuple[Family, GGUFForm, str]:
    """Returns the family that knows the file's architecture, its form, and the architecture."""
    name = metadata.get("general.architecture")
    known = {word: (family, form) for family in families() if (form := family.gguf) is not None for word in form.architectures}
    if not isinstance(name, str) or name not in known:
        raise LoadError(f"{source}: general.architecture is {reprlib.repr(name)}; supported: {', '.join(known)}")
    return *known[name], name


def read_gguf_model(metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], source: str) -> GGUFModel:
    family, form, architecture = gguf_form(metadata, source)
    keys = GGUFKeys(metadata, {name: tensor.shape for name, tensor in tensors.items()}, architecture, source)
    config = {"architectures": [form.architectures[architecture]], **form.config(keys), **keys.common()}
    return GGUFModel(family, config, form.interleaved(architecture, config))


def config_dict(metadata: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], source: str) -> dict[str, Any]:
    """Returns what a config.json would say of this model."""
    return read_gguf_model(metadata, tensors, source).config
