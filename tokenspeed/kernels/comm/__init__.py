"""Collectives between the ranks of a process group."""
