"""Nodes that meet over real sockets, without models or processes: who is let in, and what the others are told."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from stages.v0_2_cudagraph.managers.controller.node_link import NodeLink, gather_nodes, join_node_0
from stages.v0_2_cudagraph.managers.io_struct import NodeReady, NodeWelcome
from stages.v0_2_cudagraph.server_args import ServerArgs
from stages.v0_2_cudagraph.support.processes import StartError
from strata.adapters import free_port
from tests.models.tiny import tiny_llama


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def node(rank: int, address: str, **fields: object) -> ServerArgs:
    args = ServerArgs(str(tiny_llama("llama")), tp_size=6, nnodes=3, node_rank=rank, dist_timeout=20)
    return replace(args, nccl_init_addr=address, **fields)  # type: ignore[arg-type]


def new_address() -> str:
    return f"127.0.0.1:{free_port()}"


def ended(waiting: Future[tuple[NodeLink, int]]) -> str:
    with pytest.raises(StartError) as error:
        waiting.result(20)
    return str(error.value)


def test_three_nodes_meet_in_any_order(pool: ThreadPoolExecutor) -> None:
    """All get node 0's seed; afterwards a message or an end is noticed on the other side."""
    address = new_address()
    others = [pool.submit(join_node_0, node(rank, address)) for rank in (2, 1)]
    links = gather_nodes(node(0, address))
    assert {rank: link.name for rank, link in links.items()} == {1: "node 1", 2: "node 2"}
    for link in links.values():
        link.send(NodeWelcome(7))
    (second, seed), (first, also_seed) = (other.result(20) for other in others)
    assert seed == also_seed == 7
    first.send(NodeReady())
    assert links[1].receive(20) == NodeReady()
    first.close()
    assert links[1].receive(20) is None
    links[2].close()
    assert second.receive(20) is None
    links[1].close()
    second.close()


def test_a_node_that_is_started_anew_takes_its_place(pool: ThreadPoolExecutor) -> None:
    address = new_address()
    gathering = pool.submit(gather_nodes, node(0, address))
    earlier = pool.submit(join_node_0, node(1, address))
    with pytest.raises(TimeoutError):
        earlier.result(0.5)
    later = pool.submit(join_node_0, node(1, address))
    assert "another node 1 has come" in ended(earlier)
    last = pool.submit(join_node_0, node(2, address))
    for link in gathering.result(20).values():
        link.send(NodeWelcome(0))
        link.close()
    for waiting in (later, last):
        waiting.result(20)[0].close()


@pytest.mark.slow
def test_a_node_with_another_model_or_place_is_refused(pool: ThreadPoolExecutor, tmp_path: Path) -> None:
    """The same flags, another config.json; or a rank that is none."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama("llama"), folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    address = new_address()
    gathering = pool.submit(gather_nodes, node(0, address, dist_timeout=3))
    other_model = pool.submit(join_node_0, node(1, address, model_path=str(folder)))
    assert "config.json is" in ended(other_model)
    elsewhere = shutil.copytree(tiny_llama("llama"), tmp_path / "elsewhere")
    same_model = pool.submit(join_node_0, node(2, address, model_path=str(elsewhere), log_level="error"))
    assert "--node-rank 0 is none" in ended(pool.submit(join_node_0, node(0, address)))
    # Who was let in hears why nothing comes of it.
    reason = f"node 1 did not come to {address} within 3 s"
    assert reason in ended(same_model)
    with pytest.raises(StartError, match=reason):
        gathering.result(20)


def test_an_address_that_can_not_be_had_is_named(pool: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"--nccl-init-addr {address} can't be listened at"):
            gather_nodes(node(0, address))
    with pytest.raises(StartError, match=r"node 0 did not answer at host\.invalid:5000 within 1 s"):
        join_node_0(node(1, "host.invalid:5000", dist_timeout=1))
