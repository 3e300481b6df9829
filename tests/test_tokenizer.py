"""Tokenizers against stored ids, the authors' regular expressions, and plain quadratic merging.

LEONE_TEST_LONG=1 runs ten times as many random strings.
"""

import functools
import json
import os
import random
import re
import sys
import time
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
import regex

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import tokenizer as tk  # noqa: E402
from errors import ModelError, RequestError  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"
SMOL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
N_RANDOM = 20_000 if os.environ.get("LEONE_TEST_LONG") else 2_000
FAMILIES = sorted(path.name.removesuffix("-prompts.json") for path in GOLDEN.glob("*-prompts.json"))


@functools.cache
def metadata(path):
    """Metadata of a GGUF file, read by the gguf package: independent of Leone's own parser."""
    if not path.exists():
        pytest.skip(f"{path.relative_to(ROOT)} is not there")
    fields = gguf.GGUFReader(path).fields
    return {key: field.contents() for key, field in fields.items()
            if key.startswith(("tokenizer.", "general."))}


@functools.cache
def load(name):
    return Tokenizer(metadata(SMOL if name == "smol" else GOLDEN / f"{name}-q4km.gguf"))


# ---- stored ids ----------------------------------------------------------------------------------

def test_smol_tokens():
    tokenizer = load("smol")
    items = json.loads((GOLDEN / "smol" / "tokens.json").read_text())["items"]
    assert len(items) == 80
    for item in items:
        text = item["text"]
        assert text.encode().hex() == item["utf8_hex"]
        assert tokenizer.encode(text) == item["ids_nospecial"], text
        assert tokenizer.encode(text, special=True) == item["ids_special"], text
        assert tokenizer.encode(text, special=True, bos=True) == item["ids_addspecial"], text
        assert tokenizer.decode(item["ids_special"], special=True) == text


def test_all_families_are_here():
    assert len(FAMILIES) == 14


@pytest.mark.parametrize("family", FAMILIES)
def test_family_prompts(family):
    golden = json.loads((GOLDEN / f"{family}-prompts.json").read_text())
    tokenizer = load(family)
    assert tokenizer.add_bos == golden["add_bos"]
    for item in filter(None, golden["prompts"] + golden["texts"]):
        ids = tokenizer.encode(item["text"], bos=True)
        assert ids == item["tokens"], item["text"]
        assert ids[:1] == [tokenizer.bos_id] or not golden["add_bos"]
        assert tokenizer.encode(item["text"]) == ids[int(golden["add_bos"]):]
        assert tokenizer.decode(ids) == item["text"]


# ---- pre-tokenizers against the regex module -----------------------------------------------------

CONTRACTION = "'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = CONTRACTION + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CASED = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@|")
AUTHORS = {     # the regular expressions as published with the models
    "llama-bpe": [rf"(?i:{CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
                  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "qwen2": [rf"(?i:{CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
              r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "qwen35": [rf"(?i:{CONTRACTION})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
               r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "deepseek-llm": [r"[\r\n]", rf"\s?[{tk.DEEPSEEK_LETTERS}]+",
                     r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}+"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}"],
    "deepseek-v3": [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
                    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
                    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
                    r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "tekken": [CASED.replace("@", "") +
               r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "gpt-4o": [CASED.replace("@", f"(?i:{CONTRACTION})?") +
               r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}


def authors_split(text, patterns):
    pieces = [text]
    for pattern in patterns:
        cut = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                cut += [piece[at:match.start()], match[0]]
                at = match.end()
            cut.append(piece[at:])
        pieces = list(filter(None, cut))
    return pieces


@functools.cache
def pools():
    """Lists of strings to draw from. Only characters that Python and the regex module class alike:
    their Unicode versions differ, and so do those of the models' own tokenizers."""
    by_category = {}
    for code in [*range(0xd800), *range(0xe000, sys.maxunicode + 1)]:
        by_category.setdefault(unicodedata.category(chr(code)), []).append(chr(code))
    del by_category["Cn"]
    assigned = [char for chars in by_category.values() for char in chars]
    drift = {char for category, chars in by_category.items()
             for char in regex.findall(rf"\P{{{category}}}", "".join(chars))}
    assert len(drift) < 10      # U+0295 became a letter without case in Unicode 15
    pools = [
        list(map(chr, range(128))), list("abcdefgXYZ"), list("0123456789"),
        list(" \n\t\r\v\f\x1c\x1f"), [" "], regex.findall(r"\s", "".join(assigned)),
        ["'s", "'T", "'re", "'VE", "'m", "'lL", "'d", "'ſ", "’s", "'", "ſ"],
        ["\r\n", "\n\n", "   ", " \n ", "\t ", "/\n", "/", " /"],
        ["🙂", "👍🏽", "🏳️‍🌈", "🇫🇷", "❤️"],
        regex.findall(f"[{tk.DEEPSEEK_LETTERS}]", "".join(assigned)),
        # borders of the ranges that DeepSeek's expressions list
        list("\u07ff\u0800\u4e00\u9fa5\u9fa6\uac00\ud7a3\u303f\u3041\u309f\u30a0\u30ff\u3105"
             "\u3000\u3002\u3003\uff01\uff0f\uff10\uff1a\uff5e\uff5f\u2018\u201f\u2020"),
        *by_category.values()]
    return [[string for string in pool if not drift & set(string)] for pool in pools]


def random_text(rng, length=24):
    """A few runs, each from one or two of the pools, so that borders between classes are common."""
    text = ""
    while len(text) < length:
        pool = rng.choice(pools()) + rng.choice(pools())[:200]
        text += "".join(rng.choices(pool, k=rng.randint(1, 6)))
    return text[:rng.randint(0, length)]


@pytest.mark.parametrize("pre", AUTHORS)
def test_split_equals_authors_regex(pre):
    rng = random.Random(pre)
    for _ in range(N_RANDOM):
        text = random_text(rng)
        pieces = tk.split(text, tk.PRE_TOKENIZERS[pre])
        assert pieces == authors_split(text, AUTHORS[pre]), ascii(text)


def test_every_pre_tokenizer_has_its_oracle():
    assert {tuple(patterns) for patterns in tk.PRE_TOKENIZERS.values()} == {
        tuple(tk.PRE_TOKENIZERS[name]) for name in AUTHORS}


def test_deepseek_letters():
    """The list, which the oracle shares, has the cased letters of Unicode 11, some scripts not."""
    listed = regex.findall(f"[{tk.DEEPSEEK_LETTERS}]", "".join(map(chr, range(sys.maxunicode + 1))))
    cased = regex.compile(r"[\p{Lu}\p{Ll}\p{Lt}ʕ]")
    assert all(map(cased.match, listed)) and len(listed) == 2729
    below_armenian = {char for char in map(chr, range(0x530)) if cased.match(char)}
    greek_extended = {char for char in map(chr, range(0x1f00, 0x2000)) if cased.match(char)}
    assert below_armenian | greek_extended <= set(listed)


def test_python_classes_would_be_wrong():
    """White space and letters are Unicode's, not those of Python's \\s and \\w."""
    gpt2 = tk.PRE_TOKENIZERS["gpt-2"]
    assert tk.split("a\x1cb", gpt2) == ["a", "\x1c", "b"]
    assert tk.split("\x1c !", gpt2) == ["\x1c", " !"]
    assert tk.split("हिन्दी", tk.PRE_TOKENIZERS["qwen35"]) == ["हिन्दी"]
    assert tk.split("हिन्दी", tk.PRE_TOKENIZERS["qwen2"]) == ["ह", "िन", "्द", "ी"]


# ---- merging -------------------------------------------------------------------------------------

def plain_merge(symbols, rank):
    """The definition: look at all pairs, join the leftmost of the best, start again."""
    symbols = list(symbols)
    while True:
        ranked = [(rank(left + right, left, right), i)
                  for i, (left, right) in enumerate(zip(symbols, symbols[1:]))]
        ranked = [(value, i) for value, i in ranked if value is not None]
        if not ranked:
            return symbols
        i = min(ranked)[1]
        symbols[i:i + 2] = [symbols[i] + symbols[i + 1]]


@pytest.mark.parametrize("family", ["llama3", "qwen25", "qwen35", "deepseek2"])
def test_bpe_equals_plain_merging(family):
    tokenizer, fields = load(family), metadata(GOLDEN / f"{family}-q4km.gguf")
    merges = fields["tokenizer.ggml.merges"]
    ranks = {tuple(text.split(" ")): rank for rank, text in reversed(list(enumerate(merges)))}
    vocabulary = {text: id for id, text in enumerate(fields["tokenizer.ggml.tokens"])}
    whole = family == "llama3"      # ignore_merges
    rng = random.Random(family)
    for _ in range(N_RANDOM // 10):
        text = random_text(rng) + "".join(rng.choices(merges, k=4)).replace("Ġ", " ")
        expected = []
        for piece in authors_split(text, AUTHORS[tokenizer.pre]):
            word = "".join(tk.ALPHABET[byte] for byte in piece.encode())
            parts = [word] if whole and word in vocabulary else plain_merge(
                word, lambda _, left, right: ranks.get((left, right)))
            expected += [vocabulary[part] for part in parts]
        assert tokenizer.encode(text) == expected, ascii(text)
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize("family", ["mistral", "phi3"])
def test_spm_equals_plain_merging(family):
    tokenizer, fields = load(family), metadata(GOLDEN / f"{family}-q4km.gguf")
    ordinary = [(text, id) for id, text in enumerate(fields["tokenizer.ggml.tokens"])
                if fields["tokenizer.ggml.token_type"][id] == tk.NORMAL]
    ids, scores = dict(ordinary), fields["tokenizer.ggml.scores"]
    words = [text.replace("▁", " ") for text in ids]
    rng = random.Random(family)
    for _ in range(N_RANDOM // 20):
        text = random_text(rng) + "".join(rng.choices(words, k=6))
        expected = []
        for part in plain_merge("▁" + text.replace(" ", "▁"),
                                lambda both, *_: -scores[ids[both]] if both in ids else None):
            expected += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
        assert tokenizer.encode(text) == expected, ascii(text)
        assert tokenizer.decode(expected) == text.replace("▁", " ")


def bpe_file(words=("he", "ll", "hell", "hello"), merges=("h e", "l l", "he ll", "hell o"),
             special=("<|end|>",), **changes):
    """Metadata of a small BPE tokenizer: bytes, words, control tokens."""
    tokens = [*tk.ALPHABET, *words, *special]
    types = [tk.NORMAL] * (256 + len(words)) + [tk.CONTROL] * len(special)
    fields = {"model": "gpt2", "pre": "gpt-2", "tokens": [token.encode() for token in tokens],
              "token_type": np.array(types, np.int32), "merges": merges}
    fields.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def spm_file(words, word_scores, types=(), **changes):
    """Metadata of a small SentencePiece tokenizer: <unk> <s> </s>, bytes, words."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [tk.UNKNOWN, tk.CONTROL, tk.CONTROL, *[tk.BYTE] * 256]
    kinds += types or [tk.NORMAL] * len(words)
    fields = {"model": "llama", "tokens": tokens, "token_type": kinds,
              "scores": [0.0] * 259 + list(word_scores)}
    fields.update(changes)
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def texts(tokenizer, ids):
    return [tokenizer.tokens[id].decode(errors="replace") for id in ids]


def test_ignore_merges():
    """Where a model ignores merges, a piece that is a token is taken whole, whatever they say."""
    words, merges = ("he", "hex", "ex"), ("e x", "h e", "he x")
    merged = Tokenizer(bpe_file(words, merges, pre="qwen2"))
    assert texts(merged, merged.encode("hex")) == ["h", "ex"]
    for pre in ("llama-bpe", "tekken"):
        whole = Tokenizer(bpe_file(words, merges, pre=pre))
        assert texts(whole, whole.encode("hex")) == ["hex"]


def test_bpe_leftmost_first():
    tokenizer = Tokenizer(bpe_file(("aa", "aaa"), ("a a", "aa a")))
    assert texts(tokenizer, tokenizer.encode("aaaaa")) == ["aa", "aaa"]


def test_spm_ties_and_tokens_across_words():
    """A token with a space inside must be found, though words are otherwise cut apart."""
    tokenizer = Tokenizer(spm_file(["▁", "a", "b", "▁a", "a▁", "a▁b"], [-9, -9, -9, -2, -1, -0.5]))
    assert texts(tokenizer, tokenizer.encode("a b")) == ["▁", "a▁b"]
    tokenizer = Tokenizer(spm_file(["▁", "a", "aa"], [-9, -9, -1]))
    assert texts(tokenizer, tokenizer.encode("aaa")) == ["▁", "aa", "a"]


def test_spm_without_byte_tokens_uses_unknown():
    tokenizer = Tokenizer({
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "▁a"],
        "tokenizer.ggml.scores": [0.0] * 4, "tokenizer.ggml.token_type": [2, 3, 3, 1]})
    assert tokenizer.encode("aé") == [3, 0, 0]          # one for each byte that has no token


# ---- special tokens and the space prefix ---------------------------------------------------------

def test_space_prefix_after_special_tokens():
    tokenizer = load("mistral")
    space, a = tokenizer.tokens.index("▁".encode()), tokenizer.tokens.index("▁a".encode())
    encode = functools.partial(tokenizer.encode, special=True)
    assert encode("a") == [a]
    assert encode("a", bos=True) == [1, a]
    assert encode("<s>a") == [1, a]                     # the first word keeps its space
    assert encode("<s> a") == [1, space, a]             # not two spaces in one token
    assert encode("a</s>a") == [a, 2, a]
    assert encode(" a") == [tokenizer.tokens.index("▁▁".encode()), tokenizer.tokens.index(b"a")]
    for text in ("a", " a", "<s>a", "<s> a", "a</s>a<s>  a</s>"):
        assert tokenizer.decode(encode(text), special=True) == text


def test_no_space_prefix():
    tokenizer = Tokenizer(spm_file(["▁", "a", "▁a"], [-9, -9, -1], add_space_prefix=False))
    assert texts(tokenizer, tokenizer.encode("a a")) == ["a", "▁a"]
    assert tokenizer.decode(tokenizer.encode(" a")) == " a"


def test_word_beside_added_token():
    types = [tk.NORMAL] * 3 + [tk.USER_DEFINED]
    tokenizer = Tokenizer(spm_file(["▁", "u", "▁u", "<tool>"], [-9, -9, -1, 0], types))
    assert texts(tokenizer, tokenizer.encode("<tool>u")) == ["<tool>", "▁u"]
    assert tokenizer.decode(tokenizer.encode("<tool>u")) == "<tool>u"


@pytest.mark.parametrize("add_bos", [True, False])
def test_add_bos_of_the_file(add_bos):
    tokenizer = Tokenizer(spm_file(["▁", "a"], [-9, -9], add_bos_token=add_bos))
    assert tokenizer.add_bos == add_bos
    assert (tokenizer.encode("a", bos=True)[0] == 1) == add_bos
    assert tokenizer.encode("a")[0] != 1
    tokenizer = Tokenizer(bpe_file(pre="llama-bpe", add_bos_token=add_bos, bos_token_id=260))
    assert tokenizer.encode("", bos=True) == [260] * add_bos
    assert Tokenizer(bpe_file(pre="llama-bpe", bos_token_id=260)).add_bos
    assert not Tokenizer(bpe_file(pre="qwen2", bos_token_id=260)).add_bos


def test_phi3_swallows_space_after_special_tokens():
    tokenizer = load("phi3")
    user, end, assistant = (tokenizer.tokens.index(text) for text in (
        b"<|user|>", b"<|end|>", b"<|assistant|>"))
    chat = "<|user|>\nHi there<|end|>\n<|assistant|>\n"
    assert tokenizer.encode(chat, special=True) == [
        user, *tokenizer.encode("Hi there"), end, assistant]
    newline = tokenizer.tokens.index(b"<0x0A>")
    assert newline in tokenizer.encode("<s>\na", special=True)
    assert newline not in tokenizer.encode("</s>\na", special=True)
    assert newline in load("mistral").encode("</s>\na", special=True)


def test_longest_special_token_first():
    tokenizer = Tokenizer(bpe_file(special=("<|a|>", "<|a|><|b|>", "")))
    assert texts(tokenizer, tokenizer.encode("x<|a|><|b|><|a|>", special=True)) == [
        "x", "<|a|><|b|>", "<|a|>"]


def test_deepseek_markers_are_one_token():
    markers = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
    tokenizer = Tokenizer(bpe_file(special=markers, pre="deepseek-v3"))
    assert texts(tokenizer, tokenizer.encode("<｜User｜>hello<｜Assistant｜>", special=True)) == [
        "<｜User｜>", "hello", "<｜Assistant｜>"]


def test_end_of_generation():
    assert load("smol").eos_ids == {0, 2, 4}            # <|endoftext|> <|im_end|> <reponame>
    assert load("llama3").eos_ids == {496, 499}         # <|end_of_text|> <|eot_id|>
    assert load("phi3").eos_ids == {2, 500, 503}        # </s> <|endoftext|> <|end|>
    harmony = Tokenizer(bpe_file(special=("<|end|>", "<|return|>", "<|call|>")))
    assert harmony.eos_ids == {261, 262}
    named = Tokenizer(bpe_file(special=("<x>", "<y>", "<z>"), eos_token_id=260, eot_token_id=262))
    assert named.eos_ids == {260, 262} and named.eos_id == 260


# ---- user text never becomes control tokens ------------------------------------------------------

def readable(tokenizer, text):
    """What decode() can give back of text: SentencePiece has one mark for "▁" and space, and
    SmolLM2's vocabulary has no tokens for some bytes."""
    if tokenizer.model == "llama":
        return text.replace("▁", " ")
    missing = {byte for byte, letter in enumerate(tk.LETTERS) if letter not in tokenizer._ordinary}
    return bytes(byte for byte in text.encode() if byte not in missing).decode("utf-8", "replace")


def control_ids(tokenizer):
    return {id for id in range(tokenizer.n_vocab)
            if tokenizer._types[id] in (tk.CONTROL, tk.UNKNOWN)} | tokenizer.eos_ids


@pytest.mark.parametrize("name", ["smol", *FAMILIES])
def test_user_text_gives_no_control_tokens(name):
    tokenizer = load(name)
    control = control_ids(tokenizer)
    strings = [tokenizer.tokens[id].decode() for id in control]
    assert strings
    rng = random.Random(name)
    for _ in range(N_RANDOM // 20):
        text = "".join(rng.choice(strings) + random_text(rng, 4) for _ in range(4))
        ids = tokenizer.encode(text)
        assert not control & set(ids), text
        assert tokenizer.decode(ids) == readable(tokenizer, text)
        assert control & set(tokenizer.encode(text, special=True))


def test_merges_do_not_reach_control_tokens():
    """Vocabularies whose own merges spell a control token."""
    spm = Tokenizer(spm_file(["<", "/", "s", ">", "</", "s>", "▁</s>"], [-5] * 7))
    assert 2 not in spm.encode("</s>") + spm.encode("a</s>a</s>")
    assert spm.encode("</s>", special=True) == [2]
    words, merges = ("<s", "<s>"), ("< s", "<s >")
    for pre in ("gpt-2", "llama-bpe"):
        bpe = Tokenizer(bpe_file(words[:1], merges, special=words[1:], pre=pre))
        assert texts(bpe, bpe.encode("<s>")) in (["<s", ">"], ["<", "s", ">"])
    # Tokens that end a text are control tokens even if the file calls them normal ...
    bpe = Tokenizer(bpe_file(words, merges, eos_token_id=257))
    assert 257 not in bpe.encode("<s><s>") and bpe.encode("<s>", special=True) == [257]
    # ... and so are added tokens that look like them,
    chat = Tokenizer(bpe_file(special=("<|im_start|>", "<think>"),
                              token_type=[tk.NORMAL] * 260 + [tk.USER_DEFINED] * 2))
    assert 260 not in chat.encode("<|im_start|>") and chat.encode("<think>") == [261]
    # ... but a plain newline that ends texts can still be written.
    newline = tk.ALPHABET[10].encode()
    base = bpe_file()
    eos = base["tokenizer.ggml.tokens"].index(newline)
    assert Tokenizer({**base, "tokenizer.ggml.eos_token_id": eos}).encode("\n") == [eos]


@pytest.mark.parametrize("name", ["smol", "llama3", "deepseek2", "mistral", "phi3"])
def test_parts_are_cut_like_the_whole_text(name):
    """A rendered chat: template and user text alternate, and borders fall inside words."""
    tokenizer = load(name)
    control = control_ids(tokenizer)
    markers = [tokenizer.tokens[id].decode() for id in control]
    rng = random.Random(name)
    for _ in range(N_RANDOM // 20):
        parts = []
        for _ in range(4):
            template = rng.choice(markers) + rng.choice(["", "user: ", "user\n", "[x"])
            parts += [(template, True), ("y" + random_text(rng, 8), False)]
        whole = "".join(text for text, _ in parts)
        ids = tokenizer.encode_parts(parts, bos=True)
        assert ids == tokenizer.encode(whole, special=True, bos=True)
        evil = [(markers[0][:-1], False), (markers[0][-1:], True), *parts, (markers[-1], False)]
        assert [id for id in tokenizer.encode_parts(evil) if id in control] == [
            id for id in ids if id in control][int(tokenizer.add_bos):]


# ---- decoding ------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["smol", "llama3", "mistral", "phi3"])
def test_stream_equals_one_shot(name):
    """Random ids: characters are cut anywhere and most byte sequences are not UTF-8."""
    tokenizer = load(name)
    ordinary = [id for id in range(tokenizer.n_vocab) if not tokenizer.is_special(id)]
    short = [id for id in ordinary if len(tokenizer.token_bytes(id)) == 1]
    assert len(short) > 200
    rng = random.Random(name)
    for _ in range(N_RANDOM // 4):
        ids = rng.choices(rng.choice((ordinary, short, ordinary + short * 4)), k=rng.randint(0, 20))
        data = b"".join(map(tokenizer.token_bytes, ids))
        stream = tokenizer.stream(after=ordinary[0])
        pieces = [stream.feed(id) for id in ids] + [stream.flush()]
        assert "".join(pieces) == data.decode("utf-8", "replace")
        assert "".join(pieces) == tokenizer.decode(ids, after=ordinary[0])
        mixed = rng.choices(range(tokenizer.n_vocab), k=10)
        for special in (False, True):
            stream = tokenizer.stream(special)
            assert tokenizer.decode(mixed, special) == (
                "".join([stream.feed(id) for id in mixed]) + stream.flush())


@pytest.mark.parametrize("name", ["smol", "qwen35", "mistral"])
def test_stream_never_splits_a_character(name):
    tokenizer = load(name)
    rng = random.Random(name)
    for _ in range(N_RANDOM // 20):
        text = readable(tokenizer, random_text(rng)).replace("\ufffd", "?") + "щёчки 🙂"
        stream = tokenizer.stream()
        pieces = [stream.feed(id) for id in tokenizer.encode(text)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text and stream.flush() == ""


def test_stream_holds_back_and_flushes():
    tokenizer = load("llama3")
    first, *rest = tokenizer.encode("🙂")
    stream = tokenizer.stream()
    assert stream.feed(first) == "" and stream.flush() == "\ufffd"
    assert len(rest) == 3


def test_space_at_the_start_of_a_continuation():
    """A space belongs to a text that is continued, and to no text that begins."""
    tokenizer = load("mistral")
    word = tokenizer.tokens.index("▁the".encode())
    assert tokenizer.decode([word, word]) == "the the"
    assert tokenizer.decode([word], after=word) == " the"
    assert tokenizer.decode([1, word]) == tokenizer.decode([word], after=1) == "the"


def test_control_tokens_are_shown_on_request():
    tokenizer = load("smol")
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>", special=True)
    assert tokenizer.decode(ids) == "user\nHi"
    assert tokenizer.decode(ids, special=True) == "<|im_start|>user\nHi<|im_end|>"
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.token_bytes(2, special=True) == b"<|im_end|>"


def test_odd_tokens():
    """Empty, equal and non-UTF-8 tokens, and text in another alphabet than that of the bytes."""
    tokens = bpe_file()["tokenizer.ggml.tokens"] + [b"", b"he", b"\xff\xfe", "你".encode()]
    tokenizer = Tokenizer(bpe_file(tokens=tokens, token_type=None))
    assert texts(tokenizer, tokenizer.encode("hehello")) == ["he", "hello"]
    assert tokenizer.encode("he") == [256]
    assert [tokenizer.token_bytes(id) for id in range(261, 265)] == [
        b"", b"he", b"\xff\xfe", "你".encode()]
    assert Tokenizer(bpe_file(tokens=tokens, token_type=[tk.CONTROL] * 265)).encode("a") == []
    spm = Tokenizer(spm_file([b"\xff", "▁", "a"], [0.0] * 3))
    assert spm.decode(spm.encode("a")) == "a" and spm.token_bytes(259) == b"\xff"


def test_lone_surrogates():
    tokenizer = load("llama3")
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude42") == tokenizer.encode("🙂")


def test_ids_outside_the_vocabulary():
    for id in (-1, 512):
        with pytest.raises(RequestError, match=f"{id} is outside the vocabulary of 512"):
            load("llama3").decode([id])


def test_merging_takes_the_lowest_rank_then_the_leftmost():
    """Random tables: with equal ranks, and with joins that make a pair of a lower one possible."""
    rng = random.Random(7)
    for _ in range(2000):
        words, table = list("abc"), {}
        for _ in range(rng.randint(1, 20)):
            left, right = rng.choices(words, k=2)
            table.setdefault((left, right), (rng.randint(0, rng.choice([2, 40])), left + right))
            words.append(left + right)
        symbols = rng.choices("abc"[:rng.randint(1, 3)], k=rng.randint(0, 30))
        expected = list(symbols)
        while found := [(*table[pair][:1], i) for i, pair in enumerate(
                zip(expected, expected[1:])) if pair in table]:
            i = min(found)[1]
            expected[i:i + 2] = [expected[i] + expected[i + 1]]
        assert tk.merge(symbols, table.get) == expected


# ---- speed ---------------------------------------------------------------------------------------

def seconds(function, *args):
    start = time.process_time()
    function(*args)
    return time.process_time() - start


@pytest.mark.parametrize("name", ["smol", "mistral", "deepseek2"])
def test_100_kb_of_text(name):
    words = re.findall(r"\S+", (ROOT / "tokenizer.py").read_text())
    rng = random.Random(0)
    text = " ".join(rng.choice(words) + rng.choice(words) for _ in range(10_000))[:100_000]
    tokenizer = load(name).prepare()
    tokenizer._encode_short_piece.cache_clear()
    assert seconds(tokenizer.encode, text) < 1


@pytest.mark.parametrize("name", ["smol", "mistral"])
def test_a_long_word_is_not_quadratic(name):
    tokenizer = load(name).prepare()
    rng = random.Random(0)
    for letters in ("abcdefghijklmnopqrstuvwxyz", "a", "e ", " "):
        text = "".join(rng.choices(letters, k=100_000))
        assert seconds(tokenizer.encode, text) < 2
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", AUTHORS)
def test_splitting_is_not_quadratic(pre):
    for run in ("A", "a", "ª", "Aa", "\u0300", "1", "!", " ", "\n", " \n", "'", "🙂", " 🙂", "中"):
        for text in (run * 40_000, run * 40_000 + "x", " " * 40_000 + run):
            assert seconds(tk.split, text, tk.PRE_TOKENIZERS[pre]) < 1, run


def test_memory_of_caches_is_bounded():
    tokenizer = Tokenizer(bpe_file())
    for start in range(0, 100_000, 1000):
        tokenizer.encode(" x".join(map(str, range(start, start + 1000))) + "y" * 1000)
    cache = tokenizer._encode_short_piece
    assert 0 < cache.cache_info().currsize <= tk.CACHED_PIECES == cache.cache_info().maxsize
    before = cache.cache_info().misses
    tokenizer.encode("z" * (tk.CACHED_LENGTH + 1))
    assert cache.cache_info().misses == before

def test_large_vocabulary_is_set_up_fast():
    """250,000 tokens and merges; what only encoding needs is built when it is first needed."""
    rng = random.Random(0)
    words, merges = {}, []
    while len(words) < 250_000:
        left, right = ("".join(rng.choices("abcdefgh", k=rng.randint(1, 4))) for _ in "12")
        for part in (left, right):
            words.setdefault(part)
        words.setdefault(left + right)
        merges.append(f"{left} {right}")
    merges = [*dict.fromkeys(merges)][:250_000]
    fields = bpe_file(tuple(word for word in words if len(word) > 1), merges)
    start = time.process_time()
    tokenizer = Tokenizer(fields)
    tokenizer.describe()
    assert time.process_time() - start < 1
    assert "_joins" not in vars(tokenizer)
    assert seconds(tokenizer.prepare) < 3
    assert tokenizer.decode(tokenizer.encode("abcdefgh cab")) == "abcdefgh cab"


# ---- errors --------------------------------------------------------------------------------------

N = 261     # tokens of bpe_file()


@pytest.mark.parametrize("changes, message", [
    ({"model": None}, "tokenizer.ggml.model is missing"),
    ({"model": 7}, "tokenizer.ggml.model must be a string"),
    ({"model": "bert"}, "model 'bert' is not supported.*'gpt2' .BPE. or 'llama'"),
    ({"pre": "klingon"}, "'klingon' is not supported; supported are llama-bpe.*tekken"),
    ({"pre": ["qwen2"]}, "tokenizer.ggml.pre must be a string"),
    ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
    ({"tokens": []}, "tokenizer.ggml.tokens is empty"),
    ({"tokens": b"abc"}, "tokenizer.ggml.tokens must be an array of strings"),
    ({"tokens": 5}, "tokenizer.ggml.tokens must be an array of strings"),
    ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens must be an array of strings"),
    ({"token_type": [1] * (N - 1)}, f"token_type must be an array of {N} integers"),
    ({"token_type": [1] * (N + 1)}, f"token_type must be an array of {N} integers"),
    ({"token_type": [7] * N}, "token_type has values outside 0..6"),
    ({"token_type": [-1] * N}, "token_type has values outside 0..6"),
    ({"token_type": [1.0] * N}, "token_type must be an array of 261 integers"),
    ({"token_type": ["1"] * N}, "token_type must be an array of 261 integers"),
    ({"token_type": [[1]] * N}, "token_type must be an array of 261 integers"),
    ({"token_type": 1}, "token_type must be an array of 261 integers"),
    ({"merges": None}, "tokenizer.ggml.merges is missing"),
    ({"merges": 3}, "tokenizer.ggml.merges must be an array of strings"),
    ({"merges": [b"h e", 5]}, "tokenizer.ggml.merges must be an array of strings"),
    ({"merges": [b"h e", b"he lp"]}, r"merges\[1\] 'he lp' names no token"),
    ({"merges": [b"h lo"]}, r"merges\[0\] 'h lo' names no token"),
    ({"merges": [b"hello"]}, r"merges\[0\] 'hello' names no token"),
    ({"merges": [b""]}, r"merges\[0\] '' names no token"),
    ({"merges": [b"h "]}, r"merges\[0\] 'h ' names no token"),
    ({"merges": [b"\xff \xfe" * 100]}, r"merges\[0\] .{1,60} names no token"),
    ({"bos_token_id": N}, f"bos_token_id is {N}, but there are {N} tokens"),
    ({"eos_token_id": -1}, f"eos_token_id is -1, but there are {N} tokens"),
    ({"eot_token_id": 1 << 32}, f"eot_token_id is {1 << 32}, but"),
    ({"eom_token_id": "3"}, "eom_token_id must be an integer"),
    ({"eos_token_id": True}, "eos_token_id must be an integer"),
    ({"add_bos_token": 1}, "add_bos_token must be true or false"),
    ({"add_bos_token": True}, "add_bos_token is true, but there is no bos_token_id"),
])
def test_bad_files(changes, message):
    with pytest.raises(ModelError, match=message) as error:
        Tokenizer(bpe_file(**changes)).prepare()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes, message", [
    ({"scores": None}, "tokenizer.ggml.scores is missing"),
    ({"scores": [0.0] * 5}, "scores must be an array of 260 numbers"),
    ({"scores": ["a"] * 260}, "scores must be an array of 260 numbers"),
    ({"add_space_prefix": "yes"}, "add_space_prefix must be true or false"),
])
def test_bad_spm_files(changes, message):
    with pytest.raises(ModelError, match=message):
        Tokenizer(spm_file(["▁"], [0.0], **changes)).prepare()


def test_merge_without_product_is_unused():
    """Both parts are tokens, both together are not: other readers accept such a line too."""
    tokenizer = Tokenizer(bpe_file(merges=("h l", "h e")))
    assert tokenizer.encode("hlhe") == [*tokenizer.encode("h"), *tokenizer.encode("l"),
                                        *tokenizer.encode("he")]


def test_merges_are_read_lazily():
    """doctor reports on a file with bad merges without reading them; encoding refuses."""
    tokenizer = Tokenizer(bpe_file(merges=("xy z",)))
    assert tokenizer.describe()["merges"] == 1
    with pytest.raises(ModelError, match="names no token"):
        tokenizer.encode("x")


def test_describe_is_plain_json():
    described = json.loads(json.dumps(load("llama3").describe()))
    assert described["pre"] == "llama-bpe" and described["tokens"] == 512
    assert described["bos"] == {"id": 495, "text": "<|begin_of_text|>"}
    assert [end["id"] for end in described["end_ids"]] == [496, 499]
    assert "warning" not in described
    assert "warning" in Tokenizer(bpe_file(pre=None)).describe()
    assert load("mistral").describe()["add_space_prefix"]


def test_arrays_of_any_kind():
    """Sequences of bytes or str, lists or arrays: the same tokenizer."""
    class Lazy(Sequence):
        def __init__(self, values):
            self.values = values

        def __len__(self):
            return len(self.values)

        def __getitem__(self, index):
            return self.values[index]

    plain, text = bpe_file(), "hello <|end|>"
    lazy = {key: Lazy(value) if isinstance(value, list) else value for key, value in plain.items()}
    strings = {**plain,
               "tokenizer.ggml.tokens": [text.decode() for text in plain["tokenizer.ggml.tokens"]],
               "tokenizer.ggml.merges": [text.encode() for text in plain["tokenizer.ggml.merges"]],
               "tokenizer.ggml.token_type": Lazy([tk.NORMAL] * 260 + [tk.CONTROL])}
    expected = Tokenizer(plain).encode(text, special=True)
    assert expected[-1] == 260
    assert Tokenizer(lazy).encode(text, special=True) == expected
    assert Tokenizer(strings).encode(text, special=True) == expected
