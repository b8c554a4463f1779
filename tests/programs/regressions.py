"""Programs that failed once, made small. Paste new ones here, as the campaign prints them."""

from __future__ import annotations

REGRESSIONS: list[str] = []
