"""The flags of `bench_serving`: history's names where history had them; checked before anything is sent."""

from __future__ import annotations

import argparse
import json
import math

import httpx

from .backends import BACKENDS
from .report import check_output_file

DATASETS = ("random", "shared-prefix", "sharegpt")

EPILOG = """\
what is measured, over the requests that completed:
  time to first token    from sending a request to its first token
  inter-token latency    the wait for each further token; tokens that come together share it
  time per output token  a request's mean inter-token latency
  end-to-end latency     from sending a request to its last token
A server that does not count tokens in its events has one taken for each piece of text.

what is asked:
  random                 prompts of random tokens, which have nothing in common
  shared-prefix          the same behind a few prefixes, which a prefix cache finds again
  sharegpt               the first questions of a file of conversations, answered as long as there

The exit code is 0 if every request completed, 1 if one failed or no server answers, 2 for wrong flags, and 130
after Ctrl-C, which reports what had completed by then.
"""


def make_parser(prog: str) -> argparse.ArgumentParser:
    """``prog`` is how the command is called."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s [FLAGS]",
        description="Load a running server and report throughput and latencies.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("server").add_argument
    add(
        "--backend",
        choices=BACKENDS,
        default="strata",
        help="whose routes (default: %(default)s)",
    )
    add(
        "--base-url",
        default="http://127.0.0.1:30000",
        help="where the server is, without /v1 (default: %(default)s)",
    )
    add("--model", help="the model's name in requests (default: the first one that the server lists)")
    add("--tokenizer", help="folder with a tokenizer.json (default: the server's, if it is on this machine)")
    add("--api-key", help="sent as 'Authorization: Bearer KEY'")
    add(
        "--timeout",
        type=float,
        default=3600.0,
        help="longest silence of the server, in seconds (default: %(default)s)",
    )

    add = parser.add_argument_group("requests").add_argument
    add(
        "--dataset-name",
        choices=DATASETS,
        default="random",
        help="what the prompts are (default: %(default)s)",
    )
    add("--dataset-path", help="sharegpt: a JSON list of conversations, as ShareGPT dumps have them")
    add("--num-prompts", type=int, default=100, help="how many requests (default: %(default)s)")
    add(
        "--random-input-len",
        type=int,
        default=1024,
        help="tokens of the longest random prompt (default: %(default)s)",
    )
    add(
        "--random-output-len",
        type=int,
        default=128,
        help="tokens of the longest answer (default: %(default)s)",
    )
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="shortest length, as a share of the longest; drawn evenly (default: %(default)s)",
    )
    add(
        "--shared-prefix-len",
        type=int,
        default=512,
        help="tokens of each prefix (default: %(default)s)",
    )
    add(
        "--shared-prefix-groups",
        type=int,
        default=4,
        help="how many prefixes (default: %(default)s)",
    )
    add("--sharegpt-output-len", type=int, help="sharegpt: tokens of every answer (default: as in the file)")
    add("--disable-ignore-eos", action="store_true", help="let answers end where the model wants to")
    add(
        "--extra-request-body",
        type=json.loads,
        default={},
        help="a JSON object whose fields every request gets as well; for servers that count tokens when asked: "
        '\'{"stream_options": {"include_usage": true}}\'',
    )
    add("--seed", type=int, default=1, help="of prompts, lengths and arrivals (default: %(default)s)")

    add = parser.add_argument_group("load").add_argument
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        help="requests a second, Poisson (default: inf, all at once)",
    )
    add("--max-concurrency", type=int, help="requests under way at most (default: no limit)")
    add(
        "--warmup-requests",
        type=int,
        default=1,
        help="sent before, not counted (default: %(default)s)",
    )
    add(
        "--flush-cache",
        action="store_true",
        help="have a Strata server forget its prefixes after the warm-up",
    )

    add = parser.add_argument_group("report").add_argument
    add("--output-file", help="write the run as one JSON object")
    add("--disable-progress", action="store_true", help="show no progress bar")
    return parser


def check_args(args: argparse.Namespace) -> None:
    """Raise ``ValueError`` naming the flag for the first argument out of range."""
    lowest = {"num_prompts": 1, "random_input_len": 1, "random_output_len": 1, "shared_prefix_len": 1}
    lowest |= {
        "shared_prefix_groups": 1,
        "sharegpt_output_len": 1,
        "max_concurrency": 1,
        "warmup_requests": 0,
    }
    for name, least in lowest.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}.")
    if not 0.0 <= args.random_range_ratio <= 1.0:
        raise ValueError(f"--random-range-ratio must be in [0, 1], got {args.random_range_ratio}.")
    for name in ("request_rate", "timeout"):
        if not getattr(args, name) > 0.0:
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}.")
    if args.output_file is not None:
        check_output_file(args.output_file)
    if (args.dataset_name == "sharegpt") != (args.dataset_path is not None):
        raise ValueError("--dataset-name sharegpt needs --dataset-path FILE, and no other dataset takes one.")
    if not isinstance(args.extra_request_body, dict):
        raise ValueError("--extra-request-body must be a JSON object.")
    if not args.base_url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url must begin with http:// or https://, got {args.base_url!r}.")
    try:
        httpx.URL(args.base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"--base-url {args.base_url} is no URL: {error}.") from None
