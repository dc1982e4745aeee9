"""GLM-4.7-Flash: latent attention, and experts selected by sigmoids with a bias, as in DeepSeek-V3.

The layer that predicts a further token, behind the 47 others, is left out. It uses no torch.
"""

from octavo.model_config import ConfigReader
from octavo.models.dense_family import DenseConfig, dense_config
from octavo.models.description import MLPShape
from octavo.models.latent_family import check_fixed, first_dense, latent_family, read_groups, read_latent

GLM_LITE = "Glm4MoeLiteForCausalLM"
DEFAULTS = {"max_position_embeddings": 202752, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5}
PLAIN, MOE = "dense", "sparse"


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    reader, fields = read_latent(reader, architecture, DEFAULTS)
    check_fixed(reader, {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "partial_rotary_factor": 1.0})
    moe, types = read_groups(reader, fields["num_layers"], "sigmoid"), reader.raw.get("mlp_layer_types")
    if types is None:
        return dense_config(fields | {"mlps": first_dense(reader, fields, moe)})
    known = isinstance(types, list) and len(types) == fields["num_layers"] and all(one in (PLAIN, MOE) for one in types)
    if not known or MOE not in types:
        raise reader.fail("mlp_layer_types", f"{fields['num_layers']} of {PLAIN} or {MOE}, with at least one of the latter")
    return dense_config(fields | {"mlps": [moe if one == MOE else MLPShape(fields["inner"]) for one in types]})


FAMILY = latent_family("glm4_moe_lite", GLM_LITE, read, left_out=("model.layers.47.",))
