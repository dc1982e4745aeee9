"""Fields of the layers of a config of `models/dense_family.py`: to look at, and to change after it was read."""

from dataclasses import fields, replace
from typing import Any

from octavo.attention.spec import AttentionSpec
from octavo.models.dense_family import DenseConfig
from octavo.models.description import LayerShape


def of_layers(config: Any, name: str) -> tuple[Any, ...]:
    """A field of the attention of each layer."""
    return tuple(getattr(layer.mixer, name) for layer in config.layers)


def changed(config: Any, windows: tuple[int | None, ...] | None = None, **given: Any) -> DenseConfig:
    """Fields of the config itself, and of every layer, its attention and its MLP, by name."""

    def other(part: Any) -> Any:
        names = {field.name for field in fields(part)}
        return replace(part, **{name: value for name, value in given.items() if name in names})

    layers: list[LayerShape] = []
    for index, layer in enumerate(config.layers):
        mixer: AttentionSpec = other(layer.mixer)
        mixer = mixer if windows is None else replace(mixer, window=windows[index])
        layers.append(replace(other(layer), mixer=mixer, mlp=other(layer.mlp)))
    found: DenseConfig = replace(other(config), layers=tuple(layers))
    return found
