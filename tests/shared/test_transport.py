"""The sockets of each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.v0_1_genesis.managers import io_struct as genesis
from stages.v0_1_genesis.sampling_params import SamplingParams as GenesisParams
from stages.v0_1_genesis.support import transport as genesis_transport

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
