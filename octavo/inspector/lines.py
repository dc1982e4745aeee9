"""A frame of an engine as a line of JSON (docs/view.md). Token ids become text, which is left out for watchers that may not read it."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from octavo.inspector.frames import SequenceState, ViewFrame
from octavo.messages import RankFacts
from octavo.text.tokenizer import Tokenizer


def line(frame: Mapping[str, Any]) -> bytes:
    """Returns a frame as a line of JSON."""
    return msgspec.json.encode(frame) + b"\n"


def without_text(frame: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the frame without text. A block still shows how many tokens it holds."""
    hidden = dict(frame)
    if "blocks" in frame:
        hidden["blocks"] = [(*block[:4], None if block[4] is None else [""] * len(block[4]), block[5]) for block in frame["blocks"]]
    if "seqs" in frame:
        hidden["seqs"] = [{name: value for name, value in seq.items() if name != "asked"} for seq in frame["seqs"]]
    return hidden


class Line:
    """A frame, encoded when its first reader comes and kept for the others: once with text, once without."""

    __slots__ = ("_encoded", "_frame")

    def __init__(self, frame: Mapping[str, Any]) -> None:
        self._frame = frame
        self._encoded: dict[bool, bytes] = {}

    def read(self, with_text: bool) -> bytes:
        if with_text not in self._encoded:
            self._encoded[with_text] = line(self._frame if with_text else without_text(self._frame))
        return self._encoded[with_text]


class Pieces:
    """Finds the text of each token of a block. A character of several tokens belongs to the last of them."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str | None] = {}  # None: its bytes are not whole characters

    def of(self, ids: list[int]) -> list[str]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            return [f"{token_id} " for token_id in ids]
        pieces = [self._known[token_id] if token_id in self._known else self._look_up(token_id, tokenizer) for token_id in ids]
        if None not in pieces:
            return pieces  # type: ignore[return-value]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        found = [decoder.decode(tokenizer.token_bytes(token_id)) for token_id in ids]
        found[-1] += decoder.decode(b"", final=True)
        return found

    def _look_up(self, token_id: int, tokenizer: Tokenizer) -> str | None:
        try:
            piece: str | None = tokenizer.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            piece = None
        self._known[token_id] = piece
        return piece


def delta(frame: ViewFrame, pieces: Pieces, name: Callable[[SequenceState], str]) -> dict[str, Any]:
    """Returns a frame as it is sent; a delta has no empty fields. `name`: gives the name of a sequence's request."""
    parts: dict[str, Any] = {
        "blocks": [(*block[:4], None if block[4] is None else pieces.of(block[4]), block[5]) for block in frame.blocks],
        "seqs": [_sequence(seq, name(seq), pieces) for seq in frame.seqs],
        "gone": frame.gone,
        "steps": frame.steps,
        "events": frame.events,
        "lost": frame.lost,
    }
    states = {} if frame.states is None else {"states": frame.states}
    if frame.full:
        return {"kind": "full", "at": frame.at, **parts, **states}
    return {"kind": "delta", "at": frame.at, **states, **{key: value for key, value in parts.items() if value}}


def _sequence(seq: SequenceState, request: str, pieces: Pieces) -> dict[str, Any]:
    ended = {} if seq.digests is None else {"digests": seq.digests}
    asked = {"asked": pieces.of(seq.asked)} if seq.asked else {}
    return {
        "seq": seq.seq,
        "request": request,
        "sample": seq.sample,
        "samples": seq.samples,
        "state": seq.state,
        "prompt": seq.prompt,
        "tokens": seq.tokens,
        "limit": seq.limit,
        "computed": seq.computed,
        "cached": seq.cached,
        "reason": seq.reason,
        "preemptions": seq.preemptions,
        "from": seq.start,
        "table": seq.table,
        **({} if seq.kept is None else {"checkpoints": seq.kept}),
        **ended,
        **asked,
    }


def rank_lines(ranks: Sequence[RankFacts]) -> list[dict[str, Any]]:
    """Returns the state of ranks, with their hosts if there are several."""
    several = len({one.host for one in ranks}) > 1
    return [_rank(one) | ({"host": one.host} if several else {}) for one in ranks]


def _rank(one: RankFacts) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "stage": one.stage,
        "stages": one.stages,
        "layers": [one.first_layer, one.num_layers],
        "cores": one.cores,
        "device": one.device,
        "kernels": one.kernels,
        "weight_bytes": one.weight_bytes,
    }
