"""Text that every machine has, and batches of it that depend on (seed, step, rank) alone."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

MAX_BYTES = 16 * 2**20  # more text than the demo can read; keeps start-up quick


def load_corpus(path: Path | None) -> torch.Tensor:
    """Bytes of a text, as a 1-D uint8 tensor.

    Args:
        path: A file, or a folder whose ``.py``, ``.txt`` and ``.md`` files are put end to end in
            the order of their names. None: the sources of the Python standard library.

    Raises:
        ValueError: If there is no text.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in root.rglob("*.py") if "site-packages" not in file.parts]
    elif path.is_dir():
        root = path
        files = [file for file in path.rglob("*") if file.suffix in (".py", ".txt", ".md")]
    else:
        root, files = path.parent, [path]
    text = bytearray()
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        if len(text) >= MAX_BYTES:
            break
        text += file.read_bytes()
    if not text:
        raise ValueError(f"no text found in {root}: name a file or a folder with --data")
    return torch.frombuffer(text[:MAX_BYTES], dtype=torch.uint8)


def batch(
    corpus: torch.Tensor, *, seed: int, index: int, rank: int, batch_size: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch number `index` of a rank: inputs and the bytes that follow them, (batch_size, context).

    Raises:
        ValueError: If the corpus is too short for one window.
    """
    num_starts = len(corpus) - context
    if num_starts < 1:
        raise ValueError(f"the text has {len(corpus)} bytes, too few for --context {context}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index * 10_007 + rank)
    starts = torch.randint(num_starts, (batch_size,), generator=generator)
    windows = corpus[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
