"""All cases: importing a theme's file is what puts its cases on the list."""

from __future__ import annotations

from . import (
    backward,
    environment,
    failures,
    loading,
    loops,
    ordinary,
    parameters,
    precision,
    registry,
    staleness,
    surface,
    transforms,
)

THEMES = (
    ordinary,
    backward,
    loops,
    failures,
    staleness,
    parameters,
    precision,
    loading,
    surface,
    transforms,
    environment,
)


def run_case(rank: int, world_size: int, name: str) -> str | None:
    """`registry.run_case` with all themes loaded: what the workers are sent."""
    return registry.run_case(rank, world_size, name)
