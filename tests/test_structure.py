"""The house rules: sizes, layers, and what the native core may include."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from source_model import (
    CODE_SUFFIXES,
    NATIVE_SUFFIXES,
    ROOT,
    Function,
    cpp_functions,
    cpp_includes,
    python_functions,
    python_imports,
    tracked_files,
)

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# A file depends only on rows above it here (a package counts as one file).
PYTHON_ROWS = (
    ("_C", "_build_info"),
    ("_native", "errors", "events", "dtypes"),
    ("policies", "layout", "zero", "states", "probe", "torch_private"),
    ("reference",),
    ("ops",),
    ("shard_ops",),
    ("comm",),
    ("memory", "staging"),
    ("parameter",),
    ("mesh",),
    ("shards",),
    ("unit",),
    ("post_forward",),
    ("gradients", "collect", "order", "progress", "attributes", "residency"),
    ("conversions",),
    ("schedule", "changes", "copies", "backward_inputs"),
    ("hooks",),
    ("module", "describe", "full_parameters", "flat_parameters", "clip", "sync"),
    ("fully_shard",),
    ("fsdp1",),
    ("timeline", "checkpoint", "verify"),
    ("__init__",),
)
# Files of one native row may include each other. The first pattern that matches a name decides.
NATIVE_ROWS = (
    r"check|dtype|element|adamw|float_environment|shard_passes|cuda/(?!device_|nccl|nvlink|watchdog).*",
    r"kernels.*",
    r"stream|worker_stream|trace|communicator|comm_.*|shm_.*|exchange_communicator.*|cuda/.*",
    r"torch_.*",
    r"bind_.*|bindings",
)
FACES_TORCH = re.compile(r"csrc/(torch_|bind)")
TORCH_OR_PYTHON = re.compile(r"[<\"](torch|ATen|c10|caffe2|pybind11)/|[<\"]Python\.h")
COLLECTIVES = re.compile(
    r"^(all_gather|all_reduce|reduce_scatter|broadcast|all_to_all|barrier|scatter|gather|reduce"
    r"|isend|irecv|send|recv)(_into_tensor|_tensor|_single|_object|_object_list|_coalesced)?$"
)

FILES = tracked_files()
CODE = [path for path in FILES if path.suffix in CODE_SUFFIXES]
NATIVE = [path for path in CODE if path.suffix in NATIVE_SUFFIXES]
CORE = [path for path in NATIVE if "csrc" in path.parts]
PACKAGE = [p for p in CODE if p.suffix == ".py" and p.is_relative_to(ROOT / "fsdpx")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions_of(path: Path) -> list[Function]:
    source = path.read_text()
    found = python_functions(source) if path.suffix in (".py", ".pyi") else cpp_functions(source)
    return list(found)


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_sizes(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= MAX_FILE_LINES, f"{name_of(path)} has {num_lines} lines: split it"
    long = [f for f in functions_of(path) if f.lines > MAX_FUNCTION_LINES]
    assert not long, f"{name_of(path)}: split {long}"


def python_row(module: str) -> int:
    for row, names in enumerate(PYTHON_ROWS):
        if module in names:
            return row
    raise AssertionError(f"fsdpx.{module} has no row in PYTHON_ROWS: add it where it belongs")


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_python_layers(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    own = parts[1]
    package = ".".join(parts[:-1])
    wrong = []
    for target, line in python_imports(path.read_text(), package):
        words = target.split(".")
        if words[0] != "fsdpx":
            continue
        imported = words[1] if len(words) > 1 else "__init__"
        if not any(imported in names for names in PYTHON_ROWS) and words[:-1] == ["fsdpx"]:
            imported = "__init__"  # `from fsdpx import something_public`
        if imported != own and python_row(imported) >= python_row(own):
            wrong.append(f"line {line} imports {target}")
    assert not wrong, f"{name_of(path)}: {wrong}"


@pytest.mark.parametrize("path", PACKAGE, ids=name_of)
def test_only_comm_runs_collectives(path: Path) -> None:
    if path.is_relative_to(ROOT / "fsdpx" / "comm"):
        return
    if path == ROOT / "fsdpx" / "parameter" / "collectives.py":  # reads of whole parameters
        return
    calls = [
        f"line {node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("dist", "torch.distributed", "distributed", "c10d")
        and COLLECTIVES.match(node.func.attr)
    ]
    assert not calls, f"{name_of(path)}: {calls}"


def native_row(name: str) -> int:
    for row, pattern in enumerate(NATIVE_ROWS):
        if re.fullmatch(pattern, name):
            return row
    raise AssertionError(f"csrc/{name} has no row in NATIVE_ROWS: add it where it belongs")


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_native_layers(path: Path) -> None:
    base = ROOT / "csrc"
    own = native_row(path.relative_to(base).with_suffix("").as_posix())
    wrong = []
    for header, line in cpp_includes(path.read_text()):
        if header.startswith('"'):
            inner = next((p for p in (path.parent, base) if (p / header[1:-1]).exists()), None)
            assert inner is not None, f"{name_of(path)}:{line}: {header} does not exist"
            target = (inner / header[1:-1]).resolve().relative_to(base)
            if native_row(target.with_suffix("").as_posix()) > own:
                wrong.append(f"line {line} includes {header}")
    assert not wrong, f"{name_of(path)}: {wrong}"


@pytest.mark.parametrize("path", CORE, ids=name_of)
def test_core_knows_neither_torch_nor_python(path: Path) -> None:
    if FACES_TORCH.match(name_of(path)):
        return
    includes = cpp_includes(path.read_text())
    wrong = [f"line {line}: {header}" for header, line in includes if TORCH_OR_PYTHON.match(header)]
    assert not wrong, f"{name_of(path)}: {wrong}"


def test_cmake_lists_every_source() -> None:
    text = (ROOT / "CMakeLists.txt").read_text()
    listed = re.findall(r"^\s+(csrc/\S+\.(?:cpp|cu))$", text, re.MULTILINE)
    present = {name_of(path) for path in CORE if path.suffix in (".cpp", ".cu")}
    assert len(listed) == len(set(listed)), "a source is listed twice"
    assert present - set(listed) == set(), "sources that CMakeLists.txt does not build"


def test_no_machine_paths() -> None:
    private = re.compile(r"(?<![\w.])/(work|root|home/\w+)/")
    wrong = []
    for path in FILES:
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        wrong += [f"{name_of(path)}:{n}" for n, line in enumerate(lines, 1) if private.search(line)]
    assert not wrong, f"paths of one machine: {wrong}"


def test_no_unfinished_work() -> None:
    marker = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    wrong = [
        f"{name_of(path)}:{number}"
        for path in CODE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marker.search(line)
    ]
    assert not wrong, f"unfinished: {wrong}"


CPP_SAMPLE = """
#include <x.h>
#define MACRO(a) \\
  if (a) {
namespace a::b {
enum class E { kOne, kTwo };
constexpr int kTable[] = {
  1,
  2,
};
template <class T, typename U = std::vector<int>>
struct S : Base<T> {
  explicit S(int x) : a_{x}, b_{"}"} {
    go([&] { return '{'; });
  }
  int get() const { return 1'000; }  // }
  int field = f({1, 2});
};
/* { */ void long_one(int a,
                      std::function<void()> f = {}) {
  if (a) {
    for (;;) { }
  }
}
}
"""


def test_functions_of_cpp_are_found() -> None:
    found = [(f.name, f.line, f.lines) for f in cpp_functions(CPP_SAMPLE) if f.name != "f"]
    assert found == [("S", 13, 3), ("get", 16, 1), ("long_one", 19, 6)]


def test_imports_are_resolved() -> None:
    source = "import a.b\nfrom . import x\nfrom ..m import y\nif TYPE_CHECKING:\n    import z\n"
    assert list(python_imports(source, "fsdpx.comm")) == [
        ("a.b", 1),
        ("fsdpx.comm.x", 2),
        ("fsdpx.m.y", 3),
    ]
