"""Model output to reasoning, content and tool calls: one incremental state machine a choice."""

from tokenspeed.runtime.parsers.call_grammar import call_grammar
from tokenspeed.runtime.parsers.families import REASONING_PARSERS, TOOL_PARSERS, families, make_parser
from tokenspeed.runtime.parsers.names import REASONING_ALIASES, TOOL_ALIASES
from tokenspeed.runtime.parsers.output import OutputParser
from tokenspeed.runtime.parsers.pieces import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Piece,
    Reasoning,
    Tool,
)
from tokenspeed.runtime.parsers.reasoning import answer_mark
from tokenspeed.runtime.parsers.strings import FreeformInput

__all__ = [
    "REASONING_ALIASES",
    "REASONING_PARSERS",
    "TOOL_ALIASES",
    "TOOL_PARSERS",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "FreeformInput",
    "OutputParser",
    "Piece",
    "Reasoning",
    "Tool",
    "answer_mark",
    "call_grammar",
    "families",
    "make_parser",
]
