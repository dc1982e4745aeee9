"""Draws a view as lines for a terminal of any width: figures, a map of the block pool, steps as bars, requests, events.

Text from the server is made harmless in one place: `_fitted`, which cuts lines to the width.
"""

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.cli.in_out import can_show
from octavo.errors import RemoteError
from octavo.inspector.remote import Watch
from octavo.inspector.state import ViewState

Line = list[tuple[str, str]]  # pieces of text, each with the name of its style

KINDS = ("free", "cached", "in use", "shared")
SIGNS, LETTERS = "·░▒█", ".cuS"
BARS, STEEL = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
MAP_SHARE = 3  # the map takes at most this part of the height
MOST_EVENTS = 6
MOST_HOST = 40  # characters of a host's name
SILENT_SECONDS = 5  # a rank whose last beat is older is marked
WIDE = 60  # columns; narrower terminals do not show preemptions of requests


def picture(watch: Watch, width: int, height: int) -> list[Line]:
    """Returns the whole picture, in at most `height` lines."""
    with _of_a_view(watch):
        return [_fitted(line, width) for line in _lines(watch, width, height)][:height]


def plain(lines: Iterable[Line]) -> list[str]:
    """Returns the lines without styles."""
    return ["".join(text for text, _ in line).rstrip() for line in lines]


def figures_line(watch: Watch) -> str:
    """Returns the figures in one line, or why there are none now."""
    if watch.trouble is not None:
        return "".join(map(_harmless, f"waiting: {watch.trouble}"))
    with _of_a_view(watch):
        engine = "".join(map(_harmless, "".join(text for text, _ in _engine(watch)))).strip()
        return "  ".join([*filter(None, [engine]), *_figures(watch, _kinds(watch.state))])


@contextmanager
def _of_a_view(watch: Watch) -> Iterator[None]:
    """Turns errors inside into one about the server, for its frames may hold anything."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise RemoteError(f"the server at {watch.address} does not answer /v1/view as Octavo does", 200) from error


def _lines(watch: Watch, width: int, height: int) -> list[Line]:
    state = watch.state
    kinds = _kinds(state)
    head: list[Line] = [[(str(state.head.get("model", "octavo")), "strong"), (f"  {watch.address}", "dim"), *_engine(watch)]]
    if watch.trouble is not None:
        head.append([(f"waiting: {watch.trouble}", "warn")])
    if state.note is not None:
        head += [[(f"{state.note['scene']}/{state.note['of']} {state.note['title']}", "strong")], [(str(state.note["text"]), "")]]
    head += [[(text, "")] for text in _wrapped(_figures(watch, kinds), width)]
    head += _ranks(state, height // MAP_SHARE)
    pool = _pool(kinds, width, max(height // MAP_SHARE, 2))
    steps = _steps(state, width)
    left = height - len(head) - len(pool) - len(steps) - 3  # with lines between
    events = _events(state, min(MOST_EVENTS, max(left // 3, 0)))
    requests = _requests(state, width, left - len(events) - bool(events))
    parts = [head, pool, steps, requests, events]
    return [line for part in parts if part for line in (*part, [])][:-1]


def _kinds(state: ViewState) -> bytes:
    """Returns the kind of each block but the null block, as an index of KINDS."""
    return bytes(_kind(*block) for block in zip(state.ref[1:], state.sealed[1:]))


def _kind(ref: int, sealed: int) -> int:
    if not ref:
        return 1 if sealed else 0
    return 3 if ref - max(sealed - 1, 0) > 1 else 2  # a pin counts in ref, and shares nothing


def _figures(watch: Watch, kinds: bytes) -> list[str]:
    state = watch.state
    running = sum(seq["state"] == "running" for seq in state.seqs.values())
    counts = watch.counts
    prompt, output = counts.rates()
    used, pinned = kinds.count(2) + kinds.count(3), sum(sealed > 1 for sealed in state.sealed)
    return [
        f"running {running}",
        f"waiting {len(state.seqs) - running}",
        f"KV cache {used / max(len(kinds), 1):.0%}",
        *([f"pinned {pinned:,} blocks"] if pinned else []),
        *(["states {1:,} live, {2:,} kept of {0:,}".format(*state.states)] if state.states else []),
        f"prompt {prompt:,.0f} tok/s",
        f"output {output:,.0f} tok/s",
        f"cache hits {counts.found / counts.queried:.0%}" if counts.queried else "cache hits -",
        f"preempted {counts.preempted:,}",
    ]


def _engine(watch: Watch) -> Line:
    """Says which engine is shown and how many are ready, where there are several."""
    head = watch.state.head
    if "engines" not in head:
        return []
    line = [(f"  engine {head['engine']} of {head['engines']}", "strong")]
    if watch.ready is not None:
        ready, count = watch.ready
        line.append((f"  {ready} of {count} ready", "dim" if ready == count else "warn"))
    return line


def _ranks(state: ViewState, most_lines: int) -> list[Line]:
    """Draws a line for each rank, where a model is split over several. If not all fit, the last line says how many more there are."""
    facts, did = state.head.get("ranks", []), {row[0]: row for row in state.ranks}
    shown = facts if len(facts) <= most_lines else facts[: max(most_lines - 1, 0)]
    lines = [_rank(one, did.get(one["rank"])) for one in shown]
    return lines + ([[(f"and {len(facts) - len(shown):,} more ranks", "dim")]] if len(facts) > len(shown) else [])


def _rank(one: dict[str, Any], did: list[Any] | None) -> Line:
    (first, count), stage = one["layers"], f"  stage {one['stage']}" if one["stages"] > 1 else ""
    where = f"cores {one['cores']}" if one["device"] == "cpu" else str(one["device"])
    where += f" on {one['host'][:MOST_HOST]}" if "host" in one else ""
    line = [(f"rank {one['rank']}{stage}  layers {first}-{first + count - 1}  {where}", "dim")]
    if did is not None:
        late = did[3] >= SILENT_SECONDS
        line.append((f"  {did[2]:4.0%} in steps", ""))
        line += [(f"  silent for {did[3]:.0f} s", "warn")] if late else []
    return line


def _pool(kinds: bytes, width: int, most_lines: int) -> list[Line]:
    """Draws one character for a block. If the pool is too large, a character stands for several blocks and shows the most common kind."""
    signs = SIGNS if can_show(SIGNS) else LETTERS
    each = max(-(-len(kinds) // (width * most_lines)), 1)
    legend = [f"{sign} {name} {kinds.count(kind):,}" for kind, (sign, name) in enumerate(zip(signs, KINDS))]
    legend += [f"{each:,} blocks each"] if each > 1 else []
    found = [_most(kinds[start : start + each]) for start in range(0, len(kinds), each)]
    rows = [_runs(found[start : start + width], signs) for start in range(0, len(found), width)]
    return [*([(text, "dim")] for text in _wrapped(legend, width)), *rows]


def _most(kinds: bytes) -> int:
    return kinds[0] if len(kinds) == 1 else max(range(len(KINDS)), key=lambda kind: (kinds.count(kind), kind))


def _runs(kinds: Sequence[int], signs: str) -> Line:
    """Returns the characters of these blocks. Neighbours of the same kind are one piece of text."""
    line: Line = []
    for kind in kinds:
        if line and line[-1][1] == KINDS[kind]:
            line[-1] = (line[-1][0] + signs[kind], KINDS[kind])
        else:
            line.append((signs[kind], KINDS[kind]))
    return line


def _steps(state: ViewState, width: int) -> list[Line]:
    if not state.steps:
        return []
    bars = BARS if can_show(BARS) else STEEL
    shown = list(state.steps)[-width:]
    tokens = [step[3] + step[4] for step in shown]
    most, last = max(*tokens, 1), shown[-1]
    texts = [f"tokens of each step, max {most:,}", f"last step: {tokens[-1]:,} tokens in {last[2]:.1f} ms, {last[5]:,} sequences"]
    drawn = "".join(bars[-(-count * (len(bars) - 1) // most)] for count in tokens)
    return [*([(text, "dim")] for text in _wrapped(texts, width)), [(drawn, "in use")]]


def _requests(state: ViewState, width: int, room: int) -> list[Line]:
    """Lists running requests, then waiting ones, then those that ended last. If not all fit, the last line says how many more there are."""
    live = sorted(state.seqs.values(), key=lambda seq: (seq["state"] != "running", seq["seq"]))
    listed = live + [{**seq, "state": f"ended ({how})"} for seq, how in reversed(state.ended)]
    if not listed or room < 3:
        return []
    shown = listed[: room - 1] if len(live) < room else live[: room - 2]
    cells = [("request", "state", "tokens", "blocks", "cached", "preempted"), *map(_cells, shown)]
    cells = [line if width >= WIDE else line[:-1] for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells)]
    space = max(min(width - sum(widths[1:]) - len(widths) + 1, widths[0]), 1)
    lines: list[Line] = []
    for name, kind, *counts in cells:
        right = " ".join(cell.rjust(size) for cell, size in zip(counts, widths[2:]))
        lines.append([(f"{_clipped(name, space).ljust(space)} {kind.ljust(widths[1])} {right}", "" if kind == "running" else "dim")])
    more = max(len(live) - len(shown), 0)
    return lines + ([[(f"and {more:,} more", "dim")]] if more else [])


def _cells(seq: dict[str, Any]) -> tuple[str, ...]:
    name = f"{seq['request']} #{seq['sample']}" if seq["sample"] else str(seq["request"])
    cached = f"{seq['cached'] / seq['prompt']:.0%}" if seq["prompt"] else "-"
    return name, str(seq["state"]), f"{seq['tokens']:,}", f"{len(seq['table']):,}", cached, f"{seq['preemptions']}"


def _events(state: ViewState, most: int) -> list[Line]:
    texts = [(event[0], _happened(event[2], event[3:])) for event in list(state.events)[-most:]] if most else []
    return [[(f"step {step}  ", "dim"), (text, "")] for step, text in texts if text]


def _happened(kind: str, rest: Sequence[Any]) -> str:
    match kind:
        case "evict":
            return f"block {rest[0]} evicted"
        case "copy":
            return f"block {rest[0]} copied to {rest[1]}, so that {rest[2]} can write to it"
        case "preempt":
            return f"{rest[0]} preempted"
        case "hit":
            return f"{rest[0]} found {rest[1]} tokens in the cache ({rest[2]})"
        case "fork":
            return f"{rest[0]} forked into {rest[1]}"
        case "admit":
            return f"{rest[0]} admitted"
        case "pin":
            return f"a prefix of {rest[1]} tokens pinned in {rest[0]} blocks"
        case "unpin":
            return f"a pinned prefix of {rest[1]} tokens released"
        case "note":
            return str(rest[0])
    return ""


def _wrapped(items: Sequence[str], width: int) -> list[str]:
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += f"  {item}"
        else:
            lines.append(item)
    return lines


def _clipped(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "~"


def _fitted(line: Line, width: int) -> Line:
    """Returns the line cut to the width. Every character is one column wide."""
    fitted: Line = []
    for text, style in line:
        fitted.append(("".join(map(_harmless, text[:width])), style))
        width -= len(fitted[-1][0])
    return fitted


def _harmless(char: str) -> str:
    """Returns a question mark for a control character, and for a character that is not one column wide."""
    return char if char.isprintable() and unicodedata.east_asian_width(char) not in "WF" and not unicodedata.combining(char) else "?"
