"""A SIMULATION of CUDA kernels, for tests only: see tests/cudasim/README.md.

    sim = Sim(ptx_text)
    src = sim.memory.upload(array)
    dst = sim.memory.allocate(nbytes)
    sim.launch(kernel_name, num_blocks, num_threads, argument_bytes)
    sim.memory.download(dst, dtype, count)

What is outside the subset raises Unsupported; what a kernel does wrong raises SimError.
"""

from .machine import Memory, Sim, SimError
from .parse import Unsupported

__all__ = ["Memory", "Sim", "SimError", "Unsupported"]
