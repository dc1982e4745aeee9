"""Where the groups of each GGUF kind keep their float16 scales and offsets, to write chosen ones between random codes."""

import numpy as np

HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ4_NL": (0,), "IQ4_XS": (0,), "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,),
    "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ1_M": (49,),  # a quarter of it in the upper half of this byte, and of every second one after it
    "MXFP4": (0,),  # one byte, a power of two
}  # fmt: skip


def put(raw: np.ndarray, kind: str, halves: np.ndarray, which: int = -1) -> None:
    """Writes float16 numbers [...] as the scales (0) or offsets (1) of the groups `raw` [..., bytes]; -1: the last of both."""
    start = HALVES[kind][which]
    if kind == "IQ1_M":
        for quarter in range(4):
            place = start + 2 * quarter
            raw[..., place] = raw[..., place] & 15 | (halves.view(np.uint16) >> 4 * quarter & 15) << 4
    elif kind == "MXFP4":
        powers = np.frexp(np.nan_to_num(np.abs(halves.astype(np.float64)), posinf=0))[1]
        raw[..., 0] = 127 + powers
    else:
        raw[..., start : start + 2] = np.expand_dims(halves, -1).view(np.uint8)
