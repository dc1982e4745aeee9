"""Tensor parallelism: the part of a model that each rank has, as names, numbers and ranges. It uses no torch and no files.

A family names the numbers of its config that are divided among ranks (`Shared`). They determine the config of a rank, and the parts
of a checkpoint that it reads:

    split by rows      q k v, gate up    a rank has its rows, and their biases
    split by columns   output, down      a rank has its columns; results are summed, so only one rank has the bias
    vocabulary         embedding, head   equal ranges of rows; the last may be shorter
    vectors            norms, sinks      every rank has all of them, but of those with numbers for every head only its heads'

If there are more ranks than k and v heads, neighbouring ranks have the same heads:

    rank      0    1    2    3
    q head   0 1  2 3  4 5  6 7
    kv head   0    0    1    1          of 4, in groups of 2 ranks that share a context:  0 1   0 1   2 3   2 3
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from octavo.errors import ConfigError
from octavo.models.description import Matrix, ModelDescription, Vector


@dataclass(frozen=True, slots=True)
class Shared:
    """A number of a config that is divided equally among ranks."""

    name: str  # in a config.json
    number: int
    repeats: bool = False  # several ranks may have the same one if there are more ranks

    def fits(self, size: int, context: int = 1) -> bool:
        """`context`: the number of ranks in a group with the same heads, if they repeat"""
        owners = size // context if self.repeats else size
        return size % context == 0 and (self.number % owners == 0 or (self.repeats and owners % self.number == 0))

    def of_rank(self, size: int, context: int = 1) -> int:
        return max(1, self.number // (size // context if self.repeats else size))


def check_split(shared: Collection[Shared], vocab_size: int, size: int, context: int = 1) -> None:
    """Refuses a number of ranks among which a model cannot be divided equally."""
    wrong = next((f"{one.name} {one.number}" for one in shared if not one.fits(size, context)), None)
    if wrong is None and not _fills(vocab_size, size):
        wrong = f"vocab_size {vocab_size}"
    if wrong is not None:
        most = min(one.number for one in shared if not one.repeats)
        can = [ranks for ranks in range(1, most + 1) if all(one.fits(ranks, context) for one in shared) and _fills(vocab_size, ranks)]
        sizes = f"sizes that can: {', '.join(map(str, can))}" if can else f"no size can, with decode_context_parallel_size {context}"
        raise ConfigError(f"{wrong} cannot be split over tensor_parallel_size {size}: {sizes}")


def _fills(vocab_size: int, size: int) -> bool:
    """Whether each rank has at least one row of the vocabulary."""
    return len(vocabulary_rows(vocab_size, size, size - 1)) > 0


def vocabulary_rows(vocab_size: int, size: int, rank: int) -> range:
    """Returns the tokens whose rows of the embedding and of the head a rank has."""
    width = -(-vocab_size // size)
    return range(min(rank * width, vocab_size), min((rank + 1) * width, vocab_size))


def with_rows_of_rank(model: ModelDescription, size: int) -> ModelDescription:
    """Returns the description with the vocabulary rows of the first of `size` ranks, which has the most."""
    if size == 1:
        return model

    def cut(matrix: Matrix) -> Matrix:
        rows = {name: len(vocabulary_rows(count, size, 0)) for name, count in matrix.parts.items()}
        return replace(matrix, parts=rows) if matrix.vocabulary else matrix

    lookup = None if model.lookup is None else cut(model.lookup)
    return replace(model, matrices=tuple(map(cut, model.matrices)), lookup=lookup)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a weight that a rank has. None: all rows, or all columns."""

    rows: range | None = None
    columns: range | None = None
    runs: tuple[range, ...] = ()  # ranges of rows, instead of `rows`: they are read one by one and concatenated
    whole: int = 0  # the size of the whole weight along that dimension
    zeros: bool = False  # another rank has the numbers, and this one has zeros


def parts_of_rank(whole: ModelDescription, own: ModelDescription, size: int, rank: int) -> dict[str, Part]:
    """Returns the part that a rank has of each weight, by its checkpoint name; all of any other. `own`: for the rank's config"""
    pairs = list(zip(whole.matrices, own.matrices, strict=True))
    if whole.lookup is not None and own.lookup is not None:
        pairs.append((whole.lookup, own.lookup))
    return {name: part for matrix, mine in pairs for name, part in _matrix_parts(matrix, mine, size, rank).items()}


def part_of_vector(whole: Vector, own: Vector, size: int, rank: int) -> Part:
    """Returns the part that a rank has of a vector with numbers for every head."""
    if whole.sections:
        return Part(runs=_runs(whole.sections, own.sections, size, rank), whole=sum(whole.sections))
    return Part(rows=_share(whole.size, own.size, size, rank), whole=whole.size)


def _matrix_parts(matrix: Matrix, own: Matrix, size: int, rank: int) -> dict[str, Part]:
    """A bias is listed whether or not the model has one: some checkpoints have biases of zeros."""
    found: dict[str, Part] = {}
    for name, count in matrix.parts.items():
        bias = f"{name.removesuffix('.weight')}.bias"
        if name in matrix.sections and matrix.split == "rows":
            found[name] = found[bias] = Part(runs=_runs(matrix.sections[name], own.sections[name], size, rank), whole=count)
        elif matrix.vocabulary:
            found[name] = Part(rows=vocabulary_rows(count, size, rank), whole=count)
        elif matrix.split == "rows":
            found[name] = found[bias] = Part(rows=_share(count, own.parts[name], size, rank), whole=count)
        elif matrix.split == "columns":
            found[name] = Part(columns=_share(matrix.columns, own.columns, size, rank), whole=matrix.columns)
            found[bias] = Part(zeros=rank > 0)
    return found


def _runs(sections: Sequence[int], own: Sequence[int], size: int, rank: int) -> tuple[range, ...]:
    """Returns the rows that a rank has of each section of a weight, counted from the weight's first row.

    qkv, 2 ranks    [ q q q q | k k | v v ]    rank 0 has rows 0 1, 4 and 6: they are not contiguous
    """
    starts = accumulate(sections, initial=0)
    shares = [_share(whole, mine, size, rank) for whole, mine in zip(sections, own, strict=True)]
    return tuple(range(start + share.start, start + share.stop) for start, share in zip(starts, shares))


def _share(whole: int, own: int, size: int, rank: int) -> range:
    """Returns the range of length `own` that a rank has of `whole`. Neighbours have the same one if all ranges together are longer."""
    copies, rest = divmod(own * size, whole)
    assert copies and not rest and size % copies == 0, f"{size} runs of {own} do not cover {whole}"
    start = rank // copies * own
    return range(start, start + own)
