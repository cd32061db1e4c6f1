"""`python -m fsdpx.verify module:model_fn module:batch_fn`, in one process or under torchrun."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

import torch.distributed as dist

from . import verify


def main() -> int:
    """Prints the report on rank 0. Returns 1 if anything differs by more than the limit."""
    parser = argparse.ArgumentParser(prog="python -m fsdpx.verify", description=verify.__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model_fn", type=_named, help="module:function that makes the model")
    parser.add_argument("batch_fn", type=_named, help="module:function of (rank, step)")
    parser.add_argument("--shard", type=_named, help="module:function that shards the model")
    parser.add_argument("--loss-fn", type=_named, help="module:function of (model, batch)")
    parser.add_argument("--optimizer", type=_named, help="module:function of a parameter list")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--limit", type=float, default=1e-5, help="of relative differences")
    given = parser.parse_args()
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    options = {
        name: getattr(given, name)
        for name in ("shard", "loss_fn", "optimizer")
        if getattr(given, name) is not None
    }
    report = verify(
        given.model_fn, given.batch_fn, num_steps=given.steps, max_norm=given.max_norm, **options
    )
    ok = report.worst <= given.limit
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(report)
        print(f"{'equal' if ok else 'DIFFERENT'} (limit {given.limit:.1e})")
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if ok else 1


def _named(text: str) -> Any:
    """The object at `module:attribute`, looked for in the current directory too."""
    module, _, name = text.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    finally:
        sys.path.pop(0)


if __name__ == "__main__":
    sys.exit(main())
