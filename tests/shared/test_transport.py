"""The sockets of each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.v0_1_genesis.managers import io_struct as genesis
from stages.v0_1_genesis.sampling_params import SamplingParams as GenesisParams
from stages.v0_1_genesis.support import transport as genesis_transport
from stages.v0_2_cudagraph.managers import io_struct as cudagraph
from stages.v0_2_cudagraph.sampling_params import SamplingParams as CudaGraphParams
from stages.v0_2_cudagraph.support import transport as cudagraph_transport

from .contracts.transport import Ring, TransportContract


class GenesisRing:
    def __init__(self) -> None:
        self.unions: dict[str, Any] = {
            "router": genesis.EngineInput,
            "detokenizer": genesis.DetokenizerInput,
            "tokenizer": genesis.TokenizerManagerInput,
        }
        params = GenesisParams(stop=["a", "中"], logit_bias={3: 0.5}, temperature=0.25, seed=-7)
        control = genesis.ControlOut("c", {"success": True, "size": 3})
        finish = [None, {"type": "length", "length": 3}]
        meta: list[dict[str, Any]] = [{"prompt_tokens": 3}, {}]
        self.messages: dict[str, list[Any]] = {
            "router": [
                genesis.TokenizedGenerateReqInput("r", [1, 2, 3], params, True),
                genesis.AbortReq("r"),
                genesis.FlushCacheReq("f"),
                genesis.GetInternalStateReq("g"),
            ],
            "detokenizer": [
                genesis.BatchTokenIDOut(
                    ["a", "b"], [[1], []], [[], ["x"]], [True, False], meta, list(finish)
                ),
                control,
            ],
            "tokenizer": [genesis.BatchStrOut(["a", "b"], ["é🤗", ""], meta, list(finish)), control],
        }

    def new_folder(self) -> Path:
        return genesis_transport.new_socket_dir()

    def sender(self, endpoint: str) -> Any:
        return genesis_transport.Sender(endpoint)

    def receiver(self, endpoint: str, union: str) -> Any:
        return genesis_transport.Receiver(endpoint, self.unions[union])


class TestGenesisTransport(TransportContract):
    stage = "v0.1"

    @staticmethod
    def make_ring() -> Ring:
        return GenesisRing()


class CudaGraphRing:
    def __init__(self) -> None:
        self.unions: dict[str, Any] = {
            "controller": cudagraph.EngineInput,
            "controller of replicas": cudagraph.ControllerMultiInput,
            "detokenizer": cudagraph.DetokenizerInput,
            "tokenizer": cudagraph.TokenizerManagerInput,
            "nodes": cudagraph.NodeMessage,
        }
        params = CudaGraphParams(stop=["a", "中"], logit_bias={3: 0.5}, temperature=0.25, seed=-7)
        control = cudagraph.ControlOut("c", {"success": True, "size": 3})
        finish = [None, {"type": "length", "length": 3}]
        meta: list[dict[str, Any]] = [{"prompt_tokens": 3}, {}]
        scores = [(None, 5), (-0.25, 6)]
        logprobs = [cudagraph.Logprobs([*scores], [None, [*scores]], [(-1.5, 7)], [[(-1.5, 7)]], -0.25), None]
        tokens = cudagraph.BatchTokenIDOut(
            rids=["a", "b"],
            vids=[0, 2],
            decoded_texts=["", "é🤗"],
            output_tokens=[[1], []],
            stop_strs=[[], ["x"]],
            skip_special_tokens=[True, False],
            meta_info=meta,
            logprobs=logprobs,
            finish_reason=list(finish),
        )
        requests: list[Any] = [
            cudagraph.TokenizedGenerateReqInput("r", [1, 2, 3], params, True, True, 2, 5),
            cudagraph.AbortReq("r"),
            cudagraph.FlushCacheReq("f"),
            cudagraph.GetInternalStateReq("g"),
        ]
        self.messages: dict[str, list[Any]] = {
            "controller": requests,
            "controller of replicas": [*requests, tokens, control],
            "detokenizer": [tokens, control],
            "tokenizer": [
                cudagraph.BatchStrOut(["a", "b"], ["é🤗", ""], meta, logprobs, list(finish)),
                control,
            ],
            "nodes": [
                cudagraph.NodeHello(1, {"tp_size": 2}),
                cudagraph.NodeWelcome(7),
                cudagraph.NodeReady(),
                cudagraph.NodeFailed("no memory"),
            ],
        }

    def new_folder(self) -> Path:
        return cudagraph_transport.new_socket_dir()

    def sender(self, endpoint: str) -> Any:
        return cudagraph_transport.Sender(endpoint)

    def receiver(self, endpoint: str, union: str) -> Any:
        return cudagraph_transport.Receiver(endpoint, self.unions[union])


class TestCudaGraphTransport(TransportContract):
    stage = "v0.2"

    @staticmethod
    def make_ring() -> Ring:
        return CudaGraphRing()
