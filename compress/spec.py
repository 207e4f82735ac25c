"""One model as numbers: its dimensions, its switches, and the names and shapes of its tensors.

Shapes: [out, in] of a linear. C hidden, H query heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Literal

from compress.rope import Rope

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
HEAD = "lm_head"

Shapes = dict[str, tuple[int, ...]]
LinearShapes = dict[str, tuple[int, int]]


def block_prefix(index: int) -> str:
    return f"model.layers.{index}."


@dataclass(frozen=True)
class Tap:
    """A place in a block where one activation feeds one or more linears.

    `producer` is the module whose output channels are this activation's input channels, so that a scale divided out of
    the producer can be multiplied into the linears.
    """

    name: str
    linears: tuple[str, ...]
    producer: str


QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT = "self_attn.o_proj"
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = "mlp.down_proj"
# of the blocks that compression walks through: Llama's
TAPS = (
    Tap("attention_input", QKV, "input_layernorm"),
    Tap("attention_output", (OUTPUT,), "self_attn.v_proj"),
    Tap("mlp_input", GATE_UP, "post_attention_layernorm"),
    Tap("mlp_output", (DOWN,), "mlp.up_proj"),
)
BLOCK_LINEARS = tuple(linear for tap in TAPS for linear in tap.linears)


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, §2.1): ranks, and the dimensions of a head."""

    query_rank: int | None  # None: queries are projected at once
    rank: int
    plain_dim: int  # of queries and keys: what is not rotated
    rotated_dim: int
    value_dim: int
    bias: bool  # of the projections down to the ranks, and of the output's

    def linears(self, heads: int, hidden: int) -> LinearShapes:
        queries = heads * (self.plain_dim + self.rotated_dim)
        shapes: LinearShapes = {"self_attn.q_proj": (queries, hidden)}
        if self.query_rank is not None:
            shapes = {
                "self_attn.q_a_proj": (self.query_rank, hidden),
                "self_attn.q_b_proj": (queries, self.query_rank),
            }
        return shapes | {
            "self_attn.kv_a_proj_with_mqa": (self.rank + self.rotated_dim, hidden),
            "self_attn.kv_b_proj": (heads * (self.plain_dim + self.value_dim), self.rank),
            OUTPUT: (hidden, heads * self.value_dim),
        }

    def norms(self) -> Shapes:
        norms: Shapes = {"self_attn.kv_a_layernorm.weight": (self.rank,)}
        return norms if self.query_rank is None else norms | {"self_attn.q_a_layernorm.weight": (self.query_rank,)}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of the MLP of some layers (arXiv 2101.03961; top-k as in Mixtral's 2401.04088)."""

    count: int
    per_token: int
    intermediate: int
    normalized: bool  # the weights of a token's experts sum to 1
    sparse: tuple[bool, ...]  # which layers
    module: str  # "mlp", or "block_sparse_moe" where that is how a checkpoint spells it
    names: tuple[str, str, str]  # gate, up and down of one expert

    def touched(self, tokens: float) -> float:
        """The expected share of experts that so many tokens go to, where each is as likely: 1 − (1 − k/E)ⁿ.

        Real routers favour some experts, and tokens of one text agree: then it is less.
        """
        return 1 - (1 - self.per_token / self.count) ** tokens

    def router(self, fused: bool) -> str:
        return f"{'mlp' if fused else self.module}.gate"

    def linears(self, hidden: int) -> LinearShapes:
        gate, up, down = self.names
        shapes: LinearShapes = {}
        for expert in range(self.count):
            prefix = f"{self.module}.experts.{expert}."
            shapes |= {prefix + name: (self.intermediate, hidden) for name in (gate, up)}
            shapes[prefix + down] = (hidden, self.intermediate)
        return shapes

    def fused(self, hidden: int) -> Shapes:
        return {
            FUSED_GATE_UP: (self.count, 2 * self.intermediate, hidden),
            FUSED_DOWN: (self.count, hidden, self.intermediate),
        }


# how transformers 5 holds the experts of a layer in memory; what it saves is a tensor for each expert
FUSED_GATE_UP = "mlp.experts.gate_up_proj"
FUSED_DOWN = "mlp.experts.down_proj"


@dataclass(frozen=True)
class ModelSpec:
    """The dimensions and switches that the forward pass needs."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # sliding window of each layer, in tokens
    dtype: str  # "float16", "bfloat16" or "float32": what config.json states
    gate: Literal["silu", "gelu_tanh"] = "silu"
    sandwich: bool = False  # Gemma: norms by 1 + weight, also of what attention and MLP give; scaled embeddings
    attention_scale: float | None = None  # None: 1/√D
    attention_cap: float | None = None
    logit_cap: float | None = None
    local_rope: Rope | None = None  # of the layers with a window, where theirs is another
    latent: Latent | None = None
    experts: Experts | None = None

    @property
    def compressible(self) -> bool:
        """Its blocks are Llama's, which are what compression walks through."""
        return not self.sandwich and self.latent is None and self.experts is None

    @property
    def cached_numbers(self) -> int:
        """Numbers that a token leaves in the cache of a layer."""
        if self.latent is not None:
            return self.latent.rank + self.latent.rotated_dim
        return 2 * self.kv_heads * self.head_dim

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.sparse[layer]

    def linear_shape(self, linear: str) -> tuple[int, int]:
        """[out, in] of a linear of the first block, by its local name."""
        return self.block_linears()[linear]

    def block_linears(self, layer: int = 0) -> LinearShapes:
        """Every linear of one block by its local name; not a router, which is never quantized."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.latent is not None:
            shapes = self.latent.linears(self.heads, self.hidden)
        else:
            outs = zip((*QKV, OUTPUT), (query, kv, kv, self.hidden), strict=True)
            shapes = {name: (out, query if name == OUTPUT else self.hidden) for name, out in outs}
        if self.is_sparse(layer):
            assert self.experts is not None
            return shapes | self.experts.linears(self.hidden)
        shapes |= dict.fromkeys(GATE_UP, (self.intermediate, self.hidden))
        return shapes | {DOWN: (self.hidden, self.intermediate)}

    def linears(self) -> LinearShapes:
        """Every linear by its full name, with [out, in]; the head last."""
        shapes = {block_prefix(i) + name: shape for i in range(self.layers) for name, shape in self._linears_of(i)}
        return shapes | {HEAD: (self.vocab, self.hidden)}

    def _linears_of(self, layer: int) -> list[tuple[str, tuple[int, int]]]:
        return list(self.block_linears(layer).items())

    def biased(self, linear: str) -> bool:
        if self.latent is not None and linear.startswith("self_attn."):
            return self.latent.bias and linear not in ("self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj")
        if ".experts." in linear:
            return False
        return self.qkv_bias if linear in QKV else self.o_bias if linear == OUTPUT else self.mlp_bias

    def block_norms(self) -> Shapes:
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.sandwich:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes: Shapes = {f"{norm}.weight": (self.hidden,) for norm in norms}
        if self.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        return shapes if self.latent is None else shapes | self.latent.norms()

    def block_tensors(self, layer: int = 0, fused: bool = False) -> Shapes:
        """Every tensor of one dense block by its local name, with its shape; `fused`: experts in 3-D tensors."""
        shapes = self.block_norms()
        if self.is_sparse(layer):
            assert self.experts is not None
            shapes[f"{self.experts.router(fused)}.weight"] = (self.experts.count, self.hidden)
            shapes |= self.experts.fused(self.hidden) if fused else {}
        for linear, shape in self.block_linears(layer).items():
            if fused and ".experts." in linear:
                continue
            shapes[f"{linear}.weight"] = shape
            if self.biased(linear):
                shapes[f"{linear}.bias"] = shape[:1]
        return shapes

    def tensors(self, stored: Container[str] = ()) -> Shapes:
        """Every tensor of the dense checkpoint by its full name, with its shape. A tied head is stored once.

        Experts are spelled one by one, but for the layers whose fused tensors are among the `stored` names.
        """
        shapes: Shapes = {f"{EMBEDDING}.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            prefix = block_prefix(i)
            fused = prefix + FUSED_GATE_UP in stored
            shapes |= {prefix + name: shape for name, shape in self.block_tensors(i, fused).items()}
        shapes[f"{FINAL_NORM}.weight"] = (self.hidden,)
        return shapes if self.tied else shapes | {f"{HEAD}.weight": (self.vocab, self.hidden)}
