"""What stays after a request: known prefixes, sessions in memory and in the store."""
import contextlib
import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import leone
from errors import DeviceError, RequestError
from kv import PAGE, PagePool, PrefixCache, common_prefix
from models import BACKENDS, engine, quantised
from sessions import Sessions

GREEDY = leone.Sampling(temperature=0)
HYBRID = "qwen35moe"  # with recurrent state, routers and a shared expert
LONG = bool(os.environ.get("LEONE_TEST_LONG"))
rng = np.random.default_rng(5)


@pytest.fixture(params=["llama3", HYBRID])
def path(request):
    return quantised(request.param)


def random_ids(count):
    return rng.integers(1, 500, count).tolist()


def turn(e, ids, session=None, n=9, **options):
    request = e.submit(ids, GREEDY, n, ignore_eos=True, session=session, **options)
    while e.step():
        pass
    if request.error:
        raise request.error
    kept = {p for s in e.sessions.known.values() for p in s.pages}
    known = {p for _, pages, _ in e.prefixes.entries.values() for p in pages}
    assert e.pool.free_count + len(kept | known) == e.pool.n_pages
    return request


def conversation(e, session, turns, start=(), n=9):
    """Random user turns; checks that each token is computed once. Returns all ids."""
    ids = list(start)
    for i in range(turns):
        new = random_ids(int(rng.integers(1, 70)))  # ten turns stay within 512
        request = turn(e, ids + new, session, n)
        if ids:  # all but the last token of the last answer, which was never fed
            assert request.cached_tokens == len(ids) - 1
        ids += new + request.tokens
    return ids


def alone(e, ids, n=9):
    """What a request gives that knows nothing of the past."""
    request = turn(e, ids, None, n, salt=str(rng.integers(1 << 40)))
    assert request.cached_tokens == 0
    return request.tokens


def test_common_prefix():
    assert common_prefix([], [1]) == 0
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([1, 2, 4], [1, 2, 3]) == 2
    assert common_prefix([5], [6]) == 0


def test_a_salt_that_spells_tokens_finds_nothing():
    """Pages of the same text end to end, but the tokens of the first one are in the salt."""
    pool = PagePool(3)
    cache, ids = PrefixCache(pool), [0x61616161] * (3 * PAGE)
    cache.add(ids, pool.take(3), "0 ")
    assert cache.find(ids[PAGE:], "0 " + "aaaa" * PAGE)[0] == []


def test_prefix_cache_shares_counts_and_evicts():
    pool = PagePool(6)
    cache = PrefixCache(pool)
    ids = random_ids(3 * PAGE + 5)
    pages = pool.take(4)
    cache.add(ids, pages, "0 ")
    pool.give(pages)
    assert pool.free_count == 3 and cache.unused == 3  # the partial page went back
    assert cache.find(ids, "1 ")[0] == [] and cache.find(ids[1:], "0 ")[0] == []
    other = ids[:2 * PAGE] + random_ids(PAGE)
    assert cache.find(other, "0 ") == (pages[:2], 2 * PAGE, None)
    assert cache.unused == 1
    assert not cache.make_room(5) and pool.free_count == 3  # two are in use: nothing is dropped
    assert cache.make_room(4) and pool.free_count == 4
    pool.give(pages[:2])
    assert cache.find(ids, "0 ")[0] == pages[:2]  # the end of the prefix went first
    pool.give(pages[:2])
    assert cache.make_room(6) and not cache.entries and pool.free_count == 6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv", ["f16", "q8"])
def test_known_prefix_changes_no_bit(backend, kv):
    with engine(quantised("qwen3"), backend, kv=kv, max_rows=4) as e:
        ids = random_ids(150)
        first = turn(e, ids)
        again = turn(e, ids)
        assert again.cached_tokens == 2 * PAGE and again.tokens == first.tokens
        assert again.logprobs == first.logprobs
        longer = ids + first.tokens + random_ids(70)
        assert turn(e, longer).tokens == alone(e, longer)
        assert turn(e, ids, salt="x").cached_tokens == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_session_computes_each_token_once(path, backend, tmp_path):
    """Ten turns; hibernated and restarted in between. Each answer is that of a fresh request."""
    with engine(path, backend, max_rows=4, session_store=tmp_path) as e:
        ids = conversation(e, "talk", 4)
        e.sessions.hibernate("talk")
        [listed] = e.sessions.list()
        assert listed["state"] == "stored" and listed["pages"] == 0
        assert listed["tokens"] == len(ids) - 1
        ids = conversation(e, "talk", 3, ids)
    with engine(path, backend, max_rows=4, session_store=tmp_path) as e:
        ids = conversation(e, "talk", 3, ids, n=2)
        assert turn(e, ids + [7], "talk").tokens == alone(e, ids + [7])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stored", [False, True])
def test_fork_gives_two_independent_conversations(path, backend, stored, tmp_path):
    with engine(path, backend, max_rows=4, session_store=tmp_path) as e:
        ids = conversation(e, "a", 2)
        if stored:
            e.sessions.hibernate("a")
        e.sessions.fork("a", "b")
        mine, other = random_ids(20), random_ids(30)
        a = e.submit(ids + mine, GREEDY, 20, ignore_eos=True, session="a")
        b = e.submit(ids + other, GREEDY, 20, ignore_eos=True, session="b")
        while e.step():
            pass
        assert a.cached_tokens == b.cached_tokens == len(ids) - 1
        assert a.tokens == alone(e, ids + mine, 20)
        assert b.tokens == alone(e, ids + other, 20)


def test_going_back_in_a_conversation_keeps_what_is_common():
    with engine(quantised("llama3"), "cpu", max_rows=4) as e:
        ids = conversation(e, "s", 3)
        back = ids[:100] + random_ids(40)
        request = turn(e, back, "s")
        assert request.cached_tokens == 100 and request.tokens == alone(e, back)
        assert turn(e, ids, "s").cached_tokens >= PAGE


def test_cancelled_turn_keeps_what_was_computed(path):
    with engine(path, "cpu", max_rows=4, prefill_chunk=64) as e:
        ids = random_ids(300)
        request = e.submit(ids, GREEDY, 20, session="s")
        e.step()
        e.step()
        request.cancel()
        while e.step():
            pass
        assert request.finish_reason == "cancelled"
        again = turn(e, ids, "s")
        assert again.cached_tokens == 128 and again.tokens == alone(e, ids)


def test_a_turn_cancelled_in_the_queue_leaves_the_session_alone(path):
    with engine(path, "cpu", max_rows=1) as e:
        ids = conversation(e, "s", 2)
        e.submit(ids + [5], GREEDY, 5, session="s").cancel()
        e.step()
        assert turn(e, ids + [5], "s").cached_tokens == len(ids) - 1


def test_a_session_has_one_request_at_a_time(path):
    with engine(path, "cpu", max_rows=4) as e:
        e.submit([1, 2], GREEDY, 5, session="s")
        for act in (lambda: e.submit([1], GREEDY, 5, session="s"),
                    lambda: e.sessions.fork("s", "t"), lambda: e.sessions.delete("s")):
            with pytest.raises(RequestError) as caught:
                act()
            assert caught.value.status == 409 and caught.value.code == "session_busy"
        while e.step():
            pass
        e.sessions.delete("s")
        for name, code in (("s", "session_not_found"), ("../s", "invalid_request"),
                           ("a" * 65, "invalid_request"), (".s", "invalid_request")):
            with pytest.raises(RequestError) as caught:
                e.sessions.delete(name)
            assert caught.value.code == code
        assert e.pool.free_count + e.prefixes.unused == e.pool.n_pages


@pytest.mark.parametrize("store", [False, True])
def test_idle_sessions_make_room(path, store, tmp_path):
    """Pages of idle sessions serve others when they are short: 6 sessions of 8 pages in 32."""
    folder = tmp_path if store else None
    with engine(path, "cpu", max_rows=4, sessions=16, session_store=folder) as e:
        talks = {}
        for name in "abcdef":
            talks[name] = random_ids(480)
            talks[name] += turn(e, talks[name], name).tokens
        states = {s["name"]: s["state"] for s in e.sessions.list()}
        assert states.get("a") == ("stored" if store else None) and states["f"] == "resident"
        for name, ids in talks.items():
            request = turn(e, ids + [9], name, n=2)
            assert not store or request.cached_tokens == len(ids) - 1
            assert request.tokens == alone(e, ids + [9], 2)


def test_sessions_in_memory_are_bounded(path, tmp_path):
    with engine(path, "cpu", max_rows=2, session_store=tmp_path) as e:
        for name in "abcd":
            turn(e, random_ids(20), name)
            assert e.sessions.resident <= 2
        assert e.sessions.stored == 2


@pytest.mark.parametrize("salt", ["", "other"])
def test_sessions_of_another_salt_or_rope_set_are_not_used(salt):
    with engine(quantised("phi3-longrope"), "cpu", max_rows=2) as e:
        ids = random_ids(80)
        turn(e, ids, "s")
        n = e.cfg.rope_long_from if not salt else 9  # a long answer takes the other RoPE factors
        request = e.submit(ids, GREEDY, n, session="s", salt=salt)
        for _ in range(4):
            e.step()
        assert request.rope_set == (not salt) and request.cached_tokens == 0
        request.cancel()
        e.step()


def test_every_flipped_byte_is_found(path, tmp_path):
    with engine(path, "cpu", max_rows=2, session_store=tmp_path) as e:
        ids = conversation(e, "s", 1)
        e.sessions.hibernate("s")
        file = tmp_path / "s.kv"
        whole = file.read_bytes()
        places = range(0, len(whole), 1 if LONG else 9973)
        for at in [*places, 0, 8, 12, 16, 4095, 4096, len(whole) - 1]:
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1:])
            with pytest.raises(RequestError) as caught:
                turn(e, ids + [3], "s")
            assert caught.value.status == 409 and caught.value.code == "session_damaged", at
        for damaged in *(whole[:size] for size in (0, 10, 48, 4096, len(whole) - 1)), whole + b"\0":
            file.write_bytes(damaged)
            with pytest.raises(RequestError):
                turn(e, ids + [3], "s")
        file.write_bytes(whole)
        assert turn(e, ids + [3], "s").cached_tokens == len(ids) - 1


@pytest.mark.parametrize("changed", [
    {"path": quantised("qwen25")}, {"kv": "f32"},
    pytest.param({"backend": "cuda"}, marks=pytest.mark.gpu)])
def test_a_foreign_session_is_refused(tmp_path, changed):
    options = {"path": quantised("llama3"), "backend": "cpu", "session_store": tmp_path}
    with engine(**options) as e:
        turn(e, [1, 2, 3], "s")
    with engine(**{**options, **changed}) as e:
        with pytest.raises(RequestError) as caught:
            turn(e, [1, 2, 3], "s")
        assert caught.value.status == 409 and caught.value.code == "session_foreign"
        e.sessions.delete("s")
        turn(e, [1, 2, 3], "s")


CHILD = """
import sys
sys.path[:0] = sys.argv[1:3]
import leone
from models import engine, quantised
ids = [int(i) for i in sys.argv[4].split(",")]
e = engine(quantised(sys.argv[5]), "cpu", max_rows=2, session_store=sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
while True:
    ids = ids if len(ids) < 400 else ids[:90]
    request = e.submit(ids, leone.Sampling(temperature=0), 3, ignore_eos=True, session="s")
    while e.step(): pass
    assert request.error is None, request.error
    ids += request.tokens
    print(",".join(map(str, ids)), flush=True)
    e.sessions.hibernate("s")
"""


@pytest.mark.parametrize("family", ["llama3", HYBRID])
def test_killed_while_hibernating(family, tmp_path):
    """kill -9 at random moments: what is in the store afterwards is whole and continues right."""
    tests = Path(__file__).resolve().parent
    ids, random_time = random_ids(100), random.Random(3)
    for _ in range(50 if LONG else 4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tests.parent), str(tests), str(tmp_path),
             ",".join(map(str, ids)), family],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdout.readline() == "ready\n"
        child.stdin.write("\n")
        child.stdin.flush()
        said = child.stdout.readline()
        time.sleep(random_time.random() * 0.15)
        child.send_signal(signal.SIGKILL)
        rest = child.communicate()[0].splitlines()
        complete = [line for line in [said.strip(), *rest] if line]
        ids = [int(i) for i in complete[-1].split(",")][:400]
        with engine(quantised(family), "cpu", max_rows=2, session_store=tmp_path) as e:
            if e.sessions.known:
                request = turn(e, ids + [4], "s", 2)
                assert request.cached_tokens > 0
                assert request.tokens == alone(e, ids + [4], 2)
                e.sessions.known.clear()  # leave the store as the killed one left it
    assert hashlib.sha256((tmp_path / "s.kv").read_bytes()).hexdigest()


def steps(e, most=200):
    """Run to the end; a scheduler that waits for itself would never get there."""
    while e.step():
        most -= 1
        assert most, [(len(r.prompt), r.max_tokens) for r in e.waiting]


def test_a_waiting_turn_does_not_keep_memory_from_those_before_it(path):
    """Its session holds pages that the head of the queue needs."""
    with engine(path, "cpu", context=512, max_rows=4) as e:
        ids = conversation(e, "a", 1) + random_ids(100)
        other = e.submit(random_ids(100), GREEDY, 30, ignore_eos=True)
        e.step()
        whole = e.submit(random_ids(400), GREEDY, 112, ignore_eos=True)
        again = e.submit(ids, GREEDY, 5, ignore_eos=True, session="a")
        steps(e)
        assert all(r.finish_reason == "length" for r in (other, whole, again))
        assert again.tokens == alone(e, ids, 5)


def test_a_page_is_computed_again_where_its_copy_would_not_fit():
    with engine(quantised("llama3"), "cpu", context=192, max_rows=2) as e:
        ids = random_ids(140)
        turn(e, ids, "s", 30)
        changed = ids[:100] + random_ids(3)
        request = e.submit(changed, GREEDY, 192 - len(changed), ignore_eos=True, session="s")
        steps(e)
        assert request.cached_tokens == PAGE
        assert request.tokens == alone(e, changed, 192 - len(changed))


def test_a_session_larger_than_the_cache_is_one_line(tmp_path):
    options = dict(max_rows=2, session_store=tmp_path)
    with engine(quantised("llama3"), "cpu", **options) as e:
        turn(e, random_ids(300), "s")
    with engine(quantised("llama3"), "cpu", **options, context=128) as e:
        request = e.submit([1, 2, 3], GREEDY, 5, session="s")
        steps(e)
        assert request.error.code == "session_too_large" and request.error.status == 409
        e.sessions.delete("s")
        turn(e, [1, 2, 3], "s")


def test_claims_race_with_changes(tmp_path):
    """Requests, forks and deletions of one name from several threads: no session is lost, doubled
    or leaked. Changes are the engine thread's, claims come from anywhere."""
    with engine(quantised("llama3"), "cpu", max_rows=4, session_store=tmp_path) as e:
        stop = threading.Event()

        def claim(name):
            while not stop.is_set():
                try:
                    e.submit([1, 2, 3], GREEDY, 2, session=name)
                except RequestError as error:
                    assert error.status in (409, 429)

        threads = [threading.Thread(target=claim, args=[name]) for name in "ab"]
        for thread in threads:
            thread.start()
        changes = (e.sessions.delete, e.sessions.hibernate, lambda name: e.sessions.fork(name, "b"))
        for i in range(300):
            with contextlib.suppress(RequestError):
                changes[i % 3]("a")
            e.step()
        stop.set()
        for thread in threads:
            thread.join()
        steps(e)
        for session in e.sessions.list():
            e.sessions.delete(session["name"])
        assert e.pool.free_count + e.prefixes.unused == e.pool.n_pages
        assert not list(tmp_path.iterdir())


def test_what_can_be_stored_is_stored_at_the_end(path, tmp_path, monkeypatch, capsys):
    write = Sessions.write

    def fails_for_a(self, session):
        if session.name == "a":
            raise RequestError("session a cannot be stored: No space left on device")
        write(self, session)

    monkeypatch.setattr(Sessions, "write", fails_for_a)
    with engine(path, "cpu", max_rows=4, session_store=tmp_path) as e:
        for name in "ab":
            turn(e, random_ids(20), name)
    assert [path.name for path in tmp_path.iterdir()] == ["b.kv"]
    assert capsys.readouterr().err == "leone: session a cannot be stored: No space left on device\n"


def test_a_vanished_store_costs_only_the_sessions(tmp_path):
    store = tmp_path / "store"
    with engine(quantised("llama3"), "cpu", max_rows=1, session_store=store) as e:
        turn(e, random_ids(20), "s")
        store.rmdir()
        store.write_text("")
        turn(e, random_ids(20))  # needs the session's place
        assert e.sessions.list() == []


def test_an_unusable_store_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError) as caught:
        engine(quantised("llama3"), "cpu", session_store=tmp_path / "file")
    assert "session store" in str(caught.value)


def test_a_store_has_one_engine_at_a_time(tmp_path):
    """A second one would overwrite what the first has filed, and clear away what it is writing."""
    options = dict(path=quantised("llama3"), backend="cpu", max_rows=2, session_store=tmp_path)
    ids, being_written = random_ids(20), tmp_path / ".s.kv.part"
    with engine(**options) as e:
        turn(e, ids, "s")
        being_written.write_text("")
        for _ in range(2):
            with pytest.raises(RequestError, match="another server has it; choose a folder"):
                engine(**options)
        assert being_written.exists()
    with engine(**options) as e:
        assert not being_written.exists()
        assert turn(e, ids + [3], "s").cached_tokens == len(ids)


def test_a_full_store_says_so_and_loses_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with engine(quantised("llama3"), "cpu", max_rows=2, session_store=tmp_path) as e:
        ids = conversation(e, "s", 2)
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(RequestError) as caught:
            e.sessions.hibernate("s")
        assert caught.value.status == 507 and not list(tmp_path.iterdir())
        monkeypatch.undo()
        assert turn(e, ids + [3], "s").cached_tokens == len(ids) - 1


# ---- recurrent state: it lies at the end of what was computed and cannot be cut back -------------


def control_prompt(e, lengths):
    """Messages of these lengths, each beginning with the same control token."""
    start = next(id for id in range(e.cfg.n_tokens) if e.tokenizer.is_special(id))
    plain = [id for id in random_ids(sum(lengths)) if id != start] * 2
    ids = []
    for length in lengths:
        ids += [start] + plain[len(ids):len(ids) + length - 1]
    return ids


@pytest.mark.parametrize("backend", BACKENDS)
def test_snapshots_lie_at_the_ends_of_messages(backend):
    """A fork at an earlier position computes only what follows the nearest snapshot before it."""
    with engine(quantised(HYBRID), backend, max_rows=4) as e:
        ids = control_prompt(e, [90, 60, 5])  # system, user, header of the answer
        first = turn(e, ids)
        assert first.cached_tokens == 0
        again = turn(e, ids)
        assert again.cached_tokens == 150 and again.tokens == first.tokens
        assert again.logprobs == first.logprobs
        head = ids + first.tokens[:-1]
        longer = head + random_ids(20)
        assert turn(e, longer).cached_tokens == len(head)
        assert turn(e, longer).tokens == alone(e, longer)
        other = ids[:90] + control_prompt(e, [30, 5])  # another question
        forked = turn(e, other)
        assert forked.cached_tokens == 90 and forked.tokens == alone(e, other)
        inside = ids[:120] + random_ids(10)
        assert turn(e, inside).cached_tokens == 90
        assert turn(e, ids, salt="x").cached_tokens == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_prompt_leaves_snapshots_on_its_way(backend, monkeypatch):
    monkeypatch.setattr(leone, "SNAPSHOT_TOKENS", 100)
    with engine(quantised(HYBRID), backend, max_rows=4) as e:
        ids = random_ids(330)
        turn(e, ids)
        assert len(e.prefixes.entries) == 5  # 100, 200, 300, the last token's and the answer's
        other = ids[:257] + random_ids(30)
        forked = turn(e, other)
        assert forked.cached_tokens == 200 and forked.tokens == alone(e, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_session_that_goes_back_begins_at_a_snapshot(backend):
    with engine(quantised(HYBRID), backend, max_rows=4) as e:
        ids = control_prompt(e, [70, 40, 6])
        ids += turn(e, ids, "s").tokens
        back = ids[:100] + random_ids(9)
        request = turn(e, back, "s")
        assert request.cached_tokens == 70 and request.tokens == alone(e, back)


def test_the_state_cache_has_a_budget():
    with engine(quantised(HYBRID), "cpu", max_rows=4) as e:
        turn(e, random_ids(1))
        [(_, _, state)] = e.prefixes.entries.values()
        e.prefixes.limit = 3 * state.data.nbytes
        prompts = [random_ids(30) for _ in range(5)]
        answers = [turn(e, ids).tokens for ids in prompts]  # two snapshots each
        assert len(e.prefixes.entries) == 3
        cached = [turn(e, ids + answer, n=1).cached_tokens for ids, answer in zip(prompts, answers)]
        assert cached[0] == cached[1] == 0
        assert e.pool.free_count + e.prefixes.unused == e.pool.n_pages


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("end", ["eos", "stop", "cancel"])
def test_an_end_seen_one_step_late_leaves_the_right_state(backend, end):
    """The step that was launched meanwhile fed a token too many; the next turn must not see it."""
    with engine(quantised(HYBRID), backend, max_rows=4) as e:
        ids = random_ids(70)
        whole = turn(e, ids, n=12)
        plain, stop = whole.tokens, ()
        if end == "eos":
            e.tokenizer.eos_ids = {plain[5]}
        if end == "stop":
            stop = (whole.text[len(whole.text) // 2:][:2],)
        request = e.submit(ids, leone.Sampling(temperature=0, stop=stop), 12, session="s",
                           salt="late", ignore_eos=end != "eos")
        while e.step():
            if end == "cancel" and len(request.tokens) == 6:
                request.cancel()
        e.tokenizer.eos_ids = set()
        said = request.tokens
        assert 1 <= len(said) < 12 and said == plain[:len(said)]
        following = ids + said + random_ids(8)
        again = turn(e, following, "s", salt="late")
        assert again.cached_tokens == len(ids) + len(said) - 1
        assert again.tokens == alone(e, following)


def test_a_session_that_cannot_be_opened_holds_no_pages(path, tmp_path):
    """What is known of its prompt belongs to nobody once the request has failed."""
    with engine(path, "cpu", max_rows=2, session_store=tmp_path) as e:
        ids = random_ids(200)
        turn(e, ids, "s")
        e.sessions.hibernate("s")
        file = tmp_path / "s.kv"
        file.write_bytes(file.read_bytes()[:-1])
        for _ in range(3):
            with pytest.raises(RequestError):
                turn(e, ids + [3], "s")
        assert e.pool.free_count + e.prefixes.unused == e.pool.n_pages
        assert len(turn(e, ids).tokens) == 9


def test_no_memory_for_states_is_allowed():
    with engine(quantised(HYBRID), "cpu", max_rows=2, state_cache=0) as e:
        ids = random_ids(40)
        assert turn(e, ids).tokens == turn(e, ids).tokens and not e.prefixes.entries


def test_without_memory_for_its_state_a_session_is_computed_again(tmp_path, monkeypatch):
    def save_state(kv, slot):
        raise DeviceError("no pinned memory")

    with engine(quantised(HYBRID), "cpu", max_rows=2, session_store=tmp_path) as e:
        ids = random_ids(90)
        with monkeypatch.context() as patch:
            patch.setattr(e.ops, "save_state", save_state)
            ids += turn(e, ids, "s").tokens
        again = turn(e, ids + [5], "s")
        assert again.cached_tokens == 0 and again.tokens == alone(e, ids + [5])
        assert turn(e, ids + [5] + again.tokens + [6], "s").cached_tokens == len(ids) + 9
