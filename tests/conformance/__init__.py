"""Cases from public fault reports of sharded data parallelism, reduced to small models.

`registry` keeps the cases by name, the files named after a theme add them, and `registry.run_case`
runs one on a rank of the default process group. A case asserts what must hold.
"""
