"""The house rules, each a function from source to a list of offences.

A rule sees a `Module`: its path inside the repository and its syntax tree. It reads names, not meaning, but follows
imports and aliases: `from torch import load as get; get(f)` is still `torch.load`. `test_house.py` applies the rules to
the tree, `test_rules_bite.py` shows each of them an offender.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from docs.house import parsed

BASE = frozenset(
    {"errors", "log", "child", "platforms", "config", "server_config", "model_config", "structured_outputs", "sampling_params", "messages",
     "inputs", "outputs", "metrics", "vllm_names", "own_file", "layout", "progress", "version"}
)

# room -> the rooms it may import; a room may always import itself and BASE.
MAY_IMPORT: Mapping[str, frozenset[str]] = {
    **{room: frozenset() for room in BASE},
    "policy": frozenset(),
    "text": frozenset(),
    "grammar": frozenset({"policy", "text"}),
    "client": frozenset(),
    "report": frozenset(),
    "step": frozenset(),
    "kernels": frozenset({"step"}),
    "comm": frozenset({"kernels"}),
    "attention": frozenset({"policy", "step", "kernels", "comm"}),
    "quant": frozenset({"kernels"}),
    "layers": frozenset({"kernels", "comm", "attention", "quant"}),
    "models": frozenset({"policy", "kernels", "comm", "attention", "quant", "layers"}),
    "sizing": frozenset({"policy", "attention", "models"}),
    "loading": frozenset({"policy", "text", "kernels", "attention", "quant", "layers", "models", "sizing"}),
    "worker": frozenset({"policy", "step", "kernels", "comm", "attention", "quant", "layers", "models", "sizing", "loading"}),
    "inspector": frozenset({"client", "policy", "text"}),
    "engine": frozenset({"inspector", "policy", "text", "grammar", "sizing", "loading", "worker"}),
    "llm": frozenset({"policy", "text", "grammar", "loading", "worker", "engine"}),
    "async_llm": frozenset({"text", "grammar", "loading", "engine"}),
    "server": frozenset({"client", "inspector", "policy", "text", "grammar", "loading", "engine"}),
    "bench": frozenset({"client", "report", "policy", "text", "sizing", "loading", "worker", "engine", "llm"}),
    "cli": frozenset(
        {"client", "report", "inspector", "policy", "text", "sizing", "loading", "worker", "engine", "llm", "server", "bench", "octavo"}
    ),
    "octavo": frozenset({"llm", "async_llm"}),  # octavo/__init__.py: the names a user imports
    "__main__": frozenset({"cli"}),
}

BANNED_MODULES = frozenset({"pickle", "dill", "marshal", "cloudpickle", "shelve", "joblib"})
BANNED_NAMES = frozenset(
    {"eval", "exec", "builtins.eval", "builtins.exec", "torch.load", "torch.serialization.load", "os.system", "os.popen"}
    | {"jinja2.Environment", "jinja2.environment.Environment"}
)
BANNED_CALLS = frozenset({"jinja2.Template", "jinja2.environment.Template"})  # the type may be named; making one is unsandboxed
BANNED_KEYWORDS = frozenset({"shell", "allow_pickle"})  # with the value True
# What has none of these words breaks no such rule, and need not be parsed.
_LAST_WORDS = {name.rpartition(".")[2] for name in BANNED_MODULES | BANNED_NAMES | BANNED_CALLS | BANNED_KEYWORDS}
BANNED_WORDS = re.compile(rf"\b({'|'.join(sorted(_LAST_WORDS))})\b")
ENVIRONMENT_NAMES = frozenset({"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"})
FORBIDDEN_WORDS = frozenset({"page", "pages"})  # the word is block

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_HEAD_LINES = 15

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    path: str  # inside the repository, with forward slashes
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        return parsed(self.source)

    @cached_property
    def _walked(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def package(self) -> tuple[str, ...]:
        """The package relative imports start from: ("octavo", "policy") for octavo/policy/request.py."""
        return PurePosixPath(self.path).parent.parts

    @cached_property
    def room(self) -> str:
        """octavo/policy/request.py -> policy, octavo/llm.py -> llm, octavo/__init__.py -> octavo."""
        part = PurePosixPath(self.path).with_suffix("").parts[1]
        return "octavo" if part == "__init__" else part

    def nodes(self, *kinds: type[ast.AST]) -> Iterator[ast.AST]:
        return (node for node in self._walked if isinstance(node, kinds))

    def imports(self) -> Iterator[tuple[str, str, int]]:
        """(name it gets here, full dotted name, line) of everything imported, wherever it stands."""
        for node in self.nodes(ast.Import, ast.ImportFrom):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.asname or alias.name.split(".")[0], alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                start = self.package[: len(self.package) + 1 - node.level] if node.level else ()
                origin = ".".join((*start, *([node.module] if node.module else [])))
                for alias in node.names:
                    yield alias.asname or alias.name, f"{origin}.{alias.name}", node.lineno

    @cached_property
    def aliases(self) -> dict[str, str]:
        # `import a.b` binds `a`; everything else binds the full thing.
        return {name: name if full.split(".")[0] == name else full for name, full, _ in self.imports()}

    def dotted(self, node: ast.AST) -> str:
        """`t.load` -> "torch.load" where t is torch; "" for what is not a plain chain of names."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (left := self.dotted(node.value)):
            return f"{left}.{node.attr}"
        return ""

    def at(self, line: int, message: str) -> str:
        return f"{self.path}:{line}: {message}"


def layer_offences(module: Module, lazy: Mapping[tuple[str, str], str]) -> list[str]:
    """Imports that point up. `lazy` lists (path, imported module) that may, inside a function, with the reason."""
    if module.room not in MAY_IMPORT:
        return [module.at(1, f"room {module.room!r} is not in the table of rooms")]
    allowed = MAY_IMPORT[module.room] | BASE | {module.room}
    offences = []
    for _, full, line in module.imports():
        parts = full.split(".")
        if parts[0] != "octavo" or full == "octavo.__version__":
            continue
        room = parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "octavo"
        if room not in allowed and not any(path == module.path and f"{full}.".startswith(f"{name}.") for path, name in lazy):
            offences.append(module.at(line, f"{module.room} imports {room} ({full}); imports point down only"))
    return offences


def size_offences(module: Module, allowed: Mapping[str, str]) -> list[str]:
    """Files and functions too long; `allowed` maps "path" or "path::function" (a trailing / covers a folder) to a reason."""
    lengths = {module.path: module.source.count("\n")}
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, Function) and node.end_lineno is not None
        name = f"{module.path}::{node.name}"
        lengths[name] = max(lengths.get(name, 0), node.end_lineno - node.lineno + 1)
    return [
        f"{name}: {lines} lines, at most {limit}"
        for name, lines in lengths.items()
        if lines > (limit := MAX_FUNCTION_LINES if "::" in name else MAX_FILE_LINES)
        and not any(name == key or (key.endswith("/") and name.startswith(key)) for key in allowed)
    ]


def head_offences(module: Module) -> list[str]:
    head = ast.get_docstring(module.tree)
    if not head:
        return [module.at(1, "no docstring at the head of the module")]
    lines = head.count("\n") + 1
    return [module.at(1, f"the head has {lines} lines, at most {MAX_HEAD_LINES}")] if lines > MAX_HEAD_LINES else []


def banned_offences(module: Module) -> list[str]:
    """Everything that runs code out of data, or hands text to a shell."""
    if not BANNED_WORDS.search(module.source):
        return []
    offences = []
    for _, full, line in module.imports():
        if full.split(".")[0] in BANNED_MODULES or full in BANNED_NAMES:
            offences.append(module.at(line, f"{full} is banned"))
    for node in module.nodes(ast.Name, ast.Attribute):
        assert isinstance(node, ast.Name | ast.Attribute)
        if module.dotted(node) in BANNED_NAMES:
            offences.append(module.at(node.lineno, f"{module.dotted(node)} is banned"))
    for call in module.nodes(ast.Call):
        assert isinstance(call, ast.Call)
        if module.dotted(call.func) in BANNED_CALLS:
            offences.append(module.at(call.lineno, f"calling {module.dotted(call.func)} is banned"))
        for keyword in call.keywords:
            if keyword.arg in BANNED_KEYWORDS and isinstance(keyword.value, ast.Constant) and keyword.value.value is True:
                offences.append(module.at(call.lineno, f"{keyword.arg}=True is banned"))
    return offences


def environment_offences(module: Module) -> list[str]:
    if module.path == "octavo/config.py":
        return []
    imported = [(full, line) for _, full, line in module.imports()]
    used = [(module.dotted(node), node.lineno) for node in module.nodes(ast.Attribute) if isinstance(node, ast.Attribute)]
    return [module.at(line, f"{name} outside config.py") for name, line in imported + used if name in ENVIRONMENT_NAMES]


def config_getattr_offences(module: Module) -> list[str]:
    """`getattr(config, name)` hides which settings are read; a config is read by its fields."""
    if module.path == "octavo/model_config.py":
        return []
    return [
        module.at(node.lineno, "getattr on a config")
        for node in module.nodes(ast.Call)
        if isinstance(node, ast.Call) and module.dotted(node.func) == "getattr" and node.args
        if module.dotted(node.args[0]).endswith("config")
    ]


def kwargs_offences(module: Module) -> list[str]:
    """A function that hands its own `**kwargs` on: its signature no longer says what it takes, unless names are unpacked.

    Those are `Unpack[Names]`, or `P.kwargs` of the function that it stands for.
    """
    offences = []
    for node in module.nodes(ast.FunctionDef, ast.AsyncFunctionDef):
        assert isinstance(node, Function)
        if node.args.kwarg is None or _has_names(module, node.args.kwarg.annotation):
            continue
        passed = [k.value for call in ast.walk(node) if isinstance(call, ast.Call) for k in call.keywords if k.arg is None]
        if any(isinstance(value, ast.Name) and value.id == node.args.kwarg.arg for value in passed):
            offences.append(module.at(node.lineno, f"{node.name} passes **{node.args.kwarg.arg} on"))
    return offences


def _has_names(module: Module, annotation: ast.expr | None) -> bool:
    if isinstance(annotation, ast.Attribute):
        return annotation.attr == "kwargs"
    return isinstance(annotation, ast.Subscript) and module.dotted(annotation.value) == "typing.Unpack"


def word_offences(module: Module) -> list[str]:
    """Identifiers made here with a word that has a house word instead."""
    names: list[tuple[str, int]] = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append((node.name, node.lineno))
        elif isinstance(node, ast.arg):
            names.append((node.arg, node.lineno))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.id, node.lineno))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.attr, node.lineno))
    return [module.at(line, f"{name}: the word is block") for name, line in names if FORBIDDEN_WORDS & set(_words(name))]


def _words(name: str) -> list[str]:
    """free_pages -> free, pages; PageTable -> page, table."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def inheritance_offences(modules: list[Module]) -> list[str]:
    """Mixins, and classes that inherit from a class of ours that itself inherits from one of ours."""
    bases: dict[str, set[str]] = defaultdict(set)
    places: list[tuple[Module, ast.ClassDef]] = []
    for module in modules:
        for node in module.nodes(ast.ClassDef):
            assert isinstance(node, ast.ClassDef)
            places.append((module, node))
            bases[node.name] |= {module.dotted(base).rpartition(".")[2] for base in node.bases}
    offences = [module.at(node.lineno, f"{node.name} is a mixin") for module, node in places if "mixin" in _words(node.name)]
    for module, node in places:
        parents = bases[node.name] & bases.keys()
        if any(bases[parent] & bases.keys() for parent in parents):
            offences.append(module.at(node.lineno, f"{node.name} inherits more than one level deep"))
    return offences
