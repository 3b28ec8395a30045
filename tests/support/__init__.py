"""What the tests share: comparisons, poisoned and guarded memory, streams and graphs. See tests/conftest.py."""
