"""The curve of rewards as a small picture, without a package for it."""

from __future__ import annotations

from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 560, 260, 48, 36


def draw(curve: list[dict[str, float]], before: float, after: float, file: Path) -> None:
    """Mean reward of each step, and the share of held-out questions that were right before and after."""
    last = curve[-1]

    def place(step: float, share: float) -> tuple[float, float]:
        right, down = WIDTH - LEFT - 16, HEIGHT - TOP - 40
        return LEFT + right * step / last["step"], TOP + down * (1 - share)

    points = " ".join("{:.1f},{:.1f}".format(*place(row["step"], row["reward"])) for row in curve)
    parts = [
        f'<text x="{LEFT}" y="20" font-weight="bold">mean reward of {last["step"]} steps, {last["seconds"]:.0f} s; '
        "held-out sums right: dots</text>"
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        (left, y), (right, _) = place(0, share), place(last["step"], share)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{share:g}</text>')
    parts.append(f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>')
    for step, share in ((0, before), (last["step"], after)):
        x, y = place(step, share)
        parts.append(f'<circle cx="{x}" cy="{y:.1f}" r="4" fill="#d62728"/>')
        anchor = "start" if step == 0 else "end"
        parts.append(
            f'<text x="{x}" y="{y - 9:.1f}" text-anchor="{anchor}" fill="#d62728">{share:.1%}</text>'
        )
    x, y = place(last["step"], 0)
    parts.append(f'<text x="{x}" y="{y + 20}" text-anchor="end">step {last["step"]}</text>')
    style = f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12"'
    text = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {style}>\n<rect width="100%" height="100%" fill="white"/>\n'
    )
    file.write_text(text + "\n".join(parts) + "\n</svg>\n")
