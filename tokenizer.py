"""Text to token ids and back: byte-level BPE ("gpt2" files) and SentencePiece ("llama" files).

    tokenizer = Tokenizer(metadata)             # the tokenizer.ggml.* keys of a GGUF file
    tokenizer.encode("Hello", bos=True)         # -> [1, 15043]
    tokenizer.decode([1, 15043])                # -> "Hello"

In reading order: pre-tokenizers (text to pieces), merge (a piece to tokens), Tokenizer, Stream.

Control tokens (<|im_end|>, </s>, ...) come from text marked special only. Other text, whatever it
holds, gives none: their strings are not looked for there, and no merge leads to them.
"""

import codecs
import heapq
import re
import unicodedata
from collections import defaultdict
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from itertools import groupby

import numpy as np

from errors import ModelError, RequestError

# Values of tokenizer.ggml.token_type.
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)
SPECIAL = UNKNOWN, CONTROL, USER_DEFINED    # found in a text as they are, before it is cut

# Models end a turn or a text with more tokens than the one or two whose ids the file gives.
END_TEXTS = {text.encode() for text in (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<｜end▁of▁sentence｜>")}
# Fill-in-the-middle models go on to another file after these.
FILE_END_TEXTS = {text.encode() for text in (
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>")}
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id",
           "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")

CONVERT = "convert or download the model again"     # how most errors end

CACHED_PIECES = 1 << 15         # pieces whose tokens are remembered ...
CACHED_LENGTH = 64              # ... if they have at most so many characters

# ---- Pre-tokenizers ------------------------------------------------------------------------------
# The patterns are those of the models' authors. They run on the standard library's `re`, in which
# \p{..} is unknown and \s other than Unicode's: _compile() writes both out as ranges of characters.

WHITE_SPACE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
PLANES = *range(0x40000), *range(0xE0000, 0xF0000)  # the others are empty or for private use


CONTRACTION = r"'(?i:[sdmt]|ll|ve|re)"
NOT_WORD, SYMBOL = r"[^\r\n\p{L}\p{N}]?", r"[^\s\p{L}\p{N}]"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SPACES = r"[\s]+(?![^\s])|[\s]+"
LINES = r"[\s]*[\r\n]+|" + SPACES

LLAMA3 = rf"{CONTRACTION}|{NOT_WORD}[\p{{L}}]+|[\p{{N}}]{{1,3}}| ?{SYMBOL}+[\r\n]*|{LINES}"
QWEN2 = rf"{CONTRACTION}|{NOT_WORD}[\p{{L}}]+|[\p{{N}}]| ?{SYMBOL}+[\r\n]*|{LINES}"
QWEN35 = (rf"{CONTRACTION}|{NOT_WORD}[\p{{L}}\p{{M}}]+|[\p{{N}}]"
          rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{LINES}")
TEKKEN = (rf"{NOT_WORD}{UPPER}*{LOWER}+|{NOT_WORD}{UPPER}+{LOWER}*"
          rf"|[\p{{N}}]| ?{SYMBOL}+[\r\n/]*|{LINES}")
GPT4O = (rf"{NOT_WORD}{UPPER}*{LOWER}+(?:{CONTRACTION})?"
         rf"|{NOT_WORD}{UPPER}+{LOWER}*(?:{CONTRACTION})?"
         rf"|[\p{{N}}]{{1,3}}| ?{SYMBOL}+[\r\n/]*|{LINES}")
GPT2 = rf"'(?:[sdmt]|ll|ve|re)| ?[\p{{L}}]+| ?[\p{{N}}]+| ?{SYMBOL}+|{SPACES}"

# The authors' own list of cased letters. Characters that an editor might normalise are escaped.
DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffcℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲"
    "𑢠-𑣟𞤀-𞥃")
DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_LLM = (
    r"[\r\n]", rf"[\s]?[{DEEPSEEK_LETTERS}]+",
    "[\\s]?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<![\s])[\s]+$",     # \s+$ that tries only where a run of spaces starts, so it is linear
    DEEPSEEK_CJK, r"[\p{N}]+")
DEEPSEEK_CODER = (r"[\r\n]", r"[\s]?[\p{L}]+", r"[\s]?[\p{P}]+", DEEPSEEK_CJK, r"[\p{N}]")
DEEPSEEK_V3 = (
    r"[\p{N}]{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{LINES}")
DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"[\p{N}]+", "[0-9][0-9][0-9]")

# Each pattern cuts what the one before left; the gaps between matches stay.
PRE_TOKENIZERS = {name: patterns for names, *patterns in (
    ("llama-bpe llama3 llama-v3 falcon3 pixtral dbrx smaug-bpe glm4 chatglm-bpe", LLAMA3),
    ("qwen2 deepseek-r1-qwen megrez", QWEN2),
    ("qwen35", QWEN35),
    ("gpt-2 phi-2 mpt olmo jais exaone4", GPT2),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b", r"[\p{N}]", GPT2),
    ("deepseek-llm", *DEEPSEEK_LLM),
    ("deepseek-coder", *DEEPSEEK_CODER),
    ("deepseek-v3 hunyuan-dense joyai-llm", *DEEPSEEK_V3),
    ("tekken", TEKKEN),
    ("gpt-4o llama4 kanana2", GPT4O),
    ("default", *DEFAULT),
) for name in names.split()}
# These take a piece that is a token as a whole, and want BOS unless the file says otherwise.
WHOLE_PIECES = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}


@cache
def _classes():
    r"""What \s and \p{..}, a Unicode category or its first letter, become inside [...]."""
    classes = defaultdict(str, {r"\s": WHITE_SPACE})
    for category, run in groupby(map(chr, PLANES), unicodedata.category):
        run = list(run)
        for name in category, category[0]:
            classes[rf"\p{{{name}}}"] += f"{re.escape(run[0])}-{re.escape(run[-1])}"
    return classes


@cache
def _compile(pattern):
    """The pattern for `re`, as a group, so that split() keeps what it matches."""
    plain = re.sub(r"\\p\{\w+\}|\\s", lambda match: _classes()[match[0]], pattern)
    return re.compile(f"({plain})")


def split(text, patterns):
    """Cuts text into the pieces of a pre-tokenizer. The pieces joined are the text."""
    pieces = [text]
    for regex in map(_compile, patterns):
        pieces = [part for piece in pieces for part in regex.split(piece) if part]
    return pieces


# ---- Merging -------------------------------------------------------------------------------------

def merge(symbols, joins):
    """Joins neighbours, lowest rank first and leftmost among equals, until no two of them join.

    symbols: any sequence. joins: function from a pair of neighbours to (rank, both together) or
    None. Takes O(n log n): a join looks at its two new neighbours.
    """
    symbols = list(symbols)
    n = len(symbols)
    before, after = list(range(-1, n - 1)), list(range(1, n + 1))
    heap = []                   # (rank, where the left one stands) of the pairs that ever joined

    def join_at(i):
        if i >= 0 and symbols[i] is not None and after[i] < n:
            return joins((symbols[i], symbols[after[i]]))

    def consider(i):
        if found := join_at(i):
            heapq.heappush(heap, (found[0], i))

    for i in range(n):
        consider(i)
    while heap:
        rank, i = heapq.heappop(heap)
        found = join_at(i)
        if not found or found[0] != rank:       # one of them has been joined meanwhile
            continue
        j = after[i]
        symbols[i], symbols[j] = found[1], None
        after[i] = after[j]
        if after[i] < n:
            before[after[i]] = i
        consider(i)
        consider(before[i])
    return [symbol for symbol in symbols if symbol is not None]


# ---- Tokenizer -----------------------------------------------------------------------------------

SPACE_MARK = "▁"                # SentencePiece writes a space as this
ASCII_SPACES = re.compile(r"[ \t-\r]*")
KEEP_SPACE_AFTER = ("<unk>", "<s>", "<|endoftext|>")    # unlike the other special tokens of Phi-3


def _byte_alphabet():
    """The characters that stand for the bytes 0..255 in the tokens of a byte-level BPE file."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


ALPHABET = _byte_alphabet()
BYTE_OF = {char: byte for byte, char in enumerate(ALPHABET)}
LETTERS = [char.encode() for char in ALPHABET]


class Tokenizer:
    """The tokenizer that a GGUF file describes; threads may share one. Raises ModelError.

    model: "gpt2" (BPE) or "llama" (SentencePiece); pre: name of the BPE pre-tokenizer or None;
    n_vocab; tokens: list of bytes as in the file; bos_id, eos_id: int or None; add_bos: bool;
    eos_ids: frozenset of the ids that end a generation.
    """

    def __init__(self, metadata):
        """metadata: mapping of GGUF keys; strings are str or bytes, arrays are any sequence."""
        fields = _Fields(metadata)
        self.model = fields.get("model", str)
        if self.model not in ("gpt2", "llama"):
            raise ModelError(f"tokenizer model {self.model!r} is not supported; "
                             "use a file with 'gpt2' (BPE) or 'llama' (SentencePiece)")
        bpe = self.model == "gpt2"
        self.pre = fields.get("pre", str, "default") if bpe else None
        if bpe and self.pre not in PRE_TOKENIZERS:
            raise ModelError(f"pre-tokenizer {self.pre!r} is not supported; "
                             f"supported are {', '.join(PRE_TOKENIZERS)}")
        self.tokens = fields.strings("tokens")
        self.n_vocab = n = len(self.tokens)
        if not n:
            raise _bad("tokens", "is empty")
        if bpe:
            self._merges = fields.strings("merges")
        else:
            self._scores = fields.numbers("scores", "iuf", n)
        types = fields.numbers("token_type", "iu", n, [NORMAL] * n)
        if types.min() < 0 or types.max() > BYTE:
            raise _bad("token_type", f"has values outside 0..{BYTE}")
        self._types = np.where(types == UNDEFINED, NORMAL, types).tolist()
        self._unknown = self._types.index(UNKNOWN) if UNKNOWN in self._types else None

        self.bos_id = fields.index("bos_token_id", n, None if bpe else 1)
        self.eos_id = fields.index("eos_token_id", n, None if bpe else 2)
        wants_bos = not bpe or self.pre in WHOLE_PIECES
        self.add_bos = fields.get("add_bos_token", bool, wants_bos and self.bos_id is not None)
        if self.add_bos and self.bos_id is None:
            raise _bad("add_bos_token", "is true, but there is no bos_token_id")
        self.add_space_prefix = not bpe and fields.get("add_space_prefix", bool, True)
        # The file does not say which tokens swallow the white space after them: those of Phi-3 do.
        self._strips_after_special = not bpe and metadata.get("general.architecture") == "phi3"
        ends = {fields.index(key, n) for key in END_IDS} | {self.eos_id}
        self.eos_ids = self._find_control_tokens(ends - {None})
        self._encode_piece = self._bpe if bpe else self._spm
        self._encode_short_piece = lru_cache(CACHED_PIECES)(self._encode_piece)
        self.token_bytes = lru_cache(CACHED_PIECES)(self.token_bytes)
        self.texts = {}  # id -> its text where it stands behind whole characters, see Stream

    def _find_control_tokens(self, ends):
        """Returns the ids that end a generation, those of the set `ends` and the known texts.

        Types as CONTROL what acts as a control token but has another type in the file.
        """
        types = self._types
        for id, token in enumerate(self.tokens):
            if types[id] == USER_DEFINED and re.fullmatch("<[|｜].*[|｜]>", _shown(token)):
                types[id] = CONTROL
            if token in END_TEXTS or token in FILE_END_TEXTS and types[id] != NORMAL:
                ends.add(id)
        if {b"<|return|>", b"<|call|>"} <= {self.tokens[id] for id in ends}:
            # In this format <|end|> ends a message, and the answer has several.
            ends = {id for id in ends if self.tokens[id] != b"<|end|>"}
        for id in ends | {self.bos_id} - {None}:
            # But where a single character (a newline) ends texts, users must be able to write it.
            if types[id] != BYTE and len(_shown(self.tokens[id])) > 1:
                types[id] = CONTROL
        return frozenset(ends)

    def describe(self):
        """What `doctor` prints, as a dict of plain values."""
        def named(id):
            return None if id is None else {"id": id, "text": _shown(self.tokens[id])}
        described = {
            "model": self.model, "pre": self.pre, "tokens": self.n_vocab,
            "control_tokens": self._types.count(CONTROL), "bos": named(self.bos_id),
            "eos": named(self.eos_id), "end_ids": [named(id) for id in sorted(self.eos_ids)],
            "add_bos": self.add_bos, "add_space_prefix": self.add_space_prefix,
            "merges": len(self._merges) if self.model == "gpt2" else None}
        if self.pre == "default":
            described["warning"] = ("the file names no pre-tokenizer, so text may be cut otherwise "
                                    "than in training; " + CONVERT)
        return described

    def text_of(self, id):
        """The text of a token as it is spelt, control tokens too; "" for None."""
        return "" if id is None else _shown(self.tokens[id])

    # -- encoding

    def prepare(self):
        """Builds the large tables for encoding, as the first encode() would.

        Raises ModelError for merges that name no token.
        """
        self._special_tokens, self._joins
        return self

    def encode(self, text, special=False, bos=False):
        """Returns the token ids of text, a list of int.

        special: control tokens written in text become themselves; for templates, never for what a
        user wrote. bos: begin with the BOS token if the model wants one (add_bos). EOS is never
        added: what is encoded here is going to be continued.
        """
        return self.encode_parts([(text, special)], bos)

    def encode_parts(self, parts, bos=False, known={}):
        """Returns the ids of one text given as parts (text, special), as in a rendered template.

        Words are cut as in the whole text, but special tokens are looked for inside a part only.
        known: {text: ids} that replaces a part which is that text and not special.
        """
        fragments = []                          # special tokens as int, the text between as str
        for text, special in parts:
            if not special and text in known:
                fragments += known[text]
            else:
                fragments += self._partition(_without_surrogates(text), special)
        ids, previous = [self.bos_id] if bos and self.add_bos else [], None
        for is_text, run in groupby(fragments, lambda fragment: isinstance(fragment, str)):
            if not is_text:
                ids += run
                previous = ids[-1]
                continue
            for piece in self._pieces("".join(run), previous):
                short = len(piece) <= CACHED_LENGTH
                ids += (self._encode_short_piece if short else self._encode_piece)(piece)
        return ids

    def _partition(self, text, special):
        """Yields the special tokens in text as ids and what is between them as str."""
        at = 0
        wanted = SPECIAL if special else (USER_DEFINED,)
        found = {token: id for token, id in self._special_tokens.items()
                 if self._types[id] in wanted and token in text}
        if found:
            for match in re.finditer("|".join(map(re.escape, found)), text):
                if match.start() > at:
                    yield text[at:match.start()]
                yield found[match[0]]
                at = match.end()
                if self._strips_after_special and match[0] not in KEEP_SPACE_AFTER:
                    at = ASCII_SPACES.match(text, at).end()
        if at < len(text):
            yield text[at:]

    def _pieces(self, text, previous):
        """Returns pieces that no token crosses, in SentencePiece with the space before the text.

        previous: the token before the text, None at the start.
        """
        if self.model == "gpt2":
            return split(text, PRE_TOKENIZERS[self.pre])
        text, prefix = text.replace(" ", SPACE_MARK), []
        if self.add_space_prefix and (previous is None or self.is_special(previous)):
            if previous is not None and text.startswith(SPACE_MARK):
                prefix = [SPACE_MARK]   # in training it was not merged with the text's own spaces
            else:
                text = SPACE_MARK + text
        if not self._tokens_start_words:
            return prefix + [text]
        return prefix + re.findall(f"{SPACE_MARK}*[^{SPACE_MARK}]+|{SPACE_MARK}+", text)

    def _bpe(self, piece):
        index, letters = self._ordinary, [LETTERS[byte] for byte in piece.encode()]
        if self.pre in WHOLE_PIECES and (whole := b"".join(letters)) in index:
            return [index[whole]]
        ids = [index.get(letter, self._unknown) for letter in letters]
        return merge([id for id in ids if id is not None], self._joins)

    def _spm(self, piece):
        ids = []
        for symbol in map(str.encode, merge(piece, self._joins)):
            id = self._ordinary.get(symbol)
            ids += [id] if id is not None else [
                self._byte_ids.get(b"<0x%02X>" % byte, self._unknown) for byte in symbol]
        return [id for id in ids if id is not None]

    # -- tables for encoding, built when first used

    def _index(self, types):
        """Token (bytes) -> id of the tokens of these types. Of equal tokens the first counts."""
        return {token: id for id, token in reversed(list(enumerate(self.tokens)))
                if token and self._types[id] in types}

    @cached_property
    def _ordinary(self):
        """Token (bytes) -> id of what merging may produce."""
        return self._index((NORMAL, USER_DEFINED))

    @cached_property
    def _byte_ids(self):
        """b"<0x41>" -> id of the token of that byte."""
        return self._index((BYTE,))

    @cached_property
    def _special_tokens(self):
        """Text -> id of the tokens that are found in a text as they are, longest first."""
        special = {_text(token): id for token, id in self._index(SPECIAL).items()}
        return dict(sorted(special.items(), key=lambda item: -len(item[0])))

    @cached_property
    def _joins(self):
        """Function from two neighbours, ids (BPE) or text, to (rank, both together) or None."""
        index, joins = self._ordinary, {}
        if self.model == "llama":
            scored = ((_text(token), self._scores[id].item()) for token, id in index.items())
            joins = {text: (-score, text) for text, score in scored}
            return lambda pair: joins.get(pair[0] + pair[1])
        known = {*index, *self._index((UNKNOWN, CONTROL, UNUSED, BYTE))}
        for rank, line in enumerate(self._merges):
            space = line.find(b" ", 1)
            left, right = line[:space], line[space + 1:]
            if space < 0 or left not in known or right not in known:
                raise _bad(f"merges[{rank}]", f"{_shown(line)[:40]!r} names no token")
            ids = index.get(left), index.get(right), index.get(left + right)
            if None not in ids:         # else it is unused
                joins.setdefault(ids[:2], (rank, ids[2]))
        return joins.get

    @cached_property
    def _tokens_start_words(self):
        """True if no token has a space after something else, so that words can be cut apart."""
        return not any(SPACE_MARK in text.lstrip(SPACE_MARK) for text in map(_text, self._ordinary))

    # -- decoding

    def token_bytes(self, id, special=False):
        """The bytes that a token stands for; control tokens stand for none unless special."""
        if not 0 <= id < self.n_vocab:
            raise RequestError(f"token id {id} is outside the vocabulary of {self.n_vocab} tokens",
                               param="tokens")
        token, type = self.tokens[id], self._types[id]
        if type in SPECIAL:
            return token if special or type == USER_DEFINED else b""
        if type == UNUSED:
            return b""
        if type == BYTE and re.fullmatch(b"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if self.model == "llama":
            return token.replace(SPACE_MARK.encode(), b" ")
        try:
            return bytes(BYTE_OF[char] for char in token.decode())
        except (KeyError, UnicodeDecodeError):
            return token                    # added to the vocabulary as it is

    def decode(self, ids, special=False, after=None):
        """Returns the text of ids; bytes that are not UTF-8 become U+FFFD. after: see stream()."""
        stream = self.stream(special, after)
        return "".join(map(stream.feed, ids)) + stream.flush()

    def stream(self, special=False, after=None):
        """Returns a Stream. after: the id before the first one fed, None at the start of a text.

        special: whether control tokens are part of the text, or a frozenset of those that are.
        """
        return Stream(self, special, after)

    def is_special(self, id):
        """True for tokens that are found in a text as they are: control and added tokens. Ids that
        only pad the table of the model are none."""
        return id < self.n_vocab and self._types[id] in SPECIAL


class Stream:
    """Text of ids that arrive one by one; the pieces joined equal decode() of all ids."""

    def __init__(self, tokenizer, special=False, after=None):
        self._tokenizer = tokenizer
        self._shows = special.__contains__ if isinstance(special, frozenset) else lambda id: special
        self._left = b""  # the beginning of a character
        self._at_start = tokenizer.add_space_prefix and (
            after is None or tokenizer.is_special(after))

    def feed(self, id):
        """Returns the characters that id completes, perhaps none."""
        ordinary = not self._left and not self._at_start
        if ordinary and (text := self._tokenizer.texts.get(id)) is not None:
            return text
        data = self._tokenizer.token_bytes(id, self._shows(id))
        special = self._tokenizer.is_special(id)
        if self._at_start and not special:
            # encode() put a space before the text here: it is not part of the text.
            data = data.removeprefix(b" ")
        self._at_start = special and self._tokenizer.add_space_prefix
        text, used = codecs.utf_8_decode(data := self._left + data, "replace")
        self._left = data[used:]
        if ordinary and not special and not self._left:
            self._tokenizer.texts[id] = text
        return text

    def flush(self):
        """Returns U+FFFD if the ids ended inside a character, else nothing."""
        left, self._left = self._left, b""
        return left.decode(errors="replace")


# ---- Helpers -------------------------------------------------------------------------------------

REQUIRED = object()             # default of metadata that must be there
KINDS = {str: "a string", bool: "true or false", int: "an integer"}


def _shown(token):
    return token.decode(errors="replace")


def _without_surrogates(text):
    """Lone surrogates (JSON and the command line can give them) become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text(token):
    """A token's bytes as str; those that are no UTF-8 become surrogates, which no text has."""
    return token.decode(errors="surrogateescape")


def _bad(key, problem):
    return ModelError(f"tokenizer.ggml.{key} {problem}; {CONVERT}")


class _Fields:
    """Access to tokenizer.ggml.KEY of the metadata: ModelError for a value of another type."""

    def __init__(self, metadata):
        self._metadata = metadata

    def get(self, key, kind=object, default=REQUIRED):
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is REQUIRED:
            raise _bad(key, "is missing")
        if value is not default and kind not in (object, type(value)):
            raise _bad(key, f"must be {KINDS[kind]}")
        return value

    def strings(self, key):
        """Returns a list of bytes."""
        value = self.get(key)
        values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [0]
        if not set(map(type, values)) <= {str, bytes}:
            raise _bad(key, "must be an array of strings")
        return [value if isinstance(value, bytes) else value.encode(errors="surrogateescape")
                for value in values]

    def numbers(self, key, kinds, count, default=REQUIRED):
        """Returns an array of count numbers whose NumPy kind is among kinds."""
        values = np.asarray(self.get(key, default=default))
        if values.shape != (count,) or values.dtype.kind not in kinds:
            what = "numbers" if "f" in kinds else "integers"
            raise _bad(key, f"must be an array of {count} {what}")
        return values

    def index(self, key, count, default=None):
        """Returns a token id below count or None."""
        value = self.get(key, int, default)
        if value is not None and not 0 <= value < count:
            raise _bad(key, f"is {value}, but there are {count} tokens")
        return value
