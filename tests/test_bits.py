"""Promise 1: the logits of a position never depend on how or beside what it was computed.

Every way of computing a sequence gives one SHA-256 per position, and all must be equal: prefill in
one piece and in chunks, one token at a time, and inside batches of rows of other sequences, before
or behind them.
"""
import hashlib
import time

import numpy as np
import pytest

import leone
import reference
from kv import PAGE, Batch
from models import BACKENDS, FAMILIES, draft_logits, engine, quantised, smol

LENGTH = 150  # more than two pages, ends inside the third
OTHER_ROWS = 1, 2, 7, 8, 9, 16, 17, 33
CHUNKS = 1, 3, 16, 64, LENGTH


def hashes(logits):
    return [hashlib.sha256(row.tobytes()).hexdigest()[:16] for row in np.atleast_2d(logits)]


class Sequences:
    """Sequences with pages and slots of their own on an engine, run in batches of free choice."""

    def __init__(self, engine, count, tokens):
        self.engine = engine
        pages = -(-tokens // PAGE)
        order = np.random.default_rng(5).permutation(count * pages).astype(np.int32)
        assert order.size <= engine.pool.free_count
        self.table = order.reshape(count, pages)

    def run(self, spans):
        """Logits of the wanted rows of spans (slot, position, ids, wanted[, pending, entering])."""
        batch = Batch.of([(slot, at, ids, 0, *rest) for slot, at, ids, *rest in spans],
                         self.table, self.engine.tile_tokens)
        return np.array(self.engine.ops.download(
            self.engine.forward(self.engine.ops.upload_batch(batch))[0]))

    def prefill(self, ids, chunk, slot=0):
        return hashes(np.concatenate([
            self.run([(slot, at, ids[at:at + chunk], len(ids[at:at + chunk]))])
            for at in range(0, len(ids), chunk)]))


def sequence(engine, length=LENGTH, seed=3):
    return np.random.default_rng(seed).integers(0, engine.cfg.n_vocab, length).tolist()


@pytest.mark.parametrize("kv", ("f16", "q8", "f32"))
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks(family, backend, kv):
    if kv != "f16" and family not in ("llama3", "qwen25"):
        pytest.skip("the KV formats are tested on two families")
    with engine(quantised(family), backend, kv=kv) as e:
        ids, sequences = sequence(e), Sequences(e, 1, LENGTH)
        expected = sequences.prefill(ids, LENGTH)
        for chunk in CHUNKS:
            assert sequences.prefill(ids, chunk) == expected, f"chunks of {chunk}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts(backend):
    """Logits of the draft head, with the prompt read in chunks."""
    with engine(quantised("qwen35"), backend) as e:
        ids, found = sequence(e), []
        for e.prefill_chunk in (64, 16, 3, 1):
            found.append(hashes(draft_logits(e, ids)))
        assert len(found[0]) == LENGTH - 1 and all(other == found[0] for other in found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_batches(family, backend):
    """Each position decoded in a batch with rows of other sequences, at either end of it."""
    with engine(quantised(family), backend, context=64 * 256) as e:
        check_batches(e)


def check_batches(e, length=70):
    ids = sequence(e, length)
    sequences = Sequences(e, 36, length + 40)
    expected = sequences.prefill(ids, length)
    rng = np.random.default_rng(9)
    for rows in OTHER_ROWS:
        for first in (True, False):
            sequences.prefill(ids[:-3], length)  # fresh pages, then the last three one by one
            found = []
            for at in range(length - 3, length):
                # half of the other rows are one chunk of prefill, the rest decode
                half = rows // 2
                others = [(slot, 0, rng.integers(0, e.cfg.n_vocab, 1).tolist(), 1)
                          for slot in range(1, 1 + rows - half)]
                if half:
                    others.append((35, 0, rng.integers(0, e.cfg.n_vocab, half).tolist(), half))
                # The first two enter the recurrent state with the third.
                pending = at - length + 3
                own = [(0, at, ids[at:at + 1], 1, pending, 0 if pending < 2 else pending)]
                logits = sequences.run(own + others if first else others + own)
                found += hashes(logits[0 if first else -1])
            assert found == expected[-3:], f"beside {rows} rows, first: {first}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama3", "mixtral", "deepseek2", "qwen35", "qwen3next"])
def test_generation_alone_and_in_company(family, backend):
    """Whole requests: tokens and log probabilities of a request do not change with the load."""
    with engine(quantised(family), backend, max_rows=17, context=64 * 256) as e:
        prompts = [sequence(e, 20 + 9 * i, seed=i) for i in range(17)]
        sampling = [leone.Sampling(temperature=0.0 if i % 2 else 0.9, seed=i) for i in range(17)]
        alone = []
        for prompt, params in zip(prompts, sampling):
            request = e.submit(prompt, params, 40, ignore_eos=True)
            while e.step():
                pass
            alone.append((request.tokens, request.logprobs))
        e.prefill_chunk = 50
        together = [e.submit(prompt, params, 40, ignore_eos=True)
                    for prompt, params in zip(prompts, sampling)]
        while e.step():
            pass
        assert [(r.tokens, r.logprobs) for r in together] == alone
        assert e.pool.free_count + e.prefixes.unused == e.pool.n_pages


def test_plain_products_would_fail(monkeypatch):
    """The matrix must be able to fail: with BLAS left to choose its shapes, bits change."""
    def multiply(self, x, weight, out):
        out[:] = x @ weight

    monkeypatch.setattr(reference.Reference, "multiply", multiply)
    differ = 0
    for family in ("llama3", "qwen3"):
        with engine(quantised(family), "cpu", context=64 * 256) as e:
            ids, sequences = sequence(e), Sequences(e, 1, LENGTH)
            differ += sequences.prefill(ids, LENGTH) != sequences.prefill(ids, 1)
    assert differ


def test_cpu_batching_is_real():
    """64 rows of prefill give at least 5 times the rows a second of one-row decode."""
    with engine(smol(), "cpu") as e:
        sequences, ids = Sequences(e, 1, 256), sequence(e, 256)

        def best(chunk):
            times = []
            for at in range(0, 4 * chunk, chunk):
                began = time.perf_counter()
                sequences.run([(0, at, ids[at:at + chunk], 1)])
                times.append(time.perf_counter() - began)
            return min(times) / chunk
        assert best(1) / best(64) >= 5


@pytest.mark.gpu
def test_gpu_batching_is_real():
    """A step of 8 rows costs at most 1.5 times a step of one."""
    with engine(smol(), "cuda", max_rows=8, context=64 * 256) as e:
        def step_seconds(rows):
            for _ in range(rows):
                e.submit([1, 2, 3], leone.Sampling(temperature=0), 200, ignore_eos=True)
            times = []
            for i in range(180):
                began = time.perf_counter()
                e.step()
                times.append(time.perf_counter() - began)
            while e.step():
                pass
            return np.median(times[50:])
        assert step_seconds(8) <= 1.5 * step_seconds(1)
