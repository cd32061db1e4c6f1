"""Reads the project's own sources for tests/test_structure.py: functions, imports, includes."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE_SUFFIXES = {".py", ".pyi", ".h", ".cpp", ".cu", ".cuh"}
NATIVE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


@dataclass(frozen=True)
class Function:
    """A function's place: `lines` counts from its header (decorators aside) to its end."""

    name: str
    line: int
    lines: int


def tracked_files() -> list[Path]:
    """Files of the project: git's list (new files included), or everything in a plain copy."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        files = [ROOT / name for name in listed.splitlines()]
    except (OSError, subprocess.CalledProcessError):
        skipped = re.compile(r"/(build|dist|out|\.venv[^/]*|\.git|__pycache__|[^/]*\.egg-info)/")
        files = [path for path in ROOT.rglob("*") if not skipped.search(f"{path}/")]
    return sorted(path for path in files if path.is_file())


def python_functions(source: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(
                node.name,
                node.lineno,
                (node.end_lineno or 0) - node.lineno + 1 - _docstring_lines(node),
            )


def _docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the docstring: a long contract is no long function."""
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def python_imports(source: str, package: str) -> Iterator[tuple[str, int]]:
    """(absolute module or module.name, line) of each import that runs; type-only ones do not."""
    tree = ast.parse(source)
    type_only: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            type_only.update(inner for part in node.body for inner in ast.walk(part))
    for node in ast.walk(tree):
        if node in type_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


_CPP_TOKENS = re.compile(
    r"""
    //[^\n]*                              # comments
  | /\*.*?\*/
  | R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)"   # raw strings
  | "(?:\\.|[^"\\\n])*"                   # strings
  | (?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+'  # characters, not digit separators
  | ^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*        # preprocessor lines with their continuations
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def blank_cpp(source: str) -> str:
    """The source with comments, literals and preprocessor lines gone and all line breaks kept."""
    return _CPP_TOKENS.sub(lambda match: "\n" * match.group().count("\n") or " ", source)


def _drop_template_heads(text: str) -> str:
    """Removes `template <...>` prefixes: their `class` is no class."""
    while match := re.search(r"\btemplate\s*<", text):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"<": 1, ">": -1}.get(text[end], 0)
            end += 1
        text = text[: match.start()] + text[end:]
    return text


def _is_scope(header: str) -> bool:
    """Whether the braces after `header` hold declarations (namespace, class) and not code."""
    head = _drop_template_heads(header).strip()
    if re.search(r"\b(namespace|extern)\b[^()]*$", head):
        return True
    head = re.sub(r"\balignas\s*\([^)]*\)", "", head).strip()
    return bool(re.match(r"(typedef\s+|static\s+|inline\s+)*(class|struct|union)\b[^()=]*$", head))


def _matching_brace(text: str, start: int) -> int:
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise ValueError(f"a brace opened on line {text.count(chr(10), 0, start) + 1} is never closed")


def cpp_functions(source: str) -> Iterator[Function]:
    """Functions and methods, lambdas inside them included; tables and enums are not functions.

    A declaration runs from the end of the previous one to its last closing brace; one with a
    parameter list and a body is a function.
    """
    text = blank_cpp(source)
    begin, position, parens = 0, 0, 0
    while position < len(text):
        char = text[position]
        if char in "()":
            parens += 1 if char == "(" else -1
        elif (char == ";" and parens == 0) or char == "}":
            begin = position + 1
        elif char == "{":
            header = text[begin:position]
            if parens == 0 and _is_scope(header):
                begin = position + 1
            else:
                position = _matching_brace(text, position)
                rest = text[position + 1 :].lstrip()
                # `: a_{1}, b_{2} {`: the body of a constructor is still to come.
                if parens == 0 and not rest.startswith((",", "{", ";", ")", ".")):
                    yield from _as_function(text, begin, header, position)
                    begin = position + 1
                elif parens == 0 and rest.startswith(";"):
                    yield from _as_function(text, begin, header, position)
        position += 1


def _as_function(text: str, begin: int, header: str, end: int) -> Iterator[Function]:
    head = _drop_template_heads(header)
    is_data = re.search(r"=\s*$", head) or re.search(r"\benum\b", head)
    if "(" not in head or is_data:
        return
    first = begin + len(text[begin:end]) - len(text[begin:end].lstrip())
    name = re.search(r"([\w~:]+|operator\s*\S+)\s*\(", head)
    line = text.count("\n", 0, first) + 1
    yield Function(name.group(1) if name else "?", line, text.count("\n", first, end) + 1)


def cpp_includes(source: str) -> Iterator[tuple[str, int]]:
    """(header with its quotes or brackets, line) of each include."""
    for number, line in enumerate(source.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*([<"][^>"]+[>"])', line)
        if match:
            yield match.group(1), number
