"""The engine: admission, cancellation, stop strings, limits, errors, the names of the ops."""
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

import device
import gguf_file
import leone
import model
import reference
import tools
from errors import DeviceError, Overloaded, RequestError
from kv import PagePool
from models import BACKENDS, engine, greedy, quantised, smol

ROOT = Path(leone.__file__).resolve().parent
# What a backend has beside ops: loading, memory and the steps of the engine.
NOT_OPS = {"matrix", "vector", "expand", "pages", "tile_tokens", "multiply", "attend", "close"}


def public(cls):
    return {name for name in vars(cls) if not name.startswith("_") and callable(vars(cls)[name])}


def test_backends_have_the_same_ops():
    """Everything that the engine and the forward pass call exists on both sides."""
    called = set()
    for name in ("leone.py", "model.py", "tools.py"):
        text = (ROOT / name).read_text()
        called |= set(re.findall(r"(?<!in )\b(?:self\.)?ops\.(\w+)\((?!\))", text))
    assert {"embed", "attention", "sample", "upload_batch"} <= called
    assert called <= public(reference.Reference)
    assert called <= public(device.Device)


def test_every_kernel_has_its_twin():
    """A kernel is an op of the table, or its name begins with that of its op."""
    source = (ROOT / "kernels.cu").read_text()
    bounds = r"(?:\s*__launch_bounds__\([^()]*\))?"
    kernels = re.findall(rf"^ *KERNEL\b{bounds}\s+(?!__)(\w+)", source, re.M)
    assert {"linear_few_8", "rope_kv", "attention_merge", "sample"} <= set(kernels)
    ops = public(reference.Reference) & public(device.Device)
    for kernel in kernels:
        assert any(kernel == op or kernel.startswith(op + "_") for op in ops), kernel
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_kernels*.py"))
    for op in {op for op in ops for kernel in kernels if kernel.startswith(op)} - NOT_OPS:
        assert f"def test_{op}" in tests, f"no tests/test_kernels*.py has a test_{op}"


@pytest.fixture(scope="module")
def tiny():
    with engine(quantised("llama3"), "cpu", max_rows=4, queue=2) as e:
        yield e


def nothing_is_held(e):
    return (e.pool.free_count + e.prefixes.unused == e.pool.n_pages and not e.busy
            and len(e.free_slots) == e.max_sessions + 1)


def finish(e, *requests):
    while e.step():
        pass
    assert nothing_is_held(e)
    return [request.tokens for request in requests]


def test_seed_decides(tiny):
    make = lambda seed: tiny.submit([1, 2, 3], leone.Sampling(temperature=2.0, seed=seed), 20,
                                    ignore_eos=True)
    first, again, other = finish(tiny, make(7), make(7), make(8))
    assert first == again != other


def test_continuation_equals_one_run(tiny):
    """Logits of a longer prompt reproduce what generation chose, token by token."""
    ids = [5, 6, 7]
    tokens = [e.token for e in tiny.generate(ids, leone.Sampling(temperature=0), 70,
                                             ignore_eos=True)]
    logits = tiny.logits(ids + tokens)
    assert logits[2:-1].argmax(1).tolist() == tokens


def test_cancel_frees_everything(tiny):
    requests = [tiny.submit([1] * 100, leone.Sampling(seed=1), 400) for _ in range(6)]
    for _ in range(3):
        tiny.step()
    for request in requests:
        request.cancel()
    finish(tiny)
    assert {r.finish_reason for r in requests} == {"cancelled"}


def test_abandoned_generator_frees_everything(tiny):
    events = tiny.generate([1, 2], leone.Sampling(seed=3), 50, ignore_eos=True)
    next(events)
    events.close()
    finish(tiny)


def test_queue_is_bounded(tiny):
    """Beside the four that find room at once two may wait."""
    requests = [tiny.submit([1], leone.Sampling(seed=1), 5) for _ in range(6)]
    with pytest.raises(Overloaded) as caught:
        tiny.submit([1], leone.Sampling(seed=1), 5)
    assert caught.value.status == 429 and caught.value.code == "queue_full"
    assert caught.value.retry_after_ms > 0
    finish(tiny, *requests)


def test_waits_for_pages(tiny):
    """Requests that do not fit together run one after another, each to its end."""
    requests = [tiny.submit([1] * 430, leone.Sampling(seed=i), 40, ignore_eos=True)
                for i in range(6)]
    tiny.step()
    assert 0 < len(tiny.active) <= 4
    assert all(len(tokens) == 40 for tokens in finish(tiny, *requests))


@pytest.mark.parametrize("prompt, options, code", [
    ([], {}, "invalid_request"),
    ([512], {}, "invalid_request"),
    ([-1], {}, "invalid_request"),
    ([1], {"max_tokens": 0}, "invalid_request"),
    ([1], {"max_tokens": 10**9}, "context_length_exceeded"),
    ([1] * 600, {"max_tokens": 5}, "context_length_exceeded"),
])
def test_bad_requests(tiny, prompt, options, code):
    with pytest.raises(RequestError) as caught:
        tiny.submit(prompt, leone.Sampling(), **options)
    assert caught.value.code == code and caught.value.status == 400
    assert "\n" not in str(caught.value)
    assert not tiny.waiting


def test_queue_is_bounded_in_tokens():
    with engine(quantised("llama3"), "cpu", max_rows=1, queue_tokens=100) as e:
        requests = [e.submit([1], leone.Sampling(seed=1), 49), e.submit([1], leone.Sampling(), 49)]
        with pytest.raises(Overloaded):
            e.submit([1], leone.Sampling(seed=1), 1)
        finish(e, *requests)


def test_more_sessions_than_rows():
    """Rows of a step are bounded; those that do not fit take turns and lose nothing."""
    prompts = [[i + 1, 5, 6] for i in range(5)]
    params = leone.Sampling(temperature=0)
    with engine(quantised("llama3"), "cpu", max_rows=2, sessions=5) as e:
        alone = [finish(e, e.submit(p, params, 12, ignore_eos=True))[0] for p in prompts]
        requests = [e.submit(p, params, 12, ignore_eos=True) for p in prompts]
        while e.step():
            counts = [len(r.tokens) for r in e.active if r.finish_reason is None]
            assert not counts or max(counts) - min(counts) <= 1
        assert [r.tokens for r in requests] == alone


def test_a_short_prompt_overtakes_a_long_one():
    with engine(quantised("llama3"), "cpu", max_rows=4, prefill_chunk=32) as e:
        long = e.submit([1] * 400, leone.Sampling(temperature=0), 1)
        e.step()
        short = e.submit([2] * 40, leone.Sampling(temperature=0), 1)
        before = long.read
        while not short.tokens:
            e.step()
        assert long.read >= before + 48 and not long.tokens
        finish(e, long, short)


def test_a_prompt_takes_less_of_a_step_in_which_others_decode():
    with engine(quantised("llama3"), "cpu", max_rows=4, prefill_chunk=32) as e:
        other = e.submit([1, 2], leone.Sampling(temperature=0), 4, ignore_eos=True)
        while not other.tokens:
            e.step()
        request, read = e.submit([3] * 100, leone.Sampling(temperature=0), 1), {0}
        while not request.tokens:
            e.step()
            read.add(request.read)
        assert {8, 16} < read and min(np.diff(sorted(read))) >= 4
        assert max(np.diff(sorted(read))) == 32
        finish(e, other, request)


@pytest.mark.parametrize("backend", BACKENDS)
def test_most_likely_tokens(backend):
    """top_logprobs are the log softmax of the model's own logits."""
    with engine(quantised("llama3"), backend, max_rows=4) as e:
        params = leone.Sampling(temperature=1.5, seed=3, frequency_penalty=0.5)
        request = e.submit([4, 5, 6], params, 6, ignore_eos=True, top_logprobs=5)
        other = e.submit([7, 8], params, 6, ignore_eos=True)
        while e.step():
            pass
        logits = e.logits([4, 5, 6] + request.tokens)[2:-1].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        assert not other.top and len(request.top) == 6
        for row, top, token, logprob in zip(expected, request.top, request.tokens,
                                            request.logprobs):
            assert [id for id, _ in top] == np.argsort(-row, kind="stable")[:5].tolist()
            assert np.allclose([value for _, value in top], row[[id for id, _ in top]], atol=1e-4)
            assert abs(logprob - row[token]) < 1e-4


def test_choices_differ_and_the_first_is_plain(tiny):
    params = leone.Sampling(temperature=2.0, seed=11)
    plain, first, second = finish(tiny, *(
        tiny.submit([1, 2, 3], params, 12, ignore_eos=True, **options)
        for options in ({}, {"choice": 0}, {"choice": 1})))
    assert plain == first != second


def test_a_failed_device_ends_every_request():
    with engine(quantised("llama3"), "cpu", max_rows=1) as e:
        requests = [e.submit([1], leone.Sampling(seed=1), 50) for _ in range(3)]
        e.step()
        heard = []
        e.on_event = heard.append
        e.fail(DeviceError("the card fell off the bus"))
        assert heard == requests and all(r.finish_reason == "error" for r in requests)
        assert not e.step()


def test_default_length_fills_the_context(tiny):
    request = tiny.submit([1, 2, 3], leone.Sampling(temperature=0), ignore_eos=True)
    finish(tiny, request)
    assert len(request.tokens) + 3 in (tiny.cfg.n_ctx - 1, tiny.cfg.n_ctx)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stop_strings(backend):
    """The answer ends before a stop string, and no event ever shows a part of one."""
    with engine(smol(), backend) as e:
        plain = "".join(event.text for event in e.generate(
            "The capital of France is", leone.Sampling(temperature=0), 24))
        assert "Paris" in plain
        for stop in ("aris", "\n\nThe", "answer is: 2018", "12:1"):
            request = e.submit("The capital of France is",
                               leone.Sampling(temperature=0, stop=("not there", stop)), 24)
            while e.step():
                pass
            assert request.text == plain[:plain.index(stop)]
            assert request.text == "".join(event.text for event in request.events)
            assert request.finish_reason == "stop"


def test_split_at_stop():
    split = leone.split_at_stop
    assert split("brown fo", ("own fox",), False) == ("br", "own fo", False)
    assert split("brown fo", ("own fox",), True) == ("brown fo", "", False)
    assert split("brown fox!", ("own fox", "fox"), False) == ("br", "", True)
    assert split("abc", (), False) == ("abc", "", False)
    assert split("aab", ("ab", "aabc"), False) == ("a", "", True)


def test_penalties_forbid_repeats(tiny):
    free, bound = finish(
        tiny,
        tiny.submit([9], leone.Sampling(temperature=0), 60, ignore_eos=True),
        tiny.submit([9], leone.Sampling(temperature=0, presence_penalty=2, frequency_penalty=2,
                                        repetition_penalty=50.0), 60, ignore_eos=True))
    assert len(set(bound)) > len(set(free))


def test_logit_bias_forces_a_token(tiny):
    tokens, = finish(tiny, tiny.submit([9], leone.Sampling(temperature=0, logit_bias={77: 100.0}),
                                       3, ignore_eos=True))
    assert tokens == [77] * 3


def test_page_pool_counts_holders():
    pool = PagePool(5)
    pages = pool.take(3)
    assert len(set(pages)) == 3 and pool.free_count == 2
    pool.share(pages[:1])
    pool.give(pages)
    assert pool.free_count == 4
    pool.give(pages[:1])
    assert pool.free_count == 5


def test_small_memory_gives_the_same_bits():
    """Weights that stay quantised, expanded by panel, give the bits of expanded ones."""
    import gguf_file
    import model
    from kv import Batch
    gguf = gguf_file.GGUF(quantised("qwen3"))
    results = []
    for limit in (None, 0, 500_000):
        ops = reference.Reference(np.float32, memory_limit=limit)
        cfg, weights = model.load(gguf, ops)
        batch = Batch.of([(0, 0, list(range(1, 71)), 0, 70)], np.array([[1, 0]], np.int32), 64)
        kv = ops.pages(cfg, 2, "f16")
        results.append(model.forward(cfg, weights, batch, kv, ops).tobytes())
    assert len(set(results)) == 1


def test_two_engines_at_once():
    with engine(quantised("llama3"), "cpu") as a, engine(quantised("qwen25"), "cpu") as b:
        first = [e.token for e in a.generate([1, 2], leone.Sampling(temperature=0), 8,
                                             ignore_eos=True)]
        for _ in b.generate([1, 2], leone.Sampling(temperature=0), 8, ignore_eos=True):
            pass
        assert first == [e.token for e in a.generate([1, 2], leone.Sampling(temperature=0), 8,
                                                     ignore_eos=True)]


@pytest.mark.parametrize("family", ["deepseek2", "qwen35"])
def test_second_turn_of_a_session(family):
    """Latent or recurrent: it answers as a request does that knows nothing of the first turn."""
    with engine(quantised(family), "cpu", max_rows=2) as e:
        first = e.submit(list(range(70)), leone.Sampling(temperature=0), 5, ignore_eos=True,
                         session="a")
        finish_all(e)
        prompt = first.prompt + first.tokens + [9, 8, 7]
        turns = [e.submit(prompt, leone.Sampling(seed=3), 8, ignore_eos=True, **options)
                 for options in ({"session": "a"}, {"salt": "another"})]
        finish_all(e)
        assert turns[0].tokens == turns[1].tokens and turns[0].logprobs == turns[1].logprobs


def finish_all(e):
    while e.step():
        pass


def test_states_take_their_share_of_memory(monkeypatch):
    monkeypatch.setattr(reference.Reference, "free_memory", lambda self: 20_000_000)
    with engine(quantised("qwen35"), "cpu", context=None, sessions=3, max_rows=3) as e:
        states = 4 * e.cfg.state_bytes(leone.PENDING)
        assert e.ops.allocated["states"] == states
        page = leone.PAGE * e.cfg.kv_bytes_per_token("f16")
        assert e.pool.n_pages == min((18_000_000 - states) // page, 3 * 512 // leone.PAGE)
    with pytest.raises(DeviceError, match="no memory is left .* fewer --sessions"):
        engine(quantised("qwen35"), "cpu", context=None, sessions=100, max_rows=3)


def test_the_scratch_of_all_models_is_counted(monkeypatch):
    """On a card: that of the model, with a row of logits for each draft, and of a draft model."""
    path = quantised("llama3")
    cfg, _ = model.load(gguf_file.GGUF(path), tools.CheckOnly())
    of_model = cfg.scratch_bytes(2048 + 6, 6 * leone.PENDING)
    of_draft = cfg.scratch_bytes(2048 + 6, 128)
    page = leone.PAGE * cfg.kv_bytes_per_token("f16")
    monkeypatch.setattr(reference.Reference, "captures", True)
    for draft, held, page_bytes in (("off", of_model, page),
                                    (str(path), of_model + of_draft, 2 * page)):
        free = (held + 10 * page_bytes + page // 2) / 0.9
        monkeypatch.setattr(reference.Reference, "free_memory", lambda self: free)
        with engine(path, "cpu", context=None, max_rows=6, draft=draft) as e:
            assert e.pool.n_pages == 10
    assert of_draft - of_model == 4 * (128 - 54) * (cfg.n_vocab + 10_000)
    longer = dataclasses.replace(cfg, n_ctx=2 * cfg.n_ctx)
    parts = longer.scratch_bytes(518, 9) - cfg.scratch_bytes(518, 9)
    assert parts == 4 * 518 * cfg.n_heads * cfg.value_dim * cfg.n_ctx // 128
    endless = dataclasses.replace(cfg, n_ctx=1 << 31)
    assert endless.scratch_bytes(518, 9) < (1 << 28) + cfg.scratch_bytes(518, 9)


def test_bytes_of_a_step():
    """One token reads two of eight experts; many tokens read all."""
    with engine(quantised("qwen3moe"), "cpu") as e:
        one, all_ = (e.bytes_per_step(rows) for rows in (1, 10_000))
        experts = 2 * 3 * 8 * 256 * 256 * 4  # layers, gate, up and down, experts
        assert all_ - one == experts * 3 // 4
        assert e.weights.active_parameters == one // 4


@pytest.mark.parametrize("options", [
    {"choice": -1}, {"choice": 2**32}, {"top_logprobs": -1}, {"top_logprobs": 513},
    {"top_logprobs": "x"}, {"speculation": 9}, {"speculation": -1}, {"max_tokens": 0}])
def test_what_no_request_can_ask_for_costs_nobody_else(options):
    with engine(quantised("llama3"), "cpu") as e:
        with pytest.raises(RequestError):
            e.submit([4, 5], leone.Sampling(temperature=0), **{"max_tokens": 3, **options})
        assert len(greedy(e, [4, 5], 3)) == 3 and not e.busy
