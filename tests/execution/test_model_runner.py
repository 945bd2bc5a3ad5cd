"""ModelRunner on tiny models: every forward mode gives transformers' logits, and pools get their sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stages.v0_1_genesis import CAPABILITIES
from stages.v0_1_genesis.managers.router.infer_batch import ForwardMode
from stages.v0_1_genesis.managers.router.model_runner import InputMetadata
from tests.models.tiny import TINY_MODELS, tiny_llama

from .batches import (
    POOL_SIZE,
    RESERVED,
    forward,
    make_batch,
    new_runner,
    poison,
    prefill,
    prompts,
    reference_logits,
    runner,
    strewn_rows,
)

LENGTHS = [1, 7, 33, 130]


@pytest.fixture(params=sorted(name for name, tiny in TINY_MODELS.items() if tiny.capability in CAPABILITIES))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def last_logits(folder: str, ids: list[list[int]]) -> Tensor:
    return torch.stack([reference_logits(folder, seq)[-1] for seq in ids])


def close(actual: Tensor, expected: Tensor, tolerance: float = 5e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0.0)


def test_prefill_gives_transformers_logits(model: str) -> None:
    ids, folder = prompts(*LENGTHS), str(tiny_llama(model))
    poison(runner(model))
    output = prefill(runner(model), ids, strewn_rows(LENGTHS))
    assert output.next_token_logits.dtype == torch.float32
    assert output.normalized_prompt_logprobs is None
    close(output.next_token_logits, last_logits(folder, ids))


def test_extend_reads_the_prefix_through_the_table(model: str) -> None:
    ids, rows, folder = prompts(*LENGTHS), strewn_rows(LENGTHS), str(tiny_llama(model))
    prefix_lens = [0, 6, 10, 64]  # nothing cached, all but one token, and two in between
    cached = [seq[:prefix] for seq, prefix in zip(ids, prefix_lens, strict=True) if prefix]
    poison(runner(model))
    prefill(runner(model), cached, rows[1:])
    output = forward(runner(model), ForwardMode.EXTEND, ids, prefix_lens, rows)
    close(output.next_token_logits, last_logits(folder, ids))


@pytest.mark.parametrize("contiguous", [True, False])
def test_decode_continues_a_prefill(model: str, contiguous: bool) -> None:
    ids, rows, folder = prompts(*LENGTHS), strewn_rows(LENGTHS), str(tiny_llama(model))
    poison(runner(model))
    prefill(runner(model), ids, rows)
    first = POOL_SIZE - RESERVED
    grown = [[*seq, 5 + i] for i, seq in enumerate(ids)]
    grown_rows = [[*row, first + i] for i, row in enumerate(rows)]
    fields = {"out_cache_cont_start": first, "out_cache_cont_end": first + len(ids)} if contiguous else {}
    output = forward(runner(model), ForwardMode.DECODE, grown, LENGTHS, grown_rows, **fields)
    close(output.next_token_logits, last_logits(folder, grown))


def test_bfloat16_is_near_transformers_in_bfloat16() -> None:
    ids, rows = prompts(*LENGTHS), strewn_rows(LENGTHS)
    half, exact = runner("llama", dtype="bfloat16"), runner("llama")
    assert half.dtype == torch.bfloat16 == half.token_to_kv_pool.k_buffer[0].dtype
    output, expected = prefill(half, ids, rows), prefill(exact, ids, rows)
    error = (output.next_token_logits - expected.next_token_logits).norm() / expected.next_token_logits.norm()
    folder = str(tiny_llama("llama"))
    reference = torch.stack([reference_logits(folder, seq, torch.bfloat16)[-1] for seq in ids])
    reference_error = (reference - expected.next_token_logits).norm() / expected.next_token_logits.norm()
    assert error < 1.5 * reference_error


def test_logprob_of_a_prompt_is_the_same_warm_and_cold() -> None:
    ids, rows, folder = prompts(40, 9), strewn_rows([40, 9]), str(tiny_llama("llama"))
    wanted: dict[str, Any] = {"return_normalized_logprob": True, "normalized_logprob_start_lens": (12, 0)}
    cold = forward(runner(), ForwardMode.PREFILL, ids, [0, 0], rows, **wanted)
    warm = forward(runner(), ForwardMode.EXTEND, ids, [12, 0], rows, **wanted)
    expected = []
    for seq, start in zip(ids, (12, 0), strict=True):
        logprobs = reference_logits(folder, seq)[start:-1].log_softmax(-1)
        expected.append(logprobs.gather(1, torch.tensor(seq[start + 1 :]).unsqueeze(1)).mean())
    assert cold.normalized_prompt_logprobs is not None and warm.normalized_prompt_logprobs is not None
    close(cold.normalized_prompt_logprobs, torch.stack(expected), 1e-4)
    close(warm.normalized_prompt_logprobs, torch.stack(expected), 1e-4)


class NoHostReads(TorchDispatchMode):
    """Fails on what a captured graph would freeze: tensors read on the host, shapes that data decide."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in func.name() for word in self.FORBIDDEN), func.name()
        return func(*args, **(kwargs or {}))


def test_decode_reads_no_tensor_on_the_host() -> None:
    ids, rows = prompts(*LENGTHS), strewn_rows(LENGTHS)
    prefill(runner(), ids, rows)
    batch: Any = make_batch(runner(), ids, [length - 1 for length in LENGTHS], rows)
    metadata = InputMetadata.create(runner(), batch, ForwardMode.DECODE)
    with NoHostReads():
        runner().model(batch.input_ids, batch.positions, metadata)


def test_the_prompt_is_read_once_by_the_head() -> None:
    """Only each request's last token goes through the output head."""
    rows_seen = []
    hook = runner().model.lm_head.register_forward_pre_hook(lambda _, args: rows_seen.append(len(args[0])))
    prefill(runner(), prompts(*LENGTHS), strewn_rows(LENGTHS))
    hook.remove()
    assert rows_seen == [len(LENGTHS)]


def test_pools_have_the_asked_size_and_rows_within_bounds() -> None:
    folder = str(tiny_llama("llama"))
    small = new_runner(folder, max_total_tokens=64)
    assert small.max_total_num_token == 64 == small.token_to_kv_pool.size
    assert small.req_to_token_pool.size == 256
    assert new_runner(folder, context_length=64, max_total_tokens=4096).req_to_token_pool.size == 4096
    assert new_runner(folder, max_total_tokens=None).max_total_num_token == 32768


def test_a_pool_that_can_hold_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "stages.v0_1_genesis.managers.router.model_runner.available_host_memory", lambda: 1000
    )
    with pytest.raises(ValueError, match="--max-total-tokens"):
        new_runner(str(tiny_llama("llama")), max_total_tokens=None)


def test_flashinfer_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="--model-mode flashinfer needs a CUDA device"):
        new_runner(str(tiny_llama("llama")), model_mode=["flashinfer"])
