"""`Graph`: steps of a few shapes, captured as CUDA graphs and replayed, so that launching a step is one call.

A step is padded to the next larger shape; padding computes on the null block and its results are not stored. Steps larger than any
shape run kernel by kernel at no extra cost: the device computes for longer than the host takes to launch them
(`sizing/gpu_size.py` has the threshold).

    decode   1 2 4 8, then by 8 to 256, by 16 to the row limit: as many tokens as rows
    mixed    by 256 to 2048 tokens, then 4096 8192, up to the limit; as many rows as the table has, in small shapes half as many.
             A row with drafts has several outputs, and takes the outputs of padding rows

With cascade (shared-prefix) groups a step has one more kernel in each layer. Mixed steps always have it. For decode steps there are
shapes with it, in coarser sizes, and shapes without it.
"""

from bisect import bisect_left

import torch
from torch import nn

from octavo.layers.linear import Linear
from octavo.messages import StepPlan
from octavo.models.registry import describe
from octavo.quant.schemes import Unquantized
from octavo.step.step_tensors import Shape, plan_sizes
from octavo.worker.program import Eager, Forward

MIXED_TOKENS = (*range(256, 2048, 256), 2048, 4096, 8192)
IN_TEAMS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)  # rows of decode shapes with shared-prefix groups
FEW = 8  # rows of the largest decode step that never has such groups
SMALL = 512  # tokens: a single prompt should not wait for the logits of padding rows


class Graph:
    def __init__(self, eager: Eager, max_rows: int, max_tokens: int, captured: int = MIXED_TOKENS[-1]) -> None:
        """`captured`: tokens of the largest shape."""
        self.vocab_size, self.logits = eager.vocab_size, eager.logits
        self.eager = eager
        self._most_tokens, self._has_states = max_tokens, eager.has_states
        every = shapes(max_rows, max_tokens, captured, eager.teams is not None, self._has_states)
        self._decode, self._in_teams = ([shape for shape in every if shape.decodes and shape.in_teams == one] for one in (False, True))
        self._mixed = [shape for shape in every if not shape.decodes]
        self._graphs: dict[Shape, tuple[torch.cuda.CUDAGraph, Forward]] = {}

    @property
    def nbytes(self) -> int:
        return self.eager.nbytes

    def load(self, plan: StepPlan) -> Shape:
        return self.eager.put(plan, self.shape_of(*plan_sizes(plan), self.eager.share(plan)))

    def shape_of(self, entries: int, tokens: int, outputs: int, in_teams: bool) -> Shape:
        """Returns the shape a step is padded to, or its own shape if it is larger than any."""
        if entries == tokens:
            shapes = self._in_teams if in_teams and entries > FEW else self._decode
            return shapes[bisect_left(shapes, entries, key=lambda shape: shape.entries)]
        fits = (shape for shape in self._mixed if shape.outputs >= outputs and shape.tokens >= tokens)  # it has as many entries
        return next(fits, Shape(entries, tokens, outputs, in_teams, tokens if self._has_states else 0))

    def run(self, shape: Shape, whole: bool = False) -> Forward | None:
        """Replays the graph of a shape, if there is one. With `whole`, graphs are used only for decode steps."""
        if shape not in self._graphs or (whole and not shape.decodes):
            return self.eager.run(shape, whole)
        graph, forward = self._graphs[shape]
        graph.replay()
        return forward

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs every shape once with empty rows, so that kernels are compiled, loaded and set up before capture.

        One layer of each kind is enough for that; the last and smallest step runs all layers.
        """
        self.eager.memory.entries.zero_()
        kinds, shapes = self._kinds, [Shape(1, self._most_tokens, 1), *reversed(self._decode + self._in_teams + self._mixed)]
        for shape in shapes:
            self._multiply(shape)  # kernels of libraries: ours may still be compiling
        for shape in shapes:
            self.eager.run(shape, layers=kinds if shape.decodes else [*kinds, kinds[0]])  # the last layer of a mixed step differs
        self.eager.run(self._decode[0])

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures large shapes first: smaller ones reuse memory of the pool that all graphs share."""
        pool = None
        for shape in reversed(self._decode + self._in_teams + self._mixed):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                forward = self.eager.run(shape)
            assert forward is not None, "steps of a pipeline's stage are not captured"
            self._graphs[shape] = (graph, forward)
            pool = graph.pool()

    @property
    def _kinds(self) -> list[nn.Module]:
        """The first layer of each kind, that of the last layer first: together they call every kernel that any layer calls."""
        model = self.eager.model
        return [model.layers[index] for index in describe(model.config).kinds.values()]

    def _multiply(self, shape: Shape) -> None:
        """Runs the matrix products of one layer of each kind and of the head on uninitialised data, so that torch sets them up."""
        model, memory = self.eager.model, self.eager.logits_memory
        for linear in [module for layer in self._kinds for module in layer.modules() if isinstance(module, Linear)]:
            if isinstance(linear.scheme, Unquantized):
                linear(memory.new_empty(shape.tokens, linear.in_features))
        model.head(memory.new_empty(shape.outputs, model.config.hidden_size), memory[: shape.outputs])


def shapes(max_rows: int, max_tokens: int, captured: int, in_teams: bool = False, has_states: bool = False) -> list[Shape]:
    """Returns the shapes to capture, small ones first within each kind. `in_teams`: also those with shared-prefix groups

    A mixed step of a recurrent model has room for a checkpoint after each token: the kernels read how many there are.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows, 16)]
    decode = [Shape(size, size, size) for size in sizes if size < max_rows] + [Shape(max_rows, max_rows, max_rows)]
    if in_teams and max_rows > FEW:
        sizes = [size for size in IN_TEAMS if size < max_rows] + [max_rows]
        decode += [Shape(size, size, size, True) for size in sizes]
    sizes = [tokens for tokens in MIXED_TOKENS if tokens <= min(max_tokens - 1, captured)] + [max_tokens] * (max_tokens <= captured)
    most = [tokens // 2 if tokens <= SMALL and tokens < max_tokens else tokens - 1 for tokens in sizes]
    rows = [min(max_rows, entries) for entries in most]
    return decode + [
        Shape(entries, tokens, entries, in_teams, tokens if has_states else 0) for entries, tokens in zip(rows, sizes) if entries
    ]
