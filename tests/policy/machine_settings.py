"""How long the state machines run: numbers for Hypothesis's usual 100 examples, scaled by the profile that is loaded."""

from hypothesis import HealthCheck, settings

SOAK = 80  # times as many examples where a test is marked `soak`


def machine_settings(examples: int, steps: int, factor: int = 1) -> settings:
    scaled = max(1, examples * factor * settings().max_examples // 100)
    return settings(
        max_examples=scaled, stateful_step_count=steps, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )
