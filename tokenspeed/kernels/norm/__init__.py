"""Normalisation."""
