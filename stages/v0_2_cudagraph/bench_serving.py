"""`python -m stages.v0_2_cudagraph.bench_serving`: loads a running server over HTTP and reports how it copes.

Works against any stage (``--backend strata``) and any OpenAI-compatible server. Its parts are in `benchmark/`;
one process, which imports no torch and ends with the run.

    # everything at once, as fast as the server can
    python -m stages.v0_2_cudagraph.bench_serving --num-prompts 200 --random-input-len 512 --random-output-len 128

    # 4 requests a second, arriving by chance, and the numbers in a file
    python -m stages.v0_2_cudagraph.bench_serving --request-rate 4 --num-prompts 100 --output-file run.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from .benchmark.arguments import check_args, make_parser
from .benchmark.backends import BACKENDS, Backend, RequestOptions
from .benchmark.client import send
from .benchmark.datasets import (
    BenchRequest,
    Lengths,
    ordinary_ids,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
)
from .benchmark.load import LoadRun, arrival_times, raise_open_files_limit, run_load
from .benchmark.metrics import RequestResult, Summary, summarise
from .benchmark.report import print_summary, provenance, write_json
from .benchmark.server_info import BenchError, ServerInfo, ask_server, flush_cache
from .hf_transformers_utils import Tokenizer
from .support.http_server import loop_factory

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

CONNECT_TIMEOUT_S = 60.0
WARMUP_OUTPUT_LEN = 16


def make_requests(
    args: argparse.Namespace, vocab_size: int | None, tokenizer: Tokenizer | None
) -> list[BenchRequest]:
    """The run's prompts. Raises ``ValueError``, naming the flag, if they can't be made."""
    rng = random.Random(args.seed)
    if args.dataset_name == "sharegpt":
        if tokenizer is None:
            raise ValueError("--dataset-name sharegpt needs --tokenizer FOLDER to count tokens.")
        path = Path(args.dataset_path)
        return sharegpt_requests(rng, args.num_prompts, path, tokenizer, args.sharegpt_output_len)
    vocab_size = vocab_size or (tokenizer.vocab_size if tokenizer else None)
    if vocab_size is None:
        raise ValueError("this server does not tell its vocabulary: pass --tokenizer FOLDER.")
    ids = ordinary_ids(vocab_size, tokenizer)
    inputs = Lengths(args.random_input_len, args.random_range_ratio)
    outputs = Lengths(args.random_output_len, args.random_range_ratio)
    if args.dataset_name == "random":
        return random_requests(rng, args.num_prompts, ids, inputs, outputs)
    return shared_prefix_requests(
        rng, args.num_prompts, ids, inputs, outputs, args.shared_prefix_groups, args.shared_prefix_len
    )


async def run(args: argparse.Namespace, console: Console) -> int:
    """One run against one server; returns the exit code. Raises ``ValueError`` or `BenchError`."""
    backend = BACKENDS[args.backend]
    headers = {b"authorization": f"Bearer {args.api_key}".encode()} if args.api_key else {}
    async with httpx.AsyncClient(
        base_url=args.base_url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=httpx.Timeout(args.timeout, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    ) as http:
        info = await ask_server(http, args.model)
        tokenizer = info.find_tokenizer(args.tokenizer)
        if backend.needs_text and tokenizer is None:
            raise ValueError(f"--backend {args.backend} needs --tokenizer FOLDER to write prompts as text.")
        requests = make_requests(args, info.vocab_size, tokenizer)
        options = RequestOptions(info.model, not args.disable_ignore_eos, tokenizer, args.extra_request_body)
        await _warm_up(partial(send, http, backend, options=options), requests, args)
        if args.flush_cache:
            await flush_cache(http)
        load = await _load(http, backend, requests, options, args)
    summary = summarise(load.results, load.duration)
    _report(args, info, load, summary, console)
    if load.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if summary.failed else EXIT_OK


async def _warm_up(
    send_one: Callable[[BenchRequest], Any], requests: Sequence[BenchRequest], args: argparse.Namespace
) -> None:
    """Requests like the first one, with its tokens in another order, so that they warm no cache for it."""
    rng = random.Random(f"warm-up/{args.seed}")
    for _ in range(args.warmup_requests):
        ids = rng.sample(requests[0].prompt_ids, k=len(requests[0].prompt_ids))
        result = await send_one(BenchRequest(ids, min(requests[0].output_len, WARMUP_OUTPUT_LEN)))
        if result.error:
            raise BenchError(f"the warm-up request failed: {result.error}")


async def _load(
    http: httpx.AsyncClient,
    backend: Backend,
    requests: Sequence[BenchRequest],
    options: RequestOptions,
    args: argparse.Namespace,
) -> LoadRun:
    times = arrival_times(random.Random(f"arrivals/{args.seed}"), len(requests), args.request_rate)
    bar = Progress(console=Console(stderr=True), disable=args.disable_progress, transient=True)
    with bar:
        task = bar.add_task("requests", total=len(requests))

        def on_result(result: RequestResult) -> None:
            bar.advance(task)

        send_one = partial(send, http, backend, options=options)
        return await run_load(send_one, requests, times, args.max_concurrency, on_result)


def _report(
    args: argparse.Namespace, info: ServerInfo, load: LoadRun, summary: Summary, console: Console
) -> None:
    if load.interrupted:
        console.print(f"Interrupted: {len(load.results)} of {args.num_prompts} requests had ended.")
    print_summary(console, summary)
    errors = [result.error for result in load.results if result.error]
    if errors:
        console.print(f"first error: {errors[0]}", markup=False, highlight=False, soft_wrap=True)
    if args.output_file:
        report = {
            **provenance(vars(args)),
            "server": {"model": info.model, **info.details},
            "interrupted": load.interrupted,
            **summary.as_dict(),
            "errors": dict(Counter(errors)),
        }
        write_json(args.output_file, report)


def main(argv: Sequence[str]) -> int:
    """Parse the command line and run; returns the exit code."""
    args = make_parser(f"python -m {__package__}.bench_serving").parse_args(argv)
    try:
        check_args(args)
        raise_open_files_limit()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(run(args, Console()))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (BenchError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:  # before the first request, or while the report is written
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
