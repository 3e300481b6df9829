"""Whole models against formulae in float64, written out token by token and head by head.

They cover what no golden file does: routing by sigmoid, in groups, with a bias, gated shared
experts in every combination, and a draft head with experts. Latent attention is expanded here, not
absorbed; the delta rule is its definition.
"""
import numpy as np
import pytest

import crafted as c
import leone
from models import draft_logits

IDS = [0, 3, 1, 4, 2, 2, 5, 0, 1, 1, 3, 4]
EPS, TOLERANCE = 1e-5, 2e-5  # of the largest logit; measured at most 3e-6


def rms(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    power = np.exp(x - x.max())
    return power / power.sum()


def rotated(x, position, neox):
    """The first 4 values of x, in pairs (0, 2), (1, 3) or (0, 1), (2, 3)."""
    x = x.copy()
    for j, pair in enumerate([(0, 2), (1, 3)] if neox else [(0, 1), (2, 3)]):
        angle = position * 10000.0 ** (-2 * j / 4)
        a, b = x[list(pair)]
        x[list(pair)] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return x


def attend(q, keys, values, scale):
    return softmax(np.array([scale * (q @ k) for k in keys])) @ np.array(values)


class Plain:
    """A model of crafted.py: its metadata and its tensors in float64."""

    def __init__(self, metadata, tensors):
        self.family = metadata["general.architecture"]
        self.metadata = metadata
        self.tensors = {name.removesuffix(".weight"): tensor.astype(np.float64)
                        for name, tensor in tensors.items()}

    def key(self, name, default=None):
        return self.metadata.get(f"{self.family}.{name}", default)

    def run(self, ids):
        """(logits, hidden) of all positions."""
        h = self.tensors["token_embd"][ids]
        for index in range(self.key("block_count") - self.key("nextn_predict_layers", 0)):
            h = self.layer(h, index)
        hidden = rms(h, self.tensors["output_norm"])
        return hidden @ self.tensors["token_embd"].T, hidden

    def layer(self, h, index):
        t = {name.removeprefix(f"blk.{index}."): tensor for name, tensor in self.tensors.items()
             if name.startswith(f"blk.{index}.")}
        mixer = self.delta_net if "ssm_a" in t else (
            self.latent if "attn_k_b" in t else self.attention)
        h = h + mixer(rms(h, t["attn_norm"]), t)
        x = rms(h, t.get("ffn_norm", t.get("post_attention_norm")))
        return h + np.array([self.mixture(row, t) if "ffn_gate_inp" in t else
                             feed(row, t["ffn_gate"], t["ffn_up"], t["ffn_down"]) for row in x])

    def mixture(self, x, t):
        logits = t["ffn_gate_inp"] @ x
        by_sigmoid = self.key("expert_gating_func", 1) == 2
        p = sigmoid(logits) if by_sigmoid else softmax(logits)
        score = p + t.get("exp_probs_b.bias", 0)
        groups = score.reshape(self.key("expert_group_count", 1), -1)
        best = [sum(sorted(group)[-2:]) if by_sigmoid else max(group) for group in groups]
        kept = np.argsort(best)[-self.key("expert_group_used_count", len(groups)):]
        size = groups.shape[1]
        allowed = [e for e in range(len(p)) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -score[e])[:self.key("expert_used_count")]
        norm = self.key("expert_weights_norm", self.family != "deepseek2")
        weights = p[chosen] / p[chosen].sum() if norm else p[chosen]
        y = sum(self.key("expert_weights_scale", 1.0) * weight * feed(
            x, *(t[f"ffn_{part}_exps"][e] for part in ("gate", "up", "down")))
            for e, weight in zip(chosen, weights))
        if "ffn_gate_shexp" in t:
            gate = sigmoid(t["ffn_gate_inp_shexp"] @ x) if "ffn_gate_inp_shexp" in t else 1
            y = y + gate * feed(x, *(t[f"ffn_{part}_shexp"] for part in ("gate", "up", "down")))
        return y

    def latent(self, x, t):
        keys, values, y = [[] for _ in range(4)], [[] for _ in range(4)], []
        for position, row in enumerate(x):
            q = (t["attn_q_b"] @ rms(t["attn_q_a"] @ row, t["attn_q_a_norm"])).reshape(4, 10)
            a = t["attn_kv_a_mqa"] @ row
            content, k_r = rms(a[:8], t["attn_kv_a_norm"]), rotated(a[8:], position, neox=False)
            heads = []
            for head in range(4):
                keys[head].append(np.concatenate([t["attn_k_b"][head].T @ content, k_r]))
                values[head].append(t["attn_v_b"][head] @ content)
                own = np.concatenate([q[head, :6], rotated(q[head, 6:], position, neox=False)])
                heads.append(attend(own, keys[head], values[head], 10 ** -0.5))
            y.append(t["attn_output"] @ np.concatenate(heads))
        return np.array(y)

    def attention(self, x, t):
        """Gated, with norms of the heads: 4 heads of 8 values share 2 of K and V."""
        keys, values, y = [[], []], [[], []], []
        for position, row in enumerate(x):
            q_gate = (t["attn_q"] @ row).reshape(4, 2, 8)
            k, v = (t["attn_k"] @ row).reshape(2, 8), (t["attn_v"] @ row).reshape(2, 8)
            heads = []
            for kv in range(2):
                keys[kv].append(rotated(rms(k[kv], t["attn_k_norm"]), position, neox=True))
                values[kv].append(v[kv])
            for head, (q, gate) in enumerate(q_gate):
                q = rotated(rms(q, t["attn_q_norm"]), position, neox=True)
                heads.append(attend(q, keys[head // 2], values[head // 2], 8 ** -0.5)
                             * sigmoid(gate))
            y.append(t["attn_output"] @ np.concatenate(heads))
        return np.array(y)

    def delta_net(self, x, t):
        """2 heads of q and k, 4 of v, 8 values each; a convolution over 4 tokens."""
        state, before, y = np.zeros((4, 8, 8)), [np.zeros(64)] * 3, []
        for row in x:
            before.append(t["attn_qkv"] @ row)
            mixed = silu(sum(t["ssm_conv1d"][:, i] * before[-4 + i] for i in range(4)))
            q, k, v = mixed[:16].reshape(2, 8), mixed[16:32].reshape(2, 8), mixed[32:].reshape(4, 8)
            z = (t["attn_gate"] @ row).reshape(4, 8)
            if "ssm_ba" in t:
                beta, alpha = (t["ssm_ba"] @ row).reshape(2, 2, 2).swapaxes(0, 1).reshape(2, 4)
            else:
                beta, alpha = t["ssm_beta"] @ row, t["ssm_alpha"] @ row
            decay = np.exp(t["ssm_a"] * np.log1p(np.exp(alpha + t["ssm_dt.bias"])))
            heads = []
            for head in range(4):
                of = head // 2 if self.family == "qwen3next" else head % 2
                unit = lambda u: u / np.sqrt(u @ u + EPS)
                key = unit(k[of])
                state[head] *= decay[head]
                delta = sigmoid(beta[head]) * (v[head] - state[head].T @ key)
                state[head] += np.outer(key, delta)
                o = state[head].T @ (unit(q[of]) / 8 ** 0.5)
                heads.append(rms(o, t["ssm_norm"]) * silu(z[head]))
            y.append(t["ssm_out"] @ np.concatenate(heads))
        return np.array(y)

    def drafts(self, ids):
        """Logits of the draft head for all positions but the last."""
        index, (_, hidden) = self.key("block_count") - 1, self.run(ids[:-1])
        t = {name.removeprefix(f"blk.{index}.nextn."): tensor
             for name, tensor in self.tensors.items()}
        e = rms(self.tensors["token_embd"][ids[1:]], t["enorm"])
        z = np.concatenate([e, rms(hidden, t["hnorm"])], axis=1) @ t["eh_proj"].T
        return rms(self.layer(z, index), t["shared_head_norm"]) @ self.tensors["token_embd"].T


def feed(x, gate, up, down):
    return down @ (silu(gate @ x) * (up @ x))


def check(metadata, tensors, path):
    plain = Plain(metadata, tensors)
    path.write_bytes(c.file_bytes(metadata, tensors))
    with leone.Engine(path, "cpu", "f32", context=64) as engine:
        pairs = [(engine.logits(IDS), plain.run(IDS)[0])]
        if engine.cfg.n_mtp:
            pairs.append((draft_logits(engine, IDS), plain.drafts(IDS)))
    for found, expected in pairs:
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("changes", [
    {},
    {"expert_gating_func": 1},
    {"expert_weights_norm": False, "expert_weights_scale": 0.5},
    {"expert_group_used_count": 2},
    {"expert_gating_func": 1, "expert_group_count": 4, "expert_group_used_count": 3,
     "expert_weights_norm": False},
    {"expert_used_count": 1, "expert_group_count": 1, "expert_group_used_count": 1},
], ids=["sigmoid", "softmax", "as they are", "all groups", "single", "top 1"])
def test_routers(changes, tmp_path):
    metadata, tensors = c.tiny_latent()
    metadata |= {f"deepseek2.{key}": value for key, value in changes.items()}
    check(metadata, tensors, tmp_path / "a.gguf")


def test_the_bias_decides(tmp_path):
    """With it another expert is chosen, but its weight stays what it is."""
    metadata, tensors = c.tiny_latent()
    tensors["blk.1.exp_probs_b.bias"] = np.array([0, 0, 3, 3], np.float32)
    check(metadata, tensors, tmp_path / "a.gguf")
    del tensors["blk.1.exp_probs_b.bias"]
    check(metadata, tensors, tmp_path / "b.gguf")


@pytest.mark.parametrize("family", ["qwen35moe", "qwen3next"])
def test_hybrids(family, tmp_path):
    metadata, tensors = c.tiny_hybrid(family)
    if family == "qwen3next":
        beta, alpha = tensors.pop("blk.0.ssm_beta.weight"), tensors.pop("blk.0.ssm_alpha.weight")
        tensors["blk.0.ssm_ba.weight"] = np.concatenate([beta[:2], alpha[:2], beta[2:], alpha[2:]])
    check(metadata, tensors, tmp_path / "a.gguf")
