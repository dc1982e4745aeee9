"""DeepSeek-V2 and V2-Lite: latent attention, and experts selected by a softmax. V2 has groups of experts. It uses no torch."""

from typing import Any

from octavo.model_config import ConfigReader
from octavo.models.dense_family import DenseConfig, dense_config
from octavo.models.latent_family import check_fixed, first_dense, latent_family, read_groups, read_latent

DEEPSEEK_V2 = "DeepseekV2ForCausalLM"
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 2048, "topk_method": "greedy"}
GREEDY, IN_GROUPS = "greedy", "group_limited_greedy"


def read(reader: ConfigReader, architecture: str) -> DenseConfig:
    reader, fields = read_latent(reader, architecture, DEFAULTS)
    check_fixed(reader, {"scoring_func": "softmax", "norm_topk_prob": False})
    method = reader.raw["topk_method"]
    if method not in (GREEDY, IN_GROUPS):
        raise reader.fail("topk_method", f"{GREEDY} or {IN_GROUPS}")
    if method == GREEDY:  # whatever groups the file names
        reader = ConfigReader(reader.raw | {"n_group": 1, "topk_group": 1}, reader.source)
    moe = read_groups(reader, fields["num_layers"], "all")
    return dense_config(fields | {"mlps": first_dense(reader, fields, moe)})


FAMILY = latent_family("deepseek_v2", DEEPSEEK_V2, read)
