"""The NumPy twin of every kernel: same name, same arguments, plain arithmetic.

With float32 this is the CPU backend, with float64 the oracle that kernels are tested against.
Arrays are (rows, columns); rows are tokens of any sequences.

The contract. What a function here says is right; a kernel may differ by rounding. As float64 it is
held against runs of the original implementations; the CPU backend, float32, stays within 2e-4 of
the largest |logit| of those, the CUDA kernels, whose products take f16 factors, within 5e-3, but
for inputs that the tests name. Products and attention of a kernel stay within 2e-3 of the largest
value, and what moves or picks (embed, pages, argmax, sampled tokens) is equal. Ties go to the lower
index: of tokens, experts and groups of experts.

Equal to the last bit, on one machine, are the logits of a position however it is computed: what
else is in the batch, where the prompt was cut, drafted or not, from a cache, a fork or a file. Not
covered: other CPUs or cards, another build of BLAS or of the kernels, another KV format.

So a result here depends on its own row (or its own sequence) alone:

* BLAS chooses its order of summation by the shape of a product. Products here have 8 token rows,
  padded, which measured bit-equal at each place of the tile on every CPU kernel of OpenBLAS. Tiles
  of 16 to 64 rows are 4 to 7 times faster a row; they give the same bits on some CPUs and not on
  others, so a tile is used only where `safe_tiles` has seen it equal the tiles of 8, for weights
  of this shape, on the machine that runs.
* Sums run along the last, contiguous axis, whose order NumPy fixes by its length.
* Attention walks the KV cache in tiles of 64 positions; SEGMENT positions share one running
  softmax, and segments are merged in index order. A masked position contributes exactly zero.
"""
import os
import platform
import time
from dataclasses import dataclass, replace

import numpy as np
from gguf import quants

import sampling
from errors import RequestError
from kv import FEED, PAGE, state_layout

ROWS = 8  # token rows of the product that defines the bits
TILES = 64, 32, 16, ROWS  # token rows of one BLAS call, where they are safe
SEGMENT = 256  # positions under one running softmax; a multiple of PAGE
PANEL = 4096  # weight rows of one BLAS call, whether or not the matrix stays quantised
KV_BLOCK = 32  # values of a q8 block
F16_LARGEST = 65504.0
SMALLEST_SUM = 6.1e-5  # of the weights of a token's experts, where they are divided by it


@dataclass
class Panel:
    """Up to PANEL rows of a tensor, transposed to [cols, rows]: there, or expanded on demand."""
    tensor: object
    rows: slice
    values: np.ndarray | None

    def expanded(self, dtype):
        """Transposed, C-contiguous: 1.3 to 2.5 times faster in BLAS than the other way round."""
        if self.values is not None:
            return self.values
        return np.ascontiguousarray(dequantised(self.tensor, self.rows, dtype).T)


@dataclass
class Matrix:
    """A stack of row blocks [rows, cols] and an optional bias [rows]."""
    tensors: list
    panels: list
    rows: int
    cols: int
    bias: np.ndarray | None

    def first(self, rows):
        """Its first rows, in whole panels."""
        return replace(self, rows=rows, panels=self.panels[:rows // PANEL])


@dataclass
class Routes:
    """Which experts a token goes to, ascending, and how much each counts: [rows, k].

    Rows with a negative slot have none: experts -1, weights 0.
    """
    experts: np.ndarray  # int32
    weights: np.ndarray


def quiet(table):
    """No method of the class `table` warns of overflow or NaN: those are results like others."""
    for name, method in list(vars(table).items()):
        if callable(method):
            setattr(table, name, np.errstate(over="ignore", invalid="ignore")(method))
    return table


@quiet
class Reference:
    """The op table on NumPy arrays of one dtype."""
    name = card_name = "cpu"
    architecture, fingerprint = platform.machine(), f"numpy {np.__version__}"

    def __init__(self, dtype=np.float32, memory_limit=None):
        """memory_limit: bytes that expanded weights may take (default: half of the free memory)."""
        self.dtype = np.dtype(dtype)
        self.free_bytes = memory_limit if memory_limit is not None else available_memory() // 2
        self.panels = {}  # address of a tensor -> its Panels: tied matrices are expanded once
        self.adjustments = {}  # slot -> ADJUSTMENT [n_vocab]
        self.last_tokens = {}  # slot -> the token drawn last for it
        self.allocated = {}  # purpose -> bytes
        self.tiles = {}  # weight shape -> sizes of safe token tiles, largest first

    def close(self):
        self.panels.clear()

    # ---- loading -----------------------------------------------------------------------------

    def matrix(self, tensors, bias=None):
        """Stack the row blocks `tensors`, each [rows, cols], with an optional bias [rows]."""
        panels = [panel for tensor in tensors for panel in self.expand(tensor)]
        return Matrix(tensors, panels, sum(t.shape[0] for t in tensors), tensors[0].shape[1],
                      None if bias is None else self.vector(bias))

    def experts(self, tensors):
        """A Matrix for each expert, or head, from `tensors`, each [experts, rows, cols]."""
        return [self.matrix(parts) for parts in zip(*(tensor.parts() for tensor in tensors))]

    def gated(self, gate_up, down, norm):
        """Handles of a gated feed-forward network, or of experts: `gate_up` for linear_silu, in one
        tensor or in two, and `down` for what it gives. norm: of the RMSNorm before them."""
        make = self.matrix if len(down[0].shape) == 2 else self.experts
        return make(gate_up), make(down)

    def vector(self, array):
        return np.asarray(array, self.dtype)

    def expand(self, tensor):
        """The tensor's panels. They stay quantised where they would not fit in memory."""
        place = tensor.data.ctypes.data
        if place not in self.panels:
            nbytes = int(np.prod(tensor.shape)) * self.dtype.itemsize
            fits = nbytes <= self.free_bytes
            self.free_bytes -= nbytes * fits
            panels = [Panel(tensor, slice(at, at + PANEL), None)
                      for at in range(0, tensor.shape[0], PANEL)]
            for panel in panels if fits else ():
                panel.values = panel.expanded(self.dtype)
            self.panels[place] = panels
        return self.panels[place]

    def pages(self, cfg, n_pages, kv_format, n_states=0, pending=1):
        """Storage for KV, with `states` for the recurrent layers of `n_states` sequences."""
        kv = Pages(cfg, n_pages, kv_format, self.dtype)
        self.allocated["kv"] = self.allocated.get("kv", 0) + kv.nbytes
        if cfg.n_state_layers:
            kv.states = self.states(cfg, n_states, pending)
        return kv

    def states(self, cfg, n_states, pending):
        """Recurrent state of `n_states` slots; a step leaves at most `pending` tokens pending."""
        states = States(cfg, n_states, pending, self.dtype)
        self.allocated["states"] = states.nbytes
        return states

    def tile_tokens(self, cfg):
        """Most rows of one attention tile: consecutive tokens of a sequence."""
        return 64

    # ---- steps: the same protocol as the device, with nothing to copy ---------------------------

    state_interval = 1
    steps_ahead = 0  # a result is there when an op returns
    captures = False

    def adjust(self, slot, table, n_slots):
        """Penalties and bias of the sequence in `slot`: sampling.ADJUSTMENT [n_vocab]."""
        self.adjustments[slot] = table

    def run(self, key, work):
        return work()

    def fetch(self, arrays):
        return lambda: arrays

    def download(self, array):
        return array

    upload_batch = upload_draws = download

    def download_row(self, array, row):
        return array[row]

    def synchronize(self):
        pass

    run_ahead = synchronize

    def mark(self):
        return time.perf_counter()

    def milliseconds(self, before, after):
        return 1e3 * (after - before)

    def stored_bytes(self, tensor):
        expanded = lambda part: self.panels[part.data.ctypes.data][0].values is not None
        return sum(int(np.prod(part.shape)) * self.dtype.itemsize if expanded(part)
                   else part.data.nbytes for part in tensor.parts())

    def free_memory(self):
        return available_memory() // 2

    def measure_bandwidth(self):
        """GB/s at which one thread reads memory."""
        block = np.ones(1 << 26, np.float32)
        began = time.perf_counter()
        block.max()
        return 1e-9 * block.nbytes / (time.perf_counter() - began)

    # ---- ops, in the order in which the forward pass calls them --------------------------------

    def embed(self, table, batch):
        """h [rows, n_embd]: one row of the table per token. FEED is the one that was drawn last for
        the row's slot; rows with another negative token are zero."""
        h = np.zeros((len(batch.tokens), table.cols), self.dtype)
        tokens = [self.last_tokens.get(slot, 0) if token == FEED else token
                  for token, slot in zip(batch.tokens.tolist(), batch.slots.tolist())]
        real = np.array(tokens) >= 0
        if real.any():
            h[real] = dequantised(table.tensors[0], np.array(tokens)[real], self.dtype)
        return h

    def rmsnorm(self, h, weight, eps, rows=None):
        """x = h / sqrt(mean(h^2) + eps) * weight, of all rows or of those in `rows`.

        h: the first len(weight) columns of what is given.
        """
        h = (h if rows is None else h[rows])[..., :len(weight)]
        mean = np.sum(h * h, axis=-1, keepdims=True) / self.dtype.type(h.shape[-1])
        return h / np.sqrt(mean + self.dtype.type(eps)) * weight

    rmsnorm_f32 = rmsnorm  # a result that is not the input of a matrix product

    def scale_rows(self, values, heads=1, pitch=None, width=None):
        """x [rows * heads, width]: `heads` pieces, `pitch` apart, of each row of `values`.

        By default the whole row is one piece. What a matrix product takes.
        """
        pitch = pitch or values.shape[1]
        return np.ascontiguousarray(values[:, :heads * pitch].reshape(-1, pitch)[:, :width])

    def linear(self, x, w, out=None):
        """y [rows, w.rows] = x [rows, w.cols] times the rows of w, plus its bias; in `out`, if any.
        """
        y = np.empty((len(x), w.rows), self.dtype) if out is None else out
        start = 0
        for panel in w.panels:
            weight = panel.expanded(self.dtype)
            self.multiply(x, weight, y[:, start:start + weight.shape[1]])
            start += weight.shape[1]
        if w.bias is not None:
            y += w.bias
        return y

    def multiply(self, x, weight, out):
        """out [rows, n] = x [rows, cols] times weight [cols, n], in safe tiles of rows."""
        if weight.shape not in self.tiles:
            self.tiles[weight.shape] = safe_tiles(weight)
        sizes, at = self.tiles[weight.shape], 0
        while at < len(x):
            left = len(x) - at
            size = min((s for s in sizes if s >= left), default=sizes[0])
            tile = x[at:at + size]
            if left < size:
                tile = np.zeros((size, x.shape[1]), x.dtype)
                tile[:left] = x[at:]
            out[at:at + size] = (np.ascontiguousarray(tile) @ weight)[:left]
            at += size

    def linear_silu(self, x, w, routes=None):
        """x [rows, F] = silu(gate) * up of x times the rows of w, those of gate first; or, with
        `routes`, of what linear_experts gives."""
        y = self.linear(x, w) if routes is None else self.linear_experts(x, w, routes)
        gate, up = np.split(y, 2, axis=-1)
        return silu(gate) * up

    def linear_add(self, x, w, h):
        """h += x times the rows of w, in place; h may have more rows, of padding, than x."""
        h[:len(x)] += self.linear(x, w)

    def rope_angles(self, cfg, batch):
        """cos and sin [rows, 2, rope_dim / 2] of position times the row's inverse frequencies."""
        inverse = np.array(cfg.rope_sets, np.float64)[batch.rope_sets]  # rows, rope_dim / 2
        angle = batch.positions[:, None].astype(np.float64) * inverse
        return (np.stack([np.cos(angle), np.sin(angle)], 1) * cfg.rope_magnitude).astype(self.dtype)

    def rope_kv(self, qkv, angles, q_norm, k_norm, cfg, layer, kv, batch):
        """Split qkv [rows, (heads + 2 kv heads) head_dim], norm and rotate q and k, store K and V.

        Returns q [rows, heads, head_dim]. With cfg.q_gated each q is followed by a gate of its
        size, see sigmoid_gate. Rows with a negative slot store nothing.
        """
        n_q = cfg.n_heads * (1 + cfg.q_gated)
        parts = qkv.reshape(len(qkv), n_q + 2 * cfg.n_kv_heads, cfg.head_dim)
        q, k, v = np.split(parts, [n_q, n_q + cfg.n_kv_heads], axis=1)
        q = q[:, ::1 + cfg.q_gated]
        if q_norm is not None:
            q, k = self.rmsnorm(q, q_norm, cfg.rms_eps), self.rmsnorm(k, k_norm, cfg.rms_eps)
        kv.store_rows(layer, batch, rotate(k, angles, cfg.rope_neox), v)
        return rotate(q, angles, cfg.rope_neox)

    def rope_latent(self, content, q, kv_a, angles, kv_norm, cfg, layer, kv, batch):
        """Queries and key of latent attention, whose key holds the value: rank = cfg.value_dim.

        Returns q [rows, heads, head_dim]: the `rank` values of a head in `content`, then the
        rotated last rope_dim of the key_dim values of a head in `q`. Stores as K the last head_dim
        columns of kv_a: `rank` values, normed, then rope_dim, rotated. Columns of q after the heads
        and of kv_a before the last head_dim are not read.
        """
        rank, of_heads = cfg.value_dim, (len(q), cfg.n_heads, -1)
        q = q[:, :cfg.n_heads * cfg.key_dim].reshape(of_heads)[..., -cfg.rope_dim:]
        key = kv_a[:, None, -cfg.head_dim:]
        kv.store_rows(layer, batch, np.concatenate([
            self.rmsnorm(key, kv_norm, cfg.rms_eps),
            rotate(key[..., rank:], angles, cfg.rope_neox)], axis=-1))
        return np.concatenate([content.reshape(of_heads), rotate(q, angles, cfg.rope_neox)], -1)

    def attention(self, q, cfg, layer, kv, batch):
        """x [rows, heads * head_dim]: softmax(q K^T * attn_scale) V over positions 0..own.

        With cfg.latent x is [rows * heads, value_dim]: each head goes into its own product.
        """
        x = np.zeros((len(q), cfg.n_heads, cfg.value_dim), self.dtype)
        for first, rows, slot, position in batch.tiles:
            if slot >= 0:
                x[first:first + rows] = self.attend(
                    q[first:first + rows], position, batch.page_table[slot], cfg, layer, kv)
        return x.reshape(-1, cfg.value_dim) if cfg.latent else x.reshape(len(q), -1)

    def attend(self, q, position, pages, cfg, layer, kv):
        """One tile: q [rows, heads, head_dim] of tokens at `position`, position + 1, ..."""
        kv_heads, group = cfg.n_kv_heads, cfg.n_heads // cfg.n_kv_heads
        real = len(q) * group
        padded = -(-real // ROWS) * ROWS
        # A row is a (token, head of the group) pair; tiles of 8 rows, as everywhere.
        queries = np.zeros((kv_heads, padded, cfg.head_dim), self.dtype)
        queries[:, :real] = (q.reshape(len(q), kv_heads, group, -1).swapaxes(0, 1)
                             .reshape(kv_heads, real, -1))
        queries = queries.reshape(kv_heads, -1, ROWS, cfg.head_dim)
        own = position + np.arange(padded).reshape(-1, ROWS) // group  # position of each row
        sums = (*queries.shape[:-1], cfg.value_dim)
        total = Softmax(sums, self.dtype)
        for start in range(0, position + len(q), SEGMENT):
            segment = Softmax(sums, self.dtype)
            for at in range(start, min(start + SEGMENT, position + len(q)), PAGE):
                key, value = kv.load(layer, pages[at // PAGE])  # kv heads, PAGE, values
                scores = queries @ key[:, None].swapaxes(2, 3) * self.dtype.type(cfg.attn_scale)
                # Masked positions may hold anything, and 0 * inf is NaN: a V that is not finite
                # (f32 only) is taken out of the product and counts through its score.
                finite = np.isfinite(value)
                scores = np.where(finite.all(axis=-1)[:, None, None], scores, np.nan)
                visible = at + np.arange(PAGE) <= own[..., None]
                segment.add(np.where(visible, scores, -np.inf).astype(self.dtype),
                            np.where(finite, value, 0)[:, None])
            total.merge(segment)
        x = total.result().reshape(kv_heads, padded, -1)[:, :real]
        x = x.reshape(kv_heads, len(q), group, -1).swapaxes(0, 1)
        return x.reshape(len(q), cfg.n_heads, -1)

    def sigmoid_gate(self, x, qkv, cfg):
        """x [rows, heads * head_dim] times the sigmoid of the gates in qkv, see rope_kv."""
        gate = qkv[:, :2 * x.shape[1]].reshape(len(x), cfg.n_heads, 2, cfg.head_dim)[:, :, 1]
        return times_sigmoid(x, gate.reshape(x.shape))

    def delta_conv(self, u, mixer, cfg, layer, kv, batch):
        """c [rows, delta_channels + 2 H_v] of u = q | k | v | z | beta | alpha [rows, .].

        Each channel of q, k and v: silu of the causal convolution over this token and those before
        it. Then q and k have length 1 per head, and q is divided by sqrt(d). Behind them for each
        v head beta, how much of a token is written, and decay, how much of the state stays.
        """
        channels, before = cfg.delta_channels, cfg.conv_width - 1
        heads = np.empty((len(u), channels // cfg.delta_dim, cfg.delta_dim), self.dtype)
        for first, rows, slot, position, *_ in batch.spans:
            span = np.zeros((before + rows, channels), self.dtype)
            span[before:] = u[first:first + rows, :channels]
            known = min(position, before) if slot >= 0 else 0
            span[before - known:before] = kv.states.recent[
                slot, layer, np.arange(position - known, position) % kv.states.ring, :channels]
            x = sum(span[i:i + rows] * mixer.conv[:, i] for i in range(cfg.conv_width))
            heads[first:first + rows] = silu(x).reshape(rows, *heads.shape[1:])
        eps, dim = self.dtype.type(cfg.rms_eps), self.dtype.type(cfg.delta_dim)
        length = np.sqrt(np.sum(heads * heads, axis=-1, keepdims=True) + eps)
        length[:, :cfg.delta_k_heads] *= np.sqrt(dim)
        length[:, 2 * cfg.delta_k_heads:] = 1  # v stays as it is
        beta, alpha = np.split(u[:, -2 * cfg.delta_v_heads:], 2, axis=1)
        softplus = np.logaddexp(self.dtype.type(0), alpha + mixer.dt)
        return np.concatenate([(heads / length).reshape(-1, channels), times_sigmoid(1, beta),
                               np.exp(mixer.decay * softplus)], axis=1)

    def delta_rule(self, u, c, cfg, layer, kv, batch):
        """o [rows, H_v d] = S^T q, S being the state of each v head after the row's own token.

        The state in memory takes the first `entering` of the span's pending tokens and its rows:
        none, those that are pending, or all. Rows with a negative slot give zeros.
        """
        states, channels = kv.states, cfg.delta_channels
        q, tokens = np.split(c, [cfg.delta_k_heads * cfg.delta_dim], axis=1)
        records = np.concatenate([u[:, :channels], tokens], axis=1)
        o = np.zeros((len(u), cfg.delta_v_heads, cfg.delta_dim), self.dtype)
        for first, rows, slot, position, pending, entering in batch.spans:
            if slot < 0:
                continue
            recent, state = states.recent[slot, layer], states.matrix[slot, layer]
            if position == pending:
                state[:] = 0
            state = state if entering else state.copy()
            for at in range(position - pending, position):
                delta_step(state, recent[at % states.ring, channels:], cfg, pending=True)
            state = state if entering > pending else state.copy()
            for row in range(first, first + rows):
                delta_step(state, records[row, channels:], cfg)
                o[row] = np.einsum("hvk,hk->hv", state, of_v_heads(q[row], cfg))
            kept = np.arange(max(0, rows - states.ring), rows)
            recent[(position + kept) % states.ring] = records[first + kept]
        return o.reshape(len(u), -1)

    def delta_norm(self, o, u, norm, cfg):
        """x [rows, H_v d] = rmsnorm of each head of o, times silu(z); z lies in u behind v."""
        heads = o.reshape(len(o), cfg.delta_v_heads, cfg.delta_dim)
        z = u[:, cfg.delta_channels:cfg.delta_channels + o.shape[1]]
        return self.rmsnorm(heads, norm, cfg.rms_eps).reshape(o.shape) * silu(z)

    def route(self, logits, bias, cfg, batch):
        """Routes of each row: its n_experts_used best by probability + bias, ties to the lower one.

        Of several groups only the best few count: by their largest probability, or, with sigmoid
        probabilities, by the sum of their two best biased ones. Weights have no bias.
        """
        logits = logits[:, :cfg.n_experts]
        if cfg.router_sigmoid:
            probability = times_sigmoid(1, logits)
        else:
            power = np.exp(logits - logits.max(axis=-1, keepdims=True))
            probability = power / power.sum(axis=-1, keepdims=True)
        score = probability if bias is None else probability + bias
        if cfg.router_groups > 1:
            groups = score.reshape(len(score), cfg.router_groups, -1)
            best = np.sort(groups, axis=-1)[..., -2 if cfg.router_sigmoid else -1:].sum(axis=-1)
            kept = best_of(best, cfg.router_groups).argsort(axis=-1) < cfg.router_groups_used
            score = np.where(kept[..., None], groups, -np.inf).reshape(score.shape)
        experts = np.sort(best_of(score, cfg.n_experts_used), axis=-1).astype(np.int32)
        weights = np.take_along_axis(probability, experts, axis=-1)
        if cfg.router_norm:
            weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), SMALLEST_SUM)
        real = batch.slots[:, None] >= 0
        return Routes(np.where(real, experts, -1),
                      np.where(real, weights * self.dtype.type(cfg.router_scale), 0))

    def linear_experts(self, x, w, routes):
        """y [rows * k, n] = for each row and each of its experts, x times the expert's rows.

        x has a row for each row, or for each of its k experts. Without an expert y is zero.
        """
        experts = routes.experts.reshape(-1)
        row_of = np.arange(len(experts)) // (len(experts) // len(x))
        y = np.zeros((len(experts), w[0].rows), self.dtype)
        for expert in np.unique(experts[experts >= 0]):
            chosen = experts == expert
            y[chosen] = self.linear(x[row_of[chosen]], w[expert])
        return y

    def linear_heads(self, x, w):
        """y [rows, heads * n] = row r * heads + h of x times the rows of head h."""
        return np.concatenate([self.linear(x[h::len(w)], head) for h, head in enumerate(w)], axis=1)

    def combine(self, y, routes, shared, logits, h):
        """h += what a row's experts gave, by weight, in index order, then the shared expert.

        `shared` [rows, n_embd] or None counts sigmoid(last column of `logits`), or 1 without them.
        """
        y = y.reshape(*routes.weights.shape, -1)
        total = np.zeros_like(h)
        for i in range(y.shape[1]):
            total += routes.weights[:, i, None] * y[:, i]
        if shared is not None:
            total += shared if logits is None else times_sigmoid(shared, logits[:, -1:])
        h += total

    def sample(self, logits, draws, batch):
        """(tokens int32, log probabilities f32) of one drawn token per row; see sampling.py.

        The tokens are also kept for rows of later steps that FEED on the last one of their slot.
        """
        tokens, logprobs = sampling.sample(logits, draws, self.adjustments)
        drawn = draws["active"] > 0
        self.last_tokens.update(zip(batch.slots[batch.logit_rows[drawn]].tolist(),
                                    np.maximum(tokens[drawn], 0).tolist()))
        return tokens, logprobs

    def copy_page(self, kv, source, target):
        for array in kv.arrays:
            array[:, target] = array[:, source]

    def save_pages(self, kv, pages):
        """The contents of `pages` in all layers as bytes, for load_pages of the same backend."""
        return np.concatenate([array[:, pages].reshape(-1).view(np.uint8) for array in kv.arrays])

    def load_pages(self, kv, pages, data):
        at = 0
        for array in kv.arrays:
            part = array[:, pages]
            array[:, pages] = data[at:at + part.nbytes].view(part.dtype).reshape(part.shape)
            at += part.nbytes

    def save_state(self, kv, slot):
        """The recurrent state of `slot` as bytes, for load_state of the same backend."""
        return kv.states.data[slot].reshape(-1).view(np.uint8).copy()

    def load_state(self, kv, slot, data):
        kv.states.data[slot] = data.view(self.dtype).reshape(kv.states.data.shape[1:])


class Softmax:
    """Running softmax of rows [..., ROWS, value_dim]: largest score, sum, weighted values."""

    def __init__(self, shape, dtype):
        self.largest = np.full((*shape[:-1], 1), -np.inf, dtype)
        self.sum = np.zeros((*shape[:-1], 1), dtype)
        self.values = np.zeros(shape, dtype)

    def rescale(self, largest):
        """Move to a new largest score; returns it with -inf (nothing seen yet) replaced by 0."""
        largest = np.maximum(self.largest, largest)
        finite = np.where(np.isneginf(largest), 0, largest).astype(largest.dtype)
        factor = np.exp(self.largest - finite)
        self.sum, self.values, self.largest = self.sum * factor, self.values * factor, largest
        return finite

    def add(self, scores, value):
        """Scores [..., ROWS, n] of n more positions and their values [..., n, value_dim]."""
        weights = np.exp(scores - self.rescale(scores.max(axis=-1, keepdims=True)))
        self.sum = self.sum + weights.sum(axis=-1, keepdims=True)
        self.values = self.values + weights @ value

    def merge(self, other):
        factor = np.exp(other.largest - self.rescale(other.largest))
        self.sum = self.sum + other.sum * factor
        self.values = self.values + other.values * factor

    def result(self):
        return self.values / np.where(self.sum == 0, 1, self.sum).astype(self.sum.dtype)


class Pages:
    """KV storage [layer, page, kv head, K|V, PAGE, head_dim] as f32, f16 or q8.

    Latent attention stores K alone, whose first value_dim values are V.
    q8: int8 with an f16 scale per 32 values along head_dim, scale = max|x| / 127.
    """

    def __init__(self, cfg, n_pages, kv_format, dtype):
        if kv_format == "q8" and cfg.head_dim % KV_BLOCK:
            raise RequestError(f"q8 stores {KV_BLOCK} values of a head together, and heads of this "
                               f"model have {cfg.head_dim}; use --kv f16", param="kv")
        self.format, self.dtype, self.value_dim = kv_format, dtype, cfg.value_dim
        self.states = None  # of recurrent layers
        shape = (cfg.n_kv_layers, n_pages, cfg.n_kv_heads, 2 - cfg.latent, PAGE, cfg.head_dim)
        stored = {"f32": dtype, "f16": np.float16, "q8": np.int8}[kv_format]
        self.data = np.zeros(shape, stored)
        self.scales = (np.zeros((*shape[:-1], cfg.head_dim // KV_BLOCK), np.float16)
                       if kv_format == "q8" else None)

    @property
    def arrays(self):
        return [self.data] if self.scales is None else [self.data, self.scales]

    @property
    def nbytes(self):
        return sum(array.nbytes for array in self.arrays)

    def store_rows(self, layer, batch, *key_value):
        """Write K and V (or K alone) [rows, kv heads, head_dim] of the rows that have a slot.

        f16 and q8 hold no more than F16_LARGEST either way; NaN becomes -F16_LARGEST.
        """
        real = batch.slots >= 0
        positions = batch.positions[real]
        pages, offsets = batch.page_table[batch.slots[real], positions // PAGE], positions % PAGE
        for kind, x in enumerate(key_value):
            x = x[real]
            if self.format != "f32":
                x = np.fmin(np.fmax(x, -F16_LARGEST), F16_LARGEST)
            if self.scales is not None:
                x, scale = quantise_q8(x)
                self.scales[layer, pages, :, kind, offsets] = scale
            self.data[layer, pages, :, kind, offsets] = x

    def load(self, layer, page):
        """K [kv heads, PAGE, head_dim] and V [kv heads, PAGE, value_dim] of one page."""
        x = self.data[layer, page].astype(self.dtype, copy=False)
        if self.scales is not None:
            blocks = x.reshape(*x.shape[:-1], -1, KV_BLOCK)
            x = (blocks * self.scales[layer, page, ..., None].astype(self.dtype)).reshape(x.shape)
        return x[:, 0], x[:, -1, :, :self.value_dim]


class States:
    """Recurrent state of the gated delta nets: [slot, layer] of a matrix and of recent tokens.

    matrix: S of each v head, transposed to [d of v, d of k], so that sums run along the last axis
    (einsum: without an array of products, 3 to 20 times as fast).
    recent: at place position % ring u's q | k | v of a token (the convolution looks back), then
    k | delta | beta | decay (a pending token enters the matrix later). The ring holds those that
    are pending and those that become so, or those that are pending and what the convolution needs.
    """

    def __init__(self, cfg, n_states, pending, dtype):
        split, self.ring, record = state_layout(cfg, pending)
        slots = n_states, cfg.n_state_layers
        self.data = np.zeros((*slots, split + self.ring * record), dtype)
        self.nbytes = self.data.nbytes
        self.matrix = self.data[..., :split].reshape(*slots, -1, cfg.delta_dim, cfg.delta_dim)
        self.recent = self.data[..., split:].reshape(*slots, self.ring, record)


def of_v_heads(x, cfg):
    """[H_v, d]: for each v head its k head of x [H_k d]."""
    head, group = np.arange(cfg.delta_v_heads), cfg.delta_v_heads // cfg.delta_k_heads
    k_head = head // group if cfg.delta_grouped else head % cfg.delta_k_heads
    return x.reshape(-1, cfg.delta_dim)[k_head]


def delta_step(state, token, cfg, pending=False):
    """Enter one token into state [H_v, d of v, d of k], in place. token: k | v | beta | decay; its
    v becomes delta, by which the state grows along k, and that of a pending token is delta."""
    n_k, n_v = cfg.delta_k_heads * cfg.delta_dim, cfg.delta_v_heads * cfg.delta_dim
    k, v, beta, decay = np.split(token, np.cumsum([n_k, n_v, cfg.delta_v_heads]))
    k, v = of_v_heads(k, cfg), v.reshape(-1, cfg.delta_dim)
    state *= decay[:, None, None]
    if not pending:
        v[:] = beta[:, None] * (v - np.einsum("hvk,hk->hv", state, k))
    state += v[..., None] * k[:, None]


def quantise_q8(x):
    """int8 values like x and f16 scales [..., blocks] = max|x| / 127 per 32 values.

    512 * 127 is the largest product that f16 holds.
    """
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, KV_BLOCK)
    scale = np.minimum(np.abs(blocks).max(axis=-1) / np.float32(127), 512).astype(np.float16)
    divisor = np.where(scale == 0, np.float16(1), scale).astype(np.float32)[..., None]
    values = np.clip(np.rint(blocks / divisor), -127, 127).astype(np.int8)
    return values.reshape(x.shape), scale


def times_sigmoid(x, gate):
    return x / (1 + np.exp(-gate))  # exp(-gate) = inf gives the right limit, zero


def silu(x):
    return times_sigmoid(x, x)


def rotate(x, angles, neox):
    """Rotate the first rope_dim values of each head of x [rows, heads, head_dim] in pairs.

    Pairs are (j, j + rope_dim / 2) if `neox`, else (2j, 2j + 1).
    """
    cos, sin = angles[:, 0, None], angles[:, 1, None]  # rows, 1, rope_dim / 2
    half = cos.shape[-1]
    first, second = ((slice(0, half), slice(half, 2 * half)) if neox else
                     (slice(0, 2 * half, 2), slice(1, 2 * half, 2)))
    a, b = x[..., first], x[..., second]
    rotated = x.copy()
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = a * sin + b * cos
    return rotated


def best_of(scores, n):
    """Indices of the n largest of each row, best first, ties to the lower one."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :n]


def dequantised(tensor, rows, dtype):
    """The chosen rows of a Tensor as a C-contiguous array."""
    raw = np.asarray(tensor.data).reshape(tensor.shape[0], -1)[rows]
    return np.ascontiguousarray(quants.dequantize(raw, tensor.type), dtype)


def safe_tiles(weight):
    """The sizes of TILES whose products with weight [cols, n] have the bits of 8-row products.

    A single row comes last: it is left alone where BLAS gives other bits to other places of 8.
    """
    x = np.random.default_rng(1).standard_normal((max(TILES), weight.shape[0])).astype(weight.dtype)
    eights = np.concatenate([x[at:at + ROWS] @ weight for at in range(0, len(x), ROWS)])
    turned = np.roll(x[:ROWS], 3, axis=0)  # the same rows at other places
    if (turned @ weight != np.roll(eights[:ROWS], 3, axis=0)).any():
        return (1,)
    return tuple(n for n in TILES if (x[:n] @ weight == eights[:n]).all())


def available_memory():
    """Bytes of memory that are free for use now."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
