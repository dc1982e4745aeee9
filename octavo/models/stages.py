"""Pipeline parallelism: the part of a model that each stage has, as names, numbers and ranges. It uses no torch and no files.

A stage is a model with some of the layers. The first also has the embedding, the last the final norm and the head:

    stage 0 of 2    embedding, layers 0 to 18
    stage 1 of 2    layers 19 to 29, norm, head

A step reads every weight of a layer and of the head, but only a few rows of the embedding. So layers are split by the bytes that
a step reads, and all stages take about the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from octavo.errors import ConfigError
from octavo.models.description import ModelDescription


@dataclass(frozen=True, slots=True)
class Stage:
    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1


ONLY = Stage()


def one_table(model: ModelDescription, stage: Stage) -> str | None:
    """Returns why all layers share one block table per sequence, so that windows free nothing, or None."""
    if stage.count > 1:
        return "the stages of a pipeline share one block table per sequence"
    return "ranks that share a context share one block table per sequence" if model.shares_context else None


def deal_layers(layers: Sequence[int], head: int, stages: int) -> list[range]:
    """Returns the layers of each stage, so that the maximum of the bytes read by a stage is as small as possible.

    `layers`: bytes of each layer; `head`: bytes of the parts after the last layer
    """
    if stages > len(layers):
        raise ConfigError(f"{len(layers)} layers cannot be divided among pipeline_parallel_size {stages}: set it to {len(layers)} or less")
    sums = [0]
    for size in layers:
        sums.append(sums[-1] + size)
    # best[end]: for the layers before `end`, the smallest possible maximum over the stages so far, and the start of the last stage
    best = [(float(total), 0) for total in sums]
    starts: list[list[int]] = [[0] * len(sums)]
    for stage in range(1, stages):
        extra = head if stage == stages - 1 else 0
        found = [min(((max(best[cut][0], sums[end] - sums[cut] + extra), cut) for cut in range(stage, end)), default=(float("inf"), 0))
                 for end in range(len(sums))]  # fmt: skip
        best = found
        starts.append([cut for _, cut in found])
    ends = [len(layers)]
    for stage in range(stages - 1, 0, -1):
        ends.append(starts[stage][ends[-1]])
    edges = [0, *reversed(ends)]
    return [range(start, end) for start, end in pairwise(edges)]


def of_stage(model: ModelDescription, stage: Stage) -> ModelDescription:
    """Returns the description without the parts of other stages. `model`: this stage's layers, with embedding and head"""
    matrices, vectors = model.matrices, model.vectors
    embeds_by_head = stage.first and model.lookup is None
    if not stage.last:
        matrices = tuple(matrix for matrix in matrices if matrix.layer is not None or embeds_by_head)
        vectors = tuple(vector for vector in vectors if vector.layer is not None)
    return replace(model, matrices=matrices, vectors=vectors, lookup=model.lookup if stage.first else None)
