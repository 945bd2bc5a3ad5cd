"""`strata diff` and `strata lines`, over the stages that exist."""

from __future__ import annotations

import pytest

from strata.diff.lines import OURS, count_lines, upstream_lines
from strata.diff.pairs import pair_files, read_lines
from strata.lineage.compare import python_files
from strata.stages import Stage, existing_stages, find_stage

from .strata_command import strata

GENESIS, CUDAGRAPH = (find_stage(key) for key in ("v0.1", "v0.2"))


def test_every_file_of_both_stages_has_its_fate() -> None:
    pairs = pair_files(GENESIS, CUDAGRAPH)
    assert sorted(pair.newer for pair in pairs if pair.newer) == python_files(CUDAGRAPH)
    assert {pair.older for pair in pairs if pair.older} == set(python_files(GENESIS))
    fates = {pair.path: (pair.older, pair.fate) for pair in pairs}
    controller, router = "managers/controller", "managers/router"
    assert fates[f"{controller}/tp_worker.py"] == (f"{router}/model_rpc.py", "renamed")
    assert fates[f"{controller}/model_runner.py"] == (f"{router}/model_runner.py", "renamed")
    assert fates[f"{controller}/input_metadata.py"] == (f"{router}/model_runner.py", "split")
    assert fates[f"{controller}/cuda_graph_runner.py"] == (None, "added")
    assert fates["layers/context_flashattention_nopad.py"][1] == "removed"
    assert fates["memory_pool.py"] == ("memory_pool.py", "changed")
    assert fates["support/graph_tape.py"] == ("support/graph_tape.py", "unchanged")


def test_counted_lines_are_those_of_a_diff() -> None:
    for pair in pair_files(GENESIS, CUDAGRAPH):
        if pair.older and pair.newer and pair.fate != "split":
            grown = len(read_lines(CUDAGRAPH, pair.newer)) - len(read_lines(GENESIS, pair.older))
            assert pair.lines_added - pair.lines_removed == grown
            assert (pair.fate == "unchanged") <= (pair.lines_added == pair.lines_removed == 0)


def test_a_tree_shows_what_changed_and_counts_the_rest() -> None:
    ran = strata("diff", "v0.2", "v0.1")  # the order is history's, however they are named
    assert ran.code == 0, ran
    assert "from managers/router/model_rpc.py" in ran.out and "unchanged" in ran.out
    assert "support/graph_tape.py" not in ran.out


@pytest.mark.parametrize("name", ["RadixCache.inc_ref_counter", "RadixCache.inc_lock_ref"])
def test_a_renamed_symbol_is_found_by_either_name_and_says_why(name: str) -> None:
    ran = strata("diff", "v0.1", "v0.2", f"radix_cache.py::{name}")
    assert ran.code == 0, ran
    assert ran.out.startswith("# RadixCache.inc_lock_ref renamed: was inc_ref_counter (#418)")
    assert "-    def inc_ref_counter(" in ran.out and "+    def inc_lock_ref(" in ran.out


def test_a_method_of_a_renamed_class_is_found() -> None:
    ran = strata("diff", "v0.1", "v0.2", "tp_worker.py::ModelTpServer.check_memory")
    assert ran.code == 0 and "+    def check_memory(self) -> None:" in ran.out, ran
    ran = strata("diff", "v0.1", "v0.2", "tp_worker.py::ModelTpServer.flush_cache")
    assert ran.code == 0 and "the same in v0.1" in ran.out, ran


def test_two_columns_have_both_stages_line_numbers() -> None:
    ran = strata("diff", "v0.1", "v0.2", "-y", "memory_pool.py::TokenToKVPool.clear")
    assert ran.code == 0, ran
    assert "v0.1 memory_pool.py::TokenToKVPool.clear" in ran.out
    [line] = [line for line in ran.out.splitlines() if "self.mem_state[0] = False" in line]
    source = read_lines(CUDAGRAPH, "memory_pool.py")
    assert str(source.index("        self.mem_state[0] = False") + 1) in line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["v0.1", "v0.1"], "compared with itself"),
        (["v0.1", "v0.2", "memory_pond.py"], "memory_pond.py"),
        (["v0.1", "v0.2", "memory_pool.py::Pond"], "TokenToKVPool"),
        (["v0.1", "v9"], "Choose one of"),
    ],
)
def test_a_user_error_is_one_line(arguments: list[str], says: str) -> None:
    ran = strata("diff", *arguments)
    assert ran.is_one_line_error(), ran
    assert says in ran.err


@pytest.mark.parametrize("stage", existing_stages(), ids=lambda stage: stage.key)
def test_lines_count_every_file_once(stage: Stage) -> None:
    counted = [path for count in count_lines(stage) for path in count.files]
    assert sorted(counted) == python_files(stage)
    history = upstream_lines(stage)
    for count in count_lines(stage):
        assert count.upstream_lines == (None if count.upstream == OURS else history[count.upstream])


def test_lines_are_shown_beside_history_s() -> None:
    ran = strata("lines", "v0.1")
    assert ran.code == 0, ran
    [row] = [line for line in ran.out.splitlines() if "srt/memory_pool.py" in line]
    assert row.split()[1:3] == [
        str(upstream_lines(GENESIS)["python/sglang/srt/memory_pool.py"]),
        str(len(read_lines(GENESIS, "memory_pool.py"))),
    ]
