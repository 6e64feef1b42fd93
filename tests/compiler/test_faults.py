"""Faults that placement compilers and sharded engines had elsewhere, each in miniature under its source's short name.

Three kinds: an edit of a program that makes the fault, and is refused; a layout on which it showed, whose tokens are one
rank's; a leaf that would need it, and is refused. What is wider than these has a test of its own below.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor

from tests.compiler import layouts
from tests.compiler.sim import Steps, compile_tiny, random_weights, tiny
from tests.compiler.test_errors import Author
from tests.ir.test_verifier import untyped
from tokenspeed.compiler.api import compile_model
from tokenspeed.compiler.costs import load_costs
from tokenspeed.compiler.passes.pipeline import Request, prepare, run_passes
from tokenspeed.compiler.passes.repair import Repairs
from tokenspeed.ir.errors import PlanError, TokenSpeedError, VerifyError
from tokenspeed.ir.mesh import make_plan, parse_mesh
from tokenspeed.ir.ops import OPS
from tokenspeed.ir.text import parse_program
from tokenspeed.ir.types import Dim, Type
from tokenspeed.ir.verifier import verify
from tokenspeed.models import find_family
from tokenspeed.models.llama import Attention, CausalLM
from tokenspeed.models.nn import (
    Batch,
    Config,
    Linear,
    Mixture,
    Module,
    RMSNorm,
    Routed,
    Stream,
    Weight,
    gelu,
    lookup,
    place,
    select_rows,
)

torch.set_num_threads(1)

# ---- edits of programs -----------------------------------------------------------------------------------------------

PLANS = {
    "experts": ("Mixture", "dp=2,tp=2", "ep=dp,etp=tp,se=tp", "h200"),
    "dense": ("LlamaForCausalLM", "tp=2", "", "h200"),
    "fused": ("LlamaForCausalLM", "tp=2", "", "cpu"),
}


@functools.cache
def program(plan: str) -> str:
    """One bucket's program, without the types that the compiler prints beside its ops."""
    model, mesh, axes, costs = PLANS[plan]
    fused = frozenset({"all_reduce_add_rms_norm"}) if plan == "fused" else frozenset()
    request = Request(
        layouts.Mixture if model == "Mixture" else find_family(model), Config(layouts.config(model)),
        make_plan(parse_mesh(mesh), axes), [(4, 2)], "f32", "f32", load_costs(costs), variants=("gumbel",), collectives=fused,
    )  # fmt: skip
    return untyped(next(iter(run_passes(request).texts.values())))


MIX = "%layers.1.mix.add' = all_reduce %layers.1.mix.add {axes=('dp', 'tp')}"
ONCE, AGAIN = MIX.replace("mix.add'", "mix.once"), MIX.replace("mix.add {", "mix.once {")
SHARED = "%layers.1.mix.shared' = keep_first %layers.1.mix.shared {axes=('dp',)}"
ADD = "%layers.1.mix.add = add %layers.1.mix.routed, %layers.1.mix.shared'"
EMBED = "%embed' = all_reduce %embed {axes=('tp',)}"
NEXT = "%layers.0.norm1 = rms_norm %embed'"
BEST = "%sampler.gumbel' = all_reduce %sampler.gumbel {axes=('tp',), kind='argmax'}"
FUSED = "= all_reduce_add_rms_norm %embed', %layers.0.attn, @layers.0.norm2"

#: source and fault -> the plan, the edit, and the rule that refuses it
EDITS: dict[str, tuple[str, str, str, str]] = {
    "vllm#49122: the shared expert is reduced alone, and again in the sum": (
        "experts", SHARED, "%layers.1.mix.shared' = all_reduce %layers.1.mix.shared {axes=('tp',)}", "V1"),
    "sglang#35535: a whole shared expert in a sum that is reduced later": (
        "experts", ADD, ADD.removesuffix("'"), "V1"),
    "tpu-inference#3435: the shared expert's sum is never reduced": (
        "experts", MIX, MIX.replace("('dp', 'tp')", "('dp',)"), "V1"),
    "tpu-inference#3151: a sum that is whole already is reduced with others": (
        "experts", MIX, ONCE + "\n  " + AGAIN, "V1"),
    "sglang#32963: experts' sums reduced over one of their two groups": (
        "experts", MIX, MIX.replace("('dp', 'tp')", "('tp',)"), "V1"),
    "tokenspeed#1713: the shared expert is split on one group and reduced over another": (
        "experts", "weight @down: f32[h, fs@tp]", "weight @down: f32[h, fs@dp]", "V1"),
    "tokenspeed#419: rows are gathered over another group than that of the experts": (
        "experts", "all_gather %layers.1.add {axes=('dp',), dim='t'}", "all_gather %layers.1.add {axes=('tp',), dim='t'}", "V1"),
    "xla#40034: a pending sum becomes blocks without a reduction": (
        "dense", EMBED, "%embed' = slice %embed {axes=('tp',), dim='t'}", "V1"),
    "xla#42481: rows are sliced before the sum of a vocabulary's lookup is reduced": (
        "dense", EMBED, "%early = slice %embed {axes=('tp',), dim='t'}\n  %embed' = all_reduce %early {axes=('tp',)}", "V1"),
    "sglang#36879: a scatter of sums is missing": (
        "dense", EMBED, "%part = slice %embed {axes=('tp',), dim='h'}\n  %embed' = all_gather %part {axes=('tp',), dim='h'}", "V1"),
    "pytorch/xla#5279: a collective without a group": ("dense", EMBED, EMBED.replace("('tp',)", "()"), "V9"),
    "tt-metal#50657: a type still pending behind its reduction": (
        "dense", EMBED, EMBED + " : f32[t, h] +tp", "V1"),
    "torchtitan#2416: a pending value labelled whole": (
        "dense", "%layers.0.norm1 = rms_norm %embed'", "%layers.0.norm1 = rms_norm %embed", "V1"),
    "tt-mlir#8623: the best ids of ranks are summed": ("dense", BEST, BEST.replace(", kind='argmax'", ""), "V1"),
    "pytorch#173936: the best id of each rank's part taken for the best of all": (
        "dense", "return %sampler.gumbel'", "return %sampler.gumbel", "V2"),
    "vllm#41972: a fused kernel without its residual": (
        "fused", FUSED, FUSED.replace("%embed', ", ""), "V1"),
    "TensorRT-LLM#10838: a collective that does not name its axes": ("dense", EMBED, EMBED.replace("{axes=('tp',)}", "{}"), "V1"),
    "TensorRT-LLM#4308: KV heads whole, query heads split": (
        "dense", "f32[kv@tp, d, h] | f32[kv@tp, d, h]", "f32[kv, d, h] | f32[kv, d, h]", "V4"),
}  # fmt: skip


@pytest.mark.parametrize("fault", EDITS)
def test_the_edited_program_is_refused(fault: str) -> None:
    plan, old, new, code = EDITS[fault]
    verify(parse_program(program(plan)))
    assert old in program(plan)
    with pytest.raises(TokenSpeedError) as refusal:
        verify(parse_program(program(plan).replace(old, new)))
    assert isinstance(refusal.value, VerifyError) and refusal.value.code == code, refusal.value


# ---- layouts on which it showed --------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[str, str, str]] = {
    "sglang#35535: a shared expert on every rank beside split experts": ("Mixture", "tp=2", "ep=1,etp=tp,se=1"),
    "tpu-inference#3435: a shared expert on tp under attention on dp": ("Mixture", "dp=2,tp=2", "ep=dp*tp,etp=1,se=tp"),
    "sglang#32963: experts and their width on unlike groups": ("Mixture", "dp=2,tp=2", "ep=dp,etp=tp,se=1"),
    "tokenspeed#1713: a shared expert on another group than the experts": ("Mixture", "dp=2,tp=2", "ep=tp,etp=dp,se=dp"),
    "tokenspeed#419: experts on more ranks than attention": ("Qwen3MoeForCausalLM", "dp=2,tp=2", "ep=1,etp=dp*tp"),
    "pytorch#143372: a view of heads that do not divide": ("MiniMaxM2ForCausalLM", "a=2,b=3", "tp=a*b,vp=a*b"),
    "LlamaFactory#10794: fewer KV heads than ranks of tp and cp": ("LlamaForCausalLM", "cp=2,tp=4", ""),
    "vllm#31474: a vocabulary that does not divide": ("LlamaForCausalLM", "tp=4", "mlp=1"),
    "Megatron-LM#1754: an uneven vocabulary on three ranks": ("LlamaForCausalLM", "a=2,b=3", "tp=a,mlp=b,vp=b"),
    "tinygrad#5130: fewer rows than ranks": ("LlamaForCausalLM", "dp=2,a=2,b=2", "tp=a*b"),
    "vllm#48324: float32 weights of a norm beside a fused reduction": ("Gemma3ForCausalLM", "tp=2", ""),
    "vllm#25906: a home group without a request": ("Qwen3MoeForCausalLM", "dp=4", "ep=dp,etp=1,mlp=dp"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LAYOUTS)
def test_tokens_are_one_rank_s(fault: str) -> None:
    assert layouts.run(layouts.Trial(*LAYOUTS[fault], seed=0)) >= 5


# ---- leaves ----------------------------------------------------------------------------------------------------------

UP = 'self.up, self.down = Linear("h -> f@mlp"), Linear("f@mlp -> h")'
WHOLE = ' -> Annotated[Tensor, "t* h"]'
#: parts of the leaf and the code that refuses it; without a code it compiles
LEAVES: dict[str, tuple[dict[str, str], str]] = {
    "torchtitan#2416: a sum labelled whole": ({"result": WHOLE}, "P020"),
    "tpu-inference#3151: a whole value labelled a sum": ({"body": 'return place(self.down(silu(self.up(x))), "t* h")'}, "P020"),
    "autoparallel#517: a sum taken for whole since it was made whole elsewhere": (
        {"body": 'y = self.down(silu(self.up(x))); place(y, "t* h"); return y', "result": WHOLE}, "P020"),
    "pytorch#163193: a number added to a sum": ({"body": "return self.down(silu(self.up(x))) + 1.0"}, "P005"),
    "pytorch#165962: a norm of a sum": (
        {"init": f'{UP}; self.n = RMSNorm("h", 1e-5)', "body": "return self.n(self.down(self.up(x)))"}, "P011"),
    "pytorch#165962: a clip of a sum": ({"body": "return softcap(self.down(self.up(x)), 1.0)"}, "P011"),
    "pytorch#147180: a factor of a sum": ({"body": "return self.down(silu(self.up(x))) * 0.5"}, ""),
    "pytorch#147180: a factor of a sum, then what is not linear": ({"body": "return silu(self.down(silu(self.up(x))) * 0.5)"}, "P011"),
    "pytorch#166598: operands that shard a dim in unlike orders": (
        {"init": 'self.a, self.b = Linear("h -> f@(mlp,ep)"), Linear("h -> f@(ep,mlp)"); self.o = Linear("f@(mlp,ep) -> h")',
         "body": "return self.o(self.a(x) + self.b(x))", "result": ' -> Annotated[Tensor, "t* h +mlp,ep"]'}, "P014"),
    "pytorch#179509: a view whose inner factor is split": (
        {"init": 'self.up, self.down = Linear("h -> n*d@mlp"), Linear("n*d@mlp -> h")'}, "P003"),
}  # fmt: skip


@pytest.mark.parametrize("fault", LEAVES)
def test_the_leaf_is_judged(fault: str, tmp_path: Path) -> None:
    parts, code = LEAVES[fault]
    if not code:
        assert Author(tmp_path).compile(**parts).result.programs
        return
    with pytest.raises(TokenSpeedError) as refusal:
        Author(tmp_path).compile(**parts)
    assert refusal.value.code == code, refusal.value


# ---- faults of more than one line ------------------------------------------------------------------------------------


class WholeShared(layouts.Shared):
    """A shared expert that hands out its sum complete."""

    def forward(self, x: layouts.Stream) -> Annotated[Tensor, "t* h"]:
        return place(super().forward(x), "t* h")


class WholeSharedLayer(layouts.MixedLayer):
    def __init__(self, c: Config, rope: Any) -> None:
        super().__init__(c, rope)
        self.mix = Mixture(Routed(layouts.GROUPED, bias=True), WholeShared())


class WholeSharedModel(layouts.Mixture):
    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.layers = [WholeSharedLayer(c, self.rope) for _ in self.layers]


def outcome(family: type[Module], config: dict[str, Any], mesh: str, axes: str = "", tokens: int = 4) -> list[int]:
    plan = make_plan(parse_mesh(mesh), axes)
    r = run_passes(
        Request(family, Config(config), plan, [(1, 1), (2, 2), (tokens, 2)], "f32", "f32", load_costs("cpu"), variants=("gumbel",))
    )  # fmt: skip
    return layouts.Bench(r).outcome(layouts.work(1, tokens, False), tokens)[0]


def test_a_shared_expert_that_is_whole_is_counted_once() -> None:  # vllm#49122
    config = layouts.config("Mixture")
    one = outcome(WholeSharedModel, config, "")
    assert len(set(one)) > 1
    for axes in ("ep=1,etp=tp,se=tp", "ep=tp,etp=1,se=tp"):
        assert outcome(WholeSharedModel, config, "tp=2", axes) == one, axes


def test_whether_experts_leave_a_sum_open_is_in_their_type() -> None:  # TensorRT-LLM#1367
    """Pending on the axes of `ep` where rows are whole, and on those of `etp`; nothing else is known of them."""
    for axes, pending in (("ep=tp,etp=1", ("tp",)), ("ep=1,etp=tp", ("tp",)), ("ep=1,etp=1,mlp=tp", ())):
        p = next(iter(layouts.compiled("Mixture", "tp=2", axes, [(4, 2)], load_costs("cpu")).programs.values()))
        assert p.types["layers.1.mix.routed"].pending == pending, axes


class Second(Module):
    """A second embedding, of another vocabulary, of the same ids."""

    def __init__(self) -> None:
        self.w = Weight("u@vp h")

    def forward(self, ids: Annotated[Tensor, "t@dp"]) -> Annotated[Tensor, "t@dp h +vp"]:
        return lookup(self.w, ids)


class TwoVocabularies(CausalLM):
    dims = staticmethod(lambda c: CausalLM.dims(c) | {"u": 72})

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.second = Second()

    def forward(self, b: Batch) -> Annotated[Tensor, "s@dp"]:
        x: Stream = self.embed(b.ids) + self.second(b.ids)
        for layer in self.layers:
            x = layer(x, b)
        return self.sampler(self.head(self.norm(select_rows(x, b.last))), b.params)


def test_two_lookups_split_by_unlike_vocabularies_keep_their_own_blocks() -> None:  # pytorch#130725
    """Their sums are added while pending, and reduced once."""
    config = layouts.config("LlamaForCausalLM")
    one = outcome(TwoVocabularies, config, "")
    assert one != outcome(CausalLM, config, "")
    assert outcome(TwoVocabularies, config, "tp=2") == one == outcome(TwoVocabularies, config, "tp=4")


def test_what_one_collective_does_takes_no_two() -> None:  # pytorch#131210
    """Rows on both axes are gathered over both at once, and become columns with one gather and a slice."""
    p = parse_program(program("experts"))
    repairs = Repairs(p.plan, p.sizes | {"t": 64}, {"t": ("dp", "tp")}, load_costs("h200"))
    rows, whole = Type("f32", (Dim("t", ("dp", "tp")), Dim("h"))), Type("f32", (Dim("t"), Dim("h")))
    assert repairs.path(rows, whole).wires == 1
    columns = repairs.path(rows, Type("f32", (Dim("t"), Dim("h", ("dp", "tp")))))
    assert [s.op for s in columns.steps] == ["all_gather", "slice"] and columns.wires == 1


def test_a_sum_stays_open_through_another_dtype() -> None:  # pytorch#183363
    """A product that yields float32 of bfloat16 is linear too: nothing is reduced before it, and fewer bytes may be behind it."""
    order = make_plan(parse_mesh("tp=2")).mesh.ordered
    x, w = Type("bf16", (Dim("t"), Dim("h")), ("tp",)), Type("bf16", (Dim("e"), Dim("h")))
    (y,) = OPS["linear"].infer([x, w], {"in_dims": ("h",), "segments": 1, "bias": False, "dtype": "f32"}, order)
    assert y == Type("f32", (Dim("t"), Dim("e")), ("tp",))


class PlainMLP(Module):
    """Without a gate."""

    def __init__(self) -> None:
        self.up, self.down = Linear("h -> f@mlp"), Linear("f@mlp -> h")

    def forward(self, x: Annotated[Tensor, "t* h"]) -> Annotated[Tensor, "t* h +mlp"]:
        return self.down(gelu(self.up(x)))


class BesideLayer(Module):
    """Attention and MLP side by side on one norm."""

    def __init__(self, c: Config, rope: Any) -> None:
        self.norm, self.attn, self.mlp = RMSNorm("h", c.rms_norm_eps), Attention(c, rope), PlainMLP()

    def forward(self, x: Stream, b: Batch) -> Stream:
        y = self.norm(x)
        return x + (self.attn(y, b) + self.mlp(y))


class BesideModel(CausalLM):
    names = staticmethod(lambda c: {})  # tensors are called as the modules are

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.layers = [BesideLayer(c, self.rope) for _ in self.layers]


def test_layers_of_another_shape_than_usual_are_split_as_their_signatures_say() -> None:  # TensorRT-LLM#8946, #4318
    """No pattern of columns, then rows, is looked for: an MLP without a gate beside attention is what it declares."""
    config = layouts.config("LlamaForCausalLM")
    one = outcome(BesideModel, config, "")
    assert one != outcome(CausalLM, config, "")
    for mesh, axes in (("tp=2", ""), ("tp=4", "mlp=1"), ("a=2,b=2", "tp=a*b,mlp=b")):
        assert outcome(BesideModel, config, mesh, axes) == one, (mesh, axes)


def test_a_large_range_of_tokens_is_no_more_to_compile_than_a_small_one() -> None:  # vllm#34399
    """What is typed, searched and eliminated for a bucket does not depend on how many tokens it has."""
    request = Request(
        find_family("LlamaForCausalLM"), Config(layouts.config("LlamaForCausalLM")), make_plan(parse_mesh("dp=2,tp=2"), "mlp=dp*tp"),
        [], "f32", "f32", load_costs("h200"),
    )  # fmt: skip
    ready, work = prepare(request, "gumbel"), set()
    for tokens in (16, 1024, 65536):
        problem = ready.bucket({"t": tokens, "s": 16})
        tables = problem.solve().elimination.cliques.values()
        rows, searches = (sum(map(len, x)) for x in (problem.rows, problem.repairs.prices.values()))
        work.add((rows, sum(c.total.size for c in tables), len(problem.repairs.from_source)))
        assert searches > 0
    assert len(work) == 1


def test_a_plan_s_group_of_one_rank_is_no_group() -> None:  # pytorch/xla#5279
    with_one, without = (
        compile_tiny(tiny(), mesh, "", [(4, 4)], variants=("gumbel",)) for mesh in ("tp=2,dp=1", "tp=2")
    )
    assert with_one.texts == without.texts
    assert not re.search(r"axes=\('dp'", with_one.texts["gumbel", 4])


def test_embedding_and_head_have_one_padded_vocabulary() -> None:  # vllm#20843
    for mesh in ("tp=3", "tp=4", "tp=8"):
        r = compile_tiny(tiny(tie_word_embeddings=True), mesh, "", [(4, 4)], variants=("gumbel",))
        types = {str(s.type) for e in r.weights.entries for s in e.segments if s.type.dims[0].name == "v"}
        assert len(types) == 1 and r.layout.sizes["v"] % r.layout.plan.mesh.ranks == 0


def test_heads_end_where_an_axis_does() -> None:  # TensorRT-LLM#4308, torchtitan#2574
    with pytest.raises(PlanError, match="P033"):
        compile_tiny(tiny(num_attention_heads=12, num_key_value_heads=6), "a=4,b=3", "tp=a*b")


def test_ids_of_holes_are_looked_up_nowhere() -> None:  # TensorRT-LLM#15182
    """A row of id -1 is zero on every rank, so holes of a bucket add nothing, and tokens do not depend on its size."""
    config = layouts.config("LlamaForCausalLM")
    r = compile_tiny(config, "tp=2", "", [(4, 2), (12, 2), (2, 2)], variants=("gumbel",))
    few, many = (Steps(r, random_weights(r)).step(bucket, layouts.work(1, 4, False)) for bucket in (4, 12))
    assert few == many


def test_extents_of_rows_are_in_no_body() -> None:  # pytorch#124502, pytorch#140011
    """Buckets that divide by nothing compile, and their programs differ in the bucket that they name alone."""
    r = compile_tiny(tiny(), "tp=4", "", [(n, 1) for n in (3, 7, 11)], variants=("gumbel",))
    assert len({re.sub(r"bucket\([^)]*\)", "", text) for text in r.texts.values()}) == 1


def test_what_shapes_a_program_is_in_its_key() -> None:  # vllm#53366, vllm#14953
    def key(mesh: str = "", axes: str = "", buckets: tuple[int, ...] = (1,), **over: Any) -> str:
        family = find_family("LlamaForCausalLM")
        made = compile_model(family, tiny(**over), mesh=mesh, axes=axes, buckets=buckets, variants=["gumbel"])
        return made.manifest["semantic_key"]

    keys = [
        key(), key(buckets=(1, 2)), key("tp=2"), key("tp=2", "mlp=1"), key(num_hidden_layers=3),
        key(architectures=["MistralForCausalLM"], sliding_window=3),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]  # dynamo#10695


def test_a_sampled_token_is_whole_by_its_type() -> None:  # jax#28334
    """The verifier follows an argmax from a split vocabulary to the result: nobody has to vouch for it."""
    p = parse_program(program("dense"))
    verify(p)
    assert p.types["sampler.gumbel"].kind == "argmax" and p.types["sampler.gumbel"].pending == ("tp",)
    assert p.types[p.results[0]].pending == ()
