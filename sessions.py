"""Sessions: conversations whose KV outlives a request, in memory or in a folder.

Between its requests an idle session holds its tokens and their pages. When others need the memory,
the least recently used is hibernated: written to the store and freed; without a store it is only
freed, and its next request computes it again. Whatever was hibernated survives a restart.

A file of the store, NAME.kv, integers little-endian:

    bytes 0-7    b"LEONE KV"
    bytes 8-11   format version, 3
    bytes 12-15  bytes of the header
    then         the header: JSON, padded with spaces so that the first blob is aligned; key (what
                 must be equal for the bits to be valid here), root, tokens, committed (how many of
                 them are in the recurrent state), answers, and blobs, in their order:
                 name -> [bytes, SHA-256]
    then         SHA-256 of all bytes before it
    then         the blobs, each padded with zeros to a multiple of ALIGNMENT and hashed with that:
                 kv, the pages as the backend keeps them, and state, for models that have one

It is written under another name, synced, renamed and its folder synced: a file is whole or not
there. Every byte is under a hash, and a file that is damaged or of another model is an error. An
engine locks the folder until it is closed or its process ends: no other one writes there meanwhile.
"""
import contextlib
import fcntl
import hashlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from errors import RequestError, require
from kv import PAGE, Snapshot

MAGIC, VERSION = b"LEONE KV", 3
ALIGNMENT = 4096
LARGEST_HEADER = 1 << 28  # 20,000 tokens take 140 kB
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@dataclass(eq=False)
class Session:
    """One conversation. Its pages hold the KV of `tokens`; a request that runs has taken both."""
    name: str
    tokens: list = field(default_factory=list)
    pages: list = field(default_factory=list)
    state: object = None  # kv.Snapshot behind the tokens, recurrent models only
    root: str = ""  # of the tokens, see kv.PrefixCache
    answers: dict | None = None  # text -> the tokens sampled for it; None until the file was read
    request: object = None  # whose turn it is: waiting or running
    used: float = field(default_factory=time.time)  # seconds since 1970
    filed: int | None = None  # tokens in its file
    changed: bool = True  # since the file was written

    def begin_turn(self, request):
        """Let `request` be the one that uses the session. RequestError while another one does."""
        require(self.request is None,
                f'session "{self.name}" is answering another request; wait for its end, or fork it',
                409, "session_busy", "session")
        self.request = request

    def take(self):
        """(tokens, pages, state), which are the caller's now."""
        taken = self.tokens, self.pages, self.state
        self.tokens, self.pages, self.state = [], [], None
        return taken


class Sessions:
    """All sessions of an engine. Any thread may call claim() and answers(), its own all others."""

    def __init__(self, engine, folder):
        """folder: the store, made if it is not there, or None. Raises RequestError."""
        self.engine, self.folder, self.known = engine, folder and Path(folder), {}
        self.descriptor = None  # of the folder, whose lock it holds
        if not self.folder:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(self.folder, os.O_RDONLY)
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for path in self.folder.glob(".*.kv.part"):  # of a write that was cut short
                path.unlink()
            for path in sorted(self.folder.glob("*.kv")):
                if NAME.fullmatch(path.stem):
                    self.known[path.stem] = Session(path.stem, used=path.stat().st_mtime, filed=0)
        except OSError as error:
            self.unlock()
            held = isinstance(error, BlockingIOError)
            raise RequestError(f"the session store {folder} cannot be used: "
                               f"{'another server has it' if held else error.strerror}; choose a "
                               "folder of its own, on a local disk, that can be written") from None

    # ---- the engine's side -------------------------------------------------------------------

    def claim(self, name, request):
        """Let `request` be the session's next turn. Raises RequestError if it has one already."""
        check_name(name)
        self.known.setdefault(name, Session(name)).begin_turn(request)

    def open(self, name):
        """The session with its pages in memory, or None while there is no room for them."""
        session = self.known[name]
        if session.filed is not None and not session.tokens:
            header, at = self.read_header(session)
            count = -(-len(header["tokens"]) // PAGE)
            require(count <= self.engine.pool.n_pages,
                    f"session {name} needs {count} pages of KV cache, and there are "
                    f"{self.engine.pool.n_pages}; delete it, or start with a larger --ctx",
                    409, "session_too_large", "session")
            if not self.engine.make_room(count):
                return None
            self.restore(session, header, at)
        return session

    def keep(self, request, tokens, pages, state):
        """Give the session of an ended request what it computed."""
        session = self.known[request.session]
        session.used = time.time()
        if request.pages is not None and not request.error:  # else it is what it was, or its file
            session.tokens, session.pages, session.state = tokens, pages, state
            session.root, session.changed = request.root, True
            tokenizer, text = self.engine.tokenizer, request.text
            ids = [id for id in request.tokens
                   if id not in tokenizer.eos_ids and id < self.engine.cfg.n_tokens]
            if text and tokenizer.decode(ids) == text:  # else a stop string cut it
                said = dict.fromkeys((text, text.strip()), ids)  # some templates strip it
                self.answers(session.name).update(said)
        session.request = None
        self.forget_if_empty(session)

    def park(self):
        """Free the pages of the session that was used least recently; those whose next turn waits
        come last. False if none holds pages (a turn that runs has taken them)."""
        idle = [s for s in list(self.known.values()) if s.pages]
        if not idle:
            return False
        session = min(idle, key=lambda s: (s.request is not None, s.used))
        with contextlib.suppress(RequestError):  # a full disk must not stop those who wait
            self.store(session)
        self.engine.pool.give(session.take()[1])
        self.forget_if_empty(session)
        return True

    def store(self, session):
        """Write a session to its file, where there is a store and news. Raises RequestError."""
        if self.folder and session.tokens and session.changed:
            self.write(session)

    def forget_if_empty(self, session):
        with self.engine.lock:
            if not session.pages and session.filed is None and session.request is None:
                self.known.pop(session.name, None)

    @property
    def resident(self):
        """How many sessions hold pages between their turns."""
        return sum(bool(s.pages) for s in list(self.known.values()))

    @property
    def stored(self):
        return sum(s.filed is not None for s in list(self.known.values()))

    def close(self):
        """Store every session that is in memory; what cannot be stored is said on stderr."""
        for session in self.known.values():
            try:
                self.store(session)
            except RequestError as error:
                print(f"leone: {error}", file=sys.stderr)

    def unlock(self):
        """From now on the store is free for others."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def answers(self, name):
        """{text: ids} of the answers that were sampled in a session, to which a caller may add.

        The tokenizer might make other ids of the same text. Any thread may call it.
        """
        session = self.known.get(name)
        if session is None:
            return {}
        if session.answers is None:
            filed = session.filed is not None
            session.answers = self.read_header(session)[0]["answers"] if filed else {}
        return session.answers

    # ---- what users ask for ------------------------------------------------------------------

    def list(self):
        """One dict per session: name, state, tokens, pages, last_used (seconds since 1970)."""
        with self.engine.lock:
            known = list(self.known.values())
        return [{"name": s.name, "tokens": len(s.tokens) or s.filed or 0, "pages": len(s.pages),
                 "state": "active" if s.request else "resident" if s.pages else "stored",
                 "last_used": s.used} for s in known]

    @contextlib.contextmanager
    def changing(self, name):
        """The idle session of this name; no request can claim it meanwhile. Raises RequestError."""
        check_name(name)
        with self.engine.lock:
            session = self.known.get(name)
            require(session, f'there is no session "{name}"; GET /v1/sessions lists them', 404,
                    "session_not_found", "session")
            session.begin_turn(self)
        try:
            yield session
        finally:
            session.request = None

    def fork(self, name, new_name):
        """A second session that begins as the first one is now; both share its pages."""
        check_name(new_name)
        with self.changing(name) as source:
            if self.open(name) is None:
                length = len(self.read_header(source)[0]["tokens"])
                raise self.engine.overloaded(-(-length // PAGE))
            copy = Session(new_name, source.tokens, list(source.pages), source.state, source.root,
                           dict(self.answers(name)))
            with self.engine.lock:
                require(new_name not in self.known, f'there is a session "{new_name}" already; '
                        "delete it first or choose another name", 409, "session_exists")
                self.known[new_name] = copy
            self.engine.pool.share(copy.pages)

    def delete(self, name):
        with self.changing(name) as session:
            try:
                if self.folder:
                    self.path(session).unlink(missing_ok=True)
            except OSError as error:
                raise RequestError(f"the file of session {name} cannot be deleted: "
                                   f"{error.strerror}; delete it by hand", 507,
                                   "session_store") from None
            with self.engine.lock:
                del self.known[name]
            self.engine.pool.give(session.take()[1])

    def hibernate(self, name):
        """Write an idle session to the store and free its pages. Raises RequestError."""
        with self.changing(name) as session:
            require(self.folder, "there is no session store; start with --session-store")
            self.store(session)
            self.engine.pool.give(session.take()[1])

    # ---- files -------------------------------------------------------------------------------

    def path(self, session):
        return self.folder / f"{session.name}.kv"

    def key(self):
        """What decides the bits of KV beside tokens and root."""
        engine = self.engine
        return {"model_sha256": engine.model_hash.result(), "kv": engine.kv.format,
                "backend": engine.ops.name, "architecture": engine.ops.architecture,
                "kernels": engine.ops.fingerprint}

    def write(self, session):
        engine = self.engine
        blobs = {"kv": engine.ops.save_pages(engine.kv, session.pages).tobytes()}
        if session.state:
            engine.ops.synchronize()  # a snapshot may still be on its way
            blobs["state"] = session.state.data.tobytes()
        padded = {name: data.ljust(aligned(len(data)), b"\0") for name, data in blobs.items()}
        header = {"key": self.key(), "root": session.root, "tokens": session.tokens,
                  "committed": session.state.committed if session.state else 0,
                  "answers": dict(self.answers(session.name)),
                  "blobs": {name: [len(blobs[name]), hashlib.sha256(data).hexdigest()]
                            for name, data in padded.items()}}
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + 48) % ALIGNMENT)
        head = MAGIC + np.array([VERSION, len(text)], "<u4").tobytes() + text
        path = self.path(session)
        part = path.with_name(f".{path.name}.part")
        try:
            with open(part, "wb") as file:
                for data in (head, hashlib.sha256(head).digest(), *padded.values()):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
            os.fsync(self.descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            raise RequestError(f"session {session.name} cannot be stored: {error.strerror}; mend "
                               "the session store", 507, "session_store") from None
        session.filed, session.changed = len(session.tokens), False

    @contextlib.contextmanager
    def opened(self, session):
        """The session's file for reading; what its content causes means that it is damaged."""
        try:
            with open(self.path(session), "rb") as file:
                yield file
        except OSError as error:
            raise RequestError(f"the file of session {session.name} cannot be read: "
                               f"{error.strerror}; mend the session store", 507,
                               "session_store") from None
        except (ValueError, LookupError, TypeError):
            raise RequestError(f"the file of session {session.name} is damaged; delete the session "
                               "to start again", 409, "session_damaged", "session") from None

    def read_header(self, session):
        """(header, place of the first blob) of the session's file. Raises RequestError."""
        with self.opened(session) as file:
            head = file.read(16)
            version, length = np.frombuffer(head[8:16], "<u4").tolist()
            head += file.read(min(length, LARGEST_HEADER))
            if head[:8] != MAGIC or hashlib.sha256(head).digest() != file.read(32):
                raise ValueError
            header = json.loads(head[16:]) if version == VERSION else {"key": {}}
        for name, value in self.key().items():
            found = header["key"].get(name)
            require(found == value, f"the file of session {session.name} was made with another "
                    f"{name}: {found}, here {value}; delete the session to start again",
                    409, "session_foreign", "session")
        return header, len(head) + 32

    def restore(self, session, header, at):
        """Bring tokens and KV back into memory, where there is room. Raises RequestError."""
        blobs = {}
        with self.opened(session) as file:
            file.seek(at)
            for name, (size, digest) in header["blobs"].items():
                data = file.read(aligned(size))
                if hashlib.sha256(data).hexdigest() != digest:
                    raise ValueError
                blobs[name] = data[:size]
            engine, count = self.engine, -(-len(header["tokens"]) // PAGE)
            sizes = {"kv": engine.kv.nbytes // engine.pool.n_pages * count}
            if engine.cfg.n_state_layers:
                sizes["state"] = engine.kv.states.nbytes // len(engine.page_table)
            if file.read(1) or {name: len(data) for name, data in blobs.items()} != sizes:
                raise ValueError
        session.tokens, session.root = header["tokens"], header["root"]
        session.answers = session.answers or header["answers"]
        session.pages, session.changed = engine.pool.take(count), False
        engine.ops.load_pages(engine.kv, session.pages, np.frombuffer(blobs["kv"], np.uint8))
        if "state" in blobs:
            session.state = Snapshot(header["committed"], np.frombuffer(blobs["state"], np.uint8))


def aligned(n_bytes):
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def check_name(name):
    require(isinstance(name, str) and NAME.fullmatch(name), "a session name has 1 to 64 letters, "
            "digits, dots, - or _, and does not begin with a dot", param="session")
