"""GGUF file -> Config + weights, and the one forward pass.

    Config    the numbers that describe a model; below it nobody knows which family runs
    load      binds every tensor by name, shape and type, and hands it to an op table
    forward   the pass itself, over the same op table
"""
import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from gguf_file import MAX_POSITION, REQUIRED, Tensor, can_dequantise
from kv import PARTS_LIMIT, state_layout

# ---- Config: the numbers of a model --------------------------------------------------------------

# Architectures that run, and what their files leave to the reader: that rotated pairs are "neox",
# (j, j + n / 2) of a head and not (2j, 2j + 1); that the weights of a token's experts are "normed"
# where no key says so; which attend over a "latent" space (MLA); which are a "hybrid" of gated
# attention and gated delta nets, and whether heads of those are "grouped", see Config.
FAMILIES = {
    "llama": {"normed"},  # Llama 3, Mistral, Mixtral
    "qwen2": {"neox"},
    "qwen3": {"neox"},
    "qwen3moe": {"neox", "normed"},
    "phi3": {"neox"},
    "deepseek2": {"latent"},
    "qwen35": {"neox", "hybrid"},
    "qwen35moe": {"neox", "normed", "hybrid"},
    "qwen3next": {"neox", "normed", "hybrid", "grouped"},
}

# Keys of these groups change what a model computes: those that are not named here are an error. Two
# change nothing: rope.scaling.finetuned, and rope.dimension_sections, since all coordinates of a
# position are equal in text.
UNDERSTOOD = {
    "rope.": "dimension_count dimension_sections freq_base scaling.type scaling.factor "
             "scaling.original_context_length scaling.attn_factor scaling.yarn_beta_fast "
             "scaling.yarn_beta_slow scaling.yarn_log_multiplier scaling.finetuned",
    "expert_": "count used_count feed_forward_length shared_count shared_feed_forward_length "
               "weights_scale weights_norm gating_func group_count group_used_count",
    "ssm.": "conv_kernel state_size group_count time_step_rank inner_size",
    "attention.temperature_": "",
}

# Divisors of the angles: one for all sequences, or one each for short and long ones.
ROPE_TABLES = ["rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"]


def unsupported(gguf):
    """One line that says why this model cannot run, or None."""
    family = gguf.value("general.architecture", str)
    if family not in FAMILIES:
        return (f"family {family[:40]!r} is not supported yet; supported: {', '.join(FAMILIES)}")


@dataclass(frozen=True)
class Config:
    """What the forward pass has to know. Filled from the metadata and from which tensors exist."""
    name: str  # as the file calls itself
    n_layers: int
    n_embd: int  # width of the residual stream
    n_ff: int  # width inside a dense feed-forward network
    n_vocab: int  # rows of the token table, columns of the logits
    n_tokens: int  # ids that the tokenizer knows; rows from here to n_vocab are padding
    n_ctx: int  # most positions the model was made for
    n_mtp: int  # 1 if there is a draft head (MTP): one more layer of attention; else 0
    rms_eps: float  # added to the mean square in RMSNorm
    # attention
    n_heads: int  # query heads
    n_kv_heads: int  # heads of K and of V; each serves n_heads / n_kv_heads query heads
    head_dim: int  # values of one head of K as it is stored, and of Q
    value_dim: int  # values of one head of V: head_dim, or if `latent` the first ones of its K
    latent: bool  # V lies in K: one head of value_dim values and the rope_dim rotated ones a token
    key_dim: int  # values of a query head before it goes to the latent space; else head_dim
    out_dim: int  # values of a head after it came back from there; else head_dim
    q_rank: int  # latent: width between the two products that give Q; 0: there is one product
    q_gated: bool  # rows of Q hold for each head head_dim values of q, then a gate for each
    qk_norm: bool  # each head of Q and K is normalised before it is rotated
    attn_scale: float  # multiplies the scores
    rope_dim: int  # how many first (latent: last) values of a head are rotated
    rope_neox: bool  # rotated pairs are (j, j + rope_dim / 2); otherwise (2j, 2j + 1)
    rope_sets: tuple  # one or two tuples of rope_dim / 2 angles per position, in radians
    rope_long_from: int  # sequences longer than this take the second set; 0: there is one set
    rope_magnitude: float  # multiplies cosine and sine
    # mixtures of experts; zeros in a dense model
    n_dense_layers: int = 0  # first layers without experts
    n_experts: int = 0
    n_experts_used: int = 0  # by each token
    n_ff_experts: int = 0  # width inside an expert
    n_ff_shared: int = 0  # width inside the expert that all tokens use; 0: there is none
    shared_gated: bool = False  # its result is multiplied by sigmoid(one more router logit)
    router_sigmoid: bool = False  # probabilities are sigmoid(logit); otherwise softmax(logits)
    router_norm: bool = False  # the weights of a token's experts are divided by their sum,
    router_scale: float = 1.0  # then multiplied by this
    router_groups: int = 1  # equal groups of experts, of which a token uses
    router_groups_used: int = 1  # its best ones
    # gated delta nets; zeros in a model without them
    recurrent: tuple = ()  # for each layer: whether it is one; empty: none is
    conv_width: int = 0  # tokens under the convolution
    delta_dim: int = 0  # values of a head of q, k and v
    delta_k_heads: int = 0  # heads of q and k
    delta_v_heads: int = 0  # heads of v, and of the state
    delta_grouped: bool = False  # v head j uses k head j // (v heads / k heads); else j % k heads

    @classmethod
    def from_gguf(cls, gguf):
        """Read and check the metadata. Raises ModelError, also for a family that does not run."""
        problem = unsupported(gguf)
        gguf.require(not problem, problem)
        family = gguf.value("general.architecture", str)
        key, kind = f"{family}.", FAMILIES[family]
        for name in gguf.metadata:
            for group, names in UNDERSTOOD.items():
                understood = name.removeprefix(key + group) in names.split()
                gguf.require(understood or not name.startswith(key + group), f"the key {name!r} is "
                             "not understood; the model would answer wrongly")
        n_mtp = gguf.size(key + "nextn_predict_layers", 0, most=1, least=0)
        n_layers = gguf.size(key + "block_count", least=1 + n_mtp) - n_mtp
        n_embd = gguf.size(key + "embedding_length")
        n_ctx = gguf.size(key + "context_length", most=MAX_POSITION)
        n_vocab, n_tokens = read_vocabulary(gguf, n_embd)
        heads = read_heads(gguf, key, "latent" in kind, n_embd)
        sharpness, rope = read_rope(gguf, key, heads["rope_dim"], n_ctx, heads["latent"])
        experts = read_experts(gguf, key, "normed" in kind, n_layers)
        return cls(
            name=gguf.value("general.name", str, gguf.path.stem),
            n_layers=n_layers, n_embd=n_embd, n_vocab=n_vocab, n_tokens=n_tokens, n_ctx=n_ctx,
            # Some mixtures have no dense layer and no key for its width.
            n_ff=gguf.size(key + "feed_forward_length", experts.get("n_ff_experts", REQUIRED)),
            # A file may announce the draft head and come without it.
            n_mtp=int(n_mtp and f"blk.{n_layers}.nextn.eh_proj.weight" in gguf.tensors),
            rms_eps=gguf.real(key + "attention.layer_norm_rms_epsilon", most=1),
            q_gated="hybrid" in kind, delta_grouped="grouped" in kind, rope_neox="neox" in kind,
            qk_norm=any(name.endswith(".attn_q_norm.weight") for name in gguf.tensors),
            attn_scale=sharpness / math.sqrt(heads["key_dim"]), **heads, **rope, **experts,
            **(read_delta(gguf, key, n_layers, n_mtp) if "hybrid" in kind else {}))

    @property
    def n_state_layers(self):
        """Layers that keep a state for each sequence."""
        return sum(self.recurrent)

    @property
    def n_kv_layers(self):
        """Layers that keep K and V of each token, that of the draft head included."""
        return self.n_layers + self.n_mtp - self.n_state_layers

    @property
    def delta_channels(self):
        """Values of q, k and v of a gated delta net."""
        return (2 * self.delta_k_heads + self.delta_v_heads) * self.delta_dim

    def kv_bytes_per_token(self, kv_format):
        """Bytes that one position takes in the KV cache of all layers."""
        per_value = {"f32": 4, "f16": 2, "q8": 1 + 2 / 32}[kv_format]  # q8: an f16 scale per 32
        values = self.n_kv_heads * (self.head_dim + (not self.latent) * self.value_dim)
        return int(self.n_kv_layers * values * per_value)

    def state_bytes(self, pending):
        """Bytes of one sequence's state in all layers, with room for `pending` pending tokens."""
        matrix, ring, record = state_layout(self, pending)
        return 4 * self.n_state_layers * (matrix + ring * record)

    def scratch_bytes(self, rows, logits):
        """About what the ops of steps of up to `rows` rows take, of which `logits` have logits:
        float32 results of each width, parts of attention over a whole context (a page table may
        have twice its segments of 256), and logits, each row with the 39 KB that sampling keeps."""
        ff = max(self.n_ff, 2 * self.n_ff_shared, self.n_experts_used * self.n_ff_experts)
        row = 6 * self.n_embd + 4 * ff + 4 * self.n_heads * self.head_dim + 3 * self.delta_channels
        parts = 4 * rows * self.n_heads * self.value_dim * -(-self.n_ctx // 128)
        return 4 * (rows * row + logits * (self.n_vocab + 10_000)) + min(parts, PARTS_LIMIT)


def read_heads(gguf, key, latent, n_embd):
    """The fields of Config that say how large the heads of attention are."""
    n_heads = gguf.size(key + "attention.head_count")
    n_kv_heads = gguf.size(key + "attention.head_count_kv", n_heads)
    gguf.require(n_heads % n_kv_heads == 0,
                 f"{n_heads} query heads cannot be shared out over {n_kv_heads} KV heads")
    head_dim = key_dim = gguf.size(key + "attention.key_length", n_embd // n_heads)
    value_dim = out_dim = gguf.size(key + "attention.value_length", n_embd // n_heads)
    rope_dim = gguf.size(key + "rope.dimension_count", REQUIRED if latent else head_dim)
    if latent:  # K and V as they are stored; old files say only what they are expanded to
        value_dim = gguf.size(key + "attention.kv_lora_rank")
        head_dim, n_kv_heads = value_dim + rope_dim, 1
        if key + "attention.key_length_mla" in gguf.metadata:
            gguf.require((key_dim, out_dim) == (head_dim, value_dim),
                         f"latent heads of {key_dim} and {out_dim} values do not fit a rank of "
                         f"{value_dim} and {rope_dim} rotated values")
            key_dim = gguf.size(key + "attention.key_length_mla")
            out_dim = gguf.size(key + "attention.value_length_mla")
    gguf.require(latent or value_dim == head_dim,
                 "heads of K and V with different sizes are not supported")
    gguf.require(rope_dim <= key_dim - latent and rope_dim % 2 == 0,
                 f"cannot rotate {rope_dim} of the {key_dim} values of a head")
    return dict(n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, value_dim=value_dim,
                key_dim=key_dim, out_dim=out_dim, rope_dim=rope_dim, latent=latent,
                q_rank=gguf.size(key + "attention.q_lora_rank", 0, least=0))


def read_experts(gguf, key, normed, n_layers):
    """The fields of Config about experts, none where there are none."""
    if gguf.value(key + "expert_count", int, 0) == 0:
        return {}
    n_experts = gguf.size(key + "expert_count")
    used = gguf.size(key + "expert_used_count", most=n_experts)
    own = key + "expert_feed_forward_length"
    n_ff = gguf.size(own if own in gguf.metadata else key + "feed_forward_length")
    n_ff_shared = n_ff * gguf.size(key + "expert_shared_count", 0, least=0)
    groups = gguf.size(key + "expert_group_count", 1, most=n_experts)
    groups_used = gguf.size(key + "expert_group_used_count", groups, most=groups)
    sigmoid = gguf.size(key + "expert_gating_func", 1, most=2) == 2
    in_group = n_experts // groups  # two at least where their sum tells how good a group is
    gguf.require(n_experts % groups == 0 and used <= groups_used * in_group
                 and (groups == 1 or in_group > sigmoid),
                 f"{n_experts} experts, {used} for a token, cannot be shared out over {groups} "
                 f"groups, {groups_used} for a token")
    scaled = gguf.value(key + "expert_weights_scale", float, 0.0)
    return dict(
        n_experts=n_experts, n_experts_used=used, n_ff_experts=n_ff,
        n_ff_shared=gguf.size(key + "expert_shared_feed_forward_length", n_ff_shared, least=0),
        shared_gated=any(name.endswith(".ffn_gate_inp_shexp.weight") for name in gguf.tensors),
        n_dense_layers=gguf.size(key + "leading_dense_block_count", 0, n_layers, least=0),
        router_sigmoid=sigmoid, router_groups=groups, router_groups_used=groups_used,
        router_norm=gguf.value(key + "expert_weights_norm", bool, normed),
        router_scale=gguf.real(key + "expert_weights_scale") if scaled else 1.0)


def read_delta(gguf, key, n_layers, n_mtp):
    """The fields of Config about gated delta nets."""
    dim, k_heads = gguf.size(key + "ssm.state_size"), gguf.size(key + "ssm.group_count")
    v_heads, inner = gguf.size(key + "ssm.time_step_rank"), gguf.size(key + "ssm.inner_size")
    gguf.require(v_heads % k_heads == 0 and inner == v_heads * dim,
                 f"{v_heads} value heads of {dim} values in a gated delta net do not fit "
                 f"{k_heads} key heads and {inner} values in all")
    interval = gguf.size(key + "full_attention_interval", 4)
    by_interval = [(i + 1) % interval != 0 for i in range(n_layers)] + [False] * n_mtp
    recurrent = gguf.value(key + "attention.recurrent_layers", np.ndarray, by_interval)
    count = len(by_interval)
    gguf.require(len(recurrent) == count and not any(recurrent[n_layers:]) and not all(recurrent),
                 f"attention.recurrent_layers must say for each of {count} layers whether it is "
                 "recurrent; not all can be, and a draft head is not")
    return dict(conv_width=gguf.size(key + "ssm.conv_kernel"), delta_dim=dim, delta_k_heads=k_heads,
                delta_v_heads=v_heads, recurrent=tuple(map(bool, recurrent[:n_layers])))


def read_vocabulary(gguf, n_embd):
    """(rows of the token table, tokens of the tokenizer). The table may be padded."""
    table = gguf.tensors.get("token_embd.weight")
    n_vocab = table.shape[0] if table else 0
    gguf.tensor("token_embd.weight", (n_vocab, n_embd))
    n_tokens = len(gguf.value("tokenizer.ggml.tokens", list, range(n_vocab)))
    gguf.require(0 < n_tokens <= n_vocab, f"the tokenizer has {n_tokens} tokens, but the token "
                 f"table has {n_vocab} rows")
    return n_vocab, n_tokens


def read_rope(gguf, key, rope_dim, n_ctx, latent):
    """(a factor of all scores, the fields of Config): every way of scaling ends in these.

    A set holds the angle per position of each rotated pair, float64. Tables in the file divide it,
    one for all sequences or one each for short and long ones; then the key `type` acts on it.
    Latent attention rotates a part of a head, and its YaRN makes all scores larger.
    """
    scaling = key + "rope.scaling."
    kind = gguf.value(scaling + "type", str, "linear")  # linear with factor 1 changes nothing
    gguf.require(kind in ("none", "linear", "yarn", "longrope"), f"RoPE scaling {kind[:40]!r} is "
                 "not supported; supported: none, linear, yarn, longrope")
    factor = gguf.real(scaling + "factor", REQUIRED if kind == "yarn" else 1.0)
    original = gguf.size(scaling + "original_context_length", n_ctx, most=MAX_POSITION)
    magnitude, sharpness = gguf.real(scaling + "attn_factor", 1.0), 1.0

    base = gguf.real(key + "rope.freq_base", 10000.0)
    angles = base ** (-np.arange(0, rope_dim, 2) / rope_dim)
    tables = [name for name in ROPE_TABLES if name in gguf.tensors]
    gguf.require(tables in ([], ROPE_TABLES[:1], ROPE_TABLES[1:]), "RoPE tables "
                 f"{', '.join(tables)}: expected short and long ones, or rope_freqs")
    long_from = original if len(tables) == 2 else 0
    gguf.require(long_from or kind != "longrope",
                 "RoPE scaling 'longrope' needs the tensors rope_factors_short and _long")
    divisors = [gguf.vector(name, rope_dim // 2).astype(np.float64) for name in tables]
    gguf.require(all((divisor > 0).all() for divisor in divisors),
                 f"RoPE tables {', '.join(tables)} must hold positive numbers only")
    sets = [angles / divisor for divisor in divisors] or [angles]

    if kind == "linear":
        sets = [angles / factor for angles in sets]
    elif kind == "yarn":
        blend = yarn_blend(gguf, scaling, rope_dim, base, original)
        sets = [angles * (blend / factor + 1 - blend) for angles in sets]
        growth = math.log(max(factor, 1))
        multiplier = gguf.value(scaling + "yarn_log_multiplier", float, 0.0)
        gguf.require(0 <= multiplier < 100 and (latent or not multiplier),
                     f"the key '{scaling}yarn_log_multiplier' is {multiplier}; only latent "
                     "attention knows one, from 0 to 100")
        if multiplier:
            sharpness = (multiplier * growth + 1) ** 2  # a factor of Q and one of K
        else:
            magnitude *= 0.1 * growth + 1
    return sharpness, dict(rope_sets=tuple(tuple(angles.tolist()) for angles in sets),
                           rope_long_from=long_from, rope_magnitude=magnitude)


def yarn_blend(gguf, scaling, rope_dim, base, original):
    """How far YaRN stretches each pair: 0 where the pair turns fast, 1 where it turns slowly.

    The bounds are the pairs that turn beta_fast and beta_slow times within the original context.
    """
    def pair_that_turns(times):
        return rope_dim * math.log(original / (2 * math.pi * times)) / (2 * math.log(base))

    gguf.require(base > 1, f"YaRN needs a RoPE base above 1, not {base}")
    low = max(0, math.floor(pair_that_turns(gguf.real(scaling + "yarn_beta_fast", 32.0))))
    high = min(rope_dim - 1, math.ceil(pair_that_turns(gguf.real(scaling + "yarn_beta_slow", 1.0))))
    return np.clip((np.arange(rope_dim // 2) - low) / max(0.001, high - low), 0, 1)


# ---- weights: every tensor has its place ---------------------------------------------------------


class Attention(NamedTuple):
    """Handles of attention over K and V of all tokens."""
    kv_layer: int  # its place in the KV cache
    qkv: object  # matrix: rows of q (see Config.q_gated), k, v; with a bias where there is one
    q_norm: object  # vector [head_dim] or None
    k_norm: object  # vector [head_dim] or None
    out: object  # matrix [n_embd, n_heads * head_dim]


class Latent(NamedTuple):
    """Handles of attention in a latent space (MLA), in the absorbed form: K is never expanded."""
    kv_layer: int  # its place in the KV cache
    down: object  # matrix: rows of q before its norm, or of q if q_up is None; then of the latent K
    q_norm: object  # vector [q_rank] or None
    q_up: object  # matrix [n_heads * key_dim, q_rank] or None
    kv_norm: object  # vector [value_dim]
    k_b: object  # for each head a matrix [value_dim, key_dim - rope_dim]: q to the latent space
    v_b: object  # for each head a matrix [out_dim, value_dim]: back from it
    out: object  # matrix [n_embd, n_heads * out_dim]


class DeltaNet(NamedTuple):
    """Handles of a gated delta net, which keeps one state of fixed size instead of K and V.

    d: delta_dim, H_v: delta_v_heads.
    """
    state_layer: int  # its place in the states
    inputs: object  # matrix: rows of q | k | v, then z [H_v d], beta [H_v], alpha [H_v]
    conv: object  # vector [delta_channels, conv_width]; the last column is for the token itself
    dt: object  # vector [H_v], added to alpha
    decay: object  # vector [H_v], negative
    norm: object  # vector [d]
    out: object  # matrix [n_embd, H_v d]


class Dense(NamedTuple):
    """Handles of a gated feed-forward network."""
    gate_up: object  # for linear_silu: [2 n_ff, n_embd], rows of gate, then of up
    down: object  # matrix [n_embd, n_ff]


class Mixture(NamedTuple):
    """Handles of a mixture of experts."""
    router: object  # matrix [n_experts, n_embd], and one more row if the shared expert is gated
    bias: object  # vector [n_experts] that counts in the choice of experts only, or None
    experts: Dense  # of one handle for all experts each, n_ff_experts wide
    shared: Dense | None  # n_ff_shared wide


class Layer(NamedTuple):
    """A mixer, which lets tokens see those before them, and a feed-forward network."""
    mixer_norm: object  # vector [n_embd]
    mixer: object  # Attention, Latent or DeltaNet
    ffn_norm: object  # vector [n_embd]
    ffn: object  # Dense or Mixture


class Mtp(NamedTuple):
    """Handles of the draft head, which predicts the token after the next one."""
    embed: object  # matrix [n_vocab, n_embd]; the model's own where the head has none
    layer: Layer
    embed_norm: object  # vector [n_embd]
    hidden_norm: object  # vector [n_embd]
    norm: object  # vector [n_embd]
    embed_proj: object  # matrix [n_embd, n_embd]
    hidden_proj: object  # matrix [n_embd, n_embd]
    output: object  # matrix [n_vocab, n_embd]; the model's own where the head has none


@dataclass
class Weights:
    """Handles of all weights, as the op table made them."""
    embed: object  # matrix [n_vocab, n_embd], the token table
    layers: list
    output_norm: object  # vector [n_embd]
    output: object  # matrix [n_vocab, n_embd]; the token table itself where the two are tied
    mtp: Mtp | None
    reads: list  # (Tensor, the share of it that one token reads) of each matrix outside of mtp

    @property
    def active_parameters(self):
        """How many values a token is multiplied with: of many experts it uses a few."""
        return round(sum(share * math.prod(tensor.shape) for tensor, share in self.reads))


# Tensors that no op reads: what they hold is in Config.rope_sets. Old converters wrote the last one
# for each layer.
IGNORED = *ROPE_TABLES, "attn_rot_embd.weight"


class Binder:
    """Takes tensors from a file by name, shape and type, and hands them to an op table."""

    def __init__(self, gguf, cfg, ops, progress):
        self.gguf, self.cfg, self.ops, self.progress = gguf, cfg, ops, progress
        self.unbound = {name for name in gguf.tensors
                        if re.sub(r"^blk\.\d+\.", "", name) not in IGNORED}
        self.total = sum(gguf.tensors[name].data.nbytes for name in self.unbound)
        self.done, self.reads = 0, []  # see Weights.reads
        self.block = ""  # what the names of all tensors begin with now

    def has(self, name):
        return self.block + name in self.unbound

    def take(self, tensor):
        self.unbound.discard(tensor.name)
        self.done += tensor.data.nbytes
        if self.progress:
            self.progress(self.done, self.total)

    def read(self, name, *shape):
        """The values of an F32 tensor, float32 of this shape."""
        values = self.gguf.vector(self.block + name, *shape)
        self.take(self.gguf.tensors[self.block + name])
        return values

    def vector(self, name, *shape):
        return self.ops.vector(self.read(name, *shape))

    def weights(self, rows, *shape):
        """Tensors of matrices. rows: {name: its rows}; shape: of experts or heads, of columns."""
        *count, cols = shape
        found = [self.gguf.tensor(f"{self.block}{name}.weight", (*count, n, cols))
                 for name, n in rows.items()]
        for tensor in found:
            self.gguf.require(can_dequantise(tensor.type),
                              f"tensor {tensor.name!r} is of type {tensor.type.name}, which cannot "
                              "hold weights; convert the model again")
            self.take(tensor)
        return found

    def stack(self, tensors, bias=None, share=1.0):
        """A matrix of row blocks with a bias float32 [all rows], or one for each expert or head.

        share: how much of it one token reads.
        """
        self.reads += [(tensor, share) for tensor in tensors]
        if len(tensors[0].shape) == 3:
            return self.ops.experts(tensors)
        return self.ops.matrix(tensors, bias)

    def matrix(self, rows, *shape, **options):
        """The stack of these weights."""
        return self.stack(self.weights(rows, *shape), **options)

    def fused(self, name, parts):
        """`parts` {name: its rows}, or the one tensor `name` that holds the rows of all."""
        if self.has(f"{name}.weight") and not self.has(f"{next(iter(parts))}.weight"):
            return {name: sum(parts.values())}
        return parts

    def layer(self, index):
        cfg, self.block = self.cfg, f"blk.{index}."
        states = sum(cfg.recurrent[:index])  # in the layers before
        if any(cfg.recurrent[index:index + 1]):
            mixer = self.delta_net(states)
        else:
            mixer = (self.latent if cfg.latent else self.attention)(index - states)
        after = "post_attention_norm.weight"  # another name of ffn_norm
        norm = self.vector(after if self.has(after) else "ffn_norm.weight", cfg.n_embd)
        mixed = cfg.n_experts and index >= cfg.n_dense_layers
        return Layer(self.vector("attn_norm.weight", cfg.n_embd), mixer, norm,
                     self.mixture(norm) if mixed else self.dense(norm, cfg.n_ff))

    def attention(self, kv_layer):
        cfg, bias = self.cfg, None
        n_q, n_kv = cfg.n_heads * cfg.head_dim, cfg.n_kv_heads * cfg.head_dim
        rows = self.fused("attn_qkv", {"attn_q": n_q * (1 + cfg.q_gated),
                                       "attn_k": n_kv, "attn_v": n_kv})
        if any(self.has(f"{part}.bias") for part in rows):
            bias = np.concatenate([self.read(f"{part}.bias", n) for part, n in rows.items()])
        norms = [self.vector(f"attn_{part}_norm.weight", cfg.head_dim) if cfg.qk_norm else None
                 for part in "qk"]
        return Attention(kv_layer, self.matrix(rows, cfg.n_embd, bias=bias), *norms,
                         self.matrix({"attn_output": cfg.n_embd}, n_q))

    def latent(self, kv_layer):
        cfg, rank, content = self.cfg, self.cfg.value_dim, self.cfg.key_dim - self.cfg.rope_dim
        n_q, q_norm, q_up = cfg.n_heads * cfg.key_dim, None, None
        down = {"attn_q": n_q}
        if cfg.q_rank:
            down = {"attn_q_a": cfg.q_rank}
            q_norm = self.vector("attn_q_a_norm.weight", cfg.q_rank)
            q_up = self.matrix({"attn_q_b": n_q}, cfg.q_rank)
        if self.has("attn_kv_b.weight"):
            both = self.weights({"attn_kv_b": cfg.n_heads * (content + cfg.out_dim)}, rank)
            k_b, v_b = split_kv_b(*both, cfg.n_heads, content)
        else:
            k_b, = self.weights({"attn_k_b": rank}, cfg.n_heads, content)
            v_b, = self.weights({"attn_v_b": cfg.out_dim}, cfg.n_heads, rank)
        down = self.matrix(down | {"attn_kv_a_mqa": cfg.head_dim}, cfg.n_embd)
        kv_norm = self.vector("attn_kv_a_norm.weight", rank)
        return Latent(kv_layer, down, q_norm, q_up, kv_norm, self.stack([k_b]), self.stack([v_b]),
                      self.matrix({"attn_output": cfg.n_embd}, cfg.n_heads * cfg.out_dim))

    def delta_net(self, state_layer):
        cfg, heads = self.cfg, self.cfg.delta_v_heads
        inner = heads * cfg.delta_dim
        inputs = self.weights({"attn_qkv": cfg.delta_channels, "attn_gate": inner}, cfg.n_embd)
        if self.has("ssm_ba.weight"):  # for each k head rows of beta, then of alpha
            both, = self.weights({"ssm_ba": 2 * heads}, cfg.n_embd)
            rows = both.data.reshape(cfg.delta_k_heads, 2, -1).swapaxes(0, 1)
            inputs.append(replace(both, data=rows.reshape(-1)))
        else:
            inputs += self.weights({"ssm_beta": heads, "ssm_alpha": heads}, cfg.n_embd)
        return DeltaNet(
            state_layer, self.stack(inputs),
            self.vector("ssm_conv1d.weight", cfg.delta_channels, cfg.conv_width),
            self.vector("ssm_dt.bias", heads), self.vector("ssm_a", heads),
            self.vector("ssm_norm.weight", cfg.delta_dim),
            self.matrix({"ssm_out": cfg.n_embd}, inner))

    def dense(self, norm, width, kind="", *count, share=1.0):
        """A gated network, or `count` of experts, behind an RMSNorm with the weights `norm`."""
        both = f"ffn_gate_up{kind}" if count else f"ffn_up{kind}"
        parts = self.fused(both, {f"ffn_gate{kind}": width, f"ffn_up{kind}": width})
        gate_up = self.weights(parts, *count, self.cfg.n_embd)
        down = self.weights({f"ffn_down{kind}": self.cfg.n_embd}, *count, width)
        self.reads += [(tensor, share) for tensor in gate_up + down]
        return Dense(*self.ops.gated(gate_up, down, norm))

    def mixture(self, norm):
        cfg, n = self.cfg, self.cfg.n_experts
        router = {"ffn_gate_inp": n} | ({"ffn_gate_inp_shexp": 1} if cfg.shared_gated else {})
        return Mixture(
            router=self.matrix(router, cfg.n_embd),
            bias=self.vector("exp_probs_b.bias", n) if self.has("exp_probs_b.bias") else None,
            experts=self.dense(norm, cfg.n_ff_experts, "_exps", n, share=cfg.n_experts_used / n),
            shared=self.dense(norm, cfg.n_ff_shared, "_shexp") if cfg.n_ff_shared else None)

    def mtp(self, embed, output):
        cfg = self.cfg
        layer = self.layer(cfg.n_layers)  # its block comes after those of the layers
        norms = [self.vector(f"nextn.{name}.weight", cfg.n_embd)
                 for name in ("enorm", "hnorm", "shared_head_norm")]
        own = lambda name, default: (self.matrix({name: cfg.n_vocab}, cfg.n_embd)
                                     if self.has(f"{name}.weight") else default)
        both, = self.weights({"nextn.eh_proj": cfg.n_embd}, 2 * cfg.n_embd)
        self.gguf.require(cfg.n_embd % GGML_QUANT_SIZES[both.type][0] == 0,
                          f"tensor {both.name!r} cannot be split in the middle of a block of "
                          f"{both.type.name}; convert the model to F16")
        halves = both.data.reshape(cfg.n_embd, 2, -1).swapaxes(0, 1).reshape(2, -1)
        projections = [self.stack([Tensor(f"{both.name}[{i}]", both.type, (cfg.n_embd,) * 2, half)])
                       for i, half in enumerate(halves)]
        return Mtp(own("nextn.embed_tokens", embed), layer, *norms, *projections,
                   own("nextn.shared_head_head", output))


def split_kv_b(tensor, heads, content):
    """(k_b, v_b) from the one tensor of old files: for each head `content` rows of K, then of V.

    k_b is needed transposed, [heads, rank, content], and so no longer in the format of the file.
    """
    rows = tensor.data.reshape(heads, tensor.shape[0] // heads, -1)
    keys = dequantize(np.ascontiguousarray(rows[:, :content]), tensor.type).swapaxes(1, 2)
    shape = heads, rows.shape[1] - content, tensor.shape[1]
    return (Tensor(f"{tensor.name} (K)", GGMLQuantizationType.F32, keys.shape,
                   np.ascontiguousarray(keys, np.float32).reshape(-1).view(np.uint8)),
            Tensor(f"{tensor.name} (V)", tensor.type, shape, rows[:, content:].reshape(-1)))


def load(gguf, ops, progress=None):
    """(Config, Weights) with every tensor of the file bound or known to be unneeded.

    ops: an op table; its `matrix`, `experts` and `vector` make the handles. progress: called with
    (bytes done, bytes in all) at each tensor. Raises ModelError.
    """
    cfg = Config.from_gguf(gguf)
    binder = Binder(gguf, cfg, ops, progress)
    tied = "output.weight" not in gguf.tensors
    embed = binder.matrix({"token_embd": cfg.n_vocab}, cfg.n_embd, share=float(tied))
    output = embed if tied else binder.matrix({"output": cfg.n_vocab}, cfg.n_embd)
    output_norm = binder.vector("output_norm.weight", cfg.n_embd)
    layers = [binder.layer(index) for index in range(cfg.n_layers)]
    reads = list(binder.reads)
    mtp = binder.mtp(embed, output) if cfg.n_mtp else None
    first = min(binder.unbound, default=None)
    gguf.require(first is None, f"tensor {first!r} ({len(binder.unbound)} in all) has no place in "
                 "this family; without it the model would answer wrongly")
    return cfg, Weights(embed, layers, output_norm, output, mtp, reads)


# ---- the forward pass ------------------------------------------------------------------------


def forward(cfg, weights, batch, kv, ops):
    """Logits of batch.logit_rows, float32 [n, n_vocab], as a handle of the backend `ops`.

    Writes K and V of all rows to the pages that batch.page_table names, and the states of their
    slots.
    """
    return output(cfg, weights, trunk(cfg, weights, batch, kv, ops), batch, ops)


def output(cfg, weights, h, batch, ops):
    """Logits of batch.logit_rows from the residual stream after the last layer."""
    x = ops.rmsnorm(h, weights.output_norm, cfg.rms_eps, batch.logit_rows)
    return ops.linear(x, weights.output)


def trunk(cfg, weights, batch, kv, ops):
    """h f32 [rows, n_embd]: the residual stream after the last layer."""
    h = ops.embed(weights.embed, batch)
    angles = ops.rope_angles(cfg, batch)
    for layer in weights.layers:
        add_layer(layer, h, angles, cfg, batch, kv, ops)
    return h


def mtp(cfg, weights, hidden, batch, kv, ops):
    """(logits of batch.logit_rows, the next `hidden`) of the draft head.

    A row has `hidden` f32 [., n_embd] of a position, that is rmsnorm_f32(trunk, output_norm), and
    the token of the next position; its logits are for the one after that. With the drafted token
    and the next `hidden` it drafts further. It has K and V of its own.
    """
    head = weights.mtp
    h = ops.embed(head.embed, batch)
    ops.linear(ops.rmsnorm(h, head.embed_norm, cfg.rms_eps), head.embed_proj, out=h)
    ops.linear_add(ops.rmsnorm(hidden, head.hidden_norm, cfg.rms_eps), head.hidden_proj, h)
    add_layer(head.layer, h, ops.rope_angles(cfg, batch), cfg, batch, kv, ops)
    x = ops.rmsnorm(h, head.norm, cfg.rms_eps, batch.logit_rows)
    return ops.linear(x, head.output), ops.rmsnorm_f32(h, head.norm, cfg.rms_eps)


def add_layer(layer, h, angles, cfg, batch, kv, ops):
    """h += mixer(norm(h)), then h += ffn(norm(h)), in place."""
    add_mixer = {Attention: attention, Latent: latent, DeltaNet: delta_net}[type(layer.mixer)]
    add_ffn = {Dense: dense, Mixture: mixture}[type(layer.ffn)]
    x = ops.rmsnorm(h, layer.mixer_norm, cfg.rms_eps)
    add_mixer(layer.mixer, x, h, angles, cfg, batch, kv, ops)
    x = ops.rmsnorm(h, layer.ffn_norm, cfg.rms_eps)
    add_ffn(layer.ffn, x, h, cfg, batch, ops)


def attention(w, x, h, angles, cfg, batch, kv, ops):
    qkv = ops.linear(x, w.qkv)
    q = ops.rope_kv(qkv, angles, w.q_norm, w.k_norm, cfg, w.kv_layer, kv, batch)
    x = ops.attention(q, cfg, w.kv_layer, kv, batch)
    if cfg.q_gated:
        x = ops.sigmoid_gate(x, qkv, cfg)
    ops.linear_add(x, w.out, h)


def latent(w, x, h, angles, cfg, batch, kv, ops):
    q = down = ops.linear(x, w.down)
    if w.q_up is not None:
        q = ops.linear(ops.rmsnorm(down, w.q_norm, cfg.rms_eps), w.q_up)
    x = ops.scale_rows(q, cfg.n_heads, cfg.key_dim, cfg.key_dim - cfg.rope_dim)
    content = ops.linear_heads(x, w.k_b)
    q = ops.rope_latent(content, q, down, angles, w.kv_norm, cfg, w.kv_layer, kv, batch)
    x = ops.attention(q, cfg, w.kv_layer, kv, batch)
    x = ops.scale_rows(ops.linear_heads(x, w.v_b))
    ops.linear_add(x, w.out, h)


def delta_net(w, x, h, angles, cfg, batch, kv, ops):
    u = ops.linear(x, w.inputs)
    c = ops.delta_conv(u, w, cfg, w.state_layer, kv, batch)
    o = ops.delta_rule(u, c, cfg, w.state_layer, kv, batch)
    ops.linear_add(ops.delta_norm(o, u, w.norm, cfg), w.out, h)


def dense(w, x, h, cfg, batch, ops):
    ops.linear_add(ops.linear_silu(x, w.gate_up), w.down, h)


def mixture(w, x, h, cfg, batch, ops):
    logits, shared = ops.linear(x, w.router), None
    routes = ops.route(logits, w.bias, cfg, batch)
    y = ops.linear_experts(ops.linear_silu(x, w.experts.gate_up, routes), w.experts.down, routes)
    if w.shared is not None:
        shared = ops.linear(ops.linear_silu(x, w.shared.gate_up), w.shared.down)
    ops.combine(y, routes, shared, logits if cfg.shared_gated else None, h)
