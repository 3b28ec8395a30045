"""Peers: other ways to do the same work, for the benches."""
