"""Mutated outputs through every parser: none raises, none depends on chunks, calls come in order.

python -m tests.front.fuzz_parsers --outputs 100000 --seed 1
"""

from __future__ import annotations

import argparse
import random
import re

from tests.front.outputs import SAMPLES, Sample, parse
from tokenspeed.runtime.parsers import CallArguments, CallBegin, CallEnd, Piece

_MARKS = sorted({mark for sample in SAMPLES for mark in re.findall(r"<[^<>\s]*>|\[[A-Z_/]+\]|◁.*?▷", sample.text)})
_SIGNS = [*"[]{}\"'\\(),:=<>\n ", "\\u", "\\ud83d", "null", "é", "😀", '{"name": "now", "arguments": {', "now"]
LONGEST = 3000  # characters


def mutant(chance: random.Random, text: str) -> str:
    """`text` with some pieces cut out, doubled, put in, or its end cut off."""
    for _ in range(chance.randrange(1, 6)):
        a, b = sorted((chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)))
        kind = chance.randrange(5)
        if kind == 0:
            text = text[:a] + text[min(b, a + 9) :]
        elif kind == 1:
            text = text[:b] + text[a:b] + text[b:]
        elif kind == 2:
            text = text[:a] + chance.choice(_MARKS) + text[a:]
        elif kind == 3:
            text = text[:a] + chance.choice(_SIGNS) + text[a:]
        else:
            text = text[:b]
    return text[:LONGEST]


def check(sample: Sample, text: str, chance: random.Random) -> None:
    """AssertionError where the parser of a sample breaks its promises on `text`."""
    whole = parse(sample.parser(), [text])
    for piece in whole:
        getattr(piece, "text", "").encode()  # no half of a surrogate pair
    assert parse(sample.parser(), list(text)) == whole, text
    a, b = sorted((chance.randrange(len(text) + 1), chance.randrange(len(text) + 1)))
    assert parse(sample.parser(), [text[:a], text[a:b], text[b:]]) == whole, text
    try:
        check_order(whole)
    except AssertionError:
        raise AssertionError(f"{text!r}: {whole}") from None


def check_order(pieces: tuple[Piece, ...]) -> None:
    """Calls have the indices 0, 1, ..., do not overlap, and end."""
    count, opened = 0, False
    for piece in pieces:
        match piece:
            case CallBegin(index=index, name=name):
                assert name and index == count and not opened
                opened = True
            case CallArguments(index=index):
                assert index == count and opened
            case CallEnd(index=index):
                assert index == count and opened
                count, opened = count + 1, False
            case _:
                assert not opened
    assert not opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    for _ in range(args.outputs):
        sample = chance.choice(SAMPLES)
        check(sample, mutant(chance, sample.text), chance)
    print(f"{args.outputs} outputs, seed {args.seed}: no fault")


if __name__ == "__main__":
    main()
