"""Service level objectives: bounds that one request keeps or does not.

    ttft   to the first token                        tpot   per token after the first, on average
    itl    between two pieces of text, every time    e2e    to the end
"""

import argparse
import re
from collections.abc import Mapping

from octavo.bench.serving.drive import Asked

Slo = Mapping[str, float]  # name -> seconds
UNITS = {"ms": 1e-3, "s": 1.0}
NAMES = ("ttft", "itl", "tpot", "e2e")


def slo(text: str) -> Slo:
    """ttft:500ms,itl:50ms"""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        found = re.fullmatch(r"(\w+):(\d{1,9}(?:\.\d{1,9})?)(ms|s)", part.strip(), re.ASCII)
        if found is None or found[1] not in NAMES or found[1] in bounds:
            raise argparse.ArgumentTypeError(f"wanted bounds like ttft:500ms,itl:50ms, of {', '.join(NAMES)}, each once; got {part!r:.40}")
        bounds[found[1]] = float(found[2]) * UNITS[found[3]]
    return bounds


def keeps(request: Asked, bounds: Slo) -> bool:
    """A request that failed keeps nothing."""
    if request.error is not None:
        return False
    seen = {"ttft": request.first_token, "itl": max(request.gaps, default=0.0), "tpot": request.per_token or 0.0, "e2e": request.end_to_end}
    return all(seen[name] <= bound for name, bound in bounds.items())
