"""Reads weights into a model, by the rules of its family. An unknown name or a parameter that is not filled is an error.

    checkpoint  model.layers.3.self_attn.k_proj.weight
    rule        model.layers.*.self_attn.k_proj          ->  (layers.*.attention.qkv, part k)
    target      rows `parts["k"]` of layers.3.attention.qkv.weight
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from octavo.errors import LoadError
from octavo.layers.linear import Linear, MergedLinear
from octavo.loading.checkpoint import Checkpoint
from octavo.models.decoder import Decoder
from octavo.models.registry import family_of

NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Target:
    label: str  # parameter, and part where there is one: `layers.0.attention.qkv.weight[q]`
    values: Tensor  # a view of the parameter


def load_weights(model: Decoder, checkpoint: Checkpoint) -> None:
    for name, target in check_weights(model, checkpoint).items():
        target.values.copy_(checkpoint.read(name))
    _finalize(model)


def check_weights(model: Decoder, checkpoint: Checkpoint) -> dict[str, Target]:
    """Returns where each weight goes, or raises if names or shapes do not fit. No matrix is read; `model` may be on the meta device."""
    targets = weight_targets(model)
    found: dict[str, Target] = {}
    unknown, twice, misshapen = [], [], []
    for name in checkpoint.names():
        target = targets.get(name)
        if target is None:
            if not (_redundant(name, model) or _zero_bias(name, targets, checkpoint)):
                unknown.append(name)
        elif name in found:
            twice.append(name)
        else:
            found[name] = target
            shape, wanted = list(checkpoint.shape(name)), list(target.values.shape)
            if shape != wanted:
                misshapen.append(f"{name} has shape {shape}, this model wants {wanted}")
    missing = [f"{name} (for {target.label})" for name, target in targets.items() if name not in found]
    problems = {"unknown to this model": unknown, "given twice": twice, "missing": missing, "of another shape": misshapen}
    _complain(checkpoint.source, problems)
    return found


def weight_targets(model: Decoder) -> dict[str, Target]:
    """Returns where each checkpoint name goes. Every parameter of the model, or part of one, is there exactly once."""
    rules = family_of(model.config).rules
    targets = {}
    for parameter_name, parameter in model.named_parameters():  # a tied head is not listed: the embedding is
        module_name, _, leaf = parameter_name.rpartition(".")
        for part, rows in _parts(model.get_submodule(module_name)):
            source = rules.checkpoint_module(module_name, part)
            label = parameter_name if part is None else f"{parameter_name}[{part}]"
            targets[f"{source}.{leaf}"] = Target(label, parameter.data[rows])
    return targets


def _parts(module: nn.Module) -> Iterable[tuple[str | None, slice]]:
    return module.parts.items() if isinstance(module, MergedLinear) else [(None, slice(None))]


def _redundant(name: str, model: Decoder) -> bool:
    """Whether this is a tensor of old checkpoints that follows from the others."""
    head = family_of(model.config).rules.find("head")
    return name.endswith(".rotary_emb.inv_freq") or (name == f"{head}.weight" and model.config.tie_embeddings)


def _zero_bias(name: str, targets: dict[str, Target], checkpoint: Checkpoint) -> bool:
    """Many GPTQ checkpoints have a bias of zeros in modules whose model has none."""
    module, _, leaf = name.rpartition(".")
    weight = targets.get(f"{module}.weight")
    if leaf != "bias" or weight is None or checkpoint.shape(name) != (weight.values.shape[0],):
        return False
    return not bool(checkpoint.read(name).any())


def _complain(source: str, problems: dict[str, list[str]]) -> None:
    found = [f"{len(names)} {what}: {_shown(names)}" for what, names in problems.items() if names]
    if found:
        raise LoadError(f"{source}: weights do not match the model: {'; '.join(found)}")


def _shown(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(name[:200] for name in names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _finalize(model: Decoder) -> None:
    for module in model.modules():
        if isinstance(module, Linear):
            module.finalize()
