"""How long does a call take? Samples of many calls each, whatever the clock."""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

SAMPLE_SECONDS = 0.02  # One sample is enough calls to last this long, so that launches hide behind the kernels.
WARM_UP_SECONDS = 0.2  # Longer than a GPU takes to raise its clocks after the idle time of a compilation.
MIN_SAMPLES = 5


def measure(lasted: Callable[[int], float], seconds: float, max_samples: int) -> dict[str, Any]:
    """Warms up, then samples for about `seconds`; returns the statistics in milliseconds per call.

    Args:
        lasted: Number of calls → seconds that so many take together.
        seconds: How long to sample.
        max_samples: How many samples at most.
    """
    calls, warm_until = 1, time.perf_counter() + WARM_UP_SECONDS
    while (total := lasted(calls)) < SAMPLE_SECONDS or time.perf_counter() < warm_until:
        if total < SAMPLE_SECONDS:
            calls = min(10 * calls, math.ceil(1.2 * calls * SAMPLE_SECONDS / total))
    samples, stop = [], time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or (len(samples) < max_samples and time.perf_counter() < stop):
        samples.append(1e3 * lasted(calls) / calls)
    low, median, high = np.percentile(samples, (25, 50, 75))
    return {
        "median_ms": float(median),
        "min_ms": min(samples),
        "iqr_ms": float(high - low),
        "samples": len(samples),
        "calls_per_sample": calls,
    }
