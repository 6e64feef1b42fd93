"""Mixture of experts: one module a solution."""
