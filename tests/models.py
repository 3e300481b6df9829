"""The models that tests run: tiny ones with float64 answers, and the default model."""
import json
import lzma
import os
from pathlib import Path

import numpy as np
import pytest

import leone
import model

GOLDEN = Path(__file__).resolve().parent / "golden"
SMOL = GOLDEN.parent.parent / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
FAMILIES = ("llama3", "mistral", "mixtral", "qwen25", "qwen3", "qwen3-yarn", "qwen3moe", "phi3",
            "phi3-longrope", "deepseek2", "deepseek2-lite", "qwen35", "qwen35moe", "qwen3next")
LOSSLESS = {"llama3": "llama3-f32", "qwen25": "qwen25-bf16"}

BACKENDS = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def quantised(family):
    return GOLDEN / f"{family}-q4km.gguf"


def unpacked(name, folder):
    """A golden file that is kept compressed, written to `folder`."""
    path = Path(folder) / f"{name}.gguf"
    if not path.exists():
        path.write_bytes(lzma.decompress((GOLDEN / f"{name}.gguf.xz").read_bytes()))
    return path


def smol():
    if not SMOL.exists():
        pytest.skip("the default model is not there: make model")
    return SMOL


def answers(name):
    return np.load(GOLDEN / f"{name}.npz")


def smol_json(name):
    return json.loads((GOLDEN / "smol" / name).read_text())


def engine(path, backend, **options):
    if path == SMOL and backend == "cuda" and os.environ.get("LEONE_EMULATE"):
        pytest.skip("the default model takes too long in the emulator")
    return leone.Engine(str(path), backend=backend, **{"context": 2048, **options})


def greedy(engine, ids, count):
    events = engine.generate(ids, leone.Sampling(temperature=0), max_tokens=count, ignore_eos=True)
    return [event.token for event in events]


def draft_logits(engine, ids):
    """Teacher-forced logits of the draft head (MTP), float32 [len(ids) - 1, n_vocab]: row i says
    what follows ids[:i + 2], from the trunk's ids[:i + 1] and the token after them."""
    rows, ops, cfg, weights = [], engine.ops, engine.cfg, engine.weights
    with engine.lone_sequence(len(ids)) as slot:
        for batch, ahead in zip(engine.chunks(slot, ids[:-1]), engine.chunks(slot, ids[1:])):
            h = model.trunk(cfg, weights, ops.upload_batch(batch), engine.kv, ops)
            hidden = ops.rmsnorm_f32(h, weights.output_norm, cfg.rms_eps)
            logits, _ = model.mtp(cfg, weights, hidden, ops.upload_batch(ahead), engine.kv, ops)
            rows.append(ops.download(logits))
    return np.concatenate(rows)
