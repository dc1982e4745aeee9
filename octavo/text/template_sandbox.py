"""The jinja2 sandbox chat templates run in, with a meter on everything they do.

A template is a program out of a downloaded file: it may be hostile, or loop by mistake. The sandbox of jinja2 keeps it from
reaching Python; the meter keeps it from eating the machine. `TemplateSandbox.build` rewrites the syntax tree so that each
step passes the meter: loop rounds, calls, filters, slices, `~`, output; operators come through the sandbox's own hook.
    character made = 1 unit     list or dict item made = ITEM units     round or call = ITEM units
What could grow a value in one stroke is charged before it runs. What cannot be bounded is not offered: filters, tests and
methods are allow-lists of what chat templates use, and a template that wants another is refused by its name. So neither
threads nor processes are needed, and memory and time stay bounded. One render at a time per sandbox.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from jinja2 import TemplateRuntimeError, TemplateSyntaxError, filters, nodes, pass_context, tests
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

ITEM = 16
MAX_NUMBER_BITS = 4096
MAX_SHORT_TEXT = 256  # sets of characters to strip, date formats, separators

_PLAIN_FILTERS = frozenset(
    {"abs", "count", "d", "default", "first", "items", "last", "length", "map", "reject", "rejectattr", "select", "selectattr"}
)
_TEXT_FILTERS = frozenset({"capitalize", "e", "escape", "lower", "safe", "string", "title", "upper"})
_PLAIN_TESTS = frozenset(
    {"boolean", "callable", "defined", "divisibleby", "even", "false", "float", "integer", "iterable", "mapping"}
    | {"none", "number", "odd", "sameas", "sequence", "string", "true", "undefined"}
)
_COMPARING_TESTS = frozenset({"==", "eq", "equalto", "!=", "ne", "in", "<", "lt", "<=", "le", ">", "gt", ">=", "ge"})
_TEXT_METHODS = frozenset(
    {"capitalize", "casefold", "count", "endswith", "find", "index", "lower", "partition", "removeprefix", "removesuffix"}
    | {"isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper"}
    | {"rfind", "rindex", "rpartition", "startswith", "swapcase", "title", "upper"}
)
_DICT_METHODS = frozenset({"copy", "get", "items", "keys", "values"})
_REFUSED_STATEMENTS = (nodes.Block, nodes.CallBlock, nodes.Extends, nodes.FilterBlock, nodes.FromImport, nodes.Import, nodes.Include)


class LimitExceeded(TemplateRuntimeError):
    """The template used up its time or its units, or asked for something that cannot be bounded."""


class Meter:
    def __init__(self) -> None:
        self.start(0, 0.0)

    def start(self, units: int, seconds: float) -> None:
        self._left = self._units = units
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def spend(self, units: int) -> None:
        self._left -= units
        if self._left < 0:
            raise LimitExceeded(f"it makes more text and data than its limit of {self._units:,} units")
        if time.monotonic() > self._deadline:
            raise LimitExceeded(f"it ran past its limit of {self._seconds:g} s")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        # Constants are not folded: folding would run filters while compiling, outside the limits of a render.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_emit, extensions=[loopcontrols, _GenerationTag]
        )
        self.meter = Meter()
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace", "cycler", "joiner")}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters = {name: filters.FILTERS[name] for name in _PLAIN_FILTERS}
        self.filters |= {name: partial(self._text_filter, name) for name in _TEXT_FILTERS}
        self.filters |= {
            "dictsort": self._dictsort,
            "float": self._float,
            "indent": self._indent,
            "int": self._int,
            "join": self._join,
            "list": self._list,
            "replace": self._replace,
            "reverse": self._reverse,
            "sort": self._sort,
            "tojson": self._tojson,
            "trim": self._strip,
        }
        compare: dict[str, Callable[..., Any]] = {name: partial(self._compare, name) for name in _COMPARING_TESTS}
        self.tests = {name: tests.TESTS[name] for name in _PLAIN_TESTS} | compare
        self._text_methods: dict[str, Callable[..., object]] = {
            "join": self._join_method,
            "replace": self._replace,
            "split": self._split,
            "rsplit": self._rsplit,
            "splitlines": self._splitlines,
            "strip": self._strip,
            "lstrip": self._lstrip,
            "rstrip": self._rstrip,
        }

    def build(self, source: str, name: str) -> Callable[[dict[str, object]], str]:
        """Parses and compiles a template with calls of the meter in it. Returns a function that renders it and charges `self.meter`."""
        tree = _MeterEverything(self).visit(self.parse(source, name))
        return self.template_class.from_code(self, self.compile(tree, name), self.make_globals(None)).render

    # What the rewritten tree calls.

    def tick(self) -> None:
        self.meter.spend(ITEM)

    def charge(self, value: object) -> object:
        self.meter.spend(ITEM + _size(value))
        return value

    def weigh(self, value: object) -> object:
        """Charges for everything that is reachable, before an operation such as printing, comparing or sorting walks all of it.

        A list in a list in a list, each held twice, is small to make and without end to walk; here that walk is paid by the step.
        """
        if isinstance(value, (str, int, float, type(None), Undefined)):
            return value
        waiting: list[tuple[Any, int]] = [(value, 1)]
        while waiting:
            item, depth = waiting.pop()
            if isinstance(item, Namespace):
                raise LimitExceeded("a namespace cannot be printed or compared")
            self.meter.spend(len(item) if isinstance(item, str) else ITEM + depth)
            if isinstance(item, Mapping):
                waiting += [(part, depth + 1) for pair in item.items() for part in pair]
            elif isinstance(item, (list, tuple)) or type(item).__name__ in ("dict_keys", "dict_values", "dict_items"):
                waiting += [(part, depth + 1) for part in item]
        return value

    def text(self, value: object) -> str:
        return value if isinstance(value, str) else str(self.weigh(value))

    def joined(self, *parts: object) -> str:
        texts = [self.text(part) for part in parts]
        self.meter.spend(sum(map(len, texts)))
        return "".join(texts)

    # The sandbox's own hooks.

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise LimitExceeded("formatting with % is not supported in chat templates")
        if operator == "+":
            self.meter.spend(_size(left) + _size(right))
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                self.meter.spend(_size(value) * max(times, 0) if isinstance(times, int) else 0)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_NUMBER_BITS:
                raise LimitExceeded(f"a number of {bits} bits is past the limit of {MAX_NUMBER_BITS}")
        return super().call_binop(context, operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, str) and attribute in self._text_methods:
            return partial(self._text_methods[attribute], obj)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (str, bytes)):
            return attr in _TEXT_METHODS
        if isinstance(obj, dict):
            return attr in _DICT_METHODS
        if isinstance(obj, (list, tuple)) or (isinstance(obj, LoopContext) and attr == "changed"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        return None  # so that is_safe_attribute is asked about str.format too, and refuses it: its widths have no bound

    # Filters and string methods that need a check before they run.

    def _text_filter(self, name: str, value: object) -> object:
        return self.charge(filters.FILTERS[name](self.text(value)))

    def _compare(self, name: str, left: object, right: object) -> bool:
        test: Callable[[object, object], bool] = dict[str, Any](tests.TESTS)[name]
        return test(self.weigh(left), self.weigh(right))

    def _list(self, value: Iterable[object]) -> list[object]:
        items = []
        for item in value:
            self.charge(item)
            items.append(item)
        return items

    def _join(self, value: Iterable[object], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(filters.make_attrgetter(self, attribute), value)
        texts = [self.text(item) for item in self._list(value)]
        self.meter.spend(sum(map(len, texts)) + len(d) * len(texts))
        return self.text(d).join(texts)

    def _join_method(self, separator: str, parts: Iterable[object]) -> str:
        return self._join(parts, separator)

    def _replace(self, text: object, old: str, new: str, count: int | None = None) -> str:
        text, old, new = self.text(text), self.text(old), self.text(new)
        self.meter.spend(len(text) + text.count(old) * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _split(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        self.meter.spend(self._split_cost(text, sep, maxsplit))
        return text.split(sep, maxsplit)

    def _rsplit(self, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        self.meter.spend(self._split_cost(text, sep, maxsplit))
        return text.rsplit(sep, maxsplit)

    def _splitlines(self, text: str, keepends: bool = False) -> list[str]:
        self.meter.spend(self._split_cost(text, None, -1))
        return text.splitlines(keepends)

    @staticmethod
    def _split_cost(text: str, sep: str | None, maxsplit: int) -> int:
        parts = text.count(sep) + 1 if sep else len(text) // 2 + 1
        return len(text) + ITEM * (parts if maxsplit < 0 else min(parts, maxsplit + 1))

    def _strip(self, value: object, chars: str | None = None) -> str:
        return self.text(value).strip(_short(chars))

    def _lstrip(self, text: str, chars: str | None = None) -> str:
        return text.lstrip(_short(chars))

    def _rstrip(self, text: str, chars: str | None = None) -> str:
        return text.rstrip(_short(chars))

    def _int(self, value: object, default: int = 0, base: int = 10) -> int:
        return filters.do_int(_short(value) if isinstance(value, str) else value, default, base)

    def _float(self, value: object, default: float = 0.0) -> float:
        return filters.do_float(_short(value) if isinstance(value, str) else value, default)

    def _indent(self, value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = self.text(value)
        self.meter.spend(len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else max(width, 0)))
        return filters.do_indent(text, width, first, blank)

    def _reverse(self, value: str | Iterable[object]) -> object:
        return value[::-1] if isinstance(value, str) else self._list(value)[::-1]

    def _sort(
        self, value: Iterable[Any], reverse: bool = False, case_sensitive: bool = False, attribute: str | int | None = None
    ) -> object:
        items = self._list(value)
        self.weigh(items)
        return filters.do_sort(self, items, reverse, case_sensitive, attribute)

    def _dictsort(self, value: Mapping[Any, Any], case_sensitive: bool = False, reverse: bool = False) -> list[tuple[Any, Any]]:
        self.weigh(value)
        return filters.do_dictsort(value, case_sensitive, "key", reverse)

    def _tojson(
        self,
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Returns plain JSON, as Hugging Face renders it. jinja2's own filter would escape it for HTML."""
        for _ in range(1 + min(max(indent or 0, 0), ITEM)):  # each level of depth is paid `indent` times over
            self.weigh(value)
        for separator in separators or ():
            _short(separator, 8)
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent and min(indent, ITEM), separators=separators, sort_keys=sort_keys)


class _MeterEverything(NodeTransformer):
    """Rewrites a parsed template so that whatever makes or walks data goes through the sandbox's metering methods."""

    def __init__(self, sandbox: TemplateSandbox) -> None:
        self._sandbox = sandbox

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        if isinstance(node, _REFUSED_STATEMENTS):
            raise TemplateSyntaxError(f"the statement {type(node).__name__} is not supported in chat templates", node.lineno)
        if isinstance(node, nodes.AssignBlock) and node.filter is not None:
            raise TemplateSyntaxError("a filter on a set block is not supported in chat templates", node.lineno)
        if isinstance(node, (nodes.Call, nodes.Filter, nodes.Test)) and (node.dyn_args or node.dyn_kwargs):
            raise TemplateSyntaxError("* and ** arguments are not supported in chat templates", node.lineno)
        return super().generic_visit(node)

    def _metered(self, method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)
        call.set_environment(self._sandbox)
        return call.set_lineno(line, override=False)  # type: ignore[return-value]

    def _charged(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        return self._metered("charge", [node], node.lineno)

    visit_Call = visit_Filter = _charged

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._metered("tick", [], node.lineno), lineno=node.lineno))
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # goes through `finalize` like all other output

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._metered("joined", node.nodes, node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._charged(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        holders: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        for holder in holders:
            if not isinstance(holder.expr, nodes.Const):
                holder.expr = self._metered("weigh", [holder.expr], node.lineno)
        return node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        if node.ctx != "load" or all(isinstance(item, nodes.Const) for item in node.items):
            return node
        return nodes.List(node.items, lineno=node.lineno)  # a list cannot be hashed: hashing would walk it in one stroke


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _emit(context: Context, value: object) -> str:
    sandbox = context.environment
    assert isinstance(sandbox, TemplateSandbox)
    return sandbox.joined(value)


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return ITEM * len(value) if isinstance(value, (list, tuple, dict)) else 0


def _short(text: str | None, limit: int = MAX_SHORT_TEXT) -> str | None:
    if text is not None and len(text) > limit:
        raise LimitExceeded(f"an argument of {len(text)} characters is past the limit of {limit}")
    return text


def _raise_exception(message: object) -> None:
    raise TemplateRuntimeError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(_short(format) or "")
