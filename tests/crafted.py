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
        return key(name, U32, struct.pack("<I", value))
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
