"""Numbers as short text for narrow columns. What is not known is a dash."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN = "-"
_LEVELS = "▁▂▃▄▅▆▇█"
_GAP = "·"  # a value that is not finite


def size(value: float | None) -> str:
    """Return a number of bytes, as "1.2 MB"; 1 MB is a million bytes."""
    if value is None:
        return UNKNOWN
    for least, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= 0.9995 * least:
            return f"{_three_digits(value / least)} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that a person would use, as "80 us", "1.2 ms", "250 ms", "3 min" or "2 h 05 min"."""
    if seconds is None:
        return UNKNOWN
    for most, least, unit in ((99.5e-6, 1e-6, "us"), (0.9995, 1e-3, "ms"), (99.5, 1.0, "s")):
        if seconds < most:
            value = seconds / least
            return f"{value:.1f} {unit}" if value < 9.95 and unit != "us" else f"{value:.0f} {unit}"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} days"


def per_second(value: float | None) -> str:
    """Return a number of events a second."""
    return UNKNOWN if value is None else _three_digits(value)


def share(value: float | None) -> str:
    """Return a share of 0 to 1 in percent."""
    return UNKNOWN if value is None else f"{value:.0%}"


def loss(value: float | None) -> str:
    """Return a loss with four significant digits."""
    if value is None:
        return UNKNOWN
    return f"{value:#.4g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.1e}"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def curve(values: Sequence[float | None], width: int) -> str:
    """Return values, oldest first, as a line of at most `width` blocks: the least is the lowest block, the greatest the
    highest. If there are more values than blocks, a block is the mean of its values. A gap is drawn where there is
    none."""
    blocks = min(width, len(values))
    means = [_mean(values[len(values) * n // blocks : len(values) * (n + 1) // blocks]) for n in range(blocks)]
    known = [mean for mean in means if mean is not None]
    if not known:
        return _GAP * blocks
    low, high = min(known), max(known)
    top = len(_LEVELS) - 1

    def block(mean: float) -> str:
        # Divided before it is subtracted: the range of two floats may be more than a float holds.
        part = (mean / 2 - low / 2) / (high / 2 - low / 2) if high > low and high / 2 > low / 2 else 0.5
        return _LEVELS[round(top * part)]

    return "".join(_GAP if mean is None else block(mean) for mean in means)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(value / len(known) for value in known) if known else None


def stacked(parts: Sequence[tuple[str, float]], total: float, width: int) -> list[tuple[str, int]]:
    """Divide a bar of `width` characters, which stands for `total`, among parts (name, value). Each part ends at the
    character that is nearest to its end, so that the whole bar has the length of the sum."""
    out, at, end = [], 0, 0.0
    for name, value in parts:
        end += value
        upto = min(width, round(width * end / total)) if total > 0 else 0
        out.append((name, max(0, upto - at)))
        at = max(at, upto)
    return out
