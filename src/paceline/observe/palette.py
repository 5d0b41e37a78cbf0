"""Colours of methods and activities that colour-blind readers can tell apart, for light and dark pages.

Methods use the colours of Okabe and Ito, "Color Universal Design", 2008; the dark variants are lightened until they
reach a contrast of 4.5 against the dark page. Activities also differ in lightness, so that they survive grey printing.
"""

from __future__ import annotations

from typing import Literal

Theme = Literal["light", "dark"]

METHODS: dict[Theme, tuple[str, ...]] = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#b0508a", "#b8860b", "#3a9bd0", "#5f5f5f", "#7a3e12"),
    "dark": ("#5aaee8", "#f58a46", "#34c39a", "#e08cc0", "#e3b341", "#8fd0f5", "#b3b3b3", "#c9966b"),
}
ACTIVITIES: dict[Theme, dict[str, str]] = {
    "light": {"input": "#b3bcc7", "gradient": "#35789e", "wait": "#f2b632", "apply": "#8a3f73", "other": "#e6e8eb"},
    "dark": {"input": "#7d8894", "gradient": "#4d9cc9", "wait": "#f5c451", "apply": "#d07fb5", "other": "#33383f"},
}
OUTCOMES: dict[Theme, dict[str, str]] = {
    "light": {"converged": "#5aa47f", "stopped": "#ccd1d6", "diverged": "#e8923a", "crashed": "#8e2016"},
    "dark": {"converged": "#3f9a72", "stopped": "#5b636c", "diverged": "#f2a04f", "crashed": "#e0604f"},
}
ACTIVITY_NAMES = {
    "gradient": "computing the gradient",
    "wait": "waiting",
    "apply": "applying the update",
    "input": "waiting for input",
    "other": "other",
}
SURFACES: dict[Theme, dict[str, str]] = {
    "light": {"page": "#ffffff", "text": "#1d1f21", "soft": "#5c6268", "line": "#d5d9dd", "grid": "#e9ebee"},
    "dark": {"page": "#15171a", "text": "#e6e5e1", "soft": "#a3a9b0", "line": "#3d4249", "grid": "#2a2e33"},
}


def tokens(theme: Theme) -> dict[str, str]:
    """All colours by the names that figures use, such as `@method-0`, `@wait` and `@text`."""
    named = {f"@method-{index}": colour for index, colour in enumerate(METHODS[theme])}
    named |= {f"@{name}": colour for name, colour in ACTIVITIES[theme].items()}
    named |= {f"@{name}": colour for name, colour in OUTCOMES[theme].items()}
    return named | {f"@{name}": colour for name, colour in SURFACES[theme].items()}
