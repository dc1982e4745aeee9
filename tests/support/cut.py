"""Texts cut in pieces, as a stream may bring them."""

from hypothesis import strategies as st

CUTS = st.lists(st.integers(1, 9), max_size=30)


def cut(text: str, cuts: list[int]) -> list[str]:
    pieces = []
    for length in cuts:
        pieces.append(text[:length])
        text = text[length:]
    return [*pieces, text]
