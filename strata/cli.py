"""The ``strata`` command: parses, calls one function, and turns every user error into one line.

Each command imports what it needs when it runs, so that ``strata --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from .errors import UserError
from .stages import existing_stages

app = typer.Typer(
    help="Three engines from the history of one serving runtime: start them, ask them, compare them.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="The embedded model, SmolLM2-135M-Instruct.", rich_markup_mode=None)
app.add_typer(model_app, name="model")

StageName = Annotated[
    str,
    typer.Argument(metavar="STAGE", help="v0.1, v0.2, v0.3, a folder's name, or latest", show_default=False),
]


@app.command()
def stages() -> None:
    """List the stages of this checkout."""
    for stage in existing_stages():
        typer.echo(f"{stage.key:6}{stage.package:20}{stage.date:15}{stage.summary}")


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def serve(
    ctx: typer.Context,
    stage: Annotated[str, typer.Argument(metavar="STAGE", show_default=False)] = "--help",
) -> None:
    """Start a stage's server: strata serve STAGE [the stage's own flags].

    The embedded model is served unless --model-path names a folder.
    `strata serve STAGE --help` lists the flags.
    """
    if stage in ("--help", "-h"):
        typer.echo(ctx.get_help())
        return
    from .serve import exec_server

    exec_server(stage, ctx.args)


@app.command()
def chat(
    stage: StageName = "latest",
    url: Annotated[str | None, typer.Option(help="talk to a server that runs already")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="STRATA_API_KEY", help="that server's key")] = None,
    model_path: Annotated[str | None, typer.Option(help="model folder instead of the embedded one")] = None,
    system: Annotated[str | None, typer.Option(help="system message")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=10.0, help="0 is greedy")] = 0.0,
) -> None:
    """Chat with a stage; /reset starts over, /exit ends, Ctrl-C stops an answer."""
    from .chat import ChatOptions, run_chat

    run_chat(stage, url, ChatOptions(model_path, api_key, system, max_tokens, temperature))


@app.command()
def tour(
    question: Annotated[str, typer.Option(help="what to ask")] = "What is the capital of France?",
    max_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 64,
) -> None:
    """Start each stage in turn, ask the same question, and show the answers side by side."""
    from .tour import run_tour

    run_tour(question, max_tokens)


@app.command()
def where(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a file of a stage", show_default=False)],
) -> None:
    """Say what a stage's file descends from, and which chapter tells its story."""
    from .lineage.where import where as find

    typer.echo("\n".join(find(file)))


@app.command()
def diff(
    older: StageName,
    newer: StageName,
    what: Annotated[
        str, typer.Argument(metavar="[FILE[::SYMBOL]]", help="a path's end is enough", show_default=False)
    ] = "",
    side_by_side: Annotated[bool, typer.Option("--side-by-side", "-y", help="two columns")] = False,
) -> None:
    """Show what became of each file between two stages, or how one file or symbol changed, and why."""
    from .diff.show import show_place, show_tree
    from .stages import find_stage, in_order

    before, after = in_order(find_stage(older), find_stage(newer))
    if what:
        show_place(before, after, what, side_by_side)
    else:
        show_tree(before, after)


@app.command()
def lines(
    stage: Annotated[str, typer.Argument(metavar="[STAGE]", show_default="all")] = "",
) -> None:
    """Count each file's lines beside those of the upstream file that it retells."""
    from .diff.show import show_lines
    from .stages import find_stage

    show_lines([find_stage(stage)] if stage else existing_stages())


@app.command()
def sync(
    stage: Annotated[str, typer.Argument(metavar="[STAGE]", show_default=False)] = "",
) -> None:
    """Carry uncommitted fixes of one stage into every other stage that has the same lines."""
    from .lineage.sync import run_sync
    from .stages import find_stage

    written = run_sync(find_stage(stage) if stage else None)
    for path in written:
        typer.echo(f"synced {path}")
    if not written:
        typer.echo("no other stage has these lines")


@app.command()
def doctor() -> None:
    """Say what is installed and usable here, and what to run for what is missing."""
    from .doctor import run_doctor

    raise typer.Exit(0 if run_doctor() else 1)


@app.command()
def bench(
    workloads: Annotated[
        list[str] | None,
        typer.Argument(metavar="[stream|steady|static|shared-prefix|prefill|mix]…", show_default="all"),
    ] = None,
    stages: Annotated[str | None, typer.Option(help="comma-separated; every stage by default")] = None,
    model_path: Annotated[Path | None, typer.Option(help="model folder instead of the embedded one")] = None,
    shape: Annotated[
        str | None, typer.Option(help="instead of a model: dummy weights of llama-8b, llama-0.6b or tiny")
    ] = None,
    attention: Annotated[
        str | None,
        typer.Option(
            help="with --shape: comma-separated paths, on CUDA triton,flashinfer by default; +no-cache, +graphs "
            "(CPU) or +no-graphs (CUDA) may follow each"
        ),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option()] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="float32 on the CPU by default, else bfloat16"),
    ] = None,
    load_format: Annotated[Literal["auto", "dummy"], typer.Option(help="dummy needs a config only")] = "auto",
    max_running_requests: Annotated[int | None, typer.Option(min=1, help="the stages' flag")] = None,
    seed: Annotated[int, typer.Option(help="of the prompts and lengths")] = 0,
    quick: Annotated[bool, typer.Option(help="one short round: to see that it works")] = False,
    json: Annotated[Path | None, typer.Option(help="write the whole result to this file")] = None,
) -> None:
    """Measure speed: against transformers' generate in one run, or with --shape the engines alone.

    With a model: steady, static, shared-prefix. With --shape: stream, steady, prefill, mix.
    """
    from .bench.command import run_bench, run_shape_bench
    from .bench.setup import BenchSetup

    dtype = dtype or ("float32" if device == "cpu" else "bfloat16")
    setup = BenchSetup(Path(), (), device, dtype, load_format, seed, quick, max_running_requests)
    names = workloads or []
    if shape is None:
        run_bench(names, stages, model_path, json, setup)
    elif not run_shape_bench(names, stages, shape, attention, json, setup):
        raise typer.Exit(1)


@model_app.command("fetch")
def model_fetch(
    verify: Annotated[bool, typer.Option(help="check every file's hash; make a damaged model anew")] = False,
) -> None:
    """Download the embedded model and convert it, once; prints its folder."""
    from .model_zoo import fetch

    typer.echo(fetch(verify=verify))


@model_app.command("path")
def model_path() -> None:
    """Print the folder of the embedded model, alone on the last line; fetches it first if need be."""
    from .model_zoo import fetch

    typer.echo(fetch())


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    command = typer.main.get_command(app)
    if arguments in ([], ["model"]):
        arguments = [*arguments, "--help"]
    return report_errors(lambda: command.main(arguments, prog_name="strata", standalone_mode=False))


def report_errors(action: Callable[[], object]) -> int:
    """Run ``action`` and return an exit code: 2 for a user's error, 130 for Ctrl-C, 141 for a closed pipe."""
    try:
        code = action()
    except UserError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("", err=True)
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`strata stages | head -1`): nothing is left to say, nor to flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except typer.TyperException as error:
        message = getattr(error, "format_message", error.__str__)().rstrip(".")
        context = getattr(error, "ctx", None)
        return _fail(f"{message}. See: {context.command_path if context else 'strata'} --help")
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    typer.echo(f"strata: {message}", err=True)
    return 2


def main() -> None:
    """Entry point of the ``strata`` command."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
