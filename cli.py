"""The command line: `python leone.py --help`."""
import argparse
import json
import os
import re
import sys
import time
from dataclasses import fields
from pathlib import Path

from errors import LeoneError, require


def stopped():
    print("\nstopped", file=sys.stderr)
    return 130


try:  # these take a while
    import gguf_file
    import tools
    from leone import VERSION, Engine
    from sampling import Sampling
    from tokenizer import Tokenizer
except KeyboardInterrupt:
    sys.exit(stopped())


def main(argv=None, parser=None):
    """Run the command that `argv` names, as `parser` (default: build_parser()) reads it; returns
    the exit code."""
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))
    sys.stdout.reconfigure(errors="replace")  # what the terminal cannot spell becomes "?"
    try:
        try:
            args = (parser or build_parser()).parse_args(argv)
            return args.run(args) or 0
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return stopped()
    except LeoneError as error:
        message = str(error)
    except MemoryError:
        message = "out of memory; use a smaller model, a shorter --ctx or --kv q8"
    except OSError as error:
        message = f"{error.filename}: {error.strerror}; check the path"
        if error.filename is None:  # from stdout, which shall not fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            message = f"cannot write the output: {error.strerror}"
        if isinstance(error, BrokenPipeError):  # the reader of our output went away
            return 141
    print(f"leone: {tools.printable(message)}", file=sys.stderr)
    return 2


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {tools.printable(message)}; see {self.prog} --help\n")


OPTIONS = {  # that several commands have
    "--backend": dict(choices=("auto", "cuda", "cpu"), default="auto",
                      help="auto: CUDA where there is a usable card (default)"),
    "--kv": dict(choices=("f32", "f16", "q8"), default="f16",
                 help="format of the KV cache (default f16)"),
    "--ctx": dict(type=int, metavar="N", help="tokens of KV cache in all (default: what fits)"),
    "--prefill-chunk": dict(type=int, default=2048, metavar="N",
                            help="prompt tokens of one step (default 2048), a quarter of it while "
                                 "others decode"),
    "--draft": dict(default="auto", metavar="HOW",
                    help="where tokens are drafted, which never changes the answer: off, ngram, "
                         "mtp (the model's own head), the GGUF file of a smaller model, or auto: "
                         "mtp, or ngram where there is no head (default; of bench: off)"),
    "--json": dict(action="store_true", help="print one JSON object"),
}


def numbers(text):
    require(re.fullmatch("[1-9][0-9]{0,3}(,[1-9][0-9]{0,3})*", text),
            f'"{text}" is no list of numbers below 10,000; give some such as 1,8,64')
    return [int(n) for n in text.split(",")]


def build_parser():
    parser = Parser(prog="leone.py", description="Run a language model from a GGUF file: the same "
                                                 "bits whatever the load.")
    parser.add_argument("--version", action="version", version=f"leone {VERSION}")
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name, run, summary, *options, prompt=False):
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.set_defaults(run=run)
        sub.add_argument("-m", "--model", required=run is not run_bench, metavar="FILE",
                         help="GGUF file")
        if prompt:
            source = sub.add_mutually_exclusive_group(required=True)
            source.add_argument("-p", "--prompt", metavar="TEXT")
            source.add_argument("-f", "--file", metavar="FILE", help="or a text file, - for stdin")
        for option in options:
            sub.add_argument(option, **OPTIONS[option])
        return sub

    sub = command("generate", run_generate, "Continue a prompt, or answer it with --chat; without "
                  "other options by the most likely tokens.", *OPTIONS, prompt=True)
    sub.add_argument("-n", "--max-tokens", type=int, default=256, metavar="N",
                     help="most tokens to generate (default 256)")
    sub.add_argument("--chat", action="store_true", help="use the model's chat template")
    sub.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    for field in fields(Sampling):
        if field.type in (int, float):
            sub.add_argument("--" + field.name.replace("_", "-"), type=field.type, metavar="X",
                             default=field.default, help="default %(default)s: off")
    sub.set_defaults(temperature=0.0)
    sub.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default: random)")
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT",
                     help="stop before this text; may be given several times")
    sub.add_argument("--ignore-eos", action="store_true", help="go on after the end of the answer")

    sub = command("tokenize", run_tokenize, "Show the token ids of a text.", "--json", prompt=True)
    sub.add_argument("--special", action="store_true", help="read control tokens in the text")

    sub = command("doctor", lambda args: tools.doctor(args.model, args.json, args.deep),
                  "Report on a model file, the card and the build.", "--json")
    sub.add_argument("--deep", action="store_true",
                     help="also run the model: are its bits the same at any load?")

    sub = command("bench", run_bench, "Measure decode and prefill speed.", *OPTIONS)
    sub.set_defaults(draft="off")
    sub.add_argument("--synthetic-acceptance", type=float, metavar="SHARE",
                     help="with --draft: measure as if this share of the drafts were right")
    sub.add_argument("--prompts", metavar="FILE",
                     help="with --draft: measure on prompts such as those of tests/prompts.json")
    sub.add_argument("--rows", type=numbers, default="1,8", metavar="N,N", help="default 1,8")
    sub.add_argument("--profile", action="store_true", help="time each op")
    sub.add_argument("--evidence", metavar="DIR", help="also write a file about it to this folder")
    sub.add_argument("--serve", metavar="URL",
                     help="measure a running server of the OpenAI API instead of a model")
    sub.add_argument("--users", type=numbers, default="1,2,4,8,16,32,64", metavar="N,N",
                     help="with --serve: users at once (default %(default)s)")
    sub.add_argument("--api-key", metavar="KEY", help="with --serve: to send to the server")

    sub = command("perplexity", run_perplexity, "Perplexity of a text in windows.",
                  *(option for option in OPTIONS if option != "--draft"), prompt=True)
    sub.add_argument("-c", "--window", type=int, default=512, metavar="N",
                     help="tokens of a window (default 512)")

    command("diff", lambda args: tools.diff(args.model, read_text(args), args.kv),
            "Run a prompt on both backends and compare every buffer.", "--kv", prompt=True)

    sub = command(
        "replay", lambda args: tools.replay(args.receipt, args.model, args.key, args.backend),
        "Run again what a receipt describes, and compare.", "--backend")
    sub.add_argument("receipt", metavar="RECEIPT.json", help="a saved answer with its receipt")
    sub.add_argument("--key", metavar="FILE", help="check the signature with this key")
    return parser


def open_engine(args, **options):
    return Engine(args.model, args.backend, args.kv, args.prefill_chunk, context=args.ctx,
                  draft=getattr(args, "draft", "off"), progress=show_loading, **options)


def show_loading(done, total):
    tools.progress(f"loading {tools.size(done)} of {tools.size(total)}", last=done == total)


def read_text(args):
    if args.prompt is not None:
        # bytes of the command line that are not UTF-8 arrive as lone surrogates
        return args.prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    require(args.file != "-" or sys.stdin, "standard input is closed; name a file with -f")
    data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
    return data.decode("utf-8", "replace")


def run_generate(args):
    require(args.chat or args.system is None,
            "--system is for --chat; add --chat or put the text into the prompt")
    text = read_text(args)
    sampling = Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)
                           if hasattr(args, field.name)})
    began = time.perf_counter()
    with open_engine(args, max_rows=1) as engine:
        loaded = time.perf_counter()
        if args.chat:
            messages = [{"role": "system", "content": args.system}] if args.system else []
            ids = engine.chat_tokens([*messages, {"role": "user", "content": text}])
        else:
            ids = engine.tokenize(text)
        request = engine.submit(ids, sampling, args.max_tokens, args.ignore_eos)
        shown, busy = 0, True
        try:
            while busy:
                shown = show_answer(request, shown, args.json)
                busy = engine.step()
        except KeyboardInterrupt:
            if request.finish_reason is None:
                engine.finish(request, "cancelled")
        show_answer(request, shown, args.json)
        if request.error:
            raise request.error
        report(args, engine, request, loaded - began)
        return 130 if request.finish_reason == "cancelled" else 0


def show_answer(request, shown, quiet):
    """Print the answer from character `shown` on; returns how many characters are out.

    Before the first of them, a terminal shows how much of the prompt is read.
    """
    if not shown:
        read, length = request.read, len(request.prompt)
        all_read = read == length
        tools.progress("" if all_read else f"reading {read} of {length} tokens", last=all_read)
    if not quiet:
        print(request.text[shown:], end="", flush=True)
    return len(request.text)


def report(args, engine, request, load_seconds):
    tokens, length = len(request.tokens), len(request.prompt)
    first = request.first_token or request.finished
    prefill, decode = first - request.submitted, request.finished - first
    rate = (tokens - 1) / decode if decode > 0 else 0.0
    gigabytes = rate * engine.bytes_per_step(1) / 1e9
    if args.json:
        print(json.dumps({
            "prompt_tokens": request.prompt, "tokens": request.tokens, "text": request.text,
            "finish_reason": request.finish_reason,
            "drafted": request.drafted, "accepted": request.accepted,
            "timings": {"load_s": load_seconds, "prefill_s": prefill, "decode_s": decode,
                        "decode_tokens_per_s": rate, "weights_gb_per_s": gigabytes},
            "model": {"file": os.path.basename(args.model), "name": engine.cfg.name,
                      "backend": engine.ops.name, "kv": engine.kv.format}}))
    else:
        print()
        read = length if request.read == length else f"{request.read} of {length}"
        print(f"[{read} prompt tokens in {prefill:.2f} s, {tokens} tokens, "
              f"{rate:.1f} tok/s, {gigabytes:.1f} GB/s of weights, {engine.ops.name}, "
              f"{request.finish_reason}]", file=sys.stderr)


def run_tokenize(args):
    tokenizer = Tokenizer(gguf_file.GGUF(args.model).metadata)
    ids = tokenizer.encode(read_text(args), special=args.special, bos=tokenizer.add_bos)
    if args.json:
        print(json.dumps({"tokens": ids}))
    else:
        for token in ids:
            print(f"{token:7d}  {tokenizer.token_bytes(token, special=True)!r}")


def run_bench(args):
    default = vars(build_parser().parse_args(["bench"]))
    given = {"--" + name.replace("_", "-") for name, value in vars(args).items()
             if value != default[name]}
    require(args.model or args.serve,
            "give either a model with -m FILE or a running server with --serve URL")
    of_servers, of_rows = {"--serve", "--users", "--api-key"}, {
        "--rows", "--profile", "--evidence", "--synthetic-acceptance"}
    unused = (given - of_servers - {"--json"} if args.serve else
              given & (of_servers | of_rows if args.prompts else of_servers))
    require(not unused, f"this kind of bench makes no use of {', '.join(sorted(unused))}; leave "
            "that out, or see leone.py bench --help")
    if args.serve:
        return tools.bench_server(args.serve, args.users, args.api_key, args.json)
    require(0 <= (args.synthetic_acceptance or 0) <= 1, "--synthetic-acceptance must be 0 to 1")
    require((args.synthetic_acceptance, args.prompts) == (None, None) or args.draft != "off",
            "--synthetic-acceptance and --prompts need drafts; say --draft ngram, mtp or a path")
    if args.evidence:  # a folder that cannot be made is known before anything is measured
        Path(args.evidence).mkdir(parents=True, exist_ok=True)
    with open_engine(args, max_rows=max(args.rows)) as engine:
        if args.prompts:
            return tools.bench_prompts(engine, args.prompts, args.json)
        tools.bench(engine, args.rows, args.profile, args.json, args.synthetic_acceptance,
                    args.evidence)


def run_perplexity(args):
    with open_engine(args, max_rows=1) as engine:
        tools.perplexity(engine, read_text(args), args.window, as_json=args.json)
