"""Every code of an error of the compiler: what it means and what to do. Invariant: the codes that the sources raise are these,
neither more nor fewer, and docs/codes.md is this table.
"""

from __future__ import annotations

#: code -> (what is wrong, what to do)
CODES: dict[str, tuple[str, str]] = {
    "P001": ("an annotation or a declaration cannot be read", "write it as the message shows"),
    "P002": ("one annotation uses an axis twice", "drop one of the two uses: a rank has one coordinate on an axis"),
    "P003": ("an inner factor of a dim is sharded", "shard the outermost factor, or give the inner one a dim of its own"),
    "P004": ("an op is given operands that it does not take", "give it those that the message names"),
    "P005": ("an op got what is no value of the program, or was called outside a trace", "use values, numbers as factors, and compile"),
    "P006": ("a body branches on a value, or unpacks one", "make the program the same on every rank; select instead of branching"),
    "P010": ("operands are placed so that their blocks do not match", "place them alike, or `place` one of them"),
    "P011": ("an op that is not linear is given a pending sum", "reduce it first with `place`, or return it and do this in the composite"),
    "P012": ("a complete value is joined with a pending sum", "declare the weight pending, or `place` the sum first"),
    "P013": ("a value pending by max, argmax, topk or lse is used", "`place` it complete first: one reduction"),
    "P014": ("two operands shard a dim in unlike orders of axes", "write the axes in one order"),
    "P015": ("an op needs the whole of a dim that is sharded", "`place` it whole, or use the form that spans ranks (`norm_over`)"),
    "P016": ("an operand is pending over an axis that shards the other", "reduce the pending one first with `place`"),
    "P020": ("a signature declares another result than the body makes", "declare what is made, or `place` the value before it is returned"),
    "P030": ("no placement of the values serves all their consumers", "change the annotation of the value or the consumer named"),
    "P031": ("two axes of one signature share an axis of the mesh", "map them to unlike mesh axes (`--axes`)"),
    "P032": ("a dim does not divide over its ranks", "pad it (`pad=`), or use as many ranks as the message lists"),
    "P033": ("a group of heads ends inside an axis of the mesh", "split the mesh axis, or use as many ranks as divide the heads"),
    "P034": ("an axis, a dim or a mesh axis that nobody knows, or nobody uses", "correct its name in `--mesh`, `--axes` or the annotation"),
    "P035": ("a calibration table is missing or cannot be read", "name a shipped table, or write one with `tokenspeed calibrate`"),
    "P036": ("a dtype or a list of buckets that cannot be", "give a known dtype, and ascending positive buckets"),
    "P037": ("a tactic names no edge of the program", "take a name that `tokenspeed explain` prints"),
    "P038": ("a tactic asks for what no bucket allows", "take one of the choices that the message lists"),
    "P039": ("no plan keeps the memory limit", "smaller buckets, more ranks, a narrower dtype or a larger limit"),
    "V1": ("an op is no row of its rule table", "the program was edited, or the compiler is at fault: compile again, report it"),
    "V2": ("something pending leaves the program or is stored", "as V1"),
    "V3": ("a call or a result is not typed as its signature declares", "as V1"),
    "V4": ("an axis shards two dims, or orders of axes disagree", "as V1"),
    "V5": ("extents do not divide, or padding holds what a reader cannot bear", "as V1"),
    "V6": ("heads do not lie with their KV heads or their state", "as V1"),
    "V7": ("ranks that meet run unlike chains of collectives", "start every rank with the same artifact"),
    "V8": ("ranks that meet run unlike buckets, or an index crosses its home block", "start every rank with the same artifact"),
    "V9": ("a collective does not name its axes", "as V1"),
    "V10": ("a sum is left pending, or a collective serves nobody", "as V1"),
    "V11": ("a cache is written twice, or after it is read", "as V1"),
    "V12": ("a call has no kernel that is registered here", "install the plugin that has it, or compile again on this machine"),
    "V13": ("live buffers overlap", "as V1"),
    "V14": ("slices do not cover the checkpoint as often as types say", "as V1"),
    "V15": ("a bound kernel demands what its request does not promise", "compile again on this machine"),
    "V16": ("a printed program does not read back as itself", "as V1"),
    "V17": ("the reduced program computes other values than one rank", "as V1"),
}  # fmt: skip


def markdown() -> str:
    """The page docs/codes.md."""
    rows = "".join(f"| {code} | {meaning} | {fix} |\n" for code, (meaning, fix) in CODES.items())
    return (
        "# Codes of the compiler's errors\n\n"
        "P codes are an author's or a plan's, V codes the verifier's. Each message says where, the operands with what made them, "
        "the reason,\nthe fixes with what they cost, cheapest first, and, where an op would go wrong, numbers that two ranks "
        "would compute.\nEach code is provoked, and shown to be absent once mended, in `tests/compiler/test_codes.py` (P) and "
        "`tests/compiler/test_rules.py` (V).\nThis page is printed by `tokenspeed env --codes`.\n\n"
        f"| code | what is wrong | what to do |\n|---|---|---|\n{rows}"
    )
