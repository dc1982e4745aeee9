"""DeepSeek-V3, R1 and models of their shape, such as Kimi K2: latent attention, and experts selected by sigmoids with a bias.

The layer that predicts a further token, behind the 61 others, is left out. It uses no torch.
"""

from octavo.model_config import ConfigReader
from octavo.models.dense_family import DenseConfig, dense_config
from octavo.models.latent_family import check_fixed, first_dense, latent_family, read_groups, read_latent

DEEPSEEK_V3 = "DeepseekV3ForCausalLM"
DEFAULTS = {"max_position_embeddings": 4096, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3}


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    reader, fields = read_latent(reader, architecture, DEFAULTS)
    check_fixed(reader, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    moe = read_groups(reader, fields["num_layers"], "sigmoid")
    return dense_config(fields | {"mlps": first_dense(reader, fields, moe)})


FAMILY = latent_family("deepseek_v3", DEEPSEEK_V3, read, left_out=("model.layers.61.",))
