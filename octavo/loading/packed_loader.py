"""Reads weights into a model on a device, matrix by matrix. Codes stay codes, so that no dense copy of a model is ever held.

The same parts can be merged as codes as in the native program (`native_loader.py`); where they cannot, the matrix is kept as
floats. An embedding that is not the matrix of the head is kept as floats too: its rows are looked up, not multiplied.
"""

import torch
from torch import nn

from octavo.layers.linear import Embedding, Linear, LMHead
from octavo.loading.native_loader import StoredParameters
from octavo.models.decoder import Decoder
from octavo.quant.schemes import UNQUANTIZED, Packed


def load_packed(model: Decoder, stored: StoredParameters) -> None:
    """Fills a model that was built with the scheme `Packed`, on the device of its norms."""
    for name, parameter in model.named_parameters():  # norms and biases: the matrices are not there yet
        stored.copy(name, parameter.data)
    for name, module in model.named_modules():
        if isinstance(module, (Linear, Embedding, LMHead)) and not (isinstance(module, LMHead) and module.tied is not None):
            _fill(module, f"{name}.weight", stored, model)


def _fill(layer: Linear | Embedding | LMHead, name: str, stored: StoredParameters, model: Decoder) -> None:
    device, dtype = model.device, model.dtype
    looked_up = isinstance(layer, Embedding) and not model.config.tie_embeddings
    codes = None if looked_up else stored.codes(name)
    assert isinstance(layer.scheme, Packed)
    if codes is not None:
        layer.scheme.fill(layer, codes, device)
        return
    layer.scheme = UNQUANTIZED
    layer.weight = nn.Parameter(torch.empty(stored.shape(name), dtype=dtype, device=device), requires_grad=False)
    stored.copy(name, layer.weight.data)
