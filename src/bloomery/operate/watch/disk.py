"""Forecasts when a file system will be full, from how its free space and inodes fell so far."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_LEAST_SAMPLES = 5
_MOST_SAMPLES = 288
_SPACING_S = 5.0
_MOST_PAIRED = 144
_FITS_TIMES = 1.05
_FARTHEST_TIMES = 100.0
"""The longest forecast, as a multiple of the seconds observed: a minute says little about a day."""


class DiskSample(NamedTuple):
    """What a file system had free at a time, in seconds since 1970. -1 inodes: it does not count them."""

    time: float
    free_bytes: int
    free_inodes: int


@dataclass(frozen=True, kw_only=True)
class DiskForecast:
    """When a file system will be full.

    what: "space" or "inodes".
    full_in_s: seconds from the last sample.
    """

    what: str
    full_in_s: float


def sample_disk(path: Path, *, now: float) -> DiskSample:
    """Return what is free on the file system of `path` for this user. Raises OSError."""
    facts = os.statvfs(path)
    inodes = facts.f_favail if facts.f_files else -1
    return DiskSample(now, facts.f_bavail * facts.f_frsize, inodes)


def thinned(samples: Sequence[DiskSample], sample: DiskSample) -> list[DiskSample]:
    """Return the samples with one more; at most _MOST_SAMPLES, of which the older ones lie further apart.

    Samples much closer together than _SPACING_S replace each other, and once there are too many, every other
    one is left out: so the first of them stays, and the slope is that of the whole time. Samples of a time
    that is still to come are left out: the clock was set back since, and they would hide all later ones.
    """
    thinned_samples = [earlier for earlier in samples if earlier.time <= sample.time]
    if len(thinned_samples) > 1 and sample.time - thinned_samples[-2].time < _SPACING_S:
        thinned_samples.pop()
    thinned_samples.append(sample)
    return (
        thinned_samples
        if len(thinned_samples) <= _MOST_SAMPLES
        else [*thinned_samples[:-1:2], thinned_samples[-1]]
    )


def forecast_full(samples: Sequence[DiskSample]) -> DiskForecast | None:
    """Return what becomes full first, and when; None where nothing falls, or too little was seen.

    The rate is the median of the slopes between all samples a quarter of the series apart or more, weighted
    by their distance in time (after Theil and Sen). Pairs of many distances are needed: with one distance
    alone, saves that come and go make every slope too steep or too flat. The space left is taken at the low
    side of the samples, where a save is present. Once more than half of a fall has been freed again, samples
    from before no longer count.
    """
    forecasts = []
    for what, place in (("space", 1), ("inodes", 2)):
        series = _since_freed([(sample.time, float(sample[place])) for sample in samples])
        if len(series) < _LEAST_SAMPLES or series[-1][1] < 0:
            continue
        rate = _fall_per_s(series)
        span_s = series[-1][0] - series[0][0]
        if rate <= 0.0:
            continue
        full_in_s = max(0.0, _low_now(series, rate) / rate)
        if full_in_s <= _FARTHEST_TIMES * span_s:
            forecasts.append(DiskForecast(what=what, full_in_s=full_in_s))
    return min(forecasts, key=lambda forecast: forecast.full_in_s, default=None)


def does_not_fit(sample: DiskSample, save_bytes: int) -> bool:
    """Whether a checkpoint as large as the newest one does not fit beside what is there."""
    return save_bytes > 0 and sample.free_bytes < save_bytes * _FITS_TIMES


def directory_bytes(path: Path) -> int:
    """Return the bytes of the files right in a directory; 0 if it is gone."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False))
    except OSError:
        return 0


def _since_freed(series: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    begin, lowest = 0, 0
    for place, (_, free) in enumerate(series):
        if free < series[lowest][1]:
            lowest = place
        elif free - series[lowest][1] > 0.5 * (series[begin][1] - series[lowest][1]) > 0.0:
            begin = lowest = place
    return series[begin:]


def _fall_per_s(series: Sequence[tuple[float, float]]) -> float:
    some = series[:: 1 + len(series) // _MOST_PAIRED]
    least = max(1, len(some) // 4)
    slopes = [
        ((free - later_free) / (later - time), later - time)
        for place, (time, free) in enumerate(some)
        for later, later_free in some[place + least :]
        if later > time
    ]
    slopes.sort()
    half = sum(distance for _, distance in slopes) / 2
    for slope, distance in slopes:
        half -= distance
        if half <= 0.0:
            return slope
    return 0.0


def _low_now(series: Sequence[tuple[float, float]], rate: float) -> float:
    """Return what is free at the last sample by a line under nine tenths of the samples, at this rate."""
    last = series[-1][0]
    moved = sorted(free - rate * (last - time) for time, free in series)
    return moved[len(moved) // 10]
