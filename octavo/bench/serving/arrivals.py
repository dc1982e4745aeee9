"""When requests arrive, in seconds after the start: as a Poisson process, all at once, or as a trace has it."""

import math
from itertools import accumulate
from random import Random

from octavo.errors import ConfigError


def poisson(count: int, rate: float, seed: int) -> list[float]:
    """`rate` requests a second on average, the first at once; the same seed gives the same times. inf: all at once."""
    if math.isinf(rate):
        return [0.0] * count
    rng = Random(f"{seed} arrivals")
    return list(accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0))


def replayed(name: str, times: list[float] | None, speedup: float) -> list[float]:
    """Those of a trace, so many times as fast."""
    if times is None:
        raise ConfigError(f"--trace {name} does not say when its requests came; set --request-rate")
    return [(time - times[0]) / speedup for time in times]
