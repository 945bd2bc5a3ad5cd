"""`python -m stages.v0_2_cudagraph.bench_latency`: how long one prefill and each decode step of a batch take.

One engine in this process, stepped directly: no sockets, no HTTP, no detokenizer. Takes the server's flags too.

    # the engine's speed alone, on random weights of the model's shape
    python -m stages.v0_2_cudagraph.bench_latency --model-path FOLDER --load-format dummy --batch-size 1 8 32

    # does it still say sensible things?
    python -m stages.v0_2_cudagraph.bench_latency --model-path FOLDER --correctness-test
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .benchmark.datasets import ordinary_ids
from .benchmark.report import check_output_file, provenance, write_json
from .benchmark.static_batch import BatchLatency, greedy_texts, measure
from .hf_transformers_utils import check_model_folder, get_tokenizer
from .managers.controller.tp_worker import ModelTpServer
from .server_args import ServerArgs
from .support.logs import configure_logging

EXIT_OK, EXIT_USAGE = 0, 2

CORRECTNESS_PROMPTS = (
    "The capital of France is",
    "One, two, three, four,",
    "To make a cup of tea, first boil",
)
WARMUP_OUTPUT_LEN = 8


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}.bench_latency",
        usage="%(prog)s --model-path FOLDER [FLAGS]",
        description="Time the prefill and the decode steps of one batch, in one process.",
    )
    add = parser.add_argument_group("bench").add_argument
    add("--batch-size", type=int, nargs="+", default=[1], help="one run for each (default: 1)")
    add("--input-len", type=int, default=1024, help="tokens of each prompt (default: %(default)s)")
    add("--output-len", type=int, default=16, help="tokens of each answer (default: %(default)s)")
    add(
        "--correctness-test", action="store_true", help="time nothing, print the greedy text of three prompts"
    )
    add("--output-file", help="write the run as one JSON object")
    ServerArgs.add_cli_args(parser)
    return parser


def check_args(args: argparse.Namespace, server_args: ServerArgs) -> None:
    """Raise ``ValueError`` naming the flag for the first argument that can't be had."""
    least = {"batch-size": min(args.batch_size), "input-len": args.input_len, "output-len": args.output_len}
    for name, value in least.items():
        if value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}.")
    if args.output_file is not None:
        check_output_file(args.output_file)
    for name in ("tp_size", "dp_size", "nnodes"):
        if getattr(server_args, name) != 1:
            raise ValueError(
                f"--{name.replace('_', '-')}: this bench is one process; load a server with bench_serving instead."
            )
    server_args.check()
    check_model_folder(server_args.model_path, server_args.tokenizer_path, server_args.load_format)
    get_tokenizer(server_args.tokenizer_path, server_args.model_path)


def check_room(server: ModelTpServer, batch_size: int, input_len: int, output_len: int) -> None:
    """Raise ``ValueError`` unless such a batch runs at once, without waiting and without retraction."""
    if input_len + output_len > server.model_config.context_len:
        raise ValueError(
            f"--input-len {input_len} and --output-len {output_len} exceed the context length of "
            f"{server.model_config.context_len} tokens."
        )
    wanted = batch_size * (input_len + output_len) + 1  # admission keeps one slot free
    if wanted > server.max_total_num_token:
        raise ValueError(
            f"--batch-size {batch_size} needs {wanted} slots and the token pool has "
            f"{server.max_total_num_token}: raise --max-total-tokens."
        )
    if batch_size > server.max_num_running_seq:
        raise ValueError(
            f"--batch-size {batch_size} exceeds --max-running-requests {server.max_num_running_seq}."
        )


def run_batches(server: ModelTpServer, args: argparse.Namespace) -> list[BatchLatency]:
    """Each batch size in turn, after a short batch of the same shape, which allocates and compiles."""
    rng = random.Random(server.server_args.random_seed)
    ids = ordinary_ids(server.model_config.vocab_size, server.intake.tokenizer)
    check_room(server, max(args.batch_size), args.input_len, args.output_len)
    results = []
    for batch_size in args.batch_size:
        prompts = [rng.choices(ids, k=args.input_len) for _ in range(batch_size)]
        measure(server, prompts, min(args.output_len, WARMUP_OUTPUT_LEN))
        results.append(measure(server, prompts, args.output_len))
    return results


def print_results(console: Console, results: Sequence[BatchLatency]) -> None:
    table = Table()
    for column in ("batch", "prefill ms", "prefill tok/s", "decode ms", "decode tok/s", "total tok/s"):
        table.add_column(column, justify="right")
    for result in results:
        step, decode_throughput = result.decode_median_s, result.decode_throughput
        table.add_row(
            str(result.batch_size),
            f"{result.prefill_s * 1000:.2f}",
            f"{result.prefill_throughput:.1f}",
            "–" if step is None else f"{step * 1000:.2f}",
            "–" if decode_throughput is None else f"{decode_throughput:.1f}",
            f"{result.total_throughput:.1f}",
        )
    console.print(table)


def _print_texts(server: ModelTpServer, output_len: int, console: Console) -> dict[str, str]:
    """Each prompt with what the model says after it."""
    longest = max(len(server.intake.tokenizer.encode(prompt)) for prompt in CORRECTNESS_PROMPTS)
    check_room(server, len(CORRECTNESS_PROMPTS), longest, output_len)
    texts = dict(zip(CORRECTNESS_PROMPTS, greedy_texts(server, CORRECTNESS_PROMPTS, output_len), strict=True))
    for prompt, text in texts.items():
        console.print(f"{prompt}|{text}\n", markup=False, highlight=False, soft_wrap=True)
    return texts


def run(args: argparse.Namespace, console: Console) -> int:
    """One engine, one run; returns the exit code. Raises ``ValueError``, naming the flag at fault."""
    server_args = ServerArgs.from_cli_args(args)
    check_args(args, server_args)
    configure_logging("bench", server_args.log_level)
    server_args.disable_log_stats = True  # printing a line is no part of a step
    server_args.max_prefill_tokens = max(args.batch_size) * args.input_len  # a batch is one prefill
    server = ModelTpServer(server_args)
    server.num_continue_decode_steps = 1
    seed = {"random_seed": server_args.random_seed}
    report = {**provenance(vars(args) | seed), "engine": server.describe()}
    if args.correctness_test:
        report["texts"] = _print_texts(server, args.output_len, console)
    else:
        results = run_batches(server, args)
        print_results(console, results)
        report["batches"] = [result.as_dict() for result in results]
    if args.output_file:
        write_json(args.output_file, report)
    return EXIT_OK


def main(argv: Sequence[str]) -> int:
    """Parse the command line and run; returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        return run(args, Console())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
