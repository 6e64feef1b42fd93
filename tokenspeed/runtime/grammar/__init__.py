"""Structured output: what a request's text must look like, and the masks that make it so."""

from tokenspeed.runtime.grammar.structure import Structure, json_rule

__all__ = ["Structure", "json_rule"]
