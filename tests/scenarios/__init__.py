"""Small training runs, one per way in which a backward pass can reach a unit's weights.

`registry` keeps the scenarios by name, the files named after a theme add them, and
`driver.run_scenario` runs one on the ranks of the default process group and returns what differs
from an unsharded run.
"""
