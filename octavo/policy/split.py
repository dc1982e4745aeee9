"""Tensor parallel: what each of several ranks has of a model. No torch, no files: names, numbers and ranges.

A family names the numbers of its config that ranks share (`Shared`). From them follow the config of a rank, and the parts of a
checkpoint that it reads:

    split by rows      q k v, gate up    a rank has its rows, and their biases
    split by columns   output, down      a rank has its columns; results are summed, so that one rank alone has the bias
    vocabulary         embedding, head   equal runs of rows; the last may be shorter
    vectors            norms, sinks      every rank has all of them, but of sinks those of its heads

One weight of a checkpoint may have all parts of a matrix (`Matrix.merged`). Then a rank has a run of rows of each:

    qkv of 2 ranks     [ q q | k | v ]   rank 0 has rows of q, of k and of v, which do not stand side by side

Where there are more ranks than heads of k and v, neighbours have the same ones:

    rank      0    1    2    3
    q head   0 1  2 3  4 5  6 7
    kv head   0    0    1    1          of 4, in groups of 2 ranks that share a context:  0 1   0 1   2 3   2 3
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate

from octavo.errors import ConfigError
from octavo.policy.description import Matrix, ModelDescription


@dataclass(frozen=True, slots=True)
class Shared:
    """A number of a config that ranks share equally."""

    name: str  # in a config.json
    number: int
    repeats: bool = False  # several ranks may have the same one, if there are more ranks

    def fits(self, size: int, context: int = 1) -> bool:
        """`context`: the ranks of a group that has the same ones, if they repeat"""
        owners = size // context if self.repeats else size
        return size % context == 0 and (self.number % owners == 0 or (self.repeats and owners % self.number == 0))

    def of_rank(self, size: int, context: int = 1) -> int:
        return max(1, self.number // (size // context if self.repeats else size))


def check_split(shared: Collection[Shared], vocab_size: int, size: int, context: int = 1) -> None:
    """Refuses a number of ranks that cannot share a model equally."""
    wrong = next((f"{one.name} {one.number}" for one in shared if not one.fits(size, context)), None)
    if wrong is None and not _fills(vocab_size, size):
        wrong = f"vocab_size {vocab_size}"
    if wrong is not None:
        most = min(one.number for one in shared if not one.repeats)
        can = [ranks for ranks in range(1, most + 1) if all(one.fits(ranks, context) for one in shared) and _fills(vocab_size, ranks)]
        sizes = f"sizes that can: {', '.join(map(str, can))}" if can else f"no size can, with decode_context_parallel_size {context}"
        raise ConfigError(f"{wrong} cannot be split over tensor_parallel_size {size}: {sizes}")


def _fills(vocab_size: int, size: int) -> bool:
    """Whether each rank has some rows of the vocabulary."""
    return len(vocabulary_rows(vocab_size, size, size - 1)) > 0


def vocabulary_rows(vocab_size: int, size: int, rank: int) -> range:
    """Returns the tokens whose rows of the embedding and of the head a rank has."""
    width = -(-vocab_size // size)
    return range(min(rank * width, vocab_size), min((rank + 1) * width, vocab_size))


def with_rows_of_rank(model: ModelDescription, size: int) -> ModelDescription:
    """Returns the description with as many rows of the vocabulary as the first of `size` ranks has, which has the most."""
    if size == 1:
        return model

    def cut(matrix: Matrix) -> Matrix:
        rows = {name: len(vocabulary_rows(count, size, 0)) for name, count in matrix.parts.items()}
        return replace(matrix, parts=rows) if matrix.vocabulary else matrix

    lookup = None if model.lookup is None else cut(model.lookup)
    return replace(model, matrices=tuple(map(cut, model.matrices)), lookup=lookup)


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has of a weight. None: all of its rows, or columns."""

    rows: range | None = None
    columns: range | None = None
    runs: tuple[range, ...] = ()  # of rows, instead of `rows`: they are read one by one, and joined
    whole: int = 0  # how many of them the weight has
    zeros: bool = False  # another rank has the numbers, and this one zeros in their place


def parts_of_rank(whole: ModelDescription, own: ModelDescription, size: int, rank: int) -> dict[str, Part]:
    """Returns what a rank has of each weight, by its name in the checkpoint; of any other, all. `own`: of the rank's config"""
    pairs = list(zip(whole.matrices, own.matrices, strict=True))
    if whole.lookup is not None and own.lookup is not None:
        pairs.append((whole.lookup, own.lookup))
    return {name: part for matrix, mine in pairs for name, part in _matrix_parts(matrix, mine, size, rank).items()}


def part_of_vector(whole: int, own: int, size: int, rank: int) -> Part:
    """Returns what a rank has of a vector that has numbers of every head."""
    return Part(rows=_share(whole, own, size, rank), whole=whole)


def _matrix_parts(matrix: Matrix, own: Matrix, size: int, rank: int) -> dict[str, Part]:
    """A bias is listed whether the model has one or not: some checkpoints have biases of zeros."""
    found: dict[str, Part] = {}
    for name, count in matrix.parts.items():
        bias = f"{name.removesuffix('.weight')}.bias"
        if matrix.merged and matrix.split == "rows":
            found[name] = found[bias] = Part(runs=_runs(matrix, own, size, rank), whole=count)
        elif matrix.vocabulary:
            found[name] = Part(rows=vocabulary_rows(count, size, rank), whole=count)
        elif matrix.split == "rows":
            found[name] = found[bias] = Part(rows=_share(count, own.parts[name], size, rank), whole=count)
        elif matrix.split == "columns":
            found[name] = Part(columns=_share(matrix.columns, own.columns, size, rank), whole=matrix.columns)
            found[bias] = Part(zeros=rank > 0)
    return found


def _runs(matrix: Matrix, own: Matrix, size: int, rank: int) -> tuple[range, ...]:
    """Returns the rows that a rank has of each part of a merged weight, counted from the weight's first."""
    starts = accumulate(matrix.merged, initial=0)
    shares = [_share(whole, mine, size, rank) for whole, mine in zip(matrix.merged, own.merged, strict=True)]
    return tuple(range(start + share.start, start + share.stop) for start, share in zip(starts, shares))


def _share(whole: int, own: int, size: int, rank: int) -> range:
    """Returns the run of `own` that a rank has of `whole`. Neighbours have the same one if all runs together are longer."""
    copies, rest = divmod(own * size, whole)
    assert copies and not rest and size % copies == 0, f"{size} runs of {own} do not cover {whole}"
    start = rank // copies * own
    return range(start, start + own)
