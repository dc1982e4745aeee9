"""Requests as heavy as a server takes them, made from its own OpenAPI schema: a field that is new tomorrow is in them tomorrow.

    a place         one field of one route; a text, list, object or number of any size can stand there
    a size          from what fills a body down to what is taken: caps are found by asking, not by reading them off the source
    a multiple      what was taken, once more with as many prompts and samples as a request may have

Beside them stand texts that are small and hard to digest (`HARD_FORMS`), and requests whose answers are large (`ANSWERS`).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TOKENS = 2  # of an answer that is not heavy itself
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Once"}]
# What a field that must be there holds where another one is heavy; a field that is not named here gets the least of its type.
PLAIN: dict[str, Any] = {"prompt": "Once", "messages": MESSAGES, "input": "Once", "tokens": [5], "model": None}
LATER = 9  # the priority of all that is heavy: who asks for little is served first
SHORT = {"max_tokens": TOKENS, "max_output_tokens": TOKENS, "priority": LATER}  # wherever a route has these
FORMS = ("structured_outputs", "response_format", "stream_options", "stream")  # some of them exclude others
Multiples = tuple[tuple[int, int], ...]  # of prompts and samples


@dataclass(frozen=True)
class Heavy:
    name: str
    path: str
    body: bytes
    reads: bool = True  # whether its client reads the answer


@dataclass(frozen=True)
class Shape:
    """A kind of value at one place, for any size."""

    name: str
    value: Callable[[int], str]  # JSON, of about so many bytes


@dataclass(frozen=True)
class Place:
    """A field of a route."""

    path: str
    field: str  # with dots, where it is inside another
    shapes: tuple[Shape, ...]
    plain: Mapping[str, Any]  # the rest of a small request

    @property
    def generates_many(self) -> bool:
        """Whether its request has prompts and samples to be multiplied with."""
        return self.path == COMPLETIONS

    def heavy(self, shape: Shape, size: int, **more: object) -> Heavy:
        parts = self.field.split(".")
        rest = {name: value for name, value in {**self.plain, **more}.items() if name != parts[0]}
        text = shape.value(size)
        for part in reversed(parts[1:]):
            text = f'{{"{part}":{text}}}'
        body = f'{{"{parts[0]}":{text},{json.dumps(rest)[1:]}' if rest else f'{{"{parts[0]}":{text}}}'
        times = "".join(f", {name} {len(value) if isinstance(value, list) else value}" for name, value in more.items())
        return Heavy(f"{self.path} {self.field}: {shape.name}, {size:,} bytes{times}", self.path, body.encode())


def places(schema: dict[str, Any]) -> list[Place]:
    """Every field of every route that takes a body, each with the first route that has it."""
    found: dict[str, Place] = {}
    for path, body in bodies(schema).items():
        properties = body["properties"]
        plain = {name: PLAIN.get(name, _least(properties[name], schema)) for name in body.get("required", ())}
        plain |= {"prompt": "Once"} if "messages" in properties and "prompt" in properties else {}  # /tokenize takes one of the two
        plain |= {name: value for name, value in SHORT.items() if name in properties}
        for field, kind in _fields(properties, schema):
            own = {name: value for name, value in plain.items() if name != "prompt" or field != "messages"}
            found.setdefault(f"{field} {sorted(shape.name for shape in kind)}", Place(path, field, kind, own))
    return list(found.values())


def bodies(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Route -> what its body holds."""
    found = {}
    for path, methods in schema["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:
            found[path] = _resolved(content["application/json"]["schema"], schema)
    return found


def _fields(properties: dict[str, Any], schema: dict[str, Any], inside: str = "") -> Iterator[tuple[str, tuple[Shape, ...]]]:
    for name, kind in properties.items():
        shapes = tuple(shape for one in _alternatives(kind, schema) for shape in _shapes(one, schema))
        own = OWN.get(name, ())
        yield f"{inside}{name}", (*own[:1], *shapes, *own[1:])
        for one in _alternatives(kind, schema):
            if "properties" in one:
                yield from _fields(one["properties"], schema, f"{inside}{name}.")


def _resolved(kind: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in kind:
        kind = schema["components"]["schemas"][kind["$ref"].rpartition("/")[2]]
    return kind


def _alternatives(kind: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    found = [_resolved(one, schema) for one in _resolved(kind, schema).get("anyOf", [kind])]
    return [one for one in found if one.get("type") != "null"]


def _least(kind: dict[str, Any], schema: dict[str, Any]) -> Any:
    least = {"string": "a", "array": [], "object": {}, "integer": 1, "number": 1, "boolean": False}
    return least.get(_alternatives(kind, schema)[0].get("type", ""))


def repeated(item: str, size: int, opens: str = "[", closes: str = "]") -> str:
    return f"{opens}{','.join([item] * max(1, size // (len(item) + 1)))}{closes}"


def keyed(item: str, size: int) -> str:
    return "{" + ",".join(f'"{number}":{item}' for number in range(max(1, size // (len(item) + 8)))) + "}"


def _tool(number: int) -> str:
    parameters = {"type": "object", "properties": {f"p{number}": {"type": "string", "description": "a" * 100}}}
    return json.dumps({"type": "function", "function": {"name": f"tool{number}", "parameters": parameters}})


TEXT = Shape("a text", lambda size: f'"{"a" * size}"')
NUMBERS = Shape("numbers", lambda size: repeated("300", size))
TEXTS = Shape("short texts", lambda size: repeated('"ab"', size))
OBJECTS = Shape("objects", lambda size: repeated('{"a":1}', size))
KEYS = Shape("an object", lambda size: keyed("1.0", size))
DEEP = Shape("lists inside each other", lambda size: "[" * min(size, 190) + repeated("[]", size) + "]" * min(size, 190))
DIGITS = Shape("digits", lambda size: "9" * max(1, size))
MANY_MESSAGES = Shape("messages", lambda size: repeated(json.dumps(MESSAGES[0]), size))
LONG_MESSAGE = Shape("a long message", lambda size: json.dumps([{"role": "user", "content": "a" * size}]))
TOOLS = Shape("tools", lambda size: "[" + ",".join(_tool(number) for number in range(max(1, size // len(_tool(0))))) + "]")
# Of fields whose type does not say what they hold: what is right there, and may be a lot.
OWN = {"messages": (MANY_MESSAGES, LONG_MESSAGE), "input": (MANY_MESSAGES, LONG_MESSAGE), "tools": (TOOLS,)}
ANYTHING = (TEXT, KEYS, NUMBERS, DEEP, TEXTS, OBJECTS)


def long_texts(size: int) -> Shape:
    """As many texts as TEXTS has at that size, each of them long."""
    count = TEXTS.value(size).count(",") + 1
    return Shape(f"{count:,} long texts", lambda size: "[" + ",".join([f'"{"ab" * (size // count // 2)}"'] * count) + "]")


def _shapes(kind: dict[str, Any], schema: dict[str, Any]) -> tuple[Shape, ...]:
    """Heavy values of a type, right ones first: items of the wrong type can be as heavy to refuse."""
    name = kind.get("type")
    if name == "array":
        item = _resolved(kind.get("items", {}), schema).get("type")
        return {"integer": (NUMBERS, TEXTS), "string": (TEXTS, NUMBERS), "object": (OBJECTS, TEXTS)}.get(
            item, (NUMBERS, OBJECTS, TEXTS, DEEP)
        )
    simple = {"string": (TEXT,), "object": (KEYS, DEEP), "integer": (DIGITS,), "number": (DIGITS,), "boolean": (), None: ANYTHING}
    return simple[name]


# --- what is small, and heavy all the same ------------------------------------------------------------------------------

CHARS = 16_000
INTEGER = {"type": "integer"}
NAMES = [f"p{number}" for number in range(500)]
HARD_FORMS: dict[str, dict[str, Any]] = {
    "regex that opens classes": {"regex": "[" * CHARS},
    "regex that opens groups": {"regex": "(" * CHARS},
    "regex of alternatives": {"regex": "|".join(f"a{number}" for number in range(CHARS // 6))},
    "regex that counts": {"regex": "(a{1000}){1000}"},
    "regex that may be empty": {"regex": "(a?){500}a{500}"},
    "regex of classes": {"regex": r"[\w\W]{1,1000}" * 50},
    "grammar of empty lines": {"grammar": 'start: "a"\n' + "\n" * 10_000 + " " * 10_000},
    "grammar of words": {"grammar": "start " * (CHARS // 6)},
    "grammar of rules": {"grammar": "start: r0\n" + "".join(f'r{n}: "a" r{n + 1} | "b"\n' for n in range(900)) + 'r900: "c"'},
    "choice of many": {"choice": [f"choice {number}" for number in range(2000)]},
    "choice of long ones": {"choice": [f"{number}" + "a" * 1900 for number in range(100)]},
    "schema with a pattern": {"json": {"type": "string", "pattern": "[" * CHARS}},
    "schema with a large enum": {"json": {"enum": list(range(9_999))}},
    "schema of properties": {"json": {"type": "object", "properties": {f"p{n}": INTEGER for n in range(2000)}}},
    "schema of what is required": {"json": {"type": "object", "required": NAMES, "properties": dict.fromkeys(NAMES, INTEGER)}},
    "schema that counts": {"json": {"type": "array", "minItems": 900_000, "items": {"type": "string", "minLength": 1000}}},
    "schema of alternatives": {"json": {"anyOf": [{"type": "object", "properties": {f"p{n}": {"type": "string"}}} for n in range(1000)]}},
}  # fmt: skip


def hard_form(name: str, multiples: Multiples) -> list[Heavy]:
    return [_asks(name, prompts, n, structured_outputs=HARD_FORMS[name]) for prompts, n in multiples]


ANSWERS: dict[str, tuple[int, int, dict[str, Any]]] = {  # prompts, samples and the rest of a request with a large answer
    "logprobs": (128, 1, {"logprobs": 20}),
    "logprobs, streamed": (1, 128, {"logprobs": 20, "stream": True}),
    "logprobs of prompts": (55, 1, {"logprobs": 20, "echo": True, "prompt": [[5] * 200] * 55}),
    "stop strings": (1, 128, {"stop": ["".join(chr(97 + (7 * place + one) % 26) for place in range(1024)) for one in range(4)]}),
    "usage with every chunk": (1, 128, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "streams that nobody reads": (1, 8, {"logprobs": 20, "stream": True}),
}


def large_answers(tokens: int, streams: int) -> dict[str, list[Heavy]]:
    """As much as half of the rows can say, so that others have a row."""
    half = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
    unread = "streams that nobody reads"
    return {
        name: [_asks(name, prompts, n, name != unread, **half, **more)] * (streams if name == unread else 1)
        for name, (prompts, n, more) in ANSWERS.items()
    }


def _asks(name: str, prompts: int, n: int, reads: bool = True, **fields: object) -> Heavy:
    body = {"prompt": ["Once"] * prompts, "n": n, "max_tokens": TOKENS, "priority": LATER, **fields}
    return Heavy(f"{name}, {prompts} prompts of {n} samples", COMPLETIONS, json.dumps(body).encode(), reads)


@dataclass(frozen=True)
class Taken:
    """A value that a server took."""

    place: Place
    shape: Shape
    size: int


def times(taken: Taken, prompts: int, n: int, halvings: int) -> Heavy:
    """The same, or a smaller one, for many prompts or samples."""
    more: dict[str, object] = {"n": n} | ({} if taken.place.field == "prompt" else {"prompt": ["Once"] * prompts})
    return taken.place.heavy(taken.shape, taken.size >> halvings, **more)


def all_at_once(taken: list[Taken], most: int, prompts: int, n: int, halvings: int) -> Heavy:
    """Every field of completions with its largest value, or a smaller one, as far as they fit into one body."""
    fields = {"prompt": json.dumps(["Once"] * prompts), "n": str(n), "max_tokens": str(TOKENS), "priority": str(LATER)}
    for one in sorted(taken, key=lambda one: one.size):
        name, room = one.place.field, most - sum(map(len, fields.values()))
        if one.place.generates_many and name not in (*fields, *FORMS) and "." not in name and one.size < room:
            fields[name] = one.shape.value(one.size if one.shape is DIGITS else one.size >> halvings)
    body = ",".join(f'"{name}":{value}' for name, value in fields.items())
    return Heavy(f"all fields at once, {prompts} prompts of {n} samples", COMPLETIONS, f"{{{body}}}".encode())
