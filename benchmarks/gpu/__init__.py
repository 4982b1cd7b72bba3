"""Everything that only a GPU can show, as one command: `make gpu`, or `python -m benchmarks.gpu --out DIR`.

Until it has found out what the machine has, it needs the standard library alone.
"""
