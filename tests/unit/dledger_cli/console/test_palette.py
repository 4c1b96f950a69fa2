"""The palette: enough contrast for text and for graphics, in light and dark, and roles that differ without colour."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

from dledger_cli.console import app

FILES = app.load_files(Path(app.__file__).parent / "static")
CSS = "".join(FILES[name][0].decode() for name in ("base.css", "parts.css", "forms.css", "cluster.css"))
TOKENS = {
    name: {"light": light, "dark": dark}
    for name, light, dark in re.findall(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", CSS)
}
GROUNDS = ("bg", "surface", "sunken")
TEXTS = ("ink", "ink-quiet", "good", "warn", "bad", "strong")
GRAPHICS = (
    *("leader", "follower", "candidate", "unreachable", "committed", "flushed", "control-line", "focus"),
    *(f"series-{number}" for number in range(1, 8)),
)


def channels(color: str) -> tuple[float, float, float]:
    """Linear red, green, blue (WCAG 2.2, relative luminance)."""
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in (red, green, blue)]
    return linear[0], linear[1], linear[2]


def luminance(color: str) -> float:
    red, green, blue = channels(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_has_enough_contrast_on_every_ground(text: str, theme: str) -> None:
    """4.5 : 1 (WCAG 2.2, 1.4.3)."""
    for ground in GROUNDS:
        found = contrast(TOKENS[text][theme], TOKENS[ground][theme])
        assert found >= 4.5, f"{text} on {ground}: {found:.2f}"


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", GRAPHICS)
def test_graphics_have_enough_contrast_where_they_are_drawn(name: str, theme: str) -> None:
    """3 : 1 (WCAG 2.2, 1.4.11)."""
    for ground in ("surface", "sunken"):
        found = contrast(TOKENS[name][theme], TOKENS[ground][theme])
        assert found >= 3, f"{name} on {ground}: {found:.2f}"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_on_filled_grounds_can_be_read(theme: str) -> None:
    """The term inside a leader's bar, a strong button, one that loses something."""
    assert contrast(TOKENS["on-bad"][theme], TOKENS["bad"][theme]) >= 4.5
    assert contrast(TOKENS["on-leader"][theme], TOKENS["leader"][theme]) >= 4.5
    assert contrast(TOKENS["on-strong"][theme], TOKENS["strong"][theme]) >= 4.5


def as_seen(color: str, kind: str) -> tuple[float, float, float]:
    """Simulated dichromacy, in linear RGB (Viénot, Brettel and Mollon 1999)."""
    red, green, blue = channels(color)
    if kind == "protanopia":
        return 0.1121 * red + 0.8853 * green, 0.1127 * red + 0.8897 * green, 0.0045 * red - 0.0045 * green + blue
    return 0.2920 * red + 0.7054 * green, 0.2934 * red + 0.7089 * green, -0.02098 * red + 0.02559 * green + blue


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["protanopia", "deuteranopia"])
def test_a_leader_stands_out_for_the_colour_blind(kind: str, theme: str) -> None:
    """From every other role, also where red and green look alike."""
    for other in ("follower", "candidate", "unreachable"):
        one, two = as_seen(TOKENS["leader"][theme], kind), as_seen(TOKENS[other][theme], kind)
        assert sum(abs(a - b) for a, b in zip(one, two, strict=True)) > 0.1, other


def test_roles_have_shapes_of_their_own_and_words() -> None:
    """No meaning hangs on a colour alone (WCAG 2.2, 1.4.1)."""
    page = FILES["index.html"][0].decode()
    shapes = dict(re.findall(r'<symbol id="shape-([a-z]+)"[^>]*>(.*?)</symbol>', page))
    roles = ("leader", "follower", "candidate", "unreachable", "unknown", "plain")

    assert all(shapes[one] != shapes[two] for one, two in combinations(roles, 2))
    words = re.search(r"const ROLE = \{(.*?)\};", FILES["lanes.js"][0].decode(), re.DOTALL)
    assert words is not None
    assert all(f"{role}:" in words[1] for role in roles)


def test_motion_can_be_switched_off_and_focus_is_seen() -> None:
    """prefers-reduced-motion is respected; whatever has the focus has an outline."""
    assert "prefers-reduced-motion: reduce" in CSS
    assert re.search(r":focus-visible \{ outline: 3px solid", CSS)
    assert "outline: 0" not in CSS
