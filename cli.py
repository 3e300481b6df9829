"""The command line: `python leone.py --help`."""
import argparse
import json
import os
import sys
import time

import model
import tools
from errors import LeoneError, RequestError
from leone import VERSION, Engine
from sampling import Sampling
from tokenizer import Tokenizer


def main(argv=None):
    args = build_parser().parse_args(argv)
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except LeoneError as error:
        print(f"leone: {error}", file=sys.stderr)
    except MemoryError:
        print("leone: out of memory; use a smaller model, a shorter --ctx or --kv q8",
              file=sys.stderr)
    except OSError as error:
        print(f"leone: {error.filename or 'file'}: {error.strerror}; check the path",
              file=sys.stderr)
    return 2


def build_parser():
    parser = argparse.ArgumentParser(
        prog="leone.py", description="Run any GGUF model: the same bits whatever the load.")
    parser.add_argument("--version", action="version", version=f"leone {VERSION}")
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name, run, summary, engine=True):
        sub = commands.add_parser(name, help=summary, description=summary)
        sub.set_defaults(run=run)
        sub.add_argument("-m", "--model", required=True, metavar="FILE", help="GGUF file")
        if engine:
            sub.add_argument("--backend", choices=("auto", "cuda", "cpu"), default="auto",
                             help="auto: CUDA where there is a usable card (default)")
            sub.add_argument("--kv", choices=("f32", "f16", "q8"), default="f16",
                             help="format of the KV cache (default f16)")
            sub.add_argument("--ctx", type=int, metavar="N",
                             help="tokens of KV cache in all (default: what fits)")
            sub.add_argument("--prefill-chunk", type=int, default=512, metavar="N",
                             help="prompt tokens of one step (default 512)")
        return sub

    def prompt(sub):
        source = sub.add_mutually_exclusive_group(required=True)
        source.add_argument("-p", "--prompt", metavar="TEXT")
        source.add_argument("-f", "--file", metavar="FILE",
                            help="read the text from FILE, - for stdin")

    sub = command("generate", run_generate, "Continue a prompt, or answer it with --chat.")
    prompt(sub)
    sub.add_argument("-n", "--max-tokens", type=int, default=256, metavar="N",
                     help="most tokens to generate (default 256)")
    sub.add_argument("--chat", action="store_true", help="use the model's chat template")
    sub.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    sub.add_argument("--temperature", type=float, default=0.0, metavar="T",
                     help="0 takes the most likely token (default)")
    sub.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off (default)")
    sub.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off (default)")
    sub.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off (default)")
    sub.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R")
    sub.add_argument("--presence-penalty", type=float, default=0.0, metavar="R")
    sub.add_argument("--frequency-penalty", type=float, default=0.0, metavar="R")
    sub.add_argument("--seed", type=int, metavar="N", help="same seed, same text (default: random)")
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT",
                     help="stop before this text; may be given several times")
    sub.add_argument("--ignore-eos", action="store_true", help="go on after the end of the answer")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("tokenize", run_tokenize, "Show the token ids of a text.", engine=False)
    prompt(sub)
    sub.add_argument("--special", action="store_true", help="read control tokens in the text")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("doctor", run_doctor, "Report on a model file, the card and the build.",
                  engine=False)
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("bench", run_bench, "Measure decode and prefill speed.")
    sub.add_argument("--rows", default="1,8", metavar="N,N", help="sequences at once (default 1,8)")
    sub.add_argument("--profile", action="store_true", help="time each op")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("perplexity", run_perplexity, "Perplexity of a text in windows.")
    sub.add_argument("-f", "--file", required=True, metavar="FILE")
    sub.add_argument("-c", "--window", type=int, default=512, metavar="N",
                     help="tokens of a window (default 512)")
    sub.add_argument("--json", action="store_true", help="print one JSON object")

    sub = command("diff", run_diff, "Run a prompt on both backends and compare every buffer.")
    prompt(sub)

    sub = command("replay", run_replay, "Run again what a receipt describes, and compare.",
                  engine=False)
    sub.add_argument("receipt", metavar="RECEIPT.json", help="a saved answer with its receipt")
    sub.add_argument("--key", metavar="FILE", help="check the signature with this key")
    sub.add_argument("--backend", choices=("auto", "cuda", "cpu"), default="auto",
                     help="auto: CUDA where there is a usable card (default)")
    return parser


def open_engine(args, **options):
    progress = show_progress if sys.stderr.isatty() else None
    return Engine(args.model, args.backend, args.kv, args.prefill_chunk, context=args.ctx,
                  progress=progress, **options)


def show_progress(done, total):
    end = "\r" if done < total else "\r\033[K"
    print(f"loading {done / 1e9:.1f} of {total / 1e9:.1f} GB", end=end, file=sys.stderr, flush=True)


def read_text(args):
    if args.prompt is not None:
        text = args.prompt
    elif args.file == "-":
        text = sys.stdin.read()
    else:
        text = read_file(args.file)
    # bytes of the command line that are not UTF-8 arrive as lone surrogates
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def read_file(path):
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        return file.read()


def run_generate(args):
    text = read_text(args)
    sampling = Sampling(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p,
        repetition_penalty=args.repetition_penalty, presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty, seed=args.seed, stop=tuple(args.stop))
    began = time.perf_counter()
    with open_engine(args, max_rows=1) as engine:
        loaded = time.perf_counter()
        if args.chat:
            messages = [{"role": "system", "content": args.system}] if args.system else []
            ids = engine.chat_tokens([*messages, {"role": "user", "content": text}])
        else:
            ids = engine.tokenize(text)
        request = engine.submit(ids, sampling, args.max_tokens, args.ignore_eos)
        try:
            while engine.step():
                show_answer(request, len(ids), args.json)
            show_answer(request, len(ids), args.json)
        except KeyboardInterrupt:
            request.finish_reason = "cancelled"
            request.finished = time.perf_counter()
        if request.error:
            raise request.error
        report(args, engine, request, loaded - began)
        return 130 if request.finish_reason == "cancelled" else 0


def show_answer(request, prompt_tokens, quiet):
    """Print what is new of the answer; before it, on a terminal, how much of the prompt is read."""
    if not request.tokens and request.read < prompt_tokens and sys.stderr.isatty():
        print(f"reading {request.read} of {prompt_tokens} tokens", end="\r\033[K", file=sys.stderr)
    while request.events:
        text = request.events.popleft().text
        if not quiet:
            print(text, end="", flush=True)


def report(args, engine, request, load_seconds):
    tokens = len(request.tokens)
    prefill = max(request.first_token - request.submitted, 0.0)
    decode = request.finished - request.first_token if tokens else 0.0
    rate = (tokens - 1) / decode if tokens > 1 and decode > 0 else 0.0
    gigabytes = rate * engine.bytes_per_token / 1e9
    if args.json:
        print(json.dumps({
            "prompt_tokens": request.prompt, "tokens": request.tokens, "text": request.text,
            "finish_reason": request.finish_reason,
            "timings": {"load_s": load_seconds, "prefill_s": prefill, "decode_s": decode,
                        "decode_tokens_per_s": rate, "weights_gb_per_s": gigabytes},
            "model": {"file": os.path.basename(args.model), "name": engine.cfg.name,
                      "backend": engine.ops.name, "kv": engine.kv.format}}))
    else:
        print()
        print(f"[{len(request.prompt)} prompt tokens in {prefill:.2f} s, {tokens} tokens, "
              f"{rate:.1f} tok/s, {gigabytes:.1f} GB/s of weights, {engine.ops.name}, "
              f"{request.finish_reason}]", file=sys.stderr)


def run_tokenize(args):
    tokenizer = Tokenizer(model.GGUF(args.model).metadata)
    ids = tokenizer.encode(read_text(args), special=args.special, bos=tokenizer.add_bos)
    if args.json:
        print(json.dumps({"tokens": ids}))
    else:
        for token in ids:
            print(f"{token:7d}  {tokenizer.token_bytes(token, special=True)!r}")


def run_doctor(args):
    return tools.doctor(args.model, as_json=args.json)


def run_bench(args):
    rows = [int(n) for n in args.rows.split(",") if n.strip().isdigit() and int(n)]
    if not rows:
        raise RequestError(f'--rows is "{args.rows}"; give numbers such as 1,8,64')
    with open_engine(args, max_rows=max(rows)) as engine:
        tools.bench(engine, rows, profile=args.profile, as_json=args.json)


def run_perplexity(args):
    with open_engine(args, max_rows=1) as engine:
        tools.perplexity(engine, read_file(args.file), args.window, as_json=args.json)


def run_diff(args):
    return tools.diff(args.model, read_text(args), args.kv)


def run_replay(args):
    return tools.replay(args.receipt, args.model, args.key, args.backend)
