"""GGUF files written byte by byte, so that a test can make any field wrong."""
import struct

import numpy as np

F32, F16, Q4_0, Q4_K, I32 = 0, 1, 2, 12, 26  # tensor types
U8, U32, I32_VALUE, FLOAT32, BOOL, STRING, ARRAY = 0, 4, 5, 6, 7, 8, 9  # value types
ALIGNMENT = 32


def string(text):
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def key(name, kind, payload):
    """A metadata entry with any payload."""
    return string(name) + struct.pack("<I", kind) + payload


def array(name, kind, count, payload):
    return key(name, ARRAY, struct.pack("<IQ", kind, count) + payload)


def entry(name, value):
    """A metadata entry: bool, int (u32), float (f32), str or a list of them (ints as i32)."""
    if isinstance(value, list) and value and isinstance(value[0], (str, bytes)):
        return array(name, STRING, len(value), b"".join(map(string, value)))
    if isinstance(value, list) and value and isinstance(value[0], float):
        return array(name, FLOAT32, len(value), np.array(value, "<f4").tobytes())
    if isinstance(value, list):
        return array(name, I32_VALUE, len(value), np.array(value, "<i4").tobytes())
    if isinstance(value, bool):
        return key(name, BOOL, bytes([value]))
    if isinstance(value, int):
        return key(name, U32 if value >= 0 else I32_VALUE, struct.pack("<I", value % 2**32))
    if isinstance(value, float):
        return key(name, FLOAT32, struct.pack("<f", value))
    return key(name, STRING, string(value))


def tensor_entry(name, lengths, kind, offset):
    """lengths in the order of the file: the contiguous axis first."""
    return (string(name) + struct.pack("<I", len(lengths))
            + b"".join(struct.pack("<Q", n) for n in lengths) + struct.pack("<IQ", kind, offset))


def padding(length):
    return bytes(-length % ALIGNMENT)


def file_bytes(metadata, tensors, extra_keys=(), extra_tensors=(), **changed):
    """A file of metadata {name: value} and tensors {name: float32 array or (lengths, type, bytes)}.

    extra_keys, extra_tensors: entries as bytes, after the others. changed: magic, version, n_keys,
    n_tensors.
    """
    entries, data = [], b""
    for name, tensor in tensors.items():
        if isinstance(tensor, np.ndarray):
            tensor = tensor.shape[::-1], F32, tensor.astype("<f4").tobytes()
        lengths, kind, content = tensor
        entries.append(tensor_entry(name, lengths, kind, len(data)))
        data += content + padding(len(content))
    head = changed.get("magic", b"GGUF") + struct.pack(
        "<IQQ", changed.get("version", 3),
        changed.get("n_tensors", len(entries) + len(extra_tensors)),
        changed.get("n_keys", len(metadata) + len(extra_keys)))
    head += b"".join([entry(name, value) for name, value in metadata.items()] + list(extra_keys)
                     + entries + list(extra_tensors))
    return head + padding(len(head)) + data


def tiny_model():
    """(metadata, tensors) of a valid model with one layer of small random numbers."""
    rng = np.random.default_rng(5)
    n_embd, n_heads, n_kv_heads, head_dim, n_ff = 16, 4, 2, 8, 24
    tokens = ["a", "b", "c", "ab", "abc", "<|end|>"]
    metadata = {
        "general.architecture": "llama", "general.name": "tiny", "llama.block_count": 1,
        "llama.context_length": 64, "llama.embedding_length": n_embd,
        "llama.feed_forward_length": n_ff, "llama.attention.head_count": n_heads,
        "llama.attention.head_count_kv": n_kv_heads, "llama.attention.key_length": head_dim,
        "llama.attention.value_length": head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 3],
        "tokenizer.ggml.merges": ["a b", "ab c"], "tokenizer.ggml.eos_token_id": 5,
    }
    shapes = {
        "token_embd.weight": (len(tokens), n_embd), "output_norm.weight": (n_embd,),
        "blk.0.attn_norm.weight": (n_embd,), "blk.0.ffn_norm.weight": (n_embd,),
        "blk.0.attn_q.weight": (n_heads * head_dim, n_embd),
        "blk.0.attn_k.weight": (n_kv_heads * head_dim, n_embd),
        "blk.0.attn_v.weight": (n_kv_heads * head_dim, n_embd),
        "blk.0.attn_output.weight": (n_embd, n_heads * head_dim),
        "blk.0.ffn_gate.weight": (n_ff, n_embd), "blk.0.ffn_up.weight": (n_ff, n_embd),
        "blk.0.ffn_down.weight": (n_embd, n_ff),
    }
    return metadata, {name: rng.standard_normal(shape, np.float32)
                      for name, shape in shapes.items()}


def random_tensors(shapes):
    rng = np.random.default_rng(6)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def tiny_mixture(family="llama"):
    """The tiny model with four experts, of which a token uses two."""
    metadata, tensors = tiny_model()
    metadata = {name.replace("llama.", f"{family}."): value for name, value in metadata.items()}
    metadata |= {"general.architecture": family,
                 f"{family}.expert_count": 4, f"{family}.expert_used_count": 2}
    for name in "ffn_gate", "ffn_up", "ffn_down":
        del tensors[f"blk.0.{name}.weight"]
    return metadata, tensors | random_tensors({
        "blk.0.ffn_gate_inp.weight": (4, 16), "blk.0.ffn_gate_exps.weight": (4, 24, 16),
        "blk.0.ffn_up_exps.weight": (4, 24, 16), "blk.0.ffn_down_exps.weight": (4, 16, 24)})


def tiny_latent():
    """Latent attention, one dense layer, one with sigmoid routing in groups and shared experts."""
    metadata, tensors = tiny_mixture("deepseek2")
    dense = {name: tensor for name, tensor in tiny_model()[1].items()
             if "blk" not in name or "ffn" in name or "attn_norm" in name}
    metadata |= {f"deepseek2.{key}": value for key, value in {
        "block_count": 2, "leading_dense_block_count": 1, "rope.dimension_count": 4,
        "attention.head_count_kv": 1, "attention.kv_lora_rank": 8, "attention.q_lora_rank": 12,
        "attention.key_length": 12, "attention.value_length": 8, "attention.key_length_mla": 10,
        "attention.value_length_mla": 6, "expert_feed_forward_length": 24,
        "expert_shared_count": 2, "expert_group_count": 2, "expert_group_used_count": 1,
        "expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}.items()}
    for index in 0, 1:
        dense |= random_tensors({f"blk.{index}.{name}.weight": shape for name, shape in {
            "attn_q_a": (12, 16), "attn_q_a_norm": (12,), "attn_q_b": (40, 12),
            "attn_kv_a_mqa": (12, 16), "attn_kv_a_norm": (8,), "attn_k_b": (4, 8, 6),
            "attn_v_b": (4, 6, 8), "attn_output": (16, 24)}.items()})
    dense |= {name.replace("blk.0", "blk.1"): tensor for name, tensor in tensors.items()
              if "ffn" in name or "attn_norm" in name}
    return metadata, dense | random_tensors({
        "blk.1.exp_probs_b.bias": (4,), "blk.1.ffn_gate_shexp.weight": (48, 16),
        "blk.1.ffn_up_shexp.weight": (48, 16), "blk.1.ffn_down_shexp.weight": (16, 48)})


def tiny_hybrid(family="qwen35moe"):
    """A gated delta net, gated attention and a draft head, each with experts."""
    metadata, tensors = tiny_mixture(family)
    metadata |= {f"{family}.{key}": value for key, value in {
        "block_count": 3, "nextn_predict_layers": 1, "full_attention_interval": 2,
        "attention.recurrent_layers": [1, 0, 0], "rope.dimension_count": 4,
        "rope.dimension_sections": [1, 1, 0, 0], "ssm.conv_kernel": 4, "ssm.state_size": 8,
        "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 32,
        "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 24}.items()}
    shapes = {"blk.0.attn_qkv.weight": (64, 16), "blk.0.attn_gate.weight": (32, 16),
              "blk.0.ssm_conv1d.weight": (64, 4), "blk.0.ssm_dt.bias": (4,), "blk.0.ssm_a": (4,),
              "blk.0.ssm_beta.weight": (4, 16), "blk.0.ssm_alpha.weight": (4, 16),
              "blk.0.ssm_norm.weight": (8,), "blk.0.ssm_out.weight": (16, 32),
              "blk.2.nextn.eh_proj.weight": (16, 32), "blk.2.nextn.enorm.weight": (16,),
              "blk.2.nextn.hnorm.weight": (16,), "blk.2.nextn.shared_head_norm.weight": (16,)}
    for index in 0, 1, 2:
        block = f"blk.{index}."
        tensors |= {name.replace("blk.0.", block): tensor for name, tensor in tensors.items()
                    if name.startswith("blk.0.ffn_") and "norm" not in name}
        shapes |= {f"{block}{name}.weight": shape for name, shape in {
            "attn_norm": (16,), "post_attention_norm": (16,), "ffn_gate_inp_shexp": (16,),
            "ffn_gate_shexp": (24, 16), "ffn_up_shexp": (24, 16), "ffn_down_shexp": (16, 24),
        }.items()}
        if index:
            shapes |= {f"{block}{name}.weight": shape for name, shape in {
                "attn_q": (64, 16), "attn_k": (16, 16), "attn_v": (16, 16), "attn_q_norm": (8,),
                "attn_k_norm": (8,), "attn_output": (16, 32)}.items()}
    tensors = {name: tensor for name, tensor in tensors.items()
               if not name.startswith(("blk.0.attn", "blk.0.ffn_norm"))} | random_tensors(shapes)
    tensors["blk.0.ssm_a"] = -np.abs(tensors["blk.0.ssm_a"])
    return metadata, tensors


def contents(gguf):
    """(metadata, tensors) of a model.GGUF, to be changed and written again."""
    def plain(value):
        if isinstance(value, np.ndarray):
            return value.tolist()
        return value if isinstance(value, (str, int, float)) else list(value)

    return ({name: plain(value) for name, value in gguf.metadata.items()},
            {tensor.name: (tensor.shape[::-1], int(tensor.type), tensor.data.tobytes())
             for tensor in gguf.tensors.values()})
