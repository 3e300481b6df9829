"""Receipts: what makes one invalid, the key file, the hash of a model, the command, and replay."""
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import leone
import receipts
import tools
from errors import RequestError
from models import BACKENDS, engine, quantised

ROOT = Path(receipts.__file__).resolve().parent
KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answer(path, backend="cpu", prompt=(1, 2, 3), kv="f16", cancel_after=None, **options):
    """What the server hands out for one request: receipt and token ids."""
    sampling = leone.Sampling(**{"temperature": 0.8, "seed": 11, **options})
    with engine(path, backend, kv=kv) as e:
        request = e.submit(list(prompt), sampling, 24, choice=2)
        while e.step():
            if len(request.tokens) == cancel_after:
                request.cancel()
        model_sha256 = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        fields = receipts.describe(e, request, "chatcmpl-1", model_sha256, "{{ messages }}")
    return {"receipt": receipts.make(KEY, fields), "prompt_token_ids": request.prompt,
            "token_ids": request.tokens}


@pytest.fixture(scope="module")
def sampled():
    return answer(quantised("llama3"), stop=["zebra"], logit_bias={5: 1.5}, top_p=0.95)


def leaves(value, path=()):
    """(path, value) of everything in a JSON value, containers too."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        yield (*path, name), item
        if isinstance(item, (dict, list)):
            yield from leaves(item, (*path, name))


def changed(receipt, path, change):
    """A copy of the receipt in which `change(container, name)` was applied at `path`."""
    copy = json.loads(json.dumps(receipt))
    container = copy
    for name in path[:-1]:
        container = container[name]
    change(container, path[-1])
    return copy


# ---- signing and verifying -------------------------------------------------------------------


def test_a_receipt_says_all_of_it(sampled):
    receipt = sampled["receipt"]
    receipts.verify(KEY, receipt)
    assert set(receipt) == {
        "schema_version", "id", "created", "engine_version", "backend", "kv_format",
        "gpu_architecture", "cubin_sha256", "model_sha256", "rope_set", "template_sha256",
        "sampling", "prompt_tokens", "completion_tokens", "prompt_tokens_sha256",
        "output_tokens_sha256", "finish_reason", "hmac"}
    assert receipt["sampling"] == {
        "temperature": 0.8, "top_k": 0, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {"5": 1.5}, "seed": 11,
        "stop": ["zebra"], "choice": 2, "max_tokens": 24, "ignore_eos": False}
    assert receipt["template_sha256"] == hashlib.sha256(b"{{ messages }}").hexdigest()
    ids = b"".join(token.to_bytes(4, "little") for token in sampled["token_ids"])
    assert receipt["output_tokens_sha256"] == hashlib.sha256(ids).hexdigest()


def test_every_change_is_found(sampled):
    """Each value changed, removed, or given a neighbour; the signature too."""
    receipt, rng = sampled["receipt"], random.Random(1)
    values = [0, 1, -1, 0.5, 2**53, "", "x", None, True, False, [], {}, float("1e300")]
    for path, value in leaves(receipt):
        for other in [*rng.sample(values, 6), f"{value}0", [value], {"": value}]:
            if other == value and isinstance(other, bool) == isinstance(value, bool):
                continue  # 0 is 0.0 to JSON

            def replace(container, name):
                container[name] = other
            with pytest.raises(RequestError):
                receipts.verify(KEY, changed(receipt, path, replace))
        removed = changed(receipt, path, lambda container, name: container.pop(name))
        with pytest.raises(RequestError):
            receipts.verify(KEY, removed)
        if isinstance(value, (dict, list)):
            longer = changed(receipt, path, lambda container, name: (
                container[name].append("x") if isinstance(value, list)
                else container[name].update(x=0)))
            with pytest.raises(RequestError):
                receipts.verify(KEY, longer)
    with pytest.raises(RequestError):
        receipts.verify(KEY, {**receipt, "also": None})
    for place in range(64):
        digits = list(receipt["hmac"])
        digits[place] = "0" if digits[place] != "0" else "1"
        with pytest.raises(RequestError):
            receipts.verify(KEY, {**receipt, "hmac": "".join(digits)})
    with pytest.raises(RequestError):
        receipts.verify(KEY[::-1], receipt)


def test_canonical_form(sampled):
    """The form is the documented one, and a browser that writes 1.0 as 1 does not break it."""
    receipt = receipts.make(KEY, {"b": [1.0, 0.1, -0.0], "a": {"é": "\n", "B": None}})
    import hmac
    text = rb'{"a":{"B":null,"\u00e9":"\n"},"b":[1,0.1,0]}'
    assert receipt["hmac"] == hmac.new(KEY, text, "sha256").hexdigest()
    shuffled = dict(random.Random(2).sample(list(sampled["receipt"].items()), 18))
    text = json.dumps(shuffled, ensure_ascii=False, indent=3)
    assert ".0," in text
    receipts.verify(KEY, json.loads(text.replace(".0,", ",")))
    with pytest.raises(RequestError, match="version"):
        receipts.verify(KEY, receipt)  # signed, but of no version that we know


# ---- the key ---------------------------------------------------------------------------------


def test_key_is_made_once(tmp_path):
    """Many that start at once get one key of 32 bytes, which only the owner may read."""
    path, keys = tmp_path / "key", []
    starters = [threading.Thread(target=lambda: keys.append(receipts.load_key(path)))
                for _ in range(16)]
    for thread in starters:
        thread.start()
    for thread in starters:
        thread.join()
    assert len(keys) == 16 and len(set(keys)) == 1 and len(keys[0]) == 32
    assert path.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["key"]
    assert receipts.load_key(path) == keys[0] != receipts.load_key(tmp_path / "other")


def test_key_files_that_are_refused(tmp_path):
    path = tmp_path / "key"
    for mode in 0o640, 0o604, 0o660, 0o602:
        path.write_bytes(KEY)
        path.chmod(mode)
        with pytest.raises(RequestError, match=f"mode {mode:o}"):
            receipts.load_key(path)
    path.chmod(0o600)
    for content in b"", KEY[:31], b"x" * 4097:
        path.write_bytes(content)
        with pytest.raises(RequestError, match=f"{len(content)} bytes"):
            receipts.load_key(path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in "pipe", ".":
        with pytest.raises(RequestError, match="must be a file"):
            receipts.load_key(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        receipts.load_key(tmp_path / "absent", create=False)
    with pytest.raises(FileNotFoundError):
        receipts.load_key(tmp_path / "no folder" / "key")


# ---- the hash of a model ---------------------------------------------------------------------


def hash_of(*paths):
    return receipts.ModelHash(paths).result()


def test_model_hash(tmp_path, monkeypatch):
    """All parts in order; kept while the files stay as they are; a broken cache does no harm."""
    parts = [tmp_path / "a", tmp_path / "b"]
    for part in parts:
        part.write_bytes(os.urandom(3 << 20))
    expected = hashlib.sha256(parts[0].read_bytes() + parts[1].read_bytes()).hexdigest()
    assert hash_of(*parts) == expected != hash_of(*parts[::-1])
    cache = tmp_path / "cache" / "leone" / "models.json"
    known = json.loads(cache.read_bytes())
    assert sorted(known.values()) == sorted([expected, hash_of(*parts[::-1])])
    cache.write_text(json.dumps(dict.fromkeys(known, "kept")))
    assert hash_of(*parts) == "kept"
    parts[1].write_bytes(parts[1].read_bytes()[:-1] + b"?")
    assert hash_of(*parts) == hashlib.sha256(b"".join(p.read_bytes() for p in parts)).hexdigest()
    for broken in b"", b"[1]", b"{", b"\xff", b"7":
        cache.write_bytes(broken)
        assert len(hash_of(*parts)) == 64
    monkeypatch.setenv("XDG_CACHE_HOME", str(parts[0]))  # a file: nothing can be kept
    assert len(hash_of(*parts)) == 64
    with pytest.raises(FileNotFoundError):
        hash_of(tmp_path / "absent")


def test_model_hash_is_of_the_files_that_were_loaded(tmp_path):
    """It begins once, whoever asks first; files that are others by then have none."""
    path = tmp_path / "model"
    path.write_bytes(b"a" * 1000)
    thread, results = receipts.ModelHash([path]), []
    askers = [threading.Thread(target=lambda: results.append(thread.result())) for _ in range(8)]
    for asker in askers:
        asker.start()
    thread.begin()
    for asker in askers:
        asker.join()
    assert results == [hashlib.sha256(b"a" * 1000).hexdigest()] * 8

    def replace():
        (tmp_path / "new").write_bytes(b"b" * 1000)
        os.replace(tmp_path / "new", path)
    for change in replace, path.unlink:
        thread = receipts.ModelHash([path])
        change()
        thread.begin()
        with pytest.raises(RequestError, match="restart") as caught:
            thread.result()
        assert (caught.value.status, caught.value.code) == (503, "model_changed")


# ---- the command -----------------------------------------------------------------------------


def run(*args):
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True,
                          timeout=120, cwd=ROOT)


def verify(record, folder, key=KEY):
    """Exit code and the one line that says why."""
    file, key_file = folder / "answer.json", folder / "key"
    file.write_bytes(record if isinstance(record, bytes) else json.dumps(record).encode())
    key_file.write_bytes(key)
    key_file.chmod(0o600)
    done = run("receipts.py", "verify", file, "--key", key_file)
    lines = (done.stdout + done.stderr).splitlines()
    assert len(lines) == 1, lines
    return done.returncode, lines[0]


def test_verify_command(sampled, tmp_path):
    receipt = sampled["receipt"]
    code, line = verify(sampled, tmp_path)
    assert code == 0 and line.startswith("valid: chatcmpl-1, ") and "these token ids" in line
    code, line = verify(receipt, tmp_path)
    assert code == 0 and line.endswith("the file holds no prompt and no output token ids")
    for absent, kind in ("prompt_token_ids", "prompt"), ("token_ids", "output"):
        part = {name: value for name, value in sampled.items() if name != absent}
        code, line = verify(part, tmp_path)
        assert code == 0 and line.endswith(f"the file holds no {kind} token ids")
    assert verify({**sampled, "choices": [{"text": "x"}]}, tmp_path)[0] == 0
    assert verify(sampled, tmp_path, KEY[::-1])[0] == 1
    assert verify({**receipt, "created": 1}, tmp_path)[0] == 1
    code, line = verify({**sampled, "token_ids": [1, *sampled["token_ids"][1:]]}, tmp_path)
    assert code == 1 and "output token ids" in line
    code, line = verify({**sampled, "prompt_token_ids": [1, 2]}, tmp_path)
    assert code == 1 and "prompt token ids" in line
    assert verify(sampled, tmp_path, b"short")[0] == 2
    absent = tmp_path / "absent"
    assert run("receipts.py", "verify", absent, "--key", absent).returncode == 2
    assert not absent.exists()
    assert "verify" in run("receipts.py", "--help").stdout


BROKEN = [b"", b"{", b"[]", b"null", b'"hmac"', b'{"receipt": 1}', b'{"receipt": {"a": NaN}}',
          b'{"receipt": [["a", 1]]}', b"\xff", b'{"hmac": 1e999}', b'{"hmac": "a", "hmac": "b"}',
          b"[" * 100000, b"9" * 5000, b'{"receipt": {}, "token_ids": 5}',
          b'{"receipt": {}, "token_ids": [1.5]}',
          b'{"receipt": {}, "token_ids": ["1"]}', b'{"receipt": {}, "token_ids": [4294967296]}']


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_files_that_hold_no_receipt(data, tmp_path):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(RequestError, match="not a JSON file that holds a receipt"):
        receipts.read(tmp_path / "file")


def test_truncated_files(sampled, tmp_path):
    """No prefix of an answer is taken for one; a receipt without its hmac is not valid."""
    data, path = json.dumps(sampled).encode(), tmp_path / "file"
    for length in range(0, len(data), 37):
        path.write_bytes(data[:length])
        with pytest.raises(RequestError, match="not a JSON file"):
            receipts.read(path)
    assert verify(data[:-40], tmp_path)[0] == 2
    without = {name: value for name, value in sampled["receipt"].items() if name != "hmac"}
    assert verify({"receipt": without}, tmp_path)[0] == 1


# ---- replay ----------------------------------------------------------------------------------


def replay(record, folder, family="llama3", backend="cpu", key=None):
    path = folder / "answer.json"
    path.write_text(json.dumps(record))
    return tools.replay(path, str(quantised(family)), key, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family, options", [
    ("llama3", {"temperature": 0}),
    ("llama3", {"kv": "q8", "frequency_penalty": 0.5, "logit_bias": {7: -2}, "top_k": 40}),
    ("qwen3", {"kv": "f32", "temperature": 2.0, "min_p": 0.01, "seed": 2**64 - 1}),
    ("phi3-longrope", {"prompt": tuple(range(1, 240))}),
])
def test_replay(backend, family, options, tmp_path, capsys):
    """The tokens come out again; one that was altered is named, whatever the receipt says."""
    record = answer(quantised(family), backend, **options)
    tokens = record["token_ids"]
    assert record["receipt"]["rope_set"] == (family == "phi3-longrope")
    assert replay(record, tmp_path, family, backend) == 0
    assert f"equal: all {len(tokens)} tokens" in capsys.readouterr().out
    at = random.Random(family).randrange(len(tokens))
    forged = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1:]]
    receipt = {**record["receipt"], "output_tokens_sha256": receipts.hash_tokens(forged)}
    forgery = {**record, "receipt": receipt, "token_ids": forged}
    assert replay(forgery, tmp_path, family, backend) == 1
    assert (f"different at token {at}: it was {forged[at]} and is {tokens[at]} here"
            in capsys.readouterr().out)
    assert replay({**record, "token_ids": tokens[:-1]}, tmp_path, family, backend) == 1
    assert f"token {len(tokens) - 1}: it was nothing" in capsys.readouterr().out


def test_replay_of_a_cancelled_request(tmp_path, capsys):
    record = answer(quantised("llama3"), temperature=0, cancel_after=9)
    assert record["receipt"]["finish_reason"] == "cancelled"
    assert 9 <= len(record["token_ids"]) < 24
    assert replay(record, tmp_path) == 0
    receipt = {**record["receipt"], "finish_reason": "length"}
    assert replay({**record, "receipt": receipt}, tmp_path) == 1


def test_replay_refuses_and_warns(sampled, tmp_path, capsys):
    receipt = sampled["receipt"]
    with_receipt = lambda **fields: {**sampled, "receipt": {**receipt, **fields}}
    for record, reason in [
            (receipt, "holds no token ids"),
            ({**sampled, "prompt_token_ids": [1, 2, 4]}, "prompt token ids are not those"),
            (with_receipt(output_tokens_sha256="0" * 64), "output token ids are not those"),
            (with_receipt(model_sha256="0" * 64), "is not the model of the receipt"),
            (with_receipt(kv_format="f8"), "choose f32, f16 or q8"),
            (with_receipt(rope_set=1), "RoPE"),
            (with_receipt(sampling={**receipt["sampling"], "heat": 1}), "how its tokens were"),
            (with_receipt(sampling={**receipt["sampling"], "logit_bias": [5]}), "how its tokens"),
            (with_receipt(sampling={**receipt["sampling"], "temperature": "hot"}), "temperature"),
            (with_receipt(sampling={"seed": 1}), "how its tokens were sampled"),
            (with_receipt(sampling={**receipt["sampling"], "max_tokens": 0}), "max_tokens"),
            (with_receipt(sampling={**receipt["sampling"], "choice": -1}), "choice must be")]:
        with pytest.raises(RequestError, match=reason):
            replay(record, tmp_path)
    key = tmp_path / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    with pytest.raises(RequestError, match="changed"):
        replay(with_receipt(gpu_architecture="sm_90"), tmp_path, key=key)
    assert replay(sampled, tmp_path, key=key) == 0
    assert "its signature is valid" in capsys.readouterr().out
    assert replay(with_receipt(gpu_architecture="sm_90", engine_version="0"), tmp_path) == 0
    out, err = capsys.readouterr()
    assert "not checked" in out and err.count("bits may differ") == 2 and "sm_90" in err
