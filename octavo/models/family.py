"""The description of a family of models, without torch. `register(Family(...))` adds one.

    rules       the destination of each weight of a checkpoint:  model.layers.*.self_attn.k_proj  ->  layers.*.attention.qkv, part k
    read        reads its fields from a config.json, into its own `ModelConfig`
    describe    the parts of such a model: matrices, layers, caches, activations (`models/description.py`)
    model       the torch module that computes it, imported when a model is built
    gguf        its names in GGUF files, if such files exist
    shared      the numbers that are divided among tensor parallel ranks (`models/split.py`); `divided` makes the config of a rank
    cut, deal   its config with some of the layers or experts, for the stages of a pipeline and for expert parallelism
    orders      the rows of its folders that are in another order than the model's (`models/row_order.py`)
    places      the rows of each module in weights that hold rows of several modules, in folders and in GGUF files (`HeldTogether`)

A `*` in a rule stands for a number, such as that of a layer. A rule may have several of them: the number of an expert becomes
part of the part name here. If a tensor of a file holds a weight of every expert, its name has no expert number.
    model.layers.*.mlp.experts.*.up_proj   ->  layers.*.mlp.experts.gate_up, part *.up        GGUF: blk.*.ffn_up_exps
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from octavo.model_config import ConfigReader
from octavo.models.description import Matrix, ModelDescription, Vector
from octavo.models.gguf_keys import GGUFKeys
from octavo.models.row_order import RowOrder
from octavo.models.split import Shared

MAX_EXPERTS = 1024  # of a layer: twice what any model has
Rows = int | tuple[int, ...]  # of a weight, or of each of its sections


@dataclass(frozen=True, slots=True)
class Rule:
    checkpoint: str  # module in a Hugging Face folder
    module: str  # module here
    part: str | None = None  # its named rows, if several modules of the checkpoint are merged into one; None: all rows
    gguf: str | None = None  # tensor in a GGUF file, without the last word of its name
    plus: float = 0.0  # added to the weights of a checkpoint; GGUF files already include it
    bare: bool = False  # a single parameter: its name here and in a checkpoint has no last word such as weight
    negative_exp: bool = False  # GGUF files have -exp of it


@dataclass(frozen=True, slots=True)
class Stack:
    """A tensor of a Hugging Face folder that holds a weight of every expert (`loading/views.py`)."""

    tensor: str  # model.layers.*.mlp.experts.gate_up_proj
    modules: tuple[str, ...]  # modules whose rows alternate: model.layers.*.mlp.experts.*.gate_proj, model.layers.*.mlp.experts.*.up_proj
    in_rows: bool = False  # the tensor is [experts, rows, columns], with the rows of one module after those of the other

    def of(self, tensor: str) -> "Stack":
        """Returns the stack of a layer, whose tensor is given."""
        return replace(self, tensor=tensor, modules=tuple(_filled(module, _starred(tensor)[1]) for module in self.modules))


@dataclass(frozen=True, slots=True)
class HeldTogether:
    """A weight of a file that holds rows of several modules, head by head (`Family.places`)."""

    checkpoint: str  # model.layers.*.self_attn.q_proj
    modules: tuple[str, ...]  # in rules: model.layers.*.self_attn.q_proj.q, model.layers.*.self_attn.q_proj.gate
    gguf: str | None = None


class Rules:
    def __init__(
        self, rules: Iterable[Rule], prefixes: Mapping[str, str] = MappingProxyType({}), left_out: Sequence[str] = (),
        stacks: Iterable[Stack] = (), together: Sequence[HeldTogether] = (),
    ) -> None:  # fmt: skip
        """`prefixes`: alternatives to the prefixes in the rules; `left_out`: prefixes of weights that this engine does not use"""
        every = list(rules)
        self._prefixes, self._left_out = dict(prefixes), tuple(left_out)
        self._stacks = {stack.tensor: stack for stack in stacks}
        self._together = {one.checkpoint: one.modules for one in together}
        self._by_place = {(rule.module, rule.part): rule.checkpoint for rule in every}
        of_files: list[Rule | HeldTogether] = [*every, *together]
        self._by_gguf = {one.gguf: one.checkpoint for one in of_files if one.gguf is not None}
        self._bare = {rule.checkpoint for rule in every if rule.bare}
        self._plus = {rule.checkpoint: rule.plus for rule in every if rule.plus}
        self._negative_exp = {rule.checkpoint for rule in every if rule.negative_exp}
        assert len(self._by_place) == len(every), "two rules lead to the same place"

    def checkpoint_module(self, module: str, part: str | None = None) -> str:
        """Returns model.layers.3.self_attn.k_proj for layers.3.attention.qkv, part k."""
        found = self.find(module, part)
        assert found is not None, f"no rule for {module}, part {part}"
        return found

    def find(self, module: str, part: str | None = None) -> str | None:
        """Like `checkpoint_module`, but returns None if there is no rule."""
        pattern, numbers = _starred(module)
        part_pattern, part_numbers = (None, []) if part is None else _starred(part)
        found = self._by_place.get((pattern, part_pattern))
        return None if found is None else _filled(found, numbers + part_numbers)

    def stacked(self, tensor: str) -> Stack | None:
        """Returns the modules whose weights a tensor holds for every expert, with a `*` for the expert; None if it is not such a tensor."""
        stack = self._stacks.get(_starred(tensor)[0])
        return None if stack is None else stack.of(tensor)

    def held_by(self, module: str) -> tuple[str, ...]:
        """Returns the modules whose rows a module of a file holds: itself, unless it holds those of several."""
        pattern, numbers = _starred(module)
        return tuple(_filled(one, numbers) for one in self._together.get(pattern, (pattern,)))

    def weight(self, module: str) -> str:
        """Returns the name of a vector in a checkpoint."""
        found = self.checkpoint_module(module)
        return found if _starred(found)[0] in self._bare else f"{found}.weight"

    @property
    def renames(self) -> bool:
        return bool(self._prefixes or self._left_out)

    def of_checkpoint(self, name: str) -> str | None:
        """Returns the name in the rules of a checkpoint weight, or None if it is left out on purpose."""
        if name.startswith(self._left_out):
            return None
        prefix = next((prefix for prefix in self._prefixes if name.startswith(prefix)), "")
        return self._prefixes.get(prefix, "") + name.removeprefix(prefix)

    def plus(self, name: str) -> float:
        """Returns the number to add to this weight of a checkpoint."""
        return self._plus.get(_starred(name.removesuffix(".weight"))[0], 0.0) if self._plus else 0.0

    def negative_exp(self, name: str) -> bool:
        """Whether GGUF files have -exp of this weight."""
        return _starred(name)[0] in self._negative_exp

    @staticmethod
    def pattern(name: str) -> str:
        """Returns a name with a `*` for each number."""
        return _starred(name)[0]

    @staticmethod
    def layer(name: str) -> int | None:
        """Returns the layer of a checkpoint weight, or None if it is outside the layers."""
        numbers = _starred(name)[1]
        return int(numbers[0]) if numbers else None

    @staticmethod
    def expert(name: str) -> int | None:
        """Returns the expert of a checkpoint weight, or None if it is not part of an expert."""
        numbers = _starred(name)[1]
        return int(numbers[1]) if len(numbers) > 1 else None

    @staticmethod
    def with_expert(name: str, expert: int) -> str:
        """Returns the name of the same weight of another expert."""
        pattern, (layer, _, *rest) = _starred(name)
        return _filled(pattern, [layer, str(expert), *rest])

    @staticmethod
    def with_layer(name: str, layer: int) -> str:
        """Returns the name of the same weight in another layer."""
        pattern, numbers = _starred(name)
        return _filled(pattern, [str(layer), *numbers[1:]])

    def of_gguf(self, name: str) -> str | None:
        """Returns the checkpoint name of a tensor in a GGUF file, or None if this family has no such tensor.

        If the tensor holds a weight of every expert, the name has a `*` in place of the experts' numbers.
        """
        tensor, leaf = parts_of_gguf(name)
        pattern, numbers = _starred(tensor)
        module = self._by_gguf.get(pattern)
        if module is None or (not leaf and module not in self._bare):
            return None
        return _filled(module, numbers) if module in self._bare else f"{_filled(module, numbers)}.{leaf}"

    def matrix(
        self, name: str, module: str, rows: Rows | Mapping[str, Rows], columns: int, layer: int | None = None, bias: bool = False,
        split: Literal["rows", "columns"] | None = None, gated: bool = False, vocabulary: bool = False,
    ) -> Matrix:  # fmt: skip
        """Returns a matrix of the description, with its names in the checkpoint. `rows`: of each part, if it has named parts."""
        module = module.replace("*", str(layer))
        if isinstance(rows, Mapping) and self.find(module) is not None:  # one weight contains all parts
            rows = tuple(size for one in rows.values() for size in _sections(one))
        by_part: Iterable[tuple[str | None, Rows]] = rows.items() if isinstance(rows, Mapping) else [(None, rows)]
        weights = {f"{self.checkpoint_module(module, part)}.weight": _sections(one) for part, one in by_part}
        parts = {weight: sum(sizes) for weight, sizes in weights.items()}
        sections = {weight: sizes for weight, sizes in weights.items() if len(sizes) > 1}
        return Matrix(name, module, parts, columns, layer, bias, split, gated, vocabulary, sections=sections)


def parts_of_gguf(name: str) -> tuple[str, str]:
    """Returns blk.3.attn_q and weight for blk.3.attn_q.weight. Some tensors have no last word: blk.3.ssm_a."""
    tensor, _, leaf = name.rpartition(".")
    return (tensor, leaf) if leaf in ("weight", "bias") else (name, "")


def of_expert(name: str, expert: int) -> str:
    """Returns the name of one expert's weight, for a name that has a `*` in place of the experts' numbers."""
    return _filled(name, [str(expert)])


def vector(
    name: str, module: str, size: int, layer: int | None = None, bias: bool = False, wide: bool = False, sections: tuple[int, ...] = ()
) -> Vector:
    """Returns a norm of the description."""
    return Vector(name, module.replace("*", str(layer)), size, layer, bias, wide, sections)


def _sections(rows: Rows) -> tuple[int, ...]:
    return (rows,) if isinstance(rows, int) else rows


def _starred(name: str) -> tuple[str, list[str]]:
    """Returns layers.*.mlp and ["3"] for layers.3.mlp."""
    words = name.split(".")
    numbers = [word for word in words if _is_number(word)]
    return ".".join("*" if _is_number(word) else word for word in words), numbers


def _is_number(word: str) -> bool:
    return word.isascii() and word.isdigit()


def _filled(pattern: str, numbers: list[str]) -> str:
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


@dataclass(frozen=True, slots=True)
class GGUFForm:
    architectures: Mapping[str, str]  # general.architecture -> the name in a config.json
    config: Callable[[GGUFKeys], dict[str, Any]]  # the family's own keys of a config.json; the common keys are added
        # the order of rows in tensors that do not have the model's, by the tensor's word: {"attn_q": Interleaved(9)}
    orders: Callable[[str, Mapping[str, Any]], Mapping[str, RowOrder]]
    experts: bool = False  # files of these architectures with experts belong to this family, those without to another
    columns: Callable[[str, Mapping[str, Any]], Mapping[str, RowOrder]] | None = None  # like `orders`, for the order of columns
        # like `orders`: the heads of tensors whose rows and columns have changed places in each head. They are read as floats
    turned: Callable[[str, Mapping[str, Any]], Mapping[str, int]] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    name: str  # for messages
    architectures: tuple[str, ...]  # names in a config.json
    model: str  # "module:Class", a `Decoder`
    rules: Rules
    read: Callable[[ConfigReader, str], Any]  # (reader, architecture) -> its own ModelConfig
    describe: Callable[[Any], ModelDescription]
    gguf: GGUFForm | None = None
    shared: Callable[[Any], dict[str, Shared]] | None = None  # by field of its config; None: its matrices cannot be split
    divided: Callable[[Any, Mapping[str, int], int], Any] | None = None  # (config, a rank's numbers, ranks that share a context) -> config
    unshared: str = "nobody has said how"  # the reason why they cannot be split
    cut: Callable[[Any, range], Any] | None = None  # (config, layers) -> config; None: its layers cannot be split into stages
    deal: Callable[[Any, int], Any] | None = None  # (config, ranks) -> config; None: it has no experts
        # the order of rows in modules of a folder that do not have the model's, with a `*` for the layer
    orders: Callable[[Any], Mapping[str, RowOrder]] | None = None
    places: Callable[[Any], Mapping[str, RowOrder]] | None = None  # of the modules in `HeldTogether`, with a `*` for the layer


FAMILIES: dict[str, Family] = {}  # by architecture


def register(family: Family) -> None:
    for architecture in family.architectures:
        known = FAMILIES.get(architecture)
        assert known is None or known == family, f"{architecture} is registered by {known and known.name}"
        FAMILIES[architecture] = family
