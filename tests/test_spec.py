"""Speculation: drafts change how fast tokens come, and nothing else. Models of random weights."""
import itertools
import os

import numpy as np
import pytest

import leone
import spec
from errors import LeoneError
from models import BACKENDS, GOLDEN, engine, quantised, smol

LONG = bool(os.environ.get("LEONE_TEST_LONG"))
ALL = sorted(path.name.removesuffix("-q4km.gguf") for path in GOLDEN.glob("*-q4km.gguf"))
SOME = "llama3", "deepseek2", "qwen35"  # plain attention, latent attention with experts, a hybrid
HYBRIDS = "qwen35", "qwen35moe", "qwen3next"
PROMPTS = 200 if LONG else 6
SAMPLERS = ({"temperature": 0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3},
            {"temperature": 0.3, "top_k": 40}, {"temperature": 1.0, "min_p": 0.05})


class Oracle(spec.Proposer):
    """Drafts what plain decoding gave, but for the token at place `wrong` of each draft."""

    def __init__(self, answers, wrong=None):
        self.answers, self.wrong = answers, wrong  # (prompt, seed) -> tokens

    def propose(self, wants):
        drafts = {}
        for request, most in wants.items():
            answer = self.answers[tuple(request.prompt), request.sampling.seed]
            drafts[request] = draft = answer[len(request.tokens):][:most]
            if self.wrong is not None and self.wrong < len(draft):
                draft[self.wrong] = (draft[self.wrong] + 1) % 512
        return {request: draft for request, draft in drafts.items() if draft}


class Garbage(spec.Proposer):
    """Drafts anything, of any length, or nothing."""

    def __init__(self):
        self.rng = np.random.default_rng(3)

    def propose(self, wants):
        drafts = {request: self.rng.integers(0, 512, self.rng.integers(0, most + 1)).tolist()
                  for request, most in wants.items()}
        return {request: draft for request, draft in drafts.items() if draft}


def cases(count, seed=1):
    """Arguments of Engine.submit: prompts that repeat themselves, every sampler, some limits."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        few = rng.integers(1, 500, rng.integers(1, 9))
        yield dict(
            prompt=rng.choice(few, rng.integers(1, 100)).tolist(), max_tokens=int(rng.integers(1, 25)),
            sampling=leone.Sampling(**SAMPLERS[i % 5], seed=i, stop=("e", "1") if i % 4 == 1 else ()),
            ignore_eos=bool(rng.integers(2)), top_logprobs=3 * (i % 6 == 2))


def outcome(request):
    return (request.tokens, request.logprobs, request.top, request.text, request.finish_reason,
            list(request.events))


def run(e, submissions, together):
    """Their outcomes, one after another or in a batch that they join one by one."""
    requests = []
    for options in submissions:
        requests.append(e.submit(**options))
        while e.step() and not together:
            pass
    while e.step():
        pass
    assert e.pool.free_count + e.prefixes.unused == e.pool.n_pages and not e.busy
    return [outcome(request) for request in requests]


def plain(path, submissions, backend="cpu"):
    with engine(path, backend, draft="off") as e:
        return run(e, submissions, together=False)


def answers(submissions, outcomes):
    return {(tuple(s["prompt"]), s["sampling"].seed): tokens
            for s, (tokens, *_) in zip(submissions, outcomes)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ALL if LONG else SOME)
def test_drafts_change_nothing(family, backend):
    """Every proposer, every draft length, alone and in batches with plain rows and prompts."""
    submissions = list(cases(PROMPTS))
    expected = plain(quantised(family), submissions, backend)
    known = answers(submissions, expected)
    with engine(quantised(family), backend, draft="ngram", prefill_chunk=48, max_rows=6) as e:
        lengths = itertools.cycle((3, 8, 5, 1, 6, 4, 7, 2))
        for proposer in (spec.NGram(), Oracle(known), Oracle(known, 2), Garbage()):
            e.proposer = proposer
            for together in (True, False) if LONG else (True,):
                e.controller.fixed = next(lengths)
                before = e.stats
                assert run(e, submissions, together) == expected
                drafted, accepted, tokens = (
                    e.stats[name] - before[name]
                    for name in ("drafted_tokens", "accepted_tokens", "generated_tokens"))
                if not isinstance(proposer, spec.NGram):
                    assert drafted > 0.1 * tokens, "too few drafts to say anything"
                if isinstance(proposer, Oracle):
                    assert accepted > 0.2 * drafted


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", HYBRIDS if LONG else HYBRIDS[:1])
def test_rollbacks_of_every_length(family, backend, tmp_path):
    """Across the page boundary at 64; then the sequence is forked, hibernated and restored."""
    rng = np.random.default_rng(4)
    lengths = [(n, wrong) for n in range(1, spec.MAX_DRAFT + 1) for wrong in range(n + 1)]
    lengths = lengths if LONG else lengths[::7]
    prompts = [rng.integers(1, 500, 51).tolist() for _ in lengths]
    options = dict(sampling=leone.Sampling(temperature=0.8, seed=5), ignore_eos=True)
    submissions = [dict(prompt=prompt, max_tokens=30, **options) for prompt in prompts]
    expected = plain(quantised(family), submissions, backend)
    further = [dict(prompt=prompt + tokens + [7, 8, 9], max_tokens=9, **options)
               for prompt, (tokens, *_) in zip(prompts, expected)]
    expected_further = plain(quantised(family), further, backend)
    known = answers(submissions + further, expected + expected_further)
    with engine(quantised(family), backend, draft="ngram", session_store=tmp_path) as e:
        for i, (length, wrong) in enumerate(lengths):
            e.controller.fixed, e.proposer = length, Oracle(known, wrong)
            e.submit(**submissions[i], session=f"{i}")
            request, = e.waiting
            while e.step():
                pass
            assert outcome(request) == expected[i], (length, wrong)
            e.sessions.fork(f"{i}", f"{i}-fork")
            e.sessions.hibernate(f"{i}")
            for name in (f"{i}", f"{i}-fork"):
                request = e.submit(**further[i], session=name, salt=name)
                while e.step():
                    pass
                assert outcome(request) == expected_further[i], (length, wrong, name)
                assert request.cached_tokens == 51 + 30 - 1
                e.sessions.delete(name)
