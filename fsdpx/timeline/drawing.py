"""Writes a timeline's picture as SVG (plain Python) or PNG (matplotlib)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from fsdpx.timeline.picture import Box, Line, Picture, Shape, Text, draw
from fsdpx.timeline.records import Record

ARROW = (
    '<defs><marker id="arrow" orient="auto" viewBox="0 0 8 8" refX="7" refY="4" '
    'markerWidth="8" markerHeight="8"><path d="M0 0L8 4L0 8z"/></marker></defs>'
)
DPI = 100


def to_svg(records: Sequence[Record], *, title: str, width: float | None = None) -> str:
    """The picture of ``records`` as an SVG document; see :func:`write_svg`."""
    picture = draw(records, title=title, width=width)
    size = f"{picture.width:g} {picture.height:g}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" '
        f'width="{picture.width:g}" height="{picture.height:g}" font-family="sans-serif">'
    )
    ground = f'<rect width="{picture.width:g}" height="{picture.height:g}" fill="white"/>'
    body = [_svg_element(shape) for shape in picture.shapes]
    return "\n".join([head, ARROW, ground, *body, "</svg>", ""])


def write_svg(
    path: str | os.PathLike[str],
    records: Sequence[Record],
    *,
    title: str = "fsdpx timeline",
    width: float | None = None,
) -> None:
    """Draws ``records`` into the SVG file ``path``, in lanes, with details on hovering.

    Args:
        path: The file to write.
        records: What to draw; usually one step of one rank.
        title: The line at the top.
        width: Pixels; by default as wide as the number of spans asks for, within limits.

    Raises:
        ValueError: If there are no records.
    """
    text = to_svg(records, title=title, width=width)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def _svg_element(shape: Shape) -> str:
    match shape:
        case Box():
            dash = ' stroke-dasharray="5 3"' if shape.dashed else ""
            kind = f" class={quoteattr(shape.kind)}" if shape.kind else ""
            hover = f"<title>{escape(shape.hover)}</title>" if shape.hover else ""
            return (
                f'<rect{kind} x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" '
                f'height="{shape.height:.2f}" rx="{shape.radius:.2f}" fill="{shape.fill}" '
                f'stroke="{shape.stroke}" stroke-width="{_stroke_width(shape):g}"{dash}>'
                f"{hover}</rect>"
            )
        case Text():
            turn, shift = "", ""
            if shape.upright:
                turn = f' transform="rotate(-90 {shape.x:.2f} {shape.y:.2f})"'
                shift = ' dy="0.35em"'
            # Labels let the pointer through, so that hovering on one shows its box's details.
            return (
                f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" '
                f'fill="{shape.color}" text-anchor="{shape.anchor}" pointer-events="none"'
                f"{shift}{turn}>{escape(shape.text)}</text>"
            )
        case Line():
            dash = ' stroke-dasharray="3 3"' if shape.dashed else ""
            arrow = ' marker-end="url(#arrow)"' if shape.arrow else ""
            return (
                f'<line x1="{shape.x1:.2f}" y1="{shape.y1:.2f}" x2="{shape.x2:.2f}" '
                f'y2="{shape.y2:.2f}" stroke="{shape.color}" stroke-width="{shape.width:g}"'
                f"{dash}{arrow}/>"
            )


def _stroke_width(box: Box) -> float:
    """Thin boxes get a thin border, or they would be nothing but border."""
    return 1.5 if box.width >= 12 else max(box.width / 8, 0.25)


def write_png(
    path: str | os.PathLike[str],
    records: Sequence[Record],
    *,
    title: str = "fsdpx timeline",
    width: float | None = None,
) -> None:
    """Draws ``records`` into the PNG file ``path``; arguments as for :func:`write_svg`.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If there are no records.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
        patches = importlib.import_module("matplotlib.patches")
    except ImportError as error:
        raise ImportError(
            "write_png needs matplotlib: pip install 'fsdpx[plot]' (write_svg needs nothing)"
        ) from error
    picture = draw(records, title=title, width=width)
    figure = figures.Figure(figsize=(picture.width / DPI, picture.height / DPI), dpi=DPI)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.set_axis_off()
    _plot(axes, patches, picture)
    figure.savefig(path, format="png", facecolor="white")


def _plot(axes: Any, patches: Any, picture: Picture) -> None:
    points = 72 / DPI  # matplotlib counts letters and lines in points, we in pixels
    for order, shape in enumerate(picture.shapes):
        match shape:
            case Box():
                patch = patches.FancyBboxPatch(
                    (shape.x, shape.y),
                    shape.width,
                    shape.height,
                    boxstyle=f"round,pad=0,rounding_size={shape.radius}",
                    facecolor=shape.fill,
                    edgecolor=shape.stroke,
                    linewidth=_stroke_width(shape) * points,
                    linestyle="--" if shape.dashed else "-",
                    zorder=order,
                )
                axes.add_patch(patch)
            case Text():
                axes.text(
                    shape.x,
                    shape.y,
                    shape.text,
                    fontsize=shape.size * points,
                    color=shape.color,
                    ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                    va="center" if shape.upright else "baseline",
                    rotation=90 if shape.upright else 0,
                    zorder=order,
                )
            case Line():
                style = "-|>" if shape.arrow else "-"
                axes.annotate(
                    "",
                    xy=(shape.x2, shape.y2),
                    xytext=(shape.x1, shape.y1),
                    zorder=order,
                    arrowprops={
                        "arrowstyle": style,
                        "color": shape.color,
                        "linewidth": shape.width * points,
                        "linestyle": ":" if shape.dashed else "-",
                        "shrinkA": 0,
                        "shrinkB": 0,
                    },
                )
