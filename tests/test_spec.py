"""Speculation: drafts change how fast tokens come, and nothing else. Models of random weights."""
import collections
import hashlib
import itertools
import json
import os

import numpy as np
import pytest

import cli
import leone
import reference
import spec
from errors import LeoneError
from models import BACKENDS, GOLDEN, draft_logits, engine, quantised, smol

LONG = bool(os.environ.get("LEONE_TEST_LONG"))
ALL = sorted(path.name.removesuffix("-q4km.gguf") for path in GOLDEN.glob("*-q4km.gguf"))
SOME = "llama3", "deepseek2", "qwen35"  # plain attention, latent attention with experts, a hybrid
HYBRIDS = "qwen35", "qwen35moe", "qwen3next"
PROMPTS = 200 if LONG else 6
ON_GPU = 2000 if LONG and os.environ.get("LEONE_TEST_GPU") else PROMPTS
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
            prompt=rng.choice(few, rng.integers(1, 100)).tolist(),
            max_tokens=int(rng.integers(1, 25)),
            sampling=leone.Sampling(**SAMPLERS[i % 5], seed=i,
                                    stop=("e", "1") if i % 4 == 1 else ()),
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


def run_hashed(e, submissions, together):
    """The same, each outcome with the SHA-256 of the logits that its tokens were drawn from."""
    logits, draw = collections.defaultdict(dict), e.draw  # seed -> place in the answer -> bytes

    def watched(name, forward, batch, sampled, rows):
        result = draw(name, forward, batch, sampled, rows)
        if name == "":  # of the model, not of a draft; what follows a wrong draft is overwritten
            for row, (request, i) in zip(e.ops.download(result[2]), sampled):
                logits[request.sampling.seed][request.sampled + i] = row.tobytes()
        return result
    e.draw = watched
    outcomes = run(e, submissions, together)
    e.draw = draw
    return [(found, hashlib.sha256(b"".join(
        logits[options["sampling"].seed][at] for at in range(len(found[0])))).hexdigest())
            for options, found in zip(submissions, outcomes)]


def answers(submissions, outcomes):
    return {(tuple(s["prompt"]), s["sampling"].seed): tokens
            for s, (tokens, *_) in zip(submissions, outcomes)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ALL if LONG else SOME)
def test_drafts_change_nothing(family, backend):
    """Every proposer, every draft length, alone and in batches with plain rows and prompts."""
    submissions = list(cases(ON_GPU if backend == "cuda" else PROMPTS))
    with engine(quantised(family), backend, draft="off") as e:
        expected = run_hashed(e, submissions, together=False)
    known = answers(submissions, [found for found, _ in expected])
    with engine(quantised(family), backend, draft="ngram", prefill_chunk=48, max_rows=6) as e:
        lengths = itertools.cycle((3, 8, 5, 1, 6, 4, 7, 2))
        heads = [spec.Mtp(e)] if e.cfg.n_mtp else []
        for proposer in (spec.NGram(), Oracle(known), Oracle(known, 2), Garbage(), *heads):
            e.proposer = proposer
            for together in (True, False) if LONG else (True,):
                e.controller.fixed = next(lengths)
                before = e.stats
                assert run_hashed(e, submissions, together) == expected
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
                for key in list(e.prefixes.entries):  # the session alone knows the beginning
                    e.prefixes.drop(key)
                request = e.submit(**further[i], session=name)
                while e.step():
                    pass
                assert outcome(request) == expected_further[i], (length, wrong, name)
                assert request.cached_tokens == 51 + 30 - 1
                e.sessions.delete(name)


def run_one(e, after_token=lambda request: None, **options):
    e.on_event = after_token
    request = e.submit(**options)
    while e.step():
        pass
    return request


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", SOME if LONG else SOME[::2])
def test_ends_in_the_middle_of_a_run(family, backend, monkeypatch):
    """At EOS, at a stop string, at max_tokens and by cancellation; with the next turn behind it."""
    options = dict(prompt=[5, 6, 7, 8], sampling=leone.Sampling(temperature=0.8, seed=2))
    with engine(quantised(family), backend, draft="off") as e:
        monkeypatch.setattr(e.tokenizer, "eos_ids", ())
        free = run_one(e, max_tokens=24, **options)
        ends = {end: outcome(run_one(e, max_tokens=end, **options)) for end in (9, 10)}
        tokens = free.tokens
        turns = {at: outcome(run_one(e, prompt=[5, 6, 7, 8, *tokens[:at], 9], max_tokens=6,
                                     sampling=options["sampling"])) for at in (9, 10)}
    known = {((5, 6, 7, 8), 2): tokens} | {
        ((5, 6, 7, 8, *tokens[:at], 9), 2): turn[0] for at, turn in turns.items()}
    with engine(quantised(family), backend, draft="ngram", draft_length=6) as e:
        e.proposer = Oracle(known)
        monkeypatch.setattr(e.tokenizer, "eos_ids", ())
        for at in (9, 10):
            def stop(request):
                if len(request.tokens) == at:
                    request.cancel()
            first = tokens.index(tokens[at - 1]) + 1
            for end in ("length", "cancelled", "stop"):
                cut = dict(options, max_tokens=at if end == "length" else 24, session=f"{at}{end}")
                monkeypatch.setattr(e.tokenizer, "eos_ids",
                                    (tokens[at - 1],) if end == "stop" else ())
                request = run_one(e, stop if end == "cancelled" else lambda request: None, **cut)
                monkeypatch.setattr(e.tokenizer, "eos_ids", ())
                length = first if end == "stop" else at
                assert request.finish_reason == end
                assert request.tokens == tokens[:length]
                assert request.logprobs == free.logprobs[:length]
                assert [event.token for event in request.events] == request.tokens
                if end != "stop":
                    assert request.text == ends[at][3]
                    turn = run_one(e, prompt=[5, 6, 7, 8, *tokens[:at], 9], max_tokens=6,
                                   sampling=options["sampling"], session=cut["session"])
                    assert outcome(turn) == turns[at]
                    assert turn.cached_tokens >= (4 + at - 1) // 2
        text = free.text
        stop = next(part for i in range(3, len(text)) for part in [text[i:i + 2]]
                    if text.index(part) == i)
        request = run_one(e, prompt=[5, 6, 7, 8], max_tokens=24, sampling=leone.Sampling(
            temperature=0.8, seed=2, stop=(stop,)))
        assert request.finish_reason == "stop" and request.text == text[:text.index(stop)]
        assert request.tokens == tokens[:len(request.tokens)]


def test_penalties_are_counted_without_drafts():
    with engine(quantised("llama3"), "cpu", draft="ngram", draft_length=4) as e:
        request = run_one(e, prompt=[1, 2, 1, 2, 1, 2], max_tokens=12, sampling=leone.Sampling(
            temperature=0.5, seed=1, frequency_penalty=0.5))
        assert request.drafted == 0 and len(request.tokens) == 12
        free = run_one(e, prompt=[1, 2, 1, 2, 1, 2], max_tokens=12, speculation=False)
        assert free.drafted == 0


def test_events_say_what_was_drafted():
    options = dict(prompt=[5, 6, 7], sampling=leone.Sampling(temperature=0, seed=0), max_tokens=15)
    with engine(quantised("llama3"), "cpu", draft="ngram", draft_length=4) as e:
        tokens = run_one(e, speculation=0, **options).tokens
        e.proposer = Oracle({((5, 6, 7), 0): tokens})
        request = run_one(e, **options)
        drafted = [event.drafted for event in request.events]
        assert drafted == [False] + 2 * [*4 * [True], False] + [*3 * [True], False]
        assert request.drafted == request.accepted == sum(drafted)
        e.proposer = Oracle({((5, 6, 7), 0): tokens}, wrong=2)
        request = run_one(e, speculation=3, **options)
        assert sum(event.drafted for event in request.events) == request.accepted
        assert request.drafted > request.accepted
        assert e.stats["sweeps"] < e.stats["generated_tokens"] - 20


@pytest.mark.parametrize("bad", (-1, 9, "4", 2.0))
def test_bad_draft_lengths(bad):
    with engine(quantised("llama3"), "cpu") as e:
        with pytest.raises(LeoneError) as caught:
            e.submit([1], speculation=bad)
        assert "speculation" in str(caught.value) and not e.waiting
    with pytest.raises(LeoneError):
        engine(quantised("llama3"), "cpu", draft_length=bad)


class RunsAhead(reference.Reference):
    """The CPU with the protocol of a card: batches padded for graphs, one step launched before the
    tokens of the last are read, and the residual stream in scratch that the next embed takes."""
    steps_ahead, captures = 1, True
    scratch = None

    def embed(self, table, batch):
        if self.scratch is not None:
            self.scratch[:] = np.nan
        self.scratch = super().embed(table, batch)
        return self.scratch


@pytest.mark.parametrize("target, draft", [
    ("llama3", "ngram"), ("qwen3", "qwen25"), ("qwen35", "mtp")])
@pytest.mark.parametrize("length", (None, 3))
def test_running_ahead_changes_nothing(target, draft, length, monkeypatch):
    submissions = list(cases(PROMPTS, seed=5))
    expected = plain(quantised(target), submissions)
    monkeypatch.setattr(leone, "open_backend", lambda name: RunsAhead())
    for i, options in enumerate(submissions):
        options["speculation"] = (True, 2, False)[i % 3]
    file = str(quantised(draft)) if draft in ALL else draft
    with engine(quantised(target), "cpu", draft=file, draft_length=length, max_rows=4,
                prefill_chunk=40) as e:
        assert run(e, submissions, together=True) == expected
        if draft == "ngram":
            e.proposer = Oracle(answers(submissions, expected), 1)
            assert run(e, submissions, together=True) == expected


# ---- proposers -------------------------------------------------------------------------------


class Asked:
    """A request as a proposer sees it."""

    def __init__(self, prompt, tokens=(), slot=0):
        self.prompt, self.tokens, self.slot = list(prompt), list(tokens), slot


@pytest.mark.parametrize("seed", range(20))
def test_ngrams_follow_the_latest_longest_match(seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, rng.integers(2, 60)).tolist()
    cut = int(rng.integers(1, len(ids)))
    request, ngram = Asked(ids[:cut]), spec.NGram()
    for n in range(cut, len(ids) + 1):  # tokens come one by one
        request.tokens = ids[cut:n]
        known, expected = ids[:n], None
        for size in (4, 3, 2):
            for at in range(n - 1, size - 1, -1):
                if expected is None and size <= n and known[at - size:at] == known[-size:]:
                    expected = known[at:]
        draft = ngram.propose({request: 5}).get(request)
        assert (draft is None) == (expected is None)
        if expected:
            assert draft == (expected * 5)[:5]
    ngram.forget(request)
    assert not ngram.indexes


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("target, draft, share", [
    ("llama3", "llama3", 1.0), ("qwen35", "qwen3", 0.0), ("phi3-longrope", "phi3", 0.0)])
def test_draft_model(target, draft, share, backend):
    """Itself is always right, a stranger mostly wrong, and neither changes anything."""
    submissions = list(cases(PROMPTS, seed=2))
    expected = plain(quantised(target), submissions, backend)
    with engine(quantised(target), backend, draft=str(quantised(draft)), draft_length=4,
                prefill_chunk=160, max_rows=6) as e:
        assert run(e, submissions, together=True) == expected
        assert e.stats["drafted_tokens"] > 0.3 * e.stats["generated_tokens"]
        if share == 1:
            assert e.stats["drafted_tokens"] - e.stats["accepted_tokens"] <= PROMPTS
        assert e.stats["accepted_tokens"] >= share * e.stats["drafted_tokens"] - PROMPTS
        assert not e.proposer.read


def test_draft_model_is_checked(monkeypatch):
    with pytest.raises(LeoneError, match="MTP"):
        engine(quantised("llama3"), "cpu", draft="mtp")
    for draft, problem in (("mistral", "tokens of the model"), ("qwen35", "recurrent")):
        target = "qwen3" if draft == "qwen35" else "llama3"
        with pytest.raises(LeoneError, match=problem):
            engine(quantised(target), "cpu", draft=str(quantised(draft)))
    monkeypatch.setattr(leone.model, "load", lambda *_: pytest.fail("the model was loaded first"))
    for name in ("", "no such file", GOLDEN, 7, None):
        with pytest.raises(LeoneError, match="choose auto, off, ngram, mtp or the GGUF file"):
            engine(quantised("llama3"), "cpu", draft=name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ahead, frequent", ((False, 512), (True, 512), (True, 256)))
def test_mtp_drafts_what_the_head_says(ahead, frequent, backend, monkeypatch):
    """The first draft of each step is the head's own answer for the whole sequence so far, wherever
    prompt and steps were cut, or its best among the frequent tokens; what is accepted are the
    tokens of plain decoding. A card replays graphs."""
    submissions = list(cases(PROMPTS, seed=3))
    monkeypatch.setattr(spec, "FREQUENT", frequent)
    monkeypatch.setattr(reference, "PANEL", 128)
    expected = plain(quantised("qwen35"), submissions, backend)
    if ahead and backend == "cpu":
        monkeypatch.setattr(leone, "open_backend", lambda name: RunsAhead())
    with engine(quantised("qwen35"), backend, draft_length=3, prefill_chunk=20, max_rows=6) as e:
        assert isinstance(e.proposer, spec.Mtp)
        assert run(e, submissions, together=True) == expected
        assert e.stats["drafted_tokens"] > 0.3 * e.stats["generated_tokens"]
        seen, propose = [], e.proposer.propose

        def watch(wants):
            drafts = propose(wants)
            seen.extend((request.prompt + request.tokens, drafts[request][0]) for request in wants)
            return drafts

        e.proposer.propose = watch
        prompt = np.random.default_rng(6).integers(1, 500, 55).tolist()
        run_one(e, prompt=prompt, max_tokens=14, sampling=leone.Sampling(temperature=0),
                ignore_eos=True)
        assert len(seen) >= 3
        if backend == "cuda":
            assert any(key[0].startswith("mtp") and graph for key, graph in e.ops.graphs.items())
        for ids, first in seen:
            assert draft_logits(e, ids)[-1, :frequent].argmax() == first


# ---- the controller --------------------------------------------------------------------------


def simulate(chance, seconds, count=1, steps=1200, found=1.0):
    """(tokens a second, drafts of each step) of `count` sequences under a cost of rows."""
    rng, controller = np.random.default_rng(1), spec.Controller(count)
    requests, tokens, time, drafts = [Asked([1], slot=i) for i in range(count)], 0, 0.0, []
    for step in range(steps):
        wants = controller.lengths(dict.fromkeys(requests, spec.MAX_DRAFT))
        rows = count
        for request in requests:
            drafted = wants.get(request, 0) * (rng.random() < found)
            right = 0
            while right < drafted and rng.random() < chance(step):
                right += 1
            if request in wants:
                controller.learn(request, drafted, right)
            tokens, rows = tokens + 1 + right, rows + drafted
        taken = seconds(rows, bool(wants)) * (1 + 0.05 * rng.standard_normal())
        controller.time(count + sum(wants.values()), bool(wants), taken)
        time, drafts = time + taken, drafts + [sum(wants.values())]
    return tokens / time, drafts


def memory_bound(rows, drafts):  # like a large model: 8 rows cost little more than one
    return 1 + 0.01 * rows + 0.04 * max(0, rows - 8) + 0.05 * drafts


def row_bound(rows, drafts):  # like a small one that has many users
    return 1 + 0.3 * (rows - 1) + 0.2 * drafts


@pytest.mark.parametrize("seconds", (memory_bound, row_bound))
@pytest.mark.parametrize("count", (1, 8, 32))
def test_controller_is_never_much_slower_than_plain_or_the_best(count, seconds):
    for chance in (0.0, 0.4, 0.8):
        speed, _ = simulate(lambda step: chance, seconds, count)
        tokens = np.cumsum(chance ** np.arange(spec.MAX_DRAFT + 1))
        fixed = [count * tokens[n] / seconds(count * (n + 1), n > 0)
                 for n in range(spec.MAX_DRAFT + 1)]
        assert speed >= (0.97 if chance == 0 else 0.95) * fixed[0]
        assert speed >= 0.9 * max(fixed)


def test_controller_follows_the_text():
    """From text of which nothing can be foretold to text that repeats itself, and back."""
    _, drafts = simulate(lambda step: 0.9 if 400 <= step < 800 else 0.0, memory_bound)
    assert np.mean(drafts[200:400]) < 1
    assert np.mean(drafts[600:800]) > 5
    assert np.mean(drafts[1000:]) < 1


def test_controller_forgets_a_slot():
    controller, request = spec.Controller(2), Asked([1], slot=1)
    controller.learn(request, 4, 2)
    assert controller.right[1].sum() == 3 and controller.tried[1].sum() == 4
    controller.forget(request)
    assert not controller.tried[1].any() and controller.tried[-1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_adaptive_drafts_change_nothing(backend):
    """Lengths that depend on the clock, in an engine that also decodes without drafts."""
    submissions = list(cases(PROMPTS, seed=4))
    expected = plain(quantised("llama3"), submissions, backend)
    with engine(quantised("llama3"), backend, max_rows=4) as e:
        e.proposer = Oracle(answers(submissions, expected), 4)
        for i, options in enumerate(submissions):
            options["speculation"] = (None, True, False, 2)[i % 4]
        assert run(e, submissions, together=True) == expected


# ---- the command line ------------------------------------------------------------------------


def command(capsys, *arguments):
    code = cli.main([*arguments, "-m", str(quantised("llama3")), "--backend", "cpu"])
    return code, *capsys.readouterr()


def test_generate_takes_drafts_from_anywhere(capsys):
    answers = []
    for source in ("off", "auto", "ngram", str(quantised("llama3"))):
        code, out, _ = command(capsys, "generate", "-p", "abc", "-n", "12", "--ignore-eos",
                               "--json", "--ctx", "512", "--draft", source)
        answers.append(json.loads(out)["tokens"])
        assert code == 0 and len(answers[-1]) == 12
    assert len(set(map(tuple, answers))) == 1
    for source in ("mtp", "nothing.gguf", str(quantised("mistral"))):
        code, _, err = command(capsys, "generate", "-p", "abc", "--draft", source)
        assert code == 2 and err.startswith("leone: ") and err.count("\n") == 1


def test_bench_compares_with_plain_decoding(capsys):
    bench = "bench", "--rows", "2", "--ctx", "1024", "--draft", "ngram"
    code, out, _ = command(capsys, *bench, "--synthetic-acceptance", "0.9")
    assert code == 0 and "SYNTHETIC: 90%" in out and "with drafts" in out
    code, out, _ = command(capsys, *bench, "--json")
    drafts, = json.loads(out)["drafts"]
    assert drafts["synthetic_acceptance"] is None and drafts["tokens_per_sweep"] > 0
    assert command(capsys, *bench, "--synthetic-acceptance", "2")[0] == 2


def test_bench_on_prompts(capsys, tmp_path, monkeypatch):
    """Ten small edits of a text of 15 to 60 lines, and five questions without one."""
    prompts = json.loads((GOLDEN.parent / "prompts.json").read_text())
    kinds = [item["kind"] for item in prompts]
    assert kinds == 10 * ["edit"] + 5 * ["prose"]
    assert all(15 <= len(item["prompt"]) - 2 <= 60 for item in prompts[:10])
    few = tmp_path / "few.json"
    few.write_text(json.dumps([{"kind": "edit", "prompt": ["ab ab ab ab", "ab ab"]},
                               {"kind": "prose", "prompt": ["Why?"]}]))
    monkeypatch.setattr(spec.Controller, "lengths", lambda self, limits: {
        request: 3 for request, most in limits.items() if most >= 3})
    bench = "bench", "--ctx", "1024", "--draft", "ngram", "--prompts"
    code, out, _ = command(capsys, *bench, str(few), "--json")
    result = json.loads(out)
    assert code == 0 and set(result["median_gain"]) == {"edit", "prose"}
    for found, kind in zip(result["prompts"], ("edit", "prose"), strict=True):
        assert found["kind"] == kind and 0 <= found["accepted"] <= 1
        assert found["gain"] == found["tokens_per_s"] / found["plain_tokens_per_s"] > 0
        assert found["tokens_per_sweep"] == pytest.approx(
            1 + found["accepted"] * found["drafts_per_token"] * found["tokens_per_sweep"], rel=0.1)
    assert result["prompts"][0]["prompt_tokens"] > result["prompts"][1]["prompt_tokens"]
    code, out, _ = command(capsys, *bench, str(few))
    assert code == 0 and "median gain" in out and "accepted" in out
    for text in ("[", '{"a": 1}', '["x"]', '[{"kind": "edit"}]', '[{"kind": "edit", "prompt": 3}]'):
        few.write_text(text)
        code, _, err = command(capsys, *bench, str(few))
        assert code == 2 and err.count("\n") == 1, text
    assert command(capsys, *bench, str(tmp_path / "none"))[0] == 2
    assert command(capsys, "bench", "--prompts", str(few))[0] == 2
