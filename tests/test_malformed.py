"""Damaged and hostile files: each ends in one clear line, fast and in little memory."""
import contextlib
import os
import re
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import crafted as c
import device
import gguf_file
import model
import tools
from errors import ModelError
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "qwen3-yarn-q4km.gguf"
SECONDS, KILOBYTES = 1.0, 300 << 10  # what one file may take
DROP = object()  # as a value: the entry is not written
SPARSE = 16 << 30  # a file of this size lets lengths pass that a small one refuses


def tiny(changed_keys=(), changed_tensors=(), **fields):
    """The valid tiny model with some entries changed, added or dropped."""
    metadata, tensors = c.tiny_model()
    for entries, changes in ((metadata, changed_keys), (tensors, changed_tensors)):
        entries.update(changes)
        for name in [name for name, value in entries.items() if value is DROP]:
            del entries[name]
    return c.file_bytes(metadata, tensors, **fields)


def variant(make, name, value=DROP):
    """A valid model of another family with one key or tensor changed, or dropped."""
    metadata, tensors = make()
    entries = tensors if name in tensors or isinstance(value, (np.ndarray, tuple)) else metadata
    entries[f"{metadata['general.architecture']}.{name}" if entries is metadata else name] = value
    keep = lambda entries: {name: value for name, value in entries.items() if value is not DROP}
    return c.file_bytes(keep(metadata), keep(tensors))


def mixture(name, value=DROP):
    return variant(c.tiny_mixture, name, value)


def latent(name, value=DROP):
    return variant(c.tiny_latent, name, value)


def hybrid(name, value=DROP):
    return variant(c.tiny_hybrid, name, value)


def key_is(name, value):
    return tiny({name: value})


def tensor_is(name, value):
    return tiny(changed_tensors={name: value})


def with_key(*entries, **fields):
    return tiny(extra_keys=entries, **fields)


def with_tensor(name, lengths, kind=c.F32, offset=0):
    return tiny(extra_tensors=[c.tensor_entry(name, lengths, kind, offset)])


def cut_after(marker, more=0):
    """The tiny file up to the end of the first `marker` and some bytes more."""
    data = tiny()
    return data[:data.index(marker) + len(marker) + more]


def vector(*numbers):
    return np.array(numbers, np.float32)


def matrix(rows, cols):
    return np.ones((rows, cols), np.float32)


VALID = tiny()
NORM = "blk.0.attn_norm.weight"
HUGE = struct.pack("<Q", (1 << 64) - 1)
EPS = "llama.attention.layer_norm_rms_epsilon"
SCALING = "llama.rope.scaling."

# name -> (bytes of the file, what the message must say)
CASES = {
    # not a GGUF file
    "empty": (b"", "cannot open .* empty"),
    "two bytes": (b"GG", "not a GGUF file"),
    "another format": (b"PK\3\4" + bytes(100), "not a GGUF file"),
    "version 0": (tiny(version=0), "version 0"),
    "version 1": (tiny(version=1), "GGUF version 1: only 2 and 3"),
    "version 99": (tiny(version=99), "version 99"),
    "big endian": (tiny(version=3 << 24), "only 2 and 3"),
    # cut off, in every section
    "cut in the version": (VALID[:6], "the version"),
    "cut in the number of tensors": (VALID[:12], "number of tensors"),
    "cut in the number of keys": (VALID[:20], "number of keys"),
    "cut in a key's length": (VALID[:28], "a metadata key"),
    "cut in a key": (VALID[:40], "a metadata key"),
    "cut before a value type": (cut_after(b"general.name"), "type of 'general.name'"),
    "cut in a string value": (cut_after(b"general.name", 13), "'general.name' goes on past"),
    "cut in a number": (cut_after(b"llama.block_count", 6), "'llama.block_count' goes on"),
    "cut in an array's head": (cut_after(b"ggml.tokens", 8), "ggml.tokens"),
    "cut in an array of strings": (cut_after(b"ggml.tokens", 70), "string of 'tokenizer.ggml.tok"),
    "cut in an array of numbers": (cut_after(b"ggml.token_type", 20), "ggml.token_type' goes on"),
    "cut between keys": (cut_after(b"ab c"), "metadata key"),
    "cut in a tensor name": (cut_after(b"blk.0.attn_v"), "name of a tensor"),
    "cut in a shape": (cut_after(b"blk.0.attn_v.weight", 12), "shape of tensor 'blk.0.attn_v"),
    "cut in a tensor type": (cut_after(b"blk.0.attn_v.weight", 21), "type of tensor"),
    "cut in a tensor offset": (cut_after(b"blk.0.attn_v.weight", 28), "offset of tensor"),
    "cut before the data": (cut_after(b"blk.0.ffn_down.weight", 32), "ends at byte"),
    "cut in the last tensor": (VALID[:-1], "ends at byte"),
    # counts and lengths
    "2^64 - 1 keys": (tiny(n_keys=(1 << 64) - 1), "number of keys is 1844"),
    "2^64 - 1 tensors": (tiny(n_tensors=(1 << 64) - 1), "number of tensors is 1844"),
    "2^63 tensors": (tiny(n_tensors=1 << 63), "number of tensors is 922"),
    "one key too many": (tiny(n_keys=19), "."),
    "one tensor too many": (tiny(n_tensors=12), "."),
    "a key of 2^63 bytes": (with_key(struct.pack("<Q", 1 << 63)), "metadata key goes on"),
    "a key of 2^64 - 1 bytes": (with_key(HUGE), "metadata key goes on"),
    "a key of 1000 bytes": (with_key(c.entry("k" * 1000, 1)), "at most 128 printable"),
    "a key that is not UTF-8": (with_key(c.entry(b"\xff\xfe", 1)), "characters of UTF-8"),
    "a key with a line break": (with_key(c.entry("a\nb", 1)), "printable characters"),
    "a string of 2^40 bytes": (with_key(c.key("k", c.STRING, struct.pack("<Q", 1 << 40))), "'k' "),
    "an array of 2^61 numbers": (with_key(c.array("k", c.U32, 1 << 61, b"")), "of 'k' is 23"),
    "an array of 2^20 numbers": (with_key(c.array("k", c.U32, 1 << 20, b"")), "'k' goes on past"),
    "an array of 2^64 - 1 bytes": (with_key(c.array("k", c.U8, (1 << 64) - 1, b"")), "k' is 1844"),
    "an array of 2^61 strings": (with_key(c.array("k", c.STRING, 1 << 61, b"")), "of 'k' is 23"),
    "an array with a string of 2^63 bytes": (
        with_key(c.array("k", c.STRING, 2, struct.pack("<Q", 1 << 63))), "a string of 'k'"),
    "an array with a string of 2^64 - 1 bytes": (
        with_key(c.array("k", c.STRING, 2, HUGE + bytes(8))), "a string of 'k'"),
    "an array of arrays": (with_key(c.array("k", c.ARRAY, 1, bytes(12))), "value type 9"),
    "2000 nested arrays": (
        with_key(c.array("k", c.ARRAY, 1, struct.pack("<IQ", c.ARRAY, 1) * 2000)), "value type 9"),
    "value type 13": (with_key(c.key("k", 13, bytes(8))), "unknown value type 13"),
    "item type 99": (with_key(c.array("k", 99, 1, bytes(8))), "unknown value type 99"),
    "a key twice": (with_key(c.entry("general.name", "again")), "'general.name' is there twice"),
    # alignment
    "alignment 0": (key_is("general.alignment", 0), "alignment is 0"),
    "alignment 24": (key_is("general.alignment", 24), "power of two"),
    "alignment 2^31": (key_is("general.alignment", 1 << 31), "power of two"),
    "alignment as text": (key_is("general.alignment", "32"), "power of two"),
    "alignment as an array": (key_is("general.alignment", [32]), "power of two"),
    # the tensor table
    "no dimension": (with_tensor("t", []), "0 dimensions"),
    "5 dimensions": (with_tensor("t", [1] * 5), "5 dimensions"),
    "2^32 - 1 dimensions": (
        tiny(extra_tensors=[c.string("t") + b"\xff" * 4]), "4294967295 dimensions"),
    "a dimension of 0": (with_tensor("t", [32, 0]), "cannot lie in"),
    "2^33 x 2^33 values": (with_tensor("t", [1 << 33, 1 << 33]), "cannot lie in"),
    "2^32 x 2^32 values": (with_tensor("t", [1 << 32, 1 << 32]), "cannot lie in"),
    "2^63 values": (with_tensor("t", [1 << 63]), "cannot lie in"),
    "a type that was removed": (with_tensor("t", [32], 4), "unknown type 4"),
    "type 2^32 - 1": (with_tensor("t", [32], (1 << 32) - 1), "unknown type 4294967295"),
    "half a block": (with_tensor("t", [100], c.Q4_K), "multiple of 256"),
    "an offset between alignments": (with_tensor("t", [4], offset=8), "not at a multiple of 32"),
    "an offset of 2^40": (with_tensor("t", [4], offset=1 << 40), "ends at byte 1099"),
    "an offset of 2^64 - 32": (with_tensor("t", [4], offset=(1 << 64) - 32), "ends at byte 1844"),
    "a tensor twice": (with_tensor(NORM, [4]), "is there twice"),
    "a tensor name that is not UTF-8": (with_tensor(b"\xff", [4]), "characters of UTF-8"),
    "a tensor name of 300 bytes": (with_tensor("n" * 300, [4]), "at most 128 printable"),
    # metadata without sense
    "no architecture": (key_is("general.architecture", DROP), "'general.architecture' is missing"),
    "architecture as a number": (key_is("general.architecture", 7), "must be of type str, not 7"),
    "an unknown architecture": (key_is("general.architecture", "gpt5"), "'gpt5' is not supported"),
    "no layers": (key_is("llama.block_count", 0), "must lie in 1"),
    "no block count": (key_is("llama.block_count", DROP), "'llama.block_count' is missing"),
    "no heads": (key_is("llama.attention.head_count", 0), "must lie in 1"),
    "heads per layer": (key_is("llama.attention.head_count", [4]), "must be of type int"),
    "heads as true": (key_is("llama.attention.head_count", True), "must be of type int"),
    "3 KV heads for 4 heads": (key_is("llama.attention.head_count_kv", 3), "shared out over 3"),
    "2^31 columns": (key_is("llama.embedding_length", 1 << 31), "must lie in 1"),
    "no context": (key_is("llama.context_length", 0), "must lie in 1"),
    "values larger than keys": (key_is("llama.attention.value_length", 16), "K and V"),
    "epsilon is not a number": (key_is(EPS, float("nan")), "not nan"),
    "epsilon is infinite": (key_is(EPS, float("inf")), "not inf"),
    "epsilon is 0": (key_is(EPS, 0.0), "not 0.0"),
    "epsilon is 2": (key_is(EPS, 2.0), "not 2.0"),
    "a RoPE base of 0": (key_is("llama.rope.freq_base", 0.0), "not 0.0"),
    "7 rotated values": (key_is("llama.rope.dimension_count", 7), "cannot rotate 7"),
    "more rotated values than a head has": (key_is("llama.rope.dimension_count", 10), "rotate 10"),
    "an unknown RoPE scaling": (key_is(SCALING + "type", "dynamic"), "'dynamic' is not supported"),
    "an unknown RoPE key": (key_is(SCALING + "alpha", 2.0), "not understood"),
    "yarn without a factor": (key_is(SCALING + "type", "yarn"), "factor' is missing"),
    "yarn by infinity": (tiny(
        {SCALING + "type": "yarn", SCALING + "factor": float("inf")}), "not inf"),
    "yarn on a base of 1": (tiny(
        {SCALING + "type": "yarn", SCALING + "factor": 2.0, "llama.rope.freq_base": 1.0}), "above"),
    "longrope without tables": (key_is(SCALING + "type", "longrope"), "needs the tensors"),
    # tensors that do not fit the metadata
    "no token table": (tensor_is("token_embd.weight", DROP), "'token_embd.weight'"),
    "no attn_q": (tensor_is("blk.0.attn_q.weight", DROP), "attn_q.weight'.*is missing"),
    "no output norm": (tensor_is("output_norm.weight", DROP), "output_norm.*is missing"),
    "a layer less": (key_is("llama.block_count", 2), "'blk.1.*is missing"),
    "a layer more": (tensor_is("blk.1.attn_norm.weight", vector(*[1] * 16)), "no place"),
    "a misshapen attn_k": (tensor_is("blk.0.attn_k.weight", matrix(8, 16)),
                           r"must have shape \(16, 16\), not \(8, 16\)"),
    "a transposed ffn_down": (tensor_is("blk.0.ffn_down.weight", matrix(24, 16)),
                              r"must have shape \(16, 24\), not \(24, 16\)"),
    "a flat matrix": (tensor_is("blk.0.ffn_down.weight", vector(*[1] * 384)),
                      "must have shape"),
    "a flat token table": (tensor_is("token_embd.weight", vector(1, 2, 3)), "token_embd"),
    "an F16 norm": (tensor_is(NORM, ([16], c.F16, bytes(32))), "type F32, not F16"),
    "a norm with NaN": (tensor_is(NORM, vector(*[1] * 15, np.nan)), "not finite"),
    "integer weights": (tensor_is("blk.0.ffn_up.weight", ([16, 24], c.I32, bytes(1536))),
                        "I32, which cannot hold weights"),
    "a tensor without a place": (
        tensor_is("blk.0.attn_sinks.weight", vector(1)), "attn_sinks.*no place"),
    "a bias for q only": (tensor_is("blk.0.attn_q.bias", vector(*[0] * 32)), "attn_k.bias"),
    "a bias for k only": (tensor_is("blk.0.attn_k.bias", vector(*[0] * 16)), "attn_q.bias"),
    "a short RoPE table": (tensor_is("rope_freqs.weight", vector(1, 1, 1)), "shape"),
    "a RoPE table with 0": (tensor_is("rope_freqs.weight", vector(1, 0, 1, 1)), "positive"),
    "the long RoPE table only": (
        tensor_is("rope_factors_long.weight", vector(1, 1, 1, 1)), "expected short and"),
    # experts
    "experts without their tensors": (
        tiny({"llama.expert_count": 4, "llama.expert_used_count": 2}), "gate_inp.*is missing"),
    "-1 experts": (with_key(c.key("llama.expert_count", c.I32_VALUE, b"\xff" * 4)), "not -1"),
    "2^31 experts": (mixture("expert_count", 1 << 31), "must lie in 1..1048576, not 2147483648"),
    "an expert more": (mixture("expert_count", 5), r"shape \(5, 16\), not \(4, 16\)"),
    "experts of no width": (mixture("expert_feed_forward_length", 0), "must lie in 1"),
    "no experts used": (mixture("expert_used_count", 0), "must lie in 1..4, not 0"),
    "more experts used than there are": (mixture("expert_used_count", 5), "in 1..4, not 5"),
    "an unsaid number of used experts": (mixture("expert_used_count"), "used_count' is missing"),
    "3 groups of 4 experts": (mixture("expert_group_count", 3), "4 experts, 2 for a token, cannot"),
    "no groups": (mixture("expert_group_count", 0), "must lie in 1..4, not 0"),
    "3 groups used of 2": (latent("expert_group_used_count", 3), "must lie in 1..2, not 3"),
    "3 experts from a group of 2": (latent("expert_used_count", 3), "1 for a token"),
    "sigmoid groups of one expert": (latent("expert_group_count", 4), "over 4 groups"),
    "an unknown gating function": (mixture("expert_gating_func", 3), "must lie in 1..2, not 3"),
    "weights scaled by NaN": (mixture("expert_weights_scale", float("nan")), "not nan"),
    "weights scaled by -1": (mixture("expert_weights_scale", -1.0), "not -1.0"),
    "weights normalised by 1": (mixture("expert_weights_norm", 1), "must be of type bool"),
    "an unknown key of experts": (mixture("expert_group_scale", 2.0), "not understood"),
    "more dense layers than layers": (latent("leading_dense_block_count", 3), "in 0..2, not 3"),
    "a dense layer more": (latent("leading_dense_block_count", 2), "blk.1.ffn_gate.weight'"),
    "2^20 shared experts": (latent("expert_shared_count", 1 << 20), "must lie in 0..1048576"),
    "-1 shared experts": (latent("expert_shared_count", -1), "must lie in 0"),
    "a shared expert more": (latent("expert_shared_count", 3), r"must have shape \(72, 16\)"),
    "a shared expert without a key": (latent("expert_shared_count"), "_shexp.weight'.*no place"),
    "no router": (mixture("blk.0.ffn_gate_inp.weight"), "gate_inp.weight'.*is missing"),
    "no experts' gates": (mixture("blk.0.ffn_gate_exps.weight"), "gate_exps.weight'.*is missing"),
    "flat experts": (mixture("blk.0.ffn_down_exps.weight", matrix(64, 24)), "must have shape"),
    "a router bias of NaN": (latent("blk.1.exp_probs_b.bias", vector(0, 0, 0, np.nan)), "finite"),
    "a short router bias": (latent("blk.1.exp_probs_b.bias", vector(0, 0)), "shape"),
    "the shared expert's gate in one layer only": (
        hybrid("blk.1.ffn_gate_inp_shexp.weight"), "blk.1.ffn_gate_inp_shexp.*is missing"),
    # latent attention
    "no latent rank": (latent("attention.kv_lora_rank"), "kv_lora_rank' is missing"),
    "a latent rank of 0": (latent("attention.kv_lora_rank", 0), "must lie in 1"),
    "a latent rank that heads do not fit": (latent("attention.kv_lora_rank", 9), "rank of 9"),
    "a query rank of -1": (latent("attention.q_lora_rank", -1), "must lie in 0"),
    "another query rank": (latent("attention.q_lora_rank", 13), "must have shape"),
    "no query rank": (latent("attention.q_lora_rank"), "attn_q.weight'.*is missing"),
    "all of a latent head rotated": (latent("attention.key_length_mla", 4), "rotate 4 of the 4"),
    "one latent size only": (latent("attention.value_length_mla"), "value_length_mla' is missing"),
    "no rotated values said": (latent("rope.dimension_count"), "dimension_count' is missing"),
    "a flat k_b": (latent("blk.0.attn_k_b.weight", matrix(32, 6)), r"shape \(4, 8, 6\)"),
    "no v_b": (latent("blk.1.attn_v_b.weight"), "attn_v_b.weight'.*is missing"),
    "k_b and kv_b": (latent("blk.0.attn_kv_b.weight", matrix(48, 8)), "attn_k_b.weight'.*no place"),
    "a small kv_b": (latent("blk.0.attn_kv_b.weight", matrix(47, 8)), r"shape \(48, 8\)"),
    "scores scaled by temperature": (latent("attention.temperature_scale", 0.1), "not understood"),
    "a logarithm without latent attention": (
        tiny({SCALING + "type": "yarn", SCALING + "factor": 2.0,
              SCALING + "yarn_log_multiplier": 0.1}), "only latent attention knows one"),
    # gated delta nets
    "no state size": (hybrid("ssm.state_size"), "ssm.state_size' is missing"),
    "a state size of 0": (hybrid("ssm.state_size", 0), "must lie in 1"),
    "a state size of 2^31": (hybrid("ssm.state_size", 1 << 31), "must lie in 1"),
    "another state size": (hybrid("ssm.state_size", 4), "do not fit 2 key heads and 32 values"),
    "3 key heads for 4 value heads": (hybrid("ssm.group_count", 3), "do not fit 3 key heads"),
    "a key head less": (hybrid("ssm.group_count", 1), r"must have shape \(48, 16\)"),
    "no convolution": (hybrid("ssm.conv_kernel", 0), "must lie in 1"),
    "a longer convolution": (hybrid("ssm.conv_kernel", 5), r"must have shape \(64, 5\)"),
    "a convolution with NaN": (
        hybrid("blk.0.ssm_conv1d.weight", matrix(64, 4) * np.nan), "not finite"),
    "an unknown key of delta nets": (hybrid("ssm.dt_b_c_rms", True), "not understood"),
    "recurrent layers of another number": (
        hybrid("attention.recurrent_layers", [1, 0]), "for each of 3 layers"),
    "a recurrent draft head": (
        hybrid("attention.recurrent_layers", [1, 0, 1]), "draft head is not"),
    "recurrent layers only": (hybrid("attention.recurrent_layers", [1, 1, 1]), "not all can be"),
    "recurrent layers as a number": (hybrid("attention.recurrent_layers", 1), "of type ndarray"),
    "the other layer recurrent": (
        hybrid("attention.recurrent_layers", [0, 1, 0]), "blk.0.attn_q_norm.*is missing"),
    "an interval of 0": (hybrid("full_attention_interval", 0), "must lie in 1"),
    "no decay": (hybrid("blk.0.ssm_a"), "ssm_a'.*is missing"),
    "no gate of the output": (hybrid("blk.0.attn_gate.weight"), "attn_gate.weight'.*is missing"),
    "queries without gates": (
        hybrid("blk.1.attn_q.weight", matrix(32, 16)), r"shape \(64, 16\), not \(32, 16\)"),
    # the draft head
    "two draft heads": (hybrid("nextn_predict_layers", 2), "must lie in 0..1, not 2"),
    "a draft head that is not announced": (
        hybrid("nextn_predict_layers", 0), "'blk.2.nextn.*no place"),
    "a draft head alone": (hybrid("block_count", 1), "block_count' must lie in 2"),
    "a draft head without its input": (
        hybrid("blk.2.nextn.eh_proj.weight"), "'blk.2.*has no place"),
    "a draft head without a norm": (hybrid("blk.2.nextn.enorm.weight"), "enorm.*is missing"),
    "a draft head without attention": (hybrid("blk.2.attn_q.weight"), "blk.2.attn_q.*is missing"),
    "a draft head that cuts blocks": (
        hybrid("blk.2.nextn.eh_proj.weight", ([32, 16], c.Q4_0, bytes(288))), "cannot be split"),
    # tokenizer
    "tokens as numbers": (key_is("tokenizer.ggml.tokens", [1, 2]), "tokenizer.ggml.tokens"),
    "more tokens than rows": (key_is("tokenizer.ggml.tokens", list("abcdefg")), "7 tokens.*6 rows"),
    "no tokens": (with_key(c.array("tokenizer.ggml.tokens", c.STRING, 0, b""),
                           changed_keys={"tokenizer.ggml.tokens": DROP}), "0 tokens"),
    "token types of another length": (key_is("tokenizer.ggml.token_type", [1] * 5), "token_type"),
    "scores of another length": (
        tiny({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5] * 5}), "scores"),
    "a merge that names no token": (key_is("tokenizer.ggml.merges", ["a b", "x y"]), "merge"),
    "a merge of one word": (key_is("tokenizer.ggml.merges", ["ab"]), "merge"),
    "an unknown tokenizer": (key_is("tokenizer.ggml.model", "rwkv"), "rwkv"),
    "an unknown pre-tokenizer": (key_is("tokenizer.ggml.pre", "klingon"), "klingon"),
    "eos past the vocabulary": (key_is("tokenizer.ggml.eos_token_id", 6), "eos_token_id"),
}

# The same in a file of 16 GiB without content: these lengths do lie inside the file.
SPARSE_CASES = {
    "2^32 keys": (tiny(n_keys=1 << 32), "number of keys is 4294967296"),
    "2^30 tensors": (tiny(n_tensors=1 << 30), "number of tensors is 1073741824"),
    "a key of 8 GB": (with_key(struct.pack("<Q", 8 << 30)), "metadata key goes on"),
    "a string of 8 GB": (with_key(c.key("k", c.STRING, struct.pack("<Q", 8 << 30))), "'k' goes on"),
    "an array of 2^30 strings": (with_key(c.array("k", c.STRING, 1 << 30, b"")), "1073741824"),
    "an array of 4,000,000 strings": (
        with_key(c.array("k", c.STRING, 4_000_000, b""), c.entry("l", 1)), "."),
    "an array with a string of 8 GB": (
        with_key(c.array("k", c.STRING, 2, struct.pack("<Q", 8 << 30))), "a string of 'k'"),
    "an array of 2^31 numbers": (with_key(c.array("k", c.U32, 1 << 31, b"")), "no model has more"),
    "a string of 30 MB": (with_key(c.key("k", c.STRING, struct.pack("<Q", 30 << 20))), "."),
}
ALL = [pytest.param(data, message, size, id=name)
       for cases, size in ((CASES, 0), (SPARSE_CASES, SPARSE))
       for name, (data, message) in cases.items()]


def write(path, data, size=0):
    path.write_bytes(data)
    if size:
        os.truncate(path, size)
    return path


def use(path):
    """All that an engine does with a file before it computes."""
    gguf = gguf_file.GGUF(path)
    model.load(gguf, tools.CheckOnly())
    Tokenizer(gguf.metadata).prepare()


@pytest.mark.parametrize("make", [c.tiny_model, c.tiny_mixture, c.tiny_latent, c.tiny_hybrid])
def test_tiny_models_are_valid(make, tmp_path):
    use(write(tmp_path / "valid.gguf", c.file_bytes(*make())))


def test_there_are_enough_cases():
    assert len(ALL) >= 40


@pytest.mark.parametrize("data, message, size", ALL)
def test_one_clear_line(data, message, size, tmp_path):
    path = write(tmp_path / "bad.gguf", data, size)
    began = time.perf_counter()
    with pytest.raises(ModelError) as caught:
        use(path)
    assert time.perf_counter() - began < SECONDS
    text = str(caught.value)
    assert re.search(message, text)
    assert text.isprintable() and len(text) < 400 + len(str(path))


def test_every_truncation_is_noticed(tmp_path):
    header = VALID.index(b"blk.0.ffn_down.weight") + 100
    for length in [*range(header), *range(header, len(VALID), 97)]:
        with pytest.raises(ModelError):
            use(write(tmp_path / "cut.gguf", VALID[:length]))


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe"])
def test_what_is_no_file(kind, tmp_path):
    path = tmp_path / "model.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    message = "cannot open" if kind == "missing" else "not a plain file"
    with pytest.raises(ModelError, match=message):
        use(path)


MEASURE = """
import os, sys, test_malformed
for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            test_malformed.use(path)
        except test_malformed.ModelError:
            os._exit(0)
        os._exit(1)
    _, status, usage = os.wait4(child, 0)
    print(status, usage.ru_maxrss)
"""


def test_memory(tmp_path):
    """Each file in a fresh process: its peak, the interpreter and the packages included."""
    paths = [write(tmp_path / f"{i}.gguf", *case.values[::2]) for i, case in enumerate(ALL)]
    done = subprocess.run([sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True,
                          cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    lines = done.stdout.splitlines()
    assert len(lines) == len(ALL), done.stderr
    for case, line in zip(ALL, lines):
        status, kilobytes = map(int, line.split())
        assert status == 0 and kilobytes < KILOBYTES, case.id


CLI_CASES = ["empty", "big endian", "cut in a string value",
             "an array of 2^61 numbers", "an offset of 2^40", "a misshapen attn_k",
             "scores of another length", "a merge that names no token"]


@pytest.mark.parametrize("name", CLI_CASES)
def test_command_line(name, tmp_path):
    data, message = CASES[name]
    path = write(tmp_path / "bad.gguf", data)
    done = subprocess.run([sys.executable, "leone.py", "doctor", "-m", path], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and re.search(message, done.stderr)


# ---- fuzz ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def time_limit(seconds):
    def too_long(*_):
        raise TimeoutError(f"still busy after {seconds} s")
    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def flip(data, rng, header):
    """1 to 4 changed bytes, nine of ten in the header: (file with them, their places)."""
    changed = bytearray(data)
    places = [int(rng.integers(header if rng.random() < 0.9 else len(data)))
              for _ in range(rng.integers(1, 5))]
    for place in places:
        # Small steps as well as any value: counts and types that are off by one get further.
        step = rng.choice([1, 255, 128, rng.integers(1, 256)])
        changed[place] = (changed[place] + int(step)) % 256
    return bytes(changed), places


@pytest.mark.parametrize("source", ["tiny", "latent", "hybrid", "golden"])
def test_fuzz(source, tmp_path, monkeypatch):
    """Random bytes change: the file is usable or there is a ModelError, never anything else."""
    monkeypatch.setattr(device, "probe", lambda: "no card for this test")
    monkeypatch.setattr(device, "cubin_state", lambda: "ok")
    data = {"tiny": VALID, "latent": c.file_bytes(*c.tiny_latent()), "golden": GOLDEN.read_bytes(),
            "hybrid": c.file_bytes(*c.tiny_hybrid())}[source]
    last = data.rindex(b".weight") if source != "golden" else data.index(b"blk.0.ffn_norm.weight")
    header = last + 500
    path, refused = tmp_path / "flipped.gguf", 0
    count = 20_000 if os.environ.get("LEONE_TEST_LONG") else 1_000
    for seed in range(count):
        changed, places = flip(data, np.random.default_rng(seed), header)
        path.write_bytes(changed)
        try:
            with time_limit(5):
                use(path)
                "\n".join(tools.table(tools.examine(path)))
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error)
        except Exception as error:
            raise AssertionError(f"seed {seed}, bytes {places}: {error!r}") from error
    assert count / 10 < refused < count
