"""DeepSeek-V3, R1 and models of their shape, such as Kimi K2: latent attention, and experts selected by sigmoids with a bias.

The layer that predicts a further token, behind the 61 others, is left out. It uses no torch.
"""

from functools import partial

from octavo.model_config import ConfigReader
from octavo.models.deepseek_v2_family import DEEPSEEK_V2
from octavo.models.dense_family import DenseConfig, dense_config
from octavo.models.family import GGUFForm
from octavo.models.latent_family import (
    check_fixed,
    first_dense,
    gguf_config,
    gguf_orders,
    gguf_turned,
    latent_family,
    read_groups,
    read_latent,
)

DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
DEFAULTS = {"max_position_embeddings": 4096, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3}


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    reader, fields = read_latent(reader, architecture, DEFAULTS)
    check_fixed(reader, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    moe = read_groups(reader, fields["num_layers"], "sigmoid")
    return dense_config(fields | {"mlps": first_dense(reader, fields, moe)})


# GGUF files do not name the family, only how experts are scored. GLM-4.7-Flash is read as a DeepSeek-V3, which it is then.
GGUF = GGUFForm(
    {"deepseek2": DEEPSEEK_V3},
    partial(gguf_config, by_scores={"softmax": DEEPSEEK_V2, "sigmoid": DEEPSEEK_V3}),
    gguf_orders,
    experts=True,
    turned=gguf_turned,
)
FAMILY = latent_family("deepseek_v3", DEEPSEEK_V3, read, left_out=("model.layers.61.",), gguf=GGUF)
