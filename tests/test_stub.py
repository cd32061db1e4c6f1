"""The typing stub names exactly what the native module has: mypy cannot look into it."""

from __future__ import annotations

import ast

from source_model import ROOT

from fsdpx import _C


def stub_names(body: list[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """Public names of a stub's module or class, with the bodies of classes."""
    names: dict[str, list[ast.stmt]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            names[node.name] = node.body
        elif isinstance(node, ast.FunctionDef):
            names[node.name] = []
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = []
    return {name: inner for name, inner in names.items() if not name.startswith("_")}


def runtime_names(owner: object) -> set[str]:
    """Public names of a module, or those that a class adds to its bases."""
    names = vars(owner) if isinstance(owner, type) else dir(owner)
    return {name for name in names if not name.startswith("_")}


def test_stub_matches_module() -> None:
    stub = stub_names(ast.parse((ROOT / "fsdpx" / "_C.pyi").read_text()).body)
    assert set(stub) == runtime_names(_C)
    classes = {name: body for name, body in stub.items() if isinstance(getattr(_C, name), type)}
    assert len(classes) > 3
    for name, body in classes.items():
        assert set(stub_names(body)) == runtime_names(getattr(_C, name)), name
