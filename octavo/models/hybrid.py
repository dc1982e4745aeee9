"""The torch module of decoders with recurrent layers. `hybrid_family.py` describes them; a layer is a `DenseLayer` with either mixer."""

import torch

from octavo.attention.backend import NewBackend
from octavo.attention.delta_net import DeltaNetSpec
from octavo.attention.spec import AttentionSpec
from octavo.comm.comm import Comm
from octavo.layers.attention import Attention, build_rope
from octavo.layers.delta_net import DeltaNet
from octavo.models.decoder import Decoder
from octavo.models.dense import DenseLayer, build_attention, build_norm
from octavo.models.dense_family import DenseConfig
from octavo.quant.schemes import UNQUANTIZED, QuantScheme


class HybridModel(Decoder):
    def __init__(
        self,
        config: DenseConfig,
        dtype: torch.dtype,
        backend: NewBackend,
        comm: Comm,
        max_len: int,
        scheme: QuantScheme = UNQUANTIZED,
    ) -> None:
        specs = [layer.mixer for layer in config.layers if isinstance(layer.mixer, AttentionSpec)]
        ropes = [build_rope(spec.rope, spec.rotated, max_len) for spec in specs[:1]]  # a stage may have no attention

        def mixer(layer: int) -> Attention | DeltaNet:
            own = config.layers[layer].mixer
            if isinstance(own, DeltaNetSpec):
                return DeltaNet(own, config.hidden_size, scheme, dtype, comm)
            return build_attention(config, layer, ropes[0], backend, scheme, dtype, comm)

        layers = [DenseLayer(config, layer, mixer(layer), scheme, dtype, comm) for layer in range(config.num_layers)]
        super().__init__(config, layers, build_norm(config, config.norm, dtype), scheme, dtype, comm)
