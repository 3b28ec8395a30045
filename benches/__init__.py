"""Benches: one module a kernel, `python -m benches.<import name>`; the protocol is in benches.harness."""
