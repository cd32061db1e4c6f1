"""Checks a wheel: `python tests/check_wheel.py dist/fsdpx-*.whl`.

It must hold the native module, its build information and the typing marker, hold no tests, and
import from where it is unpacked.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIRED = ("fsdpx/__init__.py", "fsdpx/_C.", "fsdpx/_build_info.py", "fsdpx/py.typed")


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        missing = [part for part in REQUIRED if not any(name.startswith(part) for name in names)]
        strange = [name for name in names if not name.startswith("fsdpx")]
        if missing or strange:
            raise SystemExit(f"{wheel}: missing {missing}, not of the package {strange}")
        archive.extractall(folder)
        program = "import fsdpx, fsdpx._C; print(fsdpx.__file__)"
        where = subprocess.run(
            [sys.executable, "-c", program],
            cwd=folder,
            env={"PYTHONPATH": folder},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if not where.startswith(folder):
            raise SystemExit(f"{wheel}: imported {where} instead of the unpacked package")
    print(f"wheel: {wheel} holds {len(names)} files and imports")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
