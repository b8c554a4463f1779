"""Numbers for people: four significant digits, and units that keep them short."""

from __future__ import annotations

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float) -> str:
    """Return a number with four significant digits: 0.0012345 -> '0.001235', 12345.6 -> '12350'."""
    if "e" not in (text := f"{value:.4g}"):  # "inf" and "nan", too
        return text
    return f"{float(text):.0f}" if 1 <= abs(value) < 1e6 else text


def counted(value: float, space: str = "") -> str:
    """Return a count with a prefix, and something between the two: 1345000000 -> '1.345G'."""
    for size, prefix in _PREFIXES:
        if abs(value) >= size:
            return f"{short(value / size)}{space}{prefix}"
    return short(value) + space


def duration(seconds: float) -> str:
    """Return a time as h:mm:ss, or mm:ss below an hour."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes:02}:{left:02}"


def milliseconds(seconds: float) -> str:
    """Return a short time in milliseconds."""
    return f"{short(1e3 * seconds)} ms"


def plural(count: int, word: str) -> str:
    """Return a count with its word: 1 step, 2 steps."""
    return f"{count} {word}" + ("" if count == 1 else "s")
